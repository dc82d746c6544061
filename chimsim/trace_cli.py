"""The `chimsim trace` commands: describe, validate, import, export, generate, scale and convert traces.

Tables and JSON go to stdout, remarks to stderr. Wrong input raises `traces.TraceError`, which the caller
reports.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from traces import Trace, TraceError, load_trace, write_trace
from traces.arrivals import poisson
from traces.columns import columns_of
from traces.describe import ModelSummary, arrival_rate, summarize
from traces.files import trace_suffix
from traces.parameters import LAYOUTS, load_parameters
from traces.readers import READERS, import_trace
from traces.readers.call import UNITS_NS
from traces.scale import scaled
from traces.schema import near
from traces.synthetic import generate
from traces.writers import WRITERS, export_trace

trace_app = typer.Typer(
    help="Describe, check, import, export, generate, scale and convert traces.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_TABLE_NOTE = """output: mean tokens of a whole workflow; median, p99, std: of the same
prompt: mean tokens of a call; reuse: share of them that the previous stage left"""


@trace_app.command()
def describe(
    trace: Annotated[str, typer.Argument(help="A shipped trace (apps, maths) or a trace file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print what a trace holds, a row a model.

    Example: chimsim trace describe apps
    """
    loaded = load_trace(trace)
    summaries = summarize(loaded)
    rate = arrival_rate(loaded)
    workloads = sorted({workflow.workload for workflow in loaded.workflows})
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "name": loaded.name,
                    "sha256": loaded.digest,
                    "workflows": len(loaded.workflows),
                    "workloads": workloads,
                    "arrivals_per_s": rate,
                    "models": [asdict(summary) for summary in summaries],
                },
                indent=2,
            )
        )
        return
    arrivals = "no arrival times" if loaded.workflows[0].arrival_s is None else "recorded arrivals"
    if rate is not None:
        arrivals += f", {rate:.3g} workflows/s"
    typer.echo(f"{loaded.name}: {len(loaded.workflows)} workflows of {', '.join(workloads)}; {arrivals}")
    typer.echo(f"sha256 {loaded.digest}")
    Console(width=80).print(_table(summaries))
    typer.echo(_TABLE_NOTE)


@trace_app.command()
def validate(trace: Annotated[str, typer.Argument(help="A shipped trace or a trace file.")]) -> None:
    """Check a trace file: exit code 0 and a line of counts, or 2 and the first error.

    Example: chimsim trace validate my.jsonl.gz
    """
    loaded = load_trace(trace)
    columns = columns_of(loaded)
    models = columns.models
    calls = sum(int(columns.runs(model).starts[-1]) for model in models)
    timed = "with" if loaded.workflows[0].arrival_s is not None else "without"
    count = f"{len(loaded.workflows)} workflows, {calls} calls, {timed} arrival times"
    typer.echo(f"ok: {count}, models {', '.join(models)}")


