"""Predictors: what is foretold of a call before it runs, here from the truth of the trace, with error dials.

An oracle is a predictor that looks the truth up; policies never see it. Nothing here is learned, and no input
of a predictor holds the future.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite, nan
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from calibration.rows import PredictionInput
from chimsim.dials import Floats, noise, noisy_confidence, noisy_lengths
from chimsim.errors import ChimsimError, near
from policies.interface import Prediction
from traces.columns import RunColumns, columns_of
from traces.graph import ancestors
from traces.schema import Stage, Trace

ROUTERS = ("trace", "oracle", "none", "noisy")
"""Sources of confidence: recorded in the trace, the label, each model's solved rate, the label with noise."""


class Predictor(Protocol):
    """Foretells a call. The overheads are simulated time, in seconds."""

    router_s: float
    """charged on a workflow's first call"""
    predictor_s: float
    """charged on every call"""

    def predict(self, inputs: PredictionInput) -> Prediction: ...


class ShuffledRouter:
    """Another predictor, whose confidence is that of some other workflow of the workload, for all models alike.

    What is known of single workflows is lost; how confidences spread, and how they differ between models, is kept.
    Which workflow stands for which is drawn from the seed, one to one.
    """

    def __init__(self, trace: Trace, base: Predictor, seed: int) -> None:
        self.router_s, self.predictor_s = base.router_s, base.predictor_s
        self.reads_prompts = getattr(base, "reads_prompts", True)
        self._base = base
        self._other: dict[str, str] = {}
        of_workload: dict[str, list[str]] = {}
        columns = columns_of(trace)
        for workload, workflow_id in zip(columns.workloads, columns.ids, strict=True):
            of_workload.setdefault(workload, []).append(workflow_id)
        rng = np.random.default_rng(seed)
        for _, ids in sorted(of_workload.items()):
            self._other.update(zip(ids, rng.permutation(ids).tolist(), strict=True))

    def predict(self, inputs: PredictionInput) -> Prediction:
        """As `Predictor`."""
        mine = self._base.predict(inputs)
        # Of a first call, which every run has.
        other = replace(inputs, workflow_id=self._other[inputs.workflow_id], stage=0, finished=())
        return replace(mine, confidence=self._base.predict(other).confidence)


class _Unknown(Mapping[str, float]):
    """Confidence that cannot be had: reading it is the error, so that policies which do not can run."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __getitem__(self, model: str) -> float:
        raise ChimsimError(self._message)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


_Table = tuple[str, "array[int]", "array[float]", "array[float]", "array[float]", "_Graphs | None"]
"""Of one model: its name, where each workflow's stages start, the stages' own and remaining tokens, the workflows'
confidence (NaN: none), and those that are graphs, if any. Remaining are the tokens of all stages but the ancestors."""


class _Graph(NamedTuple):
    """Of a run that is a graph: its stages' true tokens, and for each all that have finished for certain."""

    tokens: tuple[int, ...]
    ancestors: list[frozenset[int]]


class _Graphs:
    """The runs on one model that are graphs."""

    def __init__(self, runs: RunColumns) -> None:
        self._runs = runs
        shapes = [[Stage("", 1, 1, after=after) for after in shape] for shape in runs.afters]
        self._ancestors = [ancestors(stages) for stages in shapes]
        self._shapes = np.full(len(runs.solved), -1)
        self._shapes[runs.graphs] = runs.shapes

    def of(self, row: int) -> _Graph | None:
        """The run of a workflow, None for chains."""
        shape = self._shapes.item(row)
        if shape < 0:
            return None
        first, end = self._runs.starts[row : row + 2].tolist()
        return _Graph(tuple(self._runs.output_tokens[first:end].tolist()), self._ancestors[shape])

    def correct(self, left: npt.NDArray[np.int64]) -> None:
        """Put `_left` where ``left`` is as if all were chains."""
        order = np.argsort(self._runs.shapes, kind="stable")
        bounds = np.cumsum(np.bincount(self._runs.shapes))
        for before, rows in zip(self._ancestors, np.split(self._runs.graphs[order], bounds[:-1]), strict=True):
            at = self._runs.starts[rows, None] + np.arange(len(before))
            ahead = np.array([[stage not in done for done in before] for stage in range(len(before))], np.int64)
            left[at] = self._runs.output_tokens[at].astype(np.int64) @ ahead


