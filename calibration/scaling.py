"""Profiles of models and GPU counts that nobody measured, derived from one that somebody did by stated rules.

Every number it makes is marked ``scaled`` or ``assumed``; it measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from calibration.curves import CURVES
from calibration.figures import ProfileError, Provenance
from calibration.profile import EngineProfile

if TYPE_CHECKING:
    from calibration.datasheets import DataSheet

BYTES_PER_VALUE = 2  # bf16
MEMORY_SHARE = 0.9  # vLLM's gpu_memory_utilization
RUNTIME_BYTES = 1.5e9  # activations, graphs and workspace of one GPU
MIXED_CONTEXT_FACTOR = 2.0  # m1 over a2; fits to measured attention tables gave 1.4 to 2.7
ALLREDUCE_CALL_S = 20e-6
ALLREDUCE_BYTES_PER_S = 15.75e9  # half of PCIe 4.0 x16


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: data sheet values, and which share of them vLLM was seen to sustain."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    peak_flops: float
    bandwidth_share: float
    flops_share: float

    @property
    def stream_bytes_per_s(self) -> float:
        """Sustained memory bandwidth."""
        return self.bandwidth_bytes_per_s * self.bandwidth_share

    @property
    def flops(self) -> float:
        """Sustained bf16 operations a second."""
        return self.peak_flops * self.flops_share


A6000 = Gpu(
    name="RTX A6000",
    memory_bytes=48 * 2**30,
    bandwidth_bytes_per_s=768e9,
    peak_flops=154.8e12,
    bandwidth_share=0.84,
    flops_share=0.56,
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A dense transformer as its ``config.json`` describes it.

    ``block_parameters`` are those of all layers, ``head_parameters`` the output projection (tied or not):
    together what a decode step reads. ``parameters`` counts an untied input embedding too.
    """

    model: str
    aliases: tuple[str, ...]
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: float
    block_parameters: float
    head_parameters: float
    max_model_len: int
    context_source: str = "model card: config.json"

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES_PER_VALUE

    @property
    def streamed_bytes(self) -> float:
        """What a decode step reads of the weights."""
        return (self.block_parameters + self.head_parameters) * BYTES_PER_VALUE


def kv_tokens(parameters: float, kv_bytes_per_token: int, memory_bytes: int, gpus: int, block_tokens: int = 16) -> int:
    """KV tokens beside the weights, in whole blocks: an upper bound. 0 or less if the weights do not fit."""
    room = gpus * (MEMORY_SHARE * memory_bytes - RUNTIME_BYTES) - parameters * BYTES_PER_VALUE
    return int(room / kv_bytes_per_token) // block_tokens * block_tokens


