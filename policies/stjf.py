"""STJF: the call whose workflow has the fewest output tokens left is served first.

Left are this stage and all later ones, as predicted (or as the oracle knows it) for the model that runs the
call. It looks at the order only: where a workflow goes is its placement.
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
class Stjf(PlacedPolicy):
    """Shortest total job first, by the predicted output tokens left of the workflow."""

    reads: ClassVar[frozenset[str]] = frozenset({"remaining_tokens"})

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
        tokens = predicted(self, request, "remaining_tokens", engine.model)
        # All waiting calls age alike, so this static key gives the order of tokens - rate * waited.
        return Dispatch(engine.name, (tokens + self.aging_tokens_per_s * now,))
