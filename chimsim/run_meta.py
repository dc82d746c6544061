"""What a measured run says of itself beside its requests: the engine's settings, and its load over time.

Settings come from options, else from the run's own file, else from the profile, and each keeps where it came from.
It starts no engine and checks no profile against measurements; it only says where file and profile disagree.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from calibration.profile import EngineProfile
from chimsim.config import EngineSpec
from chimsim.errors import ChimsimError

# Of each setting the places in a file, best first: what vLLM resolved, then what it was asked for, then flat names.
_PLACES: Mapping[str, tuple[str, ...]] = {
    "max_num_seqs": (
        "resolved_config.scheduler_config.max_num_seqs",
        "engine_kwargs.max_num_seqs",
        "max_num_seqs",
    ),
    "max_num_batched_tokens": (
        "resolved_config.scheduler_config.max_num_batched_tokens",
        "engine_kwargs.max_num_batched_tokens",
        "max_num_batched_tokens",
    ),
    "num_kv_tokens": ("kv_cache.num_kv_tokens", "num_kv_tokens"),
    "max_model_len": (
        "resolved_config.model_config.max_model_len",
        "engine_kwargs.max_model_len",
        "max_model_len",
    ),
    "block_tokens": (
        "kv_cache.block_size",
        "resolved_config.cache_config.block_size",
        "engine_kwargs.block_size",
        "block_size",
        "block_tokens",
    ),
    "prefix_caching": (
        "kv_cache.enable_prefix_caching",
        "resolved_config.cache_config.enable_prefix_caching",
        "engine_kwargs.enable_prefix_caching",
        "enable_prefix_caching",
        "prefix_caching",
    ),
}
_BLOCKS = (
    "kv_cache.num_gpu_blocks",
    "resolved_config.cache_config.num_gpu_blocks",
    "engine_kwargs.num_gpu_blocks_override",
    "num_gpu_blocks",
    "num_kv_blocks",
)
_SAID = {
    "model": ("model", "engine_kwargs.model", "resolved_config.model_config.model", "model_id"),
    "gpu": ("hardware.device_name", "device_name", "gpu"),
    "tensor_parallel": (
        "resolved_config.parallel_config.tensor_parallel_size",
        "engine_kwargs.tensor_parallel_size",
        "tensor_parallel_size",
        "tensor_parallel",
    ),
}
# Places whose value means something the replay does not do, the value that is harmless, and what to say.
_NOT_REPLAYED = (
    (
        ("resolved_config.parallel_config.data_parallel_size", "engine_kwargs.data_parallel_size"),
        1,
        "the run had {} data-parallel engines; it is replayed on one",
    ),
    (
        ("resolved_config.parallel_config.pipeline_parallel_size", "engine_kwargs.pipeline_parallel_size"),
        1,
        "the run had {} pipeline stages; the step model has none",
    ),
    (
        ("resolved_config.scheduler_config.policy", "engine_kwargs.scheduling_policy", "scheduling"),
        "fcfs",
        "the run's queue order was {!r}; it is replayed first come, first served",
    ),
    (
        ("resolved_config.scheduler_config.enable_chunked_prefill", "engine_kwargs.enable_chunked_prefill"),
        True,
        "the run had chunked prefill off; it is replayed with it",
    ),
    (
        ("resolved_config.speculative_config", "engine_kwargs.speculative_config"),
        None,
        "the run used speculative decoding; the replay has none",
    ),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One engine setting as replayed; ``source`` is ``option``, the file's name, ``profile`` or ``default``."""

    name: str
    value: int | bool
    source: str


@dataclass(frozen=True, slots=True)
class EngineFile:
    """The settings file of a run, as it is; `read_engine_file` reads one."""

    name: str
    tree: Mapping[str, Any]

    def first(self, places: tuple[str, ...]) -> Any:
        """The value at the first of the dotted places that has one, else None."""
        for place in places:
            value: Any = self.tree
            for key in place.split("."):
                value = value.get(key) if isinstance(value, Mapping) else None
            if value is not None:
                return value
        return None

    @property
    def model(self) -> str | None:
        """The model that the engine served."""
        value = self.first(_SAID["model"])
        return value if isinstance(value, str) else None

    @property
    def started_at(self) -> float | None:
        """When the run's clock began (``started_at``, an ISO date), in seconds since 1970."""
        value = self.tree.get("started_at")
        if not isinstance(value, str):
            return None
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            raise ChimsimError(f"{self.name}: started_at is {value!r}; expected a date and time (ISO 8601)") from None


