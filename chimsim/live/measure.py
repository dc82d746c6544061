"""Measures step times of a running engine, cell by cell of a plan, into a raw file.

It drives one engine that nobody else uses, and fits nothing. A cell that does not fit, was preempted or met the
prefix cache is written down as skipped, with the reason; an engine that fails ends the measuring, the file stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import SystemRandom
from typing import TypeVar

from calibration.raw_measurements import Header, Measurement, RawWriter, Skipped, read_raw
from chimsim.errors import ChimsimError
from chimsim.live.client import Answer, Client, Completion, EngineError
from chimsim.live.metrics import EngineMetrics, look
from chimsim.live.plan import PREFILLS, QUICK_REPEATS, REPEATS, Cell, Limits, plan, unfit
from chimsim.live.windows import decode_window, mixed_window

Report = Callable[[float, float, str], None]
"""Hears of progress: what is done, of how much, and what is measured."""

TOKEN_RANGES = ((1000, 30_000), (300, 1000), (20, 240), (3, 100))
"""Ranges of token ids to draw prompts from, largest first: which a model takes depends on its vocabulary."""
IDLE_S = 30.0
POLL_S = 0.05
SHORT_WINDOW = 8
"""Fewer steps than these are no measurement."""
PROMPTS_A_CELL = 3
LONGER = 4
"""How much longer a batch is run again whose window came out short: its requests began too far apart."""
LEFT_STEPS = 6
"""A prefill is sent only while every decoding sequence has so many tokens to go."""
T = TypeVar("T")


async def together(work: Sequence[Awaitable[T]]) -> list[T]:
    """All results in order; the first failure ends the others and is raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Engine:
    """One engine as the measuring sees it: client, model, and prompts that it has never seen."""

    client: Client
    model: str
    tokens: tuple[int, int] = TOKEN_RANGES[0]

    def __post_init__(self) -> None:
        self._random = SystemRandom()

    def completion(self, prompt_tokens: int, max_tokens: int) -> Completion:
        """A request with a prompt of random token ids: from the second block on no prefix is in the cache."""
        low, high = self.tokens
        prompt = tuple(self._random.randrange(low, high) for _ in range(prompt_tokens))
        return Completion(self.model, prompt, max_tokens)

    async def ask(
        self, prompt_tokens: int, max_tokens: int, on_tokens: Callable[[float, int], None] | None = None
    ) -> Answer:
        """Send such a request; raises `EngineError` unless it got exactly what was asked for."""
        answer = await self.client.complete(self.completion(prompt_tokens, max_tokens), on_tokens)
        found = (answer.prompt_tokens, answer.output_tokens)
        if found != (prompt_tokens, max_tokens):
            raise EngineError(
                f"{self.client.url}: asked for {prompt_tokens} + {max_tokens} tokens, the server counts {found[0]} + "
                f"{found[1]}; it must take token ids, ignore_eos and min_tokens, and hold them in its context limit",
                "garbage",
            )
        return answer

    async def find_tokens(self) -> None:
        """Find a range of token ids that the model's vocabulary has."""
        for self.tokens in TOKEN_RANGES:
            try:
                await self.ask(8, 1)
            except EngineError as error:
                if error.status != 400 or self.tokens == TOKEN_RANGES[-1]:
                    raise
            else:
                return

    async def metrics(self) -> EngineMetrics | None:
        """A snapshot, None where the server has no metrics of vLLM's."""
        return await look(self.client)

    async def idle(self) -> EngineMetrics | None:
        """A snapshot of the engine at rest. Raises `ChimsimError` when somebody else keeps it busy."""
        waited_s = 0.0
        while True:
            now = await self.metrics()
            if now is None or not (now.running or now.waiting):
                return now
            if waited_s >= IDLE_S:
                raise ChimsimError(
                    f"{self.client.url}: the engine still runs {now.running:g} requests after {IDLE_S:g} s that are "
                    "not ours; measure an engine that nobody else uses"
                )
            await asyncio.sleep(POLL_S)
            waited_s += POLL_S


def header_there(raw: Path) -> Header | None:
    """The header of a raw file that is to be gone on with, None where there is none yet."""
    return read_raw(raw).header if raw.exists() and raw.stat().st_size else None


async def measure(
    engine: Engine,
    header: Header,
    raw: Path,
    *,
    longest: int | None = None,
    quick: bool = False,
    report: Report | None = None,
) -> None:
    """Measure what the raw file does not hold yet; each result is on disk before the next cell begins.

    ``longest`` keeps the measuring to sequences of so many tokens. Raises `ChimsimError` when the file is of another
    engine, `EngineError` when the engine fails.
    """
    done = set()
    if raw.exists() and raw.stat().st_size:
        there = read_raw(raw)
        wrong = there.header.differences(header)
        if wrong:
            raise ChimsimError(f"{raw} is of another engine ({'; '.join(wrong)}); give another --raw, or remove it")
        done = there.done
    limits = Limits(
        header.max_num_seqs,
        header.max_num_batched_tokens,
        header.num_kv_tokens,
        header.block_tokens,
        min(header.max_model_len, longest or header.max_model_len),
    )
    cells = plan(limits, quick=quick)
    # repeats outermost: slow drifts of the machine reach all cells alike, and an interrupted file has every kind
    wanted = [(cell, repeat) for repeat in range(QUICK_REPEATS if quick else REPEATS) for cell in cells]
    wanted = [(cell, repeat) for cell, repeat in wanted if (cell.name, repeat) not in done]
    writer = RawWriter(raw, header)
    total, spent = sum(cell.cost(limits) for cell, _ in wanted), 0.0
    if wanted:
        await _warm_up(engine, limits, cells)
    for cell, repeat in wanted:
        if report is not None:
            report(spent, total, cell.name)
        reason = unfit(cell, limits)
        if reason:
            writer.write(Skipped(cell.name, repeat, reason))
        else:
            for entry in await _watched(engine, limits, cell, repeat):
                writer.write(entry)
        spent += cell.cost(limits)
    if report is not None:
        report(total, total, "")


