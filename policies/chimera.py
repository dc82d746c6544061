"""Chimera: the most confident model that is not much slower than the fastest, then shortest total job first.

The paper's router rule and queue order (arXiv 2603.22206). A workflow keeps the engine of its first call;
models are compared by the time until the predicted tokens in flight on them are through. Defaults are this
project's own, for the paper publishes none. It makes no predictions: oracles and ablations are predictors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

from policies.activity import Activity
from policies.interface import ClusterView, Dispatch, EngineView, Policy, RequestView
from policies.knobs import require, settle
from policies.predicted import predicted
from policies.routing import no_engine


@dataclass
class Chimera(Policy):
    """The most confident model within a latency slack of the fastest; shortest total job first, aged."""

    reads: ClassVar[frozenset[str]] = frozenset({"confidence", "remaining_tokens"})

    tau: float = 0.5
    """latency slack: a model may take up to (1 + tau) times as long as the fastest; inf admits all"""
    delta_s: float = 0.05
    """the smallest gain in confidence over the fastest model that is worth leaving it"""
    aging_tokens_per_s: float = 10.0
    """tokens that a second of waiting is worth: a minute about one mean workflow of the paper; 0 is off"""
    quantile: float | None = None
    """quantile of the lengths that a learned length model foretells, such as 0.9; None is the model's own"""
    explain: bool = False
    """give the reason with every decision"""
    _assigned: dict[str, tuple[str, str]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _activity: Activity = field(default_factory=Activity, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        settle(self)
        require(self, "tau", self.tau >= 0, "0 or more (inf admits all models)")
        require(self, "delta_s", self.delta_s >= 0, "0 or more (inf never leaves the fastest model)")
        require(self, "aging_tokens_per_s", 0 <= self.aging_tokens_per_s < inf, "0 or more and finite")
        require(self, "quantile", self.quantile is None or 0 < self.quantile < 1, "between 0 and 1")

    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        workflow = request.workflow_id
        engine = self._reuse(workflow, cluster) or self._route(request, cluster)
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
        return self._fastest(same) if same else None

    def _fastest(self, engines: Sequence[EngineView]) -> EngineView:
        """Of one model's engines the one with the least work ahead of it."""
        if len(engines) == 1:
            return engines[0]
        return min(engines, key=lambda e: (self.latency_ms((e,)), e.decode_s_per_token, e.name))

    def _route(self, request: RequestView, cluster: ClusterView) -> EngineView:
        """The router rule, over the healthy engines of the cluster."""
        by_model: dict[str, list[EngineView]] = {}
        for engine in cluster:
            if engine.healthy:
                by_model.setdefault(engine.model, []).append(engine)
        if not by_model:
            raise no_engine(self, cluster)
        # Tuples in the order that settles ties of L: smaller decode time per token, then name.
        models = sorted(
            (self.latency_ms(engines), min(e.decode_s_per_token for e in engines), model)
            for model, engines in by_model.items()
        )
        latency_fast, _, fast = chosen = models[0]
        confidence_fast = best = predicted(self, request, "confidence", fast)
        # With tau = inf and an idle fastest model the product would be inf * 0.
        slack = inf if self.tau == inf else (1 + self.tau) * latency_fast
        for candidate in models[1:]:
            if candidate[0] > slack:
                break
            confidence = predicted(self, request, "confidence", candidate[2])
            # Strictly: of equally confident models the earlier, faster one stays.
            if confidence > best:
                best, chosen = confidence, candidate
        worth_it = best >= confidence_fast + self.delta_s
        return self._fastest(by_model[chosen[2] if worth_it else fast])

    def _reason(self, request: RequestView, cluster: ClusterView, engine: EngineView, tokens: float) -> str:
        """What was known when the decision fell, model by model."""
        if request.workflow_id in self._assigned:
            return f"keeps {engine.name}; y={tokens:.0f}"
        confidence = request.prediction.confidence
        parts = []
        for model in sorted({e.model for e in cluster if e.healthy}):
            latency_ms = self.latency_ms([e for e in cluster if e.healthy and e.model == model])
            parts.append(f"{model} q={confidence.get(model, float('nan')):.3f} L={latency_ms:.1f}ms")
        return f"{engine.name}: {', '.join(parts)}; y={tokens:.0f}"
