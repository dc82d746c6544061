"""How one comparison is judged: paired values, a trend over steps, a frontier against a point.

Arrays in, a `Block` out: the mean of both sides, the paired ratio or difference with its 95 % Student interval, and
what follows from it. ``level`` is the confidence of an interval widened for the number of comparisons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from chimsim.frontier import Frontier, fastest_mixture
from chimsim.metrics import mean_and_interval
from chimsim.spec import Scalar, scalar_text

Floats = npt.NDArray[np.floating[Any]]
Judgement = Literal["holds", "fails", "undecided"]
Measure = Literal["ratio", "difference"]

MARGIN = 0.01
"""A solved rate lower by less than this (a point) is no worse, where a frontier is to dominate."""


@dataclass(frozen=True, slots=True)
class Block:
    """One comparison. ``axes`` say where, ``by_seed`` are the logarithms of the ratios, or the differences."""

    axes: Mapping[str, Scalar]
    left: float
    right: float
    measure: Measure
    value: float = np.nan
    low: float = np.nan
    high: float = np.nan
    verdict: Judgement = "undecided"
    surely_wrong: bool = False
    """Whether even the widened interval is on the wrong side."""
    note: str = ""
    by_seed: tuple[float, ...] = ()

    @property
    def title(self) -> str:
        """The block in a few words."""
        plain = ("trace", "combo", "policy")
        return ", ".join(str(v) if n in plain else f"{n} {scalar_text(v)}" for n, v in self.axes.items())


def compare(
    axes: Mapping[str, Scalar], left: Floats, right: Floats, measure: Measure, *, lower: bool, level: float
) -> Block:
    """Two sides with one value a seed each; the claim is that the left one is lower, or that it is higher."""
    if not len(left):
        return Block(axes, np.nan, np.nan, measure, note="no value")
    changes = (np.log(left / right) if measure == "ratio" else left - right).tolist()
    means = float(left.mean()), float(right.mean())
    mean, half = mean_and_interval(changes)
    if len(changes) == 1:
        value = exp(mean) if measure == "ratio" else mean
        return Block(axes, *means, measure, value, note="one seed, no interval", by_seed=tuple(changes))
    _, wide = mean_and_interval(changes, level)
    sign = 1 if lower else -1
    verdict: Judgement = "holds" if sign * mean + half < 0 else "fails" if sign * mean - half > 0 else "undecided"
    shown = (mean, mean - half, mean + half)
    if measure == "ratio":
        shown = (exp(shown[0]), exp(shown[1]), exp(shown[2]))
    return Block(axes, *means, measure, *shown, verdict, sign * mean - wide > 0, by_seed=tuple(changes))


def trend(
    axes: Mapping[str, Scalar],
    axis: str,
    steps: Sequence[float],
    columns: Sequence[Floats],
    measure: Measure,
    *,
    falls: bool,
    level: float,
) -> Block:
    """From the least to the largest of the steps of an axis; one that surely goes the other way makes it fail."""
    whole = compare(axes, columns[-1], columns[0], measure, lower=falls, level=level)
    note = f"{axis} {scalar_text(steps[0])} to {scalar_text(steps[-1])}"
    # as many steps as there are chances to be wrong by accident
    within = 1 - (1 - level) / (len(steps) - 1)
    against = [
        f"{scalar_text(steps[i])} to {scalar_text(steps[i + 1])}"
        for i in range(len(steps) - 1)
        if compare(axes, columns[i + 1], columns[i], "difference", lower=falls, level=within).surely_wrong
    ]
    if against:
        note += f"; the other way from {', '.join(against)}"
        return replace(whole, verdict="fails", surely_wrong=True, note=note)
    return replace(whole, note=f"{note}; {whole.note}" if whole.note else note)


Shares = Mapping[int, float]
"""Of a line's settings by their positions, together 1."""


