"""What length and rank predictors look at: numbers known of a call before it starts, a row a model to predict for.

Only `PredictionInput` goes in. What is fitted (words and their weights, means of categories) comes from training rows
alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from calibration.rows import PredictionInput, Row
from calibration.words import Words

Floats = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float32]

TEXT_CHARS = 8_000
"""A prompt is read up to here, so that the time of a prediction is bounded."""

_TOKEN = r"\w+|[^\w\s]"
_MAX_WORDS = 20_000
_MARKS = ("\n", "$", "\\", "(", "=", ",", "for ", "if ")
_RIDGE_ALPHA = 3.0
_NUMBER_WEIGHT = 0.3
"""Of a standardised number in the ridge regression, beside TF-IDF rows of length 1."""
_FOLDS = 5
_PRIOR_ROWS = 10.0


class Regression(NamedTuple):
    """Expected log lengths, shape (texts, models): ``tfidf @ words + scaled numbers @ numbers + constant``."""

    words: Floats
    numbers: Floats
    constant: Floats


@dataclass
class TextReader:
    """Prompts as numbers: TF-IDF reduced by truncated SVD, counts of signs, and a ridge regression on both."""

    components: int
    seed: int
    words: Any = None
    reduction: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    centre: Floats = field(default_factory=lambda: np.zeros(0))
    spread: Floats = field(default_factory=lambda: np.zeros(0))
    regression: Regression | None = None

    def fit(self, texts: Sequence[str], numbers: Floats, targets: Floats) -> list[Regression]:
        """Learn from one text a workflow, with `numbers_of` it and its log lengths, shape (workflows, models).

        Returns regressions of which the i-th has not seen the texts of fold i (`fold_of`).
        """
        from sklearn.decomposition import TruncatedSVD
        from sklearn.feature_extraction.text import TfidfVectorizer

        vectorizer = TfidfVectorizer(
            sublinear_tf=True, ngram_range=(1, 2), min_df=2, max_features=_MAX_WORDS, token_pattern=_TOKEN
        )
        tfidf = vectorizer.fit_transform(texts)
        self.words = Words(vectorizer)
        svd = TruncatedSVD(min(self.components, tfidf.shape[1]), random_state=self.seed).fit(tfidf)
        self.reduction = np.ascontiguousarray(svd.components_.T)
        logs = np.log1p(numbers)
        self.centre, self.spread = logs.mean(axis=0), np.maximum(logs.std(axis=0), 1e-9)
        scaled = self._scaled(numbers)
        self.regression = _regression(tfidf, scaled, targets)
        folds = fold_of(texts)
        return [_regression(tfidf[folds != n], scaled[folds != n], targets[folds != n]) for n in range(_FOLDS)]

    def read(
        self, texts: Sequence[str], numbers: Floats, regressions: Sequence[Regression], which: npt.NDArray[np.int64]
    ) -> tuple[Floats, Floats]:
        """The reduced TF-IDF, and the expected log lengths by the regression that ``which`` names for each text."""
        tfidf, scaled = self.words.transform(texts), self._scaled(numbers)
        expected = np.zeros((len(texts), len(regressions[0].constant)))
        for number, regression in enumerate(regressions):
            mine = np.flatnonzero(which == number)
            if len(mine):
                expected[mine] = (
                    tfidf[mine] @ regression.words + scaled[mine] @ regression.numbers + regression.constant
                )
        return tfidf @ self.reduction, expected

    def _scaled(self, numbers: Floats) -> Floats:
        return np.asarray(_NUMBER_WEIGHT * (np.log1p(numbers) - self.centre) / self.spread, np.float64)


@dataclass
class CallFeatures:
    """Fitted on training rows by `fit`, which also gives their matrix; `transform` makes the same columns of calls.

    Args:
        text: read the prompts; `fit` turns it off where they are missing or say nothing that differs.
        history: look at what the finished stages took in and put out; without, the texts' numbers still have the
            length of the workflow's first prompt.
        components: dimensions that TF-IDF is reduced to.
        seed: of the reduction.
    """

    text: bool = True
    history: bool = True
    components: int = 20
    seed: int = 0
    models: tuple[str, ...] = ()
    means: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    overall: float = 0.0
    reader: TextReader | None = None

    def fit(self, rows: Sequence[Row]) -> Matrix:
        """Learn from rows, and their matrix: float32 of shape (rows, features).

        In it the length that the text lets expect comes from a regression that has not seen the workflow: what
        is learned from it is then worth as much as it will be later.
        """
        logs = np.log(np.array([row.remaining_tokens for row in rows], np.float64))
        self.models = tuple(sorted({row.model for row in rows}))
        self.overall = float(logs.mean())
        self.means = {
            "workload": _means([row.known.workload for row in rows], logs, self.overall),
            "stage_name": _means([row.known.stage_name for row in rows], logs, self.overall),
            "model": _means([row.model for row in rows], logs, self.overall),
        }
        calls = [row.known for row in rows]
        models = [(row.model,) for row in rows]
        firsts = {row.known.workflow_id: row.known for row in reversed(rows) if not row.known.stage}
        prompts = [_text(call) for call in firsts.values()]
        self.text = self.text and _worth_reading(prompts)
        if not self.text:
            return self._matrix(calls, models, None)
        self.reader = TextReader(self.components, self.seed)
        regressions = self.reader.fit(prompts, numbers_of(list(firsts.values())), self._targets(rows, firsts))
        fold = dict(zip(firsts, fold_of(prompts), strict=True))
        which = np.array([fold[call.workflow_id] for call in calls])
        return self._matrix(calls, models, self._read(calls, regressions, which))

    def transform(self, calls: Sequence[PredictionInput]) -> Matrix:
        """A row for each call and each of its models, in that order; float32 of shape (pairs, features)."""
        texts = None
        if self.reader is not None and self.reader.regression is not None and calls:
            texts = self._read(calls, [self.reader.regression], np.zeros(len(calls), np.int64))
        return self._matrix(calls, [call.models for call in calls], texts)

    def _targets(self, rows: Sequence[Row], firsts: Mapping[str, PredictionInput]) -> Floats:
        """Log tokens of whole workflows, shape (workflows, models); a run that is missing has its model's mean."""
        place = {workflow_id: index for index, workflow_id in enumerate(firsts)}
        targets = np.full((len(firsts), len(self.models)), np.nan)
        for row in rows:
            if not row.known.stage:
                targets[place[row.known.workflow_id], self.models.index(row.model)] = np.log(row.remaining_tokens)
        return np.where(np.isnan(targets), np.nanmean(targets, axis=0), targets)

    def _read(
        self, calls: Sequence[PredictionInput], regressions: Sequence[Regression], which: npt.NDArray[np.int64]
    ) -> tuple[Floats, Floats]:
        """The texts' numbers and the expected logs by model, a row a call; each text is read once."""
        assert self.reader is not None
        places: dict[tuple[str, int, int], int] = {}
        keys = [(_text(call), _first_prompt(call), int(fold)) for call, fold in zip(calls, which, strict=True)]
        at = np.array([places.setdefault(key, len(places)) for key in keys])
        chosen = np.unique(at, return_index=True)[1]
        numbers = numbers_of([calls[index] for index in chosen])
        reduced, expected = self.reader.read([text for text, _, _ in places], numbers, regressions, which[chosen])
        return np.hstack([reduced, numbers])[at], expected[at]

    def _matrix(
        self, calls: Sequence[PredictionInput], models: Sequence[Sequence[str]], texts: tuple[Floats, Floats] | None
    ) -> Matrix:
        at = np.repeat(np.arange(len(calls)), [len(wanted) for wanted in models])
        wanted = [model for each in models for model in each]
        counts = np.array([self._counts(call) for call in calls], np.float64).reshape(len(calls), -1)
        parts = [counts[at], np.array([self.means["model"].get(model, self.overall) for model in wanted])[:, None]]
        if texts is not None:
            numbers, expected = texts
            # the mean of the models stands in for one that is not known
            expected = np.column_stack([expected, expected.mean(axis=1)])
            column = {model: index for index, model in enumerate(self.models)}
            mine = np.array([column.get(model, len(column)) for model in wanted], np.int64)
            parts += [expected[at, -1][:, None], expected[at, mine][:, None], numbers[at]]
        return np.hstack(parts).astype(np.float32)

    def _counts(self, call: PredictionInput) -> list[float]:
        counts = [
            call.prompt_tokens,
            -1 if call.system_tokens is None else call.system_tokens,
            -1 if call.user_tokens is None else call.user_tokens,
            call.stage,
            self.means["workload"].get(call.workload, self.overall),
            self.means["stage_name"].get(call.stage_name, self.overall),
        ]
        if self.history:
            last = call.finished[-1] if call.finished else None
            counts += [
                _first_prompt(call),
                sum(stage.output_tokens for stage in call.finished),
                last.output_tokens if last else 0,
                call.prompt_tokens - last.prompt_tokens - last.output_tokens if last else 0,
            ]
        return counts


