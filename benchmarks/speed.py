"""How fast the simulator is: LLM calls per CPU second, memory, and how both grow with the number of calls.

Replays the shipped trace ``apps`` on qwen1.5b+7b at 6 workflows a second, each policy and size in a process of its
own, and in the same process a plain SimPy loop (one process a call, three timeouts) as the yardstick:

    python benchmarks/speed.py [--calls 10000,100000] [--policy fcfs,chimera] [--full]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Generator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COMBO, SLOTS, RPS, SEED = "qwen1.5b+7b", 64, 6, 0
FULL = 1_000_000


def peak_mb() -> float:
    """The most memory this process has had, in MB (1e6 bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def plain_simpy(calls: int) -> float:
    """CPU seconds of SimPy alone: one process a call, which waits, prefills and decodes; no batching, no policy."""
    import simpy

    env = simpy.Environment()

    def call() -> Generator[simpy.Event, None, None]:
        yield env.timeout(0.01)
        yield env.timeout(0.2)
        yield env.timeout(3.0)

    def source() -> Generator[simpy.Event, None, None]:
        for _ in range(calls):
            env.process(call())
            yield env.timeout(0.07)

    env.process(source())
    started = time.process_time()
    env.run()
    return time.process_time() - started


def measure(policy: str, calls: int) -> dict[str, float]:
    """One run in this process. Loading the trace and building the predictor are not in the times."""
    from chimsim.config import combo_cluster
    from chimsim.predictors import build_predictor
    from chimsim.simulation import simulate
    from traces import load_trace

    trace = load_trace("apps")
    cluster = combo_cluster(COMBO, max_batch_size=SLOTS)
    predictor = build_predictor(trace, router="trace")
    lengths = [len(workflow.runs[model].stages) for workflow in trace.workflows for model in cluster.models]
    workflows = max(1, round(calls * len(lengths) / sum(lengths)))
    base = peak_mb()
    wall, cpu = time.perf_counter(), time.process_time()
    result = simulate(trace, cluster, policy, rps=RPS, seed=SEED, workflows=workflows, predictor=predictor)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = peak_mb()
    done = len(result.requests)
    return {
        "calls": done,
        "cpu_s": cpu,
        "wall_s": wall,
        "simulated_s": float(result.engines["makespan_s"].max()),
        "steps": int(result.engines["steps"].sum()),
        "base_mb": base,
        "peak_mb": peak,
        "simpy_s": median(plain_simpy(done) for _ in range(3)),
    }


def in_subprocess(policy: str, calls: int) -> dict[str, float]:
    """`measure` in a fresh interpreter: peak memory is of the process and never falls."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, __file__, "--policy", policy, "--calls", str(calls), "--measure"],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"benchmark of {policy} with {calls} calls failed (see above)")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def row(policy: str, found: dict[str, Any]) -> str:
    """A line of the table; the ratio is the CPU time of the simulator over that of plain SimPy for as many calls."""
    return (
        f"{policy:<10}{found['calls']:>9,}{found['cpu_s']:>9.2f}{found['calls'] / found['cpu_s']:>10,.0f}"
        f"{found['simulated_s'] / found['wall_s']:>10,.0f}{found['peak_mb']:>9.0f}"
        f"{found['calls'] / found['simpy_s']:>13,.0f}{found['cpu_s'] / found['simpy_s']:>8.1f}x"
    )


def growth(policy: str, small: dict[str, float], large: dict[str, float]) -> str:
    """How CPU time and memory grow between two sizes: 1.00 a call is linear."""
    times = large["calls"] / small["calls"]
    per_call = large["cpu_s"] / small["cpu_s"] / times
    added = (large["peak_mb"] - small["peak_mb"]) * 1e6 / (large["calls"] - small["calls"])
    return (
        f"{policy:<10}{small['calls']:>9,.0f} -> {large['calls']:>9,.0f}: CPU a call x{per_call:.2f}, "
        f"memory +{added:,.0f} bytes a call"
    )


def sizes(text: str) -> list[int]:
    """Numbers of calls, joined by commas."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"expected positive numbers of calls, found {text!r}")
    return sorted(set(found))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the speed and memory of the simulator.")
    parser.add_argument("--calls", type=sizes, default=[10_000, 100_000], help="sizes, joined by commas")
    parser.add_argument("--policy", default="fcfs,chimera", help="policies, joined by commas")
    parser.add_argument("--full", action="store_true", help=f"also {FULL:,} calls (minutes)")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.policy, args.calls[0])))
        return
    calls = sorted({*args.calls, FULL}) if args.full else args.calls
    print(f"apps on {COMBO}, {SLOTS} slots, {RPS} workflows/s, seed {SEED}; Python {sys.version.split()[0]}")
    print(
        f"{'policy':<10}{'calls':>9}{'CPU s':>9}{'calls/s':>10}{'sim s/s':>10}{'peak MB':>9}{'simpy call/s':>13}"
        f"{'ratio':>9}"
    )
    lines: list[str] = []
    for policy in args.policy.split(","):
        runs = []
        for size in calls:
            runs.append(in_subprocess(policy, size))
            print(row(policy, runs[-1]), flush=True)
        lines.extend(growth(policy, small, large) for small, large in pairwise(runs))
        lines.append(
            f"{policy:<10}before the run: {runs[0]['base_mb']:.0f} MB; "
            f"{runs[-1]['steps'] / runs[-1]['calls']:.1f} engine steps a call"
        )
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()
