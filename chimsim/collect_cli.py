"""``chimsim collect``: a labelled trace of several models, made by asking running engines.

It parses, shows how far it is and prints; `chimsim.live.collect` asks and `chimsim.live.grading` judges.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn
from rich.table import Table

from chimsim.errors import ChimsimError
from chimsim.live_cli import InactivityOpt, JsonOpt, drive
from chimsim.options import note
from chimsim.progress import progress_bar
from chimsim.results import check_file, write_file

if TYPE_CHECKING:
    from chimsim.live.collect import Failure
    from traces import Trace, Workflow

WIDTH = 80
_SHOWN_FAILURES = 5


def collect_command(
    questions: Annotated[Path | None, typer.Argument(help="The questions, JSON Lines.")] = None,
    cluster: Annotated[Path | None, typer.Option(help="Cluster TOML whose engines have a url.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The trace: .jsonl, .jsonl.gz or .parquet.")] = None,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help="The agents' prompts, TOML.")] = None,
    write_prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the shipped prompts there, to be edited, and end.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of all answers.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Sent with every request, for sampling.")] = 0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer of every stage; default: the prompts file's.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Workflows at a time on each engine.")] = 8,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Run the programs that models write (limits, but no sandbox).")
    ] = False,
    inactivity: InactivityOpt = 120.0,
    as_json: JsonOpt = False,
) -> None:
    """Ask every model of a cluster all questions and write a trace with lengths, texts and who solved what.

    \b
    chimsim collect examples/questions.jsonl --cluster live.toml --out mine.jsonl.gz
    chimsim collect questions.jsonl --cluster live.toml --allow-code --temperature 0.7 \\
        --concurrency 16 --out mine.jsonl.gz
    chimsim collect --write-prompts mine.toml    # edit it, then: --prompts mine.toml

    A math question goes through planner, solver and verifier, a code question through planner, coder and qa.
    A journal beside the trace keeps what is finished: interrupted, the same command goes on where it stopped.
    """
    from chimsim.live.roles import load_roles, shipped_text

    if write_prompts is not None:
        if write_prompts.exists():
            raise ChimsimError(f"{write_prompts} exists; give another --write-prompts, or remove it")
        check_file(write_prompts)
        write_file(write_prompts, shipped_text().encode())
        typer.echo(f"written: {write_prompts}")
        return
    if questions is None or cluster is None or out is None:
        what = {"QUESTIONS": questions, "--cluster": cluster, "--out": out}
        missing = next(name for name, value in what.items() if value is None)
        raise ChimsimError(f"{missing} is missing: chimsim collect QUESTIONS --cluster live.toml --out trace.jsonl.gz")
    from chimsim.config import load_cluster
    from chimsim.live.collect import (
        Failure,
        Sampling,
        check_lengths,
        collect,
        servers,
        settings_of,
        trace_of,
    )
    from chimsim.live.grading import Grader
    from chimsim.live.journal import open_journal
    from chimsim.live.questions import read_questions
    from traces import write_trace
    from traces.files import trace_suffix

    suffix = trace_suffix(out)
    check_file(out)
    path = out.with_name(out.name + ".journal")
    if out.exists() and not path.exists():
        raise ChimsimError(f"{out} exists and has no journal to go on with; give another --out, or remove it")
    asked = read_questions(questions)
    kinds = sorted({question.kind for question in asked})
    roles = load_roles(prompts).limited(max_tokens)
    engines = load_cluster(cluster)
    sampling = Sampling(temperature, seed)
    grader = Grader(maths="math" in kinds, allow_code=allow_code)
    if "code" in kinds and not allow_code:
        note("programs are not run and get no label; --allow-code runs them (limits, but no sandbox)")
    settings = settings_of(asked, roles, engines, sampling, allow_code=allow_code)
    failures: list[Failure] = []
    total = len(asked) * len(engines.models)
    with open_journal(path, settings) as journal, progress_bar(MofNCompleteColumn()) as tell:
        had = len(journal.runs)

        def hear(event: Workflow | Failure) -> None:
            if isinstance(event, Failure):
                failures.append(event)
                last = f"{event.question} on {event.model} failed"
            else:
                last = f"{event.workflow_id} on {next(iter(event.runs))}"
            if tell is not None:
                tell(len(journal.runs) + len(failures), total, last)

        async def work() -> None:
            async with grader, servers(engines, inactivity) as found:
                check_lengths(roles, found, kinds)
                if tell is not None:
                    tell(had, total, "asking the engines")
                await collect(asked, found, roles, sampling, grader, journal, concurrency=concurrency, hear=hear)

        if had < total:
            kept = f"of {total} runs are in {path}; the same command goes on"
            drive(work(), lambda: f"{len(journal.runs)} {kept}" if journal.runs else "")
        trace = trace_of(out.name[: -len(suffix)], asked, engines.models, journal)
    _say_failures(failures, len(asked) - len(trace.workflows))
    if not trace.workflows:
        raise ChimsimError(f"no question has a run of every model; {out} is not written")
    write_trace(trace, out)
    limits: dict[tuple[str, str], int] = {
        (kind, role.name): role.max_tokens for kind, stages in roles.of.items() for role in stages
    }
    rows = [summary(model, trace, limits) for model in engines.models]
    left_out = len(asked) - len(trace.workflows)
    if as_json:
        typer.echo(json.dumps({"written": str(out), "left_out": left_out, "models": rows}, indent=2))
        return
    Console(width=WIDTH).print(_table(rows))
    typer.echo("solved: share of the judged runs, with its 95 % interval (Wilson)")
    typer.echo("by stage: mean output tokens; cut: answers that reached their max_tokens")
    typer.echo(f"written: {out} ({len(trace.workflows)} workflows); journal: {path}")


def summary(model: str, trace: Trace, limits: Mapping[tuple[str, str], int]) -> dict[str, Any]:
    """A model in numbers: runs, the share solved with its 95 % interval (None without labels), mean tokens a stage.

    ``limits`` is the longest answer of each (kind, stage).
    """
    from scipy.stats import binomtest

    runs = [workflow.runs[model] for workflow in trace.workflows]
    labels = [run.solved for run in runs if run.solved is not None]
    rate, low, high = None, None, None
    if labels:
        interval = binomtest(sum(labels), len(labels)).proportion_ci(method="wilson")
        rate, low, high = sum(labels) / len(labels), float(interval.low), float(interval.high)
    count, prompt, output = Counter[str](), Counter[str](), Counter[str]()
    cut = 0
    for workflow, run in zip(trace.workflows, runs, strict=True):
        for stage in run.stages:
            count[stage.name] += 1
            prompt[stage.name] += stage.prompt_tokens
            output[stage.name] += stage.output_tokens
            cut += stage.output_tokens >= limits[workflow.meta["kind"], stage.name]
    means = {
        name: {"prompt_tokens": prompt[name] / count[name], "output_tokens": output[name] / count[name]}
        for name in count
    }
    return {
        "model": model,
        "runs": len(runs),
        "judged": len(labels),
        "solved_rate": rate,
        "solved_low": low,
        "solved_high": high,
        "stages": means,
        "cut": cut,
    }


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    stages = list(dict.fromkeys(name for row in rows for name in row["stages"]))
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("model", overflow="fold")
    for name in ("runs", "judged", "solved", "95 %", *stages, "cut"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        solved, interval = "-", "-"
        if row["solved_rate"] is not None:
            solved = f"{100 * row['solved_rate']:.1f} %"
            interval = f"{100 * row['solved_low']:.0f}-{100 * row['solved_high']:.0f}"
        means = (f"{row['stages'][name]['output_tokens']:.0f}" for name in stages)
        table.add_row(row["model"], str(row["runs"]), str(row["judged"]), solved, interval, *means, str(row["cut"]))
    return table


def _say_failures(failures: Sequence[Failure], left_out: int) -> None:
    for failure in failures[:_SHOWN_FAILURES]:
        text = f"failed: {failure.question} on {failure.model}: {failure.reason}"
        typer.echo(textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False), err=True)
    if len(failures) > _SHOWN_FAILURES:
        typer.echo(f"... and {len(failures) - _SHOWN_FAILURES} more", err=True)
    if left_out:
        note(f"{left_out} questions lack a run of some model and are left out; the same command asks them again")
