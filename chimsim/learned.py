"""Learned predictors in a run: what saved models foretell of every call of a trace, computed in one batch beforehand.

It composes what is learned with what is taken from the trace, and keeps tables under the user's cache folder by their
content, so that no cell of a sweep pays for a prediction. It trains nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from calibration.rows import PredictionInput, calls_of, task_text
from calibration.saved import SavedModel, read_manifest
from chimsim.errors import ChimsimError, near
from chimsim.predictors import TracePredictor
from policies.interface import Prediction
from traces import Trace, Workflow
from traces.columns import columns_of

if TYPE_CHECKING:
    from calibration.length_model import LengthModel
    from calibration.rank_model import RankModel

Floats = npt.NDArray[np.float64]
FORMAT = 1
"""Of the cached tables; counts up when their meaning changes."""


@lru_cache(maxsize=16)
def manifest_of(folder: str) -> SavedModel:
    """The manifest of a saved model; raises `calibration.saved.ModelError`."""
    return read_manifest(folder)


def cost_s(folder: str) -> float:
    """Measured seconds a call, as the model's folder says."""
    return float(manifest_of(folder).manifest["cost_ms"]["per_call"]) / 1000.0


class LearnedPredictor:
    """Predictions of saved models; what no model is given for comes from ``base``.

    ``quantile`` is which one of the lengths, None the length model's own.
    """

    def __init__(
        self,
        trace: Trace,
        models: Sequence[str],
        base: TracePredictor,
        *,
        lengths: str | None = None,
        router: str | None = None,
        rank: str | None = None,
        quantile: float | None = None,
    ) -> None:
        # What models are made of takes a while to import, and most runs have none.
        from calibration.length_model import load_length
        from calibration.rank_model import load_rank

        self.router_s = base.router_s
        self.predictor_s = base.predictor_s
        self.reads_prompts = lengths is not None or rank is not None
        self._base = base
        self._models = tuple(models)
        self._first = columns_of(trace).rows
        self._length = load_length(lengths) if lengths is not None else None
        self._rank = load_rank(rank) if rank is not None else None
        for folder, known in ((lengths, self._length), (rank, self._rank)):
            if folder is not None and known is not None:
                check_models(folder, known.models, self._models)
        self._calls: dict[tuple[str, ...], tuple[Mapping[str, float], Mapping[str, float], Mapping[str, float]]] = {}
        calls = _calls_of(trace, self._models) if self._length is not None or self._rank is not None else []
        if self._length is not None:
            assert lengths is not None
            # The cache's name says which quantile; None and the model's own are one.
            self._quantile = self._length.settings.quantile if quantile is None else quantile
            make_lengths = partial(length_table, self._length, calls, self._quantile)
            table = _cached(f"length-{self._quantile}", trace, models, lengths, make_lengths)
            self._stage, self._remaining = table[:, :, 0], table[:, :, 1]
        if self._rank is not None:
            assert rank is not None
            self._ranks = _cached("rank", trace, models, rank, partial(rank_table, self._rank, calls, self._models))
        self._places = {_key(call): at for at, call in enumerate(calls)}
        self._confidence: Floats | None = None
        if router is not None:
            make = partial(_confidences, trace, router, self._models)
            self._confidence = _cached("router", trace, models, router, make)

    def predict(self, inputs: PredictionInput) -> Prediction:
        """As `chimsim.predictors.Predictor`; a call that ran on several models before is predicted when it comes."""
        base = self._base.predict(inputs)
        confidence: Mapping[str, float] = base.confidence
        if self._confidence is not None:
            row = self._confidence[self._first[inputs.workflow_id]]
            confidence = dict(zip(self._models, row.tolist(), strict=True))
        if self._length is None and self._rank is None:
            return Prediction(confidence, base.stage_tokens, base.remaining_tokens, base.rank)
        key = _key(inputs)
        found = self._calls.get(key)
        if found is None:
            found = self._calls[key] = self._look_up(key, inputs, base)
        stage, remaining, rank = found
        return Prediction(confidence, stage, remaining, rank)

    def _look_up(
        self, key: tuple[str, ...], inputs: PredictionInput, base: Prediction
    ) -> tuple[Mapping[str, float], Mapping[str, float], Mapping[str, float]]:
        at = self._places.get(key)
        stage, remaining = base.stage_tokens, base.remaining_tokens
        if self._length is not None:
            table = self._stage, self._remaining
            if at is None:
                made = length_table(self._length, [inputs], self._quantile)
                table, place = (made[:, :, 0], made[:, :, 1]), 0
            else:
                place = at
            stage, remaining = (dict(zip(self._models, part[place].tolist(), strict=True)) for part in table)
        rank: Mapping[str, float] = stage
        if self._rank is not None:
            ranks = self._ranks[at] if at is not None else rank_table(self._rank, [inputs], self._models)[0]
            rank = dict(zip(self._models, ranks.tolist(), strict=True))
        return stage, remaining, rank


