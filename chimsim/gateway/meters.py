"""What the gateway counts, for Prometheus. Names and buckets stand here; who counts what is with the gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from collections.abc import Sequence

_WAIT_S = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
_SHORT_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1)


class Meters:
    """One set a gateway, in a registry of its own."""

    def __init__(self, engines: Sequence[str]) -> None:
        registry = self.registry = CollectorRegistry()
        engine = ["engine"]
        self.answers = Counter(
            "chimsim_answers", "Calls by the status of their answer (499: the client left).", ["status"],
            registry=registry,
        )  # fmt: skip
        self.decisions = Counter(
            "chimsim_decisions", "Calls that the policy sent to the engine.", [*engine, "model"], registry=registry
        )
        self.retries = Counter("chimsim_retries", "Tries that an engine failed.", [*engine, "kind"], registry=registry)
        self.promotions = Counter("chimsim_aging_promotions", "Calls promoted for their wait.", registry=registry)
        self.output_tokens = Counter("chimsim_output_tokens", "Answered tokens.", engine, registry=registry)
        self.waiting = Gauge("chimsim_waiting", "Calls queued for the engine.", engine, registry=registry)
        self.running = Gauge("chimsim_running", "Calls inside the engine.", engine, registry=registry)
        self.in_flight_tokens = Gauge(
            "chimsim_in_flight_tokens", "Output tokens predicted for the calls inside and waiting.", engine,
            registry=registry,
        )  # fmt: skip
        self.healthy = Gauge("chimsim_engine_healthy", "1 if the engine answers.", engine, registry=registry)
        self.workflows = Gauge("chimsim_workflows", "Workflows that are not forgotten.", registry=registry)
        self.wait = Histogram(
            "chimsim_wait_seconds", "From a call's arrival until it is sent to an engine.", registry=registry,
            buckets=_WAIT_S,
        )  # fmt: skip
        self.latency = Histogram(
            "chimsim_latency_seconds", "From a call's arrival to the end of its answer.", registry=registry,
            buckets=_WAIT_S,
        )  # fmt: skip
        self.router = Histogram(
            "chimsim_router_seconds", "Computing time of the router, a call.", registry=registry, buckets=_SHORT_S
        )
        self.predictor = Histogram(
            "chimsim_predictor_seconds", "Computing time of the length and rank predictors, a call.",
            registry=registry, buckets=_SHORT_S,
        )  # fmt: skip
        self.foretelling = Histogram(
            "chimsim_foretelling_seconds", "What a call waits for its predictions, batching included.",
            registry=registry, buckets=_SHORT_S,
        )  # fmt: skip
        for name in engines:
            for gauge in (self.waiting, self.running, self.in_flight_tokens):
                gauge.labels(name).set(0)
            self.healthy.labels(name).set(1)

    def text(self) -> bytes:
        """As ``/metrics`` shows it."""
        return generate_latest(self.registry)
