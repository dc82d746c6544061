"""Heads of a router: calibrated probabilities from features, by logistic regression alone or beside a forest.

Labels may be missing (NaN). A fitted head is a few arrays; scikit-learn only fits it. It knows no models by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import expit, logit, softmax

from calibration.rows import TrainingError

Floats = npt.NDArray[np.float64]
Scores = Callable[[Any], Floats]

INNER_FOLDS = 5
_TREES = 150
_LEAST = 2 * INNER_FOLDS
"""Cases of a kind: fewer are not learned from."""


@dataclass(frozen=True)
class Linear:
    """Logistic regressions: one a column, or one softmax over ``sets`` (sets, columns) of columns that are 1."""

    weights: Floats
    bias: Floats
    sets: Floats | None = None

    def scores(self, sparse: Any, dense: Floats) -> Floats:
        """Log odds of each column being 1, (rows, columns); the sparse features have the first weights."""
        words = sparse.shape[1]
        found = sparse @ self.weights[:words] + dense @ self.weights[words:] + self.bias
        if self.sets is None:
            return np.asarray(found, np.float64)
        return _log_odds(softmax(found, axis=1) @ self.sets)


@dataclass(frozen=True)
class Forest:
    """Extremely randomised trees (Geurts et al., 2006) over all columns at once, their nodes in flat arrays.

    A leaf is its own child, so that all trees and rows go down together without asking who has arrived.
    """

    roots: npt.NDArray[np.int32]
    feature: npt.NDArray[np.int32]
    threshold: Floats
    children: npt.NDArray[np.int32]
    """(2 nodes,): of node i the right child at 2i, the left one at 2i + 1"""
    value: Floats
    """(nodes, columns): share of label 1"""
    depth: int

    @classmethod
    def fit(cls, x: Floats, columns: Floats, seed: int) -> Forest:
        """Columns may be shares; they must not be missing."""
        from sklearn.ensemble import ExtraTreesRegressor

        model = ExtraTreesRegressor(_TREES, min_samples_leaf=3, max_features=0.3, random_state=seed, n_jobs=1)
        fitted = model.fit(x, columns.ravel() if columns.shape[1] == 1 else columns)
        trees = [each.tree_ for each in fitted.estimators_]
        roots = np.cumsum([0, *(tree.node_count for tree in trees)])[:-1]
        children = []
        for root, tree in zip(roots, trees, strict=True):
            itself = np.arange(tree.node_count)
            for side in (tree.children_right, tree.children_left):
                children.append(np.where(side < 0, itself, side) + root)
        right, left = np.concatenate(children[::2]), np.concatenate(children[1::2])
        return cls(
            roots.astype(np.int32),
            np.maximum(np.concatenate([tree.feature for tree in trees]), 0).astype(np.int32),
            np.concatenate([tree.threshold for tree in trees]),
            np.stack([right, left], axis=1).ravel().astype(np.int32),
            np.concatenate([tree.value[:, :, 0] for tree in trees]),
            max(tree.max_depth for tree in trees),
        )

    def scores(self, x: Floats) -> Floats:
        """Log odds of each column, (rows, columns)."""
        x = x.astype(np.float32)
        rows = np.arange(len(x))[:, None]
        node = np.broadcast_to(self.roots, (len(x), len(self.roots)))
        for _ in range(self.depth):
            node = self.children[2 * node + (x[rows, self.feature[node]] <= self.threshold[node])]
        return _log_odds(self.value[node].mean(axis=1))


@dataclass(frozen=True)
class Head:
    """Calibrated probabilities: a line over the linear scores, or over their mean with the forest's."""

    linear: Linear
    forest: Forest | None
    slope: Floats
    offset: Floats

    def probabilities(self, sparse: Any, dense: Floats, forest_features: Floats | None) -> Floats:
        """(rows, columns), each in 0 to 1 by itself."""
        scores = self.linear.scores(sparse, dense)
        if self.forest is not None:
            assert forest_features is not None
            scores = (scores + self.forest.scores(forest_features)) / 2
        return np.asarray(expit(self.slope * scores + self.offset), np.float64)


