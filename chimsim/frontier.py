"""The frontier of latency and solved rate in numbers: what it covers, how sure it is, and which setting to take.

Arrays and summaries in, numbers out. Latency is better when lower, the solved rate (0 to 1) when higher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from chimsim.metrics import mean_and_interval, non_dominated

Floats = npt.NDArray[np.float64]
Point = tuple[float, float]
"""Latency in seconds, solved rate."""


def hypervolume(points: Sequence[Point], reference: Point) -> float:
    """The area that the points dominate as seen from ``reference``: seconds times solved rate.

    It is what a set of points is worth in one number (Zitzler and Thiele, 1999): every latency up to the reference's
    counts with what is solved within it, beyond the reference's rate. Points worse than the reference add nothing.
    """
    area, rate = 0.0, reference[1]
    inside = sorted((x, y) for x, y in points if x < reference[0] and y > reference[1])
    for index, (_, solved) in enumerate(inside):
        if solved > rate:
            # from the first point that solves more than any before it, up to the reference
            area += (reference[0] - inside[index][0]) * (solved - rate)
            rate = solved
    return area


def reference_point(points: Sequence[Point]) -> Point:
    """Of a block's runs: beyond the slowest and the worst of them, taken apart, by a tenth of what they span.

    So every run dominates it, and the policy that has the slowest and the worst itself gets something for them, too.
    """
    latencies, solved = [x for x, _ in points], [y for _, y in points]
    beyond_s, below = (0.1 * (max(values) - min(values)) for values in (latencies, solved))
    return max(latencies) + beyond_s, min(solved) - below


def attained(points: Sequence[Point], latencies: Floats) -> Floats:
    """The best solved rate among the points at most so slow, at each latency (s); NaN before the first."""
    ordered = sorted(points)
    best = np.maximum.accumulate([solved for _, solved in ordered])
    at = np.searchsorted([latency for latency, _ in ordered], latencies, side="right")
    return np.where(at > 0, best[np.maximum(at - 1, 0)], np.nan)


@dataclass(frozen=True)
class Frontier:
    """One line's points over its settings and seeds: both arrays have the shape (settings, seeds).

    ``settings`` are names for people, in order of the rows, ``seeds`` the columns.
    """

    settings: tuple[str, ...]
    seeds: tuple[int, ...]
    latency_s: Floats
    solved: Floats

    @property
    def means(self) -> list[Point]:
        """Each setting's mean over the seeds."""
        return list(zip(self.latency_s.mean(axis=1).tolist(), self.solved.mean(axis=1).tolist(), strict=True))

    def of_seeds(self, seeds: Sequence[int]) -> Frontier:
        """The line with some of its seeds (by their positions)."""
        chosen = list(seeds)
        return Frontier(
            self.settings, tuple(self.seeds[at] for at in chosen), self.latency_s[:, chosen], self.solved[:, chosen]
        )

    def at_seed(self, seed: int) -> list[Point]:
        """The points of one seed (by its position)."""
        return list(zip(self.latency_s[:, seed].tolist(), self.solved[:, seed].tolist(), strict=True))

    def hypervolumes(self, reference: Point) -> list[float]:
        """Seed by seed."""
        return [hypervolume(self.at_seed(seed), reference) for seed in range(self.solved.shape[1])]

    def on_frontier(self, others: Sequence[Frontier]) -> list[tuple[bool, float]]:
        """Of each setting whether no mean of these beats its own, and in what share of the seeds none does.

        ``others`` has this line among them.
        """
        places = [(line, row) for line in others for row in range(len(line.settings))]
        mine = [index for index, (line, _) in enumerate(places) if line is self]
        means = non_dominated([line.means[row] for line, row in places])
        wins = np.zeros(len(mine))
        for seed in self.seeds:
            # in a sweep that is not finished, other lines may lack the seed
            there = [(line, row, line.seeds.index(seed)) for line, row in places if seed in line.seeds]
            keep = non_dominated([(line.latency_s[row, s], line.solved[row, s]) for line, row, s in there])
            wins += [kept for kept, (line, _, _) in zip(keep, there, strict=True) if line is self]
        return [(means[index], float(won) / len(self.seeds)) for index, won in zip(mine, wins, strict=True)]

    def band(self, latencies: Floats) -> tuple[Floats, Floats, Floats]:
        """Mean of what is attained at each latency (s), and both ends of its 95 % interval over the seeds.

        NaN where a seed has no point so fast.
        """
        rows = np.array([attained(self.at_seed(seed), latencies) for seed in range(self.solved.shape[1])])
        found = [mean_and_interval(column) if np.isfinite(column).all() else (np.nan, np.nan) for column in rows.T]
        mean, half = (np.array(values) for values in zip(*found, strict=True))
        return mean, mean - half, mean + half


def convex_frontier(points: Sequence[Point]) -> list[int]:
    """The positions of the points that neither another nor two others in turn beat, fastest first.

    Whoever runs one setting for a share of the time and another for the rest gets the straight line between the two, in
    mean latency and in solved rate; so these are the corners of what can be had.
    """
    corners: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1], i)):
        latency, solved = points[index]
        if corners and solved <= points[corners[-1]][1]:
            continue
        while len(corners) > 1:
            (fast, few), (middle, some) = points[corners[-2]], points[corners[-1]]
            if (some - few) * (latency - fast) > (solved - few) * (middle - fast):
                break
            corners.pop()
        corners.append(index)
    return corners


def frontier_of(rows: pd.DataFrame, names: Sequence[str], metric: str = "mean_workflow_latency_s") -> Frontier | None:
    """The line of a summary's rows, which vary in the columns ``names`` and in the seed; None without labels.

    Only seeds that every setting has, and only settings that have labels.
    """
    groups = rows.groupby(list(names), sort=False, dropna=False, observed=True) if names else [((), rows)]
    found = {}
    for key, group in groups:
        values = key if isinstance(key, tuple) else (key,)
        text = ", ".join(
            f"{n} {v:g}" if isinstance(v, float) else f"{n} {v}" for n, v in zip(names, values, strict=True)
        )
        found[text] = group.set_index("seed")[[metric, "solved_rate"]].dropna()
    found = {text: group for text, group in found.items() if len(group)}
    if not found:
        return None
    seeds = sorted(set.intersection(*(set(group.index) for group in found.values())))
    if not seeds:
        return None
    latency = np.array([group.loc[seeds, metric].to_numpy(np.float64) for group in found.values()])
    solved = np.array([group.loc[seeds, "solved_rate"].to_numpy(np.float64) for group in found.values()])
    return Frontier(tuple(found), tuple(seeds), latency, solved)
