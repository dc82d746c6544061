"""Chimera: the boundary checks of its router rule, its ties, its memory and its aging."""

from __future__ import annotations

from itertools import count
from math import inf

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from policies import PolicyError
from policies.chimera import Chimera
from policies.interface import ClusterView
from tests.policies.views import engine, finish, request

FAST = engine("fast", slots=64, step_s=0.01)
SLOW = engine("slow", slots=64, step_s=0.04)
PAIR = (FAST, SLOW)
_ids = count()


def route(policy: Chimera, cluster: ClusterView, *, left: float = 100.0, **q: float) -> str:
    """Sends a fresh workflow of ``left`` tokens with these confidences through the policy."""
    lengths = {e.model: left for e in cluster}
    return policy.dispatch(0.0, request(next(_ids), q=q, left=lengths), cluster).engine


def load(policy: Chimera, cluster: ClusterView, name: str, tokens: float) -> None:
    """Puts a workflow of that many predicted tokens on one engine."""
    only = tuple(e for e in cluster if e.name == name)
    assert route(policy, only, left=tokens, **{e.model: 1.0 for e in only}) == name


def test_the_latency_of_a_model_is_tokens_times_ms_per_token_over_the_batch() -> None:
    policy = Chimera()
    card = engine("7B", slots=256, step_s=0.0531)
    load(policy, (card,), "7B", 10_000)
    assert policy.latency_ms((card,)) == pytest.approx(10_000 * 53.1 / 256)


def test_an_idle_model_has_no_latency() -> None:
    assert Chimera().latency_ms((FAST,)) == 0


def test_several_engines_of_a_model_sum_their_tokens_and_their_batches() -> None:
    policy = Chimera()
    twins = (engine("m/0", "m", slots=30, step_s=0.02), engine("m/1", "m", slots=10, step_s=0.02))
    load(policy, twins, "m/0", 500)
    load(policy, twins, "m/1", 300)
    assert policy.latency_ms(twins) == pytest.approx(800 * 20 / 40)


def test_within_a_model_the_engine_with_the_least_work_of_its_own_is_taken() -> None:
    policy = Chimera()
    twins = (engine("m/0", "m", slots=10), engine("m/1", "m", slots=40))
    load(policy, twins, "m/0", 200)
    load(policy, twins, "m/1", 600)
    assert route(policy, twins, left=300, m=0.5) == "m/1"
    assert route(policy, twins, m=0.5) == "m/0"


def test_the_fastest_keeps_a_call_for_which_nobody_is_more_confident() -> None:
    assert route(Chimera(tau=inf), PAIR, fast=0.8, slow=0.8) == "fast"


@pytest.mark.parametrize(("gain", "chosen"), [(0.04, "fast"), (0.0625, "slow"), (0.2, "slow")])
def test_the_margin_must_be_cleared(gain: float, chosen: str) -> None:
    assert route(Chimera(tau=inf, delta_s=0.0625), PAIR, fast=0.5, slow=0.5 + gain) == chosen


@pytest.mark.parametrize(("slow_tokens", "chosen"), [(100, "slow"), (500, "slow"), (501, "fast"), (9000, "fast")])
def test_the_slack_bounds_how_much_slower_the_better_model_may_be(slow_tokens: int, chosen: str) -> None:
    policy = Chimera(tau=1.0)
    load(policy, PAIR, "fast", 1000)
    load(policy, PAIR, "slow", slow_tokens)
    assert route(policy, PAIR, fast=0.1, slow=0.9) == chosen


def test_admitted_work_raises_the_latency_until_the_model_sheds_traffic() -> None:
    policy = Chimera(tau=1.0)
    load(policy, PAIR, "fast", 4000)
    before = -1.0
    chosen = []
    for _ in range(60):
        assert policy.latency_ms((SLOW,)) >= before
        before = policy.latency_ms((SLOW,))
        chosen.append(route(policy, PAIR, fast=0.1, slow=0.9))
    assert chosen[:20] == ["slow"] * 20
    assert "fast" in chosen


def test_no_slack_admits_only_ties_with_the_fastest() -> None:
    policy = Chimera(tau=0.0)
    load(policy, PAIR, "fast", 400)
    load(policy, PAIR, "slow", 100)
    assert policy.latency_ms((FAST,)) == policy.latency_ms((SLOW,))
    assert route(policy, PAIR, left=1, fast=0.1, slow=0.9) == "slow"
    assert route(policy, PAIR, fast=0.1, slow=0.9) == "fast"


