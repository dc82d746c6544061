"""Who pays for the order: starvation and fairness of a run, overall and by the number of a workflow's stages.

Records in, numbers out, by the formulas of docs/metrics.md.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt
import pandas as pd

Floats = npt.NDArray[np.float64]

MOST_STAGES = 5
"""Workflows of so many stages and more are counted together."""


def jain_index(values: Floats) -> float | None:
    """(sum x)^2 / (n * sum x^2): 1 where all get the same, 1/n where one gets all (Jain, Chiu and Hawe, 1984)."""
    if not len(values) or not values.any():
        return None
    return float(values.sum() ** 2 / (len(values) * (values**2).sum()))


def by_stages(finished: pd.DataFrame) -> dict[str, float]:
    """Mean and p99 slowdown of the workflows of 1, 2, ... stages that there are."""
    found = {}
    slowdown = finished["slowdown"].to_numpy(dtype=np.float64, na_value=np.nan)
    stages = np.minimum(finished["stages"].to_numpy(dtype=np.int64), MOST_STAGES)
    for count in np.unique(stages):
        mine = slowdown[stages == count]
        mine = mine[np.isfinite(mine)]
        if len(mine):
            name = f"{count}+ stages" if count == MOST_STAGES else "1 stage" if count == 1 else f"{count} stages"
            found[f"mean_slowdown[{name}]"] = float(mine.mean())
            found[f"p99_slowdown[{name}]"] = float(np.quantile(mine, 0.99))
    return found


def aged_admissions(done: pd.DataFrame) -> int:
    """Admissions at which a call of a shorter job waited for the same engine: promoted by age, or by another order.

    A job is the output tokens of this call and its workflow's later ones, as they were in truth. A strict shortest
    total job first that knows them has next to none: an engine takes calls handed to it together as its budget allows.
    """
    if not len(done):
        return 0
    ordered = done.sort_values("request_id", kind="stable")
    # what of the workflow was still to come when the call began, this call included
    left = ordered["output_tokens"][::-1].groupby(ordered["workflow"][::-1]).cumsum()[::-1].to_numpy()
    total = 0
    engines = ordered["engine"].to_numpy()
    enqueued, admitted = ordered["enqueued_at"].to_numpy(), ordered["admitted_at"].to_numpy()
    for engine in pd.unique(engines):
        mine = (engines == engine) & (admitted > enqueued)
        total += _overtakings(enqueued[mine], admitted[mine], left[mine])
    return total


def _overtakings(enqueued: Floats, admitted: Floats, left: npt.NDArray[np.int64]) -> int:
    """Of one engine's calls that waited: how often one was admitted while a shorter one went on waiting."""
    arrivals = np.argsort(enqueued, kind="stable")
    count, entered = 0, 0
    waiting: list[tuple[int, float]] = []  # (tokens left, when it will be admitted), shortest first
    for call in np.argsort(admitted, kind="stable"):
        now = admitted[call]
        while entered < len(arrivals) and enqueued[arrivals[entered]] < now:
            newcomer = arrivals[entered]
            heappush(waiting, (int(left[newcomer]), float(admitted[newcomer])))
            entered += 1
        while waiting and waiting[0][1] <= now:
            heappop(waiting)
        count += bool(waiting and waiting[0][0] < left[call])
    return count