def scaled_profile(
    base: EngineProfile,
    card: Architecture,
    *,
    gpu: Gpu = A6000,
    gpus: int = 1,
    mean_call_tokens: float = 2000.0,
    notes: str = "",
) -> EngineProfile:
    """The profile of another model on the GPU of ``base``, whose table has decode and then prefill entries.

    - decode (entries up to ``base.max_num_seqs`` tokens): weights streamed at the sustained bandwidth, plus
      the growth of the base's table over its first entry times the ratio of streamed parameters;
    - prefill (entries above): layers as the base's times the ratio of block parameters, plus the output
      projection read once;
    - attention: KV bytes over sustained bandwidth, prefill pairs over sustained FLOPS, no fixed parts;
    - ``gpus`` > 1 divides all of this and adds the all-reduce of `tensor_parallel`.

    Raises `ProfileError` if the weights leave no room for one call.
    """
    head_s = card.head_parameters * BYTES_PER_VALUE / gpu.stream_bytes_per_s
    base_head_s = base.head_parameters * BYTES_PER_VALUE / gpu.stream_bytes_per_s
    streamed_ratio = (card.block_parameters + card.head_parameters) / (base.block_parameters + base.head_parameters)
    block_ratio = card.block_parameters / base.block_parameters
    streamed_s = card.streamed_bytes / gpu.stream_bytes_per_s
    first_s = base.dense[0][1]
    points: list[tuple[int, float]] = []
    origins: list[tuple[str, Provenance, str]] = []
    for tokens, seconds in base.dense:
        if tokens <= base.max_num_seqs:
            scaled = streamed_s + (seconds - first_s) * streamed_ratio
            source = (
                f"weights streamed at {gpu.bandwidth_share} x {gpu.bandwidth_bytes_per_s / 1e9:g} GB/s"
                if tokens == base.dense[0][0]
                else f"entry at {base.dense[0][0]} + growth of {base.model} x {streamed_ratio:.3f} (weights)"
            )
        else:
            scaled = (seconds - base_head_s) * block_ratio + head_s
            source = f"layers of {base.model} x {block_ratio:.3f} (block parameters) + output projection once"
        points.append((tokens, _round(scaled / gpus)))
        origins.append((f"dense[{tokens}]", "scaled", source + (f", over {gpus} GPUs" if gpus > 1 else "")))
    tokens = kv_tokens(card.parameters, card.kv_bytes_per_token, gpu.memory_bytes, gpus)
    if tokens < mean_call_tokens:
        raise ProfileError(
            f"{card.model} on {gpus} {gpu.name}: room for {max(tokens, 0)} KV tokens; "
            f"expected at least one call of {mean_call_tokens:g}; use more GPUs"
        )
    numbers: dict[str, Any] = {}
    numbers |= attention_terms(card.layers, card.heads, card.head_dim, card.kv_bytes_per_token, gpu, gpus)
    numbers |= allreduce_terms(card.layers, card.hidden_size, gpus)
    return EngineProfile(
        model=card.model,
        aliases=card.aliases,
        gpu=gpu.name,
        gpus=gpus,
        notes=notes,
        dense=tuple(points),
        num_kv_tokens=tokens,
        max_model_len=card.max_model_len,
        mean_call_tokens=mean_call_tokens,
        memory_bytes=gpu.memory_bytes,
        kv_bytes_per_token=card.kv_bytes_per_token,
        layers=card.layers,
        hidden_size=card.hidden_size,
        heads=card.heads,
        kv_heads=card.kv_heads,
        head_dim=card.head_dim,
        parameters=card.parameters,
        block_parameters=card.block_parameters,
        head_parameters=card.head_parameters,
        origins=(*card_origins(card), *term_origins(gpu, gpus), *origins),
        **numbers,
    )


def attention_terms(
    layers: int, heads: int, head_dim: int, kv_bytes_per_token: int, gpu: Gpu, gpus: int = 1
) -> dict[str, float]:
    """``a2``, ``w1``, ``w2``, ``m1``: KV bytes over bandwidth, 4 x heads x head_dim operations a pair."""
    context_s = kv_bytes_per_token / layers / gpu.stream_bytes_per_s / gpus
    pair_s = 4 * heads * head_dim / gpu.flops / gpus
    return {
        "a2": _round(context_s),
        "w1": _round(pair_s),
        "w2": _round(context_s),
        "m1": _round(MIXED_CONTEXT_FACTOR * context_s),
    }


def allreduce_terms(layers: int, hidden_size: int, gpus: int) -> dict[str, float]:
    """Two ring all-reduces a layer of one hidden vector a token, over PCIe; nothing for one GPU."""
    if gpus == 1:
        return {"allreduce_base_s": 0.0, "allreduce_token_s": 0.0}
    calls = 2 * layers
    moved_bytes = 2 * (gpus - 1) / gpus * hidden_size * BYTES_PER_VALUE
    return {
        "allreduce_base_s": _round(calls * ALLREDUCE_CALL_S),
        "allreduce_token_s": _round(calls * moved_bytes / ALLREDUCE_BYTES_PER_S),
    }


