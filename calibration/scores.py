"""How good predictions are: of order, of quantiles, of probabilities, and of the difference between two models.

Arrays in, numbers out; nan where a score does not exist (no case of one kind, nothing to score).
"""

from __future__ import annotations

from math import nan

import numpy as np
import numpy.typing as npt
from scipy.stats import kendalltau, rankdata

Floats = npt.NDArray[np.float64]


def kendall_distance(true: Floats, predicted: Floats) -> float:
    """Share of pairs that ``predicted`` orders the other way round than ``true``, in O(n log n).

    Pairs that are equal in ``true`` are left out; pairs equal in ``predicted`` alone count as half wrong. 0
    when there is no pair.
    """
    pairs = len(true) * (len(true) - 1) / 2
    differ_true, differ_predicted = pairs - _tied_pairs(true), pairs - _tied_pairs(predicted)
    if not differ_true:
        return 0.0
    if not differ_predicted:
        return 0.5
    # tau-b divides (right - wrong) pairs by the geometric mean of the pairs untied on either side.
    tau_b = float(kendalltau(true, predicted).statistic)
    return float(0.5 * (1 - tau_b * np.sqrt(differ_predicted / differ_true)))


def _tied_pairs(values: Floats) -> float:
    counts = np.unique(values, return_counts=True)[1].astype(np.float64)
    return float(np.sum(counts * (counts - 1) / 2))


def pinball_loss(true: Floats, predicted: Floats, quantile: float) -> float:
    """Mean of ``quantile`` times what is missing, or ``1 - quantile`` times what is too much; in true's unit.

    The true quantile minimises it (Koenker and Bassett, 1978); at 0.5 it is half the mean absolute error.
    """
    if not len(true):
        return nan
    missing = true - predicted
    return float(np.maximum(quantile * missing, (quantile - 1) * missing).mean())


def coverage(true: Floats, low: Floats, high: Floats) -> float:
    """Share of true values from ``low`` to ``high``, both included; 0.8 is right for the 10 and 90 % quantiles."""
    return float(((low <= true) & (true <= high)).mean()) if len(true) else nan


def average_precision(labels: Floats, scores: Floats) -> float:
    """Mean over the positives (label 1) of the precision at their rank, best score first.

    Equal scores share the rank of the last of them, so that their order in the array does not matter.
    """
    order = np.argsort(-scores, kind="stable")
    hits, sorted_scores = labels[order], scores[order]
    positives = np.flatnonzero(hits)
    if not len(positives):
        return nan
    last = np.searchsorted(-sorted_scores, -sorted_scores[positives], side="right")
    return float((np.cumsum(hits)[last - 1] / last).mean())


def area_under_curve(labels: Floats, scores: Floats) -> float:
    """Chance that a case of label 1 scores above one of label 0, ties half: the area under the ROC curve."""
    positive = labels > 0.5
    ones, zeros = int(positive.sum()), int((~positive).sum())
    if not ones or not zeros:
        return nan
    ranks = rankdata(scores)
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def gap_auc(small_solved: Floats, large_solved: Floats, small: Floats, large: Floats) -> float:
    """How well ``large - small``, two models' confidences, tells the workflows that only the large one solves.

    `area_under_curve` over all workflows: 0.5 is chance, however good either confidence is by itself.
    """
    only_large = ((large_solved > 0.5) & (small_solved < 0.5)).astype(np.float64)
    return area_under_curve(only_large, large - small)


def brier_score(labels: Floats, probabilities: Floats) -> float:
    """Mean squared difference between probability and label (Brier, 1950); a constant p at base rate p has p(1 - p)."""
    return float(((probabilities - labels) ** 2).mean()) if len(labels) else nan


def expected_calibration_error(labels: Floats, probabilities: Floats, bins: int = 10) -> float:
    """Mean difference between probability and share of label 1 in bins of equal width, weighted by their counts.

    Guo et al. (2017), "On calibration of modern neural networks", with ten bins here.
    """
    if not len(labels):
        return nan
    which = np.minimum((probabilities * bins).astype(np.int64), bins - 1)
    gaps = np.bincount(which, weights=probabilities - labels, minlength=bins)
    return float(np.abs(gaps).sum() / len(labels))