@trace_app.command(name="import")
def import_(
    source: Annotated[Path, typer.Argument(help="The public trace file (plain or gzip).")],
    format: Annotated[str, typer.Option("--format", help=f"One of {', '.join(READERS)}.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The trace file: .jsonl, .jsonl.gz or .parquet.")],
    model: Annotated[
        str | None,
        typer.Option("--model", help="Model names, comma-separated: all get the same lengths. Default: the file's."),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Only so many workflows from the front.")] = None,
    time_unit: Annotated[
        str | None, typer.Option("--time-unit", help=f"{', '.join(UNITS_NS)}: if the file's is not the format's.")
    ] = None,
    block_tokens: Annotated[
        int, typer.Option("--block-tokens", help="Tokens a hash id stands for, where the file does not say.")
    ] = 512,
) -> None:
    """Turn a public trace into a trace file, at its recorded times.

    Calls become workflows of one stage, conversations chains, and what says who waits for whom graphs.

    Example: chimsim trace import calls.csv --format azure --model Qwen2.5-7B -o azure.jsonl.gz
    """
    trace_suffix(out)
    _not_itself(source, out)
    models = [name.strip() for name in model.split(",")] if model is not None else []
    imported = import_trace(source, format, models, limit, time_unit, block_tokens)
    trace = imported.trace
    write_trace(trace, out)
    names = trace.models
    calls = sum(len(workflow.runs[names[0]].stages) for workflow in trace.workflows)
    typer.echo(f"{out}: {len(trace.workflows)} workflows, {calls} calls, models {', '.join(names)}")
    _say(
        f"note: {format} does not say {READERS[format].lacks}, nor who solved what: every model has the same lengths "
        "and no label"
    )
    for note in imported.notes:
        _say(f"note: {note}")


@trace_app.command()
def export(
    trace: Annotated[str, typer.Argument(help="A shipped trace or a trace file.")],
    format: Annotated[str, typer.Option("--format", help=f"One of {', '.join(WRITERS)}.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file, JSON Lines: .jsonl or .jsonl.gz.")],
    model: Annotated[
        str | None, typer.Option("--model", help="Whose runs; needed where the trace has several models.")
    ] = None,
    block_tokens: Annotated[int, typer.Option("--block-tokens", help="Tokens a hash id stands for.")] = 512,
    rps: Annotated[
        float | None, typer.Option("--rps", help="Poisson arrivals at this rate instead of the trace's own.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of those arrivals.")] = 0,
) -> None:
    """Write one model's runs for other tools: as Mooncake's rows, or with Dynamo's graphs of calls.

    Example: chimsim trace export apps --format agentic_mooncake --model Qwen2.5-7B --rps 2 -o apps.jsonl
    """
    if not out.name.lower().endswith((".jsonl", ".jsonl.gz")):
        raise TraceError(f"{out}: expected a file ending in .jsonl or .jsonl.gz, found {out.name!r}")
    _not_itself(Path(trace), out)
    loaded = load_trace(trace)
    if model is None and len(loaded.models) != 1:
        raise TraceError(f"trace {loaded.name} has runs of {', '.join(loaded.models)}: choose one with --model")
    if rps is None and loaded.workflows[0].arrival_s is None:
        raise TraceError(f"trace {loaded.name} has no arrival times, which {format} asks for: give a rate with --rps")
    arrivals_s = [] if rps is None else _poisson(len(loaded.workflows), rps, seed)
    written = export_trace(loaded, out, format, model or loaded.models[0], block_tokens, arrivals_s)
    typer.echo(f"{out}: {len(loaded.workflows)} workflows, {written.rows} calls, blocks of {block_tokens} tokens")
    for note in written.notes:
        _say(f"note: {note}")


@trace_app.command(name="generate")
def generate_(
    out: Annotated[Path, typer.Option("--out", "-o", help="The trace file: .jsonl, .jsonl.gz or .parquet.")],
    params: Annotated[
        str, typer.Option("--params", help="apps, maths or a TOML file (traces/data/apps.toml explains it).")
    ] = "apps",
    seed: Annotated[int | None, typer.Option("--seed", help="Default: the parameter file's.")] = None,
    workflows: Annotated[int | None, typer.Option("--workflows", help="Default: the file's.")] = None,
    layout: Annotated[
        str | None, typer.Option("--layout", help=f"{' or '.join(LAYOUTS)}; default: the file's.")
    ] = None,
) -> None:
    """Make a synthetic trace; the same options give the same bytes.

    Example: chimsim trace generate --params maths --workflows 500 --layout history-first -o m.jsonl.gz
    """
    trace_suffix(out)
    parameters = load_parameters(params)
    if layout is not None:
        if layout not in LAYOUTS:
            raise TraceError(f"layout {layout!r} is unknown{near(layout, LAYOUTS)} (layouts: {', '.join(LAYOUTS)})")
        parameters = replace(parameters, layout=layout)
    made: Trace = generate(parameters, seed, workflows)
    write_trace(made, out)
    typer.echo(f"{out}: {len(made.workflows)} workflows, {parameters.layout}, sha256 {made.digest}")


@trace_app.command()
def scale(
    trace: Annotated[str, typer.Argument(help="A shipped trace or a trace file.")],
    lengths: Annotated[float, typer.Option("--lengths", help="Factor for all lengths in tokens: 0.1")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The trace file: .jsonl, .jsonl.gz or .parquet.")],
    max_output: Annotated[int | None, typer.Option("--max-output", help="Cut outputs at so many tokens.")] = None,
    workflows: Annotated[int | None, typer.Option("--workflows", help="Only so many from the front.")] = None,
) -> None:
    """Make the calls of a trace shorter or longer, for small engines and rehearsals.

    Example: chimsim trace scale apps --lengths 0.1 --max-output 128 --workflows 300 -o small.jsonl.gz
    """
    trace_suffix(out)
    _not_itself(Path(trace), out)
    loaded = load_trace(trace)
    kept = loaded.workflows if workflows is None else loaded.workflows[: max(workflows, 1)]
    made = scaled(replace(loaded, workflows=kept), lengths, max_output)
    write_trace(made, out)
    typer.echo(f"{out}: {len(made.workflows)} workflows, lengths x {lengths:g}, models {', '.join(made.models)}")


@trace_app.command()
def convert(
    trace: Annotated[str, typer.Argument(help="A shipped trace or a trace file.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The trace file: .jsonl, .jsonl.gz or .parquet.")],
) -> None:
    """Write a trace in another format: a large one is read fastest from Parquet.

    Example: chimsim trace convert my.jsonl.gz -o my.parquet
    """
    trace_suffix(out)
    _not_itself(Path(trace), out)
    loaded = load_trace(trace)
    write_trace(loaded, out)
    typer.echo(f"{out}: {len(loaded.workflows)} workflows, sha256 {loaded.digest}")


def _say(text: str) -> None:
    """A remark on stderr, in 80 columns."""
    typer.echo(textwrap.fill(text, 80, subsequent_indent="  "), err=True)


def _not_itself(source: Path, out: Path) -> None:
    """What is made of a file must not take its place."""
    if source.exists() and out.exists() and source.samefile(out):
        raise TraceError(f"{out}: is the file that is read; give another --out")


def _poisson(n: int, rps: float, seed: int) -> list[float]:
    import numpy as np

    if seed < 0:
        raise TraceError(f"seed: expected an integer, at least 0, found {seed}")
    return [float(time) for time in poisson(n, rps, np.random.default_rng(seed))]


def _table(summaries: list[ModelSummary]) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("model", overflow="fold")
    for name in ("n", "solved", "stages", "output", "median", "p99", "std", "prompt", "reuse"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in summaries:
        table.add_row(
            row.model,
            str(row.workflows),
            "-" if row.solved_rate is None else f"{row.solved_rate:.1%}",
            f"{row.stages_mean:.2f}",
            *(
                f"{value:.0f}"
                for value in (
                    row.output_mean, row.output_median, row.output_p99, row.output_std, row.prompt_mean
                )
            ),
            f"{row.reuse_share:.0%}",
        )  # fmt: skip
    return table
