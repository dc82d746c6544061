"""Length predictor: a quantile random forest for the output tokens of a call and of the rest of its workflow.

Learned from a trace and used by `chimsim.predictors` or a live dispatcher; it knows nothing of either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from calibration.features import CallFeatures, Floats
from calibration.rows import PredictionInput, TrainingError, rows
from calibration.saved import ModelError, SavedModel, load_model, save_model
from traces.schema import Workflow

_PAIRS_AT_ONCE = 4096
"""Bounds the memory of a prediction: 100 trees of 2 lengths are 6 MB then."""


class Lengths(NamedTuple):
    """Predicted output tokens of this call, and of this and all later calls of the workflow (never fewer)."""

    stage_tokens: float
    remaining_tokens: float


@dataclass(frozen=True, slots=True)
class LengthSettings:
    """How a forest is made; the defaults are what did best on real traces (docs/predictors.md).

    ``quantile`` is the one predicted by default. Each tree draws at most ``rows_a_tree`` training rows. ``text``
    reads the prompts, ``history`` what the finished stages put out.
    """

    quantile: float = 0.5
    trees: int = 100
    min_samples_leaf: int = 3
    max_features: float = 0.3
    rows_a_tree: int = 5_000
    components: int = 20
    text: bool = True
    history: bool = True
    seed: int = 0


class LengthModel:
    """A trained forest. Made by `train_length` or `load_length`; ``saved`` is the folder it was read from."""

    def __init__(
        self,
        features: CallFeatures,
        trees: Sequence[Any],
        leaves: Sequence[npt.NDArray[np.float32]],
        settings: LengthSettings,
        saved: SavedModel | None = None,
    ) -> None:
        self.features = features
        self.settings = settings
        self.saved = saved
        self._trees = trees
        self._leaves = leaves

    @property
    def models(self) -> tuple[str, ...]:
        """The models it learned; of any other it predicts the mean of theirs."""
        return self.features.models

    @property
    def reads_text(self) -> bool:
        """Whether prompts had anything to tell when it was trained."""
        return self.features.text

    def predict(self, calls: Sequence[PredictionInput], quantile: float | None = None) -> list[Mapping[str, Lengths]]:
        """The lengths of each call on each of its models; ``quantile`` is the settings' where none is given.

        All calls in one batch cost far less than one at a time. Raises `ModelError` for a quantile not between 0
        and 1.
        """
        lengths = self.quantiles(calls, [self.settings.quantile if quantile is None else quantile])[:, :, 0].tolist()
        pairs = iter(lengths)
        return [{model: Lengths(*next(pairs)) for model in call.models} for call in calls]

    def quantiles(self, calls: Sequence[PredictionInput], quantiles: Sequence[float]) -> Floats:
        """Several quantiles at once, for each call and each of its models in order.

        Returns:
            Tokens, shape (pairs, 2, quantiles): of the stage, and of all that remains.
        """
        for quantile in quantiles:
            check_quantile(quantile)
        if not calls:
            return np.zeros((0, 2, len(quantiles)))
        matrix = self.features.transform(calls)
        made = [
            self._quantiles(matrix[at : at + _PAIRS_AT_ONCE], quantiles) for at in range(0, len(matrix), _PAIRS_AT_ONCE)
        ]
        return np.concatenate(made)

    def _quantiles(self, matrix: npt.NDArray[np.float32], quantiles: Sequence[float]) -> Floats:
        # A tree is asked directly: the forest's own method spends several milliseconds on handing out the work.
        drawn = [leaves[tree.apply(matrix)] for tree, leaves in zip(self._trees, self._leaves, strict=True)]
        tokens = np.quantile(np.stack(drawn).astype(np.float64), quantiles, axis=0)
        return np.maximum.accumulate(tokens.transpose(1, 2, 0), axis=1)


def train_length(
    workflows: Sequence[Workflow], models: Sequence[str], settings: LengthSettings = LengthSettings()
) -> LengthModel:
    """Learn the lengths of these models from the runs of these workflows.

    One forest for both lengths and all models, grown on logarithms, which heavy tails do not dominate. A leaf keeps
    one of its training rows, as in `quantile_forest` with ``max_samples_leaf=1``: a predicted quantile is that of
    the lengths of the rows that the trees name.

    Raises:
        TrainingError: no runs of these models. ModelError: a quantile not between 0 and 1.
    """
    from quantile_forest import RandomForestQuantileRegressor

    check_quantile(settings.quantile)
    learned = rows(workflows, models)
    if not learned:
        raise TrainingError(f"no workflow has a run of {', '.join(models)}")
    features = CallFeatures(settings.text, settings.history, settings.components, settings.seed)
    matrix = features.fit(learned)
    logs = np.log(np.array([(row.stage_tokens, row.remaining_tokens) for row in learned], np.float64))
    forest = RandomForestQuantileRegressor(
        n_estimators=settings.trees,
        min_samples_leaf=settings.min_samples_leaf,
        max_features=settings.max_features,
        max_samples=settings.rows_a_tree if len(learned) > settings.rows_a_tree else None,
        max_samples_leaf=1,
        random_state=settings.seed,
        n_jobs=1,
    ).fit(matrix, logs)
    return LengthModel(features, [tree.tree_ for tree in forest.estimators_], _leaves(forest), settings)


def save_length(
    folder: str | Path,
    model: LengthModel,
    *,
    training: Mapping[str, Any],
    scores: Mapping[str, Any],
    cost_ms: Mapping[str, float],
    made_by: str,
) -> SavedModel:
    """Write the model as a folder (`calibration.saved.save_model` says what the arguments are)."""
    return save_model(
        folder,
        "length",
        training=training,
        settings=asdict(model.settings) | {"text": model.reads_text},
        scores=scores,
        cost_ms=cost_ms,
        objects={"features": model.features, "trees": model._trees, "leaves": model._leaves},
        made_by=made_by,
    )


def load_length(folder: str | Path) -> LengthModel:
    """Read a saved length model. Raises `ModelError`."""
    saved = load_model(folder, "length")
    try:
        objects = saved.objects
        settings = LengthSettings(**saved.manifest["settings"])
        check_quantile(settings.quantile)
        return LengthModel(objects["features"], objects["trees"], objects["leaves"], settings, saved)
    except (KeyError, TypeError):
        raise ModelError(f"{folder}: not a length model of this version; train it again") from None


def check_quantile(quantile: float) -> None:
    """Raises `ModelError` unless it is between 0 and 1."""
    if not 0 < quantile < 1:
        raise ModelError(f"quantile is {quantile!r}; expected between 0 and 1, such as 0.5 (the median)")


def _leaves(forest: Any) -> list[npt.NDArray[np.float32]]:
    """For each tree the lengths of its leaves' rows, shape (nodes, 2); inner nodes hold nothing of use."""
    # 1-based places, by tree, node, output and sample, in an order of the forest's own
    places = np.asarray(forest.forest_.y_train_leaves)[:, :, :, 0] - 1
    lengths = np.rint(np.exp(np.asarray(forest.forest_.y_train))).astype(np.float32)
    counts = [tree.tree_.node_count for tree in forest.estimators_]
    return [lengths[[0, 1], places[tree, :count]] for tree, count in enumerate(counts)]