def _regression(tfidf: Any, scaled: Floats, targets: Floats) -> Regression:
    from scipy.sparse import csr_array, hstack
    from sklearn.linear_model import Ridge

    ridge = Ridge(alpha=_RIDGE_ALPHA).fit(hstack([tfidf, csr_array(scaled)], format="csr"), targets)
    weights = ridge.coef_.reshape(targets.shape[1], -1).T
    constant = np.broadcast_to(ridge.intercept_, targets.shape[1]).astype(np.float64)
    return Regression(weights[: tfidf.shape[1]].copy(), weights[tfidf.shape[1] :].copy(), constant)


def numbers_of(calls: Sequence[PredictionInput]) -> Floats:
    """Tokens of the workflow's first prompt and counts of signs in this one, shape (calls, numbers)."""
    made = []
    for call in calls:
        text = _text(call)
        letters = (sum(map(str.isdigit, text)), sum(map(str.isupper, text)))
        made.append((_first_prompt(call), len(text), *letters, *map(text.count, _MARKS)))
    return np.array(made, np.float64)


def fold_of(texts: Sequence[str]) -> npt.NDArray[np.int64]:
    """A fold for each text; equal texts are in the same one."""
    places: dict[str, int] = {}
    return np.array([places.setdefault(text, len(places)) % _FOLDS for text in texts], np.int64)


def _worth_reading(texts: Sequence[str]) -> bool:
    """Whether there is a regression to be had for every fold, and a word that two texts share."""
    if len(set(texts)) < 2 * _FOLDS:
        return False
    seen: set[str] = set()
    for text in texts:
        words = set(re.findall(_TOKEN, text.lower()))
        if words & seen:
            return True
        seen |= words
    return False


def _text(call: PredictionInput) -> str:
    return (call.prompt or "")[:TEXT_CHARS]


def _first_prompt(call: PredictionInput) -> int:
    return call.finished[0].prompt_tokens if call.finished else call.prompt_tokens


def _means(names: Sequence[str], logs: Floats, overall: float) -> dict[str, float]:
    """Mean log of each category, drawn towards the overall mean where it has few rows."""
    means = {}
    array = np.array(names)
    for name in sorted(set(names)):
        mine = logs[array == name]
        means[name] = float((mine.sum() + _PRIOR_ROWS * overall) / (len(mine) + _PRIOR_ROWS))
    return means
