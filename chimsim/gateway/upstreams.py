"""The engines behind the gateway: who waits for which, who is inside, and which of them answer.

It keeps the dispatcher and tells it what happens; what is sent to an engine, and what comes back, passes elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from chimsim.config import Cluster, EngineSpec
from chimsim.dispatcher import Dispatcher, Start
from chimsim.errors import near
from chimsim.gateway.ask import AUTO, Refusal
from chimsim.gateway.meters import Meters
from chimsim.gateway.relay import Outcome
from chimsim.live.client import Client, EngineError
from chimsim.replay import PROBE_S, Queue, view_of
from policies.interface import Policy, PolicyError, RequestView

log = logging.getLogger("chimsim.gateway")


@dataclass(slots=True, eq=False)
class Upstream:
    """An engine. ``tokens`` are predicted for its calls, waiting and inside."""

    spec: EngineSpec
    client: Client
    served_model: str
    healthy: bool = True
    tries: dict[int, Try] = field(default_factory=dict)
    tokens: float = 0.0


@dataclass(slots=True, eq=False)
class Try:
    """One attempt at a call, waiting or inside an engine. ``tokens`` are those predicted for its answer."""

    request_id: int
    upstream: Upstream
    turn: asyncio.Future[Start | None]
    """the start once it is its turn, or None when it has to look for another engine"""
    tokens: float
    outcome: Outcome = field(default_factory=Outcome)


class Upstreams:
    """See the module. ``clock`` gives seconds since the gateway began; `close` ends what watches ill engines."""

    def __init__(
        self, cluster: Cluster, policy: Policy, clients: Mapping[str, Client], queue: Queue, clock: Callable[[], float]
    ) -> None:
        self._all = {
            spec.name: Upstream(spec, clients[spec.name], address.served_model) for spec, address in cluster.addressed()
        }
        views = [view_of(spec) for spec in cluster.engines]
        self._dispatcher = Dispatcher(policy, views, queue_in_engine=queue == "engine")
        self._now = clock
        self._touched: set[str] = set()
        self._recovered = asyncio.Event()
        self._probes: set[asyncio.Task[None]] = set()
        self.models = cluster.models
        self.meters = Meters(list(self._all))

    async def close(self) -> None:
        """Stop asking ill engines."""
        for task in self._probes:
            task.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)

    @property
    def inside(self) -> int:
        """Calls inside the engines."""
        return sum(len(u.tries) - self._dispatcher.waiting(name) for name, u in self._all.items())

    @property
    def free(self) -> int:
        """Slots of engines that answer in which nobody is."""
        return sum(
            max(u.spec.max_batch_size - len(u.tries) + self._dispatcher.waiting(name), 0)
            for name, u in self._all.items()
            if u.healthy
        )

    def healthy(self) -> dict[str, bool]:
        """Whether each engine answers."""
        return {name: upstream.healthy for name, upstream in self._all.items()}

    def serving(self, model: str) -> frozenset[str]:
        """The engines that may serve a call for that model. Raises `Refusal` for one that there is not."""
        if model == AUTO:
            return frozenset(self._all)
        mine = frozenset(u.spec.name for u in self._all.values() if model in (u.spec.model, u.served_model))
        if not mine:
            known = (AUTO, *self.models)
            raise Refusal(
                404, f"the model {model!r} does not exist{near(model, known)} (models: {', '.join(known)})",
                "not_found_error", "model",
            )  # fmt: skip
        return mine

    def max_model_len(self, model: str) -> int:
        """The longest context that an engine of the model takes."""
        return max(u.spec.max_model_len for u in self._all.values() if u.spec.model == model)

    async def usable(self, allowed: frozenset[str], avoid: str) -> frozenset[str]:
        """Those of the engines that are well, once one is; others of the model of the one to ``avoid`` before all."""
        while True:
            well = frozenset(name for name in allowed if self._all[name].healthy)
            if avoid:
                model = self._all[avoid].spec.model
                same = frozenset(n for n in well if n != avoid and self._all[n].spec.model == model)
                if same:
                    return same
            if well:
                return well
            self._recovered.clear()
            await self._recovered.wait()

    def submit(self, view: RequestView, among: frozenset[str]) -> Try:
        """Ask the policy, and queue the call. Raises `policies.PolicyError`."""
        decision = self._dispatcher.submit(self._now(), view, among)
        upstream = self._all[decision.engine]
        self.meters.decisions.labels(decision.engine, upstream.spec.model).inc()
        turn: asyncio.Future[Start | None] = asyncio.get_running_loop().create_future()
        tokens = view.prediction.stage_tokens.get(upstream.spec.model, 0.0)
        attempt = upstream.tries[view.request_id] = Try(view.request_id, upstream, turn, tokens)
        upstream.tokens += tokens
        self._touch(decision.engine)
        return attempt

    def over(self, attempt: Try, reason: str, *, last: bool) -> None:
        """A try is over, however: its place is free, and the policy told."""
        upstream = attempt.upstream
        del upstream.tries[attempt.request_id]
        upstream.tokens = upstream.tokens - attempt.tokens if upstream.tries else 0.0
        self._touch(upstream.spec.name)
        try:
            outcome = self._dispatcher.complete(
                self._now(), attempt.request_id, attempt.outcome.output_tokens, reason, last=last
            )
            self.meters.promotions.inc(outcome.promotions)
        except PolicyError as error:  # the client has its answer
            log.error("the policy failed", extra={"fields": {"error": str(error)}})

    def forget(self, workflow_id: str) -> None:
        """The workflow ended without a last call."""
        try:
            self._dispatcher.forget(self._now(), workflow_id)
        except Exception:  # other workflows are to be forgotten nevertheless
            log.exception("the policy failed")

    def ill(self, upstream: Upstream, error: EngineError) -> None:
        """Leave the engine alone: who waits for it looks for another, and it is asked until it answers."""
        if not upstream.healthy:
            return
        self._mark(upstream, False)
        log.warning("engine is ill", extra={"fields": {"engine": upstream.spec.name, "error": str(error)}})
        for attempt in upstream.tries.values():
            if not attempt.turn.done():
                attempt.turn.set_result(None)
        probe = asyncio.get_running_loop().create_task(self._probe(upstream))
        self._probes.add(probe)
        probe.add_done_callback(self._probes.discard)

    async def look(self) -> list[str]:
        """Ask every engine who it is; those that do not answer count as ill. Returns a line for each of them.

        Raises `ChimsimError` for one that serves another model.
        """
        silent = []
        for name, upstream in self._all.items():
            try:
                await upstream.client.served(upstream.served_model)
            except EngineError as error:
                silent.append(f"engine {name} does not answer yet: {error}")
                self.ill(upstream, error)
        return silent

    async def _probe(self, upstream: Upstream) -> None:
        while not await upstream.client.healthy():
            await asyncio.sleep(PROBE_S)
        self._mark(upstream, True)
        log.warning("engine is well again", extra={"fields": {"engine": upstream.spec.name}})
        self._recovered.set()
        self._touch(upstream.spec.name)

    def _mark(self, upstream: Upstream, healthy: bool) -> None:
        upstream.healthy = healthy
        self._dispatcher.set_health(upstream.spec.name, healthy)
        self.meters.healthy.labels(upstream.spec.name).set(int(healthy))

    def _touch(self, engine: str) -> None:
        # All that happens at this instant first: the queue then gives the slots to the best of them.
        if not self._touched:
            asyncio.get_running_loop().call_soon(self._fill)
        self._touched.add(engine)

    def _fill(self) -> None:
        touched, self._touched = sorted(self._touched), set()
        for name in touched:
            upstream = self._all[name]
            if upstream.healthy:
                for start in self._dispatcher.fill(self._now(), name):
                    turn = upstream.tries[start.request_id].turn
                    if not turn.done():
                        turn.set_result(start)
            waiting = self._dispatcher.waiting(name)
            self.meters.waiting.labels(name).set(waiting)
            self.meters.running.labels(name).set(len(upstream.tries) - waiting)
            self.meters.in_flight_tokens.labels(name).set(upstream.tokens)
