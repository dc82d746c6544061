"""Dynamo's agentic Mooncake: Mooncake's rows with ids, and which of them a row waits for. Two versions of it.

Version 1 has ``request_id``, ``session_id``, ``wait_for``, ``timestamp`` (of rows that wait for none), and, once all
that is waited for has ended, ``delay`` plus ``tool_wait_ms``; rows linked by ``wait_for`` or a session are a
workflow. Version 2 begins with a header that names the blocks' size; ``play_id`` names the workflow, ``dependencies``
have a delay each, ``not_before_ms`` is the arrival. Times are in ms. An edge from another call's dispatch becomes one
from what that call waits for. A stage has one delay: where a join's edges differ, the shortest is kept, which is the
recorded one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from traces.files import parse_json, read_lines
from traces.readers.call import (
    UNITS_NS,
    Asked,
    Call,
    Recorded,
    expected,
    grouped,
    json_object,
    nanoseconds,
    parents_first,
    text,
    value_of,
)
from traces.readers.mooncake import call_of
from traces.schema import TraceError, near

SCHEMA = "dynamo.agentic_mooncake"
_FIELDS = ("request_id", "session_id", "input_length", "output_length", "hash_ids")


@dataclass(frozen=True, slots=True)
class _Row:
    """A request; ``waits`` has by request id the delay after its end, ``dispatched`` that after its dispatch (ns)."""

    where: str
    request_id: str
    workflow_id: str | None
    at_ns: int | None
    waits: Mapping[str, int]
    dispatched: Mapping[str, int]
    call: Call


def read(path: Path, asked: Asked) -> Iterator[Recorded]:
    """Yield the workflows in order of their first rows; raises `TraceError`."""
    rows: dict[str, _Row] = {}
    sessions: list[tuple[str | None, str]] = []
    block_tokens: int | None = None
    for number, (where, line) in enumerate(read_lines(path)):
        fields = json_object(parse_json(line, where), where, _FIELDS)
        if not number and "schema" in fields:
            block_tokens = _header(fields, where)
            continue
        request_id = text(value_of(fields, "request_id", where), "request_id", where)
        if request_id in rows:
            expected(where, "request_id", f"an id of its own, and not that of {rows[request_id].where}", request_id)
        size = block_tokens or asked.block_tokens
        row = (_second if block_tokens else _first)(fields, request_id, where, size, asked)
        rows[request_id] = row
        session = None if fields.get("session_id") is None else text(fields["session_id"], "session_id", where)
        sessions.append((row.workflow_id or session, request_id))
    _check_waits(rows)
    members = grouped(_by_workflow(rows, sessions), asked.limit)
    for ids in members:
        yield _workflow([rows[name] for name in ids], rows, asked)


def _header(fields: Mapping[str, Any], where: str) -> int:
    if fields["schema"] != SCHEMA or fields.get("version") != 2:
        expected(where, "header", f"{SCHEMA}, version 2", f"{fields['schema']}, version {fields.get('version')}")
    size = fields.get("block_size")
    if type(size) is not int or size < 1:
        expected(where, "block_size", "a positive integer", size)
    return size


def _first(fields: Mapping[str, Any], request_id: str, where: str, block_tokens: int, asked: Asked) -> _Row:
    names = fields.get("wait_for") or []
    if type(names) is not list:
        expected(where, "wait_for", "a list of request ids", names)
    wait_ns = sum(_ms(fields, name, where, asked) for name in ("delay", "delay_ms", "tool_wait_ms"))
    timestamp = fields.get("timestamp", fields.get("created_time"))
    return _Row(
        where,
        request_id,
        None,
        None if timestamp is None else nanoseconds(timestamp, asked.time_unit, "timestamp", where),
        {text(name, "wait_for", where): wait_ns for name in names},
        {},
        call_of(fields, where, block_tokens),
    )


def _second(fields: Mapping[str, Any], request_id: str, where: str, block_tokens: int, asked: Asked) -> _Row:
    edges = fields.get("dependencies") or []
    if type(edges) is not list:
        expected(where, "dependencies", "a list of edges", edges)
    waits: dict[str, int] = {}
    dispatched: dict[str, int] = {}
    for edge in edges:
        json_object(edge, f"{where}: dependencies", ("request_id", "trigger", "delay_ms", "relation"))
        trigger = edge.get("trigger", "completion")
        if trigger not in ("completion", "dispatch"):
            expected(where, "trigger", "completion or dispatch", trigger)
        name = text(value_of(edge, "request_id", where), "request_id", where)
        (waits if trigger == "completion" else dispatched)[name] = _ms(edge, "delay_ms", where, asked)
    play_id = text(value_of(fields, "play_id", where), "play_id", where)
    model = fields.get("model") or None
    return _Row(
        where,
        request_id,
        play_id,
        nanoseconds(value_of(fields, "not_before_ms", where), asked.time_unit, "not_before_ms", where),
        waits,
        dispatched,
        call_of(fields, where, block_tokens, model=None if model is None else text(model, "model", where)),
    )


def _ms(fields: Mapping[str, Any], name: str, where: str, asked: Asked) -> int:
    return nanoseconds(fields.get(name) or 0, asked.time_unit, name, where)


def _check_waits(rows: Mapping[str, _Row]) -> None:
    for row in rows.values():
        for name in (*row.waits, *row.dispatched):
            parent = rows.get(name)
            if parent is None:
                raise TraceError(f"{row.where}: waits for {name!r}, which is not in the file{near(name, rows)}")
            if parent.workflow_id != row.workflow_id:
                expected(
                    row.where, "dependencies", f"calls of play {row.workflow_id!r}", f"{parent.workflow_id}: {name}"
                )
            if row.at_ns and parent.at_ns is not None and row.at_ns < parent.at_ns:
                expected(
                    row.where,
                    "time",
                    f"none before that of {name!r}, which it waits for ({parent.at_ns / UNITS_NS['ms']:g} ms)",
                    row.at_ns / UNITS_NS["ms"],
                )


def _by_workflow(rows: Mapping[str, _Row], sessions: Sequence[tuple[str | None, str]]) -> Iterator[tuple[str, str]]:
    """(workflow, request): a workflow is known by its play, or by any request that the others hang together with."""
    head = {name: name for name in rows}

    def find(name: str) -> str:
        while head[name] != name:
            head[name] = head[head[name]]
            name = head[name]
        return name

    first_of: dict[str, str] = {}
    for session, name in sessions:
        links = [*rows[name].waits, *rows[name].dispatched]
        if session is not None:
            links.append(first_of.setdefault(session, name))
        for other in links:
            head[find(name)] = find(other)
    for name in rows:
        yield find(name), name


def _workflow(members: Sequence[_Row], rows: Mapping[str, _Row], asked: Asked) -> Recorded:
    edges = {row.request_id: [*row.waits, *row.dispatched] for row in members}
    order = parents_first(list(edges), edges, {row.request_id: row.where for row in members})
    place = {name: index for index, name in enumerate(order)}
    roots = [row for row in members if not edges[row.request_id]]
    for row in roots:
        if row.at_ns is None:
            raise TraceError(f"{row.where}: field 'timestamp' is missing in a row that waits for none")
    start_ns = min(row.at_ns or 0 for row in roots)
    waits: dict[str, Mapping[str, int]] = {}
    root_delay_ns: dict[str, int] = {}
    calls: list[Call] = []
    for name in order:
        row = rows[name]
        waits[name], after_start = _after_ends(row, waits, root_delay_ns, start_ns)
        delays = set(waits[name].values()) if waits[name] else {after_start}
        if len(delays) > 1:
            asked.notes["joins whose edges have different delays (the shortest is kept)"] += 1
        if not waits[name]:
            root_delay_ns[name] = after_start
        elif row.at_ns and row.workflow_id:
            asked.notes["times (not_before_ms) of calls that wait for others, not kept"] += 1
        parents = tuple(sorted(place[parent] for parent in waits[name]))
        calls.append(replace(row.call, after=parents, delay_ns=min(delays)))
    return Recorded(members[0].where, start_ns, tuple(calls), members[0].workflow_id)


def _after_ends(
    row: _Row, waits: Mapping[str, Mapping[str, int]], root_delay_ns: Mapping[str, int], start_ns: int
) -> tuple[dict[str, int], int]:
    """The ends the row waits for, with their delays; of a row that waits for none, its delay after the arrival."""
    ends = dict(row.waits)
    after_start = (row.at_ns or start_ns) - start_ns
    for name, delay_ns in row.dispatched.items():
        for parent, its_ns in waits[name].items():
            ends.setdefault(parent, its_ns + delay_ns)
        if not waits[name]:
            after_start = max(after_start, root_delay_ns[name] + delay_ns)
    return ends, after_start
