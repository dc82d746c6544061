"""Reads per-operation timing tables: how long single operations of a model take on a GPU, by tokens, rows and context.

Two formats of LLMServingSim's profiler are read (github.com/casys-kaist/LLMServingSim, folder profiler): the current
one (``dense.csv``, ``per_sequence.csv``, ``attention.csv``, and ``skew_fit.csv`` and ``meta.yaml`` where they are)
and the older ``v0`` (``layers.csv``, ``attention.csv``). Files may be gzipped. It reads and checks; it fits nothing.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from calibration.figures import ProfileError, near

BLOCK_CALLS = {
    "layernorm": 2, "qkv_proj": 1, "qk_norm": 1, "rotary_emb": 1, "o_proj": 1, "gate_up_proj": 1, "act_fn": 1,
    "down_proj": 1,
}  # fmt: skip
"""Operations of one layer, and how often a layer runs each: a table's time is of one call (`qk_norm`: of both)."""

ONCE = ("embedding", "final_layernorm")
ROW_OPERATIONS = ("lm_head", "sampler")
NEEDED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
V0_BLOCK = (
    "input_layernorm", "q_proj", "k_proj", "v_proj", "rope", "o_proj", "post_layernorm", "gate_proj", "up_proj",
    "act_fn", "down_proj",
)  # fmt: skip
V0_GEMMS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
SKEW_RATES = ("sr<=5%", "sr<=15%", "sr<=40%")
"""Bins of a batch's skew rate, (mean - shortest) / (longest - shortest), that batches of prompts fall into: a few long
ones, most of them short."""


@dataclass(frozen=True)
class OperationTables:
    """One folder's tables. Times are in seconds.

    ``block`` and ``once`` are indexed by tokens: one layer's operations, attention left out, and those outside the
    layers. ``rows`` is indexed by sequences (output projection and sampling). ``attention`` has columns chunk,
    context, batch, decode_context, seconds: one layer's attention of a step with a prefill chunk of so many tokens
    after so much context (0: none) and a batch of decodes with so much context each. ``skew`` is indexed by batch,
    columns decode and mixed: how far a batch of unequal lengths is on the way from mean to longest.
    """

    folder: Path
    format: str
    model: str
    gpu: str
    tp: int
    version: str
    block: pd.Series[float]
    once: pd.Series[float]
    rows: pd.Series[float]
    attention: pd.DataFrame
    skew: pd.DataFrame | None = None
    notes: tuple[str, ...] = field(default=())


def read_tables(
    folder: Path, *, model: str | None = None, tp: int | None = None, skew: bool | None = None
) -> OperationTables:
    """The tables in ``folder`` or below it; ``model`` and ``tp`` choose where there are several.

    ``skew`` says whether ``skew_fit.csv`` counts; by default it does unless the ``meta.yaml`` beside the tables
    switches it off. Raises `ProfileError` naming file, line and column.
    """
    found = _find(folder, model, tp)
    if _file(found, "layers") is not None:
        return _read_v0(found, model, tp)
    return _read_current(found, model, tp, skew)


def _find(folder: Path, model: str | None, tp: int | None) -> Path:
    if not folder.is_dir():
        raise ProfileError(f"{folder}: no such folder; expected one with operation tables (dense.csv, or layers.csv)")
    names = ("dense.csv", "dense.csv.gz", "layers.csv", "layers.csv.gz")
    folders = sorted({path.parent for name in names for path in folder.rglob(name)})
    if not folders:
        raise ProfileError(
            f"{folder}: no dense.csv or layers.csv in or below it; expected a folder of operation tables"
        )
    chosen = [
        each
        for each in folders
        if (tp is None or _degree(each) in (None, tp))
        and (model is None or len(folders) == 1 or _plain(model) in _plain(str(each)))
    ]
    if len(chosen) == 1:
        return chosen[0]
    listed = ", ".join(str(each.relative_to(folder)) for each in folders[:6])
    asked = "".join(f", {name} {value}" for name, value in (("model", model), ("tp", tp)) if value is not None)
    what = f"none fits{asked}" if not chosen else "several fit"
    raise ProfileError(f"{folder}: {len(folders)} folders with tables, {what}; name one, or --model and --tp: {listed}")