def fit_head(sparse: Any, dense: Floats, columns: Floats, seed: int, *, joint: bool, trees: Floats | None) -> Head:
    """Fit a head, and calibrate it on scores of rows that inner folds have held out.

    Args:
        sparse, dense: the two parts of the features, (rows, features).
        columns: (rows, columns) of 0, 1 and NaN.
        seed: of the inner folds and the trees.
        joint: one softmax over the sets of columns that are 1, instead of a regression a column.
        trees: features of the forest, (rows, features); None for no forest.

    Raises:
        TrainingError: joint, and too few rows have all their labels.
    """
    from sklearn.model_selection import KFold

    if joint:
        kept = _common_sets(columns)
        sparse, dense, columns = sparse[kept], dense[kept], columns[kept]
        trees = None if trees is None else trees[kept]
    held_out = np.empty(columns.shape)
    for learn, test in KFold(INNER_FOLDS, shuffle=True, random_state=seed).split(columns):
        held_out[test] = _fit_linear(sparse[learn], dense[learn], columns[learn], joint).scores(
            sparse[test], dense[test]
        )
    linear = _fit_linear(sparse, dense, columns, joint)
    forest = None
    if trees is not None:
        # a missing label counts as what the linear head expects of a row that it has not seen
        whole = np.where(np.isnan(columns), expit(held_out), columns)
        for learn, test in KFold(INNER_FOLDS, shuffle=True, random_state=seed).split(columns):
            held_out[test] = (held_out[test] + Forest.fit(trees[learn], whole[learn], seed).scores(trees[test])) / 2
        forest = Forest.fit(trees, whole, seed)
    lines = []
    for scores, labels in zip(held_out.T, columns.T, strict=True):
        known = ~np.isnan(labels)
        lines.append(platt(scores[known], labels[known]))
    slope, offset = np.array(lines, np.float64).T
    return Head(linear, forest, slope, offset)


def platt(scores: Floats, labels: Floats) -> tuple[float, float]:
    """Slope and offset that turn scores into calibrated log odds (Platt, 1999); the slope is never below 0.

    With few cases of one kind, or scores that say nothing: slope 0 and the log odds of the rate.
    """
    from sklearn.linear_model import LogisticRegression

    spread = float(scores.std()) if len(scores) else 0.0
    if _rarer(labels) < _LEAST or spread < 1e-9:
        return 0.0, _rate(labels)
    fitted = LogisticRegression(C=100.0).fit(scores[:, None] / spread, labels)
    slope = float(fitted.coef_[0, 0]) / spread
    return (slope, float(fitted.intercept_[0])) if slope > 0 else (0.0, _rate(labels))


def _fit_linear(sparse: Any, dense: Floats, columns: Floats, joint: bool) -> Linear:
    import scipy.sparse
    from sklearn.linear_model import LogisticRegression

    x = scipy.sparse.hstack([sparse, scipy.sparse.csr_matrix(dense)]).tocsr()
    model = LogisticRegression(C=0.5, max_iter=2000)
    if joint:
        sets, which = np.unique(columns, axis=0, return_inverse=True)
        if len(sets) < 2:
            return Linear(np.zeros((x.shape[1], 1)), np.zeros(1), sets)
        fitted = model.fit(x, which.ravel())
        weights, bias = fitted.coef_.T, fitted.intercept_
        if len(sets) == 2:
            weights, bias = np.concatenate([0 * weights, weights], axis=1), np.array([0.0, bias[0]])
        return Linear(weights, bias, sets)
    weights, bias = np.zeros((x.shape[1], columns.shape[1])), np.zeros(columns.shape[1])
    for c, labels in enumerate(columns.T):
        known = ~np.isnan(labels)
        if _rarer(labels[known]) < _LEAST // 2:
            bias[c] = _rate(labels[known])
            continue
        fitted = model.fit(x[known], labels[known])
        weights[:, c], bias[c] = fitted.coef_[0], fitted.intercept_[0]
    return Linear(weights, bias)


def _common_sets(columns: Floats) -> npt.NDArray[np.bool_]:
    """Rows with all labels whose set of ones is not rare: of a rare one there is nothing to learn."""
    whole = ~np.isnan(columns).any(axis=1)
    sets, which = np.unique(columns[whole], axis=0, return_inverse=True)
    common = np.bincount(which.ravel(), minlength=len(sets)) >= _LEAST
    if common.sum() < 2:
        raise TrainingError(
            f"target joint: {int(whole.sum())} workflows have the labels of all models, and of their sets of solvers "
            f"{int(common.sum())} occur {_LEAST} times; expected at least 2 such sets, or use target solved"
        )
    kept = np.zeros(len(columns), bool)
    kept[np.flatnonzero(whole)[common[which.ravel()]]] = True
    return kept


def _rarer(labels: Floats) -> int:
    return int(min(labels.sum(), (1 - labels).sum()))


def _rate(labels: Floats) -> float:
    """Log odds of the rate, with a case of each kind added."""
    return float(logit((labels.sum() + 1) / (len(labels) + 2)))


def _log_odds(probabilities: Floats) -> Floats:
    return np.asarray(logit(np.clip(probabilities, 1e-3, 1 - 1e-3)), np.float64)
