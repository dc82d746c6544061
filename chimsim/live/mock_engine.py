"""A fake vLLM: its HTTP interface in front of the simulated engine, which runs in real time.

For rehearsals without a GPU. What is measured is right as far as the profile is: when tokens come, who waits, what is
in the prefix cache. What is said is not: the answers are words without meaning (see `chimsim.live.mock_words`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import count
from random import Random
from time import time
from typing import Any

from aiohttp import web

import chimsim
from chimsim.config import EngineSpec
from chimsim.engine import Engine, EngineRequest, footprint_of
from chimsim.errors import ChimsimError
from chimsim.live.mock_answers import Part, Wording
from chimsim.live.mock_metrics import MockMetrics
from chimsim.live.mock_request import Asked, Refusal, check_ids, read_chat, read_json, read_request, text_of
from chimsim.live.mock_words import Tokenizer, answer, block_hashes
from chimsim.live.realtime import RealtimeEngine

KEEP_ALIVE_S = 5.0
"""After this unused connections are closed, as by vLLM."""
STOP_S = 0.5
"""How long answers under way may take to say that they are cut short, when the server stops."""
_LARGEST_BODY = 64 * 2**20
_FAILED = {
    "error": {
        "message": "EngineCore encountered an issue (a failure asked for with --fail-rate).",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
}


class MockEngine:
    """The server's application. Raises `ChimsimError` when the settings do not fit together.

    ``speed`` is how much faster than on the clock the engine runs. Of all completions ``fail_rate`` fail (500 at once,
    an error or a lost connection in mid-stream: drawn alike) and ``hang_rate`` are never answered, drawn from ``seed``.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        served: str | None = None,
        speed: float = 1.0,
        seed: int = 0,
        fail_rate: float = 0.0,
        hang_rate: float = 0.0,
    ) -> None:
        kv_tokens = (spec.num_kv_blocks - 1) * spec.block_tokens
        if spec.max_model_len > kv_tokens:
            raise ChimsimError(
                f"max_model_len is {spec.max_model_len:,} tokens and KV memory holds {kv_tokens:,}, with which vLLM "
                "would not start; give a smaller --max-model-len or a larger --num-kv-tokens"
            )
        if not 0.0 < speed < float("inf"):
            raise ChimsimError(f"--speed is {speed}; expected a number above 0")
        if not (0.0 <= fail_rate <= 1.0 and 0.0 <= hang_rate <= 1.0 and fail_rate + hang_rate <= 1.0):
            raise ChimsimError(
                f"--fail-rate is {fail_rate}, --hang-rate {hang_rate}; expected shares from 0 on, at most 1 together"
            )
        self.spec = spec
        self.served = spec.model if served is None else served
        self.realtime: RealtimeEngine
        self._speed = speed
        self._seed = seed
        self._rates = fail_rate, hang_rate
        self._random = Random(seed)
        self._tokenizer = Tokenizer()
        self._metrics = MockMetrics(spec, self.served, speed)
        self._numbers = count(1)
        self._began_at = int(time())
        self._stopping = asyncio.Event()

    def application(self) -> web.Application:
        """What to serve; the engine starts and stops with it."""
        app = web.Application(middlewares=[_in_vllms_shape], client_max_size=_LARGEST_BODY)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_get("/metrics", self._metrics_text)
        app.router.add_get("/version", self._version)
        for path in ("/health", "/ping"):
            app.router.add_get(path, self._health)
        app.on_startup.append(self._start)
        app.on_shutdown.append(self._stop)
        return app

    async def _start(self, _: web.Application) -> None:
        self.realtime = self._metrics.engine = RealtimeEngine(
            Engine(self.spec), speed=self._speed, on_first=self._metrics.first, on_finish=self._metrics.finish
        )

    async def _stop(self, _: web.Application) -> None:
        self._stopping.set()
        self.realtime.abort_all()

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=True)

    async def _generate(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        fields = read_json(await request.read(), request.content_type)
        asked = read_request(fields, self.served, self.spec.max_model_len, self._tokenizer, chat=chat)
        if self._stopping.is_set():
            return web.json_response(_FAILED, status=500)
        trouble = self._trouble(asked.stream)
        if trouble == "hang":
            await self._stopping.wait()
        if trouble == "hang" or (trouble == "lost" and not asked.stream):
            return _lost(request)
        if trouble == "refused":
            return web.json_response(_FAILED, status=500)
        number = next(self._numbers)
        prefix = "chatcmpl-" if chat else "cmpl-"
        name = request.headers.get("X-Request-Id") or f"{self._seed:x}-{number:x}"
        wording = Wording(asked, prefix + name, self.served, int(time()), self._speed)
        changed = asyncio.Event()
        parts = [self._submit(asked, index, changed) for index in range(len(asked.prompts))]
        try:
            if asked.stream:
                return await _stream(request, wording, parts, changed, trouble)
            while not all(part.ticket.over for part in parts):
                changed.clear()
                await changed.wait()
            return web.json_response(wording.whole(parts))
        finally:
            for part in parts:
                self.realtime.abort(part.ticket)

    def _submit(self, asked: Asked, index: int, changed: asyncio.Event) -> Part:
        """Hand one prompt to the engine, with the answer that it will get: its length, and its place in the cache."""
        prompt = asked.prompts[index]
        ids, ended = answer(prompt, self._seed, asked.max_tokens[index], asked.min_tokens, asked.ignore_eos)
        number, block = next(self._numbers), self.spec.block_tokens
        # Each block is a shared run of its own, known by its content. The answer's blocks are among them: they become
        # hittable as soon as they are given back, however many there are by then.
        hashes = block_hashes([*prompt, *ids], block)
        held = footprint_of(number, 0, (), block, len(prompt) + len(ids), hash_ids=hashes, hash_block_tokens=block)
        inner = EngineRequest(number, len(prompt), len(ids), held, measured=False)
        if self.spec.scheduling == "priority":
            inner.priority = (asked.priority,)
        reason = "stop" if ended else "length"
        ticket = self.realtime.submit(inner, changed, streamed=asked.stream, reason=reason)
        return Part(index, prompt, ids, ticket)

    def _trouble(self, stream: bool) -> str:
        fail, hang = self._rates
        drawn = self._random.random()
        if drawn >= fail + hang:
            return ""
        if drawn >= fail:
            return "hang"
        return self._random.choice(("refused", "error", "lost") if stream else ("refused", "lost"))

    async def _models(self, _: web.Request) -> web.Response:
        model = {
            "id": self.served,
            "object": "model",
            "created": self._began_at,
            "owned_by": "chimsim",
            "root": self.spec.model,
            "parent": None,
            "max_model_len": self.spec.max_model_len,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        fields = read_json(await request.read(), request.content_type)
        if "messages" in fields:
            ids = read_chat(fields, self._tokenizer)
        else:
            ids = self._tokenizer.encode(text_of(fields, "prompt"))
        limit = self.spec.max_model_len
        return web.json_response({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": None})

    async def _detokenize(self, request: web.Request) -> web.Response:
        fields = read_json(await request.read(), request.content_type)
        return web.json_response({"prompt": self._tokenizer.decode(check_ids(fields.get("tokens"), "tokens"))})

    async def _metrics_text(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": f"chimsim-{chimsim.__version__}-mock-engine"})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()


async def _stream(
    request: web.Request, wording: Wording, parts: list[Part], changed: asyncio.Event, trouble: str
) -> web.StreamResponse:
    """Server-sent events until all parts are over; a slow reader gets fewer and larger chunks."""
    reply = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await reply.prepare(request)
    left = list(parts)
    while left:
        await changed.wait()
        changed.clear()
        for part in list(left):
            if part.ticket.over:
                left.remove(part)
            elif part.sent == part.ticket.produced:
                continue
            for event in wording.chunks(part):
                await _send(reply, event)
            if trouble == "lost":
                return _lost(request)
            if trouble == "error":
                await _send(reply, _FAILED)
                left.clear()
                break
    if not trouble and wording.asked.include_usage:
        await _send(reply, wording.usage_chunk(parts))
    await reply.write(b"data: [DONE]\n\n")
    return reply


async def _send(reply: web.StreamResponse, event: Mapping[str, Any]) -> None:
    await reply.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def _lost(request: web.Request) -> web.Response:
    """The connection is gone; nobody gets what is returned."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


@web.middleware
async def _in_vllms_shape(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refusal as refusal:
        return web.json_response(refusal.to_dict(), status=refusal.status)
    except web.HTTPException as error:
        return web.json_response({"detail": error.reason}, status=error.status)
    except ConnectionResetError:
        return _lost(request)  # the client left just before it was written to


@asynccontextmanager
async def serving(mock: MockEngine, host: str, port: int) -> AsyncIterator[str]:
    """Serve it on that port, 0 for any that is free; gives the URL. Raises `ChimsimError` if it cannot be had."""
    runner = web.AppRunner(
        mock.application(),
        access_log=None,
        keepalive_timeout=KEEP_ALIVE_S,
        handler_cancellation=True,
        shutdown_timeout=STOP_S,
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise ChimsimError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from None
        taken = runner.addresses[0][1]
        yield f"http://{f'[{host}]' if ':' in host else host}:{taken}"
    finally:
        await runner.cleanup()
