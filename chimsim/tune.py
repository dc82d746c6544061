"""Tuning: knobs that lower an objective on some seeds, judged on others against the defaults and the baselines.

Optuna proposes; what it proposes does not depend on the number of workers, and every simulation is remembered by its
content, so that an interrupted search goes on by going through the same proposals again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from chimsim.errors import ChimsimError, near
from chimsim.forecast import seconds
from chimsim.grid import Cell
from chimsim.metrics import geometric_interval
from chimsim.results import ordered_json_bytes, write_file
from chimsim.spec import Scalar, parse_scalar
from chimsim.sweeps import run_cell
from chimsim.variants import with_knobs, with_seed, with_slots
from chimsim.workers import WorkerDied, Workers, run_jobs
from policies import knobs as knobs_of
from policies import policy_class

BATCH = 6
"""Proposals made at once, whatever the number of workers: the next ones learn from all of them."""
SLOTS = "slots"
"""A range of this name is of the engines' slots, not of a knob."""


@dataclass(frozen=True, slots=True)
class Range:
    """Values to search: from ``low`` to ``high``, on a logarithmic scale or not, whole numbers or not."""

    name: str
    low: float
    high: float
    log: bool = False
    whole: bool = False


DEFAULT_RANGES = {
    "tau": Range("tau", 0.0, 4.0),
    "delta_s": Range("delta_s", 0.0, 0.4),
    "aging_tokens_per_s": Range("aging_tokens_per_s", 0.0, 100.0),
}
"""For knobs of these names, where the user gives no range."""

KEPT = ("mean_workflow_latency_s", "p50_workflow_latency_s", "p90_workflow_latency_s", "p99_workflow_latency_s",
        "mean_slowdown", "latency_per_token_ms", "solved_rate", "not_steady", "rejected_workflows")  # fmt: skip
"""What is remembered of a run."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What to lower: the key of a summary; ``min_solved`` is the least share of workflows that must be solved."""

    key: str
    min_solved: float | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """A policy with its knobs, and what its runs gave: ``values`` and ``solved`` by seed."""

    title: str
    knobs: Mapping[str, Scalar]
    values: tuple[float, ...]
    solved: tuple[float, ...]

    def solves(self, objective: Objective) -> bool:
        """Whether it solves enough on average."""
        return objective.min_solved is None or sum(self.solved) / len(self.solved) >= objective.min_solved


@dataclass(frozen=True, slots=True)
class Gain:
    """How much lower the tuned setting's objective is than another's, in per cent, paired by seed."""

    over: str
    percent: float
    low: float
    high: float

    @property
    def certain(self) -> bool:
        """Whether the whole interval is a gain."""
        return self.low > 0.0


@dataclass
class Runs:
    """Simulations by their content; kept in a folder if there is one."""

    workers: int | None
    folder: Path | None = None
    report: Callable[[int, str], None] = lambda done, title: None
    done: int = 0
    _known: dict[str, dict[str, Any]] = field(default_factory=dict)

    def summaries(self, cells: Sequence[Cell]) -> list[dict[str, Any]]:
        """One for each cell, in order. Raises `ChimsimError` for a cell that fails."""
        missing = list({cell.name: cell for cell in cells if self._look_up(cell) is None}.values())
        outcomes = run_jobs(summary_of, missing, Workers(self.workers), work_s=sum(map(seconds, missing)))
        try:
            for index, outcome in outcomes:
                cell = missing[index]
                if "error" in outcome:
                    raise ChimsimError(f"{cell.title}: {outcome['error']}")
                self._known[cell.name] = outcome
                if self.folder is not None:
                    write_file(self.folder / f"{cell.name}.json", ordered_json_bytes(outcome))
                self.done += 1
                self.report(self.done, cell.title)
        except WorkerDied as died:
            raise ChimsimError(f"{died} in cell ({missing[died.index].title})") from None
        finally:
            outcomes.close()
        return [self._known[cell.name] for cell in cells]

    def _look_up(self, cell: Cell) -> dict[str, Any] | None:
        if cell.name not in self._known and self.folder is not None:
            try:
                row = json.loads((self.folder / f"{cell.name}.json").read_bytes())
                self._known[cell.name] = {key: row[key] for key in KEPT}
            except (OSError, ValueError, KeyError, TypeError):
                return None
        return self._known.get(cell.name)


def summary_of(cell: Cell) -> dict[str, Any]:
    """What is kept of the cell's summary; an error of the input comes back in it."""
    try:
        _, summary = run_cell(cell)
    except ValueError as error:
        return {"error": str(error)}
    return {key: summary[key] for key in KEPT}


