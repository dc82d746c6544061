"""Metrics: formulas on hand-made records, the steadiness rule, the frontier against brute force."""

from __future__ import annotations

from math import isnan, nan, sqrt

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimsim import load_cluster, simulate
from chimsim.metrics import mean_and_interval, non_dominated, not_steady, summarise
from chimsim.records import LogHistogram, RunResult
from tests.chimsim.small import small_trace


def hand_made() -> RunResult:
    """Four workflows of one request: warm-up, two completed, one rejected; E has 2 slots, 10 s makespan."""
    requests = pd.DataFrame(
        {
            "request_id": [0, 1, 2, 3],
            "workflow": [0, 1, 2, 3],
            "engine": ["E"] * 4,
            "model": ["M"] * 4,
            "stage_name": ["s"] * 4,
            "prompt_tokens": [100, 100, 300, 900],
            "cached_tokens": [0, 32, 64, 0],
            "output_tokens": [10, 11, 1, 0],
            "ready_at": [0.0, 1.0, 2.0, 3.0],
            "enqueued_at": [0.0, 1.3, 2.0, 3.0],
            "admitted_at": [0.0, 1.5, 5.0, nan],
            "first_token_at": [1.0, 2.0, 6.0, nan],
            "finished_at": [9.0, 4.0, 6.0, nan],
            "service_s": [9.0, 2.5, 1.0, 0.0],
            "preemptions": [5, 1, 0, 0],
            "yields": [0, 2, 0, 0],
            "promotions": [0, 0, 1, 0],
            "longest_wait_s": [50.0, 0.5, 3.0, nan],
            "status": ["completed", "completed", "completed", "rejected"],
            "measured": [False, True, True, True],
        }
    )
    workflows = pd.DataFrame(
        {
            "workflow": [0, 1, 2, 3],
            "arrived_at": [0.0, 1.0, 2.0, 3.0],
            "finished_at": [9.0, 4.0, 6.0, nan],
            "latency_s": [9.0, 3.0, 4.0, nan],
            "output_tokens": [10, 11, 1, 0],
            "queue_time_s": [0.0, 0.5, 3.0, 0.0],
            "stages": [1, 1, 7, 1],
            "slowdown": [1.0, 1.5, 4.0, nan],
            "solved": [1.0, 1.0, nan, 0.0],
            "mixed_models": [False, False, True, False],
            "status": ["completed", "completed", "completed", "rejected"],
            "measured": [False, True, True, True],
        }
    )
    engines = pd.DataFrame(
        {
            "engine": ["E"],
            "busy_s": [8.0],
            "makespan_s": [10.0],
            "mean_running": [1.0],
            "max_batch_size": [2],
        }
    )
    itl = LogHistogram()
    itl.add(0.2, 10.0)
    return RunResult(requests, workflows, engines, pd.DataFrame(), itl)


def test_formulas_on_hand_made_records() -> None:
    found = summarise(hand_made(), goodput={"ttft": 1500.0, "latency": 3600.0})
    expected = {
        "workflows": 3,
        "completed_workflows": 2,
        "rejected_workflows": 1,
        "mixed_models_workflows": 1,
        "requests": 2,
        "solved_rate": 0.5,
        "labelled_workflows": 2,
        "mean_workflow_latency_s": 3.5,
        "p50_workflow_latency_s": 3.5,
        "p90_workflow_latency_s": 3.9,
        "latency_per_token_ms": 1000 * (3 / 11 + 4) / 2,
        "mean_queue_time_s": 1.75,
        "mean_workflow_queue_time_s": 1.75,
        "mean_slowdown": 2.75,
        "p999_slowdown": 1.5 + 0.999 * 2.5,
        "jain_index": (1 / 1.5 + 1 / 4) ** 2 / (2 * (1 / 1.5**2 + 1 / 16)),
        "mean_slowdown[1 stage]": 1.5,
        "p99_slowdown[5+ stages]": 4.0,
        "mean_overhead_share": (0.3 / 3 + 0) / 2,
        "max_overhead_share": 0.1,
        "aged_admissions": 0,
        "mean_ttft_ms": 2500.0,
        "mean_tpot_ms": 200.0,
        "mean_e2el_ms": 3500.0,
        "mean_itl_ms": 200.0,
        "duration_s": 5.0,
        "request_throughput": 0.4,
        "output_throughput": 2.4,
        "total_token_throughput": (12 + 400) / 5,
        "request_goodput": 0.2,
        "workflow_goodput": 0.2,
        "good_workflows_share": 1 / 3,
        "utilisation": 0.8,
        "slots_share": 0.5,
        "busy_share[E]": 0.8,
        "offered_load[E]": 12.5 / 2 / 3,
        "prefix_hit_rate": 96 / 400,
        "preemptions": 1,
        "yields": 2,
        "promotions": 1,
        "longest_wait_s": 3.0,
        "queues_filled": 0.5,
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected)


def test_what_cannot_be_given_is_none_and_not_zero() -> None:
    result = hand_made()
    result.workflows["solved"] = nan
    result.workflows["status"] = "rejected"
    result.requests["status"] = "rejected"
    result.itl = LogHistogram()
    found = summarise(result)
    for key in (
        "solved_rate",
        "mean_workflow_latency_s",
        "mean_ttft_ms",
        "mean_itl_ms",
        "request_throughput",
    ):
        assert found[key] is None
    assert "request_goodput" not in found


def test_a_run_has_finite_numbers_and_the_same_ones_again() -> None:
    cluster = load_cluster("qwen1.5b+7b", max_batch_size=4)
    first, again = (summarise(simulate(small_trace(), cluster, "fcfs", rps=20, seed=3, warmup=5)) for _ in range(2))
    assert first == again
    assert first["workflows"] == 35
    assert not [k for k, v in first.items() if isinstance(v, float) and not np.isfinite(v)]
    latencies = [first[f"{p}_workflow_latency_s"] for p in ("p50", "p90", "p99")]
    assert latencies == sorted(latencies, key=lambda value: float(value or 0))


def test_a_backlog_that_grows_is_not_steady_and_a_level_one_is() -> None:
    arrived = np.arange(400) * 0.1
    assert not_steady(arrived, np.arange(1, 401) * 0.3)
    assert not not_steady(arrived, arrived + 2.0)
    assert not not_steady(arrived[:3], arrived[:3] + 9.0)


def test_a_few_workflows_more_than_before_are_noise() -> None:
    arrived = np.arange(100) * 1.0
    # the backlog goes from 1 to 3: a large share, a small number
    assert not not_steady(arrived, arrived + np.linspace(0.5, 3.5, 100))


points = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 6).map(float), st.just(nan)),
        st.one_of(st.integers(0, 6).map(float), st.just(nan)),
    ),
    max_size=25,
)


@given(points)
def test_non_dominated_is_what_brute_force_finds(drawn: list[tuple[float, float]]) -> None:
    def beats(a: tuple[float, float], b: tuple[float, float]) -> bool:
        return a[0] <= b[0] and a[1] >= b[1] and (a[0] < b[0] or a[1] > b[1])

    expected = [not (isnan(p[0]) or isnan(p[1])) and not any(beats(other, p) for other in drawn) for p in drawn]
    assert non_dominated(drawn) == expected


def test_the_interval_is_students() -> None:
    mean, half = mean_and_interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.302653 / sqrt(3))
    assert mean_and_interval([5.0]) == (5.0, 0.0)
    assert isnan(mean_and_interval([nan])[0])
