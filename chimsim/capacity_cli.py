"""``chimsim capacity``: how much load within an SLO, or how few GPUs for a load.

It parses, hands the searches to workers, keeps what they found, and prints; `chimsim.capacity` searches, and
`chimsim.capacity_text` puts it in words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import MofNCompleteColumn, TextColumn

from chimsim.capacity import Found, Job, key_of, search
from chimsim.capacity_text import Row, against, capacity_text, groups
from chimsim.errors import ChimsimError
from chimsim.forecast import seconds
from chimsim.grid import Cell, plan
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
    local_workers,
    resolve,
)
from chimsim.progress import progress_bar
from chimsim.results import digest, folder_lock, ordered_json_bytes, write_file
from chimsim.slo import Goal, parse_slo
from chimsim.spec import scalar_text
from chimsim.sweeps import Interrupted
from chimsim.workers import WorkerDied, Workers, run_jobs

RESULT = "capacity.json"
_OWN = ("slo", "min_solved", "rps", "span", "tolerance", "max_gpus")
LEAST_SPAN_S = 300.0
RUNS_A_SEARCH = 12
"""About; only to tell short work from long."""


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
    found = _run(jobs, Workers(local_workers(resolved)), out)
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
        typer.echo(capacity_text(rows, goal, len(resolved.seeds), bool(rps)))
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


def _run(jobs: Sequence[Job], workers: Workers, out: Path | None) -> list[Found]:
    """The outcome of every job; those that the folder holds are not searched again."""
    if out is None:
        return _search(jobs, workers, None)
    with folder_lock(out, "capacity search", "searches"):
        return _search(jobs, workers, out / "searches")


def _search(jobs: Sequence[Job], workers: Workers, kept: Path | None) -> list[Found]:
    found = [_kept(kept, job) for job in jobs]
    missing = [index for index, each in enumerate(found) if each is None]
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
    work_s = RUNS_A_SEARCH * sum(seconds(jobs[index].cell) for index in missing)
    outcomes = run_jobs(search, [jobs[index] for index in missing], workers, work_s=work_s)
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
        raise ChimsimError(f"{died} in the search for {title}{note}") from None
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
        words = [f"{name} {scalar_text(axes[name])}" for name in axes if (policy, name) in varying]
        where = [str(axes["trace"]), str(axes["combo"])]
        where += [f"{axes['slots']} slots"] if axes["slots"] is not None else []
        where += [f"{axes['rps']:g} workflows/s"] if jobs[0].max_gpus else []
        title = " ".join([policy, *words])
        made.append(Row(title, ", ".join(where), pairs[0][0], tuple(each for _, each in pairs)))
    return made


def _result(rows: Sequence[Row], goal: Goal, gpus: bool) -> dict[str, Any]:
    made = []
    for group in groups(rows).values():
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
