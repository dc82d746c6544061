"""Traces that stay columns: workflows, runs and stages become objects only when they are asked for.

Made of the Arrow tables of files that `traces.parquet` has found to be what was checked and written: nothing is checked
here. A model's columns are decoded when its first run is asked for, texts when the first text is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, overload

import numpy as np
import pyarrow as pa

from traces.columns import Columns, Floats, RunColumns
from traces.decoding import DecodedRuns, coded, decoded, numbers, without_runs
from traces.schema import Run, Workflow

_FIELDS = tuple(Workflow.__dataclass_fields__)


class Source(Protocol):
    """The Arrow table that the columns are in."""

    schema: pa.Schema

    def read(self, *paths: str) -> pa.Table:
        """The columns of these dotted paths, all of them without any; whatever has the same prefix may come along."""


class SealedColumns(Columns):
    """The columns of a sealed file."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._runs: dict[str, DecodedRuns] = {}
        self._confidence: dict[str, Floats] = {}
        self._texts: dict[str, pa.ChunkedArray] = {}
        self._models = tuple(field.name for field in source.schema.field("runs").type)
        table = source.read("workflow_id", "workload", "arrival_s")
        self.ids = table["workflow_id"].to_pylist()
        codes, names = coded(table["workload"])
        self.workloads = [names[code] for code in codes.tolist()]
        arrivals = table["arrival_s"]
        self.arrivals_s = None if arrivals.null_count else np.asarray(arrivals.to_numpy(), np.float64)

    def __reduce__(self) -> tuple[Any, ...]:
        # The receiver may be another machine, without the file.
        return SealedColumns, (_InMemory(self._source.read()),)

    @property
    def models(self) -> tuple[str, ...]:
        """As `Columns.models`."""
        return self._models

    def runs(self, model: str) -> RunColumns:
        """As `Columns.runs`."""
        return self._of(model).arrays

    def common_models(self) -> tuple[str, ...]:
        """As `Columns.common_models`."""
        leaf = ".stages.list.element.output_tokens"  # one is enough to tell which lists there are
        return tuple(
            model
            for model in self._models
            if not any(chunk.field("stages").null_count for chunk in self._chunks(model, leaf))
        )

    def workflow(self, row: int) -> Workflow:
        """The workflow of a row."""
        made, put = object.__new__(_SealedWorkflow), object.__setattr__
        put(made, "workflow_id", self.ids[row])
        put(made, "workload", self.workloads[row])
        put(made, "arrival_s", None if self.arrivals_s is None else self.arrivals_s.item(row))
        put(made, "_columns", self)
        put(made, "_row", row)
        put(made, "_runs", None)
        return made

    def run(self, model: str, row: int) -> Run | None:
        """A workflow's run on the model, or None."""
        return (self._runs.get(model) or self._of(model)).run(row)

    def has_run(self, model: str, row: int) -> bool:
        """Whether a workflow has a run on the model."""
        starts = self._of(model).starts
        return bool(starts[row] < starts[row + 1])

    def confidence(self, model: str) -> Floats:
        """What is recorded of each workflow for one of the models, NaN for nothing."""
        if model not in self._confidence:
            chunks = self._source.read(f"confidence.{model}")["confidence"].chunks
            self._confidence[model] = numbers(pa.chunked_array([chunk.field(model) for chunk in chunks]), np.nan)
        return self._confidence[model]

    def text(self, name: str, row: int) -> str | None:
        """A workflow's ``prompt``, or its ``meta`` as JSON."""
        if name not in self._texts:
            self._texts[name] = self._source.read(name)[name]
        found: str | None = self._texts[name][row].as_py()
        return found

    def _chunks(self, model: str, below: str = "") -> list[pa.StructArray]:
        return [chunk.field(model) for chunk in self._source.read(f"runs.{model}{below}")["runs"].chunks]

    def _of(self, model: str) -> DecodedRuns:
        if model not in self._runs:
            if model in self._models:
                self._runs[model] = decoded(self._chunks(model), self.confidence(model))
            else:
                self._runs[model] = without_runs(len(self.ids))
        return self._runs[model]


class SealedWorkflows(Sequence[Workflow]):
    """The workflows of a sealed file, each made anew when it is asked for; otherwise as a tuple of them."""

    __slots__ = ("columns",)

    def __init__(self, columns: SealedColumns) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns.ids)

    @overload
    def __getitem__(self, index: int) -> Workflow: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Workflow, ...]: ...
    def __getitem__(self, index: int | slice) -> Workflow | tuple[Workflow, ...]:
        rows = range(len(self.columns.ids))[index]
        return self.columns.workflow(rows) if isinstance(rows, int) else tuple(map(self.columns.workflow, rows))

    def __iter__(self) -> Iterator[Workflow]:
        return map(self.columns.workflow, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SealedWorkflows | tuple):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


class _SealedWorkflow(Workflow):
    """A workflow whose runs and texts stay columns. Equal to any with the same fields; copies are plain ones."""

    __slots__ = ("_columns", "_row", "_runs")
    _columns: SealedColumns
    _row: int
    _runs: _SealedRuns | None

    def __new__(cls, *fields: Any, **more: Any) -> Workflow:  # type: ignore[misc]
        # What `dataclasses.replace` calls.
        return Workflow(*fields, **more)

    @property
    def runs(self) -> Mapping[str, Run]:
        found = self._runs
        if found is None:
            found = _SealedRuns(self._columns, self._row)
            object.__setattr__(self, "_runs", found)
        return found

    @property
    def prompt(self) -> str | None:
        return self._columns.text("prompt", self._row)

    @property
    def confidence(self) -> Mapping[str, float]:
        known = ((model, self._columns.confidence(model).item(self._row)) for model in self._columns.models)
        return {model: value for model, value in known if value == value}

    @property
    def meta(self) -> Mapping[str, Any]:
        text = self._columns.text("meta", self._row)
        found: dict[str, Any] = {} if text is None else json.loads(text)
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Workflow):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _FIELDS)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (getattr(self, name) for name in _FIELDS)
        return Workflow, tuple(dict(value) if isinstance(value, _SealedRuns) else value for value in fields)


class _SealedRuns(Mapping[str, Run]):
    """The runs of one workflow; each is made once."""

    __slots__ = ("_columns", "_made", "_row")

    def __init__(self, columns: SealedColumns, row: int) -> None:
        self._columns = columns
        self._row = row
        self._made: dict[str, Run] = {}

    def __getitem__(self, model: str) -> Run:
        run = self._made.get(model)
        if run is None:
            run = self._columns.run(model, self._row)
            if run is None:
                raise KeyError(model)
            self._made[model] = run
        return run

    def __iter__(self) -> Iterator[str]:
        return (model for model in self._columns.models if model in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, model: object) -> bool:
        return isinstance(model, str) and self._columns.has_run(model, self._row)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class _InMemory:
    """A table as the source of columns."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self.schema = table.schema

    def read(self, *paths: str) -> pa.Table:
        """As `Source.read`."""
        return self._table
