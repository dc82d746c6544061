"""Costaware: what a workflow costs, what its solution is worth, and the limits between which the price moves it."""

from __future__ import annotations

from itertools import count
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import PolicyError
from policies.costaware import Costaware
from policies.interface import ClusterView
from tests.policies.views import engine, finish, request

SMALL = engine("small", slots=64, step_s=0.01)
LARGE = engine("large", slots=64, step_s=0.04)
PAIR = (LARGE, SMALL)
_ids = count()


def route(policy: Costaware, cluster: ClusterView, left: float, **q: float) -> str:
    """The engine of a fresh workflow of ``left`` tokens on every model."""
    return policy.dispatch(0.0, request(next(_ids), q=q, left={e.model: left for e in cluster}), cluster).engine


def test_the_cost_is_the_own_service_and_a_slots_share_of_it_for_each_call_in_flight() -> None:
    call = request(0, left={"m": 200.0})
    idle = engine("m", slots=50, step_s=0.04)
    assert Costaware().cost_s(call, idle) == pytest.approx(200 * 0.04)
    busy = engine("m", slots=50, step_s=0.04, running=50, waiting=25)
    assert Costaware().cost_s(call, busy) == pytest.approx(8 + 75 * 200 * (0.04 / 50))


@pytest.mark.parametrize(("worth_s", "chosen"), [(11.9, "small"), (12.1, "large")])
def test_the_price_is_seconds_for_a_whole_solved_workflow(worth_s: float, chosen: str) -> None:
    # 100 tokens cost 4 s instead of 1 s, for a quarter of a solved workflow more.
    assert route(Costaware(worth_s=worth_s), PAIR, 100, small=0.5, large=0.75) == chosen


def test_at_no_price_the_cheapest_serves_whatever_it_solves() -> None:
    assert route(Costaware(worth_s=0), PAIR, 100, small=0.0, large=1.0) == "small"
    full = (LARGE, engine("small", slots=64, step_s=0.01, running=64, waiting=200))
    assert route(Costaware(worth_s=0), full, 100, small=1.0, large=0.0) == "large"


def test_at_any_price_the_most_confident_serves_whatever_it_costs() -> None:
    crowd = (engine("large", slots=64, step_s=0.04, running=64, waiting=10**6), SMALL)
    assert route(Costaware(worth_s=inf), crowd, 1e6, small=0.5, large=0.500001) == "large"
    assert route(Costaware(worth_s=inf), crowd, 100, small=0.5, large=0.5) == "small"
    assert route(Costaware(worth_s=inf), crowd, 100, small=0.0, large=0.0) == "small"


def test_of_workflows_with_the_same_gain_the_shorter_ones_go_to_the_larger_model() -> None:
    policy = Costaware(worth_s=60)
    chosen = [route(policy, PAIR, left, small=0.5, large=0.75) for left in (50, 200, 499, 501, 2000)]
    assert chosen == ["large", "large", "large", "small", "small"]


@given(st.integers(0, 200), st.integers(0, 200), st.floats(0, 5000), st.floats(0, 1), st.floats(0, 1))
def test_more_work_on_a_model_only_sheds_its_traffic(
    less: int, more: int, left: float, small: float, large: float
) -> None:
    def chosen(in_flight: int) -> str:
        cluster = (engine("large", step_s=0.04, running=min(in_flight, 64), waiting=max(in_flight - 64, 0)), SMALL)
        return route(Costaware(), cluster, left, small=small, large=large)

    if chosen(min(less, more)) == "small":
        assert chosen(max(less, more)) == "small"


@given(st.floats(0, 500), st.floats(0, 500), st.floats(1, 5000), st.floats(0, 0.4), st.floats(0, 0.6))
def test_a_higher_price_never_leaves_the_more_confident_model(
    low: float, high: float, left: float, small: float, gain: float
) -> None:
    q = {"small": small, "large": small + gain}
    if route(Costaware(worth_s=min(low, high)), PAIR, left, **q) == "large":
        assert route(Costaware(worth_s=max(low, high)), PAIR, left, **q) == "large"


def test_a_homogeneous_cluster_is_least_loaded_and_shortest_total_job_first() -> None:
    policy = Costaware(aging_tokens_per_s=0.0)
    flying = dict.fromkeys(("m/0", "m/1", "m/2"), 0)
    for i, left in enumerate([500, 200, 900, 100, 300, 50, 800]):
        twins = tuple(engine(name, "m", running=number) for name, number in flying.items())
        decision = policy.dispatch(float(i), request(i, q={"m": 0.5}, left={"m": left}), twins)
        assert flying[decision.engine] == min(flying.values())
        assert decision.priority == (left,)
        flying[decision.engine] += 1


def test_equally_loaded_engines_go_by_the_tokens_in_flight_and_then_by_name() -> None:
    policy = Costaware()
    twins = (engine("m/0", "m"), engine("m/1", "m"))
    assert [route(policy, twins, left, m=0.5) for left in (300, 100, 100, 500)] == ["m/0", "m/1", "m/1", "m/1"]


def test_a_workflow_keeps_its_engine_until_it_ends() -> None:
    policy = Costaware(worth_s=60)
    first = request(1, "w", q={"small": 0.0, "large": 1.0}, left={"small": 9.0, "large": 9.0})
    assert policy.dispatch(0.0, first, PAIR).engine == "large"
    finish(policy, first, last=False)
    later = request(2, "w", stage=1, left={"large": 1e6})
    assert policy.dispatch(1.0, later, PAIR).engine == "large"
    finish(policy, later)
    assert policy.latency_ms((LARGE,)) == 0
    assert route(policy, PAIR, 1e6, small=0.0, large=1.0) == "small"


def test_the_reason_says_confidence_and_cost_of_each_model() -> None:
    call = request(1, "w", q={"small": 0.25, "large": 0.75}, left={"small": 100.0, "large": 200.0})
    decision = Costaware(explain=True).dispatch(0.0, call, PAIR)
    assert decision.reason == "large: large q=0.750 cost=8.0s, small q=0.250 cost=1.0s; y=200"


def test_a_price_below_nothing_is_refused() -> None:
    with pytest.raises(PolicyError, match="costaware: worth_s is -1"):
        Costaware(worth_s=-1)
