"""Fast-forward against the reference engine: the same instants, to the last bit, whatever happens on the way."""

from __future__ import annotations

from math import isclose

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chimsim.config import Cluster
from chimsim.engine import Engine
from chimsim.records import RunResult
from chimsim.replay import Queue
from chimsim.simulation import simulate
from policies import load_policy
from tests.chimsim.reference import ReferenceEngine, takes_any_engine
from tests.chimsim.worlds import TrueLengths, cluster, engine, events, traces
from traces import Trace

POLICIES = [
    ("fcfs", {}),
    ("stjf", {}),
    ("fcfs", {"placement": "random-call"}),
    ("fcfs", {"placement": "round-robin-call"}),
    ("plas", {}),
    ("atlas", {}),
    ("chimera", {"tau": 0.5}),
    ("mlfq", {"q0_s": 0.2, "starvation_s": 1.0}),
    ("mlfq", {"q0_s": 0.05, "starvation_s": 0.4}),
    ("ltr", {"starvation_steps": 30, "promoted_steps": 4}),
    ("ltr", {"starvation_steps": 5, "promoted_steps": 1}),
]


def both(
    trace: Trace,
    spec: Cluster,
    name: str,
    knobs: dict[str, object],
    *,
    queue: Queue = "dispatcher",
    look_ahead: int = 0,
    overheads: dict[str, float] | None = None,
) -> tuple[RunResult, RunResult]:
    """The same run on the engine and on the reference engine."""

    def run(engine_class: type) -> RunResult:
        return simulate(
            trace,
            spec,
            load_policy(name, **knobs),
            predictor=TrueLengths(trace, **(overheads or {})),
            queue=queue,
            look_ahead=look_ahead,
            log_decisions=True,
            engine_class=engine_class,
        )

    return run(Engine), run(ReferenceEngine)


def agree(fast: RunResult, slow: RunResult) -> None:
    pd.testing.assert_frame_equal(events(fast), events(slow), check_exact=True)
    assert fast.decisions == slow.decisions
    exact_columns = [
        "engine",
        "steps",
        "prefill_tokens",
        "cached_tokens",
        "output_tokens",
        "preemptions",
        "peak_kv_tokens",
    ]
    pd.testing.assert_frame_equal(fast.engines[exact_columns], slow.engines[exact_columns])
    for column in ("busy_s", "mean_running", "mean_waiting"):
        assert fast.engines[column].tolist() == pytest.approx(slow.engines[column].tolist())
    weights = [{k: v for k, v in itl.weights.items() if v} for itl in (fast.itl, slow.itl)]
    assert weights[0] == weights[1]
    assert isclose(fast.itl.sum_s, slow.itl.sum_s, rel_tol=1e-9, abs_tol=1e-9)


@takes_any_engine
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    trace=traces(),
    policy=st.sampled_from(POLICIES),
    slots=st.integers(1, 6),
    spare_seqs=st.integers(0, 2),
    look_ahead=st.integers(0, 2),
    kv_blocks=st.sampled_from([36, 40, 60, 4000]),
    budget=st.sampled_from([8, 20, 64, 2048]),
    caching=st.booleans(),
    overheads=st.sampled_from([{}, {"router_s": 0.02, "predictor_s": 0.004}]),
)
def test_every_request_has_the_same_instants_as_step_by_step(
    trace: Trace,
    policy: tuple[str, dict[str, object]],
    slots: int,
    spare_seqs: int,
    look_ahead: int,
    kv_blocks: int,
    budget: int,
    caching: bool,
    overheads: dict[str, float],
) -> None:
    spec = cluster(
        *(
            engine(
                model, model, slots=slots, max_num_seqs=slots + spare_seqs, kv_blocks=kv_blocks,
                max_num_batched_tokens=max(budget, slots + spare_seqs), prefix_caching=caching,
            )
            for model in ("A", "B")
        )
    )  # fmt: skip
    name, knobs = policy
    agree(*both(trace, spec, name, knobs, look_ahead=look_ahead, overheads=overheads))


@takes_any_engine
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    trace=traces(),
    policy=st.sampled_from(["fcfs", "stjf", "sjf", "chimera"]),
    seqs=st.integers(1, 8),
    kv_blocks=st.sampled_from([36, 40, 60, 4000]),
    budget=st.sampled_from([8, 20, 64, 2048]),
)
def test_with_the_queue_in_the_engine_too(trace: Trace, policy: str, seqs: int, kv_blocks: int, budget: int) -> None:
    spec = cluster(
        *(
            engine(
                model, model, slots=seqs, kv_blocks=kv_blocks, max_num_batched_tokens=max(budget, seqs),
                scheduling="priority",
            )
            for model in ("A", "B")
        )
    )  # fmt: skip
    agree(*both(trace, spec, policy, {}, queue="engine"))
