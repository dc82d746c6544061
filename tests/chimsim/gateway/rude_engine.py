"""An engine that answers with fixed words, and fails in the way it is told to. It can go down and come up again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

WORDS = ("one", " two", " three", " four")
PROMPT_TOKENS = 7
_STATUSES = {"400": 400, "404": 404, "429": 429, "500": 500, "503": 503, "401": 401}
_BODIES = {
    "html": ("<html>a proxy</html>", "text/html"),
    "garbage": ("not JSON", "application/json"),
    "wrong JSON": ('{"choices": [7]}', "application/json"),
}


@dataclass
class RudeEngine:
    """What the engine is and does wrong.

    ``fault`` comes with each completion but the first ``good``, at most ``bad`` times: ``silent``, a status (``500``),
    ``html``, ``garbage``, ``wrong JSON``, ``closes first``, ``closes later``, ``error first``, ``error later``,
    ``done only``, ``abort`` or ``slow``. While ``gate`` is not set answers are held back after their first word.
    """

    model: str = "A"
    fault: str = ""
    good: int = 0
    bad: int = 10**9
    gate: asyncio.Event | None = None
    words: tuple[str, ...] = WORDS
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    inside: int = 0
    most_inside: int = 0
    left: int = 0
    """clients that were gone before their answer was whole"""
    _runner: web.AppRunner | None = None
    _port: int = 0

    async def up(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def down(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model}]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        number = len(self.bodies) - 1
        fault = self.fault if self.good <= number < self.good + self.bad else ""
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        try:
            return await self._answer(request, body, "chat" in request.path, fault)
        except (asyncio.CancelledError, ConnectionError):
            self.left += 1
            raise
        finally:
            self.inside -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any], chat: bool, fault: str) -> web.StreamResponse:
        if fault == "silent":
            await asyncio.sleep(30.0)
        if fault in _STATUSES:
            status = _STATUSES[fault]
            error = {"message": f"the engine says {status}", "type": "x", "param": None, "code": status}
            return web.json_response({"error": error}, status=status)
        if fault in _BODIES and (fault == "html" or not body.get("stream")):
            text, kind = _BODIES[fault]
            return web.Response(text=text, content_type=kind)
        if fault == "closes first":
            return _cut(request)
        return await (self._stream if body.get("stream") else self._whole)(request, body, chat, fault)

    async def _whole(self, request: web.Request, body: dict[str, Any], chat: bool, fault: str) -> web.StreamResponse:
        if fault in ("error first", "error later", "done only"):
            return web.json_response({"error": {"message": "it died"}} if "error" in fault else {})
        if self.gate is not None:
            await self.gate.wait()
        if fault == "slow":
            await asyncio.sleep(0.05)
        reason = "abort" if fault == "abort" else "stop"
        text = "".join(self.words)
        said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        answer = {
            "id": "x",
            "object": "chat.completion" if chat else "text_completion",
            "created": 1,
            "model": self.model,
            "choices": [{"index": 0, **said, "finish_reason": reason}],
            "usage": self._usage(),
        }
        data = json.dumps(answer).encode()
        if fault == "closes later":
            reply = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(data))})
            await reply.prepare(request)
            await reply.write(data[:20])
            return _cut(request)
        return web.Response(body=data, content_type="application/json")

    async def _stream(self, request: web.Request, body: dict[str, Any], chat: bool, fault: str) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await reply.prepare(request)

        async def send(event: object) -> None:
            text = event if isinstance(event, str) else json.dumps(event)
            await reply.write(f"data: {text}\n\n".encode())

        if fault in _BODIES:
            await send(_BODIES[fault][0])
        if fault == "error first":
            await send({"error": {"message": "it died", "code": 500}})
        last = len(self.words) - 1
        for at, word in enumerate(self.words if fault not in ("done only", "error first", *_BODIES) else ()):
            reason = "abort" if fault == "abort" else "stop" if at == last else None
            said = {"delta": {"content": word}} if chat else {"text": word}
            await send(self._chunk([{"index": 0, **said, "finish_reason": reason}], chat))
            if reason == "abort":
                break
            if fault.endswith("later"):
                await asyncio.sleep(0.05)  # so that the word is with the client
            if fault == "closes later":
                return _cut(request)
            if fault == "error later":
                await send({"error": {"message": "it died", "code": 500}})
                break
            if fault == "slow":
                await asyncio.sleep(0.02)
            if self.gate is not None:
                await self.gate.wait()
        if fault in ("", "slow", "refuses", "restarts"):
            options = body.get("stream_options") or {}
            if options.get("include_usage"):
                await send({**self._chunk([], chat), "usage": self._usage()})
        await send("[DONE]")
        return reply

    def _chunk(self, choices: list[dict[str, Any]], chat: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if chat else "text_completion"
        return {"id": "x", "object": kind, "created": 1, "model": self.model, "choices": choices}

    def _usage(self) -> dict[str, int]:
        output = len(self.words)
        return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": output, "total_tokens": PROMPT_TOKENS + output}


@asynccontextmanager
async def rude(*engines: RudeEngine) -> AsyncIterator[None]:
    """The engines on ports of their own."""
    try:
        for engine in engines:
            await engine.up()
        yield
    finally:
        for engine in engines:
            if engine.gate is not None:
                engine.gate.set()
            await engine.down()


def _cut(request: web.Request) -> web.Response:
    """The connection is gone; nobody gets what is returned."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
