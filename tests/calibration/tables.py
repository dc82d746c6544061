"""Operation tables made from known times, in the current format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

BLOCK_US = {"layernorm": 2.0, "qkv_proj": 30.0, "rotary_emb": 3.0, "o_proj": 20.0, "gate_up_proj": 90.0, "act_fn": 4.0,
            "down_proj": 50.0}  # fmt: skip
SIZES = (1, 2, 4, 8, 16, 64, 256, 1024, 2048)
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (16, 64, 256, 1024, 4096)
CHUNKS = (16, 64, 256, 1024)


def block_us(tokens: int) -> float:
    """One layer, attention left out: two norms, and all of it growing by the token."""
    return (sum(BLOCK_US.values()) + BLOCK_US["layernorm"]) * (1 + 0.01 * tokens)


def once_us(tokens: int) -> float:
    return 7.0 + 0.02 * tokens


def rows_us(rows: int) -> float:
    return 300.0 + 25.0 + 0.5 * rows


def decode_us(n: int, context: int) -> float:
    return 5.0 + 0.7 * n + 0.004 * n * context


def chunk_us(tokens: int, context: int) -> float:
    return 6.0 + 1e-4 * tokens * tokens + (0.01 + 2e-4 * tokens) * context


def mixed_us(n: int, context: int, tokens: int) -> float:
    return 3.0 * n + 0.009 * n * context + 0.001 * n * tokens


def write_tables(folder: Path, meta: str = "", skew: bool = False, attention: Callable[..., float] = decode_us) -> Path:
    """The files of one folder ``tp1`` and the ``meta.yaml`` above it."""
    folder.mkdir(parents=True, exist_ok=True)
    dense = [(name, t, us * (1 + 0.01 * t)) for name, us in BLOCK_US.items() for t in SIZES]
    dense += [("embedding", t, 5.0 + 0.02 * t) for t in SIZES] + [("final_layernorm", t, 2.0) for t in SIZES]
    pd.DataFrame(dense, columns=["layer", "tokens", "time_us"]).to_csv(folder / "dense.csv", index=False)
    rows = [("lm_head", n, 300.0 + 0.5 * n) for n in (1, 64, 256)] + [("sampler", n, 25.0) for n in (1, 64, 256)]
    pd.DataFrame(rows, columns=["layer", "sequences", "time_us"]).to_csv(folder / "per_sequence.csv", index=False)
    cells = [(0, 0, n, d, attention(n, d)) for n in BATCHES for d in CONTEXTS]
    cells += [(c, k, 0, 0, chunk_us(c, k)) for c in CHUNKS for k in (0, *CONTEXTS)]
    cells += [
        (c, k, n, d, chunk_us(c, k) + mixed_us(n, d, c))
        for c in CHUNKS for k in (0, 256, 4096) for n in BATCHES for d in CONTEXTS
    ]  # fmt: skip
    columns = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"]
    pd.DataFrame(cells, columns=columns).to_csv(folder / "attention.csv.gz", index=False)
    if skew:
        labels = [
            (pc, f"n<={n}", rate, "kvB<=4k", "kp=0", share, 2)
            for pc, share in ((0, 0.2), (512, 0.4)) for n in (8, 32) for rate in ("sr<=15%", "sr<=40%")
        ]  # fmt: skip
        labels.append((0, "n<=8", "sr>70%", "kvB<=4k", "kp=0", 9.0, 2))
        names = ["pc", "n_label", "skew_rate_label", "kv_big_label", "kp_label", "alpha", "n_samples"]
        pd.DataFrame(labels, columns=names).to_csv(folder / "skew_fit.csv", index=False)
    if meta:
        (folder.parent / "meta.yaml").write_text(meta, encoding="utf-8")
    return folder


META = """vllm_version: 0.19.0
gpu: NVIDIA GeForce RTX 4090
model: meta-llama/Llama-3.1-8B
engine_effective:
  max_num_seqs: 256
skew_fit:
  enabled: {enabled}
"""