def test_infinite_slack_is_pure_confidence_whatever_the_load() -> None:
    policy = Chimera(tau=inf)
    load(policy, PAIR, "slow", 1e9)
    assert route(policy, PAIR, fast=0.1, slow=0.9) == "slow"


def test_an_infinite_margin_never_leaves_the_fastest() -> None:
    assert route(Chimera(tau=inf, delta_s=inf), PAIR, fast=0.0, slow=1.0) == "fast"


def test_an_idle_fastest_model_admits_other_idle_ones_and_no_loaded_one() -> None:
    assert route(Chimera(tau=0.0), PAIR, fast=0.1, slow=0.9) == "slow"
    policy = Chimera(tau=1e9)
    load(policy, PAIR, "slow", 1)
    assert route(policy, PAIR, fast=0.1, slow=0.9) == "fast"


def test_infinite_slack_over_an_idle_fastest_model_is_not_undefined() -> None:
    policy = Chimera(tau=inf)
    load(policy, PAIR, "slow", 1)
    assert route(policy, PAIR, fast=0.1, slow=0.9) == "slow"


def test_ties_of_latency_go_by_decode_time_and_then_by_name() -> None:
    quick_z, slow_a = engine("z", step_s=0.01), engine("a", step_s=0.02)
    assert route(Chimera(), (slow_a, quick_z), a=0.5, z=0.5) == "z"
    assert route(Chimera(), (engine("a"), engine("b")), a=0.5, b=0.5) == "a"


def test_ties_of_confidence_go_by_latency_and_then_by_name() -> None:
    trio = (engine("a", step_s=0.04), engine("b", step_s=0.04), engine("fast", step_s=0.01))
    policy = Chimera(tau=inf)
    load(policy, trio, "a", 10)
    assert route(policy, trio, a=0.9, b=0.9, fast=0.1) == "b"
    assert route(Chimera(tau=inf), trio, a=0.9, b=0.9, fast=0.1) == "a"


def test_of_three_models_the_most_confident_within_the_slack_is_measured_against_the_fastest() -> None:
    trio = (engine("fast", step_s=0.01), engine("mid", step_s=0.02), engine("top", step_s=0.04))
    policy = Chimera(tau=1.0, delta_s=0.1)
    for name, tokens in (("fast", 1000), ("mid", 600), ("top", 9000)):
        load(policy, trio, name, tokens)
    assert route(policy, trio, left=0, fast=0.5, mid=0.6, top=0.99) == "mid"
    # Each is within the margin of the one before it, but the best clears it over the fastest.
    assert route(Chimera(tau=inf, delta_s=0.1), trio, fast=0.5, mid=0.56, top=0.62) == "top"


def test_a_workflow_keeps_its_engine_without_being_routed_again() -> None:
    policy = Chimera(tau=inf)
    first = request(1, "w", q={"fast": 0.1, "slow": 0.9}, left={"slow": 700, "fast": 0})
    assert policy.dispatch(0.0, first, PAIR).engine == "slow"
    finish(policy, first, last=False)
    later = request(2, "w", stage=1, left={"slow": 300})
    assert policy.dispatch(5.0, later, PAIR).engine == "slow"
    assert policy.latency_ms((SLOW,)) == pytest.approx(300 * 40 / 64)
    finish(policy, later)
    assert policy.latency_ms((SLOW,)) == 0
    assert route(policy, PAIR, fast=0.9, slow=0.1) == "fast"


def test_an_ill_engine_hands_over_to_its_model_and_else_to_the_router() -> None:
    policy = Chimera(tau=inf)
    three = (engine("big/0", "big", step_s=0.04), engine("big/1", "big", step_s=0.04), FAST)
    lengths = {"big": 10.0, "fast": 10.0}
    call = request(1, "w", q={"fast": 0.1, "big": 0.9}, left=lengths)
    assert policy.dispatch(0.0, call, three).engine == "big/0"
    ill = (engine("big/0", "big", healthy=False), *three[1:])
    assert policy.dispatch(1.0, call, ill).engine == "big/1"
    assert policy.dispatch(2.0, call, three).engine == "big/1"
    assert policy.dispatch(3.0, call, (FAST,)).engine == "fast"
    assert policy.latency_ms((three[1],)) == 0


