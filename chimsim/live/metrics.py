"""Reads vLLM's Prometheus metrics, under the names of older versions as well as newer ones.

It parses one snapshot of text; differences between two snapshots are the caller's. A metric that is not there is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from chimsim.errors import ChimsimError
from chimsim.live.client import Client

# newest name first; counters have their suffix
_NAMES: Mapping[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_used_fraction": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    "prefix_hits": (
        "vllm:prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_hits_total",
        "vllm:prefix_cache_hits",
        "vllm:gpu_prefix_cache_hits",
    ),
    "prefill_sum_s": ("vllm:request_prefill_time_seconds_sum",),
    "prefill_count": ("vllm:request_prefill_time_seconds_count",),
    "queue_sum_s": ("vllm:request_queue_time_seconds_sum",),
    "queue_count": ("vllm:request_queue_time_seconds_count",),
}
_INFO = "vllm:cache_config_info"
_WANTED = (_INFO, *(key for keys in _NAMES.values() for key in keys))


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """One snapshot. ``prefill`` is from scheduling to first token, ``queue`` from arrival to scheduling: sums over the
    requests finished so far. ``cache`` holds the labels of ``cache_config_info``; ``engines`` counts the engines
    behind the server (more than one: data parallel).
    """

    running: float | None = None
    waiting: float | None = None
    kv_used_fraction: float | None = None
    preemptions: float | None = None
    prefix_hits: float | None = None
    prefill_sum_s: float | None = None
    prefill_count: float | None = None
    queue_sum_s: float | None = None
    queue_count: float | None = None
    engines: int = 1
    cache: Mapping[str, str] = field(default_factory=dict)

    @property
    def block_tokens(self) -> int | None:
        """Tokens of a KV block."""
        return _whole(self.cache.get("block_size"))

    @property
    def num_kv_tokens(self) -> int | None:
        """KV memory in tokens, all blocks: what the engine says, or its blocks times their size."""
        said = _whole(self.cache.get("kv_cache_size_tokens"))
        blocks = _whole(self.cache.get("num_gpu_blocks"))
        if said is not None or blocks is None or self.block_tokens is None:
            return said
        return blocks * self.block_tokens

    @property
    def prefix_caching(self) -> bool | None:
        """Whether the engine keeps prefixes, None where it does not say."""
        return {"true": True, "false": False}.get(self.cache.get("enable_prefix_caching", "").lower())


async def look(client: Client) -> EngineMetrics | None:
    """A snapshot of a server's metrics, None where it has none of vLLM's. Raises `EngineError`."""
    text = await client.metrics_text()
    if text is None:
        return None
    try:
        return read_metrics(text)
    except ChimsimError:
        return None


def read_metrics(text: str) -> EngineMetrics:
    """A snapshot of ``/metrics``. Raises `ChimsimError` when the text is no Prometheus text or none of vLLM's."""
    # Only lines that are read: parsing all of a real vLLM's takes 13 ms, in which a client hears nothing.
    text = "".join(line for line in text.splitlines(keepends=True) if line.startswith(_WANTED))
    values: dict[str, float] = {}
    cache: dict[str, str] = {}
    engines: set[str] = set()
    seen = False
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                seen = seen or sample.name.startswith("vllm:")
                if sample.name == _INFO:
                    cache = dict(sample.labels)
                elif sample.name == "vllm:num_requests_running":
                    engines.add(sample.labels.get("engine", ""))
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
    except ValueError as error:
        raise ChimsimError(f"/metrics: not Prometheus text: {error}") from None
    if not seen:
        raise ChimsimError("/metrics: has none of vLLM's metrics (vllm:...)")
    found = {name: next((values[key] for key in keys if key in values), None) for name, keys in _NAMES.items()}
    return EngineMetrics(**found, engines=max(len(engines), 1), cache=cache)


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and int(text) > 0 else None
