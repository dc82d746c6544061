"""The command line: parse, call, print. Results go to stdout, progress and diagnostics to stderr.

Whatever is wrong with the input is one line ``chimsim: error: ...`` and exit code 2; CHIMSIM_DEBUG=1 shows
the traceback instead.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import MofNCompleteColumn, TextColumn

import calibration
import chimsim
import policies as policies_package
import traces
from calibration.profile import ProfileError
from calibration.rows import TrainingError
from calibration.saved import ModelError
from chimsim.calibrate_cli import calibrate_app
from chimsim.capacity_cli import capacity_command
from chimsim.collect_cli import collect_command
from chimsim.compare_cli import compare_command
from chimsim.errors import ChimsimError
from chimsim.explain_cli import explain_command
from chimsim.frontier_cli import frontier_command
from chimsim.grid import Cell, plan, warnings_of
from chimsim.live_run_cli import live_command
from chimsim.measure_cli import register as add_measuring
from chimsim.mock_cli import mock_engine_command
from chimsim.options import (
    AddressOpt,
    AheadOpt,
    ArrivalsOpt,
    BackendOpt,
    BurstOpt,
    ClusterOpt,
    ComboOpt,
    DeltaOpt,
    EnginesOpt,
    FailOpt,
    GoodputOpt,
    KnobOpt,
    LengthOpt,
    LengthPredictorOpt,
    MapOpt,
    OversizeOpt,
    PartOpt,
    PolicyOpt,
    PredictorSOpt,
    QueueOpt,
    RankOpt,
    RouterOpt,
    RouterSOpt,
    RpsOpt,
    SeedOpt,
    SeedsOpt,
    SeqsOpt,
    SlotsOpt,
    SlowOpt,
    SpecFile,
    SplitOpt,
    TauOpt,
    TraceOpt,
    WarmupOpt,
    WorkersOpt,
    WorkflowsOpt,
    command_line,
    given_options,
    note,
    note_incomplete,
    resolve,
)
from chimsim.plots import FORMATS, KINDS, LATENCIES, STYLES, draw
from chimsim.predictor_cli import predictor_app
from chimsim.profiles_cli import profiles_command
from chimsim.progress import progress_bar
from chimsim.report import run_tables, summary_table, warnings
from chimsim.report_cli import report_command
from chimsim.reproduce_cli import reproduce_command
from chimsim.results import Results, ordered_json_bytes
from chimsim.router_cli import router_app
from chimsim.serve_cli import serve_command
from chimsim.spec import scalar_text
from chimsim.sweeps import Interrupted, Progress, run_cell, run_sweep
from chimsim.timeline import check_timeline, write_timeline
from chimsim.trace_cli import trace_app
from chimsim.training_cli import listed
from chimsim.tune_cli import tune_command
from chimsim.validate_cli import validate_command
from chimsim.watch import Watch
from policies import POLICIES, PolicyError
from policies import knobs as knobs_of
from traces import TraceError

INTERRUPTED = 130
LONGEST_MESSAGE = 900
"""Characters of an error; of a longer one the beginning and the end are printed."""

app = typer.Typer(
    help="Simulate mixed vLLM clusters that serve multi-stage agent workflows.\n\n"
    "Start with: chimsim sweep experiments/fig5.toml --out results/first",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.add_typer(trace_app, name="trace")
app.add_typer(predictor_app, name="predictor")
app.add_typer(router_app, name="router")
add_measuring(calibrate_app)
app.add_typer(calibrate_app, name="calibrate")
app.command("profiles")(profiles_command)
app.command("capacity")(capacity_command)
app.command("tune")(tune_command)
app.command("frontier")(frontier_command)
app.command("compare")(compare_command)
app.command("explain")(explain_command)
app.command("reproduce")(reproduce_command)
app.command("report")(report_command)
app.command("validate")(validate_command)
app.command("live")(live_command)
app.command("serve")(serve_command)
app.command("collect")(collect_command)
app.command("mock-engine")(mock_engine_command)


@app.command()
def sweep(
    spec: SpecFile = None,
    trace: TraceOpt = None,
    combo: ComboOpt = None,
    cluster: ClusterOpt = None,
    policy: PolicyOpt = None,
    rps: RpsOpt = None,
    tau: TauOpt = None,
    delta_s: DeltaOpt = None,
    knob: KnobOpt = None,
    seeds: SeedsOpt = None,
    workflows: WorkflowsOpt = None,
    warmup: WarmupOpt = None,
    burstiness: BurstOpt = None,
    arrivals: ArrivalsOpt = None,
    router: RouterOpt = None,
    router_map: MapOpt = None,
    length_predictor: LengthPredictorOpt = None,
    length_error: LengthOpt = None,
    rank_predictor: RankOpt = None,
    router_s: RouterSOpt = None,
    predictor_s: PredictorSOpt = None,
    queue: QueueOpt = None,
    look_ahead: AheadOpt = None,
    oversize: OversizeOpt = None,
    split: SplitOpt = None,
    part: PartOpt = None,
    slots: SlotsOpt = None,
    engines: EnginesOpt = None,
    max_num_seqs: SeqsOpt = None,
    fail: FailOpt = None,
    slow: SlowOpt = None,
    goodput: GoodputOpt = None,
    workers: WorkersOpt = None,
    backend: BackendOpt = None,
    address: AddressOpt = None,
    out: Annotated[Path | None, typer.Option(help="Results folder; a started one is gone on with.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the grid and its size, run nothing.")] = False,
    figures: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw the frontier and the queues.")] = True,
) -> None:
    """Run a grid of simulations into a results folder.

    \b
    chimsim sweep experiments/fig5.toml --out results/first
    chimsim sweep --trace apps --combo qwen1.5b+7b --policy fcfs,stjf,chimera \\
        --rps 8,12 --tau 0,0.5,1,inf --slots 64 --seeds 3 --workers 2 --out results/x
    chimsim sweep experiments/fig5.toml --rps 16 --dry-run
    chimsim sweep experiments/fig5.toml --backend ray --address auto --out results/first
    chimsim sweep experiments/fig5.toml --backend dask --address tcp://10.0.0.1:8786 --out results/first

    Comma lists multiply; parameters that a policy does not have do not multiply its cells. Interrupted or
    killed, the same command goes on where it stopped. A cell whose worker was killed is run again. The results
    are the same bytes whoever runs the cells; ray and dask are extras, for clusters.
    """
    options = given_options(locals())
    resolved = resolve(spec, options)
    planned = plan(resolved)
    if dry_run:
        _print_grid(planned[0])
        return
    if out is None:
        raise ChimsimError("--out is missing: the folder for the results, say --out results/first")
    _warn(planned[0])
    with _progress() as report:
        results = run_sweep(resolved, out, progress=report, command=command_line(), planned=planned)
    summary = results.summary
    typer.echo(summary_table(summary))
    for warning in warnings(summary):
        note(f"warning: {warning}")
    files = [out / "summary.csv"]
    if figures:
        files += draw(results, ("frontier", "queue"))
    typer.echo("\nwritten: " + ", ".join(str(path) for path in files))


@app.command()
def run(
    spec: SpecFile = None,
    trace: TraceOpt = None,
    combo: ComboOpt = None,
    cluster: ClusterOpt = None,
    policy: PolicyOpt = None,
    rps: RpsOpt = None,
    tau: TauOpt = None,
    delta_s: DeltaOpt = None,
    knob: KnobOpt = None,
    seed: SeedOpt = None,
    workflows: WorkflowsOpt = None,
    warmup: WarmupOpt = None,
    burstiness: BurstOpt = None,
    arrivals: ArrivalsOpt = None,
    router: RouterOpt = None,
    router_map: MapOpt = None,
    length_predictor: LengthPredictorOpt = None,
    length_error: LengthOpt = None,
    rank_predictor: RankOpt = None,
    router_s: RouterSOpt = None,
    predictor_s: PredictorSOpt = None,
    queue: QueueOpt = None,
    look_ahead: AheadOpt = None,
    oversize: OversizeOpt = None,
    split: SplitOpt = None,
    part: PartOpt = None,
    slots: SlotsOpt = None,
    engines: EnginesOpt = None,
    max_num_seqs: SeqsOpt = None,
    fail: FailOpt = None,
    slow: SlowOpt = None,
    goodput: GoodputOpt = None,
    out: Annotated[Path | None, typer.Option(help="Also keep the records, as a results folder.")] = None,
    timeline: Annotated[Path | None, typer.Option(help="Also a file for ui.perfetto.dev: x.json, x.json.gz")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Configuration and metrics as JSON.")] = False,
) -> None:
    """Run one simulation and print its metrics, engines and stages.

    \b
    chimsim run --trace apps --combo qwen1.5b+7b --policy chimera --tau 1 --rps 8
    chimsim run --trace apps --combo qwen7b --policy fcfs --rps 4 --json > run.json
    chimsim run --trace apps --combo qwen7b --policy fcfs --rps 4 --timeline fcfs.json.gz
    chimsim run experiments/fig5.toml --policy stjf --rps 12 --seed 1
    """
    options = given_options(locals())
    if timeline is not None:
        check_timeline(timeline)
    chosen = options.pop("seed", None)
    options["seeds"] = [chosen] if chosen is not None else [0]
    resolved = resolve(spec, options)
    planned = plan(resolved)
    if len(planned[0]) != 1:
        raise ChimsimError(
            f"run takes one cell, these options make {len(planned[0])} ({_varying(planned[0])} vary); "
            "give one value each, or use chimsim sweep"
        )
    cell = planned[0][0]
    _warn(planned[0])
    if out is not None:
        results = run_sweep(resolved, out, command=command_line(), planned=planned)
        requests, engine_rows = (results.table(cell.name, name) for name in ("requests", "engines"))
        summary = results.cell_summary(cell.name)
    if out is None or timeline is not None:
        watch = Watch() if timeline is not None else None
        result, summary = run_cell(cell, watch)
        requests, engine_rows = result.requests, result.engines
        if watch is not None and timeline is not None:
            note(write_timeline(result, watch, timeline))
    if as_json:
        typer.echo(ordered_json_bytes({"config": cell.config, "metrics": summary}).decode(), nl=False)
    else:
        typer.echo(run_tables(requests, engine_rows, summary, cell.title))


@app.command()
def plot(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Results folder of a sweep.")],
    kind: Annotated[str, typer.Option(help=f"Figures: {','.join(KINDS)}")] = ",".join(KINDS),
    latency: Annotated[str, typer.Option(help=f"Latency of the frontier: {', '.join(LATENCIES)}")] = "mean",
    style: Annotated[str, typer.Option(help=f"Look: {', '.join(STYLES)}; a paper's go to DIR/paper.")] = "screen",
    formats: Annotated[
        str, typer.Option("--format", help=f"Of {','.join(FORMATS)}; default png,svg, for a paper pdf,svg.")
    ] = "",
    width: Annotated[float | None, typer.Option(help="Inches; a paper's column is 3.5, both are 7.16.")] = None,
    height: Annotated[float | None, typer.Option(help="Inches; default: by the number of panels.")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Also the numbers drawn (a paper's always).")] = False,
    trace: Annotated[str | None, typer.Option(help="Only these traces, a comma list.")] = None,
    combo: Annotated[str | None, typer.Option(help="Only these combinations.")] = None,
    rps: Annotated[str | None, typer.Option(help="Only these rates.")] = None,
    policy: Annotated[str | None, typer.Option(help="Only these policies, by their labels.")] = None,
) -> None:
    """Draw the figures of a results folder into it.

    \b
    chimsim plot results/first
    chimsim plot results/first --kind frontier --latency p99 --format pdf
    chimsim plot results/first --style paper --kind frontier --trace apps --rps 8 --width 3.5

    Figures for a paper have embedded fonts of 7 to 8 points at the size given, and beside them the numbers drawn.
    """
    results = Results(folder)
    note_incomplete(results)
    kinds = listed(kind)
    chosen = {"trace": trace, "combo": combo, "rps": rps, "policy": policy}
    files = draw(
        results, kinds, latency=latency, formats=listed(formats), style=style, width_in=width, height_in=height,
        csv=csv, only={axis: listed(text) for axis, text in chosen.items() if text},
    )  # fmt: skip
    for path in files:
        typer.echo(str(path))
    if "frontier" in kinds and not any(path.name.startswith("frontier") for path in files):
        note("note: no frontier: the trace has no solved labels")


@app.command("policies")
def list_policies(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """List the policies and their knobs.

    \b
    chimsim policies
    chimsim policies --json
    """
    rows = []
    for name, policy in POLICIES.items():
        first = (policy.__doc__ or "").strip().splitlines()
        knobs = [{"name": k.name, "default": k.default, "doc": k.doc} for k in knobs_of(policy)]
        rows.append({"policy": name, "doc": first[0] if first else "", "reads": sorted(policy.reads), "knobs": knobs})
    if as_json:
        typer.echo(ordered_json_bytes({"policies": rows}).decode(), nl=False)
        return
    for row in rows:
        typer.echo(_hanging(f"{row['policy']:<11}{row['doc']}", 11))
        for knob in _records(row["knobs"]):
            typer.echo(_hanging(f"           {knob['name']}={knob['default']}  {knob['doc']}", 15))


def _records(value: Any) -> list[dict[str, Any]]:
    return list(value)


def _hanging(text: str, indent: int) -> str:
    lead = text[: len(text) - len(text.lstrip())]
    return textwrap.fill(text.strip(), width=80, initial_indent=lead, subsequent_indent=" " * indent)


def _warn(cells: list[Cell]) -> None:
    for warning in warnings_of(cells):
        note(f"warning: {warning}")


def _varying(cells: list[Cell]) -> str:
    names = [name for name in cells[0].axes if len({cell.axes[name] for cell in cells}) > 1]
    return ", ".join(names)


def _print_grid(cells: list[Cell]) -> None:
    """What would run: the values of every axis, then the number of cells of each policy."""
    shown: dict[str, list[str]] = {}
    for cell in cells:
        for name, value in cell.axes.items():
            text = scalar_text(value)
            if text not in shown.setdefault(name, []):
                shown[name].append(text)
    for name, values in shown.items():
        if values != ["-"]:
            typer.echo(_hanging(f"{name:<14}{', '.join(values)}", 14))
    counts: dict[str, int] = {}
    for cell in cells:
        counts[str(cell.axes["policy"])] = counts.get(str(cell.axes["policy"]), 0) + 1
    typer.echo(_hanging("cells         " + ", ".join(f"{name} {count}" for name, count in counts.items()), 14))
    distinct = len({cell.name for cell in cells})
    typer.echo(f"{distinct} cells in all")


@contextlib.contextmanager
def _progress() -> Iterator[Progress | None]:
    """A bar on stderr if that is a terminal; the callback that a sweep reports to."""
    with progress_bar(MofNCompleteColumn(), TextColumn("cells")) as update:
        if update is None:
            yield None
        else:
            yield lambda done, total, cell, forecast: update(
                done, total, cell.title if cell is not None else "", forecast
            )


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"chimsim {chimsim.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Simulate mixed vLLM clusters that serve multi-stage agent workflows."""


