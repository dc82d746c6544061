"""The same requests again in the simulator, held against the measured run.

Every request is handed to the engine when the measured one was (queue in the engine, first come first served), with
its own lengths, through `chimsim.simulation.simulate`. Formulas are those of docs/metrics.md; an error is simulated /
measured - 1 in percent. It reads and writes no files; what was not measured is absent from the result, never 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from chimsim.config import Cluster, EngineSpec
from chimsim.engine import Engine, EngineRequest
from chimsim.errors import ChimsimError
from chimsim.idle import fit
from chimsim.kvcache import Footprint, KVCache
from chimsim.measured import TIMES, MeasuredRun
from chimsim.simulation import simulate
from policies.fcfs import Fcfs
from traces import Run, Stage, Trace, Workflow

Floats = npt.NDArray[np.float64]

METRICS = ("queue_time_s", "ttft_ms", "tpot_ms", "e2el_ms")
ABSENT = {
    "queue_time_s": "the record has no time of admission",
    "ttft_ms": "the record has no time of the first token",
    "tpot_ms": "no request has a first-token time and more than one output token",
    "e2el_ms": "the record has no time of the last token",
}
STATISTICS = ("mean", "p50", "p90", "p99")
LOAD = ("in_system", "running", "waiting", "kv_used_fraction")
WORST = 5
SAMPLES = 400


@dataclass(frozen=True)
class Replay:
    """The simulated run: ``requests`` has the columns of `MeasuredRun` in the same order, and ``preemptions``.

    ``load`` is what the engine held (``time_s``, ``running``, ``kv_used_fraction``), a row whenever a step, or a
    stretch of them, began or ended. ``simulation_s`` is how long the simulation took on the wall clock.
    """

    requests: pd.DataFrame
    load: pd.DataFrame
    simulation_s: float


@dataclass(frozen=True)
class Comparison:
    """Measured against simulated. ``figures`` is ready for JSON (docs/validation.md has its keys).

    ``requests`` has a row a request with ``measured_`` and ``simulated_`` times; ``load`` a row an instant with
    ``time_s`` and ``measured_`` and ``simulated_`` ``running``, ``waiting`` and ``kv_used_fraction``.
    """

    figures: dict[str, Any]
    requests: pd.DataFrame
    load: pd.DataFrame


def replay(run: MeasuredRun, spec: EngineSpec) -> Replay:
    """Simulate the run's requests on one engine. Raises `ChimsimError` for a request that could never fit on it.

    Where the record says how many prompt tokens were found in the prefix cache, as many are not computed at
    admission; they still take blocks of their own.
    """
    table = run.requests
    names = ("request_id", "prompt_tokens", "output_tokens", "ready_at")
    workflows = []
    for request_id, prompt, output, ready_at in zip(*(table[name].tolist() for name in names), strict=True):
        if fit(spec, prompt, output) < output:
            kv_tokens = (spec.num_kv_blocks - 1) * spec.block_tokens
            raise ChimsimError(
                f"{run.source}: request {request_id} ({prompt} prompt + {output} output tokens) does not fit the "
                f"engine (max_model_len {spec.max_model_len}, KV memory for {kv_tokens} tokens), and yet it was "
                "served: give the run's own settings (--engine-settings, --num-kv-tokens, --max-model-len)"
            )
        only = Run((Stage("request", prompt, output),))
        workflows.append(Workflow(request_id, "measured", {spec.model: only}, arrival_s=ready_at))
    given = np.nan_to_num(table["cached_tokens"].to_numpy(dtype=np.float64)).astype(int).tolist()
    engines: list[_WatchedEngine] = []

    def engine_class(spec: EngineSpec) -> Engine:
        engines.append(_WatchedEngine(spec, given))
        return engines[-1]

    trace, cluster, policy = Trace("measured", tuple(workflows)), Cluster("validation", (spec,)), Fcfs()
    began = perf_counter()
    result = simulate(trace, cluster, policy, queue="engine", engine_class=engine_class)
    simulation_s = perf_counter() - began
    columns = ["prompt_tokens", "output_tokens", "cached_tokens", *TIMES, "preemptions"]
    requests = result.requests[columns].copy()
    requests.insert(0, "request_id", table["request_id"].to_numpy())
    load = pd.DataFrame(engines[0].log, columns=["time_s", "running", "kv_used_fraction"])
    return Replay(requests, load, simulation_s)


class _WatchedEngine(Engine):
    """The engine as it is, with a log of what it holds; ``given`` are cached tokens by workflow."""

    def __init__(self, spec: EngineSpec, given: Sequence[int]) -> None:
        super().__init__(spec)
        if any(given):
            self.kv = _RecordedHits(self.kv, given)
        self.log: list[tuple[float, int, float]] = []

    def start(self, now: float) -> float | None:
        end_at = super().start(now)
        self.log.append((now, self.running, self.kv_used_fraction))
        return end_at

    def finish(self) -> list[EngineRequest]:
        now = self.end_at
        done = super().finish()
        self.log.append((now, self.running, self.kv_used_fraction))
        return done


class _RecordedHits(KVCache):
    """A prefix cache that finds at least as many tokens of a request as the record says.

    Who they were shared with is not known, so that each request pays for its blocks itself.
    """

    def __init__(self, cache: KVCache, given: Sequence[int]) -> None:
        super().__init__(cache.num_blocks, cache.block_tokens, caching=cache.caching)
        self._given = given
        self._resident = 0

    def lookup(self, print_: Footprint, known_tokens: int) -> tuple[int, int]:
        hits, free = super().lookup(print_, known_tokens)
        self._resident = hits
        owner = print_.owner
        assert isinstance(owner, int)
        limit = (known_tokens - 1) // self.block_tokens
        recorded = min(self._given[owner] // self.block_tokens, limit)
        extra = max(recorded - hits, 0)
        return hits + extra, free + extra

    def admit(self, print_: Footprint, hits: int) -> None:
        super().admit(print_, self._resident)
        self.allocate(hits - self._resident)
        print_.blocks = hits


def compare(run: MeasuredRun, simulated: Replay, timeseries: pd.DataFrame | None = None) -> Comparison:
    """Hold a replay against its run. ``timeseries`` is a measured load whose time 0 is the first ``ready_at``."""
    measured, replayed = run.requests, simulated.requests
    real, ours = request_times(measured), request_times(replayed)
    absent = {name: ABSENT[name] for name in METRICS if not np.isfinite(real[name]).any()}
    load = _load(measured, simulated, timeseries)
    figures = {
        "requests": len(measured),
        "left_out": dict(run.left_out),
        "absent": absent,
        "totals": {name: _pair(value, _totals(replayed)[name]) for name, value in _totals(measured).items()},
        "metrics": {name: _statistics(real[name], ours[name]) for name in METRICS if name not in absent},
        "per_request": {name: _per_request(name, real[name], ours[name]) for name in METRICS if name not in absent},
        "worst": _worst(measured, real["e2el_ms"], ours["e2el_ms"]),
        "preemptions": {
            "measured": None,
            "simulated": int(replayed["preemptions"].sum()),
            "simulated_requests": int((replayed["preemptions"] > 0).sum()),
        },
        "cached_tokens": _cached(measured, replayed),
        "load": {name: _load_figures(load, name) for name in LOAD},
    }
    requests = measured[["request_id", "prompt_tokens", "output_tokens"]].assign(
        **{f"measured_{name}": real[name] for name in METRICS},
        **{f"simulated_{name}": ours[name] for name in METRICS},
    )
    return Comparison(figures, requests, load)


def request_times(requests: pd.DataFrame) -> dict[str, Floats]:
    """Queue time, TTFT, TPOT and E2E latency of each request, NaN where a stamp is missing."""
    ready, admitted, first, end = (requests[name].to_numpy(dtype=np.float64) for name in TIMES)
    tokens = requests["output_tokens"].to_numpy(dtype=np.float64)
    gaps = np.where(tokens > 1, tokens - 1, np.nan)
    return {
        "queue_time_s": admitted - ready,
        "ttft_ms": 1000 * (first - ready),
        "tpot_ms": 1000 * (end - first) / gaps,
        "e2el_ms": 1000 * (end - ready),
    }


def _totals(requests: pd.DataFrame) -> dict[str, float]:
    makespan_s = float(requests["finished_at"].max() - requests["ready_at"].min())
    output, prompt = float(requests["output_tokens"].sum()), float(requests["prompt_tokens"].sum())
    amounts = {
        "request_throughput": float(len(requests)),
        "output_throughput": output,
        "total_token_throughput": output + prompt,
    }
    return {"makespan_s": makespan_s, **{name: amount / makespan_s for name, amount in amounts.items()}}


def _pair(measured: float, simulated: float) -> dict[str, float | None]:
    error = 100 * (simulated / measured - 1) if measured > 0 else None
    return {"measured": measured, "simulated": simulated, "error_percent": error}


def _statistics(measured: Floats, simulated: Floats) -> dict[str, dict[str, float | None]]:
    """Of the requests that have the number on both sides."""
    both = np.isfinite(measured) & np.isfinite(simulated)
    values = []
    for side in (measured[both], simulated[both]):
        values.append([float(side.mean()), *(float(q) for q in np.quantile(side, (0.5, 0.9, 0.99)))])
    return {name: _pair(*pair) for name, *pair in zip(STATISTICS, *values, strict=True)}


def relative_errors(measured: Floats, simulated: Floats) -> Floats:
    """simulated / measured - 1 in percent, NaN where nothing was measured."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(measured > 0, 100 * (simulated / measured - 1), np.nan)


