"""The wait queue against a plain list that is looked through from end to end every time."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from chimsim.waitqueue import PROMOTED, Standing, Waiting, WaitQueue, standing_of

PRIORITIES = [(), (0.0,), (1.0,), (-2.5,), (1.0, 0.0), (1.0, -1.0)]


@dataclass(frozen=True)
class Entry:
    """What the list knows of one waiting request."""

    request_id: int
    standing: Standing
    deadline_at: float
    number: int  # of enqueueing


class AgainstAList(RuleBasedStateMachine):
    """Few priorities and instants, so that ties are the rule. Requests that left come back under their old id."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitQueue()
        self.waiting: list[Entry] = []
        self.places: dict[int, Waiting] = {}
        self.left: list[int] = []
        self.now = 0.0
        self.enqueued = 0

    def promoted(self, entry: Entry) -> bool:
        return entry.deadline_at <= self.now

    def next_entry(self) -> Entry:
        promoted = [entry for entry in self.waiting if self.promoted(entry)]
        if promoted:
            return min(promoted, key=lambda entry: entry.number)
        return min(self.waiting, key=lambda entry: (entry.standing, entry.request_id))

    def enqueue(self, request_id: int, priority: tuple[float, ...], wait_s: float) -> None:
        entry = Entry(request_id, standing_of(priority), self.now + wait_s, self.enqueued)
        self.enqueued += 1
        self.waiting.append(entry)
        self.places[request_id] = self.queue.push(request_id, entry.standing, entry.deadline_at)

    def drop(self, entry: Entry) -> None:
        self.waiting.remove(entry)
        del self.places[entry.request_id]
        self.left.append(entry.request_id)

    @rule(priority=st.sampled_from(PRIORITIES), wait_s=st.sampled_from([0.0, 1.0, 2.0, 3.0, inf, inf]))
    def push(self, priority: tuple[float, ...], wait_s: float) -> None:
        self.enqueue(len(self.waiting) + len(self.left), priority, wait_s)

    @precondition(lambda self: self.left)
    @rule(data=st.data(), priority=st.sampled_from(PRIORITIES), wait_s=st.sampled_from([0.0, 2.0, inf]))
    def push_again(self, data: st.DataObject, priority: tuple[float, ...], wait_s: float) -> None:
        request_id = data.draw(st.sampled_from(self.left))
        self.left.remove(request_id)
        self.enqueue(request_id, priority, wait_s)

    @rule()
    def pop(self) -> None:
        place = self.queue.pop(self.now)
        if not self.waiting:
            assert place is None
            return
        entry = self.next_entry()
        assert place is self.places[entry.request_id]
        assert (place.promoted, place.queued) == (self.promoted(entry), False)
        self.drop(entry)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.waiting))
        place = self.places[entry.request_id]
        self.queue.remove(place)
        assert not place.queued
        self.drop(entry)

    @rule(seconds=st.sampled_from([0.5, 1.0, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def promote(self) -> None:
        self.queue.promote(self.now)
        assert all(self.places[entry.request_id].promoted == self.promoted(entry) for entry in self.waiting)

    @invariant()
    def same_length(self) -> None:
        assert len(self.queue) == len(self.waiting)

    @rule()  # no invariant: looking at the head tidies the queue up
    def best(self) -> None:
        best = self.queue.best(self.now)
        if not self.waiting:
            assert best is None
        else:
            entry = self.next_entry()
            assert best == (PROMOTED if self.promoted(entry) else entry.standing)

    def teardown(self) -> None:
        while self.waiting:
            self.pop()
        self.pop()


TestAgainstAList = AgainstAList.TestCase
TestAgainstAList.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def drained(queue: WaitQueue, now: float) -> list[int]:
    found = []
    while (place := queue.pop(now)) is not None:
        found.append(place.request_id)
    return found


def test_ties_go_by_submission_whoever_came_back_last() -> None:
    queue = WaitQueue()
    for request_id in (5, 3, 4, 1):  # 1 left a slot and waits again
        queue.push(request_id, standing_of((2.0,)))
    assert drained(queue, 0.0) == [1, 3, 4, 5]


def test_the_promoted_are_equals_and_served_in_order_of_enqueueing() -> None:
    queue = WaitQueue()
    queue.push(7, standing_of((9.0,)), 2.0)
    queue.push(2, standing_of((0.0,)), 1.0)  # due first, but enqueued second
    queue.push(1, standing_of((-5.0,)))
    assert queue.best(0.5) == standing_of((-5.0,))
    assert queue.best(2.0) == PROMOTED
    assert drained(queue, 2.0) == [7, 2, 1]


def test_a_deadline_counts_from_its_very_instant() -> None:
    queue = WaitQueue()
    place = queue.push(0, standing_of(()), 2.0)
    queue.promote(1.999)
    assert not place.promoted
    queue.promote(2.0)
    assert place.promoted


def test_any_promoted_standing_is_better_than_any_other() -> None:
    assert all(standing_of(priority) > PROMOTED for priority in [(), (-inf,), (-1e308, -1.0)])
    assert standing_of(()) < standing_of((-5.0,)) < standing_of((-5.0, 0.0))
