"""A run as a file in Chrome's trace event format, for Perfetto (ui.perfetto.dev) and chrome://tracing.

An engine is a process, its slots are threads: a slice for every spell of a request in the batch, with its prefill and
decode inside, and counters. One more process has the workflows, each cut into the pieces of its critical path. Flows
lead from a stage to those that waited for it. It reads a watched run and decides nothing.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format).
Timestamps are whole microseconds, so that rounding can never make slices overlap.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count, pairwise
from math import inf, isnan
from pathlib import Path
from typing import Any, NamedTuple

from chimsim.errors import ChimsimError
from chimsim.explain import Story, stories
from chimsim.records import RunResult
from chimsim.replay import SAMPLE_S
from chimsim.results import check_file, write_file
from chimsim.watch import CHECKED, FINISHED, Spell, Watch

MAX_EVENTS = 1_000_000
"""Viewers take no more with comfort: later workflows are then left out."""

# In which order events of one instant stand: what ends, then what begins, then what hangs on slices.
_MARK, _SLICE, _FLOW = 0, 1, 2
_WHOLE = -1
Event = dict[str, Any]
_Ordered = tuple[int, int, int, Event]


def check_timeline(path: Path) -> None:
    """Raises `ChimsimError` where no timeline of that name can be written: to be told before the run."""
    if not path.name.endswith((".json", ".json.gz")):
        raise ChimsimError(f"--timeline {path}: expected a name that ends in .json or .json.gz")
    check_file(path)


def write_timeline(result: RunResult, watch: Watch, path: Path) -> str:
    """Write the run's timeline; returns a line about it for people. The same run gives the same bytes."""
    events, shown = trace_events(result, watch)
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    data = f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'.encode()
    write_file(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    whole = len(result.workflows)
    workflows = f"{whole} workflows" if shown == whole else f"the first {shown} of {whole} workflows"
    return f"{path}: {len(events):,} events of {workflows}; open it in https://ui.perfetto.dev"


def trace_events(result: RunResult, watch: Watch, limit: int = MAX_EVENTS) -> tuple[list[Event], int]:
    """The events in order of time, after the names, and of how many workflows (in order of arrival) they are.

    There are at most ``limit`` of them, names and the engines' counters aside.
    """
    told = list(stories(result, watch))
    ordered: list[_Ordered] = []
    names: list[Event] = []
    places: dict[tuple[int, int], list[_Place]] = {}
    engines = list(result.engines["engine"].astype(str))
    lives = [
        _Span(story.workflow["arrived_at"], story.workflow["finished_at"], story.workflow["workflow"], _WHOLE)
        for story in told
        if story.path
    ]
    stays = _stays(told)
    groups = [*((engine, "slot", stays.get(engine, [])) for engine in engines), ("workflows", "row", lives)]
    # Perfetto knows a thread by its tid alone, and takes one with the pid for the main thread: no number comes twice.
    tid = len(groups) + 1
    for pid, (name, what, spans) in enumerate(groups, start=1):
        rows = pack(spans)
        for span, row in zip(spans, rows, strict=True):
            place = _Place(pid, tid + row, _us(span.begin_at), _us(span.end_at))
            places.setdefault((span.workflow, span.stage), []).append(place)
        depth = max(rows, default=-1) + 1
        names += _names(pid, name, tid, [f"{what} {row}" for row in range(depth)])
        tid += depth
        if name in engines:
            ordered += _counters(pid, name, result, spans)
    ids = count(1)
    shown = used = 0
    for story in told:
        mine = [*_call_events(story, places), *_workflow_events(story, places), *_flow_events(story, places, ids)]
        if used + len(mine) > limit:
            break
        ordered += mine
        used += len(mine)
        shown += 1
    ordered.sort(key=lambda entry: entry[:3])
    return names + [event for *_, event in ordered], shown


def pack(spans: Sequence[_Span]) -> list[int]:
    """For each span, in order of their beginnings, the lowest row in which it overlaps no other."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    rows = []
    for span in spans:
        while busy and busy[0][0] <= span.begin_at:
            heappush(free, heappop(busy)[1])
        row = heappop(free) if free else len(busy)
        heappush(busy, (span.end_at, row))
        rows.append(row)
    return rows


class _Span(NamedTuple):
    """What is to stand in a row as one slice."""

    begin_at: float
    end_at: float
    workflow: int
    stage: int


class _Place(NamedTuple):
    """Where a slice stands; instants in microseconds."""

    pid: int
    tid: int
    begin: int
    end: int


_Places = Mapping[tuple[int, int], Sequence[_Place]]
"""By workflow and stage; `_WHOLE` for the workflow itself."""


def _us(instant_s: float) -> int:
    return round(instant_s * 1e6)


def _stays(told: Sequence[Story]) -> dict[str, list[_Span]]:
    """The stays in each engine's batch, in order of their beginnings."""
    found: dict[str, list[_Span]] = {}
    for story in told:
        for stage in story.stages:
            for spells in stays_of(stage.spells):
                span = _Span(spells[0].begin_at, spells[-1].end_at, story.workflow["workflow"], stage.stage)
                found.setdefault(str(stage.call["engine"]), []).append(span)
    return {engine: sorted(spans) for engine, spans in found.items()}


def stays_of(spells: Sequence[Spell]) -> list[list[Spell]]:
    """Spells in groups that follow one another without leaving the batch."""
    found: list[list[Spell]] = []
    for spell in spells:
        if found and found[-1][-1].ended == CHECKED and found[-1][-1].end_at == spell.begin_at:
            found[-1].append(spell)
        else:
            found.append([spell])
    return found


def _names(pid: int, name: str, first_tid: int, threads: Sequence[str]) -> list[Event]:
    found: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}},
    ]
    for tid, thread in enumerate(threads, start=first_tid):
        found.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}})
        found.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
    return found


