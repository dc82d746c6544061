"""From a trace to what predictors learn from: calls as they look before they start, and splits by workflow.

`PredictionInput` is all that may be known of a call before it runs; whatever learns or predicts sees nothing else, and
the truth stays beside it, in `Row`. Splits keep all calls of a workflow, on all models, on one side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from traces.graph import ancestors
from traces.schema import Trace, Workflow, near

MIN_WORKFLOWS = 50
"""Fewer are not split and learned from: a fold would be judged on less than ten workflows."""


class TrainingError(ValueError):
    """There is nothing to learn from, or a split that cannot be made; the message says what is needed."""


@dataclass(slots=True)
class FinishedStage:
    """An earlier call of the workflow, as it went; ``model`` is the one that ran it."""

    stage: int
    name: str
    model: str
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class PredictionInput:
    """All that is known of a call before it starts. ``workflow_id`` is that of the trace.

    ``models`` are those to predict for. The token split and the text are None where the trace has none.
    """

    workflow_id: str
    workload: str
    stage: int
    stage_name: str
    models: tuple[str, ...]
    prompt_tokens: int
    system_tokens: int | None
    user_tokens: int | None
    prompt: str | None
    finished: tuple[FinishedStage, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A call with its truth: output tokens of this stage, and of all stages of the run that have not finished."""

    known: PredictionInput
    model: str
    stage_tokens: int
    remaining_tokens: int


@dataclass(frozen=True, slots=True)
class Split:
    """Workflows to learn from and workflows to judge on. ``name`` is the fold's number, or what it leaves out."""

    name: str
    train: tuple[Workflow, ...]
    test: tuple[Workflow, ...]


def task_text(workflow: Workflow) -> str | None:
    """The text of the task, which is what a router reads: the workflow's, else that of the first call of a run.

    Of runs whose first calls differ it is that of the model first by name. None where there is no text.
    """
    firsts = (workflow.runs[model].stages[0].prompt for model in sorted(workflow.runs))
    return workflow.prompt or next((text for text in firsts if text), None)


def calls_of(workflow: Workflow, model: str, models: Sequence[str]) -> list[PredictionInput]:
    """The calls of the workflow's run on ``model``, which ran the earlier ones too, with ``models`` to predict for.

    In a graph the earlier ones are those that have finished for certain: what is beside it may have or not.
    """
    stages = workflow.runs[model].stages
    done = [FinishedStage(i, each.name, model, each.prompt_tokens, each.output_tokens) for i, each in enumerate(stages)]
    return [
        PredictionInput(
            workflow.workflow_id, workflow.workload, index, stage.name, tuple(models), stage.prompt_tokens,
            stage.system_tokens, stage.user_tokens, stage.prompt or workflow.prompt,
            tuple(done[each] for each in sorted(earlier)),
        )
        for index, (stage, earlier) in enumerate(zip(stages, ancestors(stages), strict=True))
    ]  # fmt: skip


def rows(workflows: Iterable[Workflow], models: Sequence[str]) -> list[Row]:
    """The calls of all runs of these models, in order of workflow, model and stage; missing runs are left out.

    A later stage has seen the earlier stages of its own run, which is what one model would have lived.
    """
    made = []
    for workflow in workflows:
        for model in models:
            if model not in workflow.runs:
                continue
            stages = workflow.runs[model].stages
            whole = sum(stage.output_tokens for stage in stages)
            for known, stage in zip(calls_of(workflow, model, (model,)), stages, strict=True):
                finished = sum(done.output_tokens for done in known.finished)
                made.append(Row(known, model, stage.output_tokens, whole - finished))
    return made


def check_models(trace: Trace, models: Sequence[str] | None) -> tuple[str, ...]:
    """The models to learn: those given, or all that every workflow has a run of.

    Raises:
        TrainingError: no model, one twice, or one that no workflow has a run of.
    """
    if models is None:
        if not trace.models:
            raise TrainingError(f"trace {trace.name}: no model has a run in every workflow; name the models")
        return trace.models
    known = sorted({model for workflow in trace.workflows for model in workflow.runs})
    for model in models:
        if model not in known:
            raise TrainingError(
                f"trace {trace.name} has no run of model {model!r}{near(model, known)} (it has: {', '.join(known)})"
            )
    if not models or len(set(models)) < len(models):
        raise TrainingError(f"models: expected different names, found {', '.join(models) or 'none'}")
    return tuple(models)


def split(trace: Trace, test_share: float = 0.2, seed: int = 0) -> Split:
    """A share of every workload held out. Who it is depends on the seed and the ids, not on the file's order.

    Raises:
        TrainingError: a share not between 0 and 1 (0 holds nothing out), or fewer than `MIN_WORKFLOWS`.
    """
    if not 0 <= test_share < 1:
        raise TrainingError(f"test share is {test_share!r}; expected at least 0 and below 1")
    _enough(trace)
    held_out = set()
    for same in _shuffled(trace.workflows, seed):
        held_out.update(same[: round(len(same) * test_share)])
    return _split("held out", trace, held_out)


def folds(trace: Trace, count: int = 5, seed: int = 0) -> list[Split]:
    """``count`` splits in which every workflow is judged on once; each fold has its share of every workload.

    Raises:
        TrainingError: fewer than two folds, or fewer than `MIN_WORKFLOWS`, or fewer workflows than folds.
    """
    if count < 2:
        raise TrainingError(f"folds is {count}; expected at least 2")
    _enough(trace, count)
    ids = [workflow_id for same in _shuffled(trace.workflows, seed) for workflow_id in same]
    return [_split(f"fold {number + 1}", trace, set(ids[number::count])) for number in range(count)]


def by_workload(trace: Trace) -> list[Split]:
    """A split a workload, which leaves out that workload as a whole.

    Raises:
        TrainingError: only one workload, or fewer than `MIN_WORKFLOWS`.
    """
    _enough(trace)
    workloads = sorted({workflow.workload for workflow in trace.workflows})
    if len(workloads) < 2:
        raise TrainingError(
            f"trace {trace.name} has one workload, {workloads[0]}; leaving one out needs at least two: use folds"
        )
    return [
        _split(name, trace, {workflow.workflow_id for workflow in trace.workflows if workflow.workload == name})
        for name in workloads
    ]


def _split(name: str, trace: Trace, held_out: set[str]) -> Split:
    train = tuple(workflow for workflow in trace.workflows if workflow.workflow_id not in held_out)
    test = tuple(workflow for workflow in trace.workflows if workflow.workflow_id in held_out)
    if not train:
        raise TrainingError(f"trace {trace.name}: nothing is left to learn from without {name}")
    return Split(name, train, test)


def _enough(trace: Trace, least: int = 0) -> None:
    least = max(least, MIN_WORKFLOWS)
    if len(trace.workflows) < least:
        raise TrainingError(
            f"trace {trace.name} has {len(trace.workflows)} workflows; learning and judging needs at least {least}"
        )


def _shuffled(workflows: Sequence[Workflow], seed: int) -> list[list[str]]:
    """The ids of each workload, workloads by name, in an order fixed by the seed and the ids."""
    groups: dict[str, list[str]] = {}
    for workflow in workflows:
        groups.setdefault(workflow.workload, []).append(workflow.workflow_id)
    head = f"{seed}\0".encode()
    return [sorted(groups[name], key=lambda i: hashlib.sha256(head + i.encode()).digest()) for name in sorted(groups)]
