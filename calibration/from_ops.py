"""Makes an engine profile from operation tables: the fit, what the tables do not say, and where each number is from.

It writes nothing and prints nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from calibration.curves import DecodeCurve, MixedGrid, RowCurve
from calibration.datasheets import DataSheet, Link, data_sheet
from calibration.engine_profile import EngineProfile
from calibration.figures import FIELDS, ProfileError, Provenance
from calibration.fit import Fit, Residuals, attention_residuals, fit_chunks, fit_operations, thinned
from calibration.operations import OperationTables
from calibration.scaling import (
    A6000,
    BYTES_PER_VALUE,
    MIXED_CONTEXT_FACTOR,
    RUNTIME_BYTES,
    Architecture,
    card_origins,
    kv_tokens,
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the tables do not say, where it is given; None is worked out from data sheets, or is vLLM's default."""

    gpu: str | None = None
    num_kv_tokens: int | None = None
    memory_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_tokens: int = 16
    allreduce_call_s: float | None = None
    link_bytes_per_s: float | None = None


def capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The CUDA graph sizes that vLLM captures by default."""
    top = min(2 * max_num_seqs, 512)
    sizes = (1, 2, 4, *range(8, min(top, 256) + 1, 8), *range(272, top + 1, 16))
    return tuple(size for size in sizes if size <= top)


def operations_profile(tables: OperationTables, card: Architecture, settings: Settings) -> tuple[EngineProfile, Fit]:
    """The profile of the tables' model on their GPU, with its fit. Raises `ProfileError` naming what is missing."""
    gpu = settings.gpu or tables.gpu
    if not gpu:
        raise ProfileError(f"{tables.folder}: the tables do not name their GPU; give --gpu")
    sheet = data_sheet(gpu)
    fit = _fit_v0(tables, card, sheet) if tables.format == "v0" else fit_operations(tables, card.layers)
    numbers = dict(fit.numbers)
    origins = _fitted_origins(tables, numbers, card)
    memory_bytes = settings.memory_bytes or (sheet.memory_bytes if sheet else 0)
    numbers |= {"memory_bytes": memory_bytes, "kv_bytes_per_token": card.kv_bytes_per_token}
    origins["memory_bytes"] = ("assumed", "given" if settings.memory_bytes else "data sheet")
    numbers["num_kv_tokens"], origins["num_kv_tokens"] = _kv_memory(tables, card, settings, memory_bytes)
    numbers["max_model_len"] = settings.max_model_len or card.max_model_len
    if settings.max_model_len:
        origins["max_model_len"] = ("assumed", "given")
    for name in ("max_num_seqs", "max_num_batched_tokens", "block_tokens"):
        numbers[name] = getattr(settings, name)
        default = numbers[name] == getattr(Settings(), name)
        origins[name] = ("assumed", "vLLM default" if default else "given")
    numbers["mean_call_tokens"] = min(2000.0, float(numbers["num_kv_tokens"]))
    origins["mean_call_tokens"] = ("assumed", "our choice for prompt and output of a call; states max_batch_size")
    numbers["capture_tokens"] = capture_sizes(settings.max_num_seqs)
    origins["capture_tokens"] = (
        "assumed", "vLLM's default CUDA graph sizes: 1, 2, 4, by 8 to 256, by 16 to 512, at most 2 x max_num_seqs"
    )  # fmt: skip
    _add_allreduce(numbers, origins, tables, card, settings, sheet)
    for name in ("hidden_size", "heads", "kv_heads", "head_dim", "parameters", "block_parameters", "head_parameters"):
        numbers[name] = getattr(card, name)
    profile = EngineProfile(
        model=card.model,
        aliases=card.aliases,
        gpu=sheet.name if sheet else gpu,
        gpus=tables.tp,
        notes=" ".join((_SUM_OF_KERNELS, *(note[0].upper() + note[1:] + "." for note in tables.notes))),
        origins=tuple((name, *origin) for name, origin in origins.items()),
        **numbers,
    )
    return profile, fit


_SUM_OF_KERNELS = "Kernels of one layer were measured; a step's time is their fitted sum, with nothing for the host."


