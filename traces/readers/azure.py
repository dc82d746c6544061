"""Azure's LLM inference traces of 2023 and 2024: CSV with ``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``.

Times are UTC: ``2023-11-16 18:15:46.6805900`` in one, ``2024-05-10 00:00:00.009930+00:00`` in the other, whole
seconds without a fraction. There are no texts, no models and no conversations in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from traces.readers.call import Asked, Call, Recorded, moment_ns, tokens
from traces.readers.table import integer, rows

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(path: Path, asked: Asked) -> Iterator[Recorded]:
    """Yield the calls in file order; raises `TraceError`."""
    for where, row in rows(path, COLUMNS):
        call = Call(
            prompt_tokens=tokens(integer(row["ContextTokens"]), "ContextTokens", where, 1),
            output_tokens=tokens(integer(row["GeneratedTokens"]), "GeneratedTokens", where, 0),
        )
        yield Recorded(where, moment_ns(row["TIMESTAMP"], "TIMESTAMP", where, "2023-11-16 18:15:46.6805900"), (call,))
