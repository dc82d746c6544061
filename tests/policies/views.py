"""Small makers of the views that policies are shown, for the tests beside this file."""

from __future__ import annotations

from collections.abc import Mapping

from policies.interface import EngineView, Policy, Prediction, RequestView

Numbers = Mapping[str, float]


def engine(
    name: str,
    model: str | None = None,
    *,
    slots: int = 64,
    step_s: float = 0.02,
    running: int = 0,
    waiting: int = 0,
    healthy: bool = True,
) -> EngineView:
    """An engine that is named after its model unless told otherwise."""
    return EngineView(name, model or name, slots, step_s, running, waiting, healthy)


def request(
    request_id: int,
    workflow_id: str | None = None,
    *,
    stage: int = 0,
    prompt_tokens: int = 100,
    q: Numbers | None = None,
    own: Numbers | None = None,
    left: Numbers | None = None,
    rank: Numbers | None = None,
    after: tuple[int, ...] = (),
) -> RequestView:
    """A call with these predictions: confidence q, stage tokens, remaining tokens, rank."""
    return RequestView(
        request_id=request_id,
        workflow_id=workflow_id or f"w{request_id}",
        workload="apps",
        stage=stage,
        stage_name="coder",
        arrived_at=0.0,
        workflow_arrived_at=0.0,
        prompt_tokens=prompt_tokens,
        prediction=Prediction(q or {}, own or {}, left or {}, rank or {}),
        after=after,
    )


def finish(policy: Policy, call: RequestView, *, last: bool = True, service_s: float = 1.0) -> None:
    """Tell the policy that a call is over."""
    policy.on_complete(9.0, call, 10, service_s, "stop", last=last)
