"""The gateway's heart: calls come in, the policy says which engine and when, answers go out as they come.

Same dispatcher and policy objects as the simulator and the live replay. A call never gives its slot up half way, for
what an engine has computed is the client's already. An engine that fails before anything went out has its call sent
again, to another engine of the same model if there is one; it is left alone until it answers once more.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from calibration.rows import FinishedStage, PredictionInput
from chimsim.config import Cluster
from chimsim.dispatcher import Start
from chimsim.errors import ChimsimError
from chimsim.gateway.ask import AUTO, Ask, Refusal
from chimsim.gateway.foretell import Foreteller, Foretold, Question
from chimsim.gateway.record import Recorder
from chimsim.gateway.relay import Outlet, relay
from chimsim.gateway.sessions import Session, Sessions
from chimsim.gateway.upstreams import Try, Upstream, Upstreams
from chimsim.live.client import BUSY, Client, EngineError
from chimsim.replay import BACKOFF_S, RETRIES, Queue, engine_priority
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
        self._upstreams = Upstreams(cluster, policy, clients, queue, self.now)
        self._in_engine = queue == "engine"
        self._foreteller = foreteller
        self._limits = limits
        self._recorder = recorder
        self._sessions = Sessions(limits.ttl_s)
        self._origin = 0.0
        self._next_id = 0
        self._answering: set[asyncio.Task[Any]] = set()
        self._forgetting: asyncio.Task[None] | None = None
        self._chars, self._tokens = CHARS_PER_TOKEN, 1.0
        self.meters = self._upstreams.meters

    async def __aenter__(self) -> Gateway:
        self._origin = asyncio.get_running_loop().time()
        self._forgetting = asyncio.get_running_loop().create_task(self._forget_silent())
        return self

    async def __aexit__(self, *_: object) -> None:
        # Calls that the end cuts short are over before their workflows are.
        tasks = [*([self._forgetting] if self._forgetting else []), *self._answering]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._upstreams.close()
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
        longest = {model: self._upstreams.max_model_len(model) for model in self._upstreams.models}
        entry = {"object": "model", "created": 0, "owned_by": "chimsim"}
        made = [{"id": AUTO, **entry, "max_model_len": min(longest.values())}]
        return made + [{"id": model, **entry, "max_model_len": longest[model]} for model in longest]

    def healthy(self) -> dict[str, bool]:
        """Whether each engine answers."""
        return self._upstreams.healthy()

    async def look(self) -> list[str]:
        """See `Upstreams.look`."""
        return await self._upstreams.look()

    async def answer(self, ask: Ask, out: Outlet) -> None:
        """One call, from its arrival to the end of its answer.

        Raises `Refusal` for a call that gets an error instead; being cancelled takes it back from its engine.
        """
        try:
            allowed = self._upstreams.serving(ask.model)
            waiting = self.in_flight - self._upstreams.inside
            # Those that came in at this instant are about to take the free slots.
            if waiting >= self._limits.queued + self._upstreams.free:
                raise _busy(f"{waiting} calls are waiting already")
        except Refusal as refusal:
            self.refused(refusal)
            raise
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

    def refused(self, refusal: Refusal) -> None:
        """Count and log a call that was turned away before it was one."""
        self.meters.answers.labels(str(refusal.status)).inc()
        log.info("refused", extra={"fields": {"status": refusal.status, "reason": str(refusal)}})

    async def _foretell(self, call: _Call) -> None:
        session, ask = call.session, call.ask
        chars = len(ask.text)
        system = round(call.prompt_tokens * ask.system_chars / chars) if chars else None
        known = PredictionInput(
            session.workflow_id, session.workload, call.stage, call.stage_name, self._upstreams.models,
            call.prompt_tokens, system, None if system is None else call.prompt_tokens - system, ask.text or None,
            session.finished,
        )  # fmt: skip
        asked_at = self.now()
        foretold = await self._foreteller.ask(Question(known, None if session.confidence else session.task))
        call.foretold = replace(foretold, prediction=_limited(foretold.prediction, ask.max_tokens))
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

    async def _submit(self, call: _Call) -> Try:
        """Ask the policy, once an engine that may serve the call is well."""
        limit_s = self._limits.wait_s
        try:
            async with asyncio.timeout(call.wait_from + limit_s - self.now()):
                among = await self._upstreams.usable(call.allowed, call.avoid)
        except TimeoutError:
            names = ", ".join(sorted(call.allowed))
            raise _busy(f"no engine answers ({names}); waited {limit_s:g} s") from None
        assert call.foretold is not None
        session, prediction = call.session, call.foretold.prediction
        view = RequestView(
            self._next_id, session.workflow_id, session.workload, call.stage, call.stage_name, self.now(),
            session.arrived_at, call.prompt_tokens,
            Prediction(
                session.confidence or {}, prediction.stage_tokens, prediction.remaining_tokens, prediction.rank
            ),
        )  # fmt: skip
        self._next_id += 1
        attempt = self._upstreams.submit(view, among)
        call.engine = attempt.upstream.spec.name
        return attempt

    async def _turn(self, call: _Call, attempt: Try) -> Start | None:
        try:
            async with asyncio.timeout(call.wait_from + self._limits.wait_s - self.now()):
                return await attempt.turn
        except TimeoutError:
            raise _busy(f"waited {self._limits.wait_s:g} s for a turn") from None

    async def _send(self, call: _Call, attempt: Try, start: Start, out: Outlet) -> None:
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

    def _headers(self, call: _Call, upstream: Upstream, waited_s: float) -> dict[str, str]:
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

    def _failed(self, call: _Call, attempt: Try, error: EngineError, *, begun: bool) -> None:
        """Returns where another try may help, else raises what the client is to hear."""
        status = error.status or 0
        name = attempt.upstream.spec.name
        # Where an engine listens is no client's business.
        told = f"engine {name}: {str(error).removeprefix(attempt.upstream.client.url)}"
        if error.ill:
            self._upstreams.ill(attempt.upstream, error)
        if error.final:
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

    def _over(self, call: _Call, attempt: Try, reason: str) -> None:
        """A try is over, however."""
        session, upstream = call.session, attempt.upstream
        last = reason == "stop" and session.ends and session.running == 1
        self._upstreams.over(attempt, reason, last=last)
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
            self._upstreams.forget(session.workflow_id)
        if self._recorder is not None:
            self._recorder.workflow(session)

    async def _forget_silent(self) -> None:
        while True:
            await asyncio.sleep(min(self._limits.ttl_s / 4, 10.0))
            for session in self._sessions.silent(self.now()):
                self._ended(session)
            self.meters.workflows.set(len(self._sessions))

    def _count(self, ask: Ask) -> int:
        """Prompt tokens: counted where the client sent ids, else from the text's length and the traffic so far."""
        return ask.prompt_ids or max(1, round(len(ask.text) * self._tokens / self._chars))


def _limited(prediction: Prediction, most: int | None) -> Prediction:
    """No call puts out more than it may."""
    if most is None:
        return prediction
    stage = {model: min(tokens, float(most)) for model, tokens in prediction.stage_tokens.items()}
    left = {m: tokens - prediction.stage_tokens[m] + stage[m] for m, tokens in prediction.remaining_tokens.items()}
    return replace(prediction, stage_tokens=stage, remaining_tokens=left)


def _busy(message: str) -> Refusal:
    return Refusal(503, message, "overloaded_error", retry_after_s=1)


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except ValueError:
        return False
    return True
