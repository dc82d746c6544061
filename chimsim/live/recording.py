"""Sends a list of requests to a running engine at their times and records each as its client saw it.

The lengths are exact and the prompts new, so nothing comes from the prefix cache. It follows no workflow and chooses
no engine; a request that fails is recorded as failed, and too many of them end the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from chimsim.errors import ChimsimError
from chimsim.live.client import EngineError
from chimsim.live.measure import Engine, together
from chimsim.measured import MeasuredRun, Record

SAMPLE_S = 0.25
MOST_FAILURES = 5


@dataclass(frozen=True, slots=True)
class Planned:
    """A request to send ``at_s`` seconds after the start."""

    request_id: str
    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass
class Recording:
    """What a run gave: the requests in the order they ended, the engine's load over time (time_s, running, waiting,
    kv_used_fraction), and how late each request was sent, in seconds."""

    records: list[Record] = field(default_factory=list)
    load: list[tuple[float, float, float, float]] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def poisson(
    requests: int, rps: float, prompt_tokens: tuple[int, int], output_tokens: tuple[int, int], seed: int
) -> list[Planned]:
    """Poisson arrivals at ``rps`` requests a second, lengths uniform in the ranges (ends included)."""
    random = Random(seed)
    planned: list[Planned] = []
    at_s = 0.0
    for number in range(requests):
        planned.append(Planned(f"r{number}", at_s, random.randint(*prompt_tokens), random.randint(*output_tokens)))
        at_s += random.expovariate(rps)
    return planned


def like(run: MeasuredRun) -> list[Planned]:
    """The completed requests of a measured run, at the same times and with the same lengths."""
    rows = run.requests[["request_id", "ready_at", "prompt_tokens", "output_tokens"]].itertuples(index=False)
    return [Planned(str(name), float(at), int(prompt), int(output)) for name, at, prompt, output in rows]


async def replay(
    engine: Engine,
    planned: Sequence[Planned],
    *,
    hear: Callable[[Record], None] | None = None,
) -> Recording:
    """Send the requests at their times and wait for all. ``hear`` gets each record as soon as it is there.

    Times are seconds from the first request's planned instant. Raises `EngineError` after `MOST_FAILURES` failures.
    """
    clock = asyncio.get_running_loop().time
    run = Recording()
    began_at = clock() + 0.1
    ended = asyncio.Event()
    left = len(planned)

    async def send(request: Planned) -> None:
        nonlocal left
        await asyncio.sleep(max(began_at + request.at_s - clock(), 0.0))
        sent_at = clock()
        run.lags_s.append(sent_at - began_at - request.at_s)
        try:
            answer = await engine.ask(request.prompt_tokens, request.output_tokens)
        except EngineError as error:
            run.failures.append(str(error))
            record = _record(engine, request, sent_at - began_at, status="failed")
            if len(run.failures) >= MOST_FAILURES:
                raise
        else:
            record = _record(
                engine,
                request,
                answer.sent_at - began_at,
                cached_tokens=answer.cached_tokens,
                queued_s=answer.queued_s,
                first_token_at=answer.first_at - began_at,
                last_token_at=answer.last_at - began_at,
            )
        run.records.append(record)
        if hear is not None:
            hear(record)
        left -= 1
        if not left:
            ended.set()

    async def sample() -> None:
        while not ended.is_set():
            now = await engine.metrics()
            if now is None or now.running is None or now.waiting is None:
                return
            used = now.kv_used_fraction if now.kv_used_fraction is not None else float("nan")
            run.load.append((clock() - began_at, now.running, now.waiting, used))
            await asyncio.sleep(SAMPLE_S)

    await together([*(send(request) for request in planned), sample()])
    return run


def _record(
    engine: Engine,
    request: Planned,
    submitted_at: float,
    *,
    cached_tokens: int | None = None,
    queued_s: float | None = None,
    first_token_at: float | None = None,
    last_token_at: float | None = None,
    status: str = "completed",
) -> Record:
    return Record(
        request_id=request.request_id,
        model=engine.model,
        engine=engine.client.url,
        submitted_at=submitted_at,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        cached_tokens=cached_tokens,
        queued_s=queued_s,
        first_token_at=first_token_at,
        last_token_at=last_token_at,
        status=status,
    )


def lengths(text: str, option: str) -> tuple[int, int]:
    """``128`` or ``64-512`` as a range. Raises `ChimsimError`."""
    parts = text.split("-")
    if len(parts) > 2 or not all(part.strip().isdigit() for part in parts):
        raise ChimsimError(f"{option} is {text!r}; expected a number of tokens, or a range: 64-512")
    low, high = int(parts[0]), int(parts[-1])
    if not 1 <= low <= high:
        raise ChimsimError(f"{option} is {text!r}; expected a range from at least 1, the smaller number first")
    return low, high
