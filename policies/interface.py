"""The policy contract: what a policy is shown, what it answers, and when it is told what happened.

A policy decides; it never does I/O, never reads a clock and never sees a true output length. Times are in
seconds, lengths in tokens, and a lower priority is served first (vLLM's direction).

What a policy is shown is not to be changed (`policies.checks` notices). It is not frozen, because several of these
values are made for every call, and a frozen one of ten fields takes 1.0 us to make, a plain one 0.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import ClassVar, Protocol

Priority = tuple[float, ...]
"""Lower is served first; ties go by order of submission."""


class PolicyError(ValueError):
    """A knob or a decision that is not allowed; the message says what was found and what is allowed."""


@dataclass(slots=True)
class Prediction:
    """What predictors say about one request; every mapping is by model name, and may be empty.

    ``confidence`` is the probability (0 to 1) that the model solves the task, ``stage_tokens`` the output
    tokens of this stage, ``remaining_tokens`` those of this and all later stages, ``rank`` a learned order
    (lower is expected shorter).
    """

    confidence: Mapping[str, float]
    stage_tokens: Mapping[str, float]
    remaining_tokens: Mapping[str, float]
    rank: Mapping[str, float]


@dataclass(slots=True)
class RequestView:
    """One LLM call as a policy sees it. ``request_id`` counts up in order of submission.

    ``after`` are the stages of its workflow that it waited for: in a chain the one before.
    """

    request_id: int
    workflow_id: str
    workload: str
    stage: int
    stage_name: str
    arrived_at: float
    workflow_arrived_at: float
    prompt_tokens: int
    prediction: Prediction
    after: tuple[int, ...] = ()


@dataclass(slots=True, unsafe_hash=True)
class EngineView:
    """A snapshot of one engine. ``decode_s_per_token`` is the decode step time at ``max_batch_size``.

    ``running`` counts the requests inside the engine, ``waiting`` those queued for it.
    """

    name: str
    model: str
    max_batch_size: int
    decode_s_per_token: float
    running: int = 0
    waiting: int = 0
    healthy: bool = True


ClusterView = tuple[EngineView, ...]
"""The engines in order of their names."""


@dataclass(slots=True)
class Dispatch:
    """Where a request goes and in which order it is served.

    Once it has waited ``max_wait_s`` in one go it is promoted before all others (in order of enqueueing);
    a promotion lasts for ``promoted_tokens`` output tokens, 0 meaning until the request leaves its slot.
    After every ``check_after_tokens`` output tokens (0: never) the policy is asked for a new standing.
    """

    engine: str
    priority: Priority = ()
    max_wait_s: float = inf
    promoted_tokens: int = 0
    check_after_tokens: int = 0
    reason: str = ""


@dataclass(slots=True)
class Progress:
    """A request's new standing, and after how many more output tokens to ask again (0: never)."""

    priority: Priority
    check_after_tokens: int = 0


class Policy(Protocol):
    """The decision rule. Subclass it as a dataclass whose fields are its knobs; only ``dispatch`` is needed.

    ``reads`` names the fields of `Prediction` that the policy looks at: predictors (and their error dials)
    that it does not read cannot change its result, and a sweep does not repeat it over them.
    """

    preemptive: ClassVar[bool] = False
    """True: a waiting request that is strictly better than the worst running one of a full engine takes its
    slot at the next step boundary."""

    reads: ClassVar[frozenset[str]] = frozenset()

    routes_by_length: ClassVar[bool] = False
    """True: the lengths foretold of a workflow choose its model. True lengths must not: they tell who fails."""

    quantile: float | None = None
    """Which quantile of the lengths it wants foretold, between 0 and 1; None: what the length model gives by
    itself. Only a learned length model has quantiles: oracles and error dials foretell the same for all."""

    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        """Called once for each stage when it becomes ready (again for a retry); may update own memory."""
        ...

    def on_progress(self, now: float, request: RequestView, output_tokens: int, service_s: float) -> Progress:
        """Its new standing after ``check_after_tokens`` more tokens; ``service_s`` is time in a slot."""
        return Progress(())

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
        """Exactly once per dispatched request; ``last``: no later stage will come, forget the workflow.

        ``reason`` is ``"stop"``, ``"failed"`` or ``"aborted"``.
        """
        return None

    def on_forget(self, now: float, workflow_id: str) -> None:
        """The workflow ended without a last completion: drop what is remembered of it."""
        return None