def _degree(folder: Path) -> int | None:
    """The tensor-parallel degree that a folder's name states."""
    match = re.search(r"tp(\d+)$", folder.name)
    return int(match[1]) if match else None


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())


def _file(folder: Path, stem: str) -> Path | None:
    for name in (f"{stem}.csv", f"{stem}.csv.gz"):
        if (folder / name).is_file():
            return folder / name
    return None


def _csv(folder: Path, stem: str, numbers: tuple[str, ...], texts: tuple[str, ...] = ()) -> pd.DataFrame:
    """The table with these columns; ``numbers`` finite and not negative, the last of them (the time) above 0."""
    path = _file(folder, stem)
    if path is None:
        raise ProfileError(f"{folder}: {stem}.csv is missing; expected columns {', '.join((*texts, *numbers))}")
    frame = _frame(path)
    for column in (*texts, *numbers):
        if column not in frame:
            raise ProfileError(f"{path}: no column {column!r}{near(column, map(str, frame.columns))}")
    if frame.empty:
        raise ProfileError(f"{path}: no rows; expected at least one")
    for column in numbers:
        values = pd.to_numeric(frame[column], errors="coerce")
        least = values > 0 if column == numbers[-1] else values >= 0
        wrong = ~(least & (values < float("inf")))
        if wrong.any():
            row = int(wrong.to_numpy().argmax())
            wanted = "a number above 0" if column == numbers[-1] else "a number of at least 0"
            found = frame[column].iloc[row]
            shown = repr(found) if isinstance(found, str) else f"{found:g}"
            raise ProfileError(f"{path}: line {row + 2}: {column} is {shown}; expected {wanted}")
        frame[column] = values
    return frame


def _frame(path: Path) -> pd.DataFrame:
    try:
        return pd.read_csv(path)
    except (
        OSError,
        EOFError,
        zlib.error,
        UnicodeDecodeError,
        pd.errors.ParserError,
        pd.errors.EmptyDataError,
    ) as error:
        raise ProfileError(f"{path}: cannot be read as CSV: {error}") from None


