"""Arrival processes: when the workflows of a trace arrive, as seconds from the start of a run.

Every function returns a non-decreasing float array of shape (n,). Random numbers come from the generator that
is passed in.
"""

from __future__ import annotations

from math import isfinite

import numpy as np
import numpy.typing as npt

from traces.columns import columns_of
from traces.schema import Trace, TraceError, Workflow

Times = npt.NDArray[np.float64]


def poisson(n: int, rps: float, rng: np.random.Generator) -> Times:
    """A Poisson process of ``rps`` workflows a second; the first one arrives after the first gap."""
    _check(n, rps)
    return np.cumsum(rng.exponential(1.0 / rps, n))


def gamma(n: int, rps: float, burstiness: float, rng: np.random.Generator) -> Times:
    """Gamma-distributed gaps of mean ``1 / rps``; the first workflow arrives after the first gap.

    ``burstiness`` is that of ``vllm bench serve``: the *shape* of the gamma distribution (scale
    ``1 / (rps * burstiness)``), so 1 is Poisson, smaller is burstier, larger more even, and the gaps'
    coefficient of variation is ``1 / sqrt(burstiness)``. Unlike that tool we do not stretch the
    draw so that it lasts ``n / rps`` seconds.
    """
    _check(n, rps)
    if not isfinite(burstiness) or burstiness <= 0:
        raise TraceError(f"burstiness: expected a positive number (1 is Poisson), found {burstiness}")
    return np.cumsum(rng.gamma(burstiness, 1.0 / (rps * burstiness), n))


def recorded(trace: Trace) -> Times:
    """The trace's own arrivals, sorted, shifted so that the first is 0; in the order of `by_arrival`."""
    times = np.sort(_arrivals_s(trace))
    times -= times[0]
    return times


def by_arrival(trace: Trace) -> tuple[Workflow, ...]:
    """The workflows in order of their recorded arrival (equal ones in file order)."""
    return tuple(trace.workflows[row] for row in arrival_order(trace))


def arrival_order(trace: Trace) -> list[int]:
    """The numbers of the workflows in order of their recorded arrival (equal ones in file order)."""
    order: list[int] = np.argsort(_arrivals_s(trace), kind="stable").tolist()
    return order


def borrowed(other: Trace, n: int, rps: float | None = None) -> Times:
    """``n`` arrivals in the rhythm of another trace, the first at 0.

    Its gaps are taken in order and start over when there are too few. With ``rps`` they are stretched so that
    the ``n`` arrivals come at that mean rate: ``n - 1`` gaps in ``(n - 1) / rps`` seconds.
    """
    _check(n, 1.0 if rps is None else rps)
    gaps = np.diff(recorded(other))
    if n == 1:
        return np.zeros(1)
    if not len(gaps):
        raise TraceError(f"trace {other.name!r} has one arrival only, which is no rhythm to borrow")
    times: Times = np.concatenate(([0.0], np.cumsum(np.resize(gaps, n - 1))))
    if rps is None:
        return times
    if not times[-1]:
        raise TraceError(
            f"the first {n} arrivals of trace {other.name!r} are at one instant: no stretching makes them {rps} rps"
        )
    times *= (n - 1) / rps / times[-1]
    return times


def _arrivals_s(trace: Trace) -> Times:
    if not trace.workflows:
        raise TraceError(f"trace {trace.name!r} has no workflows")
    times = columns_of(trace).arrivals_s
    if times is None:
        raise TraceError(f"trace {trace.name!r} has no arrival times (arrival_s); give a rate (rps) instead")
    return times


def _check(n: int, rps: float) -> None:
    if n < 1:
        raise TraceError(f"number of arrivals: expected a positive integer, found {n}")
    if not isfinite(rps) or rps <= 0 or not isfinite(1.0 / rps):
        raise TraceError(f"rps: expected a positive number of workflows a second, found {rps}")
