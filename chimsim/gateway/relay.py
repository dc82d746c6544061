"""An engine's answer on its way to the client: passed on as it came, and read only for what has to be known of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from chimsim.gateway.ask import Ask
from chimsim.live.client import EngineError

BROKEN = ("abort", "error")
"""Reasons of vLLM for an end that is none: it was stopped, or failed."""


class Outlet(Protocol):
    """Where an answer goes. ``begin`` comes once, before the first ``write``; ``begun`` says whether it has."""

    begun: bool

    async def begin(self, content_type: str, headers: Mapping[str, str]) -> None: ...

    async def write(self, data: bytes) -> None: ...


@dataclass(slots=True)
class Outcome:
    """What came back. Tokens are the engine's own count, or the number of chunks where it keeps no count."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""


async def relay(
    reply: aiohttp.ClientResponse,
    ask: Ask,
    out: Outlet,
    headers: Mapping[str, str],
    outcome: Outcome,
    *,
    read_text: bool,
) -> None:
    """Pass the answer on, and fill ``outcome`` as it comes.

    Raises `EngineError` for an answer that breaks off; nothing went out if ``out`` has not begun.
    """
    if ask.stream:
        await _relay_stream(reply, ask, out, headers, outcome, read_text)
        return
    data = await reply.read()
    try:
        _note(json.loads(data), outcome, read_text=True)
    except EngineError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise EngineError(f"{reply.url}: expected a completion, found {data[:200]!r}", "garbage") from None
    await out.begin(reply.content_type, {**headers, "content-length": str(len(data))})
    await out.write(data)


async def _relay_stream(
    reply: aiohttp.ClientResponse,
    ask: Ask,
    out: Outlet,
    headers: Mapping[str, str],
    outcome: Outcome,
    read_text: bool,
) -> None:
    if reply.content_type != "text/event-stream":
        raise EngineError(f"{reply.url}: expected a stream, found {reply.content_type}", "garbage")
    chunks = 0
    rest = b""
    async for data in reply.content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        passed = []
        done = False
        for line in (line.rstrip(b"\r") for line in lines):
            if not line:
                continue
            if not line.startswith(b"data:"):
                passed.append(line + b"\n")
                continue
            done = line[5:].strip() == b"[DONE]"
            if not done:
                event = _event(line, reply, outcome, read_text)
                if not event["choices"] and event.get("usage") and not ask.wants_usage:
                    continue
                chunks += 1
            passed.append(line + b"\n\n")
        if done and not chunks:
            raise EngineError(f"{reply.url}: the stream ended with nothing in it", "stream")
        if passed:
            if not out.begun:
                await out.begin("text/event-stream", headers)
            await out.write(b"".join(passed))
        if done:
            outcome.output_tokens = outcome.output_tokens or chunks
            return
    raise EngineError(f"{reply.url}: the engine closed the connection in mid-stream", "closed")


def _event(line: bytes, reply: aiohttp.ClientResponse, outcome: Outcome, read_text: bool) -> dict[str, Any]:
    try:
        event = json.loads(line[5:])
        if "error" in event:
            error = event["error"]
            message = error.get("message") if isinstance(error, dict) else error
            raise EngineError(f"{reply.url}: error in the stream: {message}", "stream")
        _note(event, outcome, read_text)
        return dict(event)
    except EngineError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise EngineError(f"{reply.url}: expected a chunk of a completion, found {line[:200]!r}", "garbage") from None


def _note(event: Mapping[str, Any], outcome: Outcome, read_text: bool) -> None:
    """What an event, or a whole answer, says: its usage, its text, and whether its end is one."""
    usage = event.get("usage") or {}
    outcome.prompt_tokens = usage.get("prompt_tokens") or outcome.prompt_tokens
    outcome.output_tokens = usage.get("completion_tokens") or outcome.output_tokens
    for choice in event["choices"][:1]:
        if choice.get("finish_reason") in BROKEN:
            raise EngineError(f"the engine ended the answer with {choice['finish_reason']!r}", "stream")
        if read_text:
            part = choice.get("delta") or choice.get("message") or choice
            outcome.text += part.get("content") or part.get("text") or ""
