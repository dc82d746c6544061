"""One simulation, timed in a process of its own: the part of `benchmarks/speed.py` that runs once for each number.

    python benchmarks/measure.py '{"trace": "apps", "combo": "qwen1.5b+7b", "slots": 64, ...}'

prints a JSON object. It uses only what older versions of the project have too, so that PYTHONPATH can name a checkout
of one. It knows neither scenarios nor tables.
"""

from __future__ import annotations

import gc
import hashlib
import heapq
import json
import resource
import sys
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

YARDSTICK_CALLS, YARDSTICK_RUNS = 20_000, 3
GAP_S, WAITS_S = 0.07, (0.01, 0.2, 3.0)
"""Of the yardsticks' calls: from one to the next, and what each of them waits for."""


def resident_mb() -> float:
    """The memory of this process now, in MB (1e6 bytes); from here on `peak_mb` looks at what comes, where it can."""
    with suppress(OSError):  # Linux alone has these files
        Path("/proc/self/clear_refs").write_text("5")
        return _status_mb("VmRSS")
    return peak_mb()


def peak_mb() -> float:
    """The most memory that this process has had, in MB."""
    with suppress(OSError):
        return _status_mb("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def _status_mb(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise OSError(f"/proc/self/status has no {key}")


def bare_simpy(calls: int) -> None:
    """SimPy alone: one process a call, which waits three times; no batching, no policy, no records."""
    import simpy

    env = simpy.Environment()

    def call() -> Generator[simpy.Event, None, None]:
        for wait_s in WAITS_S:
            yield env.timeout(wait_s)

    def source() -> Generator[simpy.Event, None, None]:
        for _ in range(calls):
            env.process(call())
            yield env.timeout(GAP_S)

    env.process(source())
    env.run()


def bare_heapq(calls: int) -> None:
    """The same arrivals and waits out of a heap of tuples: the least that keeping events in order costs in Python."""
    heap = [(0.0, 0, 0)]
    number, left = 0, calls
    while heap:
        now, _, waited = heapq.heappop(heap)
        if waited == 0 and left:
            left -= 1
            number += 1
            heapq.heappush(heap, (now + GAP_S, number, 0))
        if waited < len(WAITS_S):
            number += 1
            heapq.heappush(heap, (now + WAITS_S[waited], number, waited + 1))


def calls_a_second(loop: Callable[[int], None]) -> float:
    """Calls a CPU second of a yardstick, without garbage collection, as `simulate` runs: the median of some runs."""
    times = []
    gc.disable()
    for _ in range(YARDSTICK_RUNS):
        started = time.process_time()
        loop(YARDSTICK_CALLS)
        times.append(time.process_time() - started)
    gc.enable()
    return YARDSTICK_CALLS / median(times)


def digest(*frames: pd.DataFrame) -> str:
    """SHA-256 of the frames' values by column name; how a column is stored (codes, widths) is not in it."""
    from pandas.util import hash_pandas_object

    found = hashlib.sha256()
    for frame in frames:
        for name in sorted(map(str, frame)):
            found.update(name.encode())
            found.update(hash_pandas_object(frame[name], index=False).to_numpy().tobytes())
    return found.hexdigest()


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Simulate what is asked for and say what it took.

    ``job``: trace (name or path), combo, slots, policy, about how many calls, rps (None: the trace's own arrivals),
    seed, oversize. Loading the trace and building the predictor are not in the times.
    """
    import chimsim
    from chimsim.config import combo_cluster
    from chimsim.predictors import build_predictor
    from chimsim.simulation import simulate
    from traces import load_trace

    trace = load_trace(job["trace"])
    cluster = combo_cluster(job["combo"], max_batch_size=job["slots"])
    predictor = build_predictor(trace, router="trace", models=cluster.models)
    lengths = [len(workflow.runs[model].stages) for workflow in trace.workflows for model in cluster.models]
    workflows = max(1, round(job["calls"] * len(lengths) / sum(lengths)))
    if job["rps"] is None:
        workflows = min(workflows, len(trace.workflows))
    gc.collect()
    before_mb = resident_mb()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    result = simulate(
        trace, cluster, job["policy"], rps=job["rps"], seed=job["seed"], workflows=workflows, predictor=predictor,
        oversize=job["oversize"],
    )  # fmt: skip
    # inside of the times, in case that a version makes the frames when they are asked for
    requests, ended = result.requests, result.workflows
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    most_mb = peak_mb()
    summary = result.summary
    calls = len(requests)
    clipped = 0
    if job["oversize"] == "clip":
        # of workflows of one call, which all are that may be clipped here
        asked = {workflow.workflow_id: workflow.runs[cluster.models[0]].stages[0] for workflow in trace.workflows}
        done = requests[requests["status"] == "completed"]
        given = zip(done["workflow_id"].astype(str), done["output_tokens"], strict=True)
        clipped = sum(tokens < asked[name].output_tokens for name, tokens in given)
    return {
        "checkout": str(Path(chimsim.__file__).resolve().parents[1]),
        "calls": calls,
        "workflows": workflows,
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "simulated_s": float(result.engines["makespan_s"].max()),
        "steps": int(result.engines["steps"].sum()),
        "prompt_tokens": int(requests["prompt_tokens"].sum()),
        "output_tokens": int(requests["output_tokens"].sum()),
        "before_mb": before_mb,
        "peak_mb": most_mb,
        "bytes_a_call": (most_mb - before_mb) * 1e6 / calls,
        "mean_ttft_ms": summary["mean_ttft_ms"],
        "mean_tpot_ms": summary["mean_tpot_ms"],
        "mean_e2el_ms": summary["mean_e2el_ms"],
        "prefix_hit_rate": summary["prefix_hit_rate"],
        "preemptions": int(result.engines["preemptions"].sum()),
        "yields": int(result.engines["yields"].sum()),
        "rejected": int((requests["status"] == "rejected").sum()),
        "clipped": int(clipped),
        "digest": digest(requests, ended),
        "simpy_calls_s": calls_a_second(bare_simpy),
        "heapq_calls_s": calls_a_second(bare_heapq),
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
