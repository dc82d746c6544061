"""``chimsim capacity``: how much load within an SLO, or how few GPUs for a load.

It parses, hands the searches to workers, keeps what they found, and prints; `chimsim.capacity` searches.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import MofNCompleteColumn, TextColumn

from chimsim.capacity import Found, Job, interval, key_of, search
from chimsim.errors import ChimsimError
from chimsim.grid import Cell, plan
from chimsim.metrics import mean_and_interval
from chimsim.options import (
    ClusterOpt,
    ComboOpt,
    DeltaOpt,
    EnginesOpt,
    KnobOpt,
    LengthOpt,
    LengthPredictorOpt,
    MapOpt,
    PolicyOpt,
    RankOpt,
    RouterOpt,
    SeedsOpt,
    SlotsOpt,
    SpecFile,
    TauOpt,
    TraceOpt,
    WarmupOpt,
    WorkersOpt,
    WorkflowsOpt,
    given_options,
    resolve,
)
from chimsim.progress import progress_bar
from chimsim.report import aligned, number
from chimsim.results import digest, folder_lock, ordered_json_bytes, write_file
from chimsim.slo import Goal, parse_slo
from chimsim.spec import Spec
from chimsim.sweeps import Interrupted
from chimsim.workers import WorkerDied, run_jobs

WIDTH = 80
RESULT = "capacity.json"
_OWN = ("slo", "min_solved", "rps", "span", "tolerance", "max_gpus")
LEAST_SPAN_S = 300.0


@dataclass(frozen=True, slots=True)
class Row:
    """One policy (and its knobs) on one trace, combination and rate: what was found for every seed."""

    title: str
    group: str
    cell: Cell
    found: tuple[Found, ...]

    @property
    def values(self) -> list[float] | None:
        """The answers by seed; None where a seed has none."""
        values = [found.value for found in self.found]
        return None if None in values else [float(value) for value in values if value is not None]


def capacity_command(
    spec: SpecFile = None,
    slo: Annotated[
        list[str] | None, typer.Option("--slo", help="p99_latency:60s, mean_ttft:500ms, ... (repeatable)")
    ] = None,
    min_solved: Annotated[float | None, typer.Option(min=0, max=1, help="Least share of workflows solved.")] = None,
    trace: TraceOpt = None,
    combo: ComboOpt = None,
    cluster: ClusterOpt = None,
    policy: PolicyOpt = None,
    rps: Annotated[
        str | None, typer.Option("--rps", help="Find the fewest GPUs at these rates, not the largest rate.")
    ] = None,
    tau: TauOpt = None,
    delta_s: DeltaOpt = None,
    knob: KnobOpt = None,
    seeds: SeedsOpt = None,
    workflows: WorkflowsOpt = None,
    warmup: WarmupOpt = None,
    router: RouterOpt = None,
    router_map: MapOpt = None,
    length_predictor: LengthPredictorOpt = None,
    length_error: LengthOpt = None,
    rank_predictor: RankOpt = None,
    slots: SlotsOpt = None,
    engines: EnginesOpt = None,
    span: Annotated[
        float | None, typer.Option(min=1, help="Seconds of arrivals a run; default: 5 times the longest limit.")
    ] = None,
    tolerance: Annotated[float, typer.Option(min=0.001, max=1, help="Of a rate: 0.02 is 2 %.")] = 0.02,
    max_gpus: Annotated[int, typer.Option(min=1, help="The most GPUs to try with --rps.")] = 32,
    workers: WorkersOpt = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; a started one is gone on with.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Find the load that a cluster takes within an SLO, or the GPUs that a load takes.

    \b
    chimsim capacity --slo p99_latency:60s --trace apps --combo qwen1.5b+7b --policy fcfs,stjf,chimera
    chimsim capacity --slo p99_latency:60s --min-solved 0.3 --trace apps --combo qwen1.5b+7b \\
        --policy fcfs,chimera --tau 0.5,1 --seeds 5 --out results/capacity
    chimsim capacity --slo p99_latency:60s --rps 8 --trace apps --combo qwen1.5b+7b --policy fcfs,chimera

    Every seed is searched by itself; tables give the mean over the seeds and the half width of its 95 % interval, and
    compare every policy with the first one seed by seed. A run whose backlog still grows at the last arrival does not
    count as within the SLO. The exit code is 1 where no policy has an answer.
    """
    options = {name: value for name, value in given_options(locals()).items() if name not in _OWN}
    goal = Goal(tuple(parse_slo(text) for text in slo or ()), min_solved)
    if not goal.slos:
        raise ChimsimError("--slo is missing: what must hold, say --slo p99_latency:60s")
    options.setdefault("seeds", "3")
    resolved = resolve(spec, {**options, "rps": rps or "1", "arrivals": "poisson"})
    # Without --rps the rate is what is looked for, whatever a spec file says.
    cells, _ = plan(resolved)
    span_s = span if span is not None else max(LEAST_SPAN_S, 5.0 * max(each.limit_s for each in goal.slos))
    jobs = [Job(cell, goal, tolerance, span_s, max_gpus if rps else 0) for cell in cells]
    asked = digest({"searches": sorted(key_of(job) for job in jobs)})
    _check_result(out, asked)
    found = _run(jobs, resolved.workers, out)
    rows = _rows(jobs, found)
    result = _result(rows, goal, bool(rps))
    files: list[Path] = []
    if out is not None:
        from chimsim.capacity_plot import draw_capacity

        write_file(out / RESULT, ordered_json_bytes({"asked": asked, **result}))
        files = [out / RESULT, *draw_capacity(rows, bool(rps), out)]
    if as_json:
        typer.echo(ordered_json_bytes(result).decode(), nl=False)
    else:
        typer.echo(_text(rows, goal, resolved, bool(rps)))
        if files:
            typer.echo("\nwritten: " + ", ".join(str(path) for path in files))
    if all(row.values is None for row in rows):
        raise typer.Exit(1)


