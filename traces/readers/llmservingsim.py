"""LLMServingSim's flat workloads: JSON Lines with ``input_toks``, ``output_toks``, ``arrival_time_ns``.

Its recorded benchmark runs (``arrival_time`` in seconds since 1970 instead, and measured times) read as well:
more fields are ignored. Its agentic workloads (several dependent calls a line) are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from traces.files import parse_json, read_lines
from traces.readers.call import Call, expected, field, json_object, tokens
from traces.schema import TraceError

_FIELDS = ("input_toks", "output_toks", "arrival_time_ns")


def read(path: Path) -> Iterator[Call]:
    """Yield the calls in file order; raises `TraceError`."""
    for where, text in read_lines(path):
        row = json_object(parse_json(text, where), where, _FIELDS)
        if "input_toks" not in row and "sub_requests" in row:
            raise TraceError(f"{where}: an agentic workload (sub_requests); only flat ones can be read")
        yield Call(
            arrival_ns=_arrival_ns(row, where),
            prompt_tokens=tokens(field(row, "input_toks", where), "input_toks", where, 1),
            output_tokens=tokens(field(row, "output_toks", where), "output_toks", where, 0),
        )


def _arrival_ns(row: Mapping[str, Any], where: str) -> int:
    in_seconds = "arrival_time_ns" not in row and "arrival_time" in row
    name = "arrival_time" if in_seconds else "arrival_time_ns"
    value: int | float = field(row, name, where)
    limit = 1e11 if in_seconds else 1e20
    if type(value) not in (int, float) or not isfinite(value) or not 0 <= value <= limit:
        expected(where, name, f"{'seconds' if in_seconds else 'nanoseconds'}, at least 0", value)
    if not in_seconds:
        return round(value)
    whole = int(value)
    return whole * 10**9 + round((value - whole) * 1e9)
