"""What a report shows of single cells: distribution of latencies, load of the engines, the slowest workflows.

The distribution is of all seeds together, the rest of the first seed. Nothing is estimated: load is the mean of the
recorded steps over equal intervals, instants are those of the records.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from chimsim.results import Results

QUANTILES = 241
"""Of a distribution, its ends included: one more than a multiple of eight, so that halving keeps the ends."""
BINS = 240
"""Of an engine's load over time, at most."""
SLOWEST = 6
STAGES = 40
"""So many stages of a slow workflow are shown."""
TAIL = 0.03
"""The load is shown until fewer than this share of the most requests are left; the last workflows run on alone."""
_INSTANTS = ["ready_at", "enqueued_at", "admitted_at", "first_token_at", "finished_at"]
_CALL = ["stage", "stage_name", "engine", "preemptions", "yields", *_INSTANTS]
Floats = npt.NDArray[np.float64]


def detail_of(results: Results, rows: pd.DataFrame) -> dict[str, Any]:
    """Of one line of one group, a row of the summary a seed: all that its distribution, load and workflows need."""
    cells = [str(cell) for cell in rows["cell"]]
    tables = [results.table(cell, "workflows") for cell in cells]
    latency = np.concatenate([table.loc[table["measured"].astype(bool), "latency_s"].dropna() for table in tables])
    quantiles = np.quantile(latency, np.linspace(0, 1, QUANTILES)) if len(latency) else []
    return {
        "seed": int(rows["seed"].iloc[0]),
        "workflows": len(latency),
        "quantiles": [float(f"{value:.4g}") for value in quantiles],
        "load": _load(results.table(cells[0], "timeline"), results.table(cells[0], "engines")),
        "slowest": _slowest(tables[0], results.table(cells[0], "requests")),
    }


def coarser(detail: Mapping[str, Any]) -> dict[str, Any]:
    """Half as many quantiles, intervals and workflows."""
    load = detail["load"]
    halved = [{key: _halved(engine[key]) for key in ("running", "waiting")} for engine in load["engines"]]
    engines = [{**engine, **fewer} for engine, fewer in zip(load["engines"], halved, strict=True)]
    return {
        **detail,
        "quantiles": detail["quantiles"][::2],
        "load": {"step_s": 2 * load["step_s"], "engines": engines},
        "slowest": detail["slowest"][: max(2, len(detail["slowest"]) // 2)],
    }


def _halved(values: list[float]) -> list[float]:
    return [_tenths(float(np.mean(values[index : index + 2]))) for index in range(0, len(values), 2)]


def _tenths(value: float) -> float:
    """To a tenth, whole numbers as such: they are shorter."""
    rounded = round(value, 1)
    return int(rounded) if rounded == int(rounded) else rounded


def _load(timeline: pd.DataFrame, engines: pd.DataFrame) -> dict[str, Any]:
    """Running and waiting requests of each engine, the mean of each of `BINS` equal intervals."""
    inside = timeline.groupby("time_s")[["running", "waiting"]].sum().sum(axis=1)
    busy = inside.index[inside >= TAIL * inside.max()]
    end = max(float(busy.max()), 1.0) if len(busy) else 1.0
    edges = np.linspace(0.0, end, BINS + 1)
    found = []
    for row in engines[["engine", "model", "max_batch_size"]].to_dict("records"):
        mine = timeline[timeline["engine"].astype(str) == str(row["engine"])]
        times = mine["time_s"].to_numpy(dtype=np.float64)
        found.append(
            {
                "engine": str(row["engine"]),
                "model": str(row["model"]),
                "slots": int(row["max_batch_size"]),
                **{key: _binned(times, mine[key].to_numpy(np.float64), edges) for key in ("running", "waiting")},
            }
        )
    return {"step_s": float(f"{end / BINS:.6g}"), "engines": found}


def _binned(times: Floats, values: Floats, edges: Floats) -> list[float]:
    """The mean between each two edges of what keeps its value from one sample to the next."""
    if not len(times):
        return [0] * (len(edges) - 1)
    last = max(float(edges[-1]), float(times[-1]))
    at = np.concatenate([[0.0], times, [last]])
    area = np.cumsum(np.concatenate([[0.0, 0.0], values * np.diff(at)[1:]]))
    means = np.diff(np.interp(edges, at, area)) / np.diff(edges)
    return [_tenths(float(mean)) for mean in means]


def _slowest(workflows: pd.DataFrame, requests: pd.DataFrame) -> list[dict[str, Any]]:
    """The completed workflows of the longest latencies with their stages, in seconds from their arrival."""
    done = workflows[workflows["status"].astype(str) == "completed"]
    top = done.sort_values(["latency_s", "workflow"], ascending=[False, True]).head(SLOWEST)
    found = []
    for row in top[["workflow", "workflow_id", "arrived_at", "latency_s", "slowdown", "solved"]].to_dict("records"):
        calls = requests[requests["workflow"] == row["workflow"]].sort_values(["ready_at", "stage"])
        solved = float(row["solved"])
        found.append(
            {
                "id": str(row["workflow_id"]),
                "latency_s": round(float(row["latency_s"]), 3),
                "slowdown": round(float(row["slowdown"]), 3),
                "solved": None if solved != solved else bool(solved),
                "stages": len(calls),
                "calls": [
                    _call(call, float(row["arrived_at"])) for call in calls[_CALL].head(STAGES).to_dict("records")
                ],
            }
        )
    return found


def _call(call: Mapping[Any, Any], arrived_at: float) -> list[Any]:
    """Name, engine, times out of the batch, then ready, sent, in the batch, first token, end."""
    out = int(call["preemptions"]) + int(call["yields"])
    return [
        f"{call['stage']} {call['stage_name']}", str(call["engine"]), out,
        *(round(float(call[instant]) - arrived_at, 3) for instant in _INSTANTS),
    ]  # fmt: skip