class TracePredictor:
    """Predictions from the truth of a trace: exact, or as wrong as asked for. Made by `build_predictor`."""

    reads_prompts = False
    """whether ``PredictionInput.prompt`` matters; texts are most of a large trace, and need not be read"""

    def __init__(
        self,
        trace: Trace,
        router: str,
        router_map: float | None,
        length_error: float,
        seed: int,
        router_s: float,
        predictor_s: float,
    ) -> None:
        self.router_s = router_s
        self.predictor_s = predictor_s
        self._trace = trace
        self._router = router
        self._router_map = router_map
        self._length_error = length_error
        self._seed = seed
        self._columns = columns_of(trace)
        self._rows = self._columns.rows
        self._models: dict[str, _Table] = {}
        self._tables: dict[tuple[str, ...], tuple[_Table, ...]] = {}
        self._refusals: dict[str, str] = {}

    def __repr__(self) -> str:
        return (
            f"TracePredictor(trace={self._trace.name!r}, router={self._router!r}, "
            f"router_map={self._router_map}, length_error={self._length_error}, seed={self._seed}, "
            f"router_s={self.router_s}, predictor_s={self.predictor_s})"
        )

    def predict(self, inputs: PredictionInput) -> Prediction:
        """The prediction for every model of ``inputs.models``; the rank is that of the stage tokens.

        A model on which the workflow has fewer stages gets 0 tokens. Confidence that is missing raises
        `ChimsimError` when it is read.

        Raises:
            ChimsimError: the workflow is not in the trace, or has no run of one of the models.
        """
        row = self._rows.get(inputs.workflow_id)
        if row is None:
            raise ChimsimError(
                f"predictor: workflow {inputs.workflow_id!r} is not in trace {self._trace.name!r}"
                f"{near(inputs.workflow_id, self._rows)}"
            )
        tables = self._tables.get(inputs.models)
        if tables is None:
            tables = self.prepare(inputs.models)
        stage = inputs.stage
        stage_tokens: dict[str, float] = {}
        remaining_tokens: dict[str, float] = {}
        known: dict[str, float] = {}
        confidence: Mapping[str, float] = known
        for model, starts, own, left, sure, graphs in tables:
            at = starts[row] + stage
            if at < starts[row + 1]:
                stage_tokens[model] = own[at]
                remaining_tokens[model] = left[at]
                if graphs is not None and (graph := graphs.of(row)) is not None:
                    remaining_tokens[model] *= _share_left(graph, inputs)
            else:
                stage_tokens[model] = remaining_tokens[model] = self._beyond(row, model)
            known[model] = q = sure[row]
            if q != q:
                confidence = _Unknown(self._why_unknown(row, model))
        return Prediction(confidence, stage_tokens, remaining_tokens, stage_tokens)

    def prepare(self, models: Sequence[str]) -> tuple[_Table, ...]:
        """Make the tables of these models, which is otherwise done when they are first asked for."""
        for model in models:
            if model not in self._models:
                starts, own, left, graphs = self._lengths(model)
                self._models[model] = (model, starts, own, left, self._confidence(model), graphs)
        tables = tuple(self._models[model] for model in models)
        self._tables[tuple(models)] = tables
        return tables

    def refusal(self, model: str) -> str | None:
        """Why no confidence at all can be given for a model (after `prepare`), or None."""
        return self._refusals.get(model)

    def _beyond(self, row: int, model: str) -> float:
        workflow = self._trace.workflows[row]
        if model not in workflow.runs:
            raise ChimsimError(
                f"predictor: workflow {workflow.workflow_id!r} of trace {self._trace.name!r} has no run of "
                f"model {model!r}{near(model, workflow.runs)}"
            )
        return 0.0

    def _why_unknown(self, row: int, model: str) -> str:
        if model in self._refusals:
            return self._refusals[model]
        workflow = self._trace.workflows[row]
        who = f"workflow {workflow.workflow_id!r} of trace {self._trace.name!r}"
        if self._router == "trace":
            return (
                f"router trace: {who} has no confidence recorded for model {model!r}; give it one, "
                "or use the router oracle or none"
            )
        if self._router == "none":
            return (
                f"router none: {who} has the workload {workflow.workload!r}, of which model {model!r} has no "
                "labelled workflow (solved is null)"
            )
        return f"router {self._router}: {who} has no label for model {model!r} (solved is null)"

    def _lengths(self, model: str) -> tuple[array[int], array[float], array[float], _Graphs | None]:
        runs = self._columns.runs(model)
        tokens = runs.output_tokens.astype(np.int64)
        before = np.concatenate(([0], np.cumsum(tokens)))
        # Of the run, as if all were chains: what the trace holds up to its end, less what comes before the stage.
        left = np.repeat(before[runs.starts[1:]], np.diff(runs.starts)) - before[:-1]
        graphs = _Graphs(runs) if len(runs.graphs) else None
        if graphs is not None:
            graphs.correct(left)
        own, remaining = tokens.astype(np.float64), left.astype(np.float64)
        if self._length_error and len(own):
            counts = np.diff(runs.starts).tolist()
            names = (
                f"{workflow_id}\0{stage}"
                for workflow_id, count in zip(self._columns.ids, counts, strict=True)
                for stage in range(count)
            )
            z = noise(self._seed, f"length\0{model}", names)
            own = noisy_lengths(own, z, self._length_error)
            remaining = noisy_lengths(remaining, z, self._length_error)
        return _packed(runs.starts, "q"), _packed(own), _packed(remaining), graphs

    def _confidence(self, model: str) -> array[float]:
        runs = self._columns.runs(model)
        if self._router == "trace":
            return _packed(runs.confidence)
        labels = runs.solved
        labelled = ~np.isnan(labels)
        if self._router == "oracle":
            return _packed(labels)
        try:
            if not labelled.any():
                raise ChimsimError(
                    f"router {self._router}: trace {self._trace.name!r} has no label for model {model!r} in "
                    "any workflow (solved is null)"
                )
            if self._router == "none":
                return self._solved_rates(labels, labelled)
            return self._noisy_confidence(model, labels, labelled)
        except ChimsimError as error:
            # Kept for the moment someone reads it.
            self._refusals[model] = str(error)
            return array("d", [nan]) * len(labels)

    def _solved_rates(self, labels: Floats, labelled: npt.NDArray[np.bool_]) -> array[float]:
        workloads = np.array(self._columns.workloads)
        rates = np.full(len(labels), nan)
        for workload in np.unique(workloads):
            mine = workloads == workload
            if (mine & labelled).any():
                rates[mine] = labels[mine & labelled].mean()
        return _packed(rates)

    def _noisy_confidence(self, model: str, labels: Floats, labelled: npt.NDArray[np.bool_]) -> array[float]:
        z = noise(self._seed, f"router\0{model}", self._columns.ids)
        confidence = np.full(len(labels), nan)
        assert self._router_map is not None
        try:
            confidence[labelled] = noisy_confidence(labels[labelled], z[labelled], self._router_map)
        except ChimsimError as error:
            raise ChimsimError(f"{error} (model {model!r}, trace {self._trace.name!r})") from None
        return _packed(confidence)


