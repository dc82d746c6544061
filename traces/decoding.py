"""A model's runs out of Arrow arrays: as arrays of numbers, and as what makes stages of them one run at a time.

It decodes what `traces.parquet` wrote and checks nothing. Plain integers out of memory views are several times faster
to get than NumPy's scalars, and a column that has one value is no column at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traces.columns import Floats, RunColumns, shapes_of
from traces.schema import Run, SharedPrefix, Stage

_SOLVED = (False, True, None)
"""By the label's code, -1: None."""

_Column = Callable[[int, int], Iterable[Any]]
"""A field's values of the stages from one number to before another; may go on for ever."""


class DecodedRuns(NamedTuple):
    """A model's runs, as arrays and as what makes objects of them."""

    arrays: RunColumns
    starts: memoryview
    solved: memoryview
    stages: tuple[_Column, ...]
    """by the fields of `Stage`; the first one ends"""

    def run(self, row: int) -> Run | None:
        """The run of a workflow, or None."""
        first, end = self.starts[row], self.starts[row + 1]
        if first == end:
            return None
        return Run(tuple(map(Stage, *[column(first, end) for column in self.stages])), _SOLVED[self.solved[row]])


def decoded(chunks: Sequence[pa.StructArray], confidence: Floats) -> DecodedRuns:
    """The runs on one model, from a file's structs of ``solved`` and ``stages``."""
    lists = [chunk.field("stages") for chunk in chunks]
    lengths = numbers(pa.chunked_array([each.value_lengths() for each in lists]), 0)
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    rows = [each.flatten() for each in lists]
    fields = {name: pa.chunked_array([part.field(name) for part in rows]) for name in Stage.__dataclass_fields__}
    labels = pa.chunked_array([chunk.field("solved").cast(pa.int8()) for chunk in chunks])
    solved = numbers(labels, -1)
    counts = {name: numbers(fields[name], 0) for name in ("prompt_tokens", "output_tokens", "hash_block_tokens")}
    hashed = numbers(pa.chunked_array([part.value_lengths() for part in fields["hash_ids"].chunks]), 0) > 0
    branching = np.flatnonzero(np.asarray(fields["after"].is_valid()))
    graphs = np.unique(np.searchsorted(starts, branching, "right") - 1)
    after, bounds = _lists(fields["after"], None), starts.data
    shapes, afters = shapes_of(tuple(after(bounds[row], bounds[row + 1])) for row in graphs.tolist())
    arrays = RunColumns(
        starts=starts,
        solved=np.where(solved < 0, np.nan, solved).astype(np.float64),
        confidence=confidence,
        graphs=graphs,
        shapes=shapes,
        afters=afters,
        prompt_tokens=counts["prompt_tokens"],
        output_tokens=counts["output_tokens"],
        hash_block_tokens=np.where(hashed, counts["hash_block_tokens"], 0),
    )
    codes, names = coded(fields["name"])
    stages = {name: _plain(values) for name, values in counts.items()} | {
        "name": _looked_up(codes, names),
        "reused_tokens": _plain(numbers(fields["reused_tokens"], 0)),
        "delay_s": _plain(numbers(fields["delay_s"], 0.0)),
        "system_tokens": _optional(fields["system_tokens"]),
        "user_tokens": _optional(fields["user_tokens"]),
        "shared_prefix": _prefixes(fields["shared_prefix"]),
        "hash_ids": _lists(fields["hash_ids"], ()),
        "prompt": _text(fields["prompt"]),
        "output": _text(fields["output"]),
        "after": after,
    }
    made = tuple(stages[name] for name in Stage.__dataclass_fields__)
    return DecodedRuns(arrays, bounds, solved.data, made)


def without_runs(count: int) -> DecodedRuns:
    """Of a model that none of ``count`` workflows has a run of."""
    starts, none = np.zeros(count + 1, np.int64), np.zeros(0, np.int64)
    unknown = np.full(count, np.nan)
    arrays = RunColumns(starts, unknown, unknown, none, none, (), none, none, none)
    return DecodedRuns(arrays, starts.data, memoryview(b""), ())


def numbers(column: pa.ChunkedArray, missing: float) -> npt.NDArray[Any]:
    """One array, with what is missing as the given number."""
    made: npt.NDArray[Any] = (column.fill_null(missing) if column.null_count else column).to_numpy()
    return made


def coded(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int32], list[Any]]:
    """Each value's number among the different ones, -1 for nulls, and those."""
    encoded = column.dictionary_encode().unify_dictionaries()
    codes = numbers(pa.chunked_array([chunk.indices for chunk in encoded.chunks]), -1)
    return codes, encoded.chunk(0).dictionary.to_pylist()


def _looked_up(codes: npt.NDArray[np.int32], values: list[Any]) -> _Column:
    view = codes.data
    return lambda first, end: [values[code] for code in view[first:end]]


def _plain(values: npt.NDArray[Any]) -> _Column:
    one = values[0].item()
    if (values == one).all():
        return lambda first, end: repeat(one)
    view = values.data
    return lambda first, end: view[first:end].tolist()


def _optional(column: pa.ChunkedArray) -> _Column:
    """Of counts that may be missing."""
    if not column.null_count:
        return _plain(numbers(column, 0))
    if column.null_count == len(column):
        return lambda first, end: repeat(None)
    view = numbers(column, -1).data
    return lambda first, end: [None if count < 0 else count for count in view[first:end]]


def _prefixes(column: pa.ChunkedArray) -> _Column:
    """Of shared prefixes: equal ones are one object."""
    if column.null_count == len(column):
        return lambda first, end: repeat(None)
    codes, names = coded(pa.chunked_array([chunk.field("id") for chunk in column.chunks]))
    tokens = numbers(pa.chunked_array([chunk.field("tokens") for chunk in column.chunks]), 0)
    pairs, different = coded(pa.chunked_array([pa.array((codes.astype(np.int64) << 32) + tokens)]))
    made = [None if pair < 0 else SharedPrefix(names[pair >> 32], pair & 0xFFFFFFFF) for pair in different]
    return _looked_up(pairs, made)


def _text(column: pa.ChunkedArray) -> _Column:
    if column.null_count == len(column):
        return lambda first, end: repeat(None)
    return lambda first, end: column[first:end].to_pylist()


def _lists(column: pa.ChunkedArray, missing: tuple[int, ...] | None) -> _Column:
    """Of lists of integers, which become tuples."""
    if column.null_count == len(column):
        return lambda first, end: repeat(missing)
    lengths = numbers(pa.chunked_array([chunk.value_lengths() for chunk in column.chunks]), -1)
    starts = np.concatenate(([0], np.cumsum(np.maximum(lengths, 0), dtype=np.int64))).data
    values = np.concatenate([chunk.flatten().to_numpy() for chunk in column.chunks]).data
    known = lengths.data
    return lambda first, end: [
        missing if known[at] < 0 else tuple(values[starts[at] : starts[at + 1]].tolist()) for at in range(first, end)
    ]
