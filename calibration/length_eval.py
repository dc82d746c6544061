"""How good length and rank predictors are, and what a prediction costs: the numbers of `chimsim predictor`.

It trains and judges on the splits it is given; the tables are printed elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any

import numpy as np

from calibration.length_model import LengthModel
from calibration.rank_model import RankModel
from calibration.rows import Row, Split, TrainingError, rows
from calibration.scores import Floats, coverage, kendall_distance, pinball_loss
from traces.schema import Workflow

INTERVAL = (0.1, 0.9)
Predictor = LengthModel | RankModel


@dataclass(frozen=True)
class Judged:
    """Calls with what was predicted of them by a model that had not seen their workflow, a row a call.

    ``quantiles`` are the 10 %, 50 % and 90 % of stage and remaining tokens, shape (calls, 2, 3), and ``constant``
    the training medians of both for the call's model, shape (calls, 2); None for a rank predictor. ``ranks`` is its
    score, None for a length predictor.
    """

    rows: list[Row]
    quantiles: Floats | None
    constant: Floats | None
    ranks: Floats | None


def judge(model: Predictor, test: Sequence[Workflow], train: Sequence[Workflow]) -> Judged:
    """The model's predictions for the calls of ``test``; ``train`` gives the constant to compare with."""
    judged = rows(test, model.models)
    calls = [row.known for row in judged]
    if isinstance(model, RankModel):
        return Judged(judged, None, None, model.scores(calls))
    medians: dict[str, tuple[float, float]] = {}
    for name in model.models:
        learned = rows(train, [name])
        stages, totals = ([getattr(row, kind) for row in learned] for kind in ("stage_tokens", "remaining_tokens"))
        medians[name] = (float(np.median(stages)), float(np.median(totals))) if learned else (nan, nan)
    constant = np.array([medians[row.model] for row in judged]).reshape(-1, 2)
    return Judged(judged, model.quantiles(calls, [INTERVAL[0], 0.5, INTERVAL[1]]), constant, None)


def cross_validated(
    splits: Sequence[Split],
    train: Callable[[Sequence[Workflow]], Predictor],
    progress: Callable[[str], None] = lambda text: None,
) -> Judged:
    """The predictions for every call, each by a model that `train` made of the rest."""
    parts = []
    for number, split in enumerate(splits, start=1):
        progress(f"{split.name} ({number} of {len(splits)})")
        parts.append(judge(train(split.train), split.test, split.train))
    return Judged(
        [row for part in parts for row in part.rows],
        _together([part.quantiles for part in parts]),
        _together([part.constant for part in parts]),
        _together([part.ranks for part in parts]),
    )


def evaluate(judged: Judged, order: Sequence[str]) -> list[dict[str, Any]]:
    """A row of scores for each workload and model, then one a model over all workloads (``workload`` None).

    ``order`` is the workflows' ids as they come, which is what FCFS goes by. `KENDALL` says what the distances are
    of; lengths have pinball losses in tokens (``_constant``: of the training median) and the coverage of the 10-90 %
    interval besides. Raises `TrainingError` where there is no call.
    """
    if not judged.rows:
        raise TrainingError("no workflow that could be judged has a run of these models")
    place = {workflow_id: index for index, workflow_id in enumerate(order)}
    arrived = np.array([place[row.known.workflow_id] for row in judged.rows], np.float64)
    workloads = np.array([row.known.workload for row in judged.rows])
    models = np.array([row.model for row in judged.rows])
    names: list[str | None] = sorted(set(workloads.tolist()))
    table = []
    for workload in [*names, None] if len(names) > 1 else names:
        for model in sorted(set(models.tolist())):
            mine = np.flatnonzero((models == model) & ((workloads == workload) if workload else True))
            if len(mine):
                table.append({"workload": workload, "model": model, **_scores(judged, mine, arrived)})
    return table


KENDALL = {
    "workflow": "tokens of the whole workflow, at its first call",
    "remaining": "tokens of the workflow from this call on, at every call",
    "stage": "tokens of the call itself, at every call",
}
"""What is ranked; each has the distances of fcfs, prompt (its tokens), predicted and oracle."""


def _scores(judged: Judged, mine: Any, arrived: Floats) -> dict[str, Any]:
    chosen = [judged.rows[index] for index in mine]
    stage = np.array([row.stage_tokens for row in chosen], np.float64)
    remaining = np.array([row.remaining_tokens for row in chosen], np.float64)
    prompt = np.array([row.known.prompt_tokens for row in chosen], np.float64)
    first = np.array([not row.known.stage for row in chosen])
    row: dict[str, Any] = {"calls": len(chosen), "workflows": int(first.sum())}
    ranks = None if judged.ranks is None else judged.ranks[mine]
    quantiles = None if judged.quantiles is None else judged.quantiles[mine]

    def distances(true: Floats, at: Any, predicted: Floats) -> dict[str, float]:
        guesses = {"fcfs": arrived[mine], "prompt": prompt, "predicted": predicted, "oracle": true}
        return {name: kendall_distance(true[at], guess[at]) for name, guess in guesses.items()}

    every = np.ones(len(chosen), np.bool_)
    if ranks is not None:
        row["kendall"] = {"stage": distances(stage, every, ranks)}
        return row
    assert quantiles is not None
    assert judged.constant is not None
    row["kendall"] = {
        "workflow": distances(remaining, first, quantiles[:, 1, 1]),
        "remaining": distances(remaining, every, quantiles[:, 1, 1]),
        "stage": distances(stage, every, quantiles[:, 0, 1]),
    }
    for index, (name, true) in enumerate((("stage", stage), ("remaining", remaining))):
        row[name] = {
            "mean_tokens": float(true.mean()),
            "pinball_10": pinball_loss(true, quantiles[:, index, 0], INTERVAL[0]),
            "pinball_50": pinball_loss(true, quantiles[:, index, 1], 0.5),
            "pinball_90": pinball_loss(true, quantiles[:, index, 2], INTERVAL[1]),
            "pinball_50_constant": pinball_loss(true, judged.constant[mine, index], 0.5),
            "coverage": coverage(true, quantiles[:, index, 0], quantiles[:, index, 2]),
        }
    return row


def cost_ms(model: Predictor, workflows: Sequence[Workflow], calls: int = 320) -> dict[str, float]:
    """Wall-clock milliseconds a call, for all its models: alone and in batches of 32, p50 and p99 over ``calls`` calls.

    ``per_call`` is the median in batches of 32, which is how a predictor runs off the critical path.
    """
    known = [replace(row.known, models=model.models) for row in rows(workflows[:calls], model.models[:1])]
    if not known:
        raise TrainingError("there is no call to time the model on")
    cost: dict[str, float] = {}
    for batch in (1, 32):
        taken = []
        for start in range(-batch, calls, batch):
            some = [known[(start + offset) % len(known)] for offset in range(batch)]
            began = time.perf_counter()
            model.predict(some)
            if start >= 0:  # the first warms up
                taken.append((time.perf_counter() - began) * 1e3 / batch)
        cost[f"batch_{batch}_p50"], cost[f"batch_{batch}_p99"] = (float(ms) for ms in np.percentile(taken, (50, 99)))
    return {"per_call": cost["batch_32_p50"], **cost}


def _together(parts: Sequence[Floats | None]) -> Floats | None:
    present = [part for part in parts if part is not None]
    return np.concatenate(present) if present else None