def read_engine_file(path: Path | str) -> EngineFile:
    """Read a JSON file of engine settings: LLMServingSim's meta.json, or flat keys under vLLM's or our names.

    Raises `ChimsimError` when it is none or says nothing of an engine.
    """
    path = Path(path)
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ChimsimError(f"{path}: no such file of engine settings") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ChimsimError(f"{path}: cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ChimsimError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ChimsimError(f"{path}: expected an object of engine settings, found {type(tree).__name__}")
    file = EngineFile(path.name, tree)
    if all(file.first(places) is None for places in (*_PLACES.values(), _BLOCKS)):
        raise ChimsimError(
            f"{path}: no engine setting in it; expected max_num_seqs, max_num_batched_tokens, num_kv_tokens or "
            "num_gpu_blocks, block_size, max_model_len, enable_prefix_caching, flat or as in LLMServingSim's meta.json"
        )
    return file


def resolve(
    profile: EngineProfile, options: Mapping[str, int | bool | None], file: EngineFile | None
) -> tuple[EngineSpec, list[Setting]]:
    """The engine to replay on, and where each of its settings came from.

    ``options`` are by the names of `EngineSpec`, with ``num_kv_tokens`` for the memory. Raises `ChimsimError`.
    """
    found: dict[str, Setting] = {}
    for name, places in _PLACES.items():
        default = Setting(name, True, "default") if name == "prefix_caching" else None
        found[name] = (
            _given(name, options)
            or _from_file(name, places, file)
            or default
            or Setting(name, getattr(profile, name), "profile")
        )
    block = found["block_tokens"].value
    if options.get("num_kv_tokens") is None and file is not None:
        blocks = _from_file("num_kv_blocks", _BLOCKS, file)
        if blocks is not None:
            found["num_kv_tokens"] = Setting("num_kv_tokens", blocks.value * block, file.name)
    seqs = int(found["max_num_seqs"].value)
    budget = found["max_num_batched_tokens"]
    if budget.source == "profile" and budget.value < seqs:
        raise ChimsimError(
            f"max_num_seqs is {seqs} ({found['max_num_seqs'].source}), more than the profile's max_num_batched_tokens "
            f"({budget.value}); give the run's own with --max-num-batched-tokens"
        )
    spec = EngineSpec(
        name=profile.model,
        model=profile.model,
        profile=profile,
        max_num_seqs=seqs,
        max_num_batched_tokens=int(budget.value),
        num_kv_blocks=int(found["num_kv_tokens"].value) // int(block),
        max_batch_size=seqs,
        max_model_len=int(found["max_model_len"].value),
        block_tokens=int(block),
        prefix_caching=bool(found["prefix_caching"].value),
    )
    return spec, list(found.values())


def disagreements(profile: EngineProfile, file: EngineFile | None, model: str | None) -> list[str]:
    """Where the run and the profile are not of the same thing, and what of the run the replay does not do.

    ``model`` is what the requests' own file says.
    """
    found = []
    said = {"the requests": model}
    if file is not None:
        said[file.name] = file.model
    for source, name in said.items():
        if name is not None and not _same_model(name, profile):
            found.append(f"the model is {name!r} in {source} and {profile.model!r} in the profile")
    if file is None:
        return found
    gpu = file.first(_SAID["gpu"])
    if isinstance(gpu, str) and not _same_gpu(gpu, profile.gpu):
        found.append(f"the GPU is {gpu!r} in {file.name} and {profile.gpu!r} in the profile")
    gpus = file.first(_SAID["tensor_parallel"])
    if gpus is not None and _plain_value(gpus) != profile.gpus:
        found.append(f"tensor parallel is {gpus} in {file.name} and {profile.gpus} in the profile")
    for places, harmless, message in _NOT_REPLAYED:
        value = _plain_value(file.first(places))
        if value is not None and value != harmless:
            found.append(message.format(value))
    return found


_COLUMNS = {
    "time_s": ("time_s", "t"),
    "running": ("running",),
    "waiting": ("waiting",),
    "kv_used_fraction": ("kv_used_fraction", "kv_cache_pct"),
}


def read_timeseries(path: Path | str) -> pd.DataFrame:
    """A measured load over time: ``time_s``, ``running``, ``waiting``, ``kv_used_fraction`` (NaN where not recorded).

    Columns of LLMServingSim's timeseries.csv (``t``, ``kv_cache_pct`` in percent) or of our timeline. A KV column
    that is 0 throughout while requests ran was not recorded. Raises `ChimsimError`.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows, columns = list(reader), list(reader.fieldnames or ())
    except FileNotFoundError:
        raise ChimsimError(f"{path}: no such time series") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ChimsimError(f"{path}: cannot be read: {error}") from None
    if not rows:
        raise ChimsimError(f"{path}: no sample in it; expected a CSV with time_s (or t), running, waiting")
    data: dict[str, list[float]] = {}
    for name, known in _COLUMNS.items():
        column = next((word for word in known if word in columns), None)
        if column is None:
            if name != "kv_used_fraction":
                raise ChimsimError(f"{path}: column {' or '.join(known)} is missing; found {', '.join(columns)}")
            data[name] = [float("nan")] * len(rows)
            continue
        scale = 0.01 if column == "kv_cache_pct" else 1.0
        values = [_sample(row[column], f"{path}:{number}: {column}") for number, row in enumerate(rows, 2)]
        if name == "kv_used_fraction":
            for number, value in enumerate(values, 2):
                if scale * value > 1.000001:
                    raise ChimsimError(f"{path}:{number}: {column} is {value:g}; expected 0 to {1 / scale:g}")
        data[name] = [scale * value for value in values]
    frame = pd.DataFrame(data)
    if (frame["time_s"].diff() < 0).any():
        line = int((frame["time_s"].diff() < 0).to_numpy().argmax()) + 2
        raise ChimsimError(f"{path}:{line}: time runs backwards; expected samples in order of time")
    if (frame["running"] > 0).any() and (frame["kv_used_fraction"] == 0).all():
        frame["kv_used_fraction"] = float("nan")
    return frame


def _sample(text: str | None, where: str) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = float("nan")
    if not 0 <= value <= 1e12:
        raise ChimsimError(f"{where} is {text!r:.60}; expected a number from 0 on")
    return value


def _given(name: str, options: Mapping[str, int | bool | None]) -> Setting | None:
    value = options.get(name)
    if value is not None and type(value) is int and value < 1:
        raise ChimsimError(f"{name} is {value}; expected a whole number above 0")
    return None if value is None else Setting(name, value, "option")


def _from_file(name: str, places: tuple[str, ...], file: EngineFile | None) -> Setting | None:
    value = _plain_value(file.first(places)) if file is not None else None
    if value is None or file is None:
        return None
    expected = bool if name == "prefix_caching" else int
    if type(value) is not expected or (expected is int and value < 1):
        kind = "true or false" if expected is bool else "a whole number above 0"
        raise ChimsimError(f"{file.name}: {name} is {value!r}; expected {kind}")
    return Setting(name, value, file.name)


def _plain_value(value: Any) -> Any:
    """Text as the value it spells: ``--metadata`` of vllm bench serve keeps everything as text."""
    if isinstance(value, str):
        word = value.strip().lower()
        if word.isdecimal() and len(word) < 20:
            return int(word)
        return {"true": True, "false": False}.get(word, value)
    return value


def _plain_name(name: str) -> str:
    bare = name.lower()
    for word in ("-", "_", " "):
        bare = bare.replace(word, "")
    return bare


def _same_model(name: str, profile: EngineProfile) -> bool:
    """Organisation and "Instruct" aside: neither changes how long a step takes."""
    plain = _plain_name(name.rstrip("/").rsplit("/", 1)[-1]).removesuffix("instruct")
    known = (profile.model, *profile.aliases)
    return plain in {_plain_name(word.rsplit("/", 1)[-1]).removesuffix("instruct") for word in known}


def _same_gpu(name: str, profiled: str) -> bool:
    """Makers write more or less of the name: "NVIDIA GeForce RTX 4090" is the "RTX 4090"."""
    one, other = (_plain_name(word).removeprefix("nvidia").removeprefix("geforce") for word in (name, profiled))
    return one in other or other in one
