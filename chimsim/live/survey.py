"""What an engine is, before it is measured: version, limits, memory; asked for, seen, or given by the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date

from calibration.raw_measurements import Header
from chimsim.errors import ChimsimError
from chimsim.live.measure import Engine
from chimsim.live.metrics import EngineMetrics
from chimsim.live.probe import find_max_num_seqs, find_token_budget

USUAL_BLOCK_TOKENS = 16
USUAL_BUDGET = 8192


@dataclass(frozen=True, slots=True)
class Given:
    """What the user says of the engine; None is to be found out."""

    gpu: str
    gpus: int = 1
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    num_kv_tokens: int | None = None
    block_tokens: int | None = None
    max_model_len: int | None = None


async def survey(engine: Engine, given: Given, there: Header | None = None) -> Header:
    """The engine as a raw file's header says it.

    ``there`` is the header of a raw file that is to be gone on with: what could only be seen by sending requests is
    taken from it, the rest is asked again, so that another engine shows. Raises `ChimsimError`, naming the option that
    helps, where something cannot be found out.
    """
    served = await engine.client.served(engine.model)
    version = await engine.client.version() or "unknown"
    found: dict[str, tuple[int, str]] = {}
    for name in ("max_num_seqs", "max_num_batched_tokens", "num_kv_tokens", "block_tokens", "max_model_len"):
        value = getattr(given, name)
        if value is not None:
            found[name] = (value, "given")
    if served.max_model_len is not None:
        if given.max_model_len is not None and given.max_model_len != served.max_model_len:
            raise ChimsimError(f"--max-model-len {given.max_model_len} is not what is served: {served.max_model_len}")
        found["max_model_len"] = (served.max_model_len, "reported by /v1/models")
    if "max_model_len" not in found:
        raise ChimsimError(f"{engine.client.url}/v1/models does not tell max_model_len; give it with --max-model-len")
    metrics = await engine.idle()
    _memory(engine, found, metrics)
    await engine.find_tokens()
    if there is not None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            found.setdefault(name, (getattr(there, name), there.settings_from.get(name, "")))
    if "max_num_seqs" not in found:
        if metrics is None:
            raise ChimsimError(
                f"{engine.client.url} has no /metrics of vLLM's, so max_num_seqs cannot be seen; give it with "
                "--max-num-seqs"
            )
        most = await find_max_num_seqs(engine, metrics, found["max_model_len"][0])
        found["max_num_seqs"] = (most, "seen: as many ran while others waited")
    if "max_num_batched_tokens" not in found:
        found["max_num_batched_tokens"] = await _budget(engine, found)
    settings = {name: value for name, (value, _) in found.items()}
    return Header(
        model=engine.model,
        gpu=given.gpu,
        gpus=given.gpus,
        version=version,
        url=engine.client.url,
        date=date.today().isoformat(),
        settings_from={name: how for name, (_, how) in found.items()},
        cache_config=dict(metrics.cache) if metrics is not None else {},
        **settings,
    )


def _memory(engine: Engine, found: dict[str, tuple[int, str]], metrics: EngineMetrics | None) -> None:
    if metrics is not None and metrics.engines > 1:
        raise ChimsimError(
            f"{engine.client.url} has {metrics.engines} engines behind it (data parallel); measure a single one"
        )
    said: Mapping[str, int | None] = {
        "num_kv_tokens": metrics.num_kv_tokens if metrics is not None else None,
        "block_tokens": metrics.block_tokens if metrics is not None else None,
    }
    for name, value in said.items():
        if value is not None:
            found.setdefault(name, (value, "reported by /metrics"))
    found.setdefault("block_tokens", (USUAL_BLOCK_TOKENS, "assumed: vLLM's default"))
    if "num_kv_tokens" not in found:
        what = "has no /metrics of vLLM's" if metrics is None else "does not tell its KV memory in /metrics"
        raise ChimsimError(
            f"{engine.client.url} {what}; give --num-kv-tokens (vLLM logs it at start: GPU KV cache size)"
        )


async def _budget(engine: Engine, found: Mapping[str, tuple[int, str]]) -> tuple[int, str]:
    most = found["max_num_seqs"][0]
    room = found["num_kv_tokens"][0] - 4 * max(found["block_tokens"][0], 64)
    longest = min(found["max_model_len"][0] - 2, room)
    seen = await find_token_budget(engine, longest) if longest >= 512 and most > 1 else None
    if seen is not None:
        return max(seen, most), "seen: by the steps that a long prompt took"
    return max(USUAL_BUDGET, most), "assumed: vLLM's usual value, a prompt of the longest length did not show it"