def _check_result(out: Path | None, asked: str) -> None:
    """Refuse a folder in which the answer to something else stands."""
    if out is None or not (out / RESULT).is_file():
        return
    try:
        there = json.loads((out / RESULT).read_bytes())["asked"]
    except (ValueError, KeyError, TypeError):
        there = None
    if there != asked:
        raise ChimsimError(f"{out} holds another capacity search; give another --out, or repeat that one's options")


def _run(jobs: Sequence[Job], workers: int, out: Path | None) -> list[Found]:
    """The outcome of every job; those that the folder holds are not searched again."""
    if out is None:
        return _search(jobs, workers, None)
    with folder_lock(out, "capacity search", "searches"):
        return _search(jobs, workers, out / "searches")


def _search(jobs: Sequence[Job], workers: int, kept: Path | None) -> list[Found]:
    found = [_kept(kept, job) for job in jobs]
    missing = [index for index, each in enumerate(found) if each is None]
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
    outcomes = run_jobs(search, [jobs[index] for index in missing], workers)
    note = "" if kept is None else f"; what was found is kept in {kept.parent}, the same command goes on"
    try:
        with progress_bar(MofNCompleteColumn(), TextColumn("searches")) as update:
            for done, (at, outcome) in enumerate(outcomes, 1):
                job = jobs[missing[at]]
                if outcome.error:
                    raise ChimsimError(f"{job.cell.title}: {outcome.error}")
                found[missing[at]] = outcome
                if kept is not None:
                    write_file(kept / f"{key_of(job)}.json", ordered_json_bytes(outcome.to_dict()))
                if update is not None:
                    update(len(jobs) - len(missing) + done, len(jobs), job.cell.title)
    except WorkerDied as died:
        title = jobs[missing[died.index]].cell.title
        raise ChimsimError(f"a worker was killed ({died.cause}) in the search for {title}{note}") from None
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted{note}") from None
    finally:
        outcomes.close()
    return [each for each in found if each is not None]


