"""TF-IDF of single words and pairs of neighbours, transformed in a fraction of scikit-learn's time.

It learns nothing: vocabulary and weights are those of a fitted `TfidfVectorizer`, and so are the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np


class Words:
    """What `TfidfVectorizer` of lower-cased words (``ngram_range=(1, 2)``, ``sublinear_tf``, l2 norm) has learned.

    scikit-learn makes a string of every pair and looks each up; here words become numbers, pairs of numbers are one
    number, and those of a whole batch are looked up at once.
    """

    def __init__(self, vectorizer: Any) -> None:
        terms = {column: term.split(" ") for term, column in vectorizer.vocabulary_.items()}
        self._number = {
            word: number for number, word in enumerate(sorted({w for term in terms.values() for w in term}))
        }
        columns = np.fromiter(terms, np.int64, len(terms))
        codes = np.array([self._code(*(self._number[word] for word in term)) for term in terms.values()], np.int64)
        order = np.argsort(codes)
        self._codes, self._columns = codes[order], columns[order]
        self._idf = np.asarray(vectorizer.idf_, np.float64)
        self._pattern = re.compile(vectorizer.token_pattern)

    def _code(self, first: Any, second: Any = -1) -> Any:
        """One number for a word, or for a pair of words."""
        return first * (len(self._number) + 1) + second + 1

    def transform(self, texts: Sequence[str]) -> Any:
        """The weights as a sparse matrix, (texts, terms)."""
        from scipy.sparse import csr_matrix

        found = [[self._number.get(word, -1) for word in self._pattern.findall(text.lower())] for text in texts]
        words = np.array([number for each in found for number in each], np.int64)
        rows = np.repeat(np.arange(len(found)), [len(each) for each in found])
        known = words >= 0
        pairs = np.flatnonzero((rows[1:] == rows[:-1]) & known[1:] & known[:-1])
        codes = np.concatenate([self._code(words[known]), self._code(words[pairs], words[pairs + 1])])
        places = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        hits = self._codes[places] == codes
        size = len(self._idf)
        cells = np.concatenate([rows[known], rows[pairs]])[hits] * size + self._columns[places[hits]]
        cells, counts = np.unique(cells, return_counts=True)
        rows, columns = np.divmod(cells, size)
        weights = (1 + np.log(counts)) * self._idf[columns]
        weights /= np.sqrt(np.bincount(rows, weights**2, len(found)))[rows]
        return csr_matrix((weights, (rows, columns)), shape=(len(found), size))
