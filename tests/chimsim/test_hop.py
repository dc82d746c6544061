"""The round trip between dispatcher and engine: a freed slot is filled later, and a step is missed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from chimsim.simulation import simulate
from policies import load_policy
from tests.chimsim.worlds import TrueLengths, cluster, engine, single_stage, slow_profile, traces
from traces import Trace


def test_a_request_arrives_a_round_trip_later_and_misses_the_step_under_way() -> None:
    trace = single_stage([(5, 2), (5, 4), (5, 2)], arrivals=[0.0, 0.0, 0.0])
    spec = cluster(engine(slots=2, step=slow_profile(1.0)))
    near = simulate(trace, spec, "fcfs", predictor=TrueLengths(trace)).requests
    assert near["admitted_at"].tolist() == [0.0, 0.0, 2.0]
    assert near["finished_at"].tolist() == [2.0, 4.0, 4.0]
    far = simulate(trace, spec, "fcfs", predictor=TrueLengths(trace), hop_s=0.125).requests
    # The slot of the first is free at 2.125; its successor comes at 2.25, in the middle of a step.
    assert far["admitted_at"].tolist() == [0.125, 0.125, 3.125]
    assert far["finished_at"].tolist() == [2.125, 4.125, 5.125]


@settings(deadline=None)
@given(traces(), st.sampled_from(["fcfs", "stjf", "mlfq", "ltr", "chimera"]), st.sampled_from([1e-6, 0.003, 0.2]))
def test_whatever_the_way_everything_is_served_once(trace: Trace, policy: str, hop_s: float) -> None:
    spec = cluster(*(engine(model, model, slots=2, kv_blocks=60) for model in ("A", "B")))
    knobs = {"q0_s": 0.05} if policy == "mlfq" else {}
    result = simulate(trace, spec, load_policy(policy, **knobs), predictor=TrueLengths(trace), hop_s=hop_s)
    requests = result.requests
    assert set(requests["status"].astype(str)) == {"completed"}
    assert (requests["admitted_at"] - requests["enqueued_at"] >= hop_s - 1e-9).all()
    assert len(result.workflows) == len(trace.workflows)
