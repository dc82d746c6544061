"""The gateway's heart: calls come in, the policy says which engine and when, answers go out as they come.

Same dispatcher and policy objects as the simulator and the live replay. A call never gives its slot up half way, for
what an engine has computed is the client's already. An engine that fails before anything went out has its call sent
again, to another engine of the same model if there is one; it is left alone until it answers once more.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from calibration.rows import FinishedStage, PredictionInput
from chimsim.config import Cluster, EngineSpec
from chimsim.dispatcher import Dispatcher, Start
from chimsim.errors import ChimsimError, near
from chimsim.gateway.ask import AUTO, Ask, Refusal
from chimsim.gateway.foretell import Foreteller, Foretold, Question
from chimsim.gateway.meters import Meters
from chimsim.gateway.record import Recorder
from chimsim.gateway.relay import Outcome, Outlet, relay
from chimsim.gateway.sessions import Session, Sessions
from chimsim.live.client import Client, EngineError
from chimsim.live.driver import BACKOFF_S, PROBE_S, RETRIES
from chimsim.live.port import BUSY
from chimsim.replay import Queue, engine_priority, view_of
from policies.interface import Policy, PolicyError, Prediction, RequestView

log = logging.getLogger("chimsim.gateway")

CHARS_PER_TOKEN = 4.0
"""Of a prompt before any engine has counted one (a rule of thumb for English)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """``queued`` calls may wait at most, each for ``wait_s``; an answer that is not streamed may take ``answer_s``.

    A workflow without news for ``ttl_s`` is forgotten.
    """

    queued: int = 10_000
    wait_s: float = 300.0
    answer_s: float = 600.0
    ttl_s: float = 600.0


DEFAULT_LIMITS = Limits()


@dataclass(slots=True, eq=False)
class _Upstream:
    spec: EngineSpec
    client: Client
    served_model: str
    healthy: bool = True
    calls: dict[int, _Try] = field(default_factory=dict)
    tokens: float = 0.0
    """predicted for its calls"""


@dataclass(slots=True, eq=False)
class _Try:
    """One attempt at a call, waiting or inside an engine."""

    request_id: int
    upstream: _Upstream
    turn: asyncio.Future[Start | None]
    """the start once it is its turn, or None when it has to look for another engine"""
    tokens: float
    outcome: Outcome = field(default_factory=Outcome)


@dataclass(slots=True)
class _Call:
    """A client's call, through all its tries."""

    ask: Ask
    session: Session
    arrived_at: float
    allowed: frozenset[str]
    prompt_tokens: int
    stage: int
    stage_name: str
    wait_from: float
    """its wait is limited from here: its arrival, or the pause after its last try"""
    foretold: Foretold | None = None
    engine: str = ""
    avoid: str = ""
    """an engine that failed it"""
    tries: int = 0
    sent_at: float = 0.0


