"""A chat server whose answers a test decides, on a loop in a thread of its own, so that the command line can ask it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

MODEL = "Qwen2.5-1.5B"


@dataclass
class Chats:
    """``answer`` gets the system and the user message; a status in ``statuses`` is the answer instead, one a chat.

    Tokens are the characters of a template around the messages, so that every count can be said.
    """

    answer: Callable[[str, str], str] = lambda system, user: "\\boxed{four}"
    statuses: list[int] = field(default_factory=list)
    tokenizes: bool = True
    healthy: bool = True
    max_model_len: int = 100_000
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.statuses and (status := self.statuses.pop(0)) != 200:
            return web.json_response({"error": {"message": "no", "code": status}}, status=status)
        system, user = (message["content"] for message in body["messages"])
        text = self.answer(system, user)
        usage = {"prompt_tokens": len(template(body["messages"])), "completion_tokens": len(text)}
        first = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        parts = [{"choices": [{"delta": {"content": part}}]} for part in (text[:3], text[3:])]
        end = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for event in (first, *parts, end, {"choices": [], "usage": usage}):
            await reply.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def tokenize(self, request: web.Request) -> web.Response:
        if not self.tokenizes:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"tokens": [ord(sign) for sign in template((await request.json())["messages"])]})

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL, "max_model_len": self.max_model_len}]})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 500)


def template(messages: list[dict[str, str]]) -> str:
    """The prompt that the server makes of messages."""
    return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"


@contextmanager
def chatting(chats: Chats) -> Iterator[str]:
    """The server's URL while it answers."""
    ready, urls, loop, stop = threading.Event(), [], asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", chats.chat)
        app.router.add_post("/tokenize", chats.tokenize)
        app.router.add_get("/v1/models", chats.models)
        app.router.add_get("/health", chats.health)
        runner = web.AppRunner(app, shutdown_timeout=0.5)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(10.0)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10.0)
        loop.close()
