"""Files that are wrong: arbitrary bytes, damaged files and documents that are nearly right, all drawn by chance.

It knows of JSON, TOML and bytes, not of what a file is for. The same `random.Random` state makes the same file.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from datetime import date
from math import inf, isinf, isnan, nan
from random import Random
from typing import Any

Dump = Callable[[Random, Any], bytes]

DEEP = 300
"""Levels of a nest that a document may be put into; `damaged` goes deeper than any parser follows."""
_SCALARS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 2**64, 10**30, 10**400, 0.5, -0.5, -0.0, 1e-320, 1e12, 1e308, nan,
    inf, -inf, "", " ", "x", "0", "-1", "1e9", "1e999", "nan", "true", "a,b", "a=1", "\0", "\ud800", "\u202e\u0301",
    "\ufeff", "\n", "\x1b[2J", "../x", "/", "/dev/null/x", "%s{0}{x}", "x" * 300, "y" * 70_000, date(2026, 1, 31),
)  # fmt: skip


def junk(draw: Random) -> Any:
    """A value that is seldom asked for."""
    kind = draw.randrange(8)
    if kind == 0:
        return draw.choice(([], {}, [[]], [None], {"": 0}, {"x": {"y": []}}, [0, "0"], [{}, 1]))
    if kind == 1:
        value: Any = draw.choice(_SCALARS)
        listed = draw.random() < 0.5
        for _ in range(draw.choice((1, 2, 20, DEEP))):
            value = [value] if listed else {"x": value}
        return value
    return draw.choice(_SCALARS)


def mutated(draw: Random, tree: Any) -> Any:
    """The document with one to five of its values deleted, doubled, renamed, moved or replaced."""
    root = [copy.deepcopy(tree)]
    for _ in range(draw.choice((1, 1, 1, 2, 3, 5))):
        places = _places(root)
        container, key = draw.choice(places)
        _edit(draw, container, key, places)
    return root[0]


def _places(container: Any) -> list[tuple[Any, Any]]:
    """Every value of the tree as (container, key), parents first; only the top of very deep ones."""
    found: list[tuple[Any, Any]] = []
    layer = [container]
    for _ in range(30):
        here = [(c, key) for c in layer for key in (list(c) if isinstance(c, dict) else range(len(c)))]
        found += here
        layer = [c[key] for c, key in here if isinstance(c[key], dict | list)]
    return found


def _edit(draw: Random, container: Any, key: Any, places: Sequence[tuple[Any, Any]]) -> None:
    value = container[key]
    kind = draw.randrange(10)
    if kind == 0 and (container, key) != places[0]:
        del container[key]
    elif kind == 1 and isinstance(container, dict):
        container[_misspelt(draw, str(key))] = container.pop(key) if draw.random() < 0.5 else copy.deepcopy(value)
    elif kind == 1:
        container.insert(key, copy.deepcopy(value))
    elif kind == 2:
        container[key] = draw.choice(([value], {"x": value}, [value, value], {str(key): value}))
    elif kind == 3:
        other, place = draw.choice(places)
        if isinstance(other, dict) or place < len(other):
            container[key] = copy.deepcopy(other.get(place) if isinstance(other, dict) else other[place])
    elif kind in (4, 5) and isinstance(value, int | float):
        container[key] = _near(draw, value)
    elif kind in (4, 5) and isinstance(value, str):
        container[key] = draw.choice((_misspelt(draw, value), value * 2, value.upper(), value + "\0", f" {value} "))
    else:
        container[key] = junk(draw)


def _near(draw: Random, value: float) -> Any:
    value = max(min(value, 10**300), -(10**300))
    other = draw.choice((-value, value + 1, value - 1, value // 3, str(value), bool(value), [value]))
    return draw.choice((other, value * draw.choice((1000, 10**9, 10**18)), value * 0.999))


def _misspelt(draw: Random, text: str) -> str:
    at = draw.randrange(len(text) + 1)
    return text[:at] + draw.choice(("", "x", "_", " ", "é", "\0")) + text[at + draw.randrange(2) :]


def json_bytes(draw: Random, tree: Any) -> bytes:
    """As JSON, with the NaN that Python's parser takes and text as it may come."""
    plain = draw.random() < 0.5
    return json.dumps(tree, ensure_ascii=plain, default=str).encode(errors="surrogatepass")


