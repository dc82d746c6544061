"""Mooncake's traces (FAST'25): JSON Lines of single calls with the hashes of the prompt's 512-token blocks.

Fields: ``timestamp`` (ms since the start), ``input_length``, ``output_length``, ``hash_ids``; others are
ignored. Equal ids mean equal prefixes, and they are kept.
Which calls belong to one conversation is not in the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from pathlib import Path

from traces.files import parse_json, read_lines
from traces.readers.call import Call, expected, field, json_object, tokens

BLOCK_TOKENS = 512
_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def read(path: Path) -> Iterator[Call]:
    """Yield the calls in file order; raises `TraceError`."""
    for where, text in read_lines(path):
        row = json_object(parse_json(text, where), where, _FIELDS)
        timestamp = field(row, "timestamp", where)
        if type(timestamp) not in (int, float) or not isfinite(timestamp) or not 0 <= timestamp <= 1e15:
            expected(where, "timestamp", "milliseconds, at least 0", timestamp)
        prompt_tokens = tokens(field(row, "input_length", where), "input_length", where, 1)
        hash_ids = row.get("hash_ids", [])
        if type(hash_ids) is not list or any(type(i) is not int or not 0 <= i < 2**64 for i in hash_ids):
            expected(where, "hash_ids", "a list of integers from 0 to 2^64 - 1", hash_ids)
        blocks = -(-prompt_tokens // BLOCK_TOKENS)
        if hash_ids and len(hash_ids) != blocks:
            what = f"{blocks} ids (input_length {prompt_tokens} in blocks of {BLOCK_TOKENS})"
            expected(where, "hash_ids", what, len(hash_ids))
        yield Call(
            arrival_ns=round(timestamp * 1_000_000),
            prompt_tokens=prompt_tokens,
            output_tokens=tokens(field(row, "output_length", where), "output_length", where, 0),
            hash_ids=tuple(hash_ids),
            hash_block_tokens=BLOCK_TOKENS,
        )
