"""What a trace holds, in numbers: one summary a model. It reads traces and prints nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traces.columns import columns_of
from traces.schema import Trace


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """A model's runs. Output is a workflow's total, prompt a call's; ``solved_rate`` is None without labels.

    ``reuse_share`` is the share of prompt tokens that the stage before has left behind, ``shared_share``
    that of prefixes shared across workflows.
    """

    model: str
    workflows: int
    calls: int
    solved_rate: float | None
    stages_mean: float
    output_mean: float
    output_median: float
    output_p99: float
    output_std: float
    prompt_mean: float
    reuse_share: float
    shared_share: float


def summarize(trace: Trace) -> list[ModelSummary]:
    """One summary for each model that has runs, by name."""
    return [_summary(trace, model) for model in columns_of(trace).models]


def arrival_rate(trace: Trace) -> float | None:
    """Recorded workflows a second (gaps over the span), or None without arrivals or without a span."""
    times = columns_of(trace).arrivals_s
    if times is None or len(times) < 2 or times.max() == times.min():
        return None
    return float((len(times) - 1) / (times.max() - times.min()))


def _summary(trace: Trace, model: str) -> ModelSummary:
    runs = [workflow.runs[model] for workflow in trace.workflows if model in workflow.runs]
    labels = [run.solved for run in runs if run.solved is not None]
    outputs = np.array([sum(stage.output_tokens for stage in run.stages) for run in runs], dtype=np.float64)
    stages = [stage for run in runs for stage in run.stages]
    prompt = sum(stage.prompt_tokens for stage in stages)
    shared = sum(stage.shared_prefix.tokens for stage in stages if stage.shared_prefix is not None)
    return ModelSummary(
        model=model,
        workflows=len(runs),
        calls=len(stages),
        solved_rate=sum(labels) / len(labels) if labels else None,
        stages_mean=len(stages) / len(runs),
        output_mean=float(outputs.mean()),
        output_median=float(np.median(outputs)),
        output_p99=float(np.percentile(outputs, 99)),
        output_std=float(outputs.std()),
        prompt_mean=prompt / len(stages),
        reuse_share=sum(stage.reused_tokens for stage in stages) / prompt,
        shared_share=shared / prompt,
    )
