"""A trace with shorter (or longer) calls: for small engines, small models and quick rehearsals.

Only lengths change: labels, stages, delays, arrivals and texts stay as they are.
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from traces.graph import prefix_parent
from traces.schema import Run, SharedPrefix, Stage, Trace, TraceError, Workflow


def scaled(trace: Trace, factor: float, max_output_tokens: int | None = None) -> Trace:
    """All lengths in tokens times ``factor``, at least 1 a prompt and an output; outputs cut at the limit.

    Raises `TraceError` for a factor that is not above 0, and a trace with hashed blocks, which cannot be resized.
    """
    if not (isfinite(factor) and factor > 0):
        raise TraceError(f"lengths factor is {factor!r}; expected a number above 0")
    if max_output_tokens is not None and max_output_tokens < 1:
        raise TraceError(f"max output tokens is {max_output_tokens!r}; expected a whole number above 0")
    return Trace(trace.name, tuple(_workflow(workflow, factor, max_output_tokens) for workflow in trace.workflows))


def _workflow(workflow: Workflow, factor: float, most: int | None) -> Workflow:
    runs = {}
    for model, run in workflow.runs.items():
        stages: list[Stage] = []
        for index, stage in enumerate(run.stages):
            if stage.hash_ids:
                raise TraceError(
                    f"workflow {workflow.workflow_id}: a trace with hash_ids cannot be scaled: its blocks have one size"
                )
            parent = prefix_parent(run.stages, index)
            stages.append(_stage(stage, None if parent is None else stages[parent], factor, most))
        runs[model] = Run(tuple(stages), run.solved)
    return replace(workflow, runs=runs)


def _stage(stage: Stage, before: Stage | None, factor: float, most: int | None) -> Stage:
    prompt = max(round(stage.prompt_tokens * factor), 1)
    output = max(round(stage.output_tokens * factor), 1)
    context = before.prompt_tokens + before.output_tokens if before is not None else 0
    prefix = stage.shared_prefix
    parts = [stage.system_tokens, stage.user_tokens]
    system, user = (None if part is None else int(part * factor) for part in parts)
    return replace(
        stage,
        prompt_tokens=prompt,
        output_tokens=output if most is None else min(output, most),
        reused_tokens=min(int(stage.reused_tokens * factor), context, prompt - 1),
        system_tokens=system,
        user_tokens=None if user is None else min(user, prompt - (system or 0)),
        shared_prefix=prefix and SharedPrefix(prefix.id, min(max(int(prefix.tokens * factor), 1), prompt)),
    )
