"""Traces in Parquet: one row a workflow, the same columns as the fields of a JSON line.

``runs``, ``confidence`` and ``meta`` are columns of JSON text (their keys are model names, which would give
every file a schema of its own). It checks the container, not the workflows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from traces.schema import TraceError

_AS_JSON = ("runs", "confidence", "meta")
_SCHEMA = pa.schema(
    [
        ("workflow_id", pa.string()),
        ("workload", pa.string()),
        ("arrival_s", pa.float64()),
        ("prompt", pa.string()),
        *((name, pa.string()) for name in _AS_JSON),
    ]
)


def read_rows(path: Path, decode: Callable[[str, str], Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("my.parquet:17", row) for each row, nulls left out; ``decode(text, where)`` parses JSON."""
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1000):
                for row in batch.to_pylist():
                    number += 1
                    where = f"{path}:{number}"
                    for name in _AS_JSON:
                        if type(row.get(name)) is str:
                            row[name] = decode(row[name], f"{where}: {name}")
                    yield where, {key: value for key, value in row.items() if value is not None}
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        text = str(error).splitlines()
        raise TraceError(f"{path}: not a readable Parquet file ({text[0] if text else 'no details'})") from None


def write_rows(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the rows (fields of `traces.schema.to_dict`) as one Parquet file."""
    columns = {
        name: [
            json.dumps(row[name], ensure_ascii=False) if name in _AS_JSON and name in row else row.get(name)
            for row in rows
        ]
        for name in _SCHEMA.names
    }
    pq.write_table(pa.table(columns, schema=_SCHEMA), path, compression="zstd")
