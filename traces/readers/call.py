"""What readers of public formats make of a file, and the checks that they share; it knows none of the formats."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NoReturn, TypeVar

from traces.schema import MAX_TOKENS, TraceError, near

T = TypeVar("T")

UNITS_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:\+00:00|Z)?", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user asks for: the unit of the file's times, the size of its blocks, how many workflows (None: all).

    Readers count in ``notes`` what they leave out or guess.
    """

    time_unit: str
    block_tokens: int = 512
    limit: int | None = None
    notes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a workflow: lengths in tokens, waits in integer nanoseconds.

    ``after`` are the calls it waits for, by their place in the workflow (None: the one before). Where there are
    ``hash_ids``, they tell what it shares; else ``reused_tokens`` does. ``model`` answered when it was recorded.
    """

    prompt_tokens: int
    output_tokens: int
    name: str = "call"
    after: tuple[int, ...] | None = None
    delay_ns: int = 0
    reused_tokens: int = 0
    hash_ids: tuple[int, ...] = ()
    hash_block_tokens: int = 512
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """One workflow, its calls parents first; ``where`` it begins. Without an id it gets a number.

    The arrival is in integer nanoseconds from any origin (floats since 1970 lose them).
    """

    where: str
    arrival_ns: int
    calls: tuple[Call, ...]
    workflow_id: str | None = None


def expected(where: str, name: str, what: str, found: object) -> NoReturn:
    """Raise the `TraceError` for one wrong field."""
    shown = repr(found)
    raise TraceError(f"{where}: {name}: expected {what}, found {shown if len(shown) <= 60 else shown[:57] + '...'}")


def value_of(row: Mapping[str, Any], name: str, where: str, *aliases: str) -> Any:
    """The field, by its name or another of it, or a `TraceError` with the nearest name that is there."""
    for known in (name, *aliases):
        if known in row:
            return row[known]
    raise TraceError(f"{where}: field {name!r} is missing{near(name, row)} (found: {', '.join(list(row)[:12])})")


def tokens(value: object, name: str, where: str, least: int) -> int:
    """A length in tokens from ``least`` to `MAX_TOKENS`."""
    if type(value) is not int or not least <= value <= MAX_TOKENS:
        expected(where, name, "a positive integer" if least else "a non-negative integer", value)
    return value


def text(value: object, name: str, where: str) -> str:
    """A name or an id: text that is not empty."""
    if type(value) is not str or not value.strip():
        expected(where, name, "text", value)
    return value


def nanoseconds(value: Any, unit: str, name: str, where: str) -> int:
    """A time, at least 0, in integer nanoseconds."""
    if type(value) not in (int, float) or not 0 <= value <= 1e20 / UNITS_NS[unit]:
        expected(where, name, f"a number of {unit}, at least 0", value)
    whole: int = int(value)
    rest: int = round((value - whole) * UNITS_NS[unit])
    return whole * UNITS_NS[unit] + rest


def moment_ns(value: object, name: str, where: str, example: str) -> int:
    """A time written out, in UTC, in integer nanoseconds since 1970."""
    match = _TIME.fullmatch(value) if isinstance(value, str) else None
    try:
        moment = datetime.fromisoformat(match[1]).replace(tzinfo=UTC) if match else None
    except ValueError:
        moment = None
    if match is None or moment is None:
        expected(where, name, f"a time like {example}", value)
    since = moment - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + int((match[2] or "0").ljust(9, "0"))


def hash_ids(row: Mapping[str, Any], prompt_tokens: int, block_tokens: int, where: str) -> tuple[int, ...]:
    """The row's ``hash_ids``, one a block of the prompt, or none."""
    ids = row.get("hash_ids") or []
    if type(ids) is not list or any(type(i) is not int or not 0 <= i < 2**64 for i in ids):
        expected(where, "hash_ids", "a list of integers from 0 to 2^64 - 1", ids)
    blocks = -(-prompt_tokens // block_tokens)
    if ids and len(ids) != blocks:
        what = (
            f"{blocks} ids (input_length {prompt_tokens} in blocks of {block_tokens}; --block-tokens sets their size)"
        )
        expected(where, "hash_ids", what, len(ids))
    return tuple(ids)


def json_object(row: object, where: str, known: Collection[str]) -> Mapping[str, Any]:
    """The row if it is a JSON object, else a `TraceError` that names the fields of the format."""
    if type(row) is not dict:
        raise TraceError(f"{where}: expected an object with {', '.join(known)}, found {type(row).__name__}")
    return row


def grouped(rows: Iterable[tuple[Hashable, T]], limit: int | None) -> Iterator[list[T]]:
    """Rows with the same key (None: of its own) together, in order of their first; of the first ``limit`` groups."""
    groups: dict[Hashable, list[T]] = {}
    for number, (key, row) in enumerate(rows):
        mine = ("alone", number) if key is None else ("key", key)
        if mine in groups or limit is None or len(groups) < limit:
            groups.setdefault(mine, []).append(row)
    yield from groups.values()


def parents_first(ids: Sequence[str], waits_for: Mapping[str, Sequence[str]], places: Mapping[str, str]) -> list[str]:
    """The ids so that all stand after those they wait for, else in their order; a circle is a `TraceError`."""
    done: dict[str, None] = {}
    for first in ids:
        path = [first]
        while path:
            open_parent = next((parent for parent in waits_for[path[-1]] if parent not in done), None)
            if open_parent is None:
                done[path.pop()] = None
            elif open_parent in path:
                circle = [*path[path.index(open_parent) :], open_parent]
                links = " waits for ".join(repr(name) for name in circle)
                raise TraceError(f"{places[open_parent]}: expected calls that wait for earlier ones, found {links}")
            else:
                path.append(open_parent)
    return list(done)


def in_common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
