"""``chimsim tune``: knobs for a user's trace, and whether they are worth anything.

It parses and prints; `chimsim.tune` searches and judges.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import MofNCompleteColumn, TextColumn

from chimsim.errors import ChimsimError, near
from chimsim.grid import Cell, plan
from chimsim.metrics import mean_and_interval
from chimsim.options import (
    ClusterOpt,
    ComboOpt,
    EnginesOpt,
    KnobOpt,
    LengthPredictorOpt,
    MapOpt,
    RouterOpt,
    SlotsOpt,
    SpecFile,
    TraceOpt,
    WarmupOpt,
    WorkersOpt,
    WorkflowsOpt,
    given_options,
    local_workers,
    resolve,
)
from chimsim.progress import progress_bar
from chimsim.report import aligned, number
from chimsim.results import folder_lock, ordered_json_bytes, write_file
from chimsim.sweeps import Interrupted
from chimsim.tune import SLOTS, Gain, Objective, Runs, Setting, changed, gain, measure, ranges_for, search

WIDTH = 80
_OWN = ("objective", "min_solved", "baselines", "search_in", "trials", "search_seeds", "judge_seeds")
OBJECTIVES = {
    "mean_latency": "mean_workflow_latency_s",
    "p50_latency": "p50_workflow_latency_s",
    "p90_latency": "p90_workflow_latency_s",
    "p99_latency": "p99_workflow_latency_s",
    "slowdown": "mean_slowdown",
    "latency_per_token": "latency_per_token_ms",
}
FIRST_SEARCH_SEED = 1000
"""Seeds of the search begin here, those of the judgement at 0."""


def tune_command(
    spec: SpecFile = None,
    objective: Annotated[str, typer.Option(help=f"What to lower: {', '.join(OBJECTIVES)}.")] = "mean_latency",
    min_solved: Annotated[float | None, typer.Option(min=0, max=1, help="Least share of workflows solved.")] = None,
    policy: Annotated[str, typer.Option(help="The policy to tune.")] = "chimera",
    baselines: Annotated[str, typer.Option(help="Policies to be better than, with their defaults.")] = "fcfs,stjf",
    search_in: Annotated[
        list[str] | None, typer.Option("--search", help="A range: tau=0..4, slots=8..64:log (repeatable).")
    ] = None,
    trials: Annotated[int, typer.Option(min=2, help="Settings to try.")] = 42,
    search_seeds: Annotated[int, typer.Option(min=1, help="Seeds that a setting is tried on.")] = 3,
    judge_seeds: Annotated[int, typer.Option(min=2, help="Other seeds, that the result is judged on.")] = 8,
    trace: TraceOpt = None,
    combo: ComboOpt = None,
    cluster: ClusterOpt = None,
    rps: Annotated[str | None, typer.Option("--rps", help="Arrival rate, workflows per second.")] = None,
    knob: KnobOpt = None,
    workflows: WorkflowsOpt = None,
    warmup: WarmupOpt = None,
    router: RouterOpt = None,
    router_map: MapOpt = None,
    length_predictor: LengthPredictorOpt = None,
    slots: SlotsOpt = None,
    engines: EnginesOpt = None,
    workers: WorkersOpt = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; a started one is gone on with.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Find knobs for a trace, and say what they gain on seeds that the search has not seen.

    \b
    chimsim tune --trace apps --combo qwen1.5b+7bx2 --rps 6 --objective p50_latency --min-solved 0.3
    chimsim tune --trace my.jsonl --cluster mine.toml --rps 4 --policy stjf --search aging_tokens_per_s=0..200
    chimsim tune --trace apps --combo qwen7b --rps 3 --policy ltr --search starvation_steps=10..2000:log

    Without --search the knobs tau, delta_s and aging_tokens_per_s are searched, as far as the policy has them. A gain
    is the mean over the judging seeds, paired seed by seed, with its 95 % interval; one that could be noise is said to
    be none. Needs the extra tune.
    """
    options = {name: value for name, value in given_options(locals()).items() if name not in _OWN}
    if find_spec("optuna") is None:
        raise ChimsimError('tune needs optuna; install it: pip install "chimsim[tune]"')
    if objective not in OBJECTIVES:
        raise ChimsimError(
            f"--objective: {objective!r} is unknown{near(objective, OBJECTIVES)} (known: {', '.join(OBJECTIVES)})"
        )
    goal = Objective(OBJECTIVES[objective], min_solved)
    ranges = ranges_for(policy, search_in or [])
    others = [name.strip() for name in baselines.split(",") if name.strip() and name.strip() != policy]
    cell, rivals, count = _cells(spec, options, [policy, *others])
    judges = range(judge_seeds)
    runs_to_do = trials * search_seeds + judge_seeds * (2 + len(rivals))
    with progress_bar(MofNCompleteColumn(), TextColumn("runs")) as update:
        runs = Runs(count, None if out is None else out / "runs")
        if update is not None:
            runs.report = lambda done, title: update(done, runs_to_do, title)
        try:
            if out is None:
                best, settings = _tune(cell, rivals, goal, ranges, trials, search_seeds, judges, runs)
            else:
                with folder_lock(out, "tuning", "runs"):
                    (out / "runs").mkdir(parents=True, exist_ok=True)
                    best, settings = _tune(cell, rivals, goal, ranges, trials, search_seeds, judges, runs)
        except KeyboardInterrupt:
            note = f"; what was run is kept in {out}, the same command goes on" if out is not None else ""
            raise Interrupted(f"interrupted{note}") from None
    gains = _gains(settings, goal)
    result = {
        "policy": policy, "objective": objective, "min_solved": min_solved, "found": best, "trials": trials,
        "search_seeds": [FIRST_SEARCH_SEED + each for each in range(search_seeds)], "judge_seeds": list(judges),
        "judged": [{"what": s.title, "by_seed": list(s.values), "solved_rate": list(s.solved)} for s in settings],
        "gains": [{"over": g.over, "percent": g.percent, "low": g.low, "high": g.high, "certain": g.certain}
                  for g in gains],
    }  # fmt: skip
    if out is not None:
        write_file(out / "tune.json", ordered_json_bytes(result))
    if as_json:
        typer.echo(ordered_json_bytes(result).decode(), nl=False)
        return
    typer.echo(_text(settings, gains, goal, objective, best, result))
    if out is not None:
        typer.echo(f"\nwritten: {out / 'tune.json'}")


