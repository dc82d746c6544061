"""PLAS (Autellix): the workflow that has had the least service so far goes first. It needs no prediction.

Service is time in a slot, summed over the workflow's finished calls; failed and aborted ones count, for they
were served too. Calls side by side add up; for chains it equals ATLAS.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.interface import ClusterView, Dispatch, RequestView
from policies.routing import PlacedPolicy


@dataclass
class Plas(PlacedPolicy):
    """Program-level least attained service: seconds of service of the workflow's earlier calls."""

    _attained_s: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        engine = self.place(request, cluster)
        return Dispatch(engine.name, (self._attained_s.get(request.workflow_id, 0.0),))

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
        attained_s = self._attained_s.pop(request.workflow_id, 0.0)
        if not last:
            self._attained_s[request.workflow_id] = attained_s + service_s
        super().on_complete(now, request, output_tokens, service_s, reason, last=last)

    def on_forget(self, now: float, workflow_id: str) -> None:
        self._attained_s.pop(workflow_id, None)
        super().on_forget(now, workflow_id)
