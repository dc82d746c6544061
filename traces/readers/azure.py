"""Azure's LLM inference traces of 2023: CSV with ``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``.

Time stamps have seven fractional digits (UTC). There are no texts, no models and no conversations in it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from traces.files import read_lines
from traces.readers.call import Call, expected, tokens
from traces.schema import TraceError

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:\+00:00|Z)?", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def read(path: Path) -> Iterator[Call]:
    """Yield the calls in file order; raises `TraceError`."""
    lines = read_lines(path)
    where, header_text = next(lines, (f"{path}:1", ""))
    header = _cells(header_text, where)
    if sorted(header) != sorted(COLUMNS):
        expected(where, "header", f"the columns {','.join(COLUMNS)}", header_text.strip())
    time_at, prompt_at, output_at = (header.index(name) for name in COLUMNS)
    for where, text in lines:
        cells = _cells(text, where)
        if len(cells) != len(COLUMNS):
            expected(where, "row", f"{len(COLUMNS)} columns", text.strip())
        yield Call(
            arrival_ns=_nanoseconds(cells[time_at], where),
            prompt_tokens=tokens(_integer(cells[prompt_at]), COLUMNS[1], where, 1),
            output_tokens=tokens(_integer(cells[output_at]), COLUMNS[2], where, 0),
        )


def _cells(text: str, where: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([text], strict=True), [])]
    except csv.Error as error:
        raise TraceError(f"{where}: not a line of CSV ({error})") from None


def _integer(text: str) -> object:
    return int(text) if re.fullmatch(r"-?\d{1,12}", text, re.ASCII) else text


def _nanoseconds(text: str, where: str) -> int:
    match = _TIME.fullmatch(text)
    if match is None:
        expected(where, COLUMNS[0], "a time like 2023-11-16 18:15:46.6805900", text)
    try:
        moment = datetime.fromisoformat(match[1]).replace(tzinfo=UTC)
    except ValueError:
        expected(where, COLUMNS[0], "a time like 2023-11-16 18:15:46.6805900", text)
    since = moment - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + int((match[2] or "0").ljust(9, "0"))
