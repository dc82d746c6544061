"""The dispatcher: owns the queues and the bookkeeping between a policy and the engines, neither a clock nor I/O.

A driver (simulated or live) tells it what happened and when, and does what it answers: which requests to start on
an engine, and which to take back from it. It never learns how an output ends before the driver says so.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from traceback import extract_tb

from chimsim.errors import ChimsimError, near
from chimsim.waitqueue import PROMOTED, Standing, Waiting, WaitQueue, standing_of
from policies.interface import ClusterView, Dispatch, EngineView, Policy, PolicyError, Priority, Progress, RequestView


@dataclass(slots=True)
class Start:
    """Start this request on the engine; tell `Dispatcher.progress` after ``check_after_tokens`` (0: never)."""

    request_id: int
    check_after_tokens: int
    priority: Priority


class _Request:
    """What the dispatcher remembers of one dispatched request until it completes."""

    __slots__ = (
        "check_left", "engine", "enqueued_at", "longest_wait_s", "max_wait_s", "place", "priority", "promoted_left",
        "promoted_tokens", "promotions", "service_s", "slot_at", "standing", "tokens", "view",
    )  # fmt: skip

    def __init__(self, view: RequestView, engine: _Engine, decision: Dispatch) -> None:
        self.view = view
        self.engine = engine
        self.priority = decision.priority
        self.standing: Standing = standing_of(decision.priority)
        self.max_wait_s = decision.max_wait_s
        self.promoted_tokens = decision.promoted_tokens
        self.check_left = decision.check_after_tokens
        self.promoted_left = 0
        self.place: Waiting | None = None
        self.enqueued_at = 0.0
        self.slot_at = 0.0
        self.service_s = 0.0
        self.longest_wait_s = 0.0
        self.promotions = 0
        self.tokens = 0


class _Engine:
    """One engine's queue and slots. ``inside`` is sorted by standing, kept only for preemptive policies."""

    __slots__ = ("changed", "count", "healthy", "index", "inside", "queue", "slots", "total_wait_s", "view")

    def __init__(self, index: int, view: EngineView, slots: float) -> None:
        self.index = index
        self.view: EngineView = view
        self.changed = True  # since its view was made
        self.slots = slots
        self.queue = WaitQueue()
        self.inside: list[tuple[Standing, int]] = []
        self.count = 0
        self.healthy = True
        self.total_wait_s = 0.0


@dataclass(slots=True)
class Outcome:
    """What the dispatcher counted for a request that is over; times in seconds."""

    engine: str
    service_s: float
    longest_wait_s: float
    promotions: int


