"""Trace files: JSON Lines, gzip or Parquet, by the name's ending; and the traces that ship with the package.

Every line is checked as it is read, but for Parquet files that are still what `write_trace` checked and wrote; whatever
is wrong is one `TraceError`. Files are written to a temporary name and renamed, so a reader never sees half of one.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tomllib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.resources import as_file, files
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from traces.parquet import read_rows, seal, sealed_columns, write_workflows
from traces.schema import Trace, TraceError, Workflow, check_together, near, to_dict, workflow_from_dict
from traces.sealed import SealedWorkflows

SHIPPED = ("apps", "maths")
MAX_LINE_BYTES = 2**30
"""A small gzip file can hold a line that fills all memory."""
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


def load_trace(name_or_path: str | Path, limit: int | None = None) -> Trace:
    """A shipped trace by its name (``"apps"``, ``"maths"``) or a trace file by its path.

    ``limit`` reads only so many workflows from the front. Raises `TraceError`.
    """
    name = str(name_or_path)
    if name in SHIPPED:
        with as_file(files("traces") / "data" / f"{name}.jsonl.gz") as path:
            return read_trace(path, limit)
    if os.sep not in name and not Path(name).suffix and not Path(name).exists():
        raise TraceError(
            f"trace {name!r} is unknown{near(name, SHIPPED)} "
            f"(shipped: {', '.join(SHIPPED)}; or the path of a {_or(SUFFIXES)} file)"
        )
    return read_trace(name_or_path, limit)


def read_trace(path: str | Path, limit: int | None = None) -> Trace:
    """Read and check a trace file; its name without the suffix becomes the trace's.

    ``limit`` reads only so many workflows from the front (and the digest is then of those).
    Raises `TraceError` naming file, line and field.
    """
    path = Path(path)
    if limit is not None and limit < 1:
        raise TraceError(f"limit: expected a positive integer, found {limit}")
    suffix = trace_suffix(path)
    check_file(path)
    name = path.name[: -len(suffix)]
    if suffix == ".parquet" and (sealed := sealed_columns(path)) is not None:
        columns, digest = sealed
        whole = SealedWorkflows(columns)
        if limit is None or limit >= len(whole):
            return Trace(name, whole, digest)
        front = whole[:limit]
        return Trace(name, front, digest_of(front))
    rows = read_rows(path, parse_json) if suffix == ".parquet" else _json_rows(path)
    workflows: list[Workflow] = []
    places: list[str] = []
    for where, row in islice(rows, limit):
        workflows.append(workflow_from_dict(row, where))
        places.append(where)
    if not workflows:
        raise TraceError(f"{path}: the file has no workflows")
    check_together(workflows, places)
    return Trace(name, tuple(workflows), digest_of(workflows))


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write the trace in the format of the path's suffix, whole or not at all.

    Gzip carries no time stamp: the same trace gives the same bytes. Raises `TraceError` if the trace would
    not read back or the file cannot be written.
    """
    path = Path(path)
    suffix = trace_suffix(path)
    if not trace.workflows:
        raise TraceError(f"{path}: a trace without workflows is not written")
    if suffix == ".parquet":
        replace_file(path, lambda temporary: _write_parquet(trace, temporary))
        return
    rows = [to_dict(workflow) for workflow in trace.workflows]
    places = _places(trace)
    check_together([workflow_from_dict(row, where) for row, where in zip(rows, places, strict=True)], places)
    replace_file(path, lambda temporary: write_lines(rows, temporary, compress=suffix == ".jsonl.gz"))


def _write_parquet(trace: Trace, path: Path) -> None:
    """Check and write some workflows at a time, so that a trace need not be in memory."""
    digest = hashlib.sha256()
    places = _places(trace)

    def checked() -> Iterator[Workflow]:
        for workflow, where in zip(trace.workflows, places, strict=True):
            # What is read back, which may be put differently.
            found = workflow_from_dict(to_dict(workflow), where)
            digest.update(_canonical(found))
            yield found

    write_workflows(checked(), {model for workflow in trace.workflows for model in workflow.runs}, path)
    check_together(trace.workflows, places)
    seal(path, digest.hexdigest())