def _counters(pid: int, engine: str, result: RunResult, stays: Sequence[_Span]) -> Iterator[_Ordered]:
    """What was sampled, and zeros where the engine falls idle, of which there are no samples."""
    samples = result.timeline[result.timeline["engine"] == engine]
    columns = (samples[name].tolist() for name in ("time_s", "running", "waiting", "kv_used_fraction"))
    rows = list(zip(*columns, strict=True))
    busy_until = inf
    for stay in [*stays, _Span(inf, inf, 0, 0)]:
        if stay.begin_at - busy_until >= SAMPLE_S:
            rows.append((busy_until, 0, 0, 0.0))
        busy_until = stay.end_at if busy_until == inf else max(busy_until, stay.end_at)
    for time_s, running, waiting, kv_used_fraction in rows:
        at = _us(time_s)
        values = (("running", "requests", running), ("waiting", "requests", waiting))
        for name, unit, value in (*values, ("KV cache", "% used", round(100 * kv_used_fraction, 3))):
            yield at, _MARK, 0, {"ph": "C", "name": name, "pid": pid, "ts": at, "args": {unit: value}}


def _slice(name: str, place: _Place, begin: int, end: int, args: Mapping[str, Any] | None = None) -> _Ordered:
    event: Event = {"ph": "X", "name": name, "pid": place.pid, "tid": place.tid, "ts": begin, "dur": end - begin}
    if args:
        event["args"] = dict(args)
    # Of those that begin together the longer is the outer one, and must come first.
    return begin, _SLICE, begin - end, event


def _instant(name: str, place: _Place, at: int) -> _Ordered:
    return at, _MARK, 0, {"ph": "i", "s": "t", "name": name, "pid": place.pid, "tid": place.tid, "ts": at}


def _call_events(story: Story, places: _Places) -> Iterator[_Ordered]:
    for stage in story.stages:
        call = stage.call
        args = {name: call[name] for name in ("request_id", "prompt_tokens", "cached_tokens", "output_tokens")}
        args |= {"stage": stage.stage, "waited_s": call["admitted_at"] - call["ready_at"]}
        if stage.decision.reason:
            args["reason"] = stage.decision.reason
        mine = places.get((story.workflow["workflow"], stage.stage), ())
        for place, spells in zip(mine, stays_of(stage.spells), strict=True):
            yield _slice(f"{story.workflow['workflow_id']} {stage.name}", place, place.begin, place.end, args)
            for spell in spells:
                begin, end = _us(spell.begin_at), _us(spell.end_at)
                token = end if isnan(spell.token_at) else _us(spell.token_at)
                first = spell.begin_at < call["first_token_at"]
                yield _slice("prefill" if first else "recompute", place, begin, token)
                if spell.token_at == call["first_token_at"]:
                    yield _instant("first token", place, token)
                if end > token:
                    yield _slice("decode", place, token, end)
            if spells[-1].ended != FINISHED:
                yield _instant(spells[-1].ended, place, place.end)


def _workflow_events(story: Story, places: _Places) -> Iterator[_Ordered]:
    workflow = story.workflow
    for life in places.get((workflow["workflow"], _WHOLE), ()):
        args = {"latency_s": workflow["latency_s"], "model": workflow["model"], "workload": workflow["workload"]}
        yield _slice(workflow["workflow_id"], life, life.begin, life.end, args)
        stage_names = {stage.stage: stage.name for stage in story.stages}
        for piece in story.path:
            begin, end = _us(piece.begin_at), _us(piece.end_at)
            yield _slice(f"{piece.part}: {piece.stage} {stage_names[piece.stage]}", life, begin, end)


def _flow_events(story: Story, places: _Places, ids: Iterator[int]) -> Iterator[_Ordered]:
    """From what was waited for to what waited, and from one stay in a batch to the next of the same call."""
    number = story.workflow["workflow"]
    over = {stage.stage: stage.call["finished_at"] for stage in story.stages}
    for stage in story.stages:
        mine = places.get((number, stage.stage), ())
        if not mine:
            continue
        ready_at = stage.call["ready_at"]
        before = [other for other in stage.decision.after if over.get(other, inf) <= ready_at]
        for other in before:
            source = places[number, other][-1]
            yield from _flow(next(ids), source, max(source.begin, source.end - 1), mine[0])
        if not before:
            for life in places.get((number, _WHOLE), ()):
                yield from _flow(next(ids), life, life.begin, mine[0])
        for left, back in pairwise(mine):
            yield from _flow(next(ids), left, max(left.begin, left.end - 1), back)


def _flow(flow_id: int, source: _Place, at: int, target: _Place) -> Iterator[_Ordered]:
    """An arrow from inside one slice to the beginning of another; numbers, for Perfetto takes text as hexadecimal."""
    same: Event = {"cat": "flow", "name": "next", "id": flow_id}
    yield at, _FLOW, 0, {"ph": "s", **same, "pid": source.pid, "tid": source.tid, "ts": at}
    yield (
        target.begin,
        _FLOW,
        0,
        {"ph": "f", "bp": "e", **same, "pid": target.pid, "tid": target.tid, "ts": target.begin},
    )
