"""Costaware: the engine where the gain in solved probability is worth what this workflow costs there.

The cost is in seconds of latency, its own and that of the others in flight, so that the one knob is a price. Cost grows
with a workflow's length while the gain of a better model hardly does: of two with the same confidences the shorter one
goes to the larger model. It needs learned lengths: true ones tell who fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

from policies.activity import Activity
from policies.interface import ClusterView, EngineView, RequestView
from policies.knobs import require
from policies.predicted import predicted
from policies.routed import RoutedPolicy


@dataclass
class Costaware(RoutedPolicy):
    """The engine of the least cost in latency less the worth of its chance to solve; shortest total job first, aged."""

    reads: ClassVar[frozenset[str]] = frozenset({"confidence", "remaining_tokens"})
    routes_by_length: ClassVar[bool] = True

    worth_s: float = 60.0
    """seconds of latency, of all workflows together, that one more solved is worth: 0 cheapest, inf most confident"""
    aging_tokens_per_s: float = 10.0
    """tokens that a second of waiting is worth: a minute about one mean workflow of the paper; 0 is off"""
    quantile: float | None = None
    """quantile of the lengths that a learned length model foretells, such as 0.9; None is the model's own"""
    explain: bool = False
    """give the reason with every decision"""
    _assigned: dict[str, tuple[str, str]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _activity: Activity = field(default_factory=Activity, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "worth_s", self.worth_s >= 0, "0 or more (inf is the most confident model)")

    def choose(self, request: RequestView, engines: ClusterView) -> EngineView:
        """The engine with the least ``cost_s - worth_s * confidence``; ties by the work ahead, speed and name."""

        def loss(engine: EngineView) -> tuple[float, ...]:
            confidence = predicted(self, request, "confidence", engine.model)
            cost_s = self.cost_s(request, engine)
            # Not inf * 0, which is undefined, and not inf for all.
            return (-confidence, cost_s) if self.worth_s == inf else (cost_s - self.worth_s * confidence,)

        return min(engines, key=lambda e: (*loss(e), self.latency_ms((e,)), e.decode_s_per_token, e.name))

    def cost_s(self, request: RequestView, engine: EngineView) -> float:
        """Seconds that the workflow adds to all latencies: its own service, and the delay of those in flight there.

        It takes tokens * decode time for itself, and keeps each of the others for a ``max_batch_size``-th of that.
        """
        own_s = predicted(self, request, "remaining_tokens", engine.model) * engine.decode_s_per_token
        return own_s * (1 + (engine.running + engine.waiting) / engine.max_batch_size)

    def about(self, request: RequestView, model: str, engines: Sequence[EngineView]) -> str:
        cheapest = min(self.cost_s(request, engine) for engine in engines)
        return f"{model} q={request.prediction.confidence.get(model, float('nan')):.3f} cost={cheapest:.1f}s"
