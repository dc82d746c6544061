"""Fairness: Jain's index, overtakings against brute force, and that shortest first starves and aging cures it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimsim import load_cluster, simulate
from chimsim.fairness import aged_admissions, jain_index
from policies import load_policy
from tests.chimsim.small import small_trace


def test_jain_index_of_equal_and_of_one_sided_shares() -> None:
    assert jain_index(np.full(7, 0.3)) == pytest.approx(1.0)
    assert jain_index(np.array([1.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert jain_index(np.array([])) is None


waits = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(1, 9), st.integers(0, 1)), min_size=0, max_size=25
)


@given(waits)
def test_overtakings_are_those_of_brute_force(rows: list[tuple[int, int, int, int]]) -> None:
    calls = [(float(start), float(start + wait), left, f"E{e}") for start, wait, left, e in rows]
    frame = pd.DataFrame(
        {
            "request_id": range(len(calls)),
            "workflow": range(len(calls)),
            "engine": [call[3] for call in calls],
            "enqueued_at": [call[0] for call in calls],
            "admitted_at": [call[1] for call in calls],
            "output_tokens": [call[2] for call in calls],
        }
    )
    expected = sum(
        any(
            other[3] == call[3] and other[0] < call[1] < other[1] and other[2] < call[2]
            for other in calls
            if other[0] < other[1]
        )
        for call in calls
        if call[0] < call[1]
    )
    assert aged_admissions(frame) == expected


def test_shortest_job_first_starves_at_overload_and_aging_cures_it() -> None:
    cluster = load_cluster("qwen7b", max_batch_size=2)
    trace = small_trace(120, models=("Qwen2.5-7B",))

    def at(aging: float) -> dict[str, float]:
        policy = load_policy("stjf", aging_tokens_per_s=aging)
        return simulate(trace, cluster, policy, rps=20, seed=1).summary

    strict, aged, fcfs = at(0.0), at(20.0), simulate(trace, cluster, "fcfs", rps=20, seed=1).summary
    assert strict["aged_admissions"] == 0 < aged["aged_admissions"] < fcfs["aged_admissions"]
    assert aged["longest_wait_s"] < 0.8 * strict["longest_wait_s"]
    assert strict["mean_workflow_latency_s"] < aged["mean_workflow_latency_s"] < fcfs["mean_workflow_latency_s"]