class Gateway:
    """See the module. Use it as an asynchronous context manager; ``clients`` are opened and closed by the caller."""

    def __init__(
        self,
        cluster: Cluster,
        policy: Policy,
        clients: Mapping[str, Client],
        foreteller: Foreteller,
        *,
        queue: Queue = "dispatcher",
        limits: Limits = DEFAULT_LIMITS,
        recorder: Recorder | None = None,
    ) -> None:
        specs = sorted(cluster.engines, key=lambda spec: spec.name)
        self._upstreams: dict[str, _Upstream] = {}
        for spec in specs:
            assert spec.address is not None
            self._upstreams[spec.name] = _Upstream(spec, clients[spec.name], spec.address.served_model)
        self._in_engine = queue == "engine"
        self._dispatcher = Dispatcher(policy, [view_of(spec) for spec in specs], queue_in_engine=self._in_engine)
        self._models = cluster.models
        self._foreteller = foreteller
        self._limits = limits
        self._recorder = recorder
        self._sessions = Sessions(limits.ttl_s)
        self._origin = 0.0
        self._next_id = 0
        self._answering: set[asyncio.Task[Any]] = set()
        self._touched: set[str] = set()
        self._recovered = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._chars, self._tokens = CHARS_PER_TOKEN, 1.0
        self.meters = Meters([spec.name for spec in specs])

    async def __aenter__(self) -> Gateway:
        self._origin = asyncio.get_running_loop().time()
        self._spawn(self._forget_silent())
        return self

    async def __aexit__(self, *_: object) -> None:
        # Calls that the end cuts short are over before their workflows are.
        tasks: list[asyncio.Task[Any]] = [*self._tasks, *self._answering]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for session in self._sessions.all():
            self._ended(session)

    @property
    def in_flight(self) -> int:
        """Calls that came in and are not over."""
        return len(self._answering)

    def now(self) -> float:
        """Seconds since the gateway began."""
        return asyncio.get_running_loop().time() - self._origin

    def models(self) -> list[dict[str, Any]]:
        """The entries of ``/v1/models``: the policy's choice, and every model by its name."""
        longest = {m: max(u.spec.max_model_len for u in self._serving(m)) for m in self._models}
        entry = {"object": "model", "created": 0, "owned_by": "chimsim"}
        made = [{"id": AUTO, **entry, "max_model_len": min(longest.values())}]
        return made + [{"id": model, **entry, "max_model_len": longest[model]} for model in self._models]

    def healthy(self) -> dict[str, bool]:
        """Whether each engine answers."""
        return {name: upstream.healthy for name, upstream in self._upstreams.items()}

    async def answer(self, ask: Ask, out: Outlet) -> None:
        """One call, from its arrival to the end of its answer.

        Raises `Refusal` for a call that gets an error instead; being cancelled takes it back from its engine.
        """
        allowed = self._allowed(ask.model)
        waiting = self.in_flight - sum(len(u.calls) - self._dispatcher.waiting(n) for n, u in self._upstreams.items())
        if waiting >= self._limits.queued:
            raise _busy(f"{waiting} calls are waiting already")
        now = self.now()
        session = self._sessions.enter(now, ask)
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        self.meters.workflows.set(len(self._sessions))
        call = _Call(
            ask, session, now, allowed, self._count(ask), session.stage, ask.stage_name or f"stage-{session.stage}", now
        )
        session.stage += 1
        status = 499
        try:
            await self._foretell(call)
            await self._serve(call, out)
            status = 200
        except Refusal as refusal:
            status = refusal.status
            raise
        except Exception as error:
            status = 500
            # A policy's or a predictor's mistake is told in words, and only what nobody foresaw with its traceback.
            told = isinstance(error, ChimsimError | PolicyError)
            log.error("no answer", extra={"fields": {"error": str(error)}}, exc_info=None if told else error)
            raise Refusal(500, str(error), "server_error") from error
        finally:
            self._answering.discard(task)
            self._left(call, status)

    async def _foretell(self, call: _Call) -> None:
        session, ask = call.session, call.ask
        chars = len(ask.text)
        system = round(call.prompt_tokens * ask.system_chars / chars) if chars else None
        known = PredictionInput(
            session.workflow_id, session.workload, call.stage, call.stage_name, self._models, call.prompt_tokens,
            system, None if system is None else call.prompt_tokens - system, ask.text or None, session.finished,
        )  # fmt: skip
        asked_at = self.now()
        call.foretold = await self._foreteller.ask(Question(known, None if session.confidence else session.task))
        self.meters.foretelling.observe(self.now() - asked_at)
        if call.foretold.router_s:
            self.meters.router.observe(call.foretold.router_s)
        if call.foretold.predictor_s:
            self.meters.predictor.observe(call.foretold.predictor_s)
        if session.confidence is None:
            session.confidence = call.foretold.prediction.confidence

    async def _serve(self, call: _Call, out: Outlet) -> None:
        """Try after try, until one is answered or trying is of no use."""
        while True:
            attempt = await self._submit(call)
            reason = "aborted"
            try:
                start = await self._turn(call, attempt)
                if start is None:
                    reason = "failed"
                    continue
                call.sent_at = self.now()
                await self._send(call, attempt, start, out)
                reason = "stop"
                return
            except EngineError as error:
                reason = "failed"
                self._failed(call, attempt, error, begun=out.begun)
            finally:
                self._over(call, attempt, reason)
            await asyncio.sleep(BACKOFF_S * 2.0 ** (call.tries - 1))
            call.wait_from = self.now()

    async def _submit(self, call: _Call) -> _Try:
        """Ask the policy, once an engine that may serve the call is well."""
        among = await self._usable(call)
        assert call.foretold is not None
        session, prediction = call.session, call.foretold.prediction
        now = self.now()
        view = RequestView(
            self._next_id, session.workflow_id, session.workload, call.stage, call.stage_name, now, session.arrived_at,
            call.prompt_tokens,
            Prediction(
                session.confidence or {}, prediction.stage_tokens, prediction.remaining_tokens, prediction.rank
            ),
        )  # fmt: skip
        self._next_id += 1
        decision = self._dispatcher.submit(now, view, among)
        call.engine = decision.engine
        upstream = self._upstreams[decision.engine]
        self.meters.decisions.labels(decision.engine, upstream.spec.model).inc()
        turn: asyncio.Future[Start | None] = asyncio.get_running_loop().create_future()
        attempt = _Try(view.request_id, upstream, turn, prediction.stage_tokens.get(upstream.spec.model, 0.0))
        upstream.calls[view.request_id] = attempt
        upstream.tokens += attempt.tokens
        self._touch(decision.engine)
        return attempt

    async def _usable(self, call: _Call) -> frozenset[str]:
        """Engines that are well: another of the failed one's model before all else; waits for one to come back."""
        until = call.wait_from + self._limits.wait_s
        while True:
            well = frozenset(name for name in call.allowed if self._upstreams[name].healthy)
            if call.avoid:
                model = self._upstreams[call.avoid].spec.model
                same = frozenset(n for n in well if n != call.avoid and self._upstreams[n].spec.model == model)
                if same:
                    return same
            if well:
                return well
            self._recovered.clear()
            try:
                async with asyncio.timeout(until - self.now()):
                    await self._recovered.wait()
            except TimeoutError:
                names = ", ".join(sorted(call.allowed))
                raise _busy(f"no engine answers ({names}); waited {self._limits.wait_s:g} s") from None

    async def _turn(self, call: _Call, attempt: _Try) -> Start | None:
        try:
            async with asyncio.timeout(call.wait_from + self._limits.wait_s - self.now()):
                return await attempt.turn
        except TimeoutError:
            raise _busy(f"waited {self._limits.wait_s:g} s for a turn") from None

    async def _send(self, call: _Call, attempt: _Try, start: Start, out: Outlet) -> None:
        upstream, ask = attempt.upstream, call.ask
        body: dict[str, Any] = {**ask.body, "model": upstream.served_model}
        body.pop("priority", None)
        if self._in_engine and start.priority:
            body["priority"] = engine_priority(upstream.spec, start)
        if ask.stream:
            body["stream_options"] = {**(ask.body.get("stream_options") or {}), "include_usage": True}
        waited_s = call.sent_at - call.arrived_at
        self.meters.wait.observe(waited_s)
        headers = self._headers(call, upstream, waited_s)
        async with upstream.client.post(ask.path, body, None if ask.stream else self._limits.answer_s) as reply:
            # What the recorder keeps needs the answer's text, which otherwise passes unread.
            await relay(reply, ask, out, headers, attempt.outcome, read_text=self._recorder is not None)

    def _headers(self, call: _Call, upstream: _Upstream, waited_s: float) -> dict[str, str]:
        assert call.foretold is not None
        headers = {
            "x-chimsim-workflow-id": call.session.workflow_id,
            "x-chimsim-engine": upstream.spec.name,
            "x-chimsim-model": upstream.spec.model,
            "x-chimsim-waited-ms": f"{1e3 * waited_s:.1f}",
        }
        prediction = call.foretold.prediction
        for name, numbers in (("stage", prediction.stage_tokens), ("remaining", prediction.remaining_tokens)):
            if upstream.spec.model in numbers:
                headers[f"x-chimsim-predicted-{name}-tokens"] = f"{numbers[upstream.spec.model]:.0f}"
        return headers

    def _failed(self, call: _Call, attempt: _Try, error: EngineError, *, begun: bool) -> None:
        """Returns where another try may help, else raises what the client is to hear."""
        status = error.status or 0
        name = attempt.upstream.spec.name
        # Where an engine listens is no client's business.
        told = f"engine {name}: {str(error).removeprefix(attempt.upstream.client.url)}"
        answered = error.kind == "status" and (status < 500 or status in BUSY)
        if not answered:
            self._ill(attempt.upstream, error)
        if error.kind == "status" and status < 500 and status not in BUSY:
            if status in (401, 403):  # the gateway's key is wrong, not the client's
                raise Refusal(502, told, "engine_error") from error
            raise Refusal(status, told, body=error.body if _is_json(error.body) else b"") from error
        self.meters.retries.labels(name, error.kind).inc()
        call.tries += 1
        log.warning(
            "an engine failed", extra={"fields": {"engine": name, "try": call.tries, "begun": begun,
                                                  "workflow": call.session.workflow_id, "error": str(error)}},
        )  # fmt: skip
        if begun or call.tries > RETRIES:
            status = status if status in BUSY else 502
            raise Refusal(status, told, "engine_error", retry_after_s=1) from error
        call.avoid = name

    def _over(self, call: _Call, attempt: _Try, reason: str) -> None:
        """A try is over, however: the slot is free, and the policy told."""
        session, upstream = call.session, attempt.upstream
        del upstream.calls[attempt.request_id]
        upstream.tokens = upstream.tokens - attempt.tokens if upstream.calls else 0.0
        last = reason == "stop" and session.ends and session.running == 1
        self._touch(upstream.spec.name)
        try:
            outcome = self._dispatcher.complete(
                self.now(), attempt.request_id, attempt.outcome.output_tokens, reason, last=last
            )
            self.meters.promotions.inc(outcome.promotions)
        except PolicyError as error:  # the client has its answer
            log.error("the policy failed", extra={"fields": {"error": str(error)}})
        session.told = session.told or last
        if reason != "stop":
            return
        done = attempt.outcome
        self.meters.output_tokens.labels(upstream.spec.name).inc(done.output_tokens)
        if done.prompt_tokens and call.ask.text:
            # Old prompts count less and less, so that the ratio follows the traffic.
            self._chars = 0.99 * self._chars + len(call.ask.text)
            self._tokens = 0.99 * self._tokens + done.prompt_tokens
        prompt_tokens = done.prompt_tokens or call.prompt_tokens
        session.finished += (
            FinishedStage(call.stage, call.stage_name, upstream.spec.model, prompt_tokens, done.output_tokens),
        )  # fmt: skip
        if self._recorder is not None:
            self._recorder.stage(
                session, call.ask, upstream.spec.model, call.stage_name, call.arrived_at, self.now(), done
            )

    def _left(self, call: _Call, status: int) -> None:
        """The call is over, and perhaps its workflow."""
        now = self.now()
        session = call.session
        self.meters.answers.labels(str(status)).inc()
        self.meters.latency.observe(now - call.arrived_at)
        log.info(
            "call",
            extra={
                "fields": {
                    "status": status, "workflow": session.workflow_id, "stage": call.stage_name,
                    "engine": call.engine, "tries": call.tries + 1,
                    "waited_ms": round(1e3 * (call.sent_at - call.arrived_at), 1) if call.sent_at else None,
                    "latency_ms": round(1e3 * (now - call.arrived_at), 1),
                }
            },
        )  # fmt: skip
        if self._sessions.leave(now, session):
            self._ended(session)
        self.meters.workflows.set(len(self._sessions))

    def _ended(self, session: Session) -> None:
        if not session.told:
            try:
                self._dispatcher.forget(self.now(), session.workflow_id)
            except Exception:  # other workflows are to be forgotten nevertheless
                log.exception("the policy failed")
        if self._recorder is not None:
            self._recorder.workflow(session)

    async def _forget_silent(self) -> None:
        while True:
            await asyncio.sleep(min(self._limits.ttl_s / 4, 10.0))
            for session in self._sessions.silent(self.now()):
                self._ended(session)
            self.meters.workflows.set(len(self._sessions))

    def _touch(self, engine: str) -> None:
        # All that happens at this instant first: the queue then gives the slots to the best of them.
        if not self._touched:
            asyncio.get_running_loop().call_soon(self._fill)
        self._touched.add(engine)

    def _fill(self) -> None:
        touched, self._touched = sorted(self._touched), set()
        for name in touched:
            upstream = self._upstreams[name]
            if upstream.healthy:
                for start in self._dispatcher.fill(self.now(), name):
                    turn = upstream.calls[start.request_id].turn
                    if not turn.done():
                        turn.set_result(start)
            waiting = self._dispatcher.waiting(name)
            self.meters.waiting.labels(name).set(waiting)
            self.meters.running.labels(name).set(len(upstream.calls) - waiting)
            self.meters.in_flight_tokens.labels(name).set(upstream.tokens)

    def _ill(self, upstream: _Upstream, error: EngineError) -> None:
        """Leave the engine alone: who waits for it looks for another, and it is asked until it answers."""
        if not upstream.healthy:
            return
        self._mark(upstream, False)
        log.warning("engine is ill", extra={"fields": {"engine": upstream.spec.name, "error": str(error)}})
        for call in upstream.calls.values():
            if not call.turn.done():
                call.turn.set_result(None)
        self._spawn(self._probe(upstream))

    async def _probe(self, upstream: _Upstream) -> None:
        while not await upstream.client.healthy():
            await asyncio.sleep(PROBE_S)
        self._mark(upstream, True)
        log.warning("engine is well again", extra={"fields": {"engine": upstream.spec.name}})
        self._recovered.set()
        self._touch(upstream.spec.name)

    def _mark(self, upstream: _Upstream, healthy: bool) -> None:
        upstream.healthy = healthy
        self._dispatcher.set_health(upstream.spec.name, healthy)
        self.meters.healthy.labels(upstream.spec.name).set(int(healthy))

    async def look(self) -> list[str]:
        """Ask every engine who it is; those that do not answer count as ill. Returns a line for each of them.

        Raises `ChimsimError` for one that serves another model.
        """
        silent = []
        for name, upstream in self._upstreams.items():
            try:
                await upstream.client.served(upstream.served_model)
            except EngineError as error:
                silent.append(f"engine {name} does not answer yet: {error}")
                self._ill(upstream, error)
        return silent

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _serving(self, model: str) -> list[_Upstream]:
        return [u for u in self._upstreams.values() if model in (u.spec.model, u.served_model)]

    def _allowed(self, model: str) -> frozenset[str]:
        """The engines that may serve a call for that model."""
        if model == AUTO:
            return frozenset(self._upstreams)
        mine = frozenset(upstream.spec.name for upstream in self._serving(model))
        if not mine:
            known = (AUTO, *self._models)
            raise Refusal(
                404, f"the model {model!r} does not exist{near(model, known)} (models: {', '.join(known)})",
                "not_found_error", "model",
            )  # fmt: skip
        return mine

    def _count(self, ask: Ask) -> int:
        """Prompt tokens: counted where the client sent ids, else from the text's length and the traffic so far."""
        return ask.prompt_ids or max(1, round(len(ask.text) * self._tokens / self._chars))


def _busy(message: str) -> Refusal:
    return Refusal(503, message, "overloaded_error", retry_after_s=1)


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except ValueError:
        return False
    return True
