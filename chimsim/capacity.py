"""How much load a cluster takes, and how many engines a load takes, within a service level objective.

Every seed is searched by itself: common random numbers make policies comparable seed by seed, and the spread over the
seeds is the answer's uncertainty. It searches and simulates; it neither parses nor prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any

from chimsim.errors import ChimsimError
from chimsim.grid import Cell
from chimsim.metrics import geometric_interval, mean_and_interval
from chimsim.results import digest
from chimsim.slo import MIN_SOLVED, Goal
from chimsim.sweeps import run_cell
from chimsim.variants import at_rate, with_engines

Counts = tuple[int, ...]
"""Engines of each model, in the order of the models' names."""

START_RPS = 1.0
LEAST_RPS, MOST_RPS = 2.0**-10, 2.0**20


@dataclass(frozen=True, slots=True)
class Job:
    """One search: of a cell's policy and seed. ``max_gpus`` is 0 for the largest rate, else the most GPUs to try.

    Every run lasts at least ``span_s`` seconds of arrivals, and has at least as many workflows as its cell: at a high
    rate a trace would else be over before its queues are.
    """

    cell: Cell
    goal: Goal
    tolerance: float
    span_s: float
    max_gpus: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found: None where nothing it tried was good.

    ``value`` is the largest rate found good, in workflows a second, or the fewest GPUs. ``counts`` are the engines by
    model, ``solved_rate`` and ``summary`` those of the run there, ``misses`` what the nearest bad run did not keep.
    ``runs`` counts the simulations.
    """

    value: float | None
    counts: Mapping[str, int]
    summary: Mapping[str, Any]
    misses: tuple[str, ...]
    runs: int
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For a journal."""
        return {
            "value": self.value, "counts": dict(self.counts), "summary": dict(self.summary),
            "misses": list(self.misses), "runs": self.runs,
        }  # fmt: skip


KEPT = ("solved_rate", "mean_workflow_latency_s", "p99_workflow_latency_s", "utilisation", "not_steady")
"""Of the summary at the answer."""


def search(job: Job) -> Found:
    """Do the job; an error of the input comes back in it, so that a worker can hand it over."""
    try:
        return _fewest_gpus(job) if job.max_gpus else _largest_rate(job)
    except ValueError as error:
        return Found(None, {}, {}, (), 0, str(error))


def key_of(job: Job) -> str:
    """Names the search by all that decides its outcome."""
    asked = {"tolerance": job.tolerance, "span_s": job.span_s, "max_gpus": job.max_gpus}
    return digest({"cell": job.cell.config, "goal": job.goal.to_dict(), **asked})


class _Tried:
    """Runs cells and remembers how they were; a search may come by the same one twice."""

    def __init__(self, goal: Goal) -> None:
        self.goal = goal
        self.summaries: dict[str, dict[str, Any]] = {}
        self.misses: dict[str, list[str]] = {}

    def good(self, cell: Cell) -> bool:
        if cell.name not in self.summaries:
            _, summary = run_cell(cell)
            self.misses[cell.name] = self.goal.misses(summary)
            self.summaries[cell.name] = {key: summary[key] for key in (*KEPT, *(slo.key for slo in self.goal.slos))}
        return not self.misses[cell.name]

    def found(self, value: float | None, cell: Cell, bad: Cell | None) -> Found:
        engines = [spec.model for spec in cell.cluster.engines]
        return Found(
            value,
            {model: engines.count(model) for model in cell.cluster.models},
            self.summaries[cell.name],
            tuple(self.misses[bad.name]) if bad is not None else (),
            len(self.summaries),
        )


