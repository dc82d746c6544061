"""The mock engine's ``/metrics``: vLLM's names and labels, the numbers of the simulated engine.

Times are those of the clock, so that they are what a client sees at any speed. A request that a client left counts
nowhere, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from chimsim.config import EngineSpec
from chimsim.live.realtime import RealtimeEngine, Ticket

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_TIMES = {
    "e2e_request_latency_seconds": "From arrival to the last token.",
    "request_queue_time_seconds": "From arrival to the first scheduling.",
    "request_inference_time_seconds": "From the first scheduling to the last token.",
    "request_prefill_time_seconds": "From the first scheduling to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
}


class MockMetrics(Collector):
    """Counts what a `RealtimeEngine` reports by `first` and `finish`, and reads the rest from it when asked."""

    def __init__(self, spec: EngineSpec, served: str, speed: float) -> None:
        self.engine: RealtimeEngine | None = None
        self._spec = spec
        self._speed = speed
        self._labels = {"engine": "0", "model_name": served}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._prompt_tokens = self._cached_tokens = 0
        self._finished = dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
        self._first = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._times = {name: self._histogram(name, text, _SECONDS) for name, text in _TIMES.items()}
        self._prompts = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._answers = self._histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)

    def first(self, ticket: Ticket) -> None:
        """The ticket's request has its first token."""
        request = ticket.request
        self._prompt_tokens += request.prompt_tokens
        self._cached_tokens += request.cached_tokens
        self._first.observe((request.first_token_at - ticket.arrived_at) / self._speed)

    def finish(self, ticket: Ticket) -> None:
        """The ticket's request has all its tokens."""
        request = ticket.request
        scheduled, first, last = request.admitted_at, request.first_token_at, ticket.finished_at
        spans = (
            last - ticket.arrived_at,
            scheduled - ticket.arrived_at,
            last - scheduled,
            first - scheduled,
            last - first,
        )
        for histogram, span in zip(self._times.values(), spans, strict=True):
            histogram.observe(span / self._speed)
        self._prompts.observe(request.prompt_tokens)
        self._answers.observe(request.produced)
        self._finished[ticket.reason] += 1

    def text(self) -> bytes:
        """The exposition in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What Prometheus' client asks for."""
        if self.engine is None:
            return
        engine, spec = self.engine.engine, self._spec
        yield self._gauge("num_requests_running", "Requests in the batch.", engine.running)
        yield self._gauge("num_requests_waiting", "Requests waiting to be scheduled.", engine.waiting)
        yield self._gauge("kv_cache_usage_perc", "KV memory in use, 1 is all.", engine.kv_used_fraction)
        yield self._counter("prompt_tokens", "Prompt tokens of requests with a first token.", self._prompt_tokens)
        yield self._counter("prompt_tokens_cached", "Those that were in the prefix cache.", self._cached_tokens)
        yield self._counter("generation_tokens", "Output tokens.", engine.output_tokens)
        yield self._counter("num_preemptions", "Preemptions.", engine.preemptions)
        queried = self._prompt_tokens if spec.prefix_caching else 0
        yield self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", queried)
        yield self._counter("prefix_cache_hits", "Those that were there.", self._cached_tokens)
        success = CounterMetricFamily(
            "vllm:request_success", "Finished requests.", labels=[*self._labels, "finished_reason"]
        )
        for reason, count in self._finished.items():
            success.add_metric([*self._labels.values(), reason], count)
        yield success
        cache = {
            "block_size": str(spec.block_tokens),
            "enable_prefix_caching": str(spec.prefix_caching),
            "engine": "0",
            "kv_cache_size_tokens": str(spec.num_kv_tokens),
            "num_gpu_blocks": str(spec.num_kv_blocks),
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's settings.", labels=list(cache))
        info.add_metric(list(cache.values()), 1)
        yield info

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", text, list(self._labels), buckets=buckets, registry=self._registry)
        return histogram.labels(**self._labels)