def _per_request(name: str, measured: Floats, simulated: Floats) -> dict[str, float | int | None]:
    """Distribution of the error of each request.

    A queue time can be next to nothing, which makes its relative error arbitrary: there only the difference counts.
    """
    both = np.isfinite(measured) & np.isfinite(simulated)
    difference = np.abs(simulated[both] - measured[both])
    figures: dict[str, float | int | None] = {
        "requests": int(both.sum()),
        "mean_absolute_difference": float(difference.mean()),
        "p99_absolute_difference": float(np.quantile(difference, 0.99)),
    }
    errors = relative_errors(measured, simulated)
    errors = errors[np.isfinite(errors)]
    if name != "queue_time_s" and len(errors):
        size = np.abs(errors)
        figures |= {
            "mean_error_percent": float(errors.mean()),
            "mean_absolute_percent": float(size.mean()),
            **{f"p{q}_absolute_percent": float(np.quantile(size, q / 100)) for q in (50, 90, 99)},
            "max_absolute_percent": float(size.max()),
        }
    return figures


def _worst(requests: pd.DataFrame, measured_ms: Floats, simulated_ms: Floats) -> list[dict[str, Any]]:
    """The requests whose latency is furthest off, in percent."""
    errors = np.nan_to_num(relative_errors(measured_ms, simulated_ms))
    rows = []
    for index in np.argsort(-np.abs(errors), kind="stable")[:WORST]:
        request = requests.iloc[int(index)]
        rows.append(
            {
                "request_id": str(request["request_id"]),
                "ready_at": float(request["ready_at"]),
                "prompt_tokens": int(request["prompt_tokens"]),
                "output_tokens": int(request["output_tokens"]),
                "measured_e2el_ms": float(measured_ms[index]),
                "simulated_e2el_ms": float(simulated_ms[index]),
                "error_percent": float(errors[index]),
            }
        )
    return rows