def _largest_rate(job: Job) -> Found:
    """The largest rate that is good, found from above: where load alone would allow more, what is solved may not.

    Doubled or halved until one rate is not overloaded and its double is; from there halved until it is good; then
    bisected on a logarithmic scale.
    """
    tried = _Tried(job.goal)

    def at(rps: float) -> Cell:
        return at_rate(job.cell, rps, job.span_s)

    def good(rps: float) -> bool:
        return tried.good(at(rps))

    def overloaded(rps: float) -> bool:
        good(rps)
        return bool(set(tried.misses[at(rps).name]) - {MIN_SOLVED})

    low = START_RPS
    if overloaded(low):
        while overloaded(low) and low > LEAST_RPS:
            low *= 0.5
    else:
        while not overloaded(2.0 * low):
            low *= 2.0
            if low >= MOST_RPS:
                raise ChimsimError(f"the SLO holds at {low:g} workflows a second: it says nothing of the load")
    while not good(low) and low > LEAST_RPS:
        low *= 0.5
    if not good(low):
        return tried.found(None, at(low), at(low))
    high = 2.0 * low
    while high > low * (1.0 + job.tolerance):
        middle = float(f"{(low * high) ** 0.5:.4g}")
        if not low < middle < high:
            break
        if good(middle):
            low = middle
        else:
            high = middle
    good(high)
    return tried.found(low, at(low), at(high))


def _fewest_gpus(job: Job) -> Found:
    """The smallest number of GPUs that some split over the models makes do with, by bisection over the number.

    More GPUs are taken to be no worse: of every number all splits are tried that are not known to be too small.
    """
    tried = _Tried(job.goal)
    assert job.cell.rps is not None
    asked = at_rate(job.cell, job.cell.rps, job.span_s)
    models = job.cell.cluster.models
    gpus = {spec.model: spec.profile.gpus for spec in job.cell.cluster.engines}
    too_small: list[Counts] = []
    worst: Cell | None = None

    def first_good(budget: int) -> Cell | None:
        nonlocal worst
        for counts in _splits(budget, [gpus[model] for model in models]):
            if any(all(a <= b for a, b in zip(counts, small, strict=True)) for small in too_small):
                continue
            cell = with_engines(asked, dict(zip(models, counts, strict=True)))
            if tried.good(cell):
                return cell
            too_small.append(counts)
            worst = cell
        return None

    least = sum(gpus.values())
    if job.max_gpus < least:
        raise ChimsimError(f"--max-gpus is {job.max_gpus}; {job.cell.axes['combo']} needs at least {least}")
    low, high = least, least
    best: Cell | None = None
    while best is None and low <= job.max_gpus:
        best = first_good(high)
        if best is None:
            low, high = high + 1, min(2 * high, job.max_gpus) if high < job.max_gpus else high + 1
    if best is None:
        assert worst is not None
        return tried.found(None, worst, worst)
    while low < high:
        middle = (low + high) // 2
        cell = first_good(middle)
        if cell is not None:
            best, high = cell, middle
        else:
            low = middle + 1
    used = sum(gpus[spec.model] for spec in best.cluster.engines)
    return tried.found(float(used), best, worst)


@lru_cache(maxsize=1024)
def _all_splits(budget: int, costs: Counts) -> tuple[Counts, ...]:
    if len(costs) == 1:
        return ((budget // costs[0],),) if budget % costs[0] == 0 and budget else ()
    found = []
    for count in range(1, budget // costs[0] + 1):
        found += [(count, *rest) for rest in _all_splits(budget - count * costs[0], costs[1:])]
    return tuple(found)


def _splits(budget: int, costs: Sequence[int]) -> Iterator[Counts]:
    """Counts of at least 1 a model that leave no room for another engine within ``budget``, even ones first."""
    splits = [split for spare in range(min(costs)) for split in _all_splits(budget - spare, tuple(costs))]
    yield from sorted(splits, key=lambda counts: (sum(abs(a - b) for a, b in combinations(counts, 2)), counts))


def interval(values: Sequence[float], gpus: bool) -> tuple[float, float, float]:
    """Mean and 95 % interval of the answers, or of what they are compared by; of rates geometric, so above 0."""
    if not gpus:
        return geometric_interval(values)
    mean, half = mean_and_interval(values)
    return mean, mean - half, mean + half
