"""One call through the gateway for every fault, streamed and whole, with another engine of the model and without."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from itertools import product

from chimsim.gateway.core import Limits
from tests.chimsim.gateway.gateways import CHAT, chat, events_of, served, text_of
from tests.chimsim.gateway.rude_engine import WORDS, RudeEngine, rude

FAULTS = (
    "refuses", "restarts", "silent", "slow", "closes first", "closes later", "400", "401", "404", "429", "500", "503",
    "garbage", "wrong JSON", "html", "error first", "error later", "done only", "abort",
)  # fmt: skip
DOWN_S = 0.15
"""How long an engine that restarts is away."""

Cell = tuple[str, bool, bool]
"""(fault, streamed, with another engine of the model)"""


@dataclass(frozen=True)
class Seen:
    """What a client saw of its call, and what became of it.

    ``end``: ``whole`` (all of the answer), ``error`` (the status says so), ``broken`` (an error inside the stream), or
    ``lost`` (neither an answer nor an error). ``healthy`` is what the gateway thought of the engines at the end.
    """

    status: int
    end: str
    text: str
    message: str
    retry_after: str | None
    tries: int
    healthy: tuple[bool, ...]


def cells() -> list[Cell]:
    """All of the matrix."""
    return list(product(FAULTS, (True, False), (True, False)))


async def observe(cell: Cell, inactivity_s: float, wait_s: float) -> Seen:
    """The call's fate. Raises AssertionError if the gateway keeps anything of it."""
    fault, stream, second = cell
    bad = RudeEngine(fault=fault)
    engines = [bad, RudeEngine()] if second else [bad]
    async with rude(*engines):
        limits = Limits(wait_s=wait_s, answer_s=inactivity_s)
        urls = [("A", engine.url) for engine in engines]
        async with served(urls, inactivity_s=inactivity_s, limits=limits) as world:
            if fault in ("refuses", "restarts"):
                await bad.down()
            call = asyncio.ensure_future(world.post(CHAT, chat(stream=stream)))
            if fault == "restarts":
                await asyncio.sleep(DOWN_S)
                await bad.up()
            status, data, headers = await call
            tries = sum(
                sample.value
                for metric in world.gateway.meters.decisions.collect()
                for sample in metric.samples
                if sample.name.endswith("_total")
            )
            healthy = tuple(world.gateway.healthy().values())
        assert sum(engine.inside for engine in engines) == 0
    end, text, message = _read(status, data, stream)
    return Seen(status, end, text, message, headers.get("retry-after"), int(tries), healthy)


def _read(status: int, data: bytes, stream: bool) -> tuple[str, str, str]:
    if status != 200:
        return "error", "", json.loads(data)["error"]["message"]
    if not stream:
        text = json.loads(data)["choices"][0]["message"]["content"]
        return "whole" if text == "".join(WORDS) else "lost", text, ""
    events = events_of(data)
    text = text_of(events)
    if events[-1] == "[DONE]":
        return "whole" if text == "".join(WORDS) else "lost", text, ""
    error = events[-1].get("error")
    return ("broken" if error else "lost"), text, error["message"] if error else ""


async def observe_all(inactivity_s: float, wait_s: float, at_once: int = 12) -> dict[Cell, Seen]:
    """Every cell of the matrix, some at a time."""
    gate = asyncio.Semaphore(at_once)

    async def one(cell: Cell) -> Seen:
        async with gate:
            return await observe(cell, inactivity_s, wait_s)

    return dict(zip(cells(), await asyncio.gather(*map(one, cells())), strict=True))
