"""Placements: who gets the call, who keeps it, and what happens when an engine is ill."""

from __future__ import annotations

from collections import Counter

import pytest

from policies import PolicyError, load_policy
from policies.interface import ClusterView, Policy
from tests.policies.views import engine, finish, request

TRIO = (engine("a/0", "a"), engine("a/1", "a"), engine("b"))


def fcfs(placement: str, seed: int = 0) -> Policy:
    return load_policy("fcfs", placement=placement, seed=seed)


def go(policy: Policy, workflow: str, cluster: ClusterView, number: int = 0) -> str:
    return policy.dispatch(0.0, request(number, workflow), cluster).engine


def test_round_robin_goes_over_engines_in_order_of_their_names_and_then_sticks() -> None:
    policy = fcfs("round-robin")
    assert [go(policy, w, TRIO) for w in "stuv"] == ["a/0", "a/1", "b", "a/0"]
    assert [go(policy, w, TRIO) for w in "vuts"] == ["a/0", "b", "a/1", "a/0"]
    assert go(policy, "x", TRIO) == "a/1"


def test_round_robin_per_call_moves_on_with_every_call() -> None:
    policy = fcfs("round-robin-call")
    assert [go(policy, "w", TRIO) for _ in range(4)] == ["a/0", "a/1", "b", "a/0"]


def test_least_loaded_counts_running_and_waiting_and_breaks_ties_by_name() -> None:
    policy = fcfs("least-loaded")
    busy = (engine("a/0", "a", running=2, waiting=2), engine("a/1", "a", running=3), engine("b", waiting=3))
    assert go(policy, "w", busy) == "a/1"
    freed = (engine("a/0", "a"), engine("a/1", "a", running=9), engine("b"))
    assert go(policy, "w", freed) == "a/1"
    assert go(policy, "v", freed) == "a/0"
    assert go(fcfs("least-loaded-call"), "w", freed) == "a/0"


def test_random_is_fair_seeded_and_sticky_unless_per_call() -> None:
    names = [go(fcfs("random", seed=1), f"w{i}", TRIO) for i in range(3)]
    policies = [fcfs("random", seed=seed) for seed in (1, 1, 2)]
    same, again, other = ([go(p, f"w{i}", TRIO) for i in range(300)] for p in policies)
    assert same == again != other
    assert same[0] == names[0]
    assert min(Counter(same).values()) > 70
    assert [go(policies[0], f"w{i}", TRIO) for i in range(300)] == same
    per_call = fcfs("random-call", seed=1)
    assert len({go(per_call, "w", TRIO) for _ in range(30)}) == 3


def test_split_sends_a_share_of_the_workflows_to_the_slowest_model_and_the_rest_to_the_least_loaded() -> None:
    cluster = (engine("a/0", "a", running=3), engine("a/1", "a"), engine("b", step_s=0.01), engine("c", step_s=0.005))
    assert {go(fcfs("split:1"), f"w{i}", cluster) for i in range(9)} == {"a/1"}
    assert {go(fcfs("split:0"), f"w{i}", cluster) for i in range(9)} == {"b"}
    some, again, other = (fcfs("split:0.3", seed=seed) for seed in (1, 1, 2))
    drawn = [go(some, f"w{i}", cluster) for i in range(1000)]
    assert 250 < drawn.count("a/1") < 350
    assert drawn == [go(again, f"w{i}", cluster) for i in range(1000)]
    assert drawn != [go(other, f"w{i}", cluster) for i in range(1000)]
    assert drawn == [go(some, f"w{i}", cluster) for i in range(1000)]


def test_split_with_one_model_takes_it() -> None:
    assert {go(fcfs("split:0.5"), f"w{i}", TRIO[:2]) for i in range(9)} == {"a/0"}


@pytest.mark.parametrize("share", ["", "x", "nan", "-0.1", "1.1"])
def test_split_needs_a_share(share: str) -> None:
    with pytest.raises(PolicyError, match=rf"fcfs: placement 'split:{share}' needs a share .* such as split:0.3"):
        fcfs(f"split:{share}")


def test_single_takes_a_model_or_an_engine_by_name() -> None:
    assert {go(fcfs("single:b"), f"w{i}", TRIO) for i in range(4)} == {"b"}
    assert {go(fcfs("single:a/1"), f"w{i}", TRIO) for i in range(4)} == {"a/1"}
    policy = fcfs("single:a")
    assert [go(policy, w, TRIO) for w in ("u", "v", "w", "u")] == ["a/0", "a/1", "a/0", "a/0"]


def test_single_names_its_neighbours_when_it_is_not_in_the_cluster() -> None:
    with pytest.raises(PolicyError, match=r"single:Qwen2.5-7b.*did you mean 'Qwen2.5-7B'"):
        go(fcfs("single:Qwen2.5-7b"), "w", (engine("Qwen2.5-7B"),))


def test_a_sticky_workflow_leaves_an_ill_engine_for_another_of_its_model() -> None:
    policy = fcfs("round-robin")
    assert go(policy, "w", TRIO) == "a/0"
    ill = (engine("a/0", "a", healthy=False), engine("a/1", "a", running=9), engine("b"))
    assert go(policy, "w", ill) == "a/1"
    assert go(policy, "w", TRIO) == "a/1"


def test_a_sticky_workflow_is_placed_anew_when_its_whole_model_is_ill() -> None:
    policy = fcfs("round-robin")
    assert go(policy, "w", TRIO) == "a/0"
    assert go(policy, "w", (engine("a/0", "a", healthy=False), engine("b"))) == "b"


@pytest.mark.parametrize("end", ["last", "forget"])
def test_a_workflow_that_has_ended_is_placed_anew(end: str) -> None:
    policy = fcfs("round-robin")
    assert go(policy, "w", TRIO) == "a/0"
    if end == "last":
        finish(policy, request(0, "w"), last=False)
        assert go(policy, "w", TRIO) == "a/0"
        finish(policy, request(0, "w"))
    else:
        policy.on_forget(1.0, "w")
    assert go(policy, "w", TRIO) == "a/1"


@pytest.mark.parametrize("placement", ["round-robin", "least-loaded", "random", "single:a"])
def test_a_cluster_without_a_usable_engine_is_an_error(placement: str) -> None:
    with pytest.raises(PolicyError, match="fcfs: the cluster has no engines"):
        go(fcfs(placement), "w", ())
    with pytest.raises(PolicyError, match=r"fcfs: no engine of the cluster is healthy \(a\)"):
        go(fcfs(placement), "w", (engine("a", healthy=False),))


def test_an_unknown_placement_is_refused_with_its_neighbour() -> None:
    with pytest.raises(PolicyError, match=r"policy fcfs: placement 'round-robn' .*did you mean 'round-robin'"):
        fcfs("round-robn")
    with pytest.raises(PolicyError, match="'single:' is unknown"):
        fcfs("single:")
