"""Scores against definitions written the slow way, and values known beforehand."""

from __future__ import annotations

from itertools import combinations
from math import isnan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics

from calibration.scores import (
    Floats,
    area_under_curve,
    average_precision,
    brier_score,
    coverage,
    expected_calibration_error,
    gap_auc,
    kendall_distance,
    pinball_loss,
)

few = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12)
labelled = st.lists(st.tuples(st.booleans(), st.integers(0, 10)), min_size=1, max_size=30)


def columns(pairs: list[tuple[float, float]]) -> tuple[Floats, Floats]:
    array = np.array(pairs, np.float64)
    return array[:, 0], array[:, 1]


@given(few)
def test_kendall_distance_counts_pairs(pairs: list[tuple[int, int]]) -> None:
    true, predicted = columns([(float(a), float(b)) for a, b in pairs])
    wrong, counted = 0.0, 0
    for i, j in combinations(range(len(true)), 2):
        if true[i] != true[j]:
            counted += 1
            product = (true[i] - true[j]) * (predicted[i] - predicted[j])
            wrong += 0.5 if product == 0 else product < 0
    assert kendall_distance(true, predicted) == pytest.approx(wrong / counted if counted else 0.0)


@given(labelled)
def test_average_precision_and_area_are_those_of_scikit_learn(cases: list[tuple[bool, int]]) -> None:
    labels, scores = columns([(float(label), score / 10) for label, score in cases])
    if labels.any():
        assert average_precision(labels, scores) == pytest.approx(metrics.average_precision_score(labels, scores))
    else:
        assert isnan(average_precision(labels, scores))
    if 0 < labels.sum() < len(labels):
        assert area_under_curve(labels, scores) == pytest.approx(metrics.roc_auc_score(labels, scores))
    else:
        assert isnan(area_under_curve(labels, scores))


def test_a_constants_average_precision_is_the_base_rate() -> None:
    labels = np.array([1.0, 1.0, 0.0, 0.0, 0.0])
    assert average_precision(labels, np.full(5, 0.3)) == pytest.approx(0.4)


def test_pinball_loss_weighs_what_is_missing_by_the_quantile() -> None:
    true = np.array([10.0])
    assert pinball_loss(true, np.array([6.0]), 0.9) == pytest.approx(3.6)
    assert pinball_loss(true, np.array([14.0]), 0.9) == pytest.approx(0.4)
    assert pinball_loss(true, np.array([14.0]), 0.5) == pytest.approx(2.0)


@given(st.lists(st.integers(0, 50), min_size=3, max_size=20), st.sampled_from([0.1, 0.5, 0.9]))
def test_no_constant_has_a_lower_pinball_loss_than_the_quantile(values: list[int], quantile: float) -> None:
    true = np.array(values, np.float64)
    best = pinball_loss(true, np.full(len(true), np.quantile(true, quantile, method="inverted_cdf")), quantile)
    assert best == pytest.approx(min(pinball_loss(true, np.full(len(true), float(c)), quantile) for c in range(51)))


def test_coverage_counts_both_ends() -> None:
    true = np.array([1.0, 2.0, 3.0, 4.0])
    assert coverage(true, np.full(4, 2.0), np.full(4, 3.0)) == 0.5


def test_gap_auc_is_of_the_workflows_that_only_the_large_model_solves() -> None:
    small_solved, large_solved = np.array([0.0, 1.0, 0.0, 1.0]), np.array([1.0, 1.0, 0.0, 0.0])
    flat = np.full(4, 0.5)
    assert gap_auc(small_solved, large_solved, flat, np.array([0.9, 0.6, 0.5, 0.1])) == 1.0
    assert gap_auc(small_solved, large_solved, flat, flat) == 0.5
    # confidence that knows who solves what, and no more of the large model than of the small, is chance
    assert gap_auc(small_solved, large_solved, small_solved, small_solved) == 0.5


def test_calibration_errors_of_known_cases() -> None:
    labels = np.array([1.0, 0.0, 1.0, 0.0])
    assert expected_calibration_error(labels, np.full(4, 0.5)) == 0.0
    assert expected_calibration_error(labels, np.full(4, 0.8)) == pytest.approx(0.3)
    assert expected_calibration_error(labels, labels) == 0.0
    # errors of opposite sign cancel within a bin and not between bins
    assert expected_calibration_error(labels, np.array([0.0, 1.0, 0.0, 1.0])) == pytest.approx(1.0)
    assert brier_score(labels, np.full(4, 0.5)) == 0.25
    assert brier_score(labels, labels) == 0.0


def test_nothing_to_score_is_nan() -> None:
    nothing = np.zeros(0)
    assert isnan(pinball_loss(nothing, nothing, 0.5))
    assert isnan(coverage(nothing, nothing, nothing))
    assert isnan(brier_score(nothing, nothing))
    assert isnan(expected_calibration_error(nothing, nothing))