def tensor_parallel(profile: EngineProfile, gpus: int) -> EngineProfile:
    """A one-GPU profile over ``gpus``: work and weights divided, all-reduces added, KV memory counted anew.

    A profile that is of ``gpus`` GPUs already is returned as it is. Raises `ProfileError` where the profile
    does not say enough, or the heads cannot be divided.
    """
    if profile.gpus == gpus:
        return profile
    if profile.gpus != 1:
        raise ProfileError(
            f"tensor_parallel is {gpus}, but the profile of {profile.model} is of {profile.gpus} GPUs; "
            f"expected {profile.gpus}, or a one-GPU profile"
        )
    needed = ("hidden_size", "heads", "kv_heads", "parameters", "kv_bytes_per_token", "memory_bytes")
    missing = [name for name in needed if not getattr(profile, name)]
    if missing:
        raise ProfileError(f"tensor_parallel needs {', '.join(missing)} in the profile of {profile.model}")
    if profile.heads % gpus or profile.kv_heads % gpus:
        raise ProfileError(
            f"tensor_parallel is {gpus}; expected a divisor of the {profile.heads} heads and "
            f"{profile.kv_heads} KV heads of {profile.model}"
        )
    divided: dict[str, Any] = {
        name: getattr(profile, name) / gpus for name in ("a0", "a1", "a2", "w0", "w1", "w2", "m0", "m1")
    }
    curves = {key: getattr(profile, key) for key in CURVES}
    divided |= {key: curve.times(1 / gpus) for key, curve in curves.items() if curve is not None}
    dense = tuple((tokens, seconds / gpus) for tokens, seconds in profile.dense)
    tokens = kv_tokens(profile.parameters, profile.kv_bytes_per_token, profile.memory_bytes, gpus, profile.block_tokens)
    anew = {"num_kv_tokens", "allreduce_base_s", "allreduce_token_s"}
    over = f"over {gpus} GPUs"
    kept = [
        (name, "scaled" if provenance == "measured" else provenance, f"{source}; {over}")
        if name.startswith("dense[") or name in divided
        else (name, provenance, source)
        for name, provenance, source in profile.origins
        if name not in anew
    ]  # fmt: skip
    added = [origin for origin in term_origins(A6000, gpus) if origin[0] in anew]
    allreduce: Mapping[str, Any] = allreduce_terms(profile.layers, profile.hidden_size, gpus)
    origins: tuple[Any, ...] = (*kept, *added)
    return replace(profile, gpus=gpus, dense=dense, num_kv_tokens=tokens, origins=origins, **divided, **allreduce)


def card_origins(card: Architecture) -> list[tuple[str, Provenance, str]]:
    """Where the numbers of a model's own description come from."""
    config = "model card: config.json"
    names = ("layers", "hidden_size", "heads", "kv_heads", "head_dim")
    counted = "counted from the shapes in config.json"
    return [
        *((name, "assumed", config) for name in names),
        ("parameters", "assumed", f"{counted}, input embedding included"),
        ("block_parameters", "assumed", f"{counted}: all layers"),
        ("head_parameters", "assumed", f"{counted}: output projection (hidden size x vocabulary)"),
        ("max_model_len", "assumed", card.context_source),
        ("kv_bytes_per_token", "assumed", "2 x layers x KV heads x head_dim x 2 bytes (bf16)"),
    ]


