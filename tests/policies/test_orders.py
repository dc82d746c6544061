"""The orders of the baselines: what key a call gets, and how it changes as the call is served."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import PolicyError, load_policy
from policies.atlas import Atlas
from policies.mlfq import Mlfq
from policies.plas import Plas
from tests.policies.views import engine, finish, request

CARD = (engine("7B", slots=256, step_s=0.0531),)


def test_fcfs_gives_every_call_the_same_standing() -> None:
    policy = load_policy("fcfs")
    assert {policy.dispatch(float(i), request(i), CARD).priority for i in range(3)} == {()}


def test_sjf_goes_by_this_call_and_stjf_by_all_that_is_left() -> None:
    call = request(0, own={"7B": 80.0}, left={"7B": 900.0})
    assert load_policy("sjf").dispatch(3.0, call, CARD).priority == (80.0,)
    assert load_policy("stjf").dispatch(3.0, call, CARD).priority == (900.0,)


@pytest.mark.parametrize(("name", "field"), [("sjf", "stage_tokens"), ("stjf", "remaining_tokens")])
def test_the_length_is_that_of_the_chosen_engines_model(name: str, field: str) -> None:
    pair = (engine("big/0", "big"), engine("small/0", "small"))
    numbers = {"small": 3.0, "big": 7.0}
    call = request(0, own=numbers, left=numbers)
    assert load_policy(name, placement="single:small").dispatch(0.0, call, pair).priority == (3.0,)
    with pytest.raises(PolicyError, match=f"policy {name} needs the prediction '{field}' for model 'small'"):
        load_policy(name, placement="single:small").dispatch(0.0, request(0), pair)


@given(st.floats(0, 50), st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 500), st.floats(0, 500))
def test_aging_is_a_static_key(rate: float, a: float, b: float, a_at: float, b_at: float) -> None:
    policy = load_policy("stjf", aging_tokens_per_s=rate)
    (key_a,) = policy.dispatch(a_at, request(0, left={"7B": a}), CARD).priority
    (key_b,) = policy.dispatch(b_at, request(1, left={"7B": b}), CARD).priority
    aged_a, aged_b = a - rate * (1000 - a_at), b - rate * (1000 - b_at)
    if abs(aged_a - aged_b) > 1e-6:
        assert (key_a < key_b) == (aged_a < aged_b)


def test_mlfq_quanta_are_whole_tokens_of_at_least_one() -> None:
    policy = Mlfq()
    assert [policy.quantum_tokens(level, 0.0531) for level in range(6)] == [1, 1, 1, 2, 4, 7]
    assert [policy.quantum_tokens(level, 0.004) for level in range(3)] == [3, 5, 10]


def test_mlfq_moves_a_call_down_a_level_for_every_quantum_used_up() -> None:
    policy = Mlfq(levels=3)
    call = request(5)
    start = policy.dispatch(0.0, call, (engine("m", step_s=0.004),))
    assert (start.priority, start.check_after_tokens) == ((0.0, 0.0), 3)
    steps = [policy.on_progress(now, call, 9, 1.0) for now in (1.0, 2.0, 3.0)]
    assert [(step.priority, step.check_after_tokens) for step in steps] == [
        ((1.0, 1.0), 5),
        ((2.0, 2.0), 0),
        ((2.0, 3.0), 0),
    ]


def test_mlfq_serves_a_level_in_the_order_in_which_calls_entered_it() -> None:
    policy = Mlfq()
    sunk, fresh = request(1), request(2)
    for call in (sunk, fresh):
        policy.dispatch(0.0, call, CARD)
    later = policy.on_progress(2.0, sunk, 1, 1.0)
    earlier = policy.on_progress(1.0, fresh, 1, 1.0)
    assert earlier.priority < later.priority, "both on level 1, the second request got there first"


def test_mlfq_gives_each_call_of_a_workflow_a_fresh_start() -> None:
    policy = Mlfq()
    first, second = request(1, "w"), request(2, "w", stage=1)
    policy.dispatch(0.0, first, CARD)
    policy.on_progress(1.0, first, 1, 1.0)
    finish(policy, first, last=False)
    assert policy.dispatch(2.0, second, CARD).priority == (0.0, 2.0)


def test_mlfq_promotes_whoever_has_waited_three_seconds() -> None:
    decision = Mlfq().dispatch(0.0, request(0), (engine("m", step_s=0.05),))
    assert (decision.max_wait_s, decision.promoted_tokens) == (3.0, 60)
    assert Mlfq(starvation_s=inf).dispatch(0.0, request(0), CARD).max_wait_s == inf


@pytest.mark.parametrize(("prompt_tokens", "level"), [(0, 0), (10, 0), (11, 1), (20, 1), (41, 3), (10_000, 3)])
def test_mlfq_skip_join_starts_where_the_quantum_covers_the_prefill(prompt_tokens: int, level: int) -> None:
    policy = Mlfq(skip_join=True, prefill_tokens_per_s=1000.0, levels=4)
    assert policy.dispatch(0.0, request(0, prompt_tokens=prompt_tokens), CARD).priority == (level, 0.0)
    assert Mlfq().dispatch(0.0, request(0, prompt_tokens=prompt_tokens), CARD).priority == (0.0, 0.0)


def test_mlfq_forgets_the_calls_of_a_workflow_that_vanished() -> None:
    policy = Mlfq()
    gone, stays = request(1, "gone"), request(2, "stays")
    for call in (gone, stays):
        policy.dispatch(0.0, call, CARD)
    policy.on_forget(1.0, "gone")
    assert policy.on_progress(2.0, stays, 1, 1.0).priority == (1.0, 2.0)
    assert policy.on_progress(2.0, gone, 1, 1.0).priority == (15.0, 2.0)


def test_ltr_goes_by_rank_and_turns_steps_into_time() -> None:
    decision = load_policy("ltr").dispatch(0.0, request(0, rank={"7B": -1.5}), CARD)
    assert decision.priority == (-1.5,)
    assert decision.max_wait_s == pytest.approx(200 * 0.0531)
    assert decision.promoted_tokens == 10
    never = load_policy("ltr", starvation_steps=0).dispatch(0.0, request(0, rank={"7B": 1.0}), CARD)
    assert never.max_wait_s == inf


@pytest.mark.parametrize(
    ("name", "preemptive"), [("mlfq", True), ("ltr", True), ("stjf", False), ("plas", False), ("atlas", False)]
)
def test_only_the_iteration_level_policies_are_preemptive(name: str, preemptive: bool) -> None:
    assert load_policy(name).preemptive is preemptive


def test_plas_goes_by_the_service_of_the_workflows_earlier_calls() -> None:
    policy = Plas()

    def key(number: int, workflow: str) -> float:
        (attained_s,) = policy.dispatch(0.0, request(number, workflow), CARD).priority
        return attained_s

    assert key(0, "w") == 0
    finish(policy, request(0, "w"), last=False, service_s=2.5)
    assert key(1, "w") == 2.5
    finish(policy, request(1, "w"), last=False, service_s=1.0)
    assert (key(2, "w"), key(3, "other")) == (3.5, 0)
    finish(policy, request(2, "w"), last=True)
    assert key(4, "w") == 0


def test_plas_forgets_a_workflow_that_vanished() -> None:
    policy = Plas()
    policy.dispatch(0.0, request(0, "w"), CARD)
    finish(policy, request(0, "w"), last=False)
    policy.on_forget(1.0, "w")
    assert policy.dispatch(0.0, request(1, "w"), CARD).priority == (0.0,)


def test_atlas_goes_by_the_longest_path_and_plas_by_the_sum() -> None:
    atlas, plas = Atlas(), Plas()
    calls = [
        (request(0, "w"), 2.0),
        (request(1, "w", stage=1, after=(0,)), 1.0),
        (request(2, "w", stage=2, after=(0,)), 4.0),
    ]
    for policy in (atlas, plas):
        for call, service_s in calls:
            policy.dispatch(0.0, call, CARD)
            finish(policy, call, last=False, service_s=service_s)
    judge = request(3, "w", stage=3, after=(1, 2))
    assert atlas.dispatch(9.0, judge, CARD).priority == (6.0,)
    assert plas.dispatch(9.0, judge, CARD).priority == (7.0,)
    assert atlas.dispatch(9.0, request(4, "w", stage=4, after=(1,)), CARD).priority == (3.0,)


def test_atlas_counts_failed_tries_and_forgets() -> None:
    policy = Atlas()
    call = request(0, "w")
    policy.dispatch(0.0, call, CARD)
    policy.on_complete(1.0, call, 3, 1.5, "failed", last=False)
    assert policy.dispatch(2.0, request(1, "w"), CARD).priority == (1.5,)
    policy.on_forget(3.0, "w")
    assert policy.dispatch(4.0, request(2, "w"), CARD).priority == (0.0,)
