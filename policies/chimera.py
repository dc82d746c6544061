"""Chimera: the most confident model that is not much slower than the fastest, then shortest total job first.

The paper's router rule and queue order (arXiv 2603.22206). A workflow keeps the engine of its first call;
models are compared by the time until the predicted tokens in flight on them are through. Defaults are this
project's own, for the paper publishes none. It makes no predictions: oracles and ablations are predictors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

from policies.activity import Activity
from policies.interface import ClusterView, EngineView, RequestView
from policies.knobs import require
from policies.predicted import predicted
from policies.routed import RoutedPolicy, engines_by_model


@dataclass
class Chimera(RoutedPolicy):
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
        super().__post_init__()
        require(self, "tau", self.tau >= 0, "0 or more (inf admits all models)")
        require(self, "delta_s", self.delta_s >= 0, "0 or more (inf never leaves the fastest model)")

    def choose(self, request: RequestView, engines: ClusterView) -> EngineView:
        """The router rule."""
        by_model = engines_by_model(engines)
        # Tuples in the order that settles ties of L: smaller decode time per token, then name.
        models = sorted(
            (self.latency_ms(mine), min(e.decode_s_per_token for e in mine), model) for model, mine in by_model.items()
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
        return self.least_busy(by_model[chosen[2] if worth_it else fast])
