"""One call of a public trace, and the checks that all readers share; it knows none of the formats."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from traces.schema import MAX_TOKENS, TraceError, near


@dataclass(frozen=True, slots=True)
class Call:
    """Arrival in integer nanoseconds from any origin (floats since 1970 lose them), lengths in tokens."""

    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    hash_block_tokens: int = 512


def expected(where: str, name: str, what: str, found: object) -> NoReturn:
    """Raise the `TraceError` for one wrong field."""
    shown = repr(found)
    raise TraceError(f"{where}: {name}: expected {what}, found {shown if len(shown) <= 60 else shown[:57] + '...'}")


def field(row: Mapping[str, Any], name: str, where: str) -> Any:
    """The field, or a `TraceError` with the nearest name that is there."""
    if name not in row:
        raise TraceError(f"{where}: field {name!r} is missing{near(name, row)} (found: {', '.join(list(row)[:12])})")
    return row[name]


def tokens(value: object, name: str, where: str, least: int) -> int:
    """A length in tokens from ``least`` to `MAX_TOKENS`."""
    if type(value) is not int or not least <= value <= MAX_TOKENS:
        expected(where, name, "a positive integer" if least else "a non-negative integer", value)
    return value


def json_object(row: object, where: str, known: Collection[str]) -> Mapping[str, Any]:
    """The row if it is a JSON object, else a `TraceError` that names the fields of the format."""
    if type(row) is not dict:
        raise TraceError(f"{where}: expected an object with {', '.join(known)}, found {type(row).__name__}")
    return row