def _read_current(folder: Path, model: str | None, tp: int | None, skew: bool | None) -> OperationTables:
    if _file(folder, "moe") is not None:
        raise ProfileError(
            f"{folder}: moe.csv: mixture-of-experts layers are not read; expected tables of a dense model"
        )
    meta_path = folder.parent / "meta.yaml"
    meta = _meta(meta_path)
    notes: list[str] = []
    dense = _csv(folder, "dense", ("tokens", "time_us"), ("layer",))
    by_operation = {str(name): part for name, part in dense.groupby("layer")}
    missing = [name for name in NEEDED if name not in by_operation]
    if missing:
        raise ProfileError(f"{folder}: dense.csv lacks {', '.join(missing)}; it has {', '.join(by_operation)}")
    unknown = [name for name in by_operation if name not in BLOCK_CALLS and name not in ONCE]
    if unknown:
        notes.append(f"operations not known, counted once a layer: {', '.join(unknown)}")
    block = _total(
        by_operation, {name: BLOCK_CALLS.get(name, 1) for name in by_operation if name not in ONCE}, "tokens"
    )
    once = _total(by_operation, dict.fromkeys((name for name in ONCE if name in by_operation), 1), "tokens")
    rows_table = _csv(folder, "per_sequence", ("sequences", "time_us"), ("layer",))
    of_rows = {str(name): part for name, part in rows_table.groupby("layer")}
    missing = [name for name in ROW_OPERATIONS if name not in of_rows]
    if missing:
        raise ProfileError(f"{folder}: per_sequence.csv lacks {', '.join(missing)}; it has {', '.join(of_rows)}")
    attention = _attention(folder)
    skew_table = None
    if _file(folder, "skew_fit") is not None:
        if skew is None and meta.get("skew_fit.enabled") == "false":
            notes.append(
                f"{meta_path.name} switches skew_fit off: batches of unequal lengths cost what their mean does"
            )
        elif skew is not False:
            skew_table = _skew(folder)
    if meta_path.is_file() and not meta:
        raise ProfileError(f"{meta_path}: no key in it; expected YAML such as model: ..., gpu: ...")
    said = meta.get("model", "").rsplit("/", 1)[-1]
    if model and said and _plain(model.rsplit("/", 1)[-1]) != _plain(said):
        notes.append(f"{meta_path.name} says that the tables are of {said}; they are taken for {model}, as asked")
    parts = folder.parts
    return OperationTables(
        folder=folder,
        format="current",
        model=(model or meta.get("model") or (parts[-3] if len(parts) > 2 else folder.name)).rsplit("/", 1)[-1],
        gpu=meta.get("gpu") or (parts[-5] if len(parts) > 4 else ""),
        tp=tp or _degree(folder) or 1,
        version=f"vLLM {meta['vllm_version']}" if "vllm_version" in meta else "vLLM",
        block=block,
        once=once.reindex(block.index).fillna(0.0),
        rows=_total(of_rows, dict.fromkeys(of_rows, 1), "sequences"),
        attention=attention,
        skew=skew_table,
        notes=tuple(notes),
    )


def _total(tables: dict[str, pd.DataFrame], calls: dict[str, int], axis: str) -> pd.Series[float]:
    """Seconds of all operations together, at the sizes that each of them was measured at."""
    total: pd.Series[float] | None = None
    for name, count in calls.items():
        part = tables[name].groupby(axis)["time_us"].mean() * (count * 1e-6)
        total = part if total is None else (total + part).dropna()
    if total is None:
        return pd.Series(dtype=float)
    if total.empty:
        raise ProfileError(f"operations {', '.join(calls)} were never measured at the same {axis}")
    return total


def _attention(folder: Path) -> pd.DataFrame:
    path = _file(folder, "attention")
    by_key = path is not None and "prefill_key" in _frame(
        path
    )  # newer: context plus half the chunk, weighted over the queries
    context = "prefill_key" if by_key else "kv_prefill"
    frame = _csv(folder, "attention", ("prefill_chunk", context, "n_decode", "kv_decode", "time_us"))
    if "layer" in frame:
        frame = frame[frame["layer"] == "attention"]
    if "decode_q_len" in frame:
        frame = frame[frame["decode_q_len"] <= 1]
    before = frame[context] - frame["prefill_chunk"] / 2 if by_key else frame[context]
    table = pd.DataFrame(
        {
            "chunk": frame["prefill_chunk"].astype(int),
            "context": before.clip(lower=0).round().astype(int),
            "batch": frame["n_decode"].astype(int),
            "decode_context": frame["kv_decode"].astype(int),
            "seconds": frame["time_us"] * 1e-6,
        }
    )
    empty = (table["chunk"] == 0) & (table["batch"] == 0)
    return table[~empty].reset_index(drop=True)


def _skew(folder: Path) -> pd.DataFrame:
    """Weighted means by batch size, of pure decode steps and of steps with a prefill chunk."""
    frame = _csv(folder, "skew_fit", ("pc", "n_samples"), ("n_label", "skew_rate_label", "alpha"))
    frame = frame[frame["skew_rate_label"].isin(SKEW_RATES)]
    batch = frame["n_label"].astype(str).str.extract(r"^n<=(\d+)$")[0]
    share = pd.to_numeric(frame["alpha"], errors="coerce")
    known = batch.notna() & share.notna()
    weight = frame["n_samples"][known]
    part = pd.DataFrame(
        {
            "batch": batch[known].astype(int),
            "mixed": frame["pc"][known] > 0,
            "weight": weight,
            "paid": share[known] * weight,
        }
    )
    sums = part.groupby(["batch", "mixed"]).sum().unstack("mixed")
    means = (sums["paid"] / sums["weight"]).clip(0.0, 1.0)
    return pd.DataFrame({"decode": means.get(False), "mixed": means.get(True)}, index=means.index).astype(float)