def _kept(folder: Path | None, job: Job) -> Found | None:
    if folder is None:
        return None
    try:
        row = json.loads((folder / f"{key_of(job)}.json").read_bytes())
        return Found(row["value"], row["counts"], row["summary"], tuple(row["misses"]), row["runs"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


_QUIET = ("trace", "combo", "rps", "slots", "burstiness", "seed", "queue", "look_ahead", "router_s", "predictor_s")


def _rows(jobs: Sequence[Job], found: Sequence[Found]) -> list[Row]:
    """A row for all seeds of one policy."""
    by_row: dict[str, list[tuple[Cell, Found]]] = {}
    for job, each in zip(jobs, found, strict=True):
        same = {name: value for name, value in job.cell.axes.items() if name != "seed"}
        by_row.setdefault(digest(same), []).append((job.cell, each))
    policies: dict[str, list[Mapping[str, Any]]] = {}
    for job in jobs:
        policies.setdefault(str(job.cell.axes["policy"]), []).append(job.cell.axes)
    varying = {
        (policy, name) for policy, axes in policies.items() for name in axes[0]
        if name not in _QUIET and len({each[name] for each in axes}) > 1
    }  # fmt: skip
    made = []
    for pairs in by_row.values():
        axes = pairs[0][0].axes
        policy = str(axes["policy"])
        words = [f"{name} {_short(axes[name])}" for name in axes if (policy, name) in varying]
        where = [str(axes["trace"]), str(axes["combo"])]
        where += [f"{axes['slots']} slots"] if axes["slots"] is not None else []
        where += [f"{axes['rps']:g} workflows/s"] if jobs[0].max_gpus else []
        title = " ".join([policy, *words])
        made.append(Row(title, ", ".join(where), pairs[0][0], tuple(each for _, each in pairs)))
    return made


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def against(row: Row, first: Row, gpus: bool) -> tuple[float, float, float] | None:
    """How a row's answers compare with the first's, paired by seed: mean and 95 % interval.

    Of GPUs the difference, of rates the ratio (by its logarithm); None where a seed has no answer, or there is one.
    """
    mine, theirs = row.values, first.values
    if mine is None or theirs is None or len(mine) < 2:
        return None
    if gpus:
        mean, half = mean_and_interval(a - b for a, b in zip(mine, theirs, strict=True))
        return mean, mean - half, mean + half
    mean, half = mean_and_interval(log(a / b) for a, b in zip(mine, theirs, strict=True))
    return exp(mean), exp(mean - half), exp(mean + half)


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return groups


def _result(rows: Sequence[Row], goal: Goal, gpus: bool) -> dict[str, Any]:
    made = []
    for group in _groups(rows).values():
        for row in group:
            compared = against(row, group[0], gpus)
            made.append(
                {
                    "axes": {n: v for n, v in row.cell.axes.items() if n != "seed" and (gpus or n != "rps")},
                    "what": "gpus" if gpus else "rps",
                    "by_seed": [each.to_dict() for each in row.found],
                    "against_first": compared and dict(zip(("mean", "low", "high"), compared, strict=True)),
                }
            )
    return {**goal.to_dict(), "rows": made}


def _text(rows: Sequence[Row], goal: Goal, spec: Spec, gpus: bool) -> str:
    head = "fewest GPUs" if gpus else "largest rate, workflows/s,"
    asked = ", ".join(slo.text for slo in goal.slos)
    asked += f", at least {100 * goal.min_solved:g} % solved" if goal.min_solved is not None else ""
    blocks = [textwrap.fill(f"{head} within {asked}; {len(spec.seeds)} seeds", WIDTH)]
    for name, group in _groups(rows).items():
        head_row = ["", "GPUs", "95 %", "to first", "95 %", "solved %", "engines"]
        if not gpus:
            head_row = ["", "rate", "95 %", "of first", "95 %", "solved %", "limited by"]
        table = [head_row]
        table += [_line(row, group[0], gpus) for row in group]
        blocks.append("\n".join([name, *aligned(table)]))
        blocks += [textwrap.fill(line, WIDTH) for line in _sentences(group, gpus)]
    return "\n\n".join(blocks)


def _line(row: Row, first: Row, gpus: bool) -> list[str]:
    values = row.values
    solved, _ = mean_and_interval(100 * float(each.summary["solved_rate"]) for each in row.found
                                  if each.summary["solved_rate"] is not None)  # fmt: skip
    last = _counts(row) if gpus else _limits(row)
    if values is None:
        reached = sum(each.value is not None for each in row.found)
        seeds = f"in {reached} of {len(row.found)}" if reached else "none"
        return [row.title, seeds, "", "", "", number(solved, 1), last]
    mean, spread = _mean(values, gpus)
    compared = None if row is first else against(row, first, gpus)
    shown = ["", ""] if compared is None else [number(compared[0]), f"{number(compared[1])}..{number(compared[2])}"]
    return [row.title, number(mean), spread, *shown, number(solved, 1), last]


def _mean(values: Sequence[float], gpus: bool) -> tuple[float, str]:
    """The mean over the seeds, and its 95 % interval in words."""
    mean, low, high = interval(values, gpus)
    return mean, f"{number(low)}..{number(high)}" if len(values) > 1 else ""


def _limits(row: Row) -> str:
    """What a slightly higher rate would break, most frequent first."""
    counts: dict[str, int] = {}
    for each in row.found:
        for miss in each.misses:
            counts[miss.partition(":")[0]] = counts.get(miss.partition(":")[0], 0) + 1
    return ", ".join(sorted(counts, key=lambda miss: (-counts[miss], miss))[:2])


def _counts(row: Row) -> str:
    """The split over the models that most seeds take."""
    splits = ["+".join(str(count) for count in each.counts.values()) for each in row.found if each.value is not None]
    return max(sorted(set(splits)), key=splits.count) if splits else f"({_limits(row)})"


def _sentences(group: Sequence[Row], gpus: bool) -> list[str]:
    """The best against the first, in words."""
    first = group[0]
    known = [(row, compared) for row in group[1:] if (compared := against(row, first, gpus)) is not None]
    if not known:
        return []
    row, (mean, low, high) = (min if gpus else max)(known, key=lambda pair: pair[1][0])
    if low == high == (0.0 if gpus else 1.0):
        return [f"No policy differs from {first.title}."]
    if gpus:
        fewer = -mean
        if low <= 0.0 <= high:
            return [f"No policy needs certainly fewer GPUs than {first.title} ({row.title}: {fewer:+.2f} fewer, "
                    f"95 % {-high:.2f} to {-low:.2f})."]  # fmt: skip
        word = "fewer" if fewer > 0 else "more"
        return [f"{row.title} needs {abs(fewer):.2f} GPUs {word} than {first.title} (95 % {-high:.2f} to {-low:.2f})."]
    if low <= 1.0 <= high:
        return [f"No policy takes certainly more load than {first.title} ({row.title}: {mean:.2f} times, "
                f"95 % {low:.2f} to {high:.2f})."]  # fmt: skip
    return [f"{row.title} takes {mean:.2f} times the load of {first.title} (95 % {low:.2f} to {high:.2f})."]
