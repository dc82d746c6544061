"""Watched runs of drawn traces, for the tests of what is told of them."""

from __future__ import annotations

from chimsim.records import RunResult
from chimsim.replay import Oversize
from chimsim.simulation import simulate
from chimsim.watch import Watch
from policies import load_policy
from policies.interface import Policy
from tests.chimsim.worlds import MODELS, TrueLengths, cluster, engine
from traces import Trace

POLICIES = ["fcfs", "mlfq", "ltr", "chimera"]


def watched(
    trace: Trace,
    policy: str | Policy,
    slots: int = 3,
    kv_blocks: int = 4000,
    *,
    look_ahead: int = 0,
    oversize: Oversize = "error",
) -> tuple[RunResult, Watch]:
    """The trace on one engine a model, with predictor overheads."""
    watch = Watch()
    engines = [engine(model, model, slots=slots, kv_blocks=kv_blocks) for model in MODELS]
    result = simulate(
        trace,
        cluster(*engines),
        watch.policy(load_policy(policy) if isinstance(policy, str) else policy),
        predictor=TrueLengths(trace, 0.02, 0.004),
        look_ahead=look_ahead,
        oversize=oversize,
        engine_class=watch.engine,
    )
    return result, watch