def _key(inputs: PredictionInput) -> tuple[str, ...]:
    """What a prediction depends on: the workflow, its stage, and which earlier ones have finished, on which models."""
    return (inputs.workflow_id, str(inputs.stage), *(f"{done.stage}/{done.model}" for done in inputs.finished))


def _calls_of(trace: Trace, models: tuple[str, ...]) -> list[PredictionInput]:
    """Every call of every run, as it looks when its model ran the earlier ones; first calls once for all models."""
    return [
        call
        for workflow in trace.workflows
        for number, model in enumerate(models)
        for call in calls_of(workflow, model, models)
        if call.stage or not number
    ]


def length_table(model: LengthModel, calls: Sequence[PredictionInput], quantile: float | None) -> Floats:
    """Tokens, shape (calls, models, 2): of the stage, and of all that remains.

    ``quantile`` is which quantile of them, between 0 and 1; None the one that the model was trained to give.
    """
    pairs = model.quantiles(calls, [model.settings.quantile if quantile is None else quantile])[:, :, 0]
    return np.asarray(pairs.reshape(len(calls), -1, 2), np.float64)


def rank_table(model: RankModel, calls: Sequence[PredictionInput], models: Sequence[str]) -> Floats:
    """Rank scores, shape (calls, models): the higher, the longer the stage; ``models`` are among the model's own."""
    return np.array([[row[name] for name in models] for row in model.predict(calls)], np.float64)


def _confidences(trace: Trace, folder: str, models: Sequence[str]) -> Floats:
    """Probabilities, shape (workflows, models)."""

    from calibration.router_model import load_router

    router, _ = load_router(folder)
    check_models(folder, router.models, models)
    texts = [_text(workflow, folder) for workflow in trace.workflows]
    table = router.predict_proba(texts)
    return np.asarray(table[:, [router.models.index(model) for model in models]], np.float64)


def _text(workflow: Workflow, folder: str) -> str:
    text = task_text(workflow)
    if text is None:
        raise ChimsimError(f"router {folder}: workflow {workflow.workflow_id} has no prompt, which is all it reads")
    return text


def check_models(folder: str, known: Sequence[str], wanted: Sequence[str]) -> None:
    """Refuse a saved model that was trained for ``known`` models where ``wanted`` ones are to be predicted.

    Raises `ChimsimError`, which names the folder and the first model that it lacks.
    """
    for model in wanted:
        if model not in known:
            raise ChimsimError(
                f"{folder}: it was not trained for {model}{near(model, known)} (trained for: {', '.join(known)})"
            )


def _cached(kind: str, trace: Trace, models: Sequence[str], folder: str, make: Callable[[], Floats]) -> Floats:
    """The table from the cache, or made and kept there; a cache that cannot be used is done without."""
    content = "\0".join([str(FORMAT), kind, trace.digest, *models, manifest_of(folder).digest])
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chimsim"
    path = root / f"{kind}-{hashlib.sha256(content.encode()).hexdigest()[:32]}.npy"
    with contextlib.suppress(OSError, ValueError):
        return np.asarray(np.load(path, allow_pickle=False), np.float64)
    table = make()
    with contextlib.suppress(OSError):
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=root, suffix=".tmp", delete=False) as file:
            np.save(file, table)
        os.replace(file.name, path)
    return table
