"""The frontier in numbers: hypervolume and what is attained against counting cells, and the choice of a setting."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimsim.frontier import (
    Frontier,
    attained,
    convex_frontier,
    frontier_of,
    hypervolume,
    reference_point,
)

grid = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=8)


@given(grid, st.integers(0, 12), st.integers(0, 12))
def test_hypervolume_counts_the_unit_squares_that_a_point_dominates(
    points: list[tuple[int, int]], latency: int, solved: int
) -> None:
    squares = sum(
        any(x <= column and y >= row + 1 for x, y in points) for column in range(latency) for row in range(solved, 13)
    )
    assert hypervolume([(float(x), float(y)) for x, y in points], (latency, solved)) == pytest.approx(squares)


@given(grid)
def test_a_dominated_point_adds_nothing_and_every_point_dominates_the_reference(
    points: list[tuple[int, int]],
) -> None:
    real = [(float(x), float(y)) for x, y in points]
    reference = reference_point(real)
    volume = hypervolume(real, reference)
    worst = (max(x for x, _ in real), min(y for _, y in real))
    assert hypervolume([*real, worst], reference) == pytest.approx(volume)
    assert all(x <= reference[0] and y >= reference[1] for x, y in real)
    assert volume <= (reference[0] - min(x for x, _ in real)) * (max(y for _, y in real) - reference[1]) + 1e-9


@given(grid)
def test_attained_is_the_best_of_those_fast_enough(points: list[tuple[int, int]]) -> None:
    at = np.arange(-1.0, 14.0)
    found = attained([(float(x), float(y)) for x, y in points], at)
    for latency, value in zip(at, found, strict=True):
        best = [y for x, y in points if x <= latency]
        assert np.isnan(value) if not best else value == max(best)


def rows() -> pd.DataFrame:
    """Two taus and two seeds; tau 0 lacks nothing, tau 4 has a third seed."""
    return pd.DataFrame(
        {
            "tau": [0.0, 0.0, 4.0, 4.0, 4.0],
            "seed": [0, 1, 0, 1, 2],
            "mean_workflow_latency_s": [2.0, 4.0, 6.0, 8.0, 9.0],
            "solved_rate": [0.2, 0.4, 0.5, 0.7, 0.9],
        }
    )


def test_a_line_keeps_the_seeds_that_all_settings_have() -> None:
    line = frontier_of(rows(), ["tau"])
    assert line is not None
    assert line.settings == ("tau 0", "tau 4")
    assert np.array(line.means) == pytest.approx(np.array([(3.0, 0.3), (7.0, 0.6)]))
    assert line.hypervolumes((10.0, 0.2)) == pytest.approx([4.0 * 0.3, 6.0 * 0.2 + 2.0 * 0.3])
    assert frontier_of(rows().assign(solved_rate=np.nan), ["tau"]) is None


def test_who_is_on_the_frontier_and_in_how_many_seeds() -> None:
    line = frontier_of(rows(), ["tau"])
    assert line is not None
    # as good as tau 0 on average, faster in the second seed only
    rival = Frontier(("x",), (0, 1), np.array([[3.5, 2.0]]), np.array([[0.3, 0.4]]))
    assert line.on_frontier([line, rival]) == [(False, 0.5), (True, 1.0)]
    assert rival.on_frontier([line, rival]) == [(True, 1.0)]


def test_the_band_is_an_interval_over_the_seeds() -> None:
    line = frontier_of(rows(), ["tau"])
    assert line is not None
    mean, low, high = line.band(np.array([1.0, 5.0, 20.0]))
    assert np.isnan(mean[0])
    assert mean[1:] == pytest.approx([0.3, 0.6])
    assert (low[1:] < mean[1:]).all()
    assert (high[1:] > mean[1:]).all()


def test_corners_are_what_no_two_settings_in_turn_beat() -> None:
    points = [(5.0, 0.5), (3.0, 0.4), (4.5, 0.42), (6.0, 0.45), (7.0, 0.55)]
    assert convex_frontier(points) == [1, 0, 4]
    assert convex_frontier([(1.0, 0.2)]) == [0]


@given(grid, st.integers(0, 12))
def test_no_mixture_of_two_is_faster_than_one_of_neighbouring_corners(
    points: list[tuple[int, int]], least: int
) -> None:
    real = [(float(x), float(y)) for x, y in points]
    corners = convex_frontier(real)
    shares = np.linspace(0, 1, 25)

    def fastest(pairs: list[tuple[int, int]]) -> float:
        mixed = [
            (share * real[a][0] + (1 - share) * real[b][0], share * real[a][1] + (1 - share) * real[b][1])
            for a, b in pairs
            for share in [
                *shares,
                *([(least - real[b][1]) / (real[a][1] - real[b][1])] if real[a][1] != real[b][1] else []),
            ]
            if 0 <= share <= 1
        ]
        return min((latency for latency, solved in mixed if solved >= least - 1e-9), default=np.inf)

    everyone = [(a, b) for a in range(len(real)) for b in range(len(real))]
    neighbours = [(a, a) for a in corners] + list(itertools.pairwise(corners))
    assert fastest(neighbours) == pytest.approx(fastest(everyone), abs=1e-6)
