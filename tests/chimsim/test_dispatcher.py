"""The dispatcher keeps the policy contract: who is queued where, started when, asked, put back and told of its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, nan
from typing import Any, ClassVar, cast

import pytest

from chimsim.dispatcher import Dispatcher, Start
from chimsim.errors import ChimsimError
from policies.interface import ClusterView, Dispatch, EngineView, Policy, PolicyError, Priority, Progress, RequestView
from tests.policies.views import engine, request


@dataclass
class Scripted(Policy):
    """Decides as told, by request id; ``log`` is what it was asked and told."""

    decisions: dict[int, Dispatch] = field(default_factory=dict)
    answers: list[Progress] = field(default_factory=list)
    log: list[tuple[Any, ...]] = field(default_factory=list)
    seen: list[ClusterView] = field(default_factory=list)

    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        self.seen.append(cluster)
        return self.decisions.get(request.request_id, Dispatch("a"))

    def on_progress(self, now: float, request: RequestView, output_tokens: int, service_s: float) -> Progress:
        self.log.append(("progress", now, request.request_id, output_tokens, service_s))
        return self.answers.pop(0)

    def on_complete(
        self, now: float, request: RequestView, output_tokens: int, service_s: float, reason: str, *, last: bool
    ) -> None:
        self.log.append(("complete", now, request.request_id, output_tokens, service_s, reason, last))

    def on_forget(self, now: float, workflow_id: str) -> None:
        self.log.append(("forget", now, workflow_id))


class Preemptive(Scripted):
    preemptive: ClassVar[bool] = True


def orders(*priorities: float, **fields: Any) -> dict[int, Dispatch]:
    """Requests 0, 1, ... to engine a at these priorities."""
    return {number: Dispatch("a", (value,), **fields) for number, value in enumerate(priorities)}


def submit(dispatcher: Dispatcher, *request_ids: int, now: float = 0.0) -> None:
    for request_id in request_ids:
        dispatcher.submit(now, request(request_id))


def filled(dispatcher: Dispatcher, now: float = 0.0, name: str = "a") -> list[int]:
    return [start.request_id for start in dispatcher.fill(now, name)]


def one_slot(policy: Policy, **settings: Any) -> Dispatcher:
    return Dispatcher(policy, [engine("a", slots=1)], **settings)


def loads(dispatcher: Dispatcher) -> dict[str, tuple[int, int]]:
    return {view.name: (view.running, view.waiting) for view in dispatcher.cluster()}


def test_an_engine_that_is_not_in_the_view_is_refused_with_its_neighbour() -> None:
    policy = Scripted({0: Dispatch("small0")})
    dispatcher = Dispatcher(policy, [engine("small1"), engine("large")])
    with pytest.raises(
        PolicyError,
        match=r"policy Scripted sent request 0 to engine 'small0', which is not in the cluster \(engines: large, "
        r"small1\); did you mean 'small1'\?",
    ):
        submit(dispatcher, 0)
    assert loads(dispatcher) == {"large": (0, 0), "small1": (0, 0)}


def test_a_cluster_without_an_engine_is_refused() -> None:
    with pytest.raises(ChimsimError, match="no engine"):
        Dispatcher(Scripted(), [])


@pytest.mark.parametrize("priority", [(inf,), (1.0, nan), (-inf,)])
def test_priorities_are_finite(priority: Priority) -> None:
    policy = Scripted({0: Dispatch("a", priority), 1: Dispatch("a", (1.0,), check_after_tokens=3)})
    dispatcher = one_slot(policy)
    with pytest.raises(PolicyError, match=r"policy Scripted gave priority \(.*\); expected finite numbers"):
        submit(dispatcher, 0)
    assert dispatcher.waiting("a") == 0
    submit(dispatcher, 1)
    dispatcher.fill(0.0, "a")
    policy.answers.append(Progress(priority))
    with pytest.raises(PolicyError, match="expected finite numbers"):
        dispatcher.progress(1.0, 1, 3)


def test_slots_are_filled_in_the_policys_order_and_ties_by_submission() -> None:
    dispatcher = Dispatcher(Scripted(orders(2.0, 1.0, 2.0, 1.0, 0.0)), [engine("a", slots=2)])
    submit(dispatcher, 3, 0, 1, 2, 4)
    assert filled(dispatcher) == [4, 1]
    assert filled(dispatcher) == []
    dispatcher.complete(1.0, 1, 5, last=True)
    assert filled(dispatcher, 1.0) == [3]
    dispatcher.complete(2.0, 4, 5, last=True)
    dispatcher.complete(2.0, 3, 5, last=True)
    assert filled(dispatcher, 2.0) == [0, 2]


@pytest.mark.parametrize("look_ahead", [0, 1, 3])
def test_look_ahead_is_how_many_more_than_the_batch_are_inside(look_ahead: int) -> None:
    dispatcher = Dispatcher(Scripted(), [engine("a", slots=2)], look_ahead=look_ahead)
    submit(dispatcher, *range(8))
    assert filled(dispatcher) == list(range(2 + look_ahead))
    assert loads(dispatcher) == {"a": (2 + look_ahead, 6 - look_ahead)}


def test_the_policy_sees_the_cluster_of_the_instant_in_order_of_names() -> None:
    policy = Scripted({1: Dispatch("b")})
    dispatcher = Dispatcher(policy, [engine("b", slots=1), engine("a", "m", slots=1, step_s=0.5)])
    submit(dispatcher, 0)
    submit(dispatcher, 1)
    dispatcher.fill(0.0, "a")
    dispatcher.set_health("b", False)
    submit(dispatcher, 2)
    assert policy.seen == [
        (EngineView("a", "m", 1, 0.5), engine("b", slots=1)),
        (EngineView("a", "m", 1, 0.5, waiting=1), engine("b", slots=1)),
        (EngineView("a", "m", 1, 0.5, running=1), engine("b", slots=1, waiting=1, healthy=False)),
    ]
    dispatcher.set_health("b", True)
    assert [view.healthy for view in dispatcher.cluster()] == [True, True]


def test_whoever_has_waited_too_long_goes_first_and_is_counted_as_promoted() -> None:
    policy = Scripted({0: Dispatch("a", (9.0,), max_wait_s=3.0), 1: Dispatch("a", (0.0,)), 2: Dispatch("a", (-1.0,))})
    dispatcher = one_slot(policy)
    submit(dispatcher, 0, 1)
    assert filled(dispatcher, 2.5) == [1]
    submit(dispatcher, 2, now=2.75)
    assert dispatcher.complete(3.0, 1, 4, last=True).promotions == 0
    assert filled(dispatcher, 3.0) == [0]
    outcome = dispatcher.complete(4.5, 0, 4, last=True)
    assert (outcome.engine, outcome.promotions, outcome.longest_wait_s, outcome.service_s) == ("a", 1, 3.0, 1.5)


def test_a_promotion_ends_after_its_tokens() -> None:
    dispatcher = one_slot(Scripted(orders(9.0, 1.0, max_wait_s=1.0, promoted_tokens=4)))
    submit(dispatcher, 0)
    assert dispatcher.fill(1.0, "a") == [Start(0, 4, (9.0,))]
    submit(dispatcher, 1, now=1.0)
    assert dispatcher.progress(1.2, 0, 3) == 1  # asked too early: one token is left of it
    assert dispatcher.progress(1.3, 0, 4) is None  # 1 is better than 9, which it is again
    dispatcher.leave(1.3, 0, 4)
    assert filled(dispatcher, 1.3) == [1]


def test_a_promotion_without_a_number_of_tokens_lasts_until_the_slot_is_left() -> None:
    policy = Scripted(
        {0: Dispatch("a", (9.0,), max_wait_s=1.0, check_after_tokens=5), 1: Dispatch("a", (1.0,))},
        [Progress((10.0,), 5), Progress((0.5,), 5)],
    )
    dispatcher = one_slot(policy)
    submit(dispatcher, 0)
    assert dispatcher.fill(1.0, "a") == [Start(0, 5, (9.0,))]
    submit(dispatcher, 1, now=1.0)
    assert dispatcher.progress(2.0, 0, 5) == 5  # worse than 1 by its own priority, and yet it runs on
    dispatcher.leave(2.0, 0, 5)
    assert filled(dispatcher, 2.0) == [1]
    dispatcher.complete(2.5, 1, 1, last=True)
    assert dispatcher.fill(2.5, "a") == [Start(0, 5, (10.0,))]
    assert dispatcher.progress(3.0, 0, 10) == 5
    assert dispatcher.complete(3.0, 0, 10, last=True).promotions == 1


def test_what_is_left_of_a_promotion_is_lost_with_the_slot() -> None:
    dispatcher = one_slot(Scripted(orders(9.0, max_wait_s=1.0, promoted_tokens=4)))
    submit(dispatcher, 0)
    assert dispatcher.fill(1.0, "a") == [Start(0, 4, (9.0,))]
    dispatcher.leave(1.5, 0, 2)
    assert dispatcher.fill(1.75, "a") == [Start(0, 0, (9.0,))]
    assert dispatcher.complete(2.0, 0, 9, last=True).promotions == 1


def test_of_a_check_and_the_end_of_a_promotion_the_sooner_is_reported() -> None:
    policy = Scripted(orders(1.0, max_wait_s=0.0, promoted_tokens=4, check_after_tokens=6), [Progress((1.0,))])
    dispatcher = one_slot(policy)
    submit(dispatcher, 0)
    assert dispatcher.fill(0.0, "a") == [Start(0, 4, (1.0,))]
    assert dispatcher.progress(1.0, 0, 4) == 2
    assert policy.log == []
    assert dispatcher.progress(2.0, 0, 6) == 0
    assert policy.log == [("progress", 2.0, 0, 6, 2.0)]


def test_the_policy_is_asked_after_every_so_many_tokens_until_it_says_never() -> None:
    policy = Scripted(
        {0: Dispatch("a", (1.0,), check_after_tokens=5)}, [Progress((2.0,), 10), Progress((3.0,)), Progress((4.0,))]
    )
    dispatcher = one_slot(policy)
    submit(dispatcher, 0)
    assert dispatcher.fill(1.0, "a") == [Start(0, 5, (1.0,))]
    assert dispatcher.progress(1.5, 0, 2) == 3
    assert dispatcher.progress(2.0, 0, 6) == 10  # reported late: counted from here
    assert dispatcher.progress(3.0, 0, 16) == 0
    assert dispatcher.progress(4.0, 0, 30) == 0
    assert policy.log == [("progress", 2.0, 0, 6, 1.0), ("progress", 3.0, 0, 16, 2.0)]


@pytest.mark.parametrize(("answer", "yields"), [(1.0, False), (2.0, False), (2.5, True)])
def test_a_request_yields_to_a_strictly_better_one_only(answer: float, yields: bool) -> None:
    policy = Scripted({0: Dispatch("a", (0.0,), check_after_tokens=5), 1: Dispatch("a", (2.0,))})
    policy.answers.append(Progress((answer,), 7))
    dispatcher = one_slot(policy)
    submit(dispatcher, 0)
    dispatcher.fill(0.0, "a")
    submit(dispatcher, 1)
    assert dispatcher.progress(1.0, 0, 5) == (None if yields else 7)
    if yields:
        dispatcher.leave(1.0, 0, 5)
        assert filled(dispatcher, 1.0) == [1]
        dispatcher.complete(3.0, 1, 9, last=True)
        assert dispatcher.fill(3.0, "a") == [Start(0, 7, (answer,))]


def test_only_those_that_wait_for_the_same_engine_count() -> None:
    policy = Scripted({0: Dispatch("a", (0.0,), check_after_tokens=5), 1: Dispatch("b", (1.0,))}, [Progress((9.0,))])
    dispatcher = Dispatcher(policy, [engine("a", slots=1), engine("b", slots=1)])
    submit(dispatcher, 0, 1)
    dispatcher.fill(0.0, "a")
    assert dispatcher.progress(1.0, 0, 5) == 0


def test_a_check_goes_on_where_it_was_when_the_slot_was_lost() -> None:
    policy = Preemptive({0: Dispatch("a", (5.0,), check_after_tokens=8), 1: Dispatch("a", (1.0,))}, [Progress((5.0,))])
    dispatcher = one_slot(policy)
    submit(dispatcher, 0)
    dispatcher.fill(0.0, "a")
    submit(dispatcher, 1, now=1.0)
    assert dispatcher.take_back(1.0, "a") == 0
    dispatcher.leave(1.0, 0, 3)
    assert filled(dispatcher, 1.0) == [1]
    dispatcher.complete(4.0, 1, 2, last=True)
    assert dispatcher.fill(4.0, "a") == [Start(0, 5, (5.0,))]
    assert dispatcher.progress(6.0, 0, 8) == 0
    # time in a slot only, and over both of its slots
    assert ("progress", 6.0, 0, 8, 3.0) in policy.log
    outcome = dispatcher.complete(7.0, 0, 9, last=True)
    assert (outcome.service_s, outcome.longest_wait_s) == (4.0, 3.0)
    assert dispatcher.total_wait_s("a") == 3.0


def test_a_better_one_takes_the_worst_slot_of_a_full_engine() -> None:
    dispatcher = Dispatcher(Preemptive(orders(5.0, 7.0, 7.0, 5.0, 6.0)), [engine("a", slots=4)])
    submit(dispatcher, 0, 1, 2)
    dispatcher.fill(0.0, "a")
    submit(dispatcher, 4)
    assert dispatcher.wants_slot(0.0, "a")
    assert dispatcher.take_back(0.0, "a") is None  # a slot is free
    assert filled(dispatcher) == [4]
    submit(dispatcher, 3)
    assert dispatcher.take_back(0.0, "a") == 2  # of two equals the one submitted last
    dispatcher.leave(0.0, 2, 1)
    assert filled(dispatcher) == [3]
    assert not dispatcher.wants_slot(0.0, "a")  # 7 waits, 7 is inside
    assert dispatcher.take_back(0.0, "a") is None


def test_a_promoted_request_takes_a_slot_and_keeps_it() -> None:
    dispatcher = one_slot(Preemptive(orders(1.0, 9.0, -5.0, max_wait_s=2.0)))
    submit(dispatcher, 0)
    dispatcher.fill(0.0, "a")
    submit(dispatcher, 1)
    assert dispatcher.next_deadline(1) == 2.0
    assert dispatcher.take_back(1.9, "a") is None
    assert dispatcher.take_back(2.0, "a") == 0
    dispatcher.leave(2.0, 0, 7)
    assert filled(dispatcher, 2.0) == [1]
    submit(dispatcher, 2, now=2.5)
    assert dispatcher.take_back(5.0, "a") is None  # promoted, too, but no better
    assert dispatcher.next_deadline(0) == 4.0  # counted anew when it came back
    assert dispatcher.next_deadline(1) == inf  # inside


def test_a_policy_that_is_not_preemptive_takes_no_slot() -> None:
    dispatcher = one_slot(Scripted(orders(9.0, 1.0, max_wait_s=2.0)))
    submit(dispatcher, 0)
    dispatcher.fill(0.0, "a")
    submit(dispatcher, 1)
    assert not dispatcher.wants_slot(5.0, "a")
    assert dispatcher.take_back(5.0, "a") is None
    assert dispatcher.next_deadline(1) == inf  # nothing has to happen then


@pytest.mark.parametrize("kind", [Scripted, Preemptive])
@pytest.mark.parametrize(("reason", "last"), [("stop", True), ("failed", False), ("aborted", True)])
def test_each_request_ends_once_waiting_or_inside(kind: type[Scripted], reason: str, last: bool) -> None:
    policy = kind(orders(2.0, 1.0))
    dispatcher = one_slot(policy)
    submit(dispatcher, 0, 1)
    assert filled(dispatcher, 0.5) == [1]
    assert dispatcher.complete(2.0, 0, 0, reason, last=last).service_s == 0.0
    assert loads(dispatcher) == {"a": (1, 0)}
    assert dispatcher.complete(3.0, 1, 6, reason, last=last).service_s == 2.5
    assert loads(dispatcher) == {"a": (0, 0)}
    assert policy.log == [("complete", 2.0, 0, 0, 0.0, reason, last), ("complete", 3.0, 1, 6, 2.5, reason, last)]
    for request_id in (0, 1):
        with pytest.raises(KeyError):
            dispatcher.complete(4.0, request_id, 6, reason, last=last)
    assert filled(dispatcher, 4.0) == []
    submit(dispatcher, 0, now=4.0)  # a retry
    assert filled(dispatcher, 4.0) == [0]


def test_a_workflow_that_vanished_is_forgotten() -> None:
    policy = Scripted()
    one_slot(policy).forget(2.0, "w7")
    assert policy.log == [("forget", 2.0, "w7")]


def test_with_the_queue_in_the_engine_everything_is_handed_over_at_once() -> None:
    policy = Preemptive(orders(3.0, 1.0, 2.0, check_after_tokens=4, max_wait_s=0.5))
    dispatcher = one_slot(policy, queue_in_engine=True)
    submit(dispatcher, 0, 1, 2)
    assert dispatcher.next_deadline(0) == inf
    assert dispatcher.fill(0.0, "a") == [Start(1, 0, (1.0,)), Start(2, 0, (2.0,)), Start(0, 0, (3.0,))]
    assert loads(dispatcher) == {"a": (3, 0)}
    assert not dispatcher.wants_slot(0.0, "a")
    assert dispatcher.take_back(9.0, "a") is None
    assert dispatcher.complete(9.0, 0, 5, last=True).service_s == 9.0


def test_with_the_queue_in_the_engine_a_priority_is_one_number() -> None:
    dispatcher = one_slot(Scripted({0: Dispatch("a", (1.0, 2.0)), 1: Dispatch("a")}), queue_in_engine=True)
    with pytest.raises(
        PolicyError,
        match=r"policy Scripted orders by 2 numbers \(1\.0, 2\.0\); .* one integer: use --queue dispatcher",
    ):
        submit(dispatcher, 0)
    submit(dispatcher, 1)
    assert filled(dispatcher) == [1]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            ValueError("two\nlines"),
            r"policy Wrong: dispatch raised ValueError: two\nlines \(.*test_dispatcher\.py:\d+\)",
        ),
        (SystemExit(7), r"policy Wrong: dispatch raised SystemExit: 7 \("),
        (None, r"policy Wrong: dispatch gave None; expected a Dispatch"),
        (Dispatch("a", cast(Any, ("x",))), r"policy Wrong gave priority \('x',\); expected numbers"),
    ],
)
def test_a_policys_own_mistakes_are_named_with_their_place(answer: object, message: str) -> None:
    class Wrong(Policy):
        def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
            if isinstance(answer, BaseException):
                raise answer
            return cast(Dispatch, answer)

    dispatcher = one_slot(Wrong())
    with pytest.raises(PolicyError, match=message):
        submit(dispatcher, 0)
