"""Watches a simulation for what its records leave out: every spell in a slot, and what was known at every decision.

A sweep does not pay for it: a watched run is made again from its configuration, and gives the same records. It
changes nothing of what happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import nan

from chimsim.config import EngineSpec
from chimsim.engine import Engine, EngineRequest
from policies.interface import ClusterView, Dispatch, EngineView, Policy, Priority, RequestView
from policies.routed import RoutedPolicy

FINISHED, PREEMPTED, YIELDED, CHECKED = "finished", "preempted", "yielded", "checked"
"""How a spell ends. Checked: a slice of output tokens was over, and the request went on at once."""


@dataclass(slots=True)
class Spell:
    """A request's time in an engine's batch, from one admission on; instants in seconds.

    ``token_at``: its prefill was over and its first token of this spell there, NaN if it did not come to that.
    """

    begin_at: float
    token_at: float = nan
    end_at: float = nan
    ended: str = FINISHED


@dataclass(frozen=True, slots=True)
class Decision:
    """What the policy was shown when it dispatched a request, and what it answered.

    ``after`` are the stages that were waited for, ``known`` the predictions that the policy reads, by field and model,
    ``latency_ms`` Chimera's L by model, ``load`` what every engine had (running, waiting).
    """

    at: float
    after: tuple[int, ...]
    known: Mapping[str, Mapping[str, float]]
    latency_ms: Mapping[str, float]
    load: Mapping[str, tuple[int, int]]
    engine: str
    priority: Priority
    reason: str


class Watch:
    """Give `simulate` a policy through ``policy`` and ``engine_class=watch.engine``; afterwards read the rest.

    ``spells`` and ``decisions`` are by request id. A request that was rejected has no spells.
    """

    def __init__(self) -> None:
        self.spells: dict[int, list[Spell]] = {}
        self.decisions: dict[int, Decision] = {}

    def engine(self, spec: EngineSpec) -> Engine:
        """An engine that notes its spells."""
        return _WatchedEngine(spec, self.spells)

    def policy(self, policy: Policy) -> Policy:
        """The same policy, which notes its decisions, and gives reasons if it can."""
        decide = policy.dispatch
        if isinstance(policy, RoutedPolicy):
            policy.explain = True

        def dispatch(now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
            latency_ms = _latency_ms(policy, cluster)
            made = decide(now, request, cluster)
            self.spells.pop(request.request_id, None)  # of a call that is sent again the last try is told
            self.decisions[request.request_id] = Decision(
                now,
                request.after,
                {field: getattr(request.prediction, field) for field in sorted(policy.reads)},
                latency_ms,
                {engine.name: (engine.running, engine.waiting) for engine in cluster},
                made.engine,
                made.priority,
                made.reason,
            )
            return made

        # On the object, so that it stays of its class: messages name that, and users' policies may be frozen.
        object.__setattr__(policy, "dispatch", dispatch)
        return policy


def _latency_ms(policy: Policy, cluster: ClusterView) -> dict[str, float]:
    if not isinstance(policy, RoutedPolicy):
        return {}
    by_model: dict[str, list[EngineView]] = {}
    for engine in cluster:
        if engine.healthy:
            by_model.setdefault(engine.model, []).append(engine)
    return {model: policy.latency_ms(engines) for model, engines in by_model.items()}


class _WatchedEngine(Engine):
    """Notes when a request gets into the batch, has its next token, and gets out, where `Engine` decides on it."""

    def __init__(self, spec: EngineSpec, spells: dict[int, list[Spell]]) -> None:
        super().__init__(spec)
        self._spells = spells
        self._removed: EngineRequest | None = None

    def submit(self, request: EngineRequest) -> bool:
        if request is self._removed:
            # Nothing else came in between: whoever yields sees a better request take the slot.
            self._spells[request.request_id][-1].ended = CHECKED
        self._removed = None
        return super().submit(request)

    def remove(self, request: EngineRequest, now: float) -> int:
        running = request.request_id in self._running
        produced = super().remove(request, now)
        if running:
            self._spells[request.request_id][-1].ended = YIELDED
            self._removed = request
        return produced

    def fail(self, now: float) -> None:
        inside = [*self._running.values(), *self._waiting, *(request for _, request in self._waiting_heap)]
        super().fail(now)
        for request in inside:
            self._spells.pop(request.request_id, None)

    def _schedule_chunk(self, request: EngineRequest, tokens: int, chunks: list[tuple[EngineRequest, int]]) -> None:
        spells = self._spells.setdefault(request.request_id, [])
        if not spells or spells[-1].end_at >= 0.0:
            spells.append(Spell(self._start_at))
        super()._schedule_chunk(request, tokens, chunks)

    def _finish_chunks(self, now: float, events: list[EngineRequest]) -> None:
        chunks = self._chunks
        super()._finish_chunks(now, events)
        for request, _ in chunks:
            if request.decoding:
                self._spells[request.request_id][-1].token_at = now

    def _preempt(self, request: EngineRequest, now: float, new_blocks: int) -> None:
        super()._preempt(request, now, new_blocks)
        self._spells[request.request_id][-1].ended = PREEMPTED

    def _take_out(self, request: EngineRequest, now: float, new_blocks: int = 0) -> None:
        super()._take_out(request, now, new_blocks)
        self._spells[request.request_id][-1].end_at = now
