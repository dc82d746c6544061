"""Workflows that are graphs: branches run side by side, join, share their beginnings, and end together."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given

from chimsim.config import EngineSpec
from chimsim.errors import ChimsimError
from chimsim.layout import Layout
from chimsim.predictors import build_predictor
from chimsim.records import RunResult
from chimsim.replay import Oversize
from chimsim.simulation import simulate
from policies import load_policy
from policies.interface import ClusterView, Dispatch, RequestView
from policies.stjf import Stjf
from tests.chimsim.worlds import TrueLengths, chains, cluster, engine, slow_profile, workflow
from traces import Run, SharedPrefix, Stage, Trace, Workflow
from traces.graph import ancestors, children, critical_path, is_chain, longest, parents

BLOCK = 16
FAN = (
    Stage("planner", 100, 20),
    Stage("coder", 200, 30, reused_tokens=112, after=(0,)),
    Stage("coder", 220, 50, reused_tokens=80, after=(0,)),
    Stage("coder", 240, 10, reused_tokens=112, after=(0,)),
    Stage("judge", 300, 5, reused_tokens=260, after=(1, 2, 3)),
)


def step_engine(**options: object) -> EngineSpec:
    """Every step takes a second."""
    return engine(slots=8, step=slow_profile(1.0), **options)  # type: ignore[arg-type]


def alone(stages: tuple[Stage, ...], spec: EngineSpec, policy: str = "fcfs") -> RunResult:
    trace = Trace("test", (workflow("w", stages, arrival_s=0.0),))
    return simulate(trace, cluster(spec), policy, predictor=TrueLengths(trace))


def test_branches_run_side_by_side_and_the_join_waits_for_the_last() -> None:
    result = alone(FAN, step_engine())
    calls = result.requests.set_index("stage")
    assert calls["ready_at"].tolist() == [0.0, 20.0, 20.0, 20.0, 70.0]
    assert calls["finished_at"].tolist() == [20.0, 50.0, 70.0, 30.0, 75.0]
    assert result.workflows.loc[0, "latency_s"] == 75.0
    assert result.workflows.loc[0, "stages"] == 5


def test_branches_hit_what_the_planner_left_and_the_judge_the_longest_branch() -> None:
    calls = alone(FAN, step_engine()).requests.set_index("stage")
    # Whole blocks of 112, 80 and 112 tokens; the judge's of the second coder's 220 + 50 - 1.
    assert calls["cached_tokens"].tolist() == [0, 112, 80, 112, 256]
    calls = alone(FAN, step_engine(prefix_caching=False)).requests.set_index("stage")
    assert calls["cached_tokens"].sum() == 0


def test_several_first_stages_follow_the_one_that_chooses_the_model() -> None:
    stages = (Stage("a", 10, 5), Stage("b", 10, 3, after=()), Stage("c", 10, 4, delay_s=2.0, after=()),
              Stage("join", 40, 1, after=(0, 1, 2)))  # fmt: skip
    trace = Trace("test", (workflow("w", stages, arrival_s=0.0),))
    spec = cluster(step_engine())
    calls = simulate(trace, spec, "fcfs", predictor=TrueLengths(trace, 0.5, 0.25)).requests.set_index("stage")
    assert calls["ready_at"].tolist() == [0.0, 0.75, 2.75, 7.75]
    assert calls["enqueued_at"].tolist() == [0.75, 1.0, 3.0, 8.0]


class Told(Stjf):
    """Notes what it is shown."""

    seen: list[tuple[int, tuple[int, ...], float]]

    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        self.seen.append((request.stage, request.after, request.prediction.remaining_tokens["A"]))
        return super().dispatch(now, request, cluster)


def test_remaining_are_all_stages_that_have_not_finished() -> None:
    trace = Trace("test", (workflow("w", FAN, arrival_s=0.0, solved=True),))
    policy = Told()
    policy.seen = []
    stages = (*FAN[:4], Stage("extra", 10, 7, after=(3,)), Stage("judge", 300, 5, reused_tokens=260, after=(1, 2, 4)))
    trace = Trace("test", (workflow("w", stages, arrival_s=0.0, solved=True),))
    simulate(trace, cluster(step_engine()), policy, predictor=build_predictor(trace, router="oracle"))
    # The third coder is done at 30 s, when the others still run; the judge is last.
    assert policy.seen == [
        (0, (), 122.0), (1, (0,), 102.0), (2, (0,), 102.0), (3, (0,), 102.0), (4, (3,), 92.0), (5, (1, 2, 4), 5.0),
    ]  # fmt: skip


@pytest.mark.parametrize("oversize", ["reject", "clip"])
def test_a_branch_that_does_not_fit_fails_the_workflow_once_the_others_are_over(oversize: Oversize) -> None:
    stages = (FAN[0], FAN[1], Stage("coder", 20_000, 50, after=(0,)), FAN[4])
    trace = Trace("test", (workflow("w", (*stages[:3], Stage("judge", 300, 5, after=(1, 2))), arrival_s=0.0),))
    spec = cluster(step_engine(kv_blocks=1000))
    result = simulate(trace, spec, "chimera", predictor=TrueLengths(trace), oversize=oversize)
    assert result.workflows["status"].astype(str).tolist() == ["rejected"]
    assert result.requests.set_index("stage")["status"].astype(str).to_dict() == {
        0: "completed", 1: "completed", 2: "rejected",
    }  # fmt: skip
    with pytest.raises(ChimsimError, match="do not fit"):
        simulate(trace, spec, "chimera", predictor=TrueLengths(trace))


class Hopping(Stjf):
    """A model for every stage: even ones on A, odd ones on B."""

    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        return Dispatch("AB"[request.stage % 2])


def test_a_workflow_may_change_to_another_models_graph() -> None:
    runs = {"A": Run(FAN, True), "B": Run((Stage("one", 50, 4), Stage("two", 90, 40, reused_tokens=54)), False)}
    trace = Trace("test", (Workflow("w", "test", runs, 0.0),))
    spec = cluster(step_engine(), engine("B", "B", slots=8, step=slow_profile(1.0, "B")))
    result = simulate(trace, spec, Hopping(), predictor=TrueLengths(trace))
    flow = result.workflows.iloc[0]
    assert (flow["mixed_models"], str(flow["status"])) == (True, "completed")
    assert result.requests["stage"].is_unique


def names(stages: tuple[Stage, ...], index: int, tokens: int) -> list[object]:
    """The content of each whole block, named after the stage that wrote it first, the slow and plain way."""
    found: list[object] = []
    for block in range(tokens // BLOCK):
        origin, end = index, (block + 1) * BLOCK
        while True:
            stage = stages[origin]
            if stage.shared_prefix is not None and end <= stage.shared_prefix.tokens // BLOCK * BLOCK:
                found.append((stage.shared_prefix.id, block))
                break
            parent = longest(stages, parents(stages, origin))
            if parent is None or stage.reused_tokens < end:
                found.append((origin, block))
                break
            whole = stages[parent].prompt_tokens + stages[parent].output_tokens - 1
            if end > whole // BLOCK * BLOCK:
                found.append((origin, block))
                break
            origin = parent
    return found


@given(chains(graph=True))
def test_two_stages_share_exactly_the_blocks_with_the_same_content(stages: tuple[Stage, ...]) -> None:
    if is_chain(stages) or any(stage.hash_ids for stage in stages):
        return
    layout, spec = Layout(7, Run(stages)), engine()
    made = []
    for index, stage in enumerate(stages):
        held = layout.footprint(spec, index, stage)
        blocks = [(key, at) for key, count in held.shared for at in range(count)]
        expected = names(stages, index, stage.prompt_tokens + stage.output_tokens - 1)
        assert len(blocks) == len(expected)
        made.append(list(zip(blocks, expected, strict=True)))
    for one in made:
        for other in made:
            for (a, a_name), (b, b_name) in zip(one, other, strict=False):
                assert (a == b) is (a_name == b_name)


@given(chains(graph=True))
def test_the_graphs_own_arithmetic(stages: tuple[Stage, ...]) -> None:
    waits = [set(parents(stages, index)) for index in range(len(stages))]
    assert [[i for i in range(len(stages)) if index in waits[i]] for index in range(len(stages))] == children(stages)
    for index, known in enumerate(ancestors(stages)):
        assert known == waits[index].union(*(ancestors(stages)[parent] for parent in waits[index]))
    path = critical_path(stages)
    assert all(a in waits[b] for a, b in pairwise(path))
    assert not waits[path[0]]


def test_policies_forget_a_graph_when_its_last_branch_ends() -> None:
    trace = Trace("test", (workflow("w", (*FAN[:4], Stage("late", 50, 90, after=(0,))), arrival_s=0.0),))
    for name in ("plas", "atlas", "chimera"):
        policy = load_policy(name)
        simulate(trace, cluster(step_engine()), policy, predictor=TrueLengths(trace))
        assert not any(value for key, value in vars(policy).items() if key in ("_attained_s", "_assigned"))


def test_prefixes_of_all_workflows_are_shared_by_branches_too() -> None:
    prefix = SharedPrefix("system", 48)
    stages = (Stage("a", 64, 4, shared_prefix=prefix), Stage("b", 64, 4, shared_prefix=prefix, after=(0,)),
              Stage("c", 64, 4, shared_prefix=prefix, after=(0,)))  # fmt: skip
    trace = Trace("test", tuple(workflow(f"w{i}", stages, arrival_s=200.0 * i) for i in range(2)))
    calls = simulate(trace, cluster(step_engine()), "fcfs", predictor=TrueLengths(trace)).requests
    assert calls["cached_tokens"].tolist() == [0, 48, 48, 48, 48, 48]


class ByTurns(Stjf):
    """The first branch of a graph goes to B, which has fewer stages."""

    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        return Dispatch("B" if request.stage == 1 else "A")


def test_a_branch_may_be_on_its_way_when_another_changes_the_graph() -> None:
    runs = {"A": Run(FAN, True), "B": Run((Stage("one", 50, 4), Stage("two", 90, 40, after=())), False)}
    trace = Trace("test", (Workflow("w", "test", runs, 0.0),))
    spec = cluster(step_engine(), engine("B", "B", slots=8, step=slow_profile(1.0, "B")))
    result = simulate(trace, spec, ByTurns(), predictor=TrueLengths(trace))
    assert str(result.workflows.loc[0, "status"]) == "completed"
    assert result.requests["stage"].is_unique
