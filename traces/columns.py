"""A trace by columns: what is asked of all workflows at once, as arrays instead of an object a workflow.

Traces of sealed Parquet files are made of columns (`traces.sealed`); of others they are gathered here, in one pass over
the runs of a model, when they are first asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import nan
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.graph import is_chain
from traces.schema import Run, Trace, Workflow

Ints = npt.NDArray[np.int64] | npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Shape = tuple[tuple[int, ...] | None, ...]
"""A run's stages by their ``after``."""


@dataclass(frozen=True, slots=True, eq=False)
class RunColumns:
    """All runs on one model. Workflow i has the stages from ``starts[i]`` to before ``starts[i + 1]``, or no run."""

    starts: npt.NDArray[np.int64]
    """shape (workflows + 1,); the others that are by workflow: (workflows,), those by stage: (stages,)"""
    solved: Floats
    """1, 0, or NaN: no label, or no run"""
    confidence: Floats
    """NaN: none recorded"""
    graphs: npt.NDArray[np.int64]
    """the workflows whose runs are no chains, ascending"""
    shapes: npt.NDArray[np.int64]
    """of each of those, where its shape stands in ``afters``"""
    afters: tuple[Shape, ...]
    prompt_tokens: Ints
    output_tokens: Ints
    hash_block_tokens: Ints
    """0 of stages without ``hash_ids``"""

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """Which workflows have a run on the model."""
        return np.diff(self.starts) > 0


class Columns(ABC):
    """Of all workflows of a trace, in file order. Without ``arrivals_s`` (seconds) none is recorded."""

    ids: Sequence[str]
    workloads: Sequence[str]
    arrivals_s: Floats | None

    @property
    @abstractmethod
    def models(self) -> tuple[str, ...]:
        """The models that any workflow has a run of, by name."""

    @cached_property
    def rows(self) -> dict[str, int]:
        """Where each workflow is, by its id."""
        return {workflow_id: row for row, workflow_id in enumerate(self.ids)}

    @abstractmethod
    def runs(self, model: str) -> RunColumns:
        """The runs on a model (which no workflow need have), made once."""

    @abstractmethod
    def common_models(self) -> tuple[str, ...]:
        """The models that every workflow has a run of, by name."""


def columns_of(trace: Trace) -> Columns:
    """The trace's columns; made once a trace."""
    if trace._columns is None:
        own = getattr(trace.workflows, "columns", None)
        columns = own if isinstance(own, Columns) else _Gathered(trace.workflows)
        object.__setattr__(trace, "_columns", columns)
    assert isinstance(trace._columns, Columns)
    return trace._columns


def shapes_of(graphs: Iterable[Shape]) -> tuple[npt.NDArray[np.int64], tuple[Shape, ...]]:
    """``shapes`` and ``afters`` of `RunColumns`."""
    numbers: dict[Shape, int] = {}
    shapes = np.array([numbers.setdefault(graph, len(numbers)) for graph in graphs], np.int64)
    return shapes, tuple(numbers)


class _Gathered(Columns):
    """The columns of workflows that are objects."""

    def __init__(self, workflows: Sequence[Workflow]) -> None:
        self._workflows = workflows
        self._runs: dict[str, RunColumns] = {}
        self.ids = [workflow.workflow_id for workflow in workflows]
        self.workloads = [workflow.workload for workflow in workflows]
        arrivals = [workflow.arrival_s for workflow in workflows if workflow.arrival_s is not None]
        self.arrivals_s = np.array(arrivals, np.float64) if len(arrivals) == len(self.ids) else None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Gathered, (self._workflows,)

    @cached_property
    def models(self) -> tuple[str, ...]:
        """As `Columns.models`."""
        return tuple(sorted({model for workflow in self._workflows for model in workflow.runs}))

    def runs(self, model: str) -> RunColumns:
        """As `Columns.runs`."""
        if model not in self._runs:
            runs = [workflow.runs.get(model) for workflow in self._workflows]
            stages = [stage for run in runs if run is not None for stage in run.stages]
            lengths = [0 if run is None else len(run.stages) for run in runs]
            graphs = [row for row, run in enumerate(runs) if run is not None and not is_chain(run.stages)]
            shapes, afters = shapes_of(tuple(s.after for s in run.stages) for row in graphs if (run := runs[row]))
            self._runs[model] = RunColumns(
                starts=np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))),
                solved=np.array([_label(run) for run in runs], np.float64),
                confidence=np.array([w.confidence.get(model, nan) for w in self._workflows], np.float64),
                graphs=np.array(graphs, np.int64),
                shapes=shapes,
                afters=afters,
                prompt_tokens=np.array([stage.prompt_tokens for stage in stages], np.int64),
                output_tokens=np.array([stage.output_tokens for stage in stages], np.int64),
                hash_block_tokens=np.array([s.hash_block_tokens if s.hash_ids else 0 for s in stages], np.int64),
            )
        return self._runs[model]

    def common_models(self) -> tuple[str, ...]:
        """As `Columns.common_models`."""
        if not self._workflows:
            return ()
        return tuple(sorted(set.intersection(*(set(workflow.runs) for workflow in self._workflows))))


def _label(run: Run | None) -> float:
    return nan if run is None or run.solved is None else float(run.solved)
