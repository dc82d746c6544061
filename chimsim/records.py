"""What happened in a run, as columns: one row a request, a workflow, an engine, and samples over time.

Rows are kept in typed arrays while the simulation runs (a million requests stay small) and become data frames at
the end. Times are in seconds of simulated time, NaN where something never happened.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from chimsim.histogram import LogHistogram

__all__ = ["Columns", "LogHistogram", "RunResult", "frame_of"]


class Columns:
    """Append-only typed columns: ``kinds`` gives each its array type code ('d' float, 'q' integer, 'b' small)."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self.arrays: dict[str, array[Any]] = {name: array(kind) for name, kind in kinds.items()}
        self._appends = [column.append for column in self.arrays.values()]

    def append(self, row: Sequence[float]) -> None:
        """Add a row, its values in the order of the columns."""
        for add, value in zip(self._appends, row, strict=True):
            add(value)

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))


def frame_of(
    columns: Columns,
    names: Mapping[str, Sequence[str]],
    flags: Sequence[str] = (),
    order: str | None = None,
) -> pd.DataFrame:
    """A data frame of the columns; ``names`` turns codes into categories, ``flags`` become booleans.

    ``order`` names the column to sort by (its values are distinct). The frame takes the columns over.
    """
    data: dict[str, Any] = {}
    by = None
    if order is not None:
        keys = np.frombuffer(columns.arrays[order], dtype=np.int64)
        by = np.argsort(keys, kind="stable")
    for name in list(columns.arrays):
        column = columns.arrays.pop(name)
        values = np.array(column)
        del column
        if by is not None:
            values = values[by]
        if name in names:
            data[name] = pd.Categorical.from_codes(
                values.astype(np.int32), categories=pd.Index(list(names[name]), dtype="str")
            )
        elif name in flags:
            data[name] = values.astype(bool)
        else:
            data[name] = values
    return pd.DataFrame(data)


@dataclass
class RunResult:
    """One run. The columns of the frames and their units are described in docs/metrics.md."""

    requests: pd.DataFrame
    workflows: pd.DataFrame
    engines: pd.DataFrame
    timeline: pd.DataFrame
    itl: LogHistogram
    decisions: list[tuple[Any, ...]] = field(default_factory=list)
    """Every decision (instant, request id, engine, priority), when asked for."""

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The run's metrics by name."""
        from chimsim.metrics import summarise

        return dict(summarise(self))
