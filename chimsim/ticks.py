"""Exact time: instants and durations are multiples of 2**-34 s (58 ps), so that every sum of them is exact.

A double holds such multiples exactly up to 2**19 s, six days of simulated time; that is why a stretch of many steps
taken at once ends at the same bits as the same steps taken one by one.
"""

from __future__ import annotations

from math import ceil

import numpy as np
import numpy.typing as npt

TICKS_PER_S = 2.0**34
HORIZON_S = 2.0**19
"""Beyond this sums stop being exact; a simulation that reaches it is refused."""


def exact(seconds: float) -> float:
    """The nearest multiple of a tick."""
    return round(seconds * TICKS_PER_S) / TICKS_PER_S


def exact_all(seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """`exact` of each."""
    return np.rint(seconds * TICKS_PER_S) / TICKS_PER_S


def exact_not_before(seconds: float) -> float:
    """The first multiple of a tick that is not before ``seconds``."""
    return ceil(seconds * TICKS_PER_S) / TICKS_PER_S
