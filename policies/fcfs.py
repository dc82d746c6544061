"""FCFS: calls are served in the order in which they come to the engine. It reads no prediction."""

from __future__ import annotations

from dataclasses import dataclass

from policies.interface import ClusterView, Dispatch, RequestView
from policies.routing import PlacedPolicy


@dataclass
class Fcfs(PlacedPolicy):
    """First come, first served at every engine (vLLM's default order)."""

    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        return Dispatch(self.place(request, cluster).name)
