"""Public trace formats, one file each: single calls with arrival times, turned into one-stage workflows.

They have no per-model runs, so the same lengths stand under every model asked for, and nobody knows whether
an answer was right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from traces.files import check_file, digest_of
from traces.readers import azure, llmservingsim, mooncake
from traces.readers.call import Call
from traces.schema import Run, Stage, Trace, TraceError, Workflow, near

READERS: dict[str, Callable[[Path], Iterator[Call]]] = {
    "mooncake": mooncake.read,
    "azure": azure.read,
    "llmservingsim": llmservingsim.read,
}


def import_trace(path: str | Path, format: str, models: Sequence[str], limit: int | None = None) -> Trace:
    """Read a file of a public format; every call becomes a workflow of one stage under each of ``models``.

    Arrivals are seconds since the first one. A call that put out no token gets one (an engine cannot serve
    none) and ``meta: {"clamped_output": 1}``. ``limit`` takes only so many calls from the front.
    Raises `TraceError` naming file, line and field.
    """
    path = Path(path)
    if format not in READERS:
        raise TraceError(f"format {format!r} is unknown{near(format, READERS)} (formats: {', '.join(READERS)})")
    if not models or not all(models) or len(set(models)) != len(models):
        raise TraceError(f"expected one or more different model names, found {', '.join(models) or 'none'}")
    if limit is not None and limit < 1:
        raise TraceError(f"limit: expected a positive integer, found {limit}")
    check_file(path)
    calls = list(islice(READERS[format](path), limit))
    if not calls:
        raise TraceError(f"{path}: the file has no calls")
    start_ns = min(call.arrival_ns for call in calls)
    workflows = tuple(
        _workflow(call, f"{format}-{number:06d}", format, sorted(models), start_ns) for number, call in enumerate(calls)
    )
    return Trace(format, workflows, digest_of(workflows))


def _workflow(call: Call, workflow_id: str, workload: str, models: Sequence[str], start_ns: int) -> Workflow:
    stage = Stage(
        name="call",
        prompt_tokens=call.prompt_tokens,
        output_tokens=max(1, call.output_tokens),
        hash_ids=call.hash_ids,
        hash_block_tokens=call.hash_block_tokens,
    )
    return Workflow(
        workflow_id=workflow_id,
        workload=workload,
        runs={model: Run((stage,)) for model in models},
        arrival_s=(call.arrival_ns - start_ns) / 1e9,
        meta={} if call.output_tokens else {"clamped_output": 1},
    )
