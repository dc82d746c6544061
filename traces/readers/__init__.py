"""Public trace formats, one file each: calls and workflows with arrival times, turned into a trace.

They have no per-model runs, so the same lengths stand under every model asked for, and nobody knows whether
an answer was right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from traces.files import check_file, digest_of
from traces.graph import longest
from traces.readers import (
    agentic_mooncake,
    azure,
    burstgpt,
    llmservingsim,
    mooncake,
    otel,
    servegen,
    vllm_bench,
)
from traces.readers.call import UNITS_NS, Asked, Call, Recorded
from traces.schema import Run, Stage, Trace, TraceError, Workflow, check_together, near

LEAST_GAP_S, MOST_GAP_S = 1e-3, 100.0
"""A mean gap between arrivals outside of these looks like a mistaken unit."""


@dataclass(frozen=True, slots=True)
class Format:
    """How a format is read, what it does not say, and the unit of its times (None: they are written out)."""

    read: Callable[[Path, Asked], Iterator[Recorded]]
    lacks: str
    time_unit: str | None


@dataclass(frozen=True, slots=True)
class Imported:
    """The trace, and what is to be told of how it was made."""

    trace: Trace
    notes: tuple[str, ...]


READERS = {
    "mooncake": Format(mooncake.read, "names of calls, texts and, without session_id, conversations", "ms"),
    "agentic_mooncake": Format(agentic_mooncake.read, "names of calls and texts", "ms"),
    "azure": Format(azure.read, "texts, models, conversations and shared prefixes", None),
    "burstgpt": Format(burstgpt.read, "texts and shared prefixes, and before release 2.0 conversations", "s"),
    "llmservingsim": Format(llmservingsim.read, "texts, names and, without token ids, shared prefixes", "ns"),
    "otel": Format(otel.read, "shared prefixes beyond what a provider's cache told (else none are assumed)", "ns"),
    "servegen": Format(servegen.read, "calls, only their rhythm: use the trace with --arrivals", "s"),
    "vllm_bench": Format(vllm_bench.read, "texts, conversations and shared prefixes", "s"),
}


def import_trace(
    path: str | Path,
    format: str,
    models: Sequence[str] = (),
    limit: int | None = None,
    time_unit: str | None = None,
    block_tokens: int = 512,
) -> Imported:
    """Read a file of a public format; every workflow has the same run under each of ``models`` (default: the file's).

    Arrivals are seconds since the first one. A call that put out no token gets one (an engine cannot serve none),
    counted in ``meta: {"clamped_output": 1}``. ``limit`` takes only so many workflows from the front, ``time_unit``
    (`UNITS_NS`) is for files whose times are in another unit than the format's, ``block_tokens`` is the size of the
    blocks that ``hash_ids`` name where the file does not tell it. Raises `TraceError` naming file, line and field.
    """
    path = Path(path)
    if format not in READERS:
        raise TraceError(f"format {format!r} is unknown{near(format, READERS)} (formats: {', '.join(READERS)})")
    if not all(models) or len(set(models)) != len(models):
        raise TraceError(f"expected different model names, found {', '.join(models)}")
    for name, value in (("limit", limit), ("block tokens", block_tokens)):
        if value is not None and value < 1:
            raise TraceError(f"{name}: expected a positive integer, found {value}")
    own_unit = READERS[format].time_unit
    if time_unit is not None and (own_unit is None or time_unit not in UNITS_NS):
        units = f"one of {', '.join(UNITS_NS)}" if own_unit else f"none, for the times of {format} are written out"
        raise TraceError(f"time unit: expected {units}, found {time_unit!r}")
    check_file(path)
    asked = Asked(time_unit or own_unit or "ns", block_tokens, limit)
    found = list(islice(READERS[format].read(path, asked), limit))
    if not found:
        left_out = "".join(f"; {note}: {count}" for note, count in asked.notes.items())
        raise TraceError(f"{path}: the file has no calls{left_out}")
    recorded = Counter(call.model for item in found for call in item.calls if call.model)
    names = sorted(models) or _only(recorded, path)
    start_ns = min(item.arrival_ns for item in found)
    workflows = tuple(_workflow(item, number, format, names, start_ns) for number, item in enumerate(found))
    check_together(workflows, [item.where for item in found])
    notes = [f"{note}: {count}" for note, count in asked.notes.items()]
    notes += _remarks(found, recorded, names, asked.time_unit if own_unit else None)
    return Imported(Trace(format, workflows, digest_of(workflows)), tuple(notes))


def _only(recorded: Counter[str], path: Path) -> list[str]:
    """The one model that the file names."""
    if len(recorded) != 1:
        named = ", ".join(f"{model} ({count} calls)" for model, count in recorded.most_common(8)) or "none"
        raise TraceError(f"{path}: expected a model of yours for the calls (--model), since the file names {named}")
    return list(recorded)


def _remarks(
    found: Sequence[Recorded], recorded: Counter[str], models: Sequence[str], unit: str | None
) -> Iterator[str]:
    clamped = sum(1 for item in found for call in item.calls if not call.output_tokens)
    if clamped:
        yield f"{clamped} calls without output got one token (meta.clamped_output)"
    if recorded and list(recorded) != list(models):
        yield f"recorded with {', '.join(f'{model} ({count} calls)' for model, count in recorded.most_common(8))}"
    arrivals = [item.arrival_ns for item in found]
    gap_s = (max(arrivals) - min(arrivals)) / 1e9 / max(len(found) - 1, 1)
    if unit is not None and gap_s and not LEAST_GAP_S <= gap_s <= MOST_GAP_S:
        likely = [other for other in UNITS_NS if LEAST_GAP_S <= gap_s * UNITS_NS[other] / UNITS_NS[unit] <= MOST_GAP_S]
        yield (
            f"times were read as {unit}, which makes workflows arrive {gap_s:.3g} s apart on average; "
            f"if they are in another unit, say so: --time-unit {' or '.join(likely or UNITS_NS)}"
        )


def _workflow(item: Recorded, number: int, format: str, models: Sequence[str], start_ns: int) -> Workflow:
    stages: list[Stage] = []
    for call in item.calls:
        stages.append(_stage(call, stages))
    clamped = sum(1 for call in item.calls if not call.output_tokens)
    run = Run(tuple(stages))
    return Workflow(
        workflow_id=item.workflow_id or f"{format}-{number:06d}",
        workload=format,
        runs={model: run for model in models},
        arrival_s=(item.arrival_ns - start_ns) / 1e9,
        meta={"clamped_output": clamped} if clamped else {},
    )


def _stage(call: Call, earlier: Sequence[Stage]) -> Stage:
    chain = tuple(range(len(earlier)))[-1:]
    after = chain if call.after is None else call.after
    parent_index = longest(earlier, after)
    parent = None if parent_index is None else earlier[parent_index]
    return Stage(
        name=call.name,
        prompt_tokens=call.prompt_tokens,
        output_tokens=max(1, call.output_tokens),
        reused_tokens=0 if parent is None else _reused(call, parent),
        delay_s=call.delay_ns / 1e9,
        hash_ids=call.hash_ids,
        hash_block_tokens=call.hash_block_tokens,
        after=None if after == chain else after,
    )


def _reused(call: Call, parent: Stage) -> int:
    """How many leading tokens the call's prompt has of its parent's prompt and answer."""
    if not call.hash_ids:
        return min(call.reused_tokens, parent.prompt_tokens + parent.output_tokens, call.prompt_tokens)
    common = 0
    for one, other in zip(parent.hash_ids, call.hash_ids, strict=False):
        if one != other:
            break
        common += call.hash_block_tokens
    return min(common, parent.prompt_tokens, call.prompt_tokens)