def term_origins(gpu: Gpu, gpus: int = 1) -> list[tuple[str, Provenance, str]]:
    """Where the numbers that follow from the GPU, from vLLM's defaults or from our choice come from."""
    stream = f"{gpu.bandwidth_share} x {gpu.bandwidth_bytes_per_s / 1e9:g} GB/s"
    over = f", over {gpus} GPUs" if gpus > 1 else ""
    none = "no such term in this profile: part of the dense table"
    reduced = "no all-reduce on one GPU"
    return [
        ("memory_bytes", "assumed", "data sheet: 48 GiB"),
        ("num_kv_tokens", "scaled",
         f"(0.9 x memory - weights - 1.5 GB) / KV bytes a token{over}: an upper bound"),
        ("mean_call_tokens", "assumed", "our choice for prompt and output of a call; states max_batch_size"),
        ("max_num_seqs", "assumed", "vLLM default"),
        ("max_num_batched_tokens", "assumed", "vLLM default"),
        ("block_tokens", "assumed", "vLLM default"),
        ("host_s", "assumed", "0: host time is inside the end-to-end decode table"),
        ("sequence_s", "assumed", "0: sampling is inside the end-to-end decode table"),
        ("a0", "assumed", none),
        ("a1", "assumed", none),
        ("a2", "scaled", f"KV bytes a token and layer / ({stream}){over}"),
        ("w0", "assumed", none),
        ("w1", "scaled",
         f"4 x heads x head_dim operations / ({gpu.flops_share} x {gpu.peak_flops / 1e12:g} TFLOPS){over}"),
        ("w2", "scaled", f"context read once a chunk: as a2{over}"),
        ("m0", "assumed", none),
        ("m1", "assumed", f"{MIXED_CONTEXT_FACTOR:g} x a2; fits for other GPUs gave 1.4 to 2.7"),
        ("allreduce_base_s", "assumed", reduced if gpus == 1 else
         f"2 all-reduces a layer x {ALLREDUCE_CALL_S * 1e6:g} us, our choice"),
        ("allreduce_token_s", "assumed", reduced if gpus == 1 else
         "2 ring all-reduces a layer of a hidden vector at 15.75 GB/s (half of PCIe 4.0 x16), our choice"),
    ]  # fmt: skip


def on_other_gpu(profile: EngineProfile, source: DataSheet, target: DataSheet) -> EngineProfile:
    """The profile as the data sheets of its GPU and another one say it would be there: a rough first guess.

    What the ``dense`` table takes at its first entry is weights read, and goes with the bandwidth; its growth over that
    is arithmetic, and goes with the operations a second. Output projection and attention go with the bandwidth. KV
    memory is counted anew. Between the two GPUs that could be compared (RTX 4090 to RTX PRO 6000, Llama-3.1-8B)
    decode and prefill steps came out 13 to 18 % too short. Raises `ProfileError`.
    """
    if not profile.parameters or not profile.kv_bytes_per_token:
        raise ProfileError(f"scaling to {target.name} needs parameters and kv_bytes_per_token of {profile.model}")
    bandwidth = source.bandwidth_bytes_per_s / target.bandwidth_bytes_per_s
    flops = source.peak_flops / target.peak_flops
    first_s = profile.dense[0][1]
    dense = tuple((t, _round(first_s * bandwidth + max(s - first_s, 0.0) * flops)) for t, s in profile.dense)
    terms = ("sequence_s", "a0", "a1", "a2", "w0", "w1", "w2", "m0", "m1")
    scaled: dict[str, Any] = {name: _round(getattr(profile, name) * bandwidth) for name in terms}
    curves = {key: getattr(profile, key) for key in CURVES}
    scaled |= {key: None if curve is None else curve.times(bandwidth) for key, curve in curves.items()}
    tokens = kv_tokens(
        profile.parameters, profile.kv_bytes_per_token, target.memory_bytes, profile.gpus, profile.block_tokens
    )
    by = f"from {profile.gpu} by data sheets (bandwidth x {1 / bandwidth:.2f}, operations x {1 / flops:.2f})"
    anew = {"num_kv_tokens", "memory_bytes"}
    origins: list[tuple[str, Provenance, str]] = [
        (name, "scaled", f"{origin}; {by}")
        if name in scaled or name.startswith("dense[")
        else (name, provenance, origin)
        for name, provenance, origin in profile.origins
        if name not in anew
    ]
    origins.append(("memory_bytes", "assumed", "data sheet"))
    origins.append(("num_kv_tokens", "scaled", "(0.9 x memory - weights - 1.5 GB) / KV bytes a token: an upper bound"))
    return replace(
        profile,
        gpu=target.name,
        dense=dense,
        memory_bytes=target.memory_bytes,
        num_kv_tokens=tokens,
        origins=tuple(origins),
        **scaled,
    )


def _round(seconds: float) -> float:
    """Four digits: more would pretend."""
    return float(f"{seconds:.4g}")
