"""What a prediction costs: the router and the length forest one after the other, as a workflow's first call has them.

Both learn from four fifths of each shipped trace, all six models, and are timed on first calls of the rest, in one
process on one core:

    python benchmarks/predictors.py
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TRACES = ("apps", "maths")
BACKENDS = ("tfidf", "forest")
BATCHES = (1, 32)
ROUNDS = 200
AIM_MS = 1.0


def one_core() -> None:
    """Keep this process to one core, before anything starts threads of its own."""
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    if hasattr(os, "sched_setaffinity"):  # Linux alone has it
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def measure(name: str) -> None:
    """Print a row for each router backend beside the forest, on one trace."""
    import numpy as np

    from calibration.length_model import save_length, train_length
    from calibration.router_model import learning_set, save_router, train_router
    from calibration.rows import calls_of, split, task_text
    from calibration.saved import training_record
    from traces import load_trace

    trace = load_trace(name)
    models, parts = trace.models, split(trace)
    calls = [calls_of(workflow, models[0], models)[0] for workflow in parts.test]
    texts = [task_text(workflow) or "" for workflow in parts.test]
    began = time.perf_counter()
    forest = train_length(parts.train, models)
    forest_s = time.perf_counter() - began
    record = training_record(trace, parts, models, 0, 0.2)
    for backend in BACKENDS:
        began = time.perf_counter()
        router = train_router(learning_set(parts.train, models), backend=backend)
        router_s = time.perf_counter() - began
        with tempfile.TemporaryDirectory() as folder:
            kept: dict[str, Any] = {
                "training": record,
                "scores": {},
                "cost_ms": {"per_call": 0.0},
                "made_by": "benchmark",
            }
            mb = [
                saved.size_bytes / 1e6
                for saved in (
                    save_router(Path(folder, "router"), router, **kept),
                    save_length(Path(folder, "length"), forest, **kept),
                )
            ]
        print(f"{name:<6} {backend:<7}{router_s:>9.1f}{forest_s:>8.1f}{mb[0]:>10.1f}{mb[1]:>8.1f}", end="")
        for batch in BATCHES:
            # CPU seconds of the router and of the forest, wall-clock seconds of both; the first rounds warm up
            taken = np.zeros((ROUNDS, 3))
            for number in range(-3, ROUNDS):
                at = [(number * batch + offset) % len(calls) for offset in range(batch)]
                some, read = [calls[index] for index in at], [texts[index] for index in at]
                wall, start = time.perf_counter(), time.process_time()
                router.predict_proba(read)
                between = time.process_time()
                forest.predict(some)
                if number >= 0:
                    end = time.process_time()
                    taken[number] = between - start, end - between, time.perf_counter() - wall
            alone, both = np.median(taken, axis=0), np.percentile(taken[:, :2].sum(axis=1), (50, 99))
            ms = np.array([*alone[:2], *both, alone[2]]) * 1e3 / batch
            print("".join(f"{value:>7.2f}" for value in ms), end="", flush=True)
            if batch == 32:
                print("  met" if ms[2] <= AIM_MS else "  missed")


def main() -> None:
    one_core()
    sys.path.insert(0, str(ROOT))
    print(f"CPU ms a call on one core, p50 and p99 of {ROUNDS} batches; wall: p50 by the clock, both")
    print(f"aim: both, batches of 32, p50 of at most {AIM_MS:g} ms")
    print(f"{'':<14}{'training s':>17}{'size MB':>18}" + "".join(f"{f'batch {batch}':>35}" for batch in BATCHES))
    heads = "".join(f"{head:>7}" for head in ("router", "forest", "both", "p99", "wall"))
    print(f"{'trace':<7}{'router':<7}{'router':>9}{'forest':>8}{'router':>10}{'forest':>8}" + heads * 2 + "  aim")
    for name in TRACES:
        measure(name)


if __name__ == "__main__":
    main()
