"""Traces in Parquet: one row a workflow, the same fields as a JSON line, ``meta`` alone as JSON text.

``runs`` and ``confidence`` have a column a model, so that two models are read without the others: the models are part
of a file's schema. Files of other tools may have JSON text there instead (as ours had once).

What `write_workflows` writes has been checked; `seal` says so, behind the data and before Parquet's own footer, where
readers of Parquet do not look: a checksum of all other bytes, and the trace's digest. A file that is still what it was
needs no check and no digest and stays columns (`sealed_columns`); any other is read row by row (`read_rows`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from traces.schema import Stage, TraceError, Workflow
from traces.sealed import SealedColumns

SEAL_VERSION = 1
"""Counts up when `traces.schema` refuses more than before, or the columns or the digest change their meaning."""
ROW_GROUP = 10_000
"""Workflows that are held at once when a file is written."""

_INDEX = "__index_level_"
"""pandas writes its index under such names when it is asked for a part of a table; it says nothing of workflows."""
_AS_JSON = ("runs", "confidence", "meta")
_SEAL = re.compile(rb"\nchimsim trace checked ([0-9]{4}) digest ([0-9a-f]{64}) checksum ([0-9a-f]{64})\n")
_SEAL_BYTES = len(f"\nchimsim trace checked 0000 digest {'0' * 64} checksum {'0' * 64}\n")
_STAGE = pa.struct(
    [
        ("name", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("reused_tokens", pa.int32()),
        ("delay_s", pa.float64()),
        ("system_tokens", pa.int32()),
        ("user_tokens", pa.int32()),
        ("shared_prefix", pa.struct([("id", pa.string()), ("tokens", pa.int32())])),
        ("hash_ids", pa.list_(pa.uint64())),
        ("hash_block_tokens", pa.int32()),
        ("prompt", pa.string()),
        ("output", pa.string()),
        ("after", pa.list_(pa.int32())),
    ]
)
_RUN = pa.struct([("solved", pa.bool_()), ("stages", pa.list_(_STAGE))])


def read_rows(path: Path, decode: Callable[[str, str], Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("my.parquet:17", row) for each row, nulls left out; ``decode(text, where)`` parses JSON."""
    number = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for batch in file.iter_batches(batch_size=1000):
                for row in batch.to_pylist():
                    number += 1
                    for name in [name for name in row if name.startswith(_INDEX)]:
                        del row[name]
                    where = f"{path}:{number}"
                    for name in _AS_JSON:
                        if type(row.get(name)) is str:
                            row[name] = decode(row[name], f"{where}: {name}")
                        elif name != "meta":
                            row[name] = _without_nulls(row.get(name))
                    yield where, {key: value for key, value in row.items() if value is not None}
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None


def write_workflows(workflows: Iterable[Workflow], models: Iterable[str], path: Path) -> None:
    """Write workflows, which have runs of these models only, some at a time."""
    names = sorted(models)
    schema = pa.schema(
        [
            ("workflow_id", pa.string()),
            ("workload", pa.string()),
            ("arrival_s", pa.float64()),
            ("prompt", pa.string()),
            ("runs", pa.struct([(name, _RUN) for name in names])),
            ("confidence", pa.struct([(name, pa.float64()) for name in names])),
            ("meta", pa.string()),
        ]
    )
    remaining = iter(workflows)
    with pq.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True) as writer:
        while batch := list(islice(remaining, ROW_GROUP)):
            writer.write_table(pa.Table.from_pylist([_row(workflow) for workflow in batch], schema=schema))


def seal(path: Path, digest: str) -> None:
    """Say in the file that its content has been checked and has this digest."""
    with path.open("r+b") as file:
        end = _footer_at(file)
        head = _seal_head(digest)
        checksum = _checksum(file, head, end, end)
        file.seek(end)
        footer = file.read()
        file.seek(end)
        file.write(head + checksum + b"\n" + footer)


