"""An asyncio client of one OpenAI-compatible server, made for vLLM: token-id prompts, streaming, priority.

It sends one request at a time of asking and says exactly what came back or what went wrong; it retries nothing,
schedules nothing and keeps no statistics. Times are those of the event loop's clock, in seconds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

import aiohttp

from chimsim.errors import ChimsimError, near

Kind = Literal["refused", "timeout", "closed", "status", "stream", "garbage"]
FINISHED = ("stop", "length")
BUSY = (408, 425, 429, 503)
"""Statuses of a server that is well but wants to be asked later."""
KEEP_ALIVE_S = 2.0
"""Unused connections are given up well before vLLM closes them, at 5 s: one closed just then looks like a fault."""
_SHOWN = 300


class EngineError(ChimsimError):
    """A server that did not do what it was asked.

    ``kind``: ``refused`` (no connection), ``timeout`` (no byte for too long), ``closed`` (in mid-answer), ``status``
    (an HTTP status other than 200, in ``status``), ``stream`` (an error, or no proper end, inside a stream; vLLM names
    the status that it would have had), ``garbage`` (not what the protocol says). ``body`` is what came with a status.
    """

    def __init__(self, message: str, kind: Kind, status: int | None = None, body: bytes = b"") -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status
        self.body = body

    @property
    def ill(self) -> bool:
        """Whether the server seems to be at fault; one that is busy, or refuses a request, is well."""
        return self.kind != "status" or ((self.status or 0) >= 500 and self.status not in BUSY)

    @property
    def final(self) -> bool:
        """Whether there is no use in asking again: the server is well, and does not want this request."""
        return not self.ill and self.status not in BUSY


@dataclass(frozen=True, slots=True)
class Completion:
    """One request to ``/v1/completions``.

    ``prompt`` is token ids, which keeps lengths exact, or text. ``exact`` asks for ``max_tokens`` tokens, no fewer
    (``ignore_eos``, ``min_tokens``). ``priority`` is vLLM's: lower goes first, and an engine that runs fcfs ignores it.
    """

    path: ClassVar[str] = "/v1/completions"

    model: str
    prompt: tuple[int, ...] | str
    max_tokens: int
    exact: bool = True
    priority: int | None = None
    temperature: float = 0.0
    return_token_ids: bool = False

    def payload(self) -> dict[str, Any]:
        """The request's JSON, for a streamed answer that counts its tokens as it goes."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(self.prompt) if isinstance(self.prompt, tuple) else self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if self.exact:
            body |= {"ignore_eos": True, "min_tokens": self.max_tokens}
        if self.priority is not None:
            body["priority"] = self.priority
        if self.return_token_ids:
            body["return_token_ids"] = True
        return body


