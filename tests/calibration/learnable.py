"""A small trace in which prompts, stages and what was put out before tell the lengths to come."""

from __future__ import annotations

import random
from dataclasses import replace

from calibration.length_model import LengthSettings
from traces import Run, Stage, Trace, Workflow

MODELS = ("large", "small")
TINY = LengthSettings(trees=12, components=4)


def learnable(count: int = 80, *, prompts: bool = True, workloads: int = 2, seed: int = 3) -> Trace:
    """``count`` workflows of one to three stages; the prompt's words and the model make outputs long or short."""
    draw = random.Random(seed)
    workflows = []
    for number in range(count):
        words = draw.choices(("sum", "list", "proof", "integral"), k=4)
        scale = 20 + 60 * sum(word in ("proof", "integral") for word in words)
        runs = {}
        stages = draw.choice((1, 2, 3))
        for factor, model in ((1.0, "large"), (1.6, "small")):
            made: list[Stage] = []
            before = 0
            for index in range(stages):
                prompt = before + 60 + draw.randrange(20)
                output = max(1, int(factor * scale * draw.uniform(0.7, 1.4)))
                made.append(
                    Stage(("plan", "solve", "check")[index], prompt, output, before, system_tokens=10, user_tokens=50)
                )
                before = prompt + output
            runs[model] = Run(tuple(made), None)
        text = f"Find the {' '.join(words)} of {number} things." if prompts else None
        workflows.append(Workflow(f"w{number:03}", f"load{number % workloads}", runs, prompt=text))
    return Trace("learnable", tuple(workflows), f"digest-{count}-{prompts}-{workloads}-{seed}")


def lengthened(workflow: Workflow, from_stage: int) -> Workflow:
    """The workflow with other true lengths from a stage on, and what follows from them: one stage more at the end."""
    runs = {}
    for model, run in workflow.runs.items():
        stages = [
            replace(stage, output_tokens=stage.output_tokens * 50 + 7) if index >= from_stage else stage
            for index, stage in enumerate(run.stages)
        ]
        extra = Stage("more", 9_999, 12_345)
        runs[model] = Run((*stages, extra), not run.solved)
    return replace(workflow, runs=runs)
