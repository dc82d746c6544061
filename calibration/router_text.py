"""What a router reads off a prompt without an encoder: TF-IDF of words and signs, and how long the text is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from calibration.words import Words

Floats = npt.NDArray[np.float64]

_MAX_CHARACTERS = 20_000
"""Longer prompts are cut, so that a call's cost has a bound."""

_SURFACE_WEIGHT = 0.1
"""Scale of the standardised surface numbers beside the TF-IDF vector, whose length is 1."""

_COMPONENTS = 60


class TextFeatures:
    """TF-IDF over words, numbers and signs and pairs of them, and eleven surface numbers of the text."""

    def __init__(self, vectorizer: Any, mean: Floats, scale: Floats, components: Floats | None) -> None:
        self.vectorizer = vectorizer
        self.mean = mean
        self.scale = scale
        self.components = components

    @classmethod
    def fit(cls, prompts: Sequence[str], *, reduced: bool, seed: int) -> TextFeatures:
        """Learn words and scales; ``reduced`` also learns what `reduce` needs, a truncated SVD."""
        from sklearn.feature_extraction.text import TfidfVectorizer

        vectorizer = TfidfVectorizer(
            token_pattern=r"[^\W\d]+|\d+|[^\w\s]", ngram_range=(1, 2), sublinear_tf=True, min_df=2, max_features=50_000
        )
        try:
            vectorizer.fit([prompt[:_MAX_CHARACTERS] for prompt in prompts])
        except ValueError:
            # no word occurs in two prompts
            vectorizer.set_params(min_df=1).fit([*prompts, "prompt"])
        quick = Words(vectorizer)
        surface = _surface(prompts)
        spread = surface.std(axis=0)
        components = None
        if reduced:
            from sklearn.decomposition import TruncatedSVD

            words = quick.transform([prompt[:_MAX_CHARACTERS] for prompt in prompts])
            count = min(_COMPONENTS, min(words.shape) - 1)
            # of one word alone there is nothing to reduce
            components = TruncatedSVD(count, random_state=seed).fit(words).components_.T if count > 0 else None
        scale = np.where(spread > 1e-9, spread, 1.0) / _SURFACE_WEIGHT
        return cls(quick, surface.mean(axis=0), scale, components)

    def transform(self, prompts: Sequence[str]) -> tuple[Any, Floats]:
        """A sparse and a dense part, (prompts, features) each."""
        sparse = self.vectorizer.transform([prompt[:_MAX_CHARACTERS] for prompt in prompts])
        return sparse, (_surface(prompts) - self.mean) / self.scale

    def reduce(self, sparse: Any, dense: Floats) -> Floats:
        """The two parts as a few dense numbers, (prompts, features), for a forest."""
        return dense if self.components is None else np.concatenate([sparse @ self.components, dense], axis=1)


_SIGNS = re.compile(r"[^\w\s]")
_NUMBERS = re.compile(r"\d+")


def _surface(prompts: Sequence[str]) -> Floats:
    """How long the text is and what it is made of: logarithms of counts, and shares of the characters."""
    rows = []
    for prompt in prompts:
        text = prompt[:_MAX_CHARACTERS]
        words, numbers = text.split(), _NUMBERS.findall(text)
        length = max(len(text), 1)
        digits, signs = sum(map(len, numbers)), len(_SIGNS.findall(text))
        counts = (
            len(text), len(words), len(set(words)), text.count("\n"), digits, signs,
            sum(len(number) >= 3 for number in numbers), text.count("("), text.count("$"),
        )  # fmt: skip
        rows.append((*counts, digits / length, signs / length))
    table = np.array(rows, np.float64).reshape(len(prompts), 11)
    table[:, :9] = np.log1p(table[:, :9])
    return table
