"""What to measure on an engine: a batch ladder, a prefill ladder, prefills among decodes; and what fits its memory.

Numbers only: it knows the engine's limits and sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

from calibration.raw_measurements import MeasuredKind

CONTEXTS = (128, 512, 2048, 8192)
QUICK_CONTEXTS = (128, 1024)
MIXED_PROMPTS = (64, 256, 1024)
QUICK_MIXED_PROMPTS = (128, 512)
LONGEST_PROMPT = 16_384
WINDOW_STEPS = 48
QUICK_WINDOW_STEPS = 24
PREFILLS = 6
"""Prefills of one mixed cell, one after the other."""
STEPS_A_PREFILL = 5
"""Decode steps that a prefill of a mixed cell, with the gap before the next, is given at most."""
REPEATS = 3
QUICK_REPEATS = 2
SPARE_STEPS = 8
"""Requests sent together do not arrive in one step."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can take. ``num_kv_tokens`` counts all blocks, one of them reserved by vLLM."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_kv_tokens: int
    block_tokens: int
    max_model_len: int

    def kv_tokens(self, sequences: int, tokens: int) -> int:
        """KV memory of so many sequences of so many tokens, in whole blocks."""
        return sequences * ceil(tokens / self.block_tokens) * self.block_tokens

    def fits(self, sequences: int, tokens: int) -> bool:
        """Whether they fit together."""
        return self.kv_tokens(sequences, tokens) <= self.num_kv_tokens - self.block_tokens


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the plan: ``batch`` sequences that decode after prompts of ``context`` tokens, and prompts of
    ``prompt`` tokens that are prefilled, alone or among them. ``window`` is how many decode steps are wanted."""

    kind: MeasuredKind
    batch: int
    context: int
    prompt: int
    window: int

    @property
    def name(self) -> str:
        """The cell in words; names it in the raw file."""
        if self.kind == "prefill":
            return f"prefill of {self.prompt}"
        decodes = f"{self.batch} decodes after {self.context}"
        return decodes if self.kind == "decode" else f"prefills of {self.prompt} among {decodes}"

    def output_tokens(self, limits: Limits) -> int:
        """What each decoding sequence is asked for: the time until the last has begun, and then the window."""
        ramp = ceil(self.batch * self.context / limits.max_num_batched_tokens) + SPARE_STEPS
        return ramp + ceil(0.25 * ramp) + self.window

    def cost(self, limits: Limits) -> float:
        """Rough relative duration, for the time left: a prompt token weighs 1, a step 40 and 1 for each sequence."""
        if self.kind == "prefill":
            return PREFILLS / 2 * (40.0 + self.prompt)
        prefills = PREFILLS * self.prompt if self.kind == "mixed" else 0
        return self.batch * self.context + prefills + self.output_tokens(limits) * (40.0 + self.batch)


def ladder(last: int, factor: float = 2.0, first: int = 1) -> list[int]:
    """Whole numbers from ``first`` on, each ``factor`` times the one before, up to and with ``last``."""
    numbers: list[int] = []
    value = float(first)
    while round(value) < last:
        if not numbers or round(value) > numbers[-1]:
            numbers.append(round(value))
        value *= factor
    return [*numbers, last]


def plan(limits: Limits, *, quick: bool = False) -> list[Cell]:
    """The cells of one pass, cheap ones first within each kind. Cells longer than the model's limit are not planned;
    those that do not fit KV memory are, so that the measuring can say that it left them out."""
    window = QUICK_WINDOW_STEPS if quick else WINDOW_STEPS
    contexts = QUICK_CONTEXTS if quick else CONTEXTS
    batches = ladder(limits.max_num_seqs, 4.0 if quick else 2.0)
    cells = [Cell("decode", batch, context, 0, window) for context in contexts for batch in batches]
    longest = min(limits.max_model_len - 1, limits.num_kv_tokens - 2 * limits.block_tokens, LONGEST_PROMPT)
    cells += [Cell("prefill", 0, 0, prompt, 0) for prompt in _prompts(longest, quick)]
    if limits.max_num_seqs > 1:
        most = limits.max_num_seqs - 1
        among = sorted({ceil(most / 4), most} if quick else {1, ceil(most / 4), ceil(most / 2), most})
        prompts = [prompt for prompt in (QUICK_MIXED_PROMPTS if quick else MIXED_PROMPTS) if prompt <= longest]
        some = contexts[:1] if quick else contexts[:3:2]
        window = PREFILLS * STEPS_A_PREFILL
        cells += [Cell("mixed", n, context, prompt, window) for context in some for n in among for prompt in prompts]
    return [cell for cell in cells if cell.context + cell.output_tokens(limits) <= limits.max_model_len]


def unfit(cell: Cell, limits: Limits) -> str:
    """Why the cell cannot be run on this engine, or an empty string."""
    tokens = cell.context + cell.output_tokens(limits)
    needed = limits.kv_tokens(cell.batch, tokens)
    if cell.kind == "mixed":
        needed += limits.kv_tokens(1, cell.prompt + 1)
    room = limits.num_kv_tokens - limits.block_tokens
    return f"needs {needed:,} tokens of KV memory, there are {room:,}" if needed > room else ""


def _prompts(longest: int, quick: bool) -> list[int]:
    """One token, which shows what a request costs around the engine, then a ladder from 16 on."""
    return [1, *ladder(longest, 2.0 if quick else sqrt(2.0), 16)] if longest > 16 else [1]