def _fitted_origins(
    tables: OperationTables, numbers: dict[str, Any], card: Architecture
) -> dict[str, tuple[Provenance, str]]:
    """Where the numbers of the fit come from; the terms that tables replace are 0 and say so."""
    kernels = f"operation tables of {tables.gpu or 'this GPU'} ({tables.version}): kernels measured, sum fitted"
    origins: dict[str, tuple[Provenance, str]] = {name: (kind, text) for name, kind, text in card_origins(card)}
    for tokens, _ in numbers["dense"]:
        origins[f"dense[{tokens}]"] = ("measured", kernels)
    for key in ("sequences", "decode", "chunk", "mixed"):
        origins[key] = ("measured", kernels)
    if tables.format == "v0":
        stream = f"{A6000.bandwidth_share} x data sheet bandwidth"
        origins["decode"] = ("scaled", f"fixed part: {kernels}; context: KV bytes a token and layer / ({stream})")
        origins["mixed"] = ("assumed", f"as decode, context times {MIXED_CONTEXT_FACTOR:g}; fits gave 1.4 to 2.7")
    for name in FIELDS:
        if name in ("sequence_s", "a0", "a1", "a2", "w0", "w1", "w2", "m0", "m1"):
            origins[name] = ("assumed", "0: a table takes its place")
    origins["host_s"] = ("assumed", "0: hidden behind the GPU by asynchronous scheduling, vLLM's default")
    return origins


def _kv_memory(
    tables: OperationTables, card: Architecture, settings: Settings, memory_bytes: int
) -> tuple[int, tuple[Provenance, str]]:
    if settings.num_kv_tokens is not None:
        return settings.num_kv_tokens, ("assumed", "given: as an engine of this kind reports it")
    if not memory_bytes or not card.kv_heads:
        raise ProfileError(
            f"{tables.folder}: operation tables do not say how much KV memory there is; give --num-kv-tokens "
            "(vLLM prints 'GPU KV cache size' when it starts), or --memory-gib and the model's --config to estimate it"
        )
    tokens = kv_tokens(card.parameters, card.kv_bytes_per_token, memory_bytes, tables.tp, settings.block_tokens)
    if tokens < settings.block_tokens:
        raise ProfileError(
            f"{card.model}: {tables.tp} x {memory_bytes / 2**30:g} GiB leave no room for KV beside the weights "
            f"({card.parameters * BYTES_PER_VALUE / 2**30:.1f} GiB); give --num-kv-tokens, or more --memory-gib"
        )
    rule = f"(0.9 x memory - weights - {RUNTIME_BYTES / 1e9:g} GB) / KV bytes a token"
    over = f", over {tables.tp} GPUs" if tables.tp > 1 else ""
    return tokens, ("scaled", f"{rule}{over}: an upper bound")


def _add_allreduce(
    numbers: dict[str, Any],
    origins: dict[str, tuple[Provenance, str]],
    tables: OperationTables,
    card: Architecture,
    settings: Settings,
    sheet: DataSheet | None,
) -> None:
    """Two ring all-reduces a layer and one after the embedding, of one hidden vector a token."""
    names = ("allreduce_base_s", "allreduce_token_s")
    if tables.tp == 1:
        numbers |= dict.fromkeys(names, 0.0)
        origins |= dict.fromkeys(names, ("assumed", "no all-reduce on one GPU"))
        return
    link = sheet.link if sheet else None
    if settings.allreduce_call_s is not None or settings.link_bytes_per_s is not None:
        if settings.allreduce_call_s is None or settings.link_bytes_per_s is None:
            raise ProfileError("--allreduce-us and --link-gb-per-s go together; give both or neither")
        link = Link(settings.allreduce_call_s, settings.link_bytes_per_s, "given")
    if link is None:
        raise ProfileError(
            f"{tables.folder}: tables of tensor parallel {tables.tp} hold no all-reduce, and how GPUs of kind "
            f"{settings.gpu or tables.gpu!r} are linked is not known; give --allreduce-us and --link-gb-per-s"
        )
    if not card.hidden_size:
        raise ProfileError(f"the all-reduce needs the hidden size of {card.model}; give --config config.json")
    calls = 2 * card.layers + 1
    moved_bytes = 2 * (tables.tp - 1) / tables.tp * card.hidden_size * BYTES_PER_VALUE
    numbers["allreduce_base_s"] = float(f"{calls * link.call_s:.4g}")
    numbers["allreduce_token_s"] = float(f"{calls * moved_bytes / link.bytes_per_s:.4g}")
    origins |= dict.fromkeys(names, ("assumed", f"{calls} ring all-reduces a step; {link.source}"))


