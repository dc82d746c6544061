"""The order of cells, and how long is left, by a clock that is made up."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimsim.forecast import FACTORS, Forecast, longest_first, seconds
from chimsim.grid import cells
from chimsim.spec import spec_from
from tests.chimsim.small import small_keys, write_small


class Work:
    """Parts that ``workers`` do in order, ``late_s`` after the beginning; what is said to be left after each."""

    def __init__(self, takes_s: Mapping[str, float], workers: int, late_s: float = 0.0) -> None:
        free = [late_s] * workers
        ends = []
        for name, each in takes_s.items():
            begin = heapq.heappop(free)
            heapq.heappush(free, begin + each)
            ends.append((begin + each, name))
        self.ends = sorted(ends)
        self.takes_s = takes_s
        self.workers = workers
        self.now = 0.0

    def told(self, expected_s: Mapping[str, float], kinds: Mapping[str, str]) -> list[tuple[float, float, float]]:
        """After each part: (share done, left by the forecast, what it really was)."""
        forecast = Forecast(expected_s, kinds, clock=lambda: self.now)
        assert forecast.left_s() is None
        assert forecast.share == 0
        forecast.workers = self.workers
        last = self.ends[-1][0]
        found = []
        for end, name in self.ends:
            self.now = end
            forecast.finished(name, self.takes_s[name])
            left_s = forecast.left_s()
            assert left_s is not None
            found.append((forecast.share, left_s, last - self.now))
        return found


def slow_and_fast(slow: int, fast: int) -> tuple[dict[str, float], dict[str, str]]:
    expected_s = {f"slow {n}": 8.0 for n in range(slow)} | {f"fast {n}": 1.0 for n in range(fast)}
    return expected_s, {name: name.split()[0] for name in expected_s}


def test_long_ones_first_do_not_make_the_rest_look_long() -> None:
    """Four of 8 s and 64 of 1 s by two: when the long ones are done 6 % of the parts are, and a third of the work."""
    expected_s, kinds = slow_and_fast(4, 64)
    told = Work(expected_s, 2).told(expected_s, kinds)
    assert told[3] == pytest.approx((1 / 3, 32.0, 32.0))
    for _, left_s, real_s in told:
        assert left_s == pytest.approx(real_s, abs=1.0)


def test_an_estimate_that_is_wrong_is_corrected_policy_by_policy() -> None:
    """Slow ones take twice what was expected and fast ones half: it is known once one of each has ended."""
    expected_s, kinds = slow_and_fast(4, 64)
    takes_s = {name: each * (2.0 if kinds[name] == "slow" else 0.5) for name, each in expected_s.items()}
    told = Work(takes_s, 2).told(expected_s, kinds)
    assert told[3][1] == pytest.approx(2 * 32.0), "nothing is known of the fast ones yet but that all were late"
    assert told[6][1] == pytest.approx(told[6][2], abs=1.5)
    assert told[-1][:2] == (1.0, 0.0)


def test_workers_that_begin_late_are_not_taken_for_slow_ones() -> None:
    expected_s, kinds = slow_and_fast(0, 20)
    told = Work(expected_s, 4, late_s=30.0).told(expected_s, kinds)
    assert told[4][1] == pytest.approx(told[4][2], abs=1.0)


def test_it_runs_down_between_two_ends() -> None:
    now = 0.0
    forecast = Forecast({"a": 10.0, "b": 10.0}, {"a": "x", "b": "x"}, clock=lambda: now)
    now = 10.0
    forecast.finished("a", 10.0)
    seen = []
    for now in (10.0, 14.0, 25.0):  # noqa: B007
        seen.append(forecast.left_s())
    assert seen == [10.0, 6.0, 0.0]


@given(
    st.lists(st.floats(0.01, 100.0), min_size=1, max_size=40),
    st.integers(1, 8),
    st.floats(0.1, 10.0),
)
def test_if_all_take_as_many_times_longer_it_is_exact(expected: Sequence[float], workers: int, ratio: float) -> None:
    expected_s = {str(number): each for number, each in enumerate(expected)}
    kinds = dict.fromkeys(expected_s, "x")
    work = Work({name: ratio * each for name, each in expected_s.items()}, workers)
    longest_s = ratio * max(expected)
    for share, left_s, real_s in work.told(expected_s, kinds):
        assert 0 <= share <= 1 + 1e-9
        # made anew once a second at most; and who ends first may not be who was to
        assert left_s == pytest.approx(real_s, abs=longest_s + 1.0)


def test_slow_policies_and_more_workflows_come_first(tmp_path: Path) -> None:
    trace = write_small(tmp_path, count=12)
    keys = small_keys(trace) | {"policy": "fcfs,mlfq,chimera", "tau": "0,1"}
    found = cells(spec_from(keys))
    assert [cell.policy for cell in longest_first(found)] == ["mlfq"] * 2 + [
        cell.policy for cell in found if cell.policy != "mlfq"
    ]
    assert [cell.name for cell in longest_first(found)][2:] == [cell.name for cell in found if cell.policy != "mlfq"]
    fcfs, mlfq = found[0], next(cell for cell in found if cell.policy == "mlfq")
    assert seconds(mlfq) == pytest.approx(FACTORS["mlfq"] * seconds(fcfs))
    (more,) = cells(spec_from(keys | {"policy": "fcfs", "tau": None, "seeds": 1, "workflows": 120}))
    assert seconds(more) == pytest.approx(10 * seconds(fcfs))
