"""The quick TF-IDF has scikit-learn's numbers."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.feature_extraction.text import TfidfVectorizer

from calibration.words import Words

WORDS = ["sum", "Sum", "of", "12", "12.5", "(x)", "ünder", "\n", "new word", "__", "?!", ""]
TEXTS = st.lists(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join), min_size=1, max_size=6)
LEARNED = ["Sum of 12 and (x)", "the sum of 12.5 ünder x", "of of of 12", "x ( x ) ?", "sum of 12 __"]


@pytest.mark.parametrize("pattern", [r"\w+|[^\w\s]", r"[^\W\d]+|\d+|[^\w\s]"])
@pytest.mark.parametrize("most", [None, 6])
@given(texts=TEXTS)
def test_the_numbers_are_those_of_scikit_learn(pattern: str, most: int | None, texts: list[str]) -> None:
    theirs = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), token_pattern=pattern, max_features=most)
    theirs.fit(LEARNED)
    ours = pickle.loads(pickle.dumps(Words(theirs)))
    for some in (texts, LEARNED, ["nothing known"]):
        np.testing.assert_allclose(ours.transform(some).toarray(), theirs.transform(some).toarray(), atol=1e-12)