def _places(trace: Trace) -> list[str]:
    return [f"workflow {number} of trace {trace.name!r}" for number in range(1, len(trace.workflows) + 1)]


def digest_of(workflows: Iterable[Workflow]) -> str:
    """SHA-256 (hex) over the workflows as canonical JSON lines: the same in every file format."""
    digest = hashlib.sha256()
    for workflow in workflows:
        digest.update(_canonical(workflow))
    return digest.hexdigest()


def trace_suffix(path: Path) -> str:
    """The one of `SUFFIXES` that the path ends in; a `TraceError` otherwise."""
    for suffix in SUFFIXES:
        if path.name.lower().endswith(suffix) and len(path.name) > len(suffix):
            return suffix
    raise TraceError(
        f"{path}: expected a trace file ending in {_or(SUFFIXES)}, found {path.name!r}; "
        "a format of other tools (mooncake, otel, azure, ...) becomes one with `chimsim trace import`"
    )


def check_file(path: Path) -> None:
    """Raise a `TraceError` unless the path is a file."""
    if path.is_dir():
        raise TraceError(f"{path}: expected a file, found a directory")
    if not path.exists():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise TraceError(f"{path}: there is no such file{near(path.name, siblings)}")


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield ("my.jsonl:17", text) for every line that is not blank, of a plain or gzip file in UTF-8."""
    number = 0
    try:
        with path.open("rb") as raw:
            compressed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            lines = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if compressed else raw
            while line := lines.readline(MAX_LINE_BYTES):
                number += 1
                where = f"{path}:{number}"
                if len(line) == MAX_LINE_BYTES:
                    raise TraceError(f"{where}: a line of more than {MAX_LINE_BYTES:,} bytes")
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    byte = f"0x{line[error.start]:02x} at position {error.start + 1}"
                    raise TraceError(f"{where}: expected UTF-8 text, found the byte {byte}") from None
                if text.strip():
                    yield where, text
    except EOFError:
        raise TraceError(f"{path}:{number + 1}: the gzip data ends too early; the file is truncated") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}:{number + 1}: the gzip data is damaged ({error})") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from None


def parse_json(text: str, where: str) -> Any:
    """`json.loads` that refuses a key given twice and raises `TraceError` at ``where``."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        ends = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
        cure = "; the line ends too early (a truncated file?)" if ends else ""
        raise TraceError(f"{where}: not valid JSON, {error.msg} at column {error.pos + 1}{cure}") from None
    except RecursionError:
        raise TraceError(f"{where}: not valid JSON for a trace, nested too deeply") from None
    except ValueError as error:
        raise TraceError(f"{where}: not valid JSON for a trace, {error}") from None


def parse_toml(text: str) -> dict[str, Any]:
    """`tomllib.loads` that passes over a byte order mark and raises nothing but a `ValueError`.

    Numbers beyond 64 bits, which TOML does not have, are refused: Python would not even print the longest.
    """
    try:
        tree = tomllib.loads(text.removeprefix("\ufeff"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    values: list[Any] = [tree]
    while values:
        value = values.pop()
        if isinstance(value, dict | list):
            values.extend(value.values() if isinstance(value, dict) else value)
        elif type(value) is int and not -(2**63) <= value < 2**63:
            raise ValueError("an integer of more than 64 bits")
    return tree


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    for where, text in read_lines(path):
        yield where, parse_json(text, where)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return row


def write_lines(rows: Sequence[dict[str, Any]], path: Path, *, compress: bool) -> None:
    lines = (json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n" for row in rows)
    # A GzipFile that outlives a failed write (a full disk) complains when collected: compress in memory.
    data = b"".join(lines)
    path.write_bytes(gzip.compress(data, compresslevel=9, mtime=0) if compress else data)


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            write(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written ({error.strerror or error})") from None


_ENCODER = json.JSONEncoder(separators=(",", ":"), sort_keys=True)


def _canonical(workflow: Workflow) -> bytes:
    return _ENCODER.encode(to_dict(workflow)).encode() + b"\n"


def _or(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
