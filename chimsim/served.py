"""A live run whose answers had lengths of their own, as a trace: what was served, in the order in which it came.

What a workflow's model served has the lengths that were recorded; its runs on other models keep those of the trace,
for nobody knows what they would have answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pandas as pd

from traces import Run, Stage, Trace, Workflow
from traces.graph import prefix_parent

Served = Mapping[tuple[int, str, int], tuple[int, int, int]]
"""(workflow, model, stage): prompt, cached and output tokens."""


def as_served(trace: Trace, requests: pd.DataFrame, workflows: pd.DataFrame) -> Trace:
    """The workflows of a run in the order of their arrivals, with those; a result's tables say which they were."""
    done = requests[requests["status"].astype(str) == "completed"]
    columns = ("workflow", "model", "stage", "prompt_tokens", "cached_tokens", "output_tokens")
    served = {
        (int(row), str(model), int(stage)): (int(prompt), int(cached), int(output))
        for row, model, stage, prompt, cached, output in zip(*(done[name] for name in columns), strict=True)
    }
    by_id = {workflow.workflow_id: workflow for workflow in trace.workflows}
    rows = workflows.sort_values("workflow")
    made = [
        _served(by_id[str(source)], int(row), float(arrived_at), served)
        for row, source, arrived_at in zip(rows["workflow"], rows["source_id"], rows["arrived_at"], strict=True)
    ]
    return Trace(trace.name, tuple(made), trace.digest)


def _served(source: Workflow, row: int, arrived_at: float, served: Served) -> Workflow:
    runs = {model: _run(run, row, model, served) for model, run in source.runs.items()}
    return replace(source, runs=runs, arrival_s=arrived_at)


def _run(run: Run, row: int, model: str, served: Served) -> Run:
    stages: list[Stage] = []
    for index, stage in enumerate(run.stages):
        found = served.get((row, model, index))
        if found is not None:
            prompt, cached, output = found
            parent = prefix_parent(run.stages, index)
            reused = 0
            if parent is not None:
                most = min(stages[parent].prompt_tokens + stages[parent].output_tokens, prompt - 1)
                # A prompt without a text of its own is the parent's and its answer, and the stage's name.
                reused = most if stage.prompt is None else min(cached, most)
            # What the trace says that other workflows share was not in the texts.
            stage = replace(
                stage, prompt_tokens=prompt, output_tokens=max(output, 1), reused_tokens=reused, system_tokens=None,
                user_tokens=None, shared_prefix=None, hash_ids=(),
            )  # fmt: skip
        stages.append(stage)
    return Run(tuple(stages), run.solved)