class Dispatcher:
    """Queues of requests in front of engines, in the policy's order.

    ``engines`` are views with their slot counts; at most ``max_batch_size + look_ahead`` requests are inside an
    engine. ``queue_in_engine`` hands everything over at once: then the engine's own order is all there is, and a
    policy must give keys of at most one number.
    """

    def __init__(
        self,
        policy: Policy,
        engines: Sequence[EngineView],
        *,
        look_ahead: int = 0,
        queue_in_engine: bool = False,
    ) -> None:
        if not engines:
            raise ChimsimError("the cluster has no engine; expected at least one")
        self.policy = policy
        self._engines = {
            view.name: _Engine(index, view, inf if queue_in_engine else view.max_batch_size + look_ahead)
            for index, view in enumerate(sorted(engines, key=lambda view: view.name))
        }
        self._changed = list(self._engines.values())
        self._views = [state.view for state in self._changed]
        self._requests: dict[int, _Request] = {}
        self._queue_in_engine = queue_in_engine
        self._preemptive = policy.preemptive and not queue_in_engine
        self._cluster: ClusterView = ()

    def cluster(self) -> ClusterView:
        """The engines as a policy sees them at this instant."""
        if self._changed:
            for state in self._changed:
                view = state.view
                state.changed = False
                self._views[state.index] = state.view = EngineView(
                    view.name, view.model, view.max_batch_size, view.decode_s_per_token,
                    state.count, len(state.queue), state.healthy,
                )  # fmt: skip
            self._changed.clear()
            self._cluster = tuple(self._views)
        return self._cluster

    def set_health(self, engine: str, healthy: bool) -> None:
        """Mark an engine as serving or not; a policy is expected to avoid one that is not."""
        state = self._engines[engine]
        state.healthy = healthy
        self._note(state)

    def submit(self, now: float, view: RequestView, among: Container[str] | None = None) -> Dispatch:
        """Ask the policy where a ready stage goes, and queue it there; ``among`` are all engines that it may see.

        Raises `PolicyError` when the policy names an engine that is not in the view, or a key it must not give.
        """
        cluster = self.cluster()
        if among is not None:
            cluster = tuple(engine for engine in cluster if engine.name in among)
        try:
            decision = self.policy.dispatch(now, view, cluster)
        except (Exception, SystemExit) as error:
            raise self._failure("dispatch", error) from error
        if not isinstance(decision, Dispatch):
            raise PolicyError(f"policy {self._policy_name()}: dispatch gave {decision!r}; expected a Dispatch")
        state = self._engines.get(decision.engine)
        if state is None or (among is not None and decision.engine not in among):
            known = ", ".join(engine.name for engine in cluster)
            raise PolicyError(
                f"policy {self._policy_name()} sent request {view.request_id} to engine {decision.engine!r}, which is "
                f"not in the cluster (engines: {known}){near(decision.engine, self._engines)}"
            )
        self._check_priority(decision.priority)
        request = _Request(view, state, decision)
        self._requests[view.request_id] = request
        self._enqueue(now, request)
        return decision

    def fill(self, now: float, engine: str) -> list[Start]:
        """Requests to start now in the engine's free slots, in order."""
        state = self._engines[engine]
        starts: list[Start] = []
        while state.count < state.slots:
            place = state.queue.pop(now)
            if place is None:
                break
            starts.append(self._start(now, state, place))
        return starts

    def wants_slot(self, now: float, engine: str) -> bool:
        """Whether a waiting request of a preemptive policy is strictly better than the worst one inside."""
        if not self._preemptive:
            return False
        state = self._engines[engine]
        if not state.inside:
            return False
        best = state.queue.best(now)
        return best is not None and best < state.inside[-1][0]

    def take_back(self, now: float, engine: str) -> int | None:
        """At a step boundary: the worst request inside, to leave its slot to a strictly better waiting one.

        The driver tells its output so far to `leave`, then calls `fill`. None when there is nothing to take back.
        """
        state = self._engines[engine]
        if state.count < state.slots or not self.wants_slot(now, engine):
            return None
        return state.inside[-1][1]

    def leave(self, now: float, request_id: int, output_tokens: int) -> None:
        """A request gave up its slot with ``output_tokens`` so far, and waits again at its standing.

        A check that those tokens made due is told to `progress` before.
        """
        request = self._requests[request_id]
        self._count_tokens(request, output_tokens)
        self._release_slot(now, request)
        self._enqueue(now, request)

    def progress(self, now: float, request_id: int, output_tokens: int) -> int | None:
        """A started request reached its check with ``output_tokens`` so far.

        Returns after how many more tokens to report again (0: never), or None when it must leave its slot: the
        driver then calls `leave`.
        """
        request = self._requests[request_id]
        promoted_before = request.promoted_left
        check_before = request.check_left
        self._count_tokens(request, output_tokens)
        standing = request.standing
        if promoted_before and not request.promoted_left:
            standing = standing_of(request.priority)
        if check_before and not request.check_left:
            service_s = request.service_s + (now - request.slot_at)
            try:
                answer = self.policy.on_progress(now, request.view, output_tokens, service_s)
            except (Exception, SystemExit) as error:
                raise self._failure("on_progress", error) from error
            if not isinstance(answer, Progress):
                raise PolicyError(f"policy {self._policy_name()}: on_progress gave {answer!r}; expected a Progress")
            self._check_priority(answer.priority)
            request.priority = answer.priority
            request.check_left = answer.check_after_tokens
            if standing is not PROMOTED:
                standing = standing_of(answer.priority)
        self._change_standing(request, standing)
        best = request.engine.queue.best(now)
        if best is not None and best < standing:
            return None
        return _sooner(request.check_left, request.promoted_left)

    def complete(self, now: float, request_id: int, output_tokens: int, reason: str = "stop", *, last: bool) -> Outcome:
        """A request is over (``stop``, ``failed`` or ``aborted``); ``last``: its workflow has no later stage."""
        request = self._requests.pop(request_id)
        if request.place is not None:
            request.engine.queue.remove(request.place)
            self._note(request.engine)
        else:
            self._release_slot(now, request)
        try:
            self.policy.on_complete(now, request.view, output_tokens, request.service_s, reason, last=last)
        except (Exception, SystemExit) as error:
            raise self._failure("on_complete", error) from error
        return Outcome(request.engine.view.name, request.service_s, request.longest_wait_s, request.promotions)

    def forget(self, now: float, workflow_id: str) -> None:
        """A workflow ended without a last completion."""
        self.policy.on_forget(now, workflow_id)

    def next_deadline(self, request_id: int) -> float:
        """When a waiting request will be promoted (inf: never), for drivers of preemptive policies."""
        place = self._requests[request_id].place
        return inf if place is None or not self._preemptive else place.deadline_at

    def inside(self, request_id: int) -> bool:
        """Whether a request has a slot of its engine, rather than waiting for one."""
        return self._requests[request_id].place is None

    def waiting(self, engine: str) -> int:
        """Requests queued for the engine."""
        return len(self._engines[engine].queue)

    def total_wait_s(self, engine: str) -> float:
        """Seconds that requests have spent in the engine's queue, summed over those that left it for a slot."""
        return self._engines[engine].total_wait_s

    def _note(self, state: _Engine) -> None:
        """The engine's view is no longer true."""
        if not state.changed:
            state.changed = True
            self._changed.append(state)

    def _policy_name(self) -> str:
        return type(self.policy).__name__

    def _failure(self, method: str, error: BaseException) -> Exception:
        """What a policy's own mistake is reported as: with the line in which it happened."""
        if isinstance(error, ChimsimError | PolicyError):
            return error
        place = ""
        if error.__traceback__ is not None:
            last = extract_tb(error.__traceback__)[-1]
            place = f" ({last.filename}:{last.lineno})"
        return PolicyError(f"policy {self._policy_name()}: {method} raised {type(error).__name__}: {error}{place}")

    def _check_priority(self, priority: Priority) -> None:
        for number in priority:
            if not isinstance(number, int | float):
                raise PolicyError(f"policy {self._policy_name()} gave priority {priority!r}; expected numbers")
            if not isfinite(number):
                raise PolicyError(f"policy {self._policy_name()} gave priority {priority}; expected finite numbers")
        if self._queue_in_engine and len(priority) > 1:
            raise PolicyError(
                f"policy {self._policy_name()} orders by {len(priority)} numbers {priority}; with the queue in the "
                "engine a priority is one integer: use --queue dispatcher"
            )

    def _enqueue(self, now: float, request: _Request) -> None:
        deadline_at = now + request.max_wait_s
        request.standing = standing_of(request.priority)
        request.promoted_left = 0
        request.enqueued_at = now
        request.place = request.engine.queue.push(request.view.request_id, request.standing, deadline_at)
        self._note(request.engine)

    def _start(self, now: float, state: _Engine, place: Waiting) -> Start:
        request = self._requests[place.request_id]
        waited_s = now - request.enqueued_at
        state.total_wait_s += waited_s
        if waited_s > request.longest_wait_s:
            request.longest_wait_s = waited_s
        request.place = None
        request.slot_at = now
        if place.promoted:
            request.promotions += 1
            request.standing = PROMOTED
            request.promoted_left = request.promoted_tokens
        state.count += 1
        self._note(state)
        if self._preemptive:
            insort(state.inside, (request.standing, place.request_id))
        check = 0 if self._queue_in_engine else _sooner(request.check_left, request.promoted_left)
        return Start(place.request_id, check, request.priority)

    def _release_slot(self, now: float, request: _Request) -> None:
        state = request.engine
        request.service_s += now - request.slot_at
        state.count -= 1
        self._note(state)
        if self._preemptive:
            entry = (request.standing, request.view.request_id)
            del state.inside[bisect_left(state.inside, entry)]

    def _change_standing(self, request: _Request, standing: Standing) -> None:
        if standing == request.standing:
            return
        if self._preemptive:
            inside = request.engine.inside
            del inside[bisect_left(inside, (request.standing, request.view.request_id))]
            insort(inside, (standing, request.view.request_id))
        request.standing = standing

    def _count_tokens(self, request: _Request, output_tokens: int) -> None:
        new = output_tokens - request.tokens
        request.tokens = output_tokens
        if request.check_left:
            request.check_left = max(request.check_left - new, 0)
        if request.promoted_left:
            request.promoted_left = max(request.promoted_left - new, 0)


def _sooner(a: int, b: int) -> int:
    """The smaller of two token counts, where 0 means never."""
    return min(a, b) if a and b else a or b
