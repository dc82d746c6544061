"""A weighted histogram of durations in bins 1 % wide, cheap to add whole stretches of steps to."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from math import ceil, nan

import numpy as np
import pandas as pd

GROWTH = 1.01
FIRST_EDGE_S = 1e-6
NUM_BINS = 2800
_EDGES: list[float] = [FIRST_EDGE_S * GROWTH**i for i in range(NUM_BINS)]


class LogHistogram:
    """Weights by duration; a quantile is the geometric middle of its bin, so at most 0.5 % off.

    Durations below 1 microsecond or above a few days fall into the first or last bin.
    """

    def __init__(self) -> None:
        self.weights: dict[int, float] = defaultdict(float)
        self.sum_s = 0.0

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return sum(self.weights.values())

    @property
    def mean_s(self) -> float:
        """The weighted mean, exact (from sums, not from bins); NaN when there is no weight."""
        total = self.total
        return self.sum_s / total if total else nan

    def add(self, seconds: float, weight: float) -> None:
        """Count one duration with its weight."""
        self.sum_s += seconds * weight
        self.weights[bisect_right(_EDGES, seconds)] += weight

    def add_progression(self, first_s: float, step_s: float, count: int, weight: float) -> None:
        """Count ``first_s + i * step_s`` for i in 0 .. count - 1, each with ``weight``; ``step_s`` >= 0."""
        bin_ = bisect_right(_EDGES, first_s)
        if count == 1:
            self.sum_s += first_s * weight
            self.weights[bin_] += weight
            return
        self.sum_s += (count * first_s + step_s * (count * (count - 1) // 2)) * weight
        last_s = first_s + step_s * (count - 1)
        # Most stretches stay within a bin: look there first.
        last = bin_ if bin_ < NUM_BINS and last_s < _EDGES[bin_] else bisect_right(_EDGES, last_s)
        done = 0
        while bin_ < last:
            edge = _EDGES[bin_]
            below = max(ceil((edge - first_s) / step_s), done)
            while below > done and first_s + step_s * (below - 1) >= edge:
                below -= 1
            while first_s + step_s * below < edge:
                below += 1
            self.weights[bin_] += (below - done) * weight
            done = below
            bin_ = bisect_right(_EDGES, first_s + step_s * done)
        self.weights[last] += (count - done) * weight

    def merge(self, other: LogHistogram) -> None:
        """Add another histogram's weights to this one's."""
        self.sum_s += other.sum_s
        for bin_, weight in other.weights.items():
            self.weights[bin_] += weight

    def quantile(self, p: float) -> float:
        """The duration in seconds below which a share ``p`` of the weight lies, NaN when there is no weight."""
        filled = sorted((bin_, weight) for bin_, weight in self.weights.items() if weight)
        if not filled:
            return nan
        sums = np.cumsum([weight for _, weight in filled])
        position = int(np.searchsorted(sums, p * sums[-1], side="left"))
        bin_ = filled[min(position, len(filled) - 1)][0]
        return float(_EDGES[max(bin_ - 1, 0)] * GROWTH**0.5)

    def to_frame(self) -> pd.DataFrame:
        """Columns ``low_s``, ``high_s`` and ``weight`` of the bins that have any."""
        bins = sorted(bin_ for bin_, weight in self.weights.items() if weight)
        return pd.DataFrame(
            {
                "low_s": [_EDGES[b - 1] if b else 0.0 for b in bins],
                "high_s": [_EDGES[b] if b < NUM_BINS else float("inf") for b in bins],
                "weight": [float(self.weights[b]) for b in bins],
            }
        )
