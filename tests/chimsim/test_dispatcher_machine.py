"""The dispatcher under a random driver, against books kept as plainly as possible: nobody is lost or served twice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chimsim.dispatcher import Dispatcher
from policies.interface import Dispatch, Priority, Progress
from tests.chimsim.test_dispatcher import Preemptive, Scripted
from tests.policies.views import engine, request

SLOTS = 2
NAMES = ("a", "b")
PRIORITIES = st.sampled_from([(), (0.0,), (1.0,), (1.0, -1.0), (2.0,)])
CHECKS = st.sampled_from([0, 1, 3, 4])


@dataclass
class Entry:
    """One request in the books: it waits, or is ``inside`` its engine since ``slot_at``."""

    request_id: int
    decision: Dispatch
    priority: Priority
    enqueued_at: float
    number: int  # of enqueueing
    check_left: int
    inside: bool = False
    promoted: bool = False  # the slot was had by promotion, which still lasts
    promoted_left: int = 0
    slot_at: float = 0.0
    service_s: float = 0.0
    tokens: int = 0
    promotions: int = 0
    longest_wait_s: float = 0.0

    def due(self, now: float) -> bool:
        return not self.inside and now >= self.enqueued_at + self.decision.max_wait_s

    def standing(self, now: float) -> tuple[float, ...]:
        return (0.0,) if self.promoted or self.due(now) else (1.0, *self.priority)

    def place(self, now: float) -> tuple[object, ...]:
        """Orders those that wait: the promoted by enqueueing, the others by standing and submission."""
        return (0, self.number) if self.due(now) else (1, self.standing(now), self.request_id)


class RandomDriver(RuleBasedStateMachine):
    """Two engines of two slots; few priorities and short waits, so that ties and promotions abound."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Scripted()
        self.dispatcher = Dispatcher(self.policy, [engine(NAMES[0])])
        self.entries: dict[int, Entry] = {}
        self.healthy = dict.fromkeys(NAMES, True)
        self.now = 0.0
        self.submitted = self.enqueued = 0

    @initialize(preemptive=st.booleans(), look_ahead=st.integers(0, 1))
    def begin(self, preemptive: bool, look_ahead: int) -> None:
        if preemptive:
            self.policy = Preemptive()
        views = [engine(name, slots=SLOTS) for name in NAMES]
        self.dispatcher = Dispatcher(self.policy, views, look_ahead=look_ahead)
        self.slots = SLOTS + look_ahead

    def of(self, name: str, *, inside: bool) -> list[Entry]:
        return [e for e in self.entries.values() if e.decision.engine == name and e.inside == inside]

    def best(self, name: str) -> Entry | None:
        return min(self.of(name, inside=False), key=lambda entry: entry.place(self.now), default=None)

    def better_waits(self, name: str, entries: Iterable[Entry]) -> bool:
        best = self.best(name)
        return best is not None and any(best.standing(self.now) < entry.standing(self.now) for entry in entries)

    def enqueue(self, entry: Entry) -> None:
        entry.inside = entry.promoted = False
        entry.promoted_left = 0
        entry.enqueued_at = self.now
        entry.number = self.enqueued
        self.enqueued += 1

    def pass_tokens(self, entry: Entry, tokens: int) -> None:
        entry.tokens += tokens
        entry.check_left = max(entry.check_left - tokens, 0)
        if entry.promoted_left:
            entry.promoted_left = max(entry.promoted_left - tokens, 0)
            entry.promoted = entry.promoted_left > 0

    def next_report(self, entry: Entry) -> int:
        return min((left for left in (entry.check_left, entry.promoted_left) if left), default=0)

    def leave(self, entry: Entry) -> None:
        self.dispatcher.leave(self.now, entry.request_id, entry.tokens)
        entry.service_s += self.now - entry.slot_at
        self.enqueue(entry)

    @rule(
        name=st.sampled_from(NAMES),
        priority=PRIORITIES,
        max_wait_s=st.sampled_from([0.0, 1.0, 2.0, inf, inf]),
        promoted_tokens=st.sampled_from([0, 2, 3]),
        check=CHECKS,
    )
    def submit(self, name: str, priority: Priority, max_wait_s: float, promoted_tokens: int, check: int) -> None:
        decision = self.policy.decisions[self.submitted] = Dispatch(name, priority, max_wait_s, promoted_tokens, check)
        assert self.dispatcher.submit(self.now, request(self.submitted)) is decision
        entry = Entry(self.submitted, decision, priority, self.now, self.enqueued, check)
        self.enqueue(entry)
        self.entries[self.submitted] = entry
        self.submitted += 1

    @rule(seconds=st.sampled_from([0.5, 1.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=st.sampled_from(NAMES), healthy=st.booleans())
    def set_health(self, name: str, healthy: bool) -> None:
        self.dispatcher.set_health(name, healthy)
        self.healthy[name] = healthy

    @rule(name=st.sampled_from(NAMES))
    def fill(self, name: str) -> None:
        starts = self.dispatcher.fill(self.now, name)
        for start in starts:
            entry = self.best(name)
            assert entry is not None
            assert entry.request_id == start.request_id
            if entry.due(self.now):
                entry.promoted = True
                entry.promotions += 1
                entry.promoted_left = entry.decision.promoted_tokens
            entry.inside = True
            entry.slot_at = self.now
            entry.longest_wait_s = max(entry.longest_wait_s, self.now - entry.enqueued_at)
            assert start.priority == entry.priority
            assert start.check_after_tokens == self.next_report(entry)
        # work conserving: a slot stays free only where nobody waits
        assert len(self.of(name, inside=True)) == self.slots or not self.of(name, inside=False)

    @precondition(lambda self: any(self.next_report(entry) for entry in self.entries.values() if entry.inside))
    @rule(data=st.data(), priority=PRIORITIES, check=CHECKS)
    def report(self, data: st.DataObject, priority: Priority, check: int) -> None:
        reporting = [entry for entry in self.entries.values() if entry.inside and self.next_report(entry)]
        entry = data.draw(st.sampled_from(reporting))
        tokens = data.draw(st.sampled_from([self.next_report(entry), 1, self.next_report(entry) + 1]))
        had_check = entry.check_left > 0
        self.pass_tokens(entry, tokens)
        self.policy.answers[:] = [Progress(priority, check)]
        self.policy.log.clear()
        answer = self.dispatcher.progress(self.now, entry.request_id, entry.tokens)
        if had_check and not entry.check_left:
            service_s = entry.service_s + self.now - entry.slot_at
            assert self.policy.log == [("progress", self.now, entry.request_id, entry.tokens, service_s)]
            entry.priority = priority
            entry.check_left = check
        else:
            assert self.policy.log == []
        if self.better_waits(entry.decision.engine, [entry]):
            assert answer is None
            self.leave(entry)
        else:
            assert answer == self.next_report(entry)

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def take_back(self, data: st.DataObject, name: str) -> None:
        inside = self.of(name, inside=True)
        wanted = self.policy.preemptive and self.better_waits(name, inside)
        assert self.dispatcher.wants_slot(self.now, name) == wanted
        worst = self.dispatcher.take_back(self.now, name)
        if not wanted or len(inside) < self.slots:
            assert worst is None
            return
        entry = max(inside, key=lambda entry: (entry.standing(self.now), entry.request_id))
        assert worst == entry.request_id
        short = self.next_report(entry) - 1  # what is due was told before
        self.pass_tokens(entry, data.draw(st.integers(0, short if short >= 0 else 5)))
        self.leave(entry)

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), reason=st.sampled_from(["stop", "failed", "aborted"]), last=st.booleans())
    def complete(self, data: st.DataObject, reason: str, last: bool) -> None:
        entry = self.entries.pop(data.draw(st.sampled_from(sorted(self.entries))))
        self.policy.log.clear()
        if entry.inside:
            entry.service_s += self.now - entry.slot_at
        outcome = self.dispatcher.complete(self.now, entry.request_id, entry.tokens, reason, last=last)
        assert (outcome.engine, outcome.service_s) == (entry.decision.engine, entry.service_s)
        assert (outcome.promotions, outcome.longest_wait_s) == (entry.promotions, entry.longest_wait_s)
        ended = ("complete", self.now, entry.request_id, entry.tokens, entry.service_s, reason, last)
        assert self.policy.log == [ended]

    @invariant()
    def books_agree(self) -> None:
        views = {view.name: view for view in self.dispatcher.cluster()}
        for name in NAMES:
            inside, waiting = self.of(name, inside=True), self.of(name, inside=False)
            assert len(inside) <= self.slots
            assert (views[name].running, views[name].waiting) == (len(inside), len(waiting))
            assert self.dispatcher.waiting(name) == len(waiting)
            assert views[name].healthy == self.healthy[name]
            if self.policy.preemptive:
                kept = self.dispatcher._engines[name].inside
                assert kept == sorted((entry.standing(self.now), entry.request_id) for entry in inside)
        for entry in self.entries.values():
            counts = self.policy.preemptive and not entry.inside
            deadline_at = entry.enqueued_at + entry.decision.max_wait_s if counts else inf
            assert self.dispatcher.next_deadline(entry.request_id) == deadline_at

    def teardown(self) -> None:
        for name in NAMES:
            for _ in self.of(name, inside=False) + self.of(name, inside=True):
                self.fill(name)
                entry = self.of(name, inside=True)[0]
                del self.entries[entry.request_id]
                self.dispatcher.complete(self.now, entry.request_id, entry.tokens, last=True)
        assert not self.entries
        assert not self.dispatcher._requests


TestRandomDriver = RandomDriver.TestCase
TestRandomDriver.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