def _meta(path: Path) -> dict[str, str]:
    """Top-level scalars of a YAML file and, as ``section.key``, those one level below; nothing else of YAML."""
    values: dict[str, str] = {}
    section = ""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return values
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: cannot be read: {error}") from None
    for line in lines:
        match = re.fullmatch(r"( *)([\w.-]+):\s*(.*?)\s*", line)
        if match is None:
            continue
        indent, key, value = len(match[1]), match[2], match[3].strip("'\"")
        if indent == 0:
            section = key
            values[key] = value
        elif indent == 2:
            values[f"{section}.{key}"] = value.lower()
    return values


def _read_v0(folder: Path, model: str | None, tp: int | None) -> OperationTables:
    layers = _csv(folder, "layers", ("input", "latency(ns)"), ("layer_name",))
    layers = layers.rename(columns={"layer_name": "layer", "input": "tokens"})
    layers["time_us"] = layers["latency(ns)"] / 1e3
    by_operation = {str(name): part for name, part in layers.groupby("layer")}
    missing = [name for name in (*V0_BLOCK, "lm_head") if name not in by_operation]
    if missing:
        raise ProfileError(f"{folder}: layers.csv lacks {', '.join(missing)}; it has {', '.join(by_operation)}")
    block = _total(by_operation, dict.fromkeys(V0_BLOCK, 1), "tokens")
    once = _total(by_operation, dict.fromkeys((name for name in ONCE if name in by_operation), 1), "tokens")
    parts = folder.parts
    name = re.sub(r"-tp\d+$", "", parts[-1]) if _degree(folder) else parts[-1]
    return OperationTables(
        folder=folder,
        format="v0",
        model=(model or name).rsplit("/", 1)[-1],
        gpu=parts[-2] if len(parts) > 1 else "",
        tp=tp or _degree(folder) or 1,
        version="v0 of the profiler, no fused operations",
        block=block,
        once=once.reindex(block.index).fillna(0.0),
        rows=_total(by_operation, {"lm_head": 1}, "tokens"),
        attention=_v0_attention(folder),
        notes=("v0 times unfused operations one by one",),
    )


def _v0_attention(folder: Path) -> pd.DataFrame:
    """Prefill chunks of one sequence, whose context counts the chunk too, and pure decode batches, in milliseconds."""
    frame = _csv(folder, "attention", ("prefill_chunk_size", "batch_size", "kv_cache_size"), ("is_prefill",))
    prefill = frame["is_prefill"].astype(str).str.lower() == "true"
    chunk = frame["prefill_chunk_size"].where(prefill, 0).astype(int)
    times = {}
    for kind in ("prefill", "decode"):
        column = f"time_stats.attn_{kind}.median"
        if column not in frame:
            raise ProfileError(f"{folder}: attention.csv has no column {column!r}; expected the median in milliseconds")
        times[kind] = pd.to_numeric(frame[column], errors="coerce")
    table = pd.DataFrame(
        {
            "chunk": chunk,
            "context": (frame["kv_cache_size"] - chunk).where(prefill, 0).clip(lower=0).astype(int),
            "batch": frame["batch_size"].where(~prefill, 0).astype(int),
            "decode_context": frame["kv_cache_size"].where(~prefill, 0).astype(int),
            "seconds": times["prefill"].where(prefill, times["decode"]) * 1e-3,
        }
    )
    return table[table["seconds"] > 0].reset_index(drop=True)
