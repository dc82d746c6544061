"""The semantic router: from a prompt to each model's probability of solving it, learned from a trace's labels.

The text is all it reads. The probabilities are independent of each other (several models may be confident at
once) and calibrated, since policies compare them with a margin. It neither splits nor judges, nor picks a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from calibration.router_encoder import Encoder, FineTuned
from calibration.router_heads import Forest, Head, Linear, fit_head, platt
from calibration.router_text import TextFeatures
from calibration.rows import TrainingError, task_text
from calibration.saved import ModelError, SavedModel, load_model, save_model
from traces.schema import Workflow, near

Floats = npt.NDArray[np.float64]

BACKENDS = ("tfidf", "forest", "embeddings", "modernbert")
"""Words under logistic regression; the same averaged with a forest; both over a frozen encoder's embedding too; a
fine-tuned encoder."""

TARGETS = ("solved", "joint", "difference")
"""What is learned: each model's label; which set of models solves it; the smallest model's label and, for every
other one, who of the two solves it alone."""

MIN_LABELLED = 30
"""Labelled workflows of each model, to learn from."""


class Router(Protocol):
    """From prompts to probabilities. ``target`` is one of `TARGETS`, ``backend`` one of `BACKENDS`."""

    @property
    def models(self) -> tuple[str, ...]: ...
    @property
    def target(self) -> str: ...
    @property
    def backend(self) -> str: ...

    def predict_proba(self, prompts: Sequence[str]) -> Floats:
        """Probability that each model solves each prompt, (prompts, models), independent of each other."""
        ...


@dataclass(frozen=True)
class LearningSet:
    """Prompts and their labels, (prompts, models): 1 solved, 0 not, NaN unknown."""

    models: tuple[str, ...]
    prompts: list[str]
    labels: Floats


def learning_set(workflows: Iterable[Workflow], models: Sequence[str]) -> LearningSet:
    """The workflows as the router sees them: `calibration.rows.task_text`, and the labels.

    Workflows without text are left out.

    Raises:
        TrainingError: no workflow has a text.
    """
    prompts, labels = [], []
    for workflow in workflows:
        text = task_text(workflow)
        if text:
            prompts.append(text)
            solved = [workflow.runs[model].solved if model in workflow.runs else None for model in models]
            labels.append([np.nan if label is None else float(label) for label in solved])
    if not prompts:
        raise TrainingError("no workflow has a prompt, and the text is all that a router learns from")
    return LearningSet(tuple(models), prompts, np.array(labels, np.float64).reshape(len(prompts), len(models)))


def train_router(
    data: LearningSet,
    *,
    backend: str = "forest",
    target: str = "solved",
    seed: int = 0,
    base_model: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Router:
    """Learn a router; the same data, options and seed give the same probabilities.

    Args:
        data: see `learning_set`.
        backend: one of `BACKENDS`.
        target: one of `TARGETS`; those but ``solved`` need two models.
        seed: of the inner folds, and of a fine-tuned encoder's head, order and dropout.
        base_model: a local folder or a hub's name of the encoder, for the backends that have one.
        progress: told what is being done, in a few words.

    Raises:
        TrainingError: an unknown option, or fewer than `MIN_LABELLED` labels of a model.
        calibration.router_encoder.EncoderError: no torch, or no such encoder.
    """
    for name, value, known in (("backend", backend, BACKENDS), ("target", target, TARGETS)):
        if value not in known:
            raise TrainingError(f"{name} {value!r} is unknown{near(value, known)} (known: {', '.join(known)})")
    for model, column in zip(data.models, data.labels.T, strict=True):
        count = int((~np.isnan(column)).sum())
        if not count:
            raise TrainingError(f"model {model!r} has no label in any workflow (solved is null): nothing to learn from")
        if count < MIN_LABELLED:
            raise TrainingError(
                f"model {model!r} has {count} labelled workflows with a prompt to learn from; "
                f"expected at least {MIN_LABELLED}"
            )
    if target != "solved" and len(data.models) < 2:
        raise TrainingError(f"target {target} compares models, and there is only {data.models[0]}; use target solved")
    if backend in ("tfidf", "forest") and base_model is not None:
        raise TrainingError(f"backend {backend} has no base model; use backend embeddings or modernbert")
    tell = progress or (lambda text: None)
    if backend == "modernbert":
        if target == "joint":
            raise TrainingError("backend modernbert learns target solved or difference; joint needs another backend")
        return _FineTunedRouter.train(data, target, seed, base_model, tell)
    return _TextRouter.train(data, backend, target, seed, base_model, tell)


def save_router(
    folder: str | Path,
    router: Router,
    *,
    training: dict[str, Any],
    scores: dict[str, Any],
    cost_ms: dict[str, float],
    made_by: str,
    settings: dict[str, Any] | None = None,
) -> SavedModel:
    """Write a router as a folder (see `calibration.saved.save_model`, also for the arguments and errors)."""
    assert isinstance(router, _TextRouter | _FineTunedRouter)
    needed = () if router.backend in ("tfidf", "forest") else ("torch", "transformers")
    return save_model(
        folder,
        "router",
        training=training,
        settings={
            "models": list(router.models),
            "backend": router.backend,
            "target": router.target,
            **(settings or {}),
        },
        scores=scores,
        cost_ms=cost_ms,
        objects=router.state(),
        made_by=made_by,
        packages=needed,
    )


def load_router(folder: str | Path) -> tuple[Router, SavedModel]:
    """The router of a folder, and the folder's manifest.

    Raises:
        calibration.saved.ModelError: no such folder, a damaged one, or one made by other package versions.
        calibration.router_encoder.EncoderError: it needs torch, which is not installed.
    """
    saved = load_model(folder, "router")
    state = saved.objects
    made: type[_TextRouter] | type[_FineTunedRouter]
    made = _FineTunedRouter if saved.manifest["settings"].get("backend") == "modernbert" else _TextRouter
    try:
        return made.from_state(state), saved
    except (KeyError, TypeError) as error:
        raise ModelError(f"{folder}: the model lacks {error}; train it again") from None


def _columns(target: str, labels: Floats) -> tuple[int, Floats]:
    """The index of the reference model and what is learned, (prompts, columns), NaN where a label is missing.

    Of ``difference``: the reference's label, then for every other model "it alone" and "the reference alone".
    """
    if target != "difference":
        return 0, labels
    reference = int(np.argmin(np.nanmean(labels, axis=0)))
    base = labels[:, reference]
    columns = [base]
    for model in range(labels.shape[1]):
        if model != reference:
            columns += [labels[:, model] * (1 - base), base * (1 - labels[:, model])]
    return reference, np.stack(columns, axis=1)


def _confidence(target: str, reference: int, columns: Floats) -> Floats:
    """Back from the probabilities of the columns to one a model."""
    if target != "difference":
        return columns
    base = columns[:, :1]
    others = np.clip(base + columns[:, 1::2] - columns[:, 2::2], 0.0, 1.0)
    return np.concatenate([others[:, :reference], base, others[:, reference:]], axis=1)


class _TextRouter:
    """A head over text features, and over an encoder's embedding if there is one."""

    def __init__(
        self,
        models: Sequence[str],
        backend: str,
        target: str,
        reference: int,
        features: TextFeatures,
        encoder: Encoder | None,
        head: Head,
    ) -> None:
        self.models = tuple(models)
        self.backend = backend
        self.target = target
        self._reference = reference
        self._features = features
        self._encoder = encoder
        self._head = head

    @classmethod
    def train(
        cls,
        data: LearningSet,
        backend: str,
        target: str,
        seed: int,
        base_model: str | None,
        tell: Callable[[str], None],
    ) -> _TextRouter:
        encoder = Encoder.load(base_model) if backend == "embeddings" else None
        with_forest = backend != "tfidf"
        features = TextFeatures.fit(data.prompts, reduced=with_forest, seed=seed)
        sparse, dense = features.transform(data.prompts)
        trees = features.reduce(sparse, dense) if with_forest else None
        if encoder is not None:
            tell(f"embedding {len(data.prompts)} prompts")
            embedded = encoder.embed(data.prompts)
            dense = np.concatenate([dense, embedded], axis=1)
            trees = None if trees is None else np.concatenate([trees, embedded], axis=1)
        tell(f"fitting {len(data.models)} models on {len(data.prompts)} prompts")
        reference, columns = _columns(target, data.labels)
        head = fit_head(sparse, dense, columns, seed, joint=target == "joint", trees=trees)
        return cls(data.models, backend, target, reference, features, encoder, head)

    def predict_proba(self, prompts: Sequence[str]) -> Floats:
        if not len(prompts):
            return np.empty((0, len(self.models)))
        sparse, dense = self._features.transform(prompts)
        trees = self._features.reduce(sparse, dense) if self._head.forest is not None else None
        if self._encoder is not None:
            embedded = self._encoder.embed(prompts)
            dense = np.concatenate([dense, embedded], axis=1)
            trees = None if trees is None else np.concatenate([trees, embedded], axis=1)
        return _confidence(self.target, self._reference, self._head.probabilities(sparse, dense, trees))

    def state(self) -> dict[str, Any]:
        features, head = self._features, self._head
        return {
            "models": list(self.models),
            "backend": self.backend,
            "target": self.target,
            "reference": self._reference,
            "features": vars(features),
            "linear": vars(head.linear),
            "forest": None if head.forest is None else vars(head.forest),
            "line": (head.slope, head.offset),
            "encoder": None if self._encoder is None else self._encoder.state(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> _TextRouter:
        forest = None if state["forest"] is None else Forest(**state["forest"])
        encoder = None if state["encoder"] is None else Encoder.from_state(state["encoder"])
        return cls(
            state["models"],
            state["backend"],
            state["target"],
            state["reference"],
            TextFeatures(**state["features"]),
            encoder,
            Head(Linear(**state["linear"]), forest, *state["line"]),
        )


class _FineTunedRouter:
    """A fine-tuned encoder with a sigmoid a column."""

    backend = "modernbert"

    def __init__(self, models: Sequence[str], target: str, reference: int, tuned: FineTuned, line: Floats) -> None:
        self.models = tuple(models)
        self.target = target
        self._reference = reference
        self._tuned = tuned
        self._line = line

    @classmethod
    def train(
        cls, data: LearningSet, target: str, seed: int, base_model: str | None, tell: Callable[[str], None]
    ) -> _FineTunedRouter:
        reference, columns = _columns(target, data.labels)
        tuned, held_out = FineTuned.train(data.prompts, columns, seed=seed, base_model=base_model, progress=tell)
        scores = tuned.logits([data.prompts[row] for row in held_out])
        line = []
        for c in range(columns.shape[1]):
            labels = columns[held_out, c]
            known = ~np.isnan(labels)
            line.append(platt(scores[known, c], labels[known]))
        return cls(data.models, target, reference, tuned, np.array(line).T)

    def predict_proba(self, prompts: Sequence[str]) -> Floats:
        if not len(prompts):
            return np.empty((0, len(self.models)))
        columns = expit(self._line[0] * self._tuned.logits(prompts) + self._line[1])
        return _confidence(self.target, self._reference, np.asarray(columns, np.float64))

    def state(self) -> dict[str, Any]:
        return {
            "models": list(self.models),
            "target": self.target,
            "reference": self._reference,
            "tuned": self._tuned.state(),
            "line": self._line,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> _FineTunedRouter:
        tuned = FineTuned.from_state(state["tuned"])
        return cls(state["models"], state["target"], state["reference"], tuned, state["line"])