def check_packages() -> None:
    """Refuse packages of the same names that are not ours: they would decide something else in silence."""
    home = Path(chimsim.__file__).resolve().parent.parent
    for package in (policies_package, traces, calibration):
        place = Path(str(package.__file__)).resolve().parent
        if place.parent != home:
            raise ChimsimError(
                f"the package {package.__name__!r} found is {place}, not chimsim's own in {home}; "
                "remove it from the path, or install chimsim into an environment of its own"
            )


def main() -> None:
    """Entry of the command ``chimsim``: run it, and turn what is wrong into one line and an exit code."""
    if os.environ.get("CHIMSIM_DEBUG"):
        check_packages()
        app(prog_name="chimsim")
    try:
        check_packages()
        code = app(standalone_mode=False, prog_name="chimsim")
        if code == INTERRUPTED:
            # Typer makes a bare exit code of Ctrl-C
            code = _fail("interrupted", INTERRUPTED)
    except Interrupted as stopped:
        code = _fail(str(stopped), INTERRUPTED)
    except KeyboardInterrupt:
        code = _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # whoever read our output has seen enough; the interpreter must not try to flush it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except (ChimsimError, TraceError, PolicyError, ProfileError, TrainingError, ModelError) as error:
        code = _fail(str(error), 2)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "no space left on the device" if full else (error.strerror or str(error)).lower()
        code = _fail(f"{error.filename}: {what}" if error.filename else what, 2)
    except Exception as error:
        # Typer's own exceptions have no public base class in all of its versions
        if not hasattr(error, "format_message"):
            if type(error).__name__ == "Abort":
                sys.exit(_fail("aborted", 130))
            raise
        message = str(error.format_message()).strip()
        if not message:
            # the help was shown because nothing was asked for
            sys.exit(getattr(error, "exit_code", 2))
        code = _fail(message, 2)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> int:
    # what a file says may be long, or mean something to a terminal
    text = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(message.split()))
    if len(text) > LONGEST_MESSAGE:
        text = f"{text[:600]} ... {text[-250:]}"
    sys.stderr.write(f"chimsim: error: {text}\n")
    return code
