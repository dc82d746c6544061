"""``chimsim live``: a trace replayed on running engines, policy by policy.

It parses, shows the load and prints; `chimsim.live.experiment` runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from chimsim.errors import ChimsimError, near
from chimsim.grid import plan
from chimsim.options import (
    AheadOpt,
    ArrivalsOpt,
    BurstOpt,
    DeltaOpt,
    GoodputOpt,
    KnobOpt,
    LengthOpt,
    LengthPredictorOpt,
    MapOpt,
    OversizeOpt,
    PolicyOpt,
    QueueOpt,
    RankOpt,
    RouterOpt,
    RpsOpt,
    SeedsOpt,
    SlotsOpt,
    SpecFile,
    TauOpt,
    TraceOpt,
    WarmupOpt,
    WorkflowsOpt,
    command_line,
    given_options,
    note,
    resolve,
)
from chimsim.plots import draw
from chimsim.report import summary_table
from chimsim.sweeps import Interrupted

if TYPE_CHECKING:
    from chimsim.live.driver import LiveReplay
    from chimsim.live.experiment import LiveCell, Watch

_OWN = ("repeat", "workload", "max_tokens", "inactivity", "launch")


def live_command(
    spec: SpecFile = None,
    trace: TraceOpt = None,
    cluster: Annotated[str | None, typer.Option("--cluster", help="Cluster TOML whose engines have a url.")] = None,
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
    queue: QueueOpt = None,
    look_ahead: AheadOpt = None,
    oversize: OversizeOpt = None,
    slots: SlotsOpt = None,
    goodput: GoodputOpt = None,
    repeat: Annotated[int, typer.Option(min=1, help="Replay everything so often, to see how far runs scatter.")] = 1,
    workload: Annotated[
        str, typer.Option(help="lengths: prompts made to the trace's lengths; text: the trace's own prompts.")
    ] = "lengths",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer with --workload text.")] = None,
    inactivity: Annotated[
        float, typer.Option(min=0.1, help="Seconds without a byte after which an engine hangs.")
    ] = 120.0,
    launch: Annotated[bool, typer.Option("--launch", help="Start the engines with the file's launch = ...")] = False,
    out: Annotated[Path | None, typer.Option(help="Results folder; a started one is gone on with.")] = None,
    figures: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw the frontier and the queues.")] = True,
) -> None:
    """Replay a trace on running vLLM engines, through the same policies as a sweep.

    \b
    chimsim live --cluster live.toml --trace apps --policy fcfs,stjf,chimera \\
        --rps 2 --limit 200 --out results/live
    chimsim live --cluster live.toml --launch --trace apps --policy chimera --tau 0.5,1 \\
        --rps 2 --limit 200 --repeat 2 --out results/live2
    chimsim validate --live results/live        # how far off was the simulator?

    In live.toml every [[engine]] has url = "http://host:port" (and, if they differ, served_model, api_key_env).
    Cells run one after the other; interrupted, the same command goes on where it stopped.
    """
    given = {name: value for name, value in given_options(locals()).items() if name not in _OWN}
    from chimsim.live.experiment import WORKLOADS, Workload, live_cells, run_live

    if workload not in WORKLOADS:
        raise ChimsimError(
            f"--workload: {workload!r} is unknown; choose from {', '.join(WORKLOADS)}{near(workload, WORKLOADS)}"
        )
    resolved = resolve(spec, given)
    if resolved.fail or resolved.slow:
        raise ChimsimError("fail and slow are of the simulated cluster; leave them out of a live run")
    if len(resolved.cluster) != 1 or resolved.combo:
        raise ChimsimError("live needs one --cluster file, whose engines have a url")
    if out is None:
        raise ChimsimError("--out is missing: the folder for the results, say --out results/live")
    found, manifest = plan(resolved)
    cells = live_cells(found, repeat, cast("Workload", workload), max_tokens)
    with _load(len(cells)) as watch:
        try:
            results = run_live(
                cells, manifest, out, launch=launch, inactivity_s=inactivity, command=tuple(command_line()), say=note,
                watch=watch,
            )  # fmt: skip
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; finished cells are kept in {out}; the same command goes on") from None
    typer.echo(summary_table(results.summary))
    files = [out / "summary.csv"]
    if figures:
        files += draw(results, ("frontier", "queue"))
    typer.echo("\nwritten: " + ", ".join(str(path) for path in files))


@contextlib.contextmanager
def _load(total: int) -> Iterator[Watch | None]:
    """A table of the engines' load that changes as they work, on stderr if that is a terminal."""
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    seen: dict[str, Any] = {"cells": [], "tokens": {}, "at": 0.0}

    def show(live: Live) -> Callable[[LiveCell, LiveReplay], None]:
        def watch(cell: LiveCell, replay: LiveReplay) -> None:
            if cell not in seen["cells"]:
                seen["cells"].append(cell)
                seen["tokens"], seen["at"] = {}, 0.0
            done, all_ = replay.progress
            title = f"cell {len(seen['cells'])} of {total}: {cell.cell.title}, {done} of {all_} workflows"
            table = Table(title=title, title_justify="left", box=None)
            for column in ("engine", "running", "waiting", "in-flight tokens", "tokens", "tokens/s"):
                table.add_column(column, justify="left" if column == "engine" else "right")
            now = replay.now()
            for name, running, waiting, in_flight, tokens in replay.loads():
                elapsed_s = now - seen["at"]
                rate = (tokens - seen["tokens"].get(name, 0)) / elapsed_s if elapsed_s > 0 else 0.0
                table.add_row(name, str(running), str(waiting), f"{in_flight:,}", f"{tokens:,}", f"{rate:,.0f}")
                seen["tokens"][name] = tokens
            seen["at"] = now
            live.update(table)

        return watch

    with Live(console=console, transient=True, auto_refresh=True) as live:
        yield show(live)