def sealed_columns(path: Path) -> tuple[SealedColumns, str] | None:
    """The columns and the digest of a file that is what was checked and written; None for any other."""
    try:
        with path.open("rb") as file:
            footer_at = _footer_at(file)
            end = footer_at - _SEAL_BYTES
            file.seek(max(end, 0))
            found = _SEAL.fullmatch(file.read(_SEAL_BYTES))
            if found is None or int(found[1]) != SEAL_VERSION:
                return None
            digest = found[2].decode()
            if _checksum(file, _seal_head(digest), end, footer_at) != found[3]:
                return None
            return SealedColumns(_SealedFile(path, os.fstat(file.fileno()))), digest
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


class _SealedFile:
    """A file whose columns are decoded when they are asked for. ``status`` is of the file that the seal fitted."""

    def __init__(self, path: Path, status: os.stat_result) -> None:
        self._path = path
        self._was = _identity(status)
        self._file = pq.ParquetFile(pa.memory_map(str(path)))
        self.schema: pa.Schema = self._file.schema_arrow
        if _identity(path.stat()) != self._was:
            raise self._changed()

    def read(self, *paths: str) -> pa.Table:
        """As `traces.sealed.Source.read`."""
        with suppress(OSError):
            # Where another file has taken its place, this one is still there for us; one that was written to is not.
            now = _identity(self._path.stat())
            if now[:2] == self._was[:2] and now != self._was:
                raise self._changed()
        try:
            # Nested columns of more than 2 GB of text cannot be read at once.
            groups = range(self._file.num_row_groups)
            return pa.concat_tables([self._file.read_row_group(group, list(paths) or None) for group in groups])
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(self._path, error) from None

    def _changed(self) -> TraceError:
        return TraceError(f"{self._path}: the file was changed while it was in use; start again")


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _footer_at(file: BinaryIO) -> int:
    """Where Parquet's footer begins: its length stands before the last four bytes."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 8, 0))
    return size - 8 - int.from_bytes(file.read(4), "little")


def _seal_head(digest: str) -> bytes:
    return f"\nchimsim trace checked {SEAL_VERSION:04d} digest {digest} checksum ".encode()


def _checksum(file: BinaryIO, head: bytes, end: int, footer_at: int) -> bytes:
    """Of the seal's own words, the file up to ``end``, and its footer."""
    total = blake2b(head, digest_size=32)
    file.seek(0)
    while end and (data := file.read(min(end, 2**20))):
        total.update(data)
        end -= len(data)
    file.seek(footer_at)
    while data := file.read(2**20):
        total.update(data)
    return total.hexdigest().encode()


def _row(workflow: Workflow) -> dict[str, Any]:
    runs = {
        model: {"solved": run.solved, "stages": [_stage(stage) for stage in run.stages]}
        for model, run in workflow.runs.items()
    }
    return {
        "workflow_id": workflow.workflow_id,
        "workload": workflow.workload,
        "arrival_s": workflow.arrival_s,
        "prompt": workflow.prompt,
        "runs": runs,
        "confidence": workflow.confidence,
        "meta": json.dumps(workflow.meta, ensure_ascii=False) if workflow.meta else None,
    }


def _stage(stage: Stage) -> dict[str, Any]:
    prefix = stage.shared_prefix
    return {
        "name": stage.name,
        "prompt_tokens": stage.prompt_tokens,
        "output_tokens": stage.output_tokens,
        "reused_tokens": stage.reused_tokens,
        "delay_s": stage.delay_s,
        "system_tokens": stage.system_tokens,
        "user_tokens": stage.user_tokens,
        "shared_prefix": None if prefix is None else {"id": prefix.id, "tokens": prefix.tokens},
        "hash_ids": stage.hash_ids or None,
        "hash_block_tokens": stage.hash_block_tokens,
        "prompt": stage.prompt,
        "output": stage.output,
        "after": stage.after,
    }


def _without_nulls(value: Any) -> Any:
    """A nested value as JSON has it: what is null in a struct is not there."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _unreadable(path: Path, error: Exception) -> TraceError:
    text = str(error).splitlines()
    return TraceError(f"{path}: not a readable Parquet file ({text[0] if text else 'no details'})")
