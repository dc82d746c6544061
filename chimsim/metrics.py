"""One run's records turned into one row of numbers, by the names and formulas of docs/metrics.md.

It reads records only: it neither simulates nor writes files. Percentiles are numpy's default (linear
interpolation); a value that cannot be given (no label, nothing completed) is None, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import exp, isfinite, log, sqrt

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.special import stdtrit

from chimsim.fairness import aged_admissions, by_stages, jain_index
from chimsim.records import RunResult

Value = float | int | str | None
Floats = npt.NDArray[np.float64]

QUEUED_S = 1.0
"""A wait longer than this (seconds) is a real queue; shorter ones are the wait for the next step to begin."""
STEADY_RISE = 0.25
"""The backlog may rise by this share of its mean over the second half of the arrivals."""


def summarise(
    result: RunResult,
    *,
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Value]:
    """All metrics of a run, warm-up workflows left out, in a fixed order.

    ``goodput`` maps ``ttft``, ``tpot`` or ``e2el`` to the milliseconds a request may take to count as good, and
    ``latency`` to those that a workflow may.
    """
    workflows = result.workflows[result.workflows["measured"].astype(bool)]
    requests = result.requests[result.requests["measured"].astype(bool)]
    finished = workflows[workflows["status"] == "completed"]
    done = requests[requests["status"] == "completed"]
    latency = _floats(finished["latency_s"])
    solved = _floats(workflows["solved"])
    solved = solved[np.isfinite(solved)]
    summary: dict[str, Value] = {
        "workflows": len(workflows),
        "completed_workflows": len(finished),
        "rejected_workflows": len(workflows) - len(finished),
        "mixed_models_workflows": int(finished["mixed_models"].sum()),
        "requests": len(done),
        "solved_rate": _mean(solved),
        "labelled_workflows": len(solved),
        **_spread(latency, "workflow_latency_s"),
        "latency_per_token_ms": _per_token_ms(finished),
        **_spread(_floats(finished["queue_time_s"]), "workflow_queue_time_s"),
        **_spread(_floats(done["admitted_at"]) - _floats(done["ready_at"]), "queue_time_s"),
        **_slowdown(_floats(finished["slowdown"])),
        **by_stages(finished),
        **_overhead(done, finished),
    }
    request_times = _request_times_ms(done)
    for name in ("ttft", "tpot"):
        summary |= _bench(request_times[name], f"{name}_ms")
    summary |= _itl(result)
    summary |= _bench(request_times["e2el"], "e2el_ms")
    summary |= _throughput(workflows, finished, done, request_times, goodput)
    summary |= _engine_shares(result)
    tokens = int(done["prompt_tokens"].sum())
    waits = _floats(requests["longest_wait_s"])
    waits = waits[np.isfinite(waits)]
    summary |= {
        "prefix_hit_rate": float(done["cached_tokens"].sum()) / tokens if tokens else None,
        "preemptions": int(requests["preemptions"].sum()),
        "yields": int(requests["yields"].sum()),
        "promotions": int(requests["promotions"].sum()),
        "aged_admissions": aged_admissions(done),
        "longest_wait_s": float(waits.max()) if len(waits) else None,
        "queues_filled": _mean((waits > QUEUED_S).astype(np.float64)),
        "max_workflow_latency_s": float(finished["latency_s"].max()) if len(finished) else None,
        "drain_s": _drain_s(result),
        "not_steady": not_steady(_floats(result.workflows["arrived_at"]), _ends(result.workflows)),
    }
    if "retries" in requests:
        summary |= _losses(requests, workflows)
    return {key: _plain(value) for key, value in summary.items()}


def _drain_s(result: RunResult) -> float | None:
    """Seconds from the last arrival to the end of the run."""
    ends = _floats(result.workflows["finished_at"])
    if not np.isfinite(ends).any():
        return None
    return max(float(np.nanmax(ends)) - float(result.workflows["arrived_at"].max()), 0.0)


def not_steady(arrived_at: npt.NDArray[np.floating], finished_at: npt.NDArray[np.floating]) -> bool:
    """Whether the backlog still grew when the last workflow arrived (both in seconds, one entry a workflow).

    The rule (ours): take the workflows in the system just after each arrival of the second half, fit a
    straight line over the arrivals' numbers, and call its rise over that half growth if it is more than a
    quarter of the mean backlog and more than four times its square root, the noise of an unlimited server.
    A backlog that grows evenly from the first arrival rises by two thirds of its mean.
    """
    order = np.argsort(arrived_at, kind="stable")
    arrived, ends = arrived_at[order], np.sort(finished_at[order])
    if len(arrived) < 4:
        return False
    counts = np.arange(1, len(arrived) + 1)
    backlog = (counts - np.searchsorted(ends, arrived, side="right")).astype(np.float64)
    half = backlog[len(backlog) // 2 :]
    index = np.arange(len(half)) - (len(half) - 1) / 2
    slope = float((index * half).sum() / (index**2).sum())
    rise, mean = slope * len(half), float(half.mean())
    return bool(rise > STEADY_RISE * mean and rise > 4 * sqrt(mean))


def non_dominated(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Which of the (latency, solved rate) points no other beats: less latency is better, more solved is.

    A point is beaten by one that is at least as good in both and better in one, so equal points stand
    together. A point with a NaN is never on the frontier and beats nobody.
    """
    keep = [False] * len(points)
    valid = [i for i, (latency, solved) in enumerate(points) if latency == latency and solved == solved]
    valid.sort(key=lambda i: (points[i][0], -points[i][1]))
    best = -np.inf
    last: tuple[float, float] | None = None
    for i in valid:
        latency, solved = points[i]
        if solved > best or (last is not None and (latency, solved) == last):
            keep[i] = True
            best, last = solved, (latency, solved)
    return keep