async def _warm_up(engine: Engine, limits: Limits, cells: Sequence[Cell]) -> None:
    """The largest batch and the longest prompt once, unrecorded: first times compile, capture and fill pools."""
    fitting = [cell for cell in cells if not unfit(cell, limits)]
    for kind in ("decode", "prefill"):
        largest = max(
            (c for c in fitting if c.kind == kind), key=lambda c: (c.batch, -c.context, c.prompt), default=None
        )
        if largest is not None:
            await _run(engine, limits, replace(largest, window=SHORT_WINDOW))


async def _watched(engine: Engine, limits: Limits, cell: Cell, repeat: int) -> list[Measurement | Skipped]:
    """The cell's result, thrown away if the engine preempted or answered from its prefix cache meanwhile."""
    before = await engine.idle()
    found = await _run(engine, limits, cell)
    after = await engine.idle()
    reason = found if isinstance(found, str) else ""
    if before is not None and after is not None:
        if (after.preemptions or 0) > (before.preemptions or 0):
            reason = "the engine preempted: KV memory was full"
        elif (after.prefix_hits or 0) > (before.prefix_hits or 0):
            reason = "prompts met the prefix cache"
    if reason or isinstance(found, str):
        return [Skipped(cell.name, repeat, reason)]
    return [replace(each, repeat=repeat) for each in found]


async def _run(engine: Engine, limits: Limits, cell: Cell) -> list[Measurement] | str:
    """The cell's measurements, or why there are none."""
    if cell.kind == "prefill":
        return [await _prefill(engine, cell) for _ in range(PROMPTS_A_CELL)]
    run = _decode if cell.kind == "decode" else _mixed
    output_tokens = cell.output_tokens(limits)
    found = await run(engine, cell, output_tokens)
    longer = output_tokens + LONGER * cell.window
    whole = cell.context + longer
    if found is None and whole <= limits.max_model_len and limits.fits(cell.batch, whole):
        found = await run(engine, cell, longer)
    return [found] if found is not None else f"fewer than {SHORT_WINDOW} steps seen with the whole batch in flight"


async def _decode(engine: Engine, cell: Cell, output_tokens: int) -> Measurement | None:
    answers = await together([engine.ask(cell.context, output_tokens) for _ in range(cell.batch)])
    window = decode_window(answers)
    if window is None or window.steps < min(SHORT_WINDOW, cell.window):
        return None
    return Measurement(cell.name, 0, "decode", cell.batch, window.context_tokens, 0, 0, window.steps, window.seconds)


async def _prefill(engine: Engine, cell: Cell) -> Measurement:
    before = await engine.metrics()
    answer = await engine.ask(cell.prompt, 1)
    seconds = answer.first_at - answer.sent_at
    engine_s = await _prefill_s(engine, before) if before is not None else None
    return Measurement(cell.name, 0, "prefill", 0, 0.0, cell.prompt, 1, 0.0, seconds, engine_s)


async def _prefill_s(engine: Engine, before: EngineMetrics) -> float | None:
    """The engine's own time of the one request since ``before``, None where it keeps none.

    Its counters move after the answer was sent, so it is given a moment.
    """
    if before.prefill_count is None or before.prefill_sum_s is None:
        return None
    for _ in range(20):
        after = await engine.metrics()
        if after is not None and after.prefill_count == before.prefill_count + 1 and after.prefill_sum_s is not None:
            return after.prefill_sum_s - before.prefill_sum_s
        await asyncio.sleep(POLL_S / 5)
    return None


async def _mixed(engine: Engine, cell: Cell, output_tokens: int) -> Measurement | None:
    """Prefills one after the other while the batch decodes; the steps from before the first to after the last."""
    tokens = [0] * cell.batch
    all_begun = asyncio.Event()

    def heard(index: int, count: int) -> None:
        tokens[index] = count
        if min(tokens):
            all_begun.set()

    async def prefills() -> list[Answer]:
        await all_begun.wait()
        answers: list[Answer] = []
        while len(answers) < PREFILLS and max(tokens) + LEFT_STEPS < output_tokens:
            answers.append(await engine.ask(cell.prompt, 1))
        return answers

    decodes = [
        engine.ask(cell.context, output_tokens, lambda _, count, index=index: heard(index, count))  # type: ignore[misc]
        for index in range(cell.batch)
    ]
    answers, sent = await together([together(decodes), prefills()])
    if not sent:
        return None
    window = mixed_window(answers, sent[0].sent_at, sent[-1].last_at)
    if window is None or window.steps < SHORT_WINDOW:
        return None
    return Measurement(
        cell.name, 0, "mixed", cell.batch, window.context_tokens, cell.prompt, len(sent), window.steps, window.seconds
    )
