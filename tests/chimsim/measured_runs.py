"""Measured runs made by our own simulator, written in each of the formats that are read."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from chimsim.config import EngineSpec
from chimsim.measured import Record, write_records
from chimsim.simulation import simulate
from tests.chimsim.worlds import cluster, engine, single_stage

META = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "num_gpu_blocks": 401, "block_size": 16}


def busy_engine() -> EngineSpec:
    """Small enough for queues and preemptions; its settings are `META`'s."""
    return engine(slots=8, kv_blocks=400, max_num_batched_tokens=512)


def made_run(spec: EngineSpec | None = None, count: int = 60, rps: float = 4.0) -> pd.DataFrame:
    """The requests of a simulated run that queues: the frame of `simulate`."""
    draw = random.Random(3)
    lengths = [(draw.randrange(20, 1500), draw.randrange(1, 200)) for _ in range(count)]
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += draw.expovariate(rps)
    return simulated(lengths, times, spec or busy_engine())


def simulated(lengths: Sequence[tuple[int, int]], times: Sequence[float], spec: EngineSpec) -> pd.DataFrame:
    """The requests of these lengths and arrivals on one engine."""
    return simulate(single_stage(lengths, times), cluster(spec), "fcfs", queue="engine").requests


def records_of(requests: pd.DataFrame, shift_s: float = 0.0) -> list[Record]:
    """The frame's requests as records of a live run that began ``shift_s`` before the first."""
    return [
        Record(
            request_id=f"r{row['request_id']}",
            model="A",
            engine="http://one",
            submitted_at=row["ready_at"] + shift_s,
            prompt_tokens=row["prompt_tokens"],
            output_tokens=row["output_tokens"],
            cached_tokens=row["cached_tokens"],
            queued_s=row["admitted_at"] - row["ready_at"],
            first_token_at=row["first_token_at"] + shift_s,
            last_token_at=row["finished_at"] + shift_s,
        )
        for row in requests.to_dict("records")
    ]


def own(requests: pd.DataFrame, path: Path) -> None:
    """chimsim's own format."""
    write_records(path, records_of(requests, 2.5))


def llmservingsim(requests: pd.DataFrame, path: Path, shift_s: float = 100.0, lines: int | None = None) -> None:
    """LLMServingSim's bench: client stamps are dates, engine stamps of another clock."""
    rows = [
        {
            "request_id": f"bench-{row['request_id']}",
            "input_toks": row["prompt_tokens"],
            "output_toks": row["output_tokens"],
            "arrival_time": row["ready_at"] + 2.0**20,
            # the engine looks at its inbox between steps
            "queued_ts": min(row["ready_at"] + 0.01 * (row["request_id"] % 3), row["admitted_at"]) + shift_s,
            "scheduled_ts": row["admitted_at"] + shift_s,
            "first_token_ts": row["first_token_at"] + shift_s,
            "last_token_ts": row["finished_at"] + shift_s,
        }
        for row in requests.to_dict("records")[:lines]
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def bench_result(requests: pd.DataFrame, *, latencies: bool = False) -> dict[str, Any]:
    """A result of vllm bench serve with detailed lists; its newer versions have the latencies too."""
    result: dict[str, Any] = {
        "model_id": "org/A-Instruct",
        "request_throughput": 1.0,
        "input_lens": requests["prompt_tokens"].tolist(),
        "output_lens": requests["output_tokens"].tolist(),
        "ttfts": (requests["first_token_at"] - requests["ready_at"]).tolist(),
        "itls": [],
        "start_times": (requests["ready_at"] + 1234.5).tolist(),
        "errors": [""] * len(requests),
    }
    spans = (requests["finished_at"] - requests["first_token_at"]).tolist()
    for tokens, span in zip(result["output_lens"], spans, strict=True):
        # how many chunks the client saw is not how many tokens there were
        chunks = min(tokens - 1, 7)
        result["itls"].append([span / chunks] * chunks)
    if latencies:
        result["latencies"] = (requests["finished_at"] - requests["ready_at"]).tolist()
    return result


def bench(requests: pd.DataFrame, path: Path, **kinds: bool) -> None:
    """The result as a file."""
    path.write_text(json.dumps(bench_result(requests, **kinds)), encoding="utf-8")