@dataclass(frozen=True, slots=True)
class Chat:
    """One request to ``/v1/chat/completions``; ``messages`` are (role, text). The model ends its answer itself."""

    path: ClassVar[str] = "/v1/chat/completions"

    model: str
    messages: tuple[tuple[str, str], ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0

    def payload(self) -> dict[str, Any]:
        """The request's JSON, for a streamed answer: a whole one would send nothing for as long as it takes."""
        return {
            "model": self.model,
            "messages": [{"role": role, "content": text} for role, text in self.messages],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a stream. A chunk is not a token: ``output_tokens``, the count so far, is None where not said.

    ``has_choice`` is false where there is no piece of an answer in it: usage alone, or a chat's role alone.
    """

    at: float
    output_tokens: int | None
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    has_choice: bool
    usage: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer. ``progress`` holds (time, output tokens so far), from the first token's chunk to the last's.

    ``cached_tokens`` and ``queued_s`` (from submission to the first scheduling) are None where the server keeps
    them to itself: vLLM needs ``--enable-prompt-tokens-details`` and ``--enable-per-request-metrics``.
    """

    sent_at: float
    first_at: float
    last_at: float
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    progress: tuple[tuple[float, int], ...]
    text: str = ""
    token_ids: tuple[int, ...] = ()
    cached_tokens: int | None = None
    queued_s: float | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as ``/v1/models`` lists it."""

    name: str
    root: str | None
    max_model_len: int | None


class Client:
    """A server at ``url``, with or without a trailing ``/v1``. Use it as an asynchronous context manager.

    ``inactivity_s`` is how long the server may send nothing while it owes an answer, waiting in its queue included.
    Every failure is an `EngineError`.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, inactivity_s: float = 120.0, connect_s: float = 10.0
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ChimsimError(f"url is {url!r}; expected http://host:port")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.inactivity_s = inactivity_s
        self.connect_s = connect_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._opened: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # no limit on connections: how many requests are in flight is the caller's business
        self._opened = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            headers=self._headers,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def version(self) -> str | None:
        """The engine's version, None where the server has no ``/version``."""
        try:
            answer = json.loads(await self._get("/version"))
        except EngineError as error:
            if error.kind == "status":
                return None
            raise
        except ValueError:
            return None
        version = answer.get("version") if isinstance(answer, dict) else None
        return version if isinstance(version, str) else None

    async def healthy(self) -> bool:
        """Whether the server answers ``/health`` with 200, or, where it has none, ``/v1/models``."""
        for path in ("/health", "/v1/models"):
            try:
                await self._get(path)
                return True
            except EngineError as error:
                if error.kind != "status" or error.status not in (404, 405):
                    return False
        return False

    async def models(self) -> list[ServedModel]:
        """What the server serves."""
        text = await self._get("/v1/models")
        try:
            listed = json.loads(text)["data"]
            return [ServedModel(str(m["id"]), m.get("root"), m.get("max_model_len")) for m in listed]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise EngineError(
                f"{self.url}/v1/models: expected a list of models, found {_cut(text)}; is it OpenAI-compatible?",
                "garbage",
            ) from None

    async def served(self, model: str) -> ServedModel:
        """The served model of that name; raises `ChimsimError` with the names there are."""
        models = await self.models()
        for each in models:
            if each.name == model:
                return each
        names = [each.name for each in models]
        raise ChimsimError(
            f"{self.url} does not serve {model!r}{near(model, names)}; it serves: {', '.join(names) or 'nothing'}"
        )

    async def metrics_text(self) -> str | None:
        """The text of ``/metrics``, None where the server has none."""
        try:
            return await self._get("/metrics")
        except EngineError as error:
            if error.kind == "status" and error.status in (404, 405, 501):
                return None
            raise

    async def complete(
        self,
        completion: Completion | Chat,
        on_tokens: Callable[[float, int], None] | None = None,
        on_chunk: Callable[[Chunk], None] | None = None,
    ) -> Answer:
        """Send it and wait for its end. ``on_tokens`` hears (time, output tokens so far) as they come, ``on_chunk``
        every chunk that has a choice, before that.

        A server without a running count gives a progress of two points: its first chunk, taken as one token, and
        its end.
        """
        sent_at = asyncio.get_running_loop().time()
        progress: list[tuple[float, int]] = []
        text: list[str] = []
        ids: list[int] = []
        reason: str | None = None
        usage: Mapping[str, Any] = {}
        metrics: Mapping[str, Any] = {}
        last_at = sent_at
        async for chunk in self.stream(completion):
            usage, metrics = chunk.usage or usage, chunk.metrics or metrics
            if not chunk.has_choice:
                continue
            last_at = chunk.at
            text.append(chunk.text)
            ids += chunk.token_ids
            if on_chunk is not None:
                on_chunk(chunk)
            reason = chunk.finish_reason or reason
            tokens = chunk.output_tokens if chunk.output_tokens is not None else len(ids)
            if not progress or tokens > progress[-1][1]:
                progress.append((chunk.at, max(tokens, 1)))
                if on_tokens is not None:
                    on_tokens(*progress[-1])
        if reason not in FINISHED:
            how = "no finish_reason" if reason is None else f"finish_reason {reason!r}"
            raise EngineError(f"{self.url}: the stream ended with {how} after {len(progress)} chunks", "stream")
        total, prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
        if type(total) is not int or type(prompt) is not int or not progress:
            raise EngineError(f"{self.url}: the stream ended without usage; its tokens cannot be counted", "garbage")
        if total > progress[-1][1]:
            progress.append((last_at, total))
        details = usage.get("prompt_tokens_details") or {}
        queued_ms = metrics.get("queue_time_ms")
        return Answer(
            sent_at=sent_at,
            first_at=progress[0][0],
            last_at=last_at,
            prompt_tokens=prompt,
            output_tokens=total,
            finish_reason=reason,
            progress=tuple(progress),
            text="".join(text),
            token_ids=tuple(ids),
            cached_tokens=details.get("cached_tokens"),
            queued_s=queued_ms / 1000.0 if isinstance(queued_ms, int | float) else None,
        )

    async def tokenize(self, body: Mapping[str, Any]) -> tuple[int, ...] | None:
        """The token ids of ``{"model", "prompt"}`` or ``{"model", "messages"}``; None where the server tells none."""
        try:
            async with self._reply("POST", "/tokenize", body) as reply:
                text = await reply.text()
        except EngineError as error:
            if error.kind == "status" and error.status in (400, 404, 405, 501):
                return None
            raise
        try:
            return tuple(int(token) for token in json.loads(text)["tokens"])
        except (ValueError, KeyError, TypeError):
            return None

    async def stream(self, completion: Completion | Chat) -> AsyncIterator[Chunk]:
        """The answer's chunks as they come; leaving the loop early closes the connection, which aborts the request."""
        clock = asyncio.get_running_loop().time
        path = completion.path
        async with self._reply("POST", path, completion.payload()) as reply:
            if reply.content_type != "text/event-stream":
                raise EngineError(
                    f"{self.url}{path}: expected a stream, found {reply.content_type}: {_cut(await reply.text())}",
                    "garbage",
                )
            rest = b""
            async for data in reply.content.iter_any():
                at = clock()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if not line.startswith(b"data:"):
                        continue
                    body = line[5:].strip()
                    if body == b"[DONE]":
                        return
                    yield self._chunk(body, at)
            raise EngineError(f"{self.url}{path}: the server closed the connection in mid-stream", "closed")

    def _chunk(self, body: bytes, at: float) -> Chunk:
        try:
            event = json.loads(body)
            if "error" in event:
                message = f"{self.url}: error in the stream: {_reason(event, body.decode())}"
                raise EngineError(message, "stream", _code(event["error"]))
            choices = event["choices"]
            usage = event.get("usage") or {}
            choice = choices[0] if choices else {}
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or ""
            role_alone = "role" in delta and not text and choice.get("finish_reason") is None
            count = usage.get("completion_tokens")
            return Chunk(
                at=at,
                output_tokens=count if type(count) is int else None,
                text=text,
                token_ids=tuple(choice.get("token_ids") or ()),
                finish_reason=choice.get("finish_reason"),
                has_choice=bool(choices) and not role_alone,
                usage=usage,
                metrics=event.get("metrics") or {},
            )
        except EngineError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            found = _cut(body.decode(errors="replace"))
            raise EngineError(f"{self.url}: expected a chunk of a completion, found {found}", "garbage") from None

    @asynccontextmanager
    async def post(
        self, path: str, body: Mapping[str, Any], silence_s: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Any request, with its answer unread. ``silence_s`` is how long nothing may come, if not ``inactivity_s``.

        What goes wrong while the answer is read in the block becomes an `EngineError` too.
        """
        async with self._reply("POST", path, body, silence_s) as reply:
            yield reply

    async def _get(self, path: str) -> str:
        async with self._reply("GET", path) as reply:
            return await reply.text()

    @asynccontextmanager
    async def _reply(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, silence_s: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The server's reply with status 200; whatever goes wrong until its end becomes an `EngineError`."""
        where = f"{self.url}{path}"
        if silence_s is None:
            silence_s = self.inactivity_s
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.connect_s, sock_read=silence_s)
        try:
            async with self._session.request(method, where, json=body, timeout=timeout) as reply:
                if reply.status != 200:
                    raise await self._refusal(reply, where)
                yield reply
        except aiohttp.ServerTimeoutError as error:
            if "connection timeout" in str(error).lower():
                raise EngineError(f"{where}: no connection within {self.connect_s:g} s", "refused") from None
            raise EngineError(f"{where}: the server sent nothing for {silence_s:g} s", "timeout") from None
        except aiohttp.ClientConnectorError as error:
            raise EngineError(f"{where}: no connection: {error.strerror or error}", "refused") from None
        except aiohttp.InvalidURL:
            raise EngineError(f"{where}: not a valid URL; expected http://host:port", "refused") from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError):
            raise EngineError(f"{where}: the server closed the connection in mid-answer", "closed") from None
        except aiohttp.ClientError as error:
            raise EngineError(f"{where}: {_cut(str(error))}", "garbage") from None

    async def _refusal(self, reply: aiohttp.ClientResponse, where: str) -> EngineError:
        text = await reply.text(errors="replace")
        try:
            reason = _reason(json.loads(text), text)
        except ValueError:
            reason = _cut(text)
        hint = ""
        if reply.status in (401, 403):
            hint = "; the server wants another --api-key"
        elif reply.status in (404, 405) and "does not exist" not in reason:
            hint = f"; is {self.url} the root of an OpenAI-compatible server?"
        return EngineError(f"{where}: answered {reply.status}: {reason}{hint}", "status", reply.status, text.encode())

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            raise RuntimeError("use the client in an async with block")
        return self._opened


def _reason(tree: object, text: str) -> str:
    """The message inside an error answer, in any of the shapes that vLLM's versions use."""
    if isinstance(tree, dict):
        error = tree.get("error", tree)
        if isinstance(error, dict):
            for key in ("message", "detail"):
                if error.get(key):
                    return _cut(str(error[key]))
        elif error:
            return _cut(str(error))
    return _cut(text)


def _code(error: object) -> int | None:
    """The HTTP status that an error inside a stream would have had."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if type(code) is int else None


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
