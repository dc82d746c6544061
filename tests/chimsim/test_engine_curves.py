"""Fast-forward with step times from tables, where a step also depends on the longest context of the batch."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calibration.curves import ChunkCurve, DecodeCurve, MixedGrid, RowCurve
from calibration.profile import EngineProfile
from chimsim.engine import Engine
from chimsim.replay import Queue
from tests.chimsim.reference import takes_any_engine
from tests.chimsim.test_engine_reference import agree, both
from tests.chimsim.worlds import cluster, engine, profile, slow_profile, traces
from traces import Trace

NO_TERMS = dict.fromkeys(("sequence_s", "a0", "a1", "a2", "w0", "w1", "w2", "m0", "m1"), 0.0)


def curved(model: str = "A") -> EngineProfile:
    return profile(
        model,
        **NO_TERMS,
        sequences=RowCurve((1, 4, 64), (1e-4, 1.3e-4, 9e-4)),
        decode=DecodeCurve((1, 3, 8), (1e-5, 2.1e-5, 7e-5), (3e-8, 2e-8, 1.7e-8), (0.0, 0.4, 0.15)),
        chunk=ChunkCurve((16, 256, 2048), (1e-5, 4e-5, 9e-4), (1e-8, 3e-8, 2e-7)),
        mixed=MixedGrid(
            (1, 8), (16, 256, 1024), ((1e-5, 3e-5, 9e-5), (6e-5, 2e-4, 7e-4)), (0.9, 0.3), chunk_token_s=1e-9
        ),
    )


@takes_any_engine
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    trace=traces(),
    policy=st.sampled_from(["fcfs", "stjf", "chimera"]),
    seqs=st.integers(1, 8),
    kv_blocks=st.sampled_from([36, 40, 60, 4000]),
    budget=st.sampled_from([8, 20, 2048]),
    queue=st.sampled_from(["dispatcher", "engine"]),
)
def test_a_skewed_batch_takes_the_same_instants_as_step_by_step(
    trace: Trace, policy: str, seqs: int, kv_blocks: int, budget: int, queue: Queue
) -> None:
    spec = cluster(
        *(
            engine(
                model, model, slots=seqs, kv_blocks=kv_blocks, max_num_batched_tokens=max(budget, seqs),
                scheduling="priority" if queue == "engine" else "fcfs", step=curved(model),
            )
            for model in ("A", "B")
        )
    )  # fmt: skip
    agree(*both(trace, spec, policy, {}, queue=queue))


def test_a_profile_without_skew_keeps_no_book_of_contexts() -> None:
    assert not slow_profile(0.01).skewed
    assert not Engine(engine())._skewed
    assert Engine(engine(step=curved()))._skewed