def json_lines(draw: Random, rows: Any) -> bytes:
    """A list as JSON Lines; what is no list any more as one line."""
    return b"".join(json_bytes(draw, row) + b"\n" for row in (rows if isinstance(rows, list) else [rows]))


def toml_bytes(draw: Random, tree: Any) -> bytes:
    """As TOML, tables inline; what TOML has no word for is not valid TOML."""
    rows = tree.items() if isinstance(tree, dict) else [("x", tree)]
    return "".join(f"{_word(key)} = {_toml(value)}\n" for key, value in rows).encode(errors="surrogatepass")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_word(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float) and (isnan(value) or isinf(value)):
        return str(value)
    if isinstance(value, date):
        return value.isoformat()
    return _word(value) if isinstance(value, str) else json.dumps(value)


def _word(text: object) -> str:
    return json.dumps(str(text), ensure_ascii=False).replace("\x7f", "")


def csv_bytes(draw: Random, rows: Any) -> bytes:
    """Rows of cells as CSV, unquoted: a comma in a cell makes two of it."""
    rows = rows if isinstance(rows, list) else [rows]
    lines = [",".join(map(str, row)) if isinstance(row, list) else str(row) for row in rows]
    return ("\n".join(lines) + "\n").encode(errors="surrogatepass")


def damaged(draw: Random, data: bytes) -> bytes:
    """The bytes after one to three accidents of storage, transfer or editing."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        data = _accident(draw, data)
    return data


def _accident(draw: Random, data: bytes) -> bytes:
    at, end = sorted((draw.randrange(len(data) + 1), draw.randrange(len(data) + 1)))
    kind = draw.randrange(14)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
    if kind == 2:
        return data[:at] + draw.randbytes(draw.choice((1, 4, 50))) + data[at:]
    if kind == 3:
        return data[:at] + data[at + draw.choice((1, 2, 30)) :]
    if kind == 4:
        return data[:end] + data[at:end] + data[end:]
    if kind == 5:
        return data[:at] + draw.choice((b"\0", b"\xff", b"\xed\xa0\x80", b"\r", b"\x1a", b"\xc2\x85")) + data[at:]
    if kind == 6:
        return b"\xef\xbb\xbf" + data
    if kind == 7:
        return data.replace(b"\n", b"\r\n")
    if kind == 8:
        numbers = list(re.finditer(rb"\d+(\.\d+)?", data))
        if not numbers:
            return data + b"9" * 5000
        found = draw.choice(numbers)
        huge = (b"9" * 25, b"9" * 5000, b"0x" + b"f" * 5000, b"1e999")
        big = draw.choice((*huge, b"-1", b"0", b"NaN", b"0x10", b"1_0", b"null"))
        return data[: found.start()] + big + data[found.end() :]
    if kind == 9:
        return data[:at] + draw.choice((b"[", b'{"x":', b"((", b"[[x]]\n")) * draw.choice((3, 200, 100_000)) + data[at:]
    if kind == 10:
        lines = data.splitlines(keepends=True)
        draw.shuffle(lines)
        return b"".join(lines)
    if kind == 11:
        return data.decode(errors="replace").encode(draw.choice(("utf-16", "latin-1", "utf-32")), errors="replace")
    if kind == 12:
        return draw.choice((b"", b"\n", b"\0" * 1000, b" " * 1000))
    return data.replace(draw.choice((b'"', b",", b"=", b"}", b"]", b":", b"\n")), b"", draw.choice((1, -1)))


def wrong_file(draw: Random, valid: Sequence[Any], dump: Dump) -> bytes:
    """One file: seldom arbitrary bytes or a valid document, else one that is damaged or nearly right."""
    document = draw.choice(valid)
    kind = draw.randrange(20)
    if kind == 0:
        return draw.randbytes(draw.choice((1, 10, 300)))
    if kind == 1:
        return dump(draw, document)
    if kind < 6 or isinstance(document, bytes):
        return damaged(draw, dump(draw, document))
    data = dump(draw, mutated(draw, document))
    return damaged(draw, data) if kind == 6 else data
