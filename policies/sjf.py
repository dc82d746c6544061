"""SJF: the call with the fewest output tokens is served first.

The length is that of the output of this call, not of its prompt, as predicted (or as the oracle knows it) for
the model that runs it. It does not look at the rest of the workflow.
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
class Sjf(PlacedPolicy):
    """Shortest job first, by the predicted output tokens of this call."""

    reads: ClassVar[frozenset[str]] = frozenset({"stage_tokens"})

    aging_tokens_per_s: float = 0.0
    """tokens that a second of waiting is worth against starvation; 0 is off"""
    quantile: float | None = None
    """quantile of the lengths that a learned length model foretells, such as 0.9; None is the model's own"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "aging_tokens_per_s", 0 <= self.aging_tokens_per_s < inf, "0 or more and finite")
        require(self, "quantile", self.quantile is None or 0 < self.quantile < 1, "between 0 and 1")

    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        engine = self.place(request, cluster)
        tokens = predicted(self, request, "stage_tokens", engine.model)
        # All waiting calls age alike, so this static key gives the order of tokens - rate * waited.
        return Dispatch(engine.name, (tokens + self.aging_tokens_per_s * now,))