def dominates(
    axes: Mapping[str, Scalar], line: Frontier, goal: Frontier, picks: Sequence[Shares | None], level: float
) -> Block:
    """Whether a line is faster than a goal (one setting) and solves no less, with the settings picked for each seed.

    Where two settings take turns, they do so for such shares of the time that at this seed as much is solved as by the
    goal, as far as the two reach.
    """
    chosen = [(seed, pick) for seed, pick in enumerate(picks) if pick is not None]
    found = [(seed, _in_turn(pick, line.solved[:, seed], float(goal.solved[0, seed]))) for seed, pick in chosen]
    target = goal.means[0]
    if not found:
        best = max(solved for _, solved in line.means)
        note = f"solves {100 * best:.1f} % at most, {100 * target[1]:.1f} % are to be met"
        return Block(axes, np.nan, target[0], "ratio", verdict="fails", surely_wrong=True, note=note)
    fast = np.array([_mixed(line.latency_s[:, seed], pick) for seed, pick in found])
    slow = np.array([goal.latency_s[0, seed] for seed, _ in found])
    gain = [_mixed(line.solved[:, seed], pick) - float(goal.solved[0, seed]) for seed, pick in found]
    solved, half = mean_and_interval(gain)
    block = compare(axes, fast, slow, "ratio", lower=True, level=level)
    note = f"{_settings(line, [pick for _, pick in found])}; solved {100 * solved:+.1f} ± {100 * half:.1f} points"
    block = replace(block, note=note)
    if len(found) > 1 and solved + half < -MARGIN:
        surely = solved + mean_and_interval(gain, level)[1] < -MARGIN
        return replace(block, verdict="fails", surely_wrong=surely or block.surely_wrong)
    if block.verdict != "holds":
        return block
    if len(found) < len(picks):
        note = f"{block.note}; out of reach in {len(picks) - len(found)} seeds"
        return replace(block, verdict="undecided", note=note)
    return replace(block, verdict="undecided") if solved - half < -MARGIN else block


def _in_turn(pick: Shares, solved: Floats, target: float) -> Shares:
    """The shares of two settings that solve the target at this seed; one setting stays alone."""
    if len(pick) == 1:
        return pick
    low, high = sorted(pick, key=lambda index: float(solved[index]))
    gap = float(solved[high] - solved[low])
    share = min(max((target - float(solved[low])) / gap, 0.0), 1.0) if gap > 0 else pick[high]
    return {low: 1 - share, high: share}


def _mixed(values: Floats, shares: Shares) -> float:
    return float(sum(share * values[index] for index, share in shares.items()))


def _settings(line: Frontier, picks: Sequence[Shares]) -> str:
    """The settings with their shares, over all seeds."""
    total = {index: sum(pick.get(index, 0.0) for pick in picks) / len(picks) for index in range(len(line.settings))}
    shown = [f"{line.settings[index]} {share:.0%}" for index, share in total.items() if share > 0.005]
    return ", ".join(shown) if len(shown) > 1 or line.settings != ("",) else "as it is"


def picks_of_other_seeds(line: Frontier, goal: Frontier) -> list[Shares | None]:
    """For each seed what the other seeds would choose: the fastest mixture that there solved as much as ``goal``.

    An only seed chooses for itself.
    """
    seeds = range(line.solved.shape[1])
    picks: list[Shares | None] = []
    for seed in seeds:
        others = [s for s in seeds if s != seed] or [seed]
        points = list(zip(line.latency_s[:, others].mean(axis=1), line.solved[:, others].mean(axis=1), strict=True))
        picks.append(fastest_mixture(points, float(goal.solved[0, others].mean())))
    return picks


def measure_of(metric: str, left: Floats, right: Floats) -> Measure:
    """Shares and indices are compared by difference, and so is what can be 0; all else by ratio."""
    share = metric.split("[")[0].endswith(_SHARES)
    return "difference" if share or not ((left > 0).all() and (right > 0).all()) else "ratio"


_SHARES = ("_rate", "_share", "_index", "_auc", "_distance", "map", "queues_filled")