def _cached(measured: pd.DataFrame, simulated: pd.DataFrame) -> dict[str, int | None]:
    known = measured["cached_tokens"].notna()
    return {
        "measured": int(measured.loc[known, "cached_tokens"].sum()) if known.any() else None,
        "simulated": int(simulated["cached_tokens"].sum()),
    }


def _load(measured: pd.DataFrame, simulated: Replay, timeseries: pd.DataFrame | None) -> pd.DataFrame:
    """Both loads at the instants of the time series, or evenly over the run.

    Without a time series the measured counts follow from the requests' own stamps (a preempted request counts as
    running); KV use does not.
    """
    if timeseries is not None:
        times = timeseries["time_s"].to_numpy(dtype=np.float64)
        real = {
            name: timeseries[name].to_numpy(dtype=np.float64) for name in ("running", "waiting", "kv_used_fraction")
        }
        real["in_system"] = real["running"] + real["waiting"]
    else:
        end = max(float(measured["finished_at"].max()), float(simulated.requests["finished_at"].max()))
        times = np.linspace(0.0, end, SAMPLES)
        real = {"in_system": _present(measured, "ready_at", "finished_at", times)}
        nothing = np.full(len(times), np.nan)
        known = measured["admitted_at"].notna().all()
        real["running"] = _present(measured, "admitted_at", "finished_at", times) if known else nothing
        real["waiting"] = real["in_system"] - real["running"]
        real["kv_used_fraction"] = nothing
    log = simulated.load
    at = log["time_s"].to_numpy(dtype=np.float64)
    latest = np.searchsorted(at, times, side="right") - 1
    running = np.where(latest >= 0, log["running"].to_numpy(dtype=np.float64)[latest], 0.0)
    in_system = _present(simulated.requests, "ready_at", "finished_at", times)
    ours = {
        "in_system": in_system,
        "running": running,
        "waiting": in_system - running,
        "kv_used_fraction": np.interp(times, at, log["kv_used_fraction"].to_numpy(dtype=np.float64), left=0.0),
    }
    return pd.DataFrame(
        {
            "time_s": times,
            **{f"measured_{name}": real[name] for name in LOAD},
            **{f"simulated_{name}": ours[name] for name in LOAD},
        }
    )


def _present(requests: pd.DataFrame, since: str, until: str, times: Floats) -> Floats:
    """How many requests are past one of their stamps and not past another at each of the times."""
    came, went = (np.sort(requests[name].to_numpy(dtype=np.float64)) for name in (since, until))
    count = np.searchsorted(came, times, side="right") - np.searchsorted(went, times, side="right")
    return count.astype(np.float64)


def _load_figures(load: pd.DataFrame, name: str) -> dict[str, float | None]:
    measured, simulated = (load[f"{side}_{name}"].to_numpy(dtype=np.float64) for side in ("measured", "simulated"))
    known = np.isfinite(measured)
    if not known.any():
        return {"mean_measured": None, "mean_simulated": float(simulated.mean()), "mean_absolute_difference": None}
    return {
        "mean_measured": float(measured[known].mean()),
        "mean_simulated": float(simulated[known].mean()),
        "mean_absolute_difference": float(np.abs(simulated[known] - measured[known]).mean()),
    }
