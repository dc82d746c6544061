"""How one comparison is judged: paired values, a trend over steps, a frontier against a point.

Arrays in, a `Block` out: the mean of both sides, the paired ratio or difference with its 95 % Student interval, and
what follows from it. ``level`` is the confidence of an interval widened for the number of comparisons.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from chimsim.frontier import Frontier, convex_frontier
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


def dominates(
    axes: Mapping[str, Scalar], line: Frontier, goal: Frontier, corners: Sequence[Sequence[int]], level: float
) -> Block:
    """Whether a line is faster than a goal (one setting) and solves no less.

    ``corners`` are for each seed the line's settings to choose among, in order, chosen on other runs; none where those
    solved less than the goal. Two neighbours take turns for such shares of the time that at this seed as much is solved
    as by the goal, as far as they reach.
    """
    found = [(seed, among) for seed, among in enumerate(corners) if among]
    target = goal.means[0]
    if not found:
        best = max(solved for _, solved in line.means)
        note = f"solves {100 * best:.1f} % at most, {100 * target[1]:.1f} % are to be met"
        return Block(axes, np.nan, target[0], "ratio", verdict="fails", surely_wrong=True, note=note)
    mixed = [
        (seed, in_turn(among, line.latency_s[:, seed], line.solved[:, seed], float(goal.solved[0, seed])))
        for seed, among in found
    ]
    fast = np.array([_mean(line.latency_s[:, seed], shares) for seed, shares in mixed])
    slow = np.array([goal.latency_s[0, seed] for seed, _ in mixed])
    gain = [_mean(line.solved[:, seed], shares) - float(goal.solved[0, seed]) for seed, shares in mixed]
    solved, half = mean_and_interval(gain)
    block = compare(axes, fast, slow, "ratio", lower=True, level=level)
    note = f"{_settings(line, [shares for _, shares in mixed])}; solved {100 * solved:+.1f} ± {100 * half:.1f} points"
    block = replace(block, note=note)
    if len(found) > 1 and solved + half < -MARGIN:
        surely = solved + mean_and_interval(gain, level)[1] < -MARGIN
        return replace(block, verdict="fails", surely_wrong=surely or block.surely_wrong)
    if block.verdict != "holds":
        return block
    if len(found) < len(corners):
        note = f"{block.note}; out of reach in {len(corners) - len(found)} seeds"
        return replace(block, verdict="undecided", note=note)
    return replace(block, verdict="undecided") if solved - half < -MARGIN else block


def in_turn(among: Sequence[int], latency_s: Floats, solved: Floats, target: float) -> dict[int, float]:
    """The shares of one or two neighbours among these settings that solve the target, the fastest if there are several.

    If none reaches it the one that solves most; if all solve more the fastest.
    """
    ways: list[tuple[float, dict[int, float]]] = []
    for first, second in itertools.pairwise(among):
        gap = float(solved[second] - solved[first])
        share = (target - float(solved[first])) / gap if gap else -1.0
        if 0 <= share <= 1:
            shares = {first: 1 - share, second: share}
            ways.append((_mean(latency_s, shares), shares))
    if ways:
        return min(ways, key=lambda way: way[0])[1]
    if all(solved[index] >= target for index in among):
        return {min(among, key=lambda index: float(latency_s[index])): 1.0}
    return {max(among, key=lambda index: float(solved[index])): 1.0}


def _mean(values: Floats, shares: Mapping[int, float]) -> float:
    return float(sum(share * values[index] for index, share in shares.items()))


def _settings(line: Frontier, mixed: Sequence[Mapping[int, float]]) -> str:
    """The settings with their shares, over all seeds."""
    total = {at: sum(shares.get(at, 0.0) for shares in mixed) / len(mixed) for at in range(len(line.settings))}
    shown = [f"{line.settings[index]} {share:.0%}" for index, share in total.items() if share > 0.005]
    return ", ".join(shown) if line.settings != ("",) else "as it is"


def corners_for(line: Frontier, goal: Frontier) -> list[int]:
    """The corners of the line's means, none if the best of them solves less than the goal's mean."""
    corners = convex_frontier(line.means)
    return corners if line.means[corners[-1]][1] >= goal.means[0][1] else []


def corners_by_other_seeds(line: Frontier, goal: Frontier) -> list[list[int]]:
    """For each seed the corners that all other seeds give; an only seed has its own."""
    seeds = range(line.solved.shape[1])
    return [
        corners_for(line.of_seeds(others), goal.of_seeds(others))
        for seed in seeds
        for others in [[other for other in seeds if other != seed] or [seed]]
    ]


def measure_of(metric: str, left: Floats, right: Floats) -> Measure:
    """Shares and indices are compared by difference, and so is what can be 0; all else by ratio."""
    share = metric.split("[")[0].endswith(_SHARES)
    return "difference" if share or not ((left > 0).all() and (right > 0).all()) else "ratio"


_SHARES = ("_rate", "_share", "_index", "_auc", "_distance", "map", "queues_filled")
