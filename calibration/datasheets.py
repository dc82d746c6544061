"""Facts that no timing table holds: GPUs' data sheets, links between GPUs, and the shapes of well-known models.

A model is described by a shipped profile, by `CARDS`, or by its ``config.json``. Nothing here is measured by us; each
source is named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from calibration.figures import ProfileError
from calibration.profile import PROFILES, find_profile
from calibration.scaling import Architecture


@dataclass(frozen=True, slots=True)
class Link:
    """How an all-reduce between GPUs was seen, or is assumed, to go: a fixed time a call, then bytes moved a second."""

    call_s: float
    bytes_per_s: float
    source: str


@dataclass(frozen=True, slots=True)
class DataSheet:
    """One kind of GPU: memory, its bandwidth, dense bf16 operations a second with fp32 sums, and how two are linked."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    peak_flops: float
    link: Link


PCIE4 = Link(20e-6, 15.75e9, "20 us a call and half of PCIe 4.0 x16, our choice")
PCIE5 = Link(
    14e-6,
    36.5e9,
    "NCCL between two RTX PRO 6000 over PCIe 5.0 x16, 4 KB to 20 MB: 14 us a call and 36.5 GB/s "
    "(fit to the all-reduce times in LLMServingSim's hardware.yaml)",
)
DATA_SHEETS = (
    DataSheet("RTX A6000", 48 * 2**30, 768e9, 154.8e12, PCIE4),
    DataSheet("RTX 4090", 24 * 2**30, 1008e9, 165.2e12, PCIE4),
    DataSheet("RTX PRO 6000", 95 * 2**30, 1792e9, 503.8e12, PCIE5),
)


def data_sheet(gpu: str) -> DataSheet | None:
    """The data sheet of a GPU by its name as people, drivers and folders write it (``RTXPRO6000``), or None."""
    plain = _plain(gpu)
    return next((sheet for sheet in DATA_SHEETS if _plain(sheet.name) in plain or plain == _bare(sheet.name)), None)


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def _bare(name: str) -> str:
    """The name without its series: A6000, 4090."""
    return _plain(name).removeprefix("rtx")


def _card(
    model: str,
    layers: int,
    hidden_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate_size: int,
    vocabulary: int,
    max_model_len: int,
    tied: bool = False,
    source: str = "model card: config.json",
) -> Architecture:
    """A dense transformer with a gated MLP, its parameters counted from the shapes (norms and biases left out)."""
    attention = hidden_size * (heads + 2 * kv_heads) * head_dim + heads * head_dim * hidden_size
    block = float(layers * (attention + 3 * hidden_size * intermediate_size))
    head = float(vocabulary * hidden_size)
    return Architecture(
        model=model,
        aliases=(),
        layers=layers,
        hidden_size=hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        parameters=block + head * (1 if tied else 2),
        block_parameters=block,
        head_parameters=head,
        max_model_len=max_model_len,
        context_source=source,
    )


CARDS = (
    _card("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936, 40960),
    _card("Qwen3-14B", 40, 5120, 40, 8, 128, 17408, 151936, 40960),
    _card("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936, 40960),
    _card("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256, 131072),
)
"""Dense models without a shipped profile. Other ones need their ``config.json``."""


def architecture(model: str) -> Architecture | None:
    """The card of a model known by name: a shipped profile's, or one of `CARDS`; None if neither knows it."""
    plain = _plain(model.rsplit("/", 1)[-1]).removesuffix("instruct")
    for card in CARDS:
        if _plain(card.model) == plain:
            return card
    try:
        shipped = find_profile(model)
    except ProfileError:
        return None
    names = (field.name for field in fields(Architecture) if field.name != "context_source")
    return Architecture(**{name: getattr(PROFILES[shipped.model], name) for name in names})


_CONFIG_KEYS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip


def read_config(path: Path, model: str) -> Architecture:
    """The card that a model's ``config.json`` describes. Raises `ProfileError` for what is missing or not dense."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ProfileError(f"{path}: no such file; expected a model's config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ProfileError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ProfileError(f"{path}: is not an object; expected a model's config.json")
    experts = [key for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)]
    if experts:
        raise ProfileError(f"{path}: {experts[0]} is {config[experts[0]]}; expected a dense model without experts")
    values = {key: _whole(config, key, path) for key in _CONFIG_KEYS}
    heads = values["num_attention_heads"]
    kv_heads = _whole({"num_key_value_heads": heads, **_set(config)}, "num_key_value_heads", path)
    head_dim = _whole({"head_dim": values["hidden_size"] // heads, **_set(config)}, "head_dim", path)
    return _card(
        model,
        values["num_hidden_layers"],
        values["hidden_size"],
        heads,
        kv_heads,
        head_dim,
        values["intermediate_size"],
        values["vocab_size"],
        values["max_position_embeddings"],
        tied=bool(config.get("tie_word_embeddings")),
        source=f"{path.name}: max_position_embeddings",
    )


def _set(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def _whole(config: Mapping[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if type(value) is not int or not 1 <= value <= 10**12:
        raise ProfileError(f"{path}: {key} is {value!r:.60}; expected a whole number above 0")
    return value