def mean_and_interval(values: Iterable[float], confidence: float = 0.95) -> tuple[float, float]:
    """Mean and half width of the Student interval over replications, 95 % unless said; the width of one value is 0."""
    array = np.asarray([v for v in values if v == v], dtype=np.float64)
    if not len(array):
        return float("nan"), 0.0
    if len(array) == 1:
        return float(array[0]), 0.0
    half = float(stdtrit(len(array) - 1, 0.5 + confidence / 2)) * float(array.std(ddof=1)) / sqrt(len(array))
    return float(array.mean()), half


def geometric_interval(values: Iterable[float]) -> tuple[float, float, float]:
    """Geometric mean of positive numbers, and both ends of its 95 % Student interval, by their logarithms."""
    mean, half = mean_and_interval(log(value) for value in values)
    return exp(mean), exp(mean - half), exp(mean + half)


def per_engine_key(metric: str, engine: str) -> str:
    """The summary's key of an engine's own number: ``busy_share[Qwen2.5-7B]``."""
    return f"{metric}[{engine}]"


def _floats(column: pd.Series) -> Floats:
    return np.asarray(column.to_numpy(dtype=np.float64, na_value=np.nan), dtype=np.float64)


def _ends(workflows: pd.DataFrame) -> Floats:
    """When each workflow left; a rejected one that has no end left as it arrived."""
    ends, arrived = _floats(workflows["finished_at"]), _floats(workflows["arrived_at"])
    return np.where(np.isnan(ends), arrived, ends)


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None


def _quantile(values: Floats, q: float) -> float | None:
    return float(np.quantile(values, q)) if len(values) else None


def _spread(values: Floats, name: str) -> dict[str, Value]:
    values = values[np.isfinite(values)]
    quantiles = {f"p{q}_{name}": _quantile(values, q / 100) for q in (50, 90, 99)}
    return {f"mean_{name}": _mean(values), **quantiles}


def _bench(values: Floats, name: str) -> dict[str, Value]:
    """The four numbers under the names of vLLM's bench serve."""
    values = values[np.isfinite(values)]
    quantiles = {f"p{q}_{name}": _quantile(values, q / 100) for q in (90, 99)}
    return {f"mean_{name}": _mean(values), f"median_{name}": _quantile(values, 0.5), **quantiles}


def _slowdown(values: Floats) -> dict[str, Value]:
    values = values[np.isfinite(values)]
    return {
        "mean_slowdown": _mean(values),
        "p50_slowdown": _quantile(values, 0.5),
        "p99_slowdown": _quantile(values, 0.99),
        "p999_slowdown": _quantile(values, 0.999),
        # of the speeds, as shares of that on an idle engine
        "jain_index": jain_index(1 / values),
    }


def _overhead(done: pd.DataFrame, finished: pd.DataFrame) -> dict[str, Value]:
    """The share of a workflow's latency that router and predictor took."""
    charged_s = (done["enqueued_at"] - done.get("lost_s", 0.0) - done["ready_at"]).groupby(done["workflow"]).sum()
    shares = _floats(charged_s.reindex(finished["workflow"]).reset_index(drop=True)) / _floats(finished["latency_s"])
    shares = shares[np.isfinite(shares)]
    return {"mean_overhead_share": _mean(shares), "max_overhead_share": float(shares.max()) if len(shares) else None}


