"""Mooncake's traces (FAST'25): JSON Lines of calls with the hashes of the prompt's blocks, of 512 tokens there.

Fields: ``timestamp`` (ms since the start), ``input_length``, ``output_length``, ``hash_ids``; others are ignored.
Equal ids mean equal prefixes, and they are kept. Dynamo and AIPerf add ``session_id``: its rows are the turns of a
conversation, each ``delay`` ms after the end of the one before; without it, so many ms later as its timestamp is
(Dynamo's rule). In the original traces nothing tells which calls belong to one conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from traces.files import parse_json, read_lines
from traces.readers.call import (
    Asked,
    Call,
    Recorded,
    expected,
    grouped,
    hash_ids,
    json_object,
    nanoseconds,
    text,
    tokens,
    value_of,
)
from traces.schema import TraceError

_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")

Row = tuple[str, Mapping[str, Any]]
"""Where it stands and its content."""


def read(path: Path, asked: Asked) -> Iterator[Recorded]:
    """Yield the calls and conversations in order of their first rows; raises `TraceError`."""
    for rows in grouped(_rows(path), asked.limit):
        start_ns = timestamp_ns(rows[0], asked)
        calls: list[Call] = []
        before_ns: int | None = start_ns
        for index, (where, row) in enumerate(rows):
            delay_ns, before_ns = _delay_ns((where, row), asked, before_ns) if index else (0, before_ns)
            calls.append(call_of(row, where, asked.block_tokens, delay_ns=delay_ns))
        yield Recorded(rows[0][0], start_ns, tuple(calls), rows[0][1].get("session_id"))


def timestamp_ns(row: Row, asked: Asked) -> int:
    """When the row is sent."""
    value = value_of(row[1], "timestamp", row[0], "created_time")
    return nanoseconds(value, asked.time_unit, "timestamp", row[0])


def call_of(row: Mapping[str, Any], where: str, block_tokens: int, **more: Any) -> Call:
    """The lengths and blocks of a row, Mooncake's or one alike; ``more`` are further fields of the `Call`."""
    prompt_tokens = tokens(value_of(row, "input_length", where, "input_tokens"), "input_length", where, 1)
    return Call(
        prompt_tokens=prompt_tokens,
        output_tokens=tokens(value_of(row, "output_length", where, "output_tokens"), "output_length", where, 0),
        hash_ids=hash_ids(row, prompt_tokens, block_tokens, where),
        hash_block_tokens=block_tokens,
        **more,
    )


def _rows(path: Path) -> Iterator[tuple[str | None, Row]]:
    for where, line in read_lines(path):
        row = json_object(parse_json(line, where), where, _FIELDS)
        session_id = row.get("session_id")
        yield None if session_id is None else text(session_id, "session_id", where), (where, row)


def _delay_ns(row: Row, asked: Asked, before_ns: int | None) -> tuple[int, int | None]:
    """A later turn's delay, and its timestamp if it has one."""
    where, fields = row
    timed = "timestamp" in fields or "created_time" in fields
    now_ns = timestamp_ns(row, asked) if timed else None
    if now_ns is not None and before_ns is not None and now_ns < before_ns:
        expected(where, "timestamp", f"a turn not before the one before it ({before_ns / 1e6:g} ms)", now_ns / 1e6)
    for name in ("delay", "delay_ms"):
        if fields.get(name) is not None:
            return nanoseconds(fields[name], asked.time_unit, name, where), now_ns
    if now_ns is None:
        raise TraceError(f"{where}: field 'delay' is missing, and 'timestamp' too, in a later turn of its session")
    if before_ns is None:
        expected(where, "timestamp", "a delay, as in the turn before it", fields.get("timestamp"))
    return now_ns - before_ns, now_ns