def test_a_homogeneous_cluster_is_least_loaded_and_shortest_total_job_first() -> None:
    policy = Chimera(aging_tokens_per_s=0.0)
    twins = tuple(engine(f"m/{i}", "m") for i in range(3))
    work = dict.fromkeys((e.name for e in twins), 0.0)
    for i, left in enumerate([500, 200, 900, 100, 300, 50, 800, 20]):
        expected = min(work, key=lambda name: (work[name], name))
        decision = policy.dispatch(float(i), request(i, q={"m": 0.5}, left={"m": left}), twins)
        assert (decision.engine, decision.priority) == (expected, (left,))
        work[expected] += left


@given(
    st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1e4)), min_size=2, max_size=12),
    st.floats(0, 100),
    st.floats(0, 1e4),
)
def test_the_static_key_orders_as_length_less_aging_times_waited(
    calls: list[tuple[float, float]], rate: float, later: float
) -> None:
    policy = Chimera(aging_tokens_per_s=rate)
    asked_at = later + max(enqueued_at for _, enqueued_at in calls)
    keyed = []
    for i, (left, enqueued_at) in enumerate(calls):
        call = request(i, q={"fast": 1.0}, left={"fast": left})
        (key,) = policy.dispatch(enqueued_at, call, (FAST,)).priority
        keyed.append((left - rate * (asked_at - enqueued_at), key))
    for aged_a, key_a in keyed:
        for aged_b, key_b in keyed:
            if aged_a < aged_b - 1e-6:
                assert key_a < key_b


@given(st.data())
def test_the_choice_is_the_rule_read_out_loud(data: st.DataObject) -> None:
    names = ["a", "b", "c"]
    cluster = tuple(
        engine(n, step_s=data.draw(st.sampled_from([0.01, 0.02, 0.04])), slots=data.draw(st.integers(1, 4)))
        for n in names
    )
    tau, delta_s = (
        data.draw(st.sampled_from([0.0, 0.5, 2.0, inf])),
        data.draw(st.sampled_from([0.0, 0.1, inf])),
    )
    policy = Chimera(tau=tau, delta_s=delta_s)
    for n in names:
        load(policy, cluster, n, data.draw(st.sampled_from([0, 100, 200])))
    q = {n: data.draw(st.sampled_from([0.2, 0.25, 0.6, 0.9])) for n in names}
    latency = {e.name: policy.latency_ms((e,)) for e in cluster}
    fastest = min(latency.values())
    assume(sum(value == fastest for value in latency.values()) == 1)
    fast = min(latency, key=lambda n: latency[n])
    allowed = [n for n in names if tau == inf or latency[n] <= (1 + tau) * fastest]
    best = max(q[n] for n in allowed)
    chosen = route(policy, cluster, **q)
    if best >= q[fast] + delta_s:
        assert chosen in allowed
        assert q[chosen] == best
        assert latency[chosen] == min(latency[n] for n in allowed if q[n] == best)
    else:
        assert chosen == fast


def test_what_is_missing_from_a_prediction_is_named() -> None:
    with pytest.raises(PolicyError, match=r"chimera needs the prediction 'confidence' for model 'slow'.*for fast"):
        route(Chimera(), PAIR, fast=0.5)
    call = request(1, q={"fast": 1.0, "slow": 0.0}, left={"slow": 3.0})
    with pytest.raises(PolicyError, match="'remaining_tokens' for model 'fast'"):
        Chimera().dispatch(0.0, call, PAIR)


@pytest.mark.parametrize(("q", "left"), [(1.5, 1.0), (-0.1, 1.0), (0.5, -1.0), (0.5, inf), (0.5, float("nan"))])
def test_an_impossible_prediction_is_refused(q: float, left: float) -> None:
    with pytest.raises(PolicyError, match="it must be"):
        route(Chimera(), (FAST,), left=left, fast=q)


def test_a_refused_call_leaves_no_trace() -> None:
    policy = Chimera()
    with pytest.raises(PolicyError):
        route(policy, PAIR, left=inf, fast=0.9, slow=0.1)
    assert policy.latency_ms((FAST,)) == 0


def test_the_reason_is_given_on_demand_only() -> None:
    call = request(1, "w", q={"fast": 0.25, "slow": 0.75}, left={"fast": 5.0, "slow": 8.0})
    assert Chimera(tau=inf).dispatch(0.0, call, PAIR).reason == ""
    policy = Chimera(tau=inf, explain=True)
    reason = policy.dispatch(0.0, call, PAIR).reason
    assert reason == "slow: fast q=0.250 L=0.0ms, slow q=0.750 L=0.0ms; y=8"
    assert policy.dispatch(0.0, call, PAIR).reason == "keeps slow; y=8"