def _losses(requests: pd.DataFrame, workflows: pd.DataFrame) -> dict[str, Value]:
    """What engines that fail cost: tries, tokens that came to nothing, and the time until the last try."""
    retried = requests[requests["retries"] > 0]
    return {
        "retries": int(requests["retries"].sum()),
        "retried_workflows": int(retried["workflow"].nunique()),
        "failed_workflows": int((workflows["status"] == "failed").sum()),
        "lost_tokens": int(requests["lost_tokens"].sum()),
        "mean_lost_s": _mean(_floats(requests["lost_s"][requests["lost_s"] > 0])),
    }


def _per_token_ms(finished: pd.DataFrame) -> float | None:
    tokens = _floats(finished["output_tokens"])
    latency = _floats(finished["latency_s"])
    return _mean(1000 * latency[tokens > 0] / tokens[tokens > 0])


def _request_times_ms(done: pd.DataFrame) -> dict[str, Floats]:
    ready, first, end = (_floats(done[name]) for name in ("ready_at", "first_token_at", "finished_at"))
    tokens = _floats(done["output_tokens"])
    gaps = np.where(tokens > 1, tokens - 1, np.nan)
    return {"ttft": 1000 * (first - ready), "tpot": 1000 * (end - first) / gaps, "e2el": 1000 * (end - ready)}


def _itl(result: RunResult) -> dict[str, Value]:
    itl = result.itl
    if not itl.total > 0:
        return dict.fromkeys(("mean_itl_ms", "median_itl_ms", "p90_itl_ms", "p99_itl_ms"))
    return {
        "mean_itl_ms": 1000 * itl.mean_s,
        "median_itl_ms": 1000 * itl.quantile(0.5),
        "p90_itl_ms": 1000 * itl.quantile(0.9),
        "p99_itl_ms": 1000 * itl.quantile(0.99),
    }


def _throughput(
    workflows: pd.DataFrame,
    finished: pd.DataFrame,
    done: pd.DataFrame,
    times_ms: Mapping[str, Floats],
    goodput: Mapping[str, float] | None,
) -> dict[str, Value]:
    """Per second of the time from the first measured arrival to the last measured finish."""
    keys = ["workflow_throughput", "request_throughput", "output_throughput", "total_token_throughput"]
    limits_ms = dict(goodput or {})
    latency_ms = limits_ms.pop("latency", None)
    if limits_ms:
        keys.append("request_goodput")
    if latency_ms is not None:
        keys.append("workflow_goodput")
    share = {} if latency_ms is None else {"good_workflows_share": 0.0}
    if not len(finished):
        return {"duration_s": None, **dict.fromkeys(keys), **share}
    duration = float(finished["finished_at"].max()) - float(workflows["arrived_at"].min())
    output, prompt = float(done["output_tokens"].sum()), float(done["prompt_tokens"].sum())
    amounts = [float(len(finished)), float(len(done)), output, output + prompt]
    if limits_ms:
        good = np.ones(len(done), dtype=bool)
        for name, limit_ms in sorted(limits_ms.items()):
            # a request of one token has no TPOT and cannot miss it
            good &= ~(times_ms[name] > limit_ms)
        amounts.append(float(good.sum()))
    if latency_ms is not None:
        within = float((1000 * _floats(finished["latency_s"]) <= latency_ms).sum())
        amounts.append(within)
        share["good_workflows_share"] = within / len(workflows)
    rates = {key: amount / duration if duration > 0 else None for key, amount in zip(keys, amounts, strict=True)}
    return {"duration_s": duration, **rates, **share}


def _engine_shares(result: RunResult) -> dict[str, Value]:
    """Busy time, held slots and offered load per engine, over the whole run (warm-up included)."""
    engines = result.engines.sort_values("engine", kind="stable")
    names = [str(name) for name in engines["engine"]]
    makespan, slots = _floats(engines["makespan_s"]), _floats(engines["max_batch_size"])
    running = _floats(engines["mean_running"])
    busy = np.divide(_floats(engines["busy_s"]), makespan, out=np.zeros_like(makespan), where=makespan > 0)
    window = float(result.workflows["arrived_at"].max()) if len(result.workflows) else 0.0
    service = result.requests.groupby("engine", observed=True)["service_s"].sum()
    shares: dict[str, Value] = {
        "utilisation": _mean(busy),
        "slots_share": float(running.sum() / slots.sum()) if len(names) else None,
    }
    for i, name in enumerate(names):
        shares[per_engine_key("busy_share", name)] = float(busy[i])
        shares[per_engine_key("slots_share", name)] = float(running[i] / slots[i])
        offered = float(service.get(name, 0.0)) / float(slots[i])
        shares[per_engine_key("offered_load", name)] = offered / window if window > 0 else None
    return shares


def _plain(value: Value) -> Value:
    if isinstance(value, float) and not isfinite(value):
        return None
    return value
