"""MLFQ (FastServe, vllm-ltr): a call sinks through levels of longer and longer quanta as it is executed.

It needs no prediction. Inside a level calls are served in the order in which they entered it. Quanta are counted in
output tokens by the engine's step time at its full batch. A starved call goes before all others for a while and then
stands where it stood (the forks put it at the front of level 0, but a policy is not told of promotions). Every quantum
is a request of its own to the engine, so a call pays for its slices even when nobody waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, inf
from typing import ClassVar, NamedTuple

from policies.interface import ClusterView, Dispatch, Progress, RequestView
from policies.knobs import require
from policies.routing import PlacedPolicy


class Standing(NamedTuple):
    """What is remembered of a call in flight; ``step_s`` is the step time of its engine."""

    workflow_id: str
    level: int
    step_s: float


@dataclass
class Mlfq(PlacedPolicy):
    """Multi-level feedback queue, preemptive: short calls finish on the upper levels, long ones sink."""

    preemptive: ClassVar[bool] = True

    q0_s: float = 0.010
    """quantum of level 0 in seconds of execution (vllm-ltr, FastServe)"""
    ratio: float = 2.0
    """each level's quantum over that of the level above"""
    levels: int = 16
    """how many levels; with 10 ms and ratio 2 the last quantum, 328 s, is longer than a call runs"""
    starvation_s: float = 3.0
    """seconds of waiting after which a call goes to the front; inf is never"""
    promoted_s: float = 3.0
    """seconds of execution for which it stays there: as long as it waited for it, since every turn costs a
    new admission, and one level-0 quantum is often a single token"""
    skip_join: bool = False
    """start at the first level whose quantum covers the prefill (FastServe), not at level 0"""
    prefill_tokens_per_s: float = 5885.0
    """by which skip_join reckons the prefill; measured for an 8B model on an A6000: 2,048 tokens in 348 ms"""
    _standing: dict[int, Standing] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "q0_s", 0 < self.q0_s <= 3600, "more than 0 and at most an hour")
        require(self, "ratio", 1 <= self.ratio <= 100, "between 1 and 100")
        require(self, "levels", 1 <= self.levels <= 64, "between 1 and 64")
        require(self, "starvation_s", self.starvation_s > 0, "more than 0")
        require(self, "promoted_s", 0 < self.promoted_s <= 1e6, "more than 0 and at most 1e6")
        require(self, "prefill_tokens_per_s", 0 < self.prefill_tokens_per_s < inf, "more than 0 and finite")

    def quantum_tokens(self, level: int, step_s: float) -> int:
        """The quantum of a level in output tokens, on an engine with that step time."""
        return max(1, ceil(self.q0_s * self.ratio**level / step_s))

    def first_level(self, prompt_tokens: int) -> int:
        """The level at which a call starts."""
        if not self.skip_join:
            return 0
        prefill_s = prompt_tokens / self.prefill_tokens_per_s
        covering = (level for level in range(self.levels) if self.q0_s * self.ratio**level >= prefill_s)
        return next(covering, self.levels - 1)

    def _check_after(self, level: int, step_s: float) -> int:
        # Nothing lies below the last level, so nothing is to be asked there.
        return self.quantum_tokens(level, step_s) if level < self.levels - 1 else 0

    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        engine = self.place(request, cluster)
        level, step_s = self.first_level(request.prompt_tokens), engine.decode_s_per_token
        self._standing[request.request_id] = Standing(request.workflow_id, level, step_s)
        return Dispatch(
            engine.name,
            (float(level), now),
            max_wait_s=self.starvation_s,
            promoted_tokens=max(1, ceil(self.promoted_s / step_s)),
            check_after_tokens=self._check_after(level, step_s),
        )

    def on_progress(self, now: float, request: RequestView, output_tokens: int, service_s: float) -> Progress:
        before = self._standing.get(request.request_id)
        if before is None:
            return Progress((float(self.levels - 1), now))
        level = min(before.level + 1, self.levels - 1)
        self._standing[request.request_id] = before._replace(level=level)
        return Progress((float(level), now), self._check_after(level, before.step_s))

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
        self._standing.pop(request.request_id, None)
        super().on_complete(now, request, output_tokens, service_s, reason, last=last)

    def on_forget(self, now: float, workflow_id: str) -> None:
        for request_id in [i for i, s in self._standing.items() if s.workflow_id == workflow_id]:
            del self._standing[request_id]
        super().on_forget(now, workflow_id)
