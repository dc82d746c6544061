"""LTR (vllm-ltr): calls in order of a learned rank of their output length, fixed at arrival.

A waiting call of better rank takes the slot of a running one. A call left waiting for ``starvation_steps``
engine steps is promoted for ``promoted_steps`` steps; steps become time by the engine's step time at its full
batch. It learns nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from policies.interface import ClusterView, Dispatch, RequestView
from policies.knobs import require
from policies.predicted import predicted
from policies.routing import PlacedPolicy


@dataclass
class Ltr(PlacedPolicy):
    """Learning to rank: the call ranked shortest first, preemptive, with promotion of the starved."""

    preemptive: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"rank"})

    starvation_steps: int = 200
    """engine steps that a call waits before it is promoted; 0 is never"""
    promoted_steps: int = 10
    """steps that a promotion lasts"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "starvation_steps", self.starvation_steps >= 0, "0 or more")
        require(self, "promoted_steps", self.promoted_steps >= 1, "1 or more")

    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        engine = self.place(request, cluster)
        rank = predicted(self, request, "rank", engine.model)
        max_wait_s = self.starvation_steps * engine.decode_s_per_token if self.starvation_steps else inf
        # A running call emits one token a step.
        return Dispatch(engine.name, (rank,), max_wait_s=max_wait_s, promoted_tokens=self.promoted_steps)