def _cells(spec: Path | None, options: dict[str, Any], names: Sequence[str]) -> tuple[Cell, list[Cell], int | None]:
    """The cell to tune, those to be better than, and the number of workers."""
    resolved = resolve(spec, {**options, "policy": ",".join(names), "seeds": [0]})
    cells, _ = plan(resolved)
    if len(cells) != len(names):
        mine = [cell.axes for cell in cells if cell.axes["policy"] == names[0]]
        several = [name for name in mine[0] if len({axes[name] for axes in mine}) > 1]
        raise ChimsimError(f"tune takes one value of everything; there are several of {', '.join(several)}")
    return cells[0], cells[1:], local_workers(resolved)


def _tune(
    cell: Cell,
    rivals: Sequence[Cell],
    goal: Objective,
    ranges: Sequence[Any],
    trials: int,
    search_seeds: int,
    judges: range,
    runs: Runs,
) -> tuple[dict[str, Any], list[Setting]]:
    seeds = range(FIRST_SEARCH_SEED, FIRST_SEARCH_SEED + search_seeds)
    best = search(cell, ranges, goal, seeds, trials, runs, seed=0)
    judged = measure([changed(cell, best), cell, *rivals], goal, judges, runs)
    policy = str(cell.axes["policy"])
    titles = [f"{policy}, tuned", f"{policy}, as it is", *(str(rival.axes["policy"]) for rival in rivals)]
    return best, [Setting(title, s.knobs, s.values, s.solved) for title, s in zip(titles, judged, strict=True)]


def _gains(settings: Sequence[Setting], goal: Objective) -> list[Gain]:
    """Over the policy as it is, and over the best baseline, as far as they solve enough."""
    tuned, own, *rivals = settings
    found = [gain(tuned, own, own.title)] if own.solves(goal) else []
    enough = [rival for rival in rivals if rival.solves(goal)]
    if enough:
        best = min(enough, key=lambda rival: sum(rival.values))
        found.append(gain(tuned, best, f"{best.title}, the best baseline"))
    return found


def _text(
    settings: Sequence[Setting],
    gains: Sequence[Gain],
    goal: Objective,
    objective: str,
    best: dict[str, Any],
    result: dict[str, Any],
) -> str:
    unit = "ms" if goal.key.endswith("_ms") else "s" if goal.key.endswith("_s") else ""
    table = [["", f"{objective} {unit}".strip(), "", "solved %", "", ""]]
    for setting in settings:
        mean, half = mean_and_interval(setting.values)
        solved, solved_half = mean_and_interval(100 * value for value in setting.solved)
        short = "" if setting.solves(goal) else "solves too little"
        table.append([setting.title, number(mean), f"±{number(half)}", number(solved, 1), f"±{number(solved_half, 1)}",
                      short])  # fmt: skip
    lines = [
        textwrap.fill(
            f"{result['trials']} settings tried on {len(result['search_seeds'])} seeds, judged on "
            f"{len(result['judge_seeds'])} others (mean ± half width of the 95 % interval)",
            WIDTH,
        ),
        "\n".join(aligned(table)),
        "found: " + ", ".join(f"{name} {value:g}" for name, value in best.items()),
    ]
    if not settings[0].solves(goal):
        lines.append(f"No setting that solves {100 * (goal.min_solved or 0):g} % was found.")
    if gains:
        lines.append("A gain is how much lower the tuned setting's objective is, in per cent.")
    for each in gains:
        span = f"{each.percent:+.1f} %, 95 % {each.low:+.1f} to {each.high:+.1f}"
        if each.certain:
            lines.append(textwrap.fill(f"Gain over {each.over}: {span}.", WIDTH))
        else:
            lines.append(textwrap.fill(f"No certain gain over {each.over}: {span}.", WIDTH))
    if not settings[0].solves(goal):
        return "\n".join(lines)
    own = next((each for each in gains if each.over == settings[1].title), None)
    if own is not None and not own.certain:
        return "\n".join([*lines, f"keep {result['policy']} as it is"])
    options = " ".join(
        f"--slots {value}" if name == SLOTS else f"--knob {name}={value}" for name, value in best.items()
    )
    lines.append(f"use it: --policy {result['policy']} {options}")
    return "\n".join(lines)