def ranges_for(policy: str, given: Sequence[str]) -> list[Range]:
    """The ranges asked for (``name=low..high``, ``:log`` for a logarithmic scale), or the defaults of its knobs.

    Raises `ChimsimError`.
    """
    known = {knob.name: knob for knob in knobs_of(policy_class(policy))}
    if not given:
        found = [DEFAULT_RANGES[name] for name in known if name in DEFAULT_RANGES]
        if not found:
            raise ChimsimError(f"policy {policy} has no knob with a range of its own; give --search name=low..high")
        return found
    ranges = []
    for text in given:
        name, sign, rest = text.partition("=")
        span, _, scale = rest.partition(":")
        low, dots, high = span.partition("..")
        values = [parse_scalar(low), parse_scalar(high)]
        numbers = [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        if not sign or not dots or len(numbers) < 2 or scale not in ("", "log"):
            raise ChimsimError(f"--search: {text!r}; expected name=low..high or name=low..high:log")
        if name != SLOTS and name not in known:
            raise ChimsimError(f"--search: policy {policy} has no knob {name!r}{near(name, [*known, SLOTS])}")
        if not 0 <= numbers[0] < numbers[1] < inf or (scale and not numbers[0]):
            raise ChimsimError(f"--search: {text!r}; expected 0 <= low < high, and low above 0 with :log")
        if name == SLOTS and numbers[0] < 1:
            raise ChimsimError(f"--search: {text!r}; an engine has at least 1 slot")
        whole = name == SLOTS or known[name].type is int
        if whole and not all(isinstance(value, int) for value in values):
            raise ChimsimError(f"--search: {text!r}; {name} takes whole numbers")
        ranges.append(Range(name, numbers[0], numbers[1], bool(scale), whole))
    if len({each.name for each in ranges}) < len(ranges):
        raise ChimsimError("--search: a name stands there twice")
    return ranges


def search(
    cell: Cell, ranges: Sequence[Range], objective: Objective, seeds: Sequence[int], trials: int, runs: Runs, seed: int
) -> dict[str, Scalar]:
    """The best values found on these seeds; those of the policy itself are among what is tried.

    Of settings that solve too little the one that solves most is best, so that a search finds its way to those that
    solve enough.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="minimize")
    study.enqueue_trial(_own(cell, ranges))
    for batch in _batches(trials):
        # A sampler of its own for every batch: proposals depend on what is known, not on how it was come by.
        study.sampler = optuna.samplers.TPESampler(seed=seed + batch[0], constant_liar=True)
        asked = [study.ask() for _ in batch]
        values = [{each.name: _suggest(trial, each) for each in ranges} for trial in asked]
        settings = measure([changed(cell, each) for each in values], objective, seeds, runs)
        for trial, setting in zip(asked, settings, strict=True):
            study.tell(trial, _cost(setting, objective))
    best = study.best_trial.params
    return {name: (int(value) if isinstance(value, int) else float(f"{value:.4g}")) for name, value in best.items()}


def _batches(trials: int) -> Iterator[range]:
    for first in range(0, trials, BATCH):
        yield range(first, min(first + BATCH, trials))


def _suggest(trial: Any, each: Range) -> Scalar:
    if each.whole:
        return int(trial.suggest_int(each.name, int(each.low), int(each.high), log=each.log))
    return float(f"{trial.suggest_float(each.name, each.low, each.high, log=each.log):.4g}")


def _own(cell: Cell, ranges: Sequence[Range]) -> dict[str, Scalar]:
    """The cell's own values, as far as they lie in the ranges."""
    own: dict[str, Any] = {knob.name: knob.default for knob in knobs_of(policy_class(cell.policy))}
    own |= cell.knobs
    own[SLOTS] = max(spec.max_batch_size for spec in cell.cluster.engines)
    found: dict[str, Scalar] = {}
    for each in ranges:
        value = own[each.name]
        if isinstance(value, int | float) and each.low <= value <= each.high:
            found[each.name] = value
    return found


def changed(cell: Cell, values: Mapping[str, Scalar]) -> Cell:
    """The cell with these values of knobs and slots."""
    slots = values.get(SLOTS)
    knobs = {name: value for name, value in values.items() if name != SLOTS}
    found = with_knobs(cell, knobs) if knobs else cell
    return found if slots is None else with_slots(found, int(slots))


def measure(cells: Sequence[Cell], objective: Objective, seeds: Sequence[int], runs: Runs) -> list[Setting]:
    """Every cell on every seed. Raises `ChimsimError` where the objective cannot be had of a run."""
    each = [with_seed(cell, seed) for cell in cells for seed in seeds]
    summaries = runs.summaries(each)
    made = []
    for number, cell in enumerate(cells):
        mine = summaries[number * len(seeds) : (number + 1) * len(seeds)]
        values, solved = [], []
        for summary in mine:
            if summary[objective.key] is None:
                raise ChimsimError(f"{cell.title}: nothing was completed, so that there is no {objective.key}")
            if objective.min_solved is not None and summary["solved_rate"] is None:
                raise ChimsimError("--min-solved: the trace has no labels (solved is null)")
            values.append(float(summary[objective.key]))
            solved.append(float(summary["solved_rate"]) if summary["solved_rate"] is not None else float("nan"))
        made.append(Setting(cell.title, cell.knobs, tuple(values), tuple(solved)))
    return made


def _cost(setting: Setting, objective: Objective) -> float:
    mean = float(np.mean(setting.values))
    if setting.solves(objective):
        return mean
    assert objective.min_solved is not None
    # Beyond any latency, and the less the nearer it is to solving enough.
    return 1e9 * (1.0 + objective.min_solved - float(np.mean(setting.solved)))


def gain(tuned: Setting, other: Setting, name: str) -> Gain:
    """By the ratio, seed by seed."""
    ratio, low, high = geometric_interval(a / b for a, b in zip(tuned.values, other.values, strict=True))
    return Gain(name, 100.0 * (1.0 - ratio), 100.0 * (1.0 - high), 100.0 * (1.0 - low))
