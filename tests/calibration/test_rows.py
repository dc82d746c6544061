"""Training rows and splits: what is known of a call, and that no workflow is on both sides."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.rows import (
    MIN_WORKFLOWS,
    Split,
    TrainingError,
    by_workload,
    check_models,
    folds,
    rows,
    split,
    task_text,
)
from tests.calibration.learnable import MODELS, learnable, lengthened
from traces import Run, Trace

TRACE = learnable()


def ids(part: Split, which: str) -> set[str]:
    return {workflow.workflow_id for workflow in getattr(part, which)}


def test_a_row_has_what_is_known_and_beside_it_what_is_to_be_foretold() -> None:
    workflow = next(workflow for workflow in TRACE.workflows if len(workflow.runs["small"].stages) == 3)
    stages = workflow.runs["small"].stages
    made = rows([workflow], ["small"])
    assert [row.stage_tokens for row in made] == [stage.output_tokens for stage in stages]
    assert made[0].remaining_tokens == sum(stage.output_tokens for stage in stages)
    assert made[2].remaining_tokens == stages[2].output_tokens
    known = made[1].known
    assert (known.stage, known.stage_name, known.models, known.prompt) == (1, "solve", ("small",), workflow.prompt)
    assert (known.prompt_tokens, known.system_tokens, known.user_tokens) == (stages[1].prompt_tokens, 10, 50)
    assert [(each.name, each.model, each.output_tokens) for each in known.finished] == [
        ("plan", "small", stages[0].output_tokens)
    ]


def test_what_is_known_of_a_call_does_not_depend_on_what_comes_later() -> None:
    for workflow in TRACE.workflows[:20]:
        for stage in range(len(workflow.runs["small"].stages)):
            known = rows([workflow], MODELS)
            changed = rows([lengthened(workflow, stage)], MODELS)
            before = [row.known for row in known if row.known.stage <= stage]
            assert before == [row.known for row in changed if row.known.stage <= stage]


def test_a_stages_own_prompt_goes_before_the_workflows() -> None:
    workflow = TRACE.workflows[0]
    first, *rest = workflow.runs["small"].stages
    own = replace(workflow, runs={"small": Run((replace(first, prompt="my own"), *rest))})
    assert rows([own], ["small"])[0].known.prompt == "my own"


def test_the_text_of_a_task_is_the_workflows_else_that_of_its_first_call() -> None:
    workflow = TRACE.workflows[0]
    first, *rest = workflow.runs["large"].stages
    own = {**workflow.runs, "large": Run((replace(first, prompt="my own"), *rest))}
    assert task_text(replace(workflow, runs=own)) == workflow.prompt
    assert task_text(replace(workflow, runs=own, prompt=None)) == "my own"
    assert task_text(replace(workflow, prompt="")) is None


@given(seed=st.integers(0, 1000), share=st.sampled_from([0.0, 0.2, 0.5]))
def test_a_split_halves_workflows_and_not_calls(seed: int, share: float) -> None:
    part = split(TRACE, share, seed)
    assert not ids(part, "train") & ids(part, "test")
    assert ids(part, "train") | ids(part, "test") == {workflow.workflow_id for workflow in TRACE.workflows}
    assert len(part.test) == len(TRACE.workflows) * share
    for workload in ("load0", "load1"):
        assert sum(workflow.workload == workload for workflow in part.test) == 40 * share


@given(seed=st.integers(0, 1000), count=st.integers(2, 7))
def test_folds_judge_every_workflow_once(seed: int, count: int) -> None:
    parts = folds(TRACE, count, seed)
    judged = [workflow.workflow_id for part in parts for workflow in part.test]
    assert sorted(judged) == sorted(workflow.workflow_id for workflow in TRACE.workflows)
    assert all(not ids(part, "train") & ids(part, "test") for part in parts)
    assert max(len(part.test) for part in parts) - min(len(part.test) for part in parts) <= 1


def test_a_split_goes_by_seed_and_ids_and_not_by_the_order_of_the_file() -> None:
    backwards = Trace("backwards", TRACE.workflows[::-1])
    assert ids(split(TRACE, 0.3, 5), "test") == ids(split(backwards, 0.3, 5), "test")
    assert ids(split(TRACE, 0.3, 5), "test") != ids(split(TRACE, 0.3, 6), "test")
    assert [ids(part, "test") for part in folds(TRACE)] == [ids(part, "test") for part in folds(backwards)]


def test_a_workload_is_left_out_as_a_whole() -> None:
    parts = by_workload(TRACE)
    assert [part.name for part in parts] == ["load0", "load1"]
    for part in parts:
        assert {workflow.workload for workflow in part.test} == {part.name}
        assert part.name not in {workflow.workload for workflow in part.train}
    with pytest.raises(TrainingError, match="one workload, load0"):
        by_workload(learnable(workloads=1))


def test_too_few_workflows_say_how_many_are_needed() -> None:
    few = learnable(10)
    for refused in (split, folds, by_workload):
        with pytest.raises(TrainingError, match=f"has 10 workflows; .* needs at least {MIN_WORKFLOWS}"):
            refused(few)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(TrainingError, match="test share"):
        split(TRACE, share)


def test_models_are_checked() -> None:
    assert check_models(TRACE, None) == MODELS
    assert check_models(TRACE, ["small"]) == ("small",)
    with pytest.raises(TrainingError, match="no run of model 'smal'; did you mean 'small'"):
        check_models(TRACE, ["smal"])
    with pytest.raises(TrainingError, match="different names"):
        check_models(TRACE, ["small", "small"])
    with pytest.raises(TrainingError, match="at least 2"):
        folds(TRACE, 1)
