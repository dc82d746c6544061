"""The gateway's HTTP side: paths, keys and limits in front of `chimsim.gateway.core`, as an ASGI application.

A client that leaves has its call taken back, streamed or not: every answer is written by a task that ends with it.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Mapping
from contextlib import suppress

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import chimsim
from chimsim.gateway.ask import Ask, Refusal, read_ask
from chimsim.gateway.core import Gateway

PATHS = ("/v1/chat/completions", "/v1/completions")
STALLED_S = 60.0
"""A client that reads nothing of its answer for as long counts as gone: it would hold its slot for good."""
_JSON = "application/json"


def application(gateway: Gateway, *, api_key: str = "", max_body_bytes: int = 32 << 20) -> Starlette:
    """The application. With ``api_key``, everything under ``/v1`` needs it as a bearer token."""

    async def completions(request: Request) -> Response:
        try:
            _check_key(request, api_key)
            data = await _body(request, max_body_bytes)
            return _Answer(gateway, read_ask(request.url.path, data, request.headers))
        except Refusal as refusal:
            gateway.refused(refusal)
            return _refused(refusal)
        except ClientDisconnect:
            return Response(status_code=499)

    async def models(request: Request) -> Response:
        try:
            _check_key(request, api_key)
        except Refusal as refusal:
            return _refused(refusal)
        listed = {entry["id"]: entry for entry in gateway.models()}
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": list(listed.values())})
        if name not in listed:
            return _refused(Refusal(404, f"the model {name!r} does not exist (models: {', '.join(listed)})"))
        return JSONResponse(listed[name])

    async def health(request: Request) -> Response:
        engines = gateway.healthy()
        # One engine that answers can serve some calls; the body tells which are ill.
        return JSONResponse({"engines": engines}, status_code=200 if any(engines.values()) else 503)

    async def metrics(request: Request) -> Response:
        return Response(gateway.meters.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(request: Request) -> Response:
        return JSONResponse({"version": chimsim.__version__})

    async def elsewhere(request: Request, error: Exception) -> Response:
        served = ", ".join((*PATHS, "/v1/models", "/health", "/metrics", "/version"))
        status = getattr(error, "status_code", 404)
        return _refused(Refusal(status, f"{request.method} {request.url.path}: not served (served: {served})"))

    return Starlette(
        routes=[
            *(Route(path, completions, methods=["POST"]) for path in PATHS),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", models),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/version", version),
        ],
        exception_handlers={404: elsewhere, 405: elsewhere},
    )


def _check_key(request: Request, key: str) -> None:
    if not key:
        return
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
        raise Refusal(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY", "invalid_api_key")


async def _body(request: Request, most: int) -> bytes:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > most:
            raise Refusal(413, f"the body has more than {most:,} bytes")
    return bytes(data)


def _refused(refusal: Refusal) -> Response:
    return Response(refusal.to_json(), refusal.status, refusal.headers, _JSON)


class _Answer(Response):
    """Runs a call while it is being answered; its own outlet."""

    def __init__(self, gateway: Gateway, ask: Ask) -> None:
        self.begun = False
        self._gateway = gateway
        self._ask = ask

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        work = asyncio.ensure_future(self._work())
        gone = asyncio.ensure_future(_disconnected(receive))
        cut = False
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            cut = True
        for task in (work, gone):
            task.cancel()
        # Until the engine has it back; a client that is gone hears no error.
        with suppress(asyncio.CancelledError, OSError):
            await work
        if cut:
            await self._refuse(Refusal(503, "the gateway is shutting down", "overloaded_error", retry_after_s=1))

    async def _work(self) -> None:
        try:
            await self._gateway.answer(self._ask, self)
        except Refusal as refusal:
            await self._refuse(refusal)
        else:
            await self._end()

    async def _refuse(self, refusal: Refusal) -> None:
        if not self.begun:
            await self.begin(_JSON, refusal.headers, refusal.status)
            await self.write(refusal.to_json())
        elif self._ask.stream:
            # The status is out; in a stream an error is an event of its own, and there is no [DONE].
            await self.write(b"data: " + refusal.to_json() + b"\n\n")
        else:
            return  # the connection closes in the middle of the answer, which says it
        await self._end()

    async def _end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def begin(self, content_type: str, headers: Mapping[str, str], status: int = 200) -> None:
        self.begun = True
        pairs = [("content-type", content_type), *headers.items()]
        if content_type == "text/event-stream":
            pairs += [("cache-control", "no-cache"), ("x-accel-buffering", "no")]
        raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in pairs]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(STALLED_S):
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError:
            raise asyncio.CancelledError from None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