def build_predictor(
    trace: Trace,
    *,
    models: Sequence[str] | None = None,
    router: str = "trace",
    router_map: float | None = None,
    length_error: float = 0.0,
    seed: int = 0,
    router_s: float = 0.0,
    predictor_s: float = 0.0,
) -> TracePredictor:
    """A predictor out of the trace's truth.

    Args:
        trace: the workflows that will be asked about.
        models: make these models' tables at once (and let a dial that cannot be met fail at once).
        router: where confidence comes from, one of `ROUTERS`.
        router_map: average precision of a noisy router, for every model; see `noisy_confidence`.
        length_error: share of pairs of calls that predicted lengths order wrongly; see `noisy_lengths`.
        seed: of the noise.
        router_s: simulated seconds on a workflow's first call.
        predictor_s: simulated seconds on every call.

    Raises:
        ChimsimError: an unknown router, or a number out of range.
    """
    if router not in ROUTERS:
        raise ChimsimError(f"router {router!r} is unknown{near(router, ROUTERS)} (known: {', '.join(ROUTERS)})")
    if router_map is not None:
        if router == "none":
            raise ChimsimError("router none has no average precision to set; leave out the router or its map")
        router = "noisy"
        if not 0 < router_map <= 1:
            raise ChimsimError(f"router map is {router_map!r}; it must be more than 0 and at most 1")
        if router_map == 1:
            router = "oracle"
    elif router == "noisy":
        raise ChimsimError("router noisy needs its average precision (router map), such as 0.6")
    if not 0 <= length_error <= 0.5:
        raise ChimsimError(f"length error is {length_error!r}; it must be between 0 (exact) and 0.5 (a random order)")
    for name, value in (("router_s", router_s), ("predictor_s", predictor_s)):
        if not (isfinite(value) and value >= 0):
            raise ChimsimError(f"{name} is {value!r}; it must be 0 or more, and finite")
    predictor = TracePredictor(trace, router, router_map, length_error, seed, router_s, predictor_s)
    if models is not None:
        predictor.prepare(models)
        refused = [message for m in models if router == "noisy" and (message := predictor.refusal(m))]
        if refused:
            raise ChimsimError(refused[0])
    return predictor


def _left(graph: _Graph, stage: int) -> int:
    """Tokens of all stages but those that have finished for certain when the stage is ready."""
    return sum(tokens for index, tokens in enumerate(graph.tokens) if index not in graph.ancestors[stage])


def _share_left(graph: _Graph, inputs: PredictionInput) -> float:
    """How much of `_left` is left in truth: stages beside this one may have finished."""
    beside = {done.stage for done in inputs.finished} - graph.ancestors[inputs.stage]
    most = _left(graph, inputs.stage)
    return (most - sum(graph.tokens[index] for index in beside if index < len(graph.tokens))) / most


def _packed(values: npt.NDArray[Any], code: str = "d") -> array[Any]:
    # Indexing an array gives a plain float, several times faster than a NumPy scalar.
    packed = array(code)
    packed.frombytes(np.ascontiguousarray(values, packed.typecode).tobytes())
    return packed
