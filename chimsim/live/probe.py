"""Finds out an engine's settings that no endpoint tells: how many sequences it runs, and its token budget.

It asks by sending requests and watching; what it cannot see it says so, and the user gives it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from math import ceil, log2
from statistics import median

from chimsim.errors import ChimsimError
from chimsim.live.client import Answer
from chimsim.live.measure import POLL_S, Engine, together
from chimsim.live.metrics import EngineMetrics

CROWDS = (48, 192, 768, 3072)
"""How many requests are sent at once until some have to wait."""
CROWD_TOKENS = 48
BUDGETS = (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
LONG_GAP = 1.5
"""A step with a full chunk of prefill takes at least so many times a decode step,"""
ALIKE = 0.4
"""and so much of the longest of them."""
PROBE_TOKENS = 40


async def find_max_num_seqs(engine: Engine, metrics: EngineMetrics, max_model_len: int) -> int:
    """The largest number of running requests seen while others waited. Raises `ChimsimError` when it saw none."""
    prompt, output = 4, min(CROWD_TOKENS, max_model_len - 4)
    seen = 0
    for crowd in CROWDS:
        if metrics.num_kv_tokens is not None and metrics.block_tokens is not None:
            each = ceil((prompt + output) / metrics.block_tokens) * metrics.block_tokens
            crowd = min(crowd, metrics.num_kv_tokens // each - 1)
        if crowd <= seen:
            break
        most, waited = await _crowd(engine, crowd, prompt, output)
        seen = max(seen, most)
        if waited and seen < crowd:
            return seen
    raise ChimsimError(
        f"{engine.client.url}: {seen} requests ran at once and none had to wait, so max_num_seqs could not be seen; "
        "give it with --max-num-seqs"
    )


async def _crowd(engine: Engine, requests: int, prompt: int, output: int) -> tuple[int, bool]:
    """How many of so many requests sent together were seen running, and whether any was seen waiting."""
    ended = asyncio.Event()

    async def send() -> tuple[int, bool]:
        try:
            await together([engine.ask(prompt, output) for _ in range(requests)])
        finally:
            ended.set()
        return 0, False

    async def watch() -> tuple[int, bool]:
        most, waited = 0, False
        while not ended.is_set():
            now = await engine.metrics()
            if now is not None:
                most, waited = max(most, int(now.running or 0)), waited or bool(now.waiting)
            await asyncio.sleep(POLL_S)
        return most, waited

    return (await together([send(), watch()]))[1]


async def find_token_budget(engine: Engine, longest_prompt: int) -> int | None:
    """max_num_batched_tokens: the usual value that comes nearest to the number of long steps that a long prompt gives
    to a sequence that decodes meanwhile. None when the prompt fits one step, or the server keeps no running count.
    """
    # two less than a power of two: with one token of decode in each step, usual budgets divide it almost evenly
    prompt = 2 ** int(log2(min(longest_prompt, BUDGETS[-1]) + 2)) - 2
    for attempt in range(3):
        gaps, usual_s = await _gaps_during_prefill(engine, prompt, PROBE_TOKENS * 2**attempt)
        if gaps:
            break
    else:
        return None
    return budget_from_gaps(prompt, gaps, usual_s)


def budget_from_gaps(prompt: int, gaps: Sequence[float], usual_s: float) -> int | None:
    """The usual budget at which a prompt takes as many steps as there are long gaps among ``gaps``."""
    steps = sum(gap > max(LONG_GAP * usual_s, ALIKE * max(gaps)) for gap in gaps)
    if steps < 2:
        return None
    # a short last chunk may not look long, so the nearest and not the exact number counts
    return min(BUDGETS, key=lambda budget: abs(log2(prompt / (budget - 1) / steps)))


async def _gaps_during_prefill(engine: Engine, prompt: int, output: int) -> tuple[list[float], float]:
    """Times between a sequence's tokens while a prompt is prefilled, none if it ended too early, and the median time
    without."""
    points: list[tuple[float, int]] = []
    begun = asyncio.Event()

    def heard(at: float, tokens: int) -> None:
        points.append((at, tokens))
        if tokens > output // 3:
            begun.set()

    async def prefill() -> Answer:
        await begun.wait()
        return await engine.ask(prompt, 1)

    decode, long = await together([engine.ask(32, output, heard), prefill()])
    gaps = [(at, (at - start) / (tokens - count)) for (start, count), (at, tokens) in pairwise(points)]
    usual = [gap for at, gap in gaps if at < long.sent_at]
    if not usual or decode.last_at <= long.first_at:
        return [], 0.0
    during = [gap for at, gap in gaps if long.sent_at <= at and at - gap < long.first_at]
    return during, median(usual)
