"""Tables in CSV, for the readers of formats that are; it knows none of them."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from traces.files import read_lines
from traces.readers.call import expected
from traces.schema import TraceError


def rows(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield ("calls.csv:17", cells by column); the header has all ``columns``, in any order, and no unknown ones."""
    lines = read_lines(path)
    where, header_text = next(lines, (f"{path}:1", ""))
    header = cells(header_text, where)
    unlike = set(columns) - set(header) or set(header) - {*columns, *optional}
    if unlike or len(set(header)) < len(header):
        expected(where, "header", f"the columns {','.join(columns)}", header_text.strip())
    for where, line in lines:
        found = cells(line, where)
        if len(found) != len(header):
            expected(where, "row", f"{len(header)} columns", line.strip())
        yield where, dict(zip(header, found, strict=True))


def cells(line: str, where: str) -> list[str]:
    """One line of CSV, without blanks around its cells."""
    try:
        return [cell.strip() for cell in next(csv.reader([line], strict=True), [])]
    except csv.Error as error:
        raise TraceError(f"{where}: not a line of CSV ({error})") from None


def integer(cell: str) -> object:
    """The number in a cell, or the cell, for an error to show."""
    return int(cell) if re.fullmatch(r"-?\d{1,12}", cell, re.ASCII) else cell


def number(cell: str) -> object:
    """The number in a cell, or the cell, for an error to show."""
    return float(cell) if re.fullmatch(r"-?\d{1,15}(\.\d{1,12})?(e[+-]?\d{1,3})?", cell, re.ASCII | re.I) else cell
