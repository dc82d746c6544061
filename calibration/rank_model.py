"""Rank predictor for LTR: which of two calls will put out more, without saying how much.

LightGBM's LambdaMART on the features of the length predictor; it needs the extra ``ltr``. Scores order calls of one
model, lower first; they are not tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from calibration.features import CallFeatures, Floats
from calibration.rows import PredictionInput, Row, TrainingError, rows
from calibration.saved import ModelError, SavedModel, load_model, save_model
from traces.schema import Workflow

LONGEST_TOKENS = 8192
BUCKET_TOKENS = 10
"""Labels as in vllm-ltr's training (github.com/hao-ai-lab/vllm-ltr, train/trainer.py and its run script): output
tokens, at most 8,192, in buckets of 10, counted from the longest down."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """How the ranker is made. Lists are ``list_calls`` random calls of one model, all pairs of which count."""

    trees: int = 150
    leaves: int = 15
    learning_rate: float = 0.05
    list_calls: int = 128
    components: int = 20
    text: bool = True
    history: bool = True
    seed: int = 0


class RankModel:
    """A trained ranker. Made by `train_rank` or `load_rank`; ``saved`` is the folder it was read from."""

    def __init__(
        self, features: CallFeatures, booster: Any, settings: RankSettings, saved: SavedModel | None = None
    ) -> None:
        self.features = features
        self.settings = settings
        self.saved = saved
        self._booster = booster

    @property
    def models(self) -> tuple[str, ...]:
        """The models it learned."""
        return self.features.models

    @property
    def reads_text(self) -> bool:
        """Whether prompts had anything to tell when it was trained."""
        return self.features.text

    def predict(self, calls: Sequence[PredictionInput]) -> list[Mapping[str, float]]:
        """The rank of each call on each of its models: calls that will put out less have lower ones."""
        pairs = iter(self.scores(calls).tolist())
        return [{model: next(pairs) for model in call.models} for call in calls]

    def scores(self, calls: Sequence[PredictionInput]) -> Floats:
        """The same for each call and each of its models in order, shape (pairs,)."""
        if not calls:
            return np.zeros(0)
        return -np.asarray(self._booster.predict(self.features.transform(calls), num_threads=1), np.float64)


def train_rank(
    workflows: Sequence[Workflow], models: Sequence[str], settings: RankSettings = RankSettings()
) -> RankModel:
    """Learn the order of these models' calls by their own output tokens.

    LambdaRank (Burges, 2010) with a gain that is linear in the bucket: with the usual exponential one nothing but the
    shortest calls would count.

    Raises:
        TrainingError: no runs of these models, or LightGBM is not installed.
    """
    lightgbm = check_lightgbm()
    learned = rows(workflows, models)
    if not learned:
        raise TrainingError(f"no workflow has a run of {', '.join(models)}")
    features = CallFeatures(settings.text, settings.history, settings.components, settings.seed)
    matrix = features.fit(learned)
    labels = bucket_labels(np.array([row.stage_tokens for row in learned]))
    order, sizes = _lists(learned, settings)
    parameters = {
        "objective": "lambdarank",
        "num_leaves": settings.leaves,
        "learning_rate": settings.learning_rate,
        "min_data_in_leaf": 10,
        "feature_fraction": 0.5,
        "bagging_fraction": 0.7,
        "bagging_freq": 1,
        "lambdarank_truncation_level": settings.list_calls,
        "label_gain": ",".join(str(gain) for gain in range(int(labels.max()) + 1)),
        "seed": settings.seed,
        "deterministic": True,
        "force_row_wise": True,
        "num_threads": 1,
        "verbosity": -1,
    }
    data = lightgbm.Dataset(matrix[order], labels[order], group=sizes)
    return RankModel(features, lightgbm.train(parameters, data, settings.trees), settings)


def bucket_labels(output_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Labels for a ranker, higher for shorter calls; all of at least `LONGEST_TOKENS` have the lowest, 0."""
    return LONGEST_TOKENS // BUCKET_TOKENS - np.minimum(output_tokens, LONGEST_TOKENS) // BUCKET_TOKENS


def save_rank(
    folder: str | Path,
    model: RankModel,
    *,
    training: Mapping[str, Any],
    scores: Mapping[str, Any],
    cost_ms: Mapping[str, float],
    made_by: str,
) -> SavedModel:
    """Write the model as a folder (`calibration.saved.save_model` says what the arguments are)."""
    return save_model(
        folder,
        "rank",
        training=training,
        settings=asdict(model.settings) | {"text": model.reads_text},
        scores=scores,
        cost_ms=cost_ms,
        objects={"features": model.features, "booster": model._booster.model_to_string()},
        made_by=made_by,
        packages=("lightgbm",),
    )


def load_rank(folder: str | Path) -> RankModel:
    """Read a saved rank model. Raises `ModelError`, also where LightGBM is not installed."""
    saved = load_model(folder, "rank")
    try:
        booster = check_lightgbm().Booster(model_str=saved.objects["booster"])
        settings = RankSettings(**saved.manifest["settings"])
        return RankModel(saved.objects["features"], booster, settings, saved)
    except (KeyError, TypeError):
        raise ModelError(f"{folder}: not a rank model of this version; train it again") from None


def check_lightgbm() -> Any:
    """The module ``lightgbm``. Raises `TrainingError` that names the extra where it is not installed."""
    try:
        import lightgbm
    except ImportError:
        raise TrainingError("the rank predictor needs LightGBM: install chimsim[ltr]") from None
    return lightgbm


def _lists(learned: Sequence[Row], settings: RankSettings) -> tuple[npt.NDArray[np.int64], list[int]]:
    """The rows in lists of one model each, in random order, and the lists' lengths."""
    rng = np.random.default_rng(settings.seed)
    of_model = np.array([row.model for row in learned])
    order, sizes = [], []
    for model in np.unique(of_model):
        shuffled = rng.permutation(np.flatnonzero(of_model == model))
        parts = np.array_split(shuffled, -(-len(shuffled) // settings.list_calls))
        order.append(shuffled)
        sizes += [len(part) for part in parts]
    return np.concatenate(order), sizes
