"""Arrival processes against their laws."""

from __future__ import annotations

import numpy as np
import pytest

from traces import Run, Stage, Trace, TraceError, Workflow, arrivals

RUNS = {"m": Run((Stage("call", 10, 5),))}


def trace_at(*times: float | None) -> Trace:
    return Trace("other", tuple(Workflow(f"w-{i}", "x", RUNS, arrival_s=t) for i, t in enumerate(times)))


def gaps_of(times: arrivals.Times) -> arrivals.Times:
    assert times.dtype == np.float64
    gaps = np.diff(times, prepend=0.0)
    assert (gaps >= 0).all()
    return gaps


def test_poisson_gaps_have_the_mean_and_spread_of_an_exponential() -> None:
    gaps = gaps_of(arrivals.poisson(40_000, 8.0, np.random.default_rng(1)))
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_vary_by_one_over_the_root_of_burstiness(burstiness: float) -> None:
    gaps = gaps_of(arrivals.gamma(40_000, 8.0, burstiness, np.random.default_rng(2)))
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.04)


def test_the_seed_decides() -> None:
    def drawn(seed: int) -> list[float]:
        return list(arrivals.gamma(5, 2.0, 0.5, np.random.default_rng(seed)))

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def test_recorded_times_are_sorted_from_zero_and_match_their_workflows() -> None:
    trace = trace_at(5.0, 2.0, 9.5)
    assert list(arrivals.recorded(trace)) == [0.0, 3.0, 7.5]
    assert [w.workflow_id for w in arrivals.by_arrival(trace)] == ["w-1", "w-0", "w-2"]


def test_a_borrowed_rhythm_repeats_and_stretches() -> None:
    trace = trace_at(10.0, 11.0, 13.0)
    assert list(arrivals.borrowed(trace, 6)) == [0.0, 1.0, 3.0, 4.0, 6.0, 7.0]
    assert list(arrivals.borrowed(trace, 3, rps=2.0)) == pytest.approx([0.0, 1 / 3, 1.0])
    assert list(arrivals.borrowed(trace, 1)) == [0.0]
    long = arrivals.borrowed(trace, 1000, rps=4.0)
    assert 999 / long[-1] == pytest.approx(4.0)


@pytest.mark.parametrize("rps", [0.0, -1.0, float("nan"), float("inf"), 1e-320])
def test_rates_are_positive(rps: float) -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(TraceError, match="rps: expected a positive number"):
        arrivals.poisson(3, rps, rng)
    with pytest.raises(TraceError, match="rps: expected a positive number"):
        arrivals.gamma(3, rps, 1.0, rng)
    with pytest.raises(TraceError, match="rps: expected a positive number"):
        arrivals.borrowed(trace_at(0.0, 1.0), 3, rps)


def test_other_wrong_requests() -> None:
    rng = np.random.default_rng(0)
    for burstiness in (0.0, -1.0, float("nan")):
        with pytest.raises(TraceError, match="burstiness: expected a positive number"):
            arrivals.gamma(3, 1.0, burstiness, rng)
    with pytest.raises(TraceError, match="number of arrivals"):
        arrivals.poisson(0, 1.0, rng)
    with pytest.raises(TraceError, match="has no arrival times"):
        arrivals.recorded(trace_at(None, None))
    with pytest.raises(TraceError, match="no rhythm to borrow"):
        arrivals.borrowed(trace_at(3.0), 2)
    with pytest.raises(TraceError, match="at one instant"):
        arrivals.borrowed(trace_at(3.0, 3.0), 2, rps=1.0)
    assert list(arrivals.borrowed(trace_at(3.0, 3.0), 2)) == [0.0, 0.0]
