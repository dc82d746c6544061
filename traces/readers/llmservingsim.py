"""LLMServingSim's workloads: JSON Lines of single calls, or of sessions with ``sub_requests``, or of both.

A call has ``input_toks``, ``output_toks``, ``arrival_time_ns``. Recorded benchmark runs (``arrival_time`` in seconds
since 1970 instead, and measured times) read as well: more fields are ignored. A session's calls follow one
another, each ``tool_duration_ns`` after the end of the one before. Token ids, where all calls of a session have
them, say what its prompts share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from traces.files import parse_json, read_lines
from traces.readers.call import (
    Asked,
    Call,
    Recorded,
    expected,
    in_common,
    json_object,
    nanoseconds,
    text,
    tokens,
    value_of,
)

_FIELDS = ("input_toks", "output_toks", "arrival_time_ns")


def read(path: Path, asked: Asked) -> Iterator[Recorded]:
    """Yield the calls and sessions in file order; raises `TraceError`."""
    for where, line in read_lines(path):
        row = json_object(parse_json(line, where), where, _FIELDS)
        if "sub_requests" in row:
            session_id = text(value_of(row, "session_id", where), "session_id", where)
            calls = _session(row["sub_requests"], where, asked)
            yield Recorded(where, _arrival_ns(row, where, asked), calls, session_id)
        else:
            _ids(row, "input_tok_ids", "input_toks", where)
            yield Recorded(where, _arrival_ns(row, where, asked), (_call(row, where),))


def _arrival_ns(row: Mapping[str, Any], where: str, asked: Asked) -> int:
    if "arrival_time_ns" not in row and "arrival_time" in row:
        return nanoseconds(row["arrival_time"], "s", "arrival_time", where)
    return nanoseconds(value_of(row, "arrival_time_ns", where), asked.time_unit, "arrival_time_ns", where)


def _session(rows: object, where: str, asked: Asked) -> tuple[Call, ...]:
    if type(rows) is not list or not rows:
        expected(where, "sub_requests", "a list of at least one call", rows)
    calls: list[Call] = []
    delay_ns = 0
    before: Sequence[int] = ()
    for index, item in enumerate(rows):
        place = f"{where}: sub_requests[{index}]"
        row = json_object(item, place, ("input_toks", "output_toks", "tool_duration_ns"))
        prompt = _ids(row, "input_tok_ids", "input_toks", place)
        reused = in_common(before, prompt)
        calls.append(_call(row, place, delay_ns, reused if index else 0))
        before = [*prompt, *_ids(row, "output_tok_ids", "output_toks", place)] if prompt else ()
        delay_ns = nanoseconds(row.get("tool_duration_ns", 0), asked.time_unit, "tool_duration_ns", place)
    return tuple(calls)


def _call(row: Mapping[str, Any], where: str, delay_ns: int = 0, reused_tokens: int = 0) -> Call:
    return Call(
        prompt_tokens=tokens(value_of(row, "input_toks", where), "input_toks", where, 1),
        output_tokens=tokens(value_of(row, "output_toks", where), "output_toks", where, 0),
        delay_ns=delay_ns,
        reused_tokens=reused_tokens,
    )


def _ids(row: Mapping[str, Any], name: str, length: str, where: str) -> Sequence[int]:
    ids = row.get(name) or []
    if type(ids) is not list or (ids and len(ids) != row.get(length)):
        expected(
            where, name, f"a list of {length} ({row.get(length)}) token ids", len(ids) if type(ids) is list else ids
        )
    return ids
