"""ATLAS (Autellix): the call with the least service along its longest path so far goes first. No prediction needed.

A call's path is what it waited for, and what that waited for, and so on; of several the one with the most service
counts. Service is time in a slot; failed tries count, for they were served too. For chains it equals PLAS.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.interface import ClusterView, Dispatch, RequestView
from policies.routing import PlacedPolicy


@dataclass
class Atlas(PlacedPolicy):
    """Adaptive thread-level attained service: seconds of service of the longest path of calls that led here."""

    _attained_s: dict[str, dict[int, float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        return Dispatch(self.place(request, cluster).name, (self._path_s(request),))

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
        path_s = self._path_s(request) + service_s
        if last:
            self._attained_s.pop(request.workflow_id, None)
        else:
            self._attained_s.setdefault(request.workflow_id, {})[request.stage] = path_s
        super().on_complete(now, request, output_tokens, service_s, reason, last=last)

    def on_forget(self, now: float, workflow_id: str) -> None:
        self._attained_s.pop(workflow_id, None)
        super().on_forget(now, workflow_id)

    def _path_s(self, request: RequestView) -> float:
        attained_s = self._attained_s.get(request.workflow_id, {})
        before_s = max((attained_s.get(stage, 0.0) for stage in request.after), default=0.0)
        # A failed try of the call itself is on the path, too.
        return max(before_s, attained_s.get(request.stage, 0.0))