def _fit_v0(tables: OperationTables, card: Architecture, sheet: DataSheet | None) -> Fit:
    """The older tables: kernels at vLLM's graph sizes; decode attention only as far as it can be believed.

    Its decode kernels read their context faster than the memory can (the batch shared its keys and values), so only
    what they take at short contexts is used; the context is priced at the bandwidth. Mixed steps were not timed. Times
    that fall where the work grows (tiles, noise) are held at what a smaller step took.
    """
    if sheet is None:
        raise ProfileError(f"{tables.folder}: v0 tables need the bandwidth of {tables.gpu!r}, which is not known")
    if not card.kv_heads:
        raise ProfileError(f"v0 tables need the KV heads of {card.model}; give --config config.json")
    sizes = [*capture_sizes(256), *range(576, int(tables.block.index.max()) + 1, 64)]
    measured = (tables.block * card.layers + tables.once).reindex(sizes).dropna().cummax()
    dense, dense_residuals = thinned("dense", "tokens", measured)
    rows, row_residuals = thinned("sequences", "sequences", tables.rows.reindex(capture_sizes(128)).dropna().cummax())
    attention = tables.attention
    alone = attention[(attention["chunk"] > 0) & (attention["batch"] == 0)].reset_index(drop=True)
    pure = attention[(attention["chunk"] == 0) & (attention["batch"] > 0)]
    layer_bytes = card.kv_bytes_per_token / card.layers / tables.tp
    stream_s = layer_bytes / (A6000.bandwidth_share * sheet.bandwidth_bytes_per_s)
    decode = _v0_decode(pure, stream_s)
    chunk = fit_chunks(alone, np.zeros(len(alone)))
    ends = (1, 16384)
    grid = tuple(
        tuple(float(f"{base_s + MIXED_CONTEXT_FACTOR * stream_s * n * context:.5g}") for context in ends)
        for n, base_s in zip(decode.batch, decode.base_s, strict=True)
    )
    mixed = MixedGrid(decode.batch, ends, grid, (0.0,) * len(decode.batch), 0.0)
    numbers: dict[str, Any] = {
        "layers": card.layers,
        "dense": dense,
        "sequences": RowCurve(*zip(*rows, strict=True)),
        "decode": decode,
        "chunk": chunk,
        "mixed": mixed,
    }
    residuals: tuple[Residuals, ...] = (
        dense_residuals,
        row_residuals,
        attention_residuals("prefill attention", alone, decode, chunk, mixed),
        attention_residuals("decode attention (not trusted)", pure, decode, chunk, mixed),
    )
    return Fit(numbers, residuals)


def _v0_decode(pure: pd.DataFrame, stream_s: float) -> DecodeCurve:
    """Fixed part by batch from short contexts, where the kernel's time hardly depends on them; context from bandwidth.

    Contexts under 160 are left out: from some batch size on they were launches that did nothing, 2 us whatever the
    batch. So are batches that take less than half of what a smaller one does.
    """
    rows: list[tuple[int, float, float, float]] = []
    for batch, part in pure.groupby("batch"):
        n = int(str(batch))
        if n & (n - 1):  # powers of two: in between the kernel's time steps with the ways it splits the work
            continue
        base_s = part["seconds"][part["decode_context"].between(160, 256)].median()
        smaller_s = max((row[1] for row in rows), default=0.0)
        if pd.notna(base_s) and base_s > 0.5 * smaller_s:
            rows.append((n, max(smaller_s, float(f"{base_s:.4g}")), float(f"{stream_s:.4g}"), 0.0))
    if not rows:
        raise ProfileError("v0 attention.csv has no decode batch with a context of 160 to 256; expected some")
    return DecodeCurve(*zip(*rows, strict=True))
