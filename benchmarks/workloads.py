"""What `benchmarks/speed.py` replays: scenarios, each a cluster, rates, sizes and a trace, written where none ships."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SEED = 0
FULL_CALLS, FULL_LOAD_CALLS = 1_000_000, 100_000
PEERS_PROMPT_TOKENS, PEERS_OUTPUT_TOKENS, PEERS_SIGMA, PEERS_MOST_TOKENS = 500, 300, 0.6, 4096
"""Means of the log-normal lengths, the standard deviation of their logarithms, and where both are cut."""
MOONCAKE = ROOT.parent / "shared" / "data" / "mooncake" / "conversation_trace.jsonl.gz"
MOONCAKE_CALLS = 12_031
MOONCAKE_SOURCE = "github.com/kvcache-ai/Mooncake: FAST25-release/traces/conversation_trace.jsonl"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster and what comes to it; ``rates`` are in workflows a second, None for the trace's own arrivals.

    ``trace`` gives the name of a trace of at least so many calls, or writes one into the folder and gives its path.
    """

    about: str
    combo: str
    slots: int
    calls: tuple[int, ...]
    rates: tuple[float | None, ...]
    trace: Callable[[Path, int], str]
    oversize: str = "error"
    plausible: bool = False
    """print times and hits, which those who know other simulators can judge"""

    def job(self, folder: Path, policy: str, calls: int, rps: float | None) -> dict[str, Any]:
        """What `benchmarks/measure.py` is to do."""
        return {
            "trace": self.trace(folder, calls), "combo": self.combo, "slots": self.slots, "policy": policy,
            "calls": calls, "rps": rps, "seed": SEED, "oversize": self.oversize,
        }  # fmt: skip


def scenarios(full: bool, data: Path) -> dict[str, Scenario]:
    """All of them by name; ``data`` is Mooncake's file."""
    apps = "the shipped trace apps on qwen1.5b+7b, 64 slots an engine"
    return {
        "growth": Scenario(
            f"against the number of calls: {apps}",
            "qwen1.5b+7b",
            64,
            (10_000, 100_000, *([FULL_CALLS] if full else [])),
            (6.0,),
            _apps,
        ),
        "load": Scenario(
            f"against the load: {apps}",
            "qwen1.5b+7b",
            64,
            (FULL_LOAD_CALLS if full else 10_000,),
            (1.0, 3.0, 6.0, 12.0, 30.0),
            _apps,
        ),
        "peers": Scenario(
            "the workload of other simulators: single calls, Poisson, on qwen7bx2, 128 slots an engine;\n"
            f"log-normal lengths (sigma {PEERS_SIGMA}, at most {PEERS_MOST_TOKENS:,}), means of {PEERS_PROMPT_TOKENS} "
            f"prompt and {PEERS_OUTPUT_TOKENS} output tokens, seed {SEED}",
            "qwen7bx2",
            128,
            (2_000, 20_000),
            (4.0, 8.0),
            _peers,
            plausible=True,
        ),
        "mooncake": Scenario(
            "Mooncake's conversation trace with its own arrivals and block hashes, on llama8bx24, 16 slots an engine;\n"
            "what is longer than the engine's max_model_len or KV memory would be clipped",
            "llama8bx24",
            16,
            (MOONCAKE_CALLS,),
            (None,),
            lambda folder, calls: _mooncake(folder, calls, data),
            oversize="clip",
            plausible=True,
        ),
    }


def _apps(folder: Path, calls: int) -> str:
    return "apps"


def _peers(folder: Path, calls: int) -> str:
    from chimsim.config import combo_models

    draw = np.random.default_rng(SEED)

    def lengths(mean: float) -> Iterator[int]:
        drawn = draw.lognormal(log(mean) - PEERS_SIGMA**2 / 2, PEERS_SIGMA, calls)
        return iter(np.clip(np.rint(drawn), 1, PEERS_MOST_TOKENS).astype(int).tolist())

    (model,) = combo_models("qwen7bx2")
    pairs = zip(lengths(PEERS_PROMPT_TOKENS), lengths(PEERS_OUTPUT_TOKENS), strict=True)
    rows = (
        {
            "workflow_id": f"call-{number:06d}",
            "workload": "peers",
            "runs": {model: {"stages": [{"name": "call", "prompt_tokens": prompt, "output_tokens": output}]}},
        }
        for number, (prompt, output) in enumerate(pairs)
    )
    return _written(folder / f"peers-{calls}.jsonl", model, rows)


def _mooncake(folder: Path, calls: int, data: Path) -> str:
    from chimsim.config import combo_models
    from traces import to_dict
    from traces.readers import import_trace

    (model,) = combo_models("llama8bx24")
    path = folder / f"mooncake-{calls}.jsonl"
    if path.exists():
        return str(path)
    trace = import_trace(data, "mooncake", [model], limit=calls).trace
    return _written(path, model, map(to_dict, trace.workflows))


def _written(path: Path, model: str, rows: Iterator[dict[str, Any]]) -> str:
    """Write the rows, in a form that old versions read; chimera wants a confidence, and of one model any will do."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({**row, "confidence": {model: 1.0}}) + "\n")
    return str(path)
