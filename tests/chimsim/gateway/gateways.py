"""Gateways to test with: opened in front of engines, served by uvicorn in the same loop, and found empty at the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
from openai import AsyncOpenAI

from chimsim.config import Address, Cluster, Scheduling
from chimsim.gateway.app import application
from chimsim.gateway.core import Gateway
from chimsim.gateway.foretell import Models
from chimsim.gateway.server import Server, opened
from policies.fcfs import Fcfs
from policies.interface import ClusterView, Dispatch, Policy, RequestView
from tests.chimsim.worlds import cluster, engine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass
class Told(Policy):
    """A policy that writes down what it is told. Priorities are the numbers at the end of stages' names."""

    dispatched: list[tuple[str, int, str]] = field(default_factory=list)
    """workflow, stage, stage's name"""
    completed: list[tuple[str, str, int, bool]] = field(default_factory=list)
    """workflow, reason, output tokens, last"""
    forgotten: list[str] = field(default_factory=list)

    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        self.dispatched.append((request.workflow_id, request.stage, request.stage_name))
        well = [each for each in cluster if each.healthy]
        chosen = min(well, key=lambda each: (each.running + each.waiting, each.name))
        _, _, number = request.stage_name.rpartition("-")
        return Dispatch(chosen.name, (float(number),))

    def on_complete(
        self, now: float, request: RequestView, output_tokens: int, service_s: float, reason: str, *, last: bool
    ) -> None:
        self.completed.append((request.workflow_id, reason, output_tokens, last))

    def on_forget(self, now: float, workflow_id: str) -> None:
        self.forgotten.append(workflow_id)


@dataclass
class World:
    """A gateway that is served, and a client of it."""

    gateway: Gateway
    url: str
    session: aiohttp.ClientSession
    said: list[str]

    async def post(
        self, path: str, body: object, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """Status, body and headers of the answer; ``body`` goes out as JSON unless it is bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, headers=headers) as reply:
            return reply.status, await reply.read(), reply.headers

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.url + path) as reply:
            return reply.status, await reply.text()

    def openai(self, key: str = "any") -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)


@asynccontextmanager
async def served(
    urls: Sequence[tuple[str, str]],
    policy: Policy | None = None,
    *,
    slots: int = 4,
    models: Models | None = None,
    api_key: str = "",
    key_env: str = "",
    scheduling: Scheduling = "fcfs",
    max_body_bytes: int = 1 << 20,
    **settings: Any,
) -> AsyncIterator[World]:
    """A gateway in front of engines, (model, url) each; at the end nothing is left but workflows that never ended."""
    names = [f"{model}/{number}" for number, (model, _) in enumerate(urls)]
    spec = cluster_of(
        [(name, model, url) for name, (model, url) in zip(names, urls, strict=True)], slots, key_env, scheduling
    )
    said: list[str] = []
    chosen = Fcfs() if policy is None else policy
    async with opened(spec, chosen, models or Models(spec.models), say=said.append, **settings) as gateway:
        app = application(gateway, api_key=api_key, max_body_bytes=max_body_bytes)
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        server = Server(app, "127.0.0.1", 0, 1.0, ready.set_result)
        running = asyncio.ensure_future(server.run_here())
        try:
            async with aiohttp.ClientSession() as session:
                yield World(gateway, await ready, session, said)
                await until(lambda: gateway.in_flight == 0)
            assert left_behind(gateway) == []
        finally:
            server.should_exit = True
            await running
    assert left_behind(gateway) == []
    assert len(gateway._sessions) == 0


def cluster_of(
    engines: Sequence[tuple[str, str, str]], slots: int, key_env: str = "", scheduling: Scheduling = "fcfs"
) -> Cluster:
    """(name, model, url) each."""
    return cluster(
        *(
            replace(engine(name, model, slots=slots, scheduling=scheduling), address=Address(url, model, key_env))
            for name, model, url in engines
        )
    )


def left_behind(gateway: Gateway) -> list[str]:
    """What of calls that are over is still there, in words."""
    dispatcher = gateway._upstreams._dispatcher
    found = [f"{gateway.in_flight} calls"] if gateway.in_flight else []
    found += [f"request {number}" for number in dispatcher._requests]
    for name, upstream in gateway._upstreams._all.items():
        if upstream.tries or upstream.tokens or dispatcher._engines[name].count or dispatcher.waiting(name):
            found.append(f"calls or slots of {name}")
    for name, session in gateway._sessions._sessions.items():
        if session.running or session.ends:
            found.append(f"workflow {name}")
    return found


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it, for seconds if need be."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came about")


def events_of(data: bytes) -> list[Any]:
    """The events of a stream, with ``"[DONE]"`` as a string."""
    assert data.endswith(b"\n\n")
    lines = [line.removeprefix("data: ") for line in data.decode().split("\n\n")[:-1]]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def text_of(events: Sequence[Any]) -> str:
    """The text in the chunks of a stream."""
    choices = [choice for event in events if isinstance(event, dict) for choice in event.get("choices", ())]
    return "".join(choice.get("text") or (choice.get("delta") or {}).get("content") or "" for choice in choices)


def chat(**more: Any) -> dict[str, Any]:
    """A chat request."""
    return {"model": "auto", "messages": [{"role": "user", "content": "Count to four."}], **more}
