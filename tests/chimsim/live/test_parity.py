"""The live driver decides as the simulator does, and at the same instants: one dispatcher, one policy, two drivers."""

from __future__ import annotations

from math import inf

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chimsim.config import Scheduling
from chimsim.failures import Spell
from chimsim.replay import Queue, schedule
from chimsim.simulation import simulate
from policies import load_policy
from tests.chimsim.live.virtual import replay_virtually
from tests.chimsim.worlds import MODELS, TrueLengths, cluster, engine, outages, traces
from traces import Trace

Spans = tuple[tuple[str, float, float], ...]

POLICIES = ["fcfs", "sjf", "stjf", "mlfq", "ltr", "plas", "atlas", "chimera"]
IN_ENGINE = ["fcfs", "stjf", "chimera"]
ENDS = ["workflow", "latency_s", "status", "model"]
INSTANTS = ("request_id", "stage", "ready_at", "enqueued_at", "first_token_at", "finished_at", "yields")


def check(trace: Trace, name: str, slots: int, kv_blocks: int, queue: Queue, look_ahead: int, down: Spans = ()) -> None:
    scheduling: Scheduling = "priority" if queue == "engine" else "fcfs"
    engines = [engine(model, model, slots=slots, kv_blocks=kv_blocks, scheduling=scheduling) for model in MODELS]
    predictor = TrueLengths(trace, 0.02, 0.004)
    spells = [Spell(engine_, inf, begin_s, end_s) for engine_, begin_s, end_s in down]
    simulated = simulate(
        trace, cluster(*engines), load_policy(name), predictor=predictor, queue=queue, look_ahead=look_ahead,
        log_decisions=True, fail=[str(spell) for spell in spells],
    )  # fmt: skip
    order, times = schedule(trace, None, 0, None, None, 1.0, True)
    live = replay_virtually(
        cluster(*engines), load_policy(name), predictor, order, times, queue=queue, look_ahead=look_ahead,
        outages=spells,
    )  # fmt: skip
    assert live.decisions == simulated.decisions
    for column in INSTANTS:
        pd.testing.assert_series_equal(live.requests[column], simulated.requests[column], check_exact=True)
    pd.testing.assert_frame_equal(live.workflows[ENDS], simulated.workflows[ENDS], check_exact=True)


@pytest.mark.parametrize("name", POLICIES)
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(traces(), st.integers(1, 4), st.sampled_from([60, 4000]), st.integers(0, 2))
def test_both_drivers_decide_alike_at_the_same_instants(
    name: str, trace: Trace, slots: int, kv_blocks: int, look_ahead: int
) -> None:
    check(trace, name, slots, kv_blocks, "dispatcher", look_ahead)


@pytest.mark.parametrize("name", IN_ENGINE)
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(traces(), st.integers(1, 4))
def test_so_they_do_with_the_queue_in_the_engine(name: str, trace: Trace, slots: int) -> None:
    check(trace, name, slots, 4000, "engine", 0)


@pytest.mark.parametrize("name", POLICIES)
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(traces(), st.integers(1, 3), st.sampled_from([60, 4000]), outages(), st.sampled_from(["dispatcher", "engine"]))
def test_so_they_do_when_engines_fail(
    name: str, trace: Trace, slots: int, kv_blocks: int, down: Spans, queue: Queue
) -> None:
    check(trace, name, slots, kv_blocks, queue if name in IN_ENGINE else "dispatcher", 0, down)
