"""What policies share that choose a workflow's model: its first engine is kept, and short work comes first.

The choice itself is theirs. They make no predictions: oracles and ablations are predictors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from policies.activity import Activity
from policies.interface import ClusterView, Dispatch, EngineView, Policy, RequestView
from policies.knobs import require, settle
from policies.predicted import predicted
from policies.routing import healthy


class RoutedPolicy(Policy):
    """Shortest total job first, with aging, on the engine that `choose` gives a workflow's first call.

    The knobs and the memory named here are fields of each policy, which orders them itself.
    """

    aging_tokens_per_s: float
    quantile: float | None
    explain: bool
    _assigned: dict[str, tuple[str, str]]
    _activity: Activity

    def __post_init__(self) -> None:
        settle(self)
        require(self, "aging_tokens_per_s", 0 <= self.aging_tokens_per_s < inf, "0 or more and finite")
        require(self, "quantile", self.quantile is None or 0 < self.quantile < 1, "between 0 and 1")

    def choose(self, request: RequestView, engines: ClusterView) -> EngineView:
        """The engine of a workflow that has none, out of the healthy ones (at least one)."""
        raise NotImplementedError

    def about(self, request: RequestView, model: str, engines: Sequence[EngineView]) -> str:
        """What the choice knows of a model and its healthy engines, for the reason of a decision."""
        confidence = request.prediction.confidence.get(model, float("nan"))
        return f"{model} q={confidence:.3f} L={self.latency_ms(engines):.1f}ms"

    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        workflow = request.workflow_id
        engine = self._reuse(workflow, cluster) or self.choose(request, healthy(self, cluster))
        tokens = predicted(self, request, "remaining_tokens", engine.model)
        reason = self._reason(request, cluster, engine, tokens) if self.explain else ""
        self._assigned[workflow] = (engine.name, engine.model)
        self._activity.start(workflow, engine.name, tokens)
        # All waiting calls age alike, so this static key gives the order of tokens - rate * waited.
        return Dispatch(engine.name, (tokens + self.aging_tokens_per_s * now,), reason=reason)

    def on_complete(
        self,
        now: float,
        request: RequestView,
        output_tokens: int,
        service_s: float,
        reason: str,
        *,
        last: bool,
    ) -> None:
        if last:
            self.on_forget(now, request.workflow_id)

    def on_forget(self, now: float, workflow_id: str) -> None:
        self._assigned.pop(workflow_id, None)
        self._activity.end(workflow_id)

    def latency_ms(self, engines: Sequence[EngineView]) -> float:
        """L of the engines of one model: until the predicted tokens in flight on them are through, in ms.

        In-flight tokens * decode ms per token / batch size, tokens and batch sizes summed over the engines.
        Engines of one model may differ in speed: each then weighs in with its own batch size per step time.
        """
        first = engines[0]
        if len(engines) == 1:
            decode_ms = first.decode_s_per_token * 1000
            return self._activity.tokens(first.name) * decode_ms / first.max_batch_size
        tokens = sum(self._activity.tokens(engine.name) for engine in engines)
        return tokens * 1000 / sum(engine.max_batch_size / engine.decode_s_per_token for engine in engines)

    def least_busy(self, engines: Sequence[EngineView]) -> EngineView:
        """Of one model's engines the one with the least work ahead of it."""
        if len(engines) == 1:
            return engines[0]
        return min(engines, key=lambda e: (self.latency_ms((e,)), e.decode_s_per_token, e.name))

    def _reuse(self, workflow_id: str, cluster: ClusterView) -> EngineView | None:
        """The workflow's engine; if that is unhealthy another of its model; None before its first call."""
        assigned = self._assigned.get(workflow_id)
        if assigned is None:
            return None
        name, model = assigned
        for engine in cluster:
            if engine.name == name and engine.healthy:
                return engine
        same = [engine for engine in cluster if engine.model == model and engine.healthy]
        return self.least_busy(same) if same else None

    def _reason(self, request: RequestView, cluster: ClusterView, engine: EngineView, tokens: float) -> str:
        """What was known when the decision fell, model by model."""
        if request.workflow_id in self._assigned:
            return f"keeps {engine.name}; y={tokens:.0f}"
        by_model = engines_by_model(e for e in cluster if e.healthy)
        parts = [self.about(request, model, by_model[model]) for model in sorted(by_model)]
        return f"{engine.name}: {', '.join(parts)}; y={tokens:.0f}"


def engines_by_model(engines: Iterable[EngineView]) -> dict[str, list[EngineView]]:
    """The engines of each model, in their order."""
    found: dict[str, list[EngineView]] = {}
    for engine in engines:
        found.setdefault(engine.model, []).append(engine)
    return found
