"""Capacity: the searches find what an exhaustive look would, and the command says it in 80 columns."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import chimsim.capacity as capacity
from chimsim.capacity import Found, Job, key_of, search
from chimsim.capacity_text import Row, against
from chimsim.errors import ChimsimError
from chimsim.grid import Cell, cells
from chimsim.slo import Goal, parse_slo
from chimsim.spec import spec_from
from chimsim.variants import at_rate
from tests.chimsim.small import run_chimsim, write_small

GOAL = Goal((parse_slo("p99_latency:60s"),))
Summary = dict[str, Any]


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    trace = write_small(tmp_path_factory.mktemp("trace"))
    return cells(spec_from({"trace": str(trace), "combo": "qwen1.5b+7b", "policy": "fcfs", "rps": 1}))[0]


def pretend(monkeypatch: pytest.MonkeyPatch, latency_s: Callable[[Cell], float], **more: object) -> list[Cell]:
    """Runs cost nothing and have this p99 latency; the cells that were run."""
    ran: list[Cell] = []

    def run(cell: Cell) -> tuple[None, Summary]:
        ran.append(cell)
        summary = {
            "solved_rate": 0.4, "mean_workflow_latency_s": 1.0, "p99_workflow_latency_s": latency_s(cell),
            "utilisation": 0.5, "not_steady": False, "rejected_workflows": 0,
        }  # fmt: skip
        return None, summary | more

    monkeypatch.setattr(capacity, "run_cell", run)
    return ran


@pytest.mark.parametrize("most", [0.02, 0.7, 1.0, 3.3, 1000.0])
def test_the_largest_rate_is_bracketed(cell: Cell, monkeypatch: pytest.MonkeyPatch, most: float) -> None:
    ran = pretend(monkeypatch, lambda c: 10.0 if (c.rps or 0) <= most else 90.0)
    found = search(Job(cell, GOAL, 0.02, 100.0))
    assert found.value is not None
    assert found.value <= most <= 1.021 * found.value
    assert found.misses == ("p99_latency:60s",)
    assert found.runs == len(ran) == len({c.name for c in ran})
    for each in ran:
        assert each.workflows == max(300, -(-(each.rps or 0) * 100 // 1))


def test_too_little_solved_at_a_low_rate_is_no_end(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle engines may solve less than busy ones: the largest good rate is looked for from above."""
    ran: list[Cell] = []

    def run(cell: Cell) -> tuple[None, Summary]:
        ran.append(cell)
        rate = cell.rps or 0.0
        return None, {
            "solved_rate": 0.4 if 2.5 <= rate <= 5.0 else 0.2, "mean_workflow_latency_s": 1.0,
            "p99_workflow_latency_s": 10.0 if rate <= 11.0 else 90.0, "utilisation": 0.5, "not_steady": False,
            "rejected_workflows": 0,
        }  # fmt: skip

    monkeypatch.setattr(capacity, "run_cell", run)
    found = search(Job(cell, replace(GOAL, min_solved=0.3), 0.02, 100.0))
    assert found.value == pytest.approx(5.0, rel=0.021)
    assert found.misses == ("min-solved",)


def test_a_goal_out_of_reach_and_one_that_says_nothing(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda c: 90.0)
    assert search(Job(cell, GOAL, 0.02, 100.0)).value is None
    pretend(monkeypatch, lambda c: 1.0)
    assert "says nothing of the load" in search(Job(cell, GOAL, 0.02, 100.0)).error
    pretend(monkeypatch, lambda c: 1.0, solved_rate=None)
    assert "no labels" in search(Job(cell, replace(GOAL, min_solved=0.3), 0.02, 100.0)).error


def test_what_a_good_run_must_keep() -> None:
    goal = replace(GOAL, min_solved=0.5)
    good: Summary = {
        "p99_workflow_latency_s": 60.0, "solved_rate": 0.5, "not_steady": False, "rejected_workflows": 0,
    }  # fmt: skip
    assert goal.misses(good) == []
    bad = {"p99_workflow_latency_s": 60.1, "solved_rate": 0.49, "not_steady": True, "rejected_workflows": 1}
    assert goal.misses(bad) == ["p99_latency:60s", "min-solved", "rejected", "not steady"]
    assert goal.misses(good | {"p99_workflow_latency_s": None}) == ["p99_latency:60s"]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(least=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=3))
def test_the_fewest_gpus_are_those_of_the_smallest_good_split(cell: Cell, least: list[tuple[int, int]]) -> None:
    """A split is good if it has at least the engines of one of ``least``."""

    def engines(each: Cell) -> tuple[int, int]:
        names = [spec.model for spec in each.cluster.engines]
        return names.count("Qwen2.5-1.5B"), names.count("Qwen2.5-7B")

    def good(split: tuple[int, int]) -> bool:
        return any(split[0] >= a and split[1] >= b for a, b in least)

    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, lambda c: 10.0 if good(engines(c)) else 90.0)
        found = search(Job(cell, GOAL, 0.02, 100.0, max_gpus=12))
    splits = [(a, b) for a in range(1, 12) for b in range(1, 12)]
    best = min(sum(split) for split in splits if good(split))
    assert found.value == best
    assert good((found.counts["Qwen2.5-1.5B"], found.counts["Qwen2.5-7B"]))
    assert sum(found.counts.values()) == best


def test_too_few_gpus_are_said(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda c: 90.0)
    assert search(Job(cell, GOAL, 0.02, 100.0, max_gpus=3)).value is None
    assert "needs at least 2" in search(Job(cell, GOAL, 0.02, 100.0, max_gpus=1)).error


def test_comparisons_are_paired_by_seed(cell: Cell) -> None:
    def row(*values: float | None) -> Row:
        return Row("x", "g", cell, tuple(Found(value, {}, {}, (), 1) for value in values))

    compared = against(row(2.0, 4.0, 8.0), row(1.0, 2.0, 4.0), gpus=False)
    assert compared == pytest.approx((2.0, 2.0, 2.0)), "each seed doubles, however much seeds differ"
    assert against(row(5.0, 7.0), row(8.0, 10.0), gpus=True) == pytest.approx((-3.0, -3.0, -3.0))
    assert against(row(2.0, None), row(1.0, 2.0), gpus=False) is None


@pytest.mark.parametrize(
    ("text", "key", "limit"),
    [
        ("p99_latency:60s", "p99_workflow_latency_s", 60.0),
        ("mean_latency:1500ms", "mean_workflow_latency_s", 1.5),
        ("p50_ttft:500ms", "median_ttft_ms", 500.0),
        ("p90_tpot:0.05s", "p90_tpot_ms", 50.0),
    ],
)
def test_objectives_are_read(text: str, key: str, limit: float) -> None:
    slo = parse_slo(text)
    assert slo.key == key
    assert slo.limit == pytest.approx(limit)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("p99_latency", "expected METRIC:LIMIT"),
        ("p99_latncy:60s", "did you mean 'p99_latency'?"),
        ("p99_latency:60", "expected a time above 0 such as 60s"),
        ("p99_latency:0s", "expected a time above 0"),
        ("p99_latency:-5s", "expected a time above 0"),
    ],
)
def test_wrong_objectives_are_said(text: str, message: str) -> None:
    with pytest.raises(ChimsimError, match=r".") as caught:
        parse_slo(text)
    assert message in str(caught.value)


def test_the_command_finds_keeps_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = write_small(tmp_path), tmp_path / "out"
    arguments = ["capacity", "--slo", "mean_latency:30s", "--trace", str(trace), "--combo", "qwen1.5b+7b", "--slots",
                 "4", "--policy", "fcfs,chimera", "--seeds", "2", "--span", "20", "--tolerance", "0.3",
                 "--out", str(out)]  # fmt: skip
    code, text, _ = run_chimsim(monkeypatch, capsys, *arguments)
    assert code == 0
    assert max(map(len, text.splitlines()[:-1])) <= 80
    assert "largest rate, workflows/s, within mean_latency:30s; 2 seeds" in text
    rows = json.loads((out / "capacity.json").read_text())["rows"]
    assert [row["axes"]["policy"] for row in rows] == ["fcfs", "chimera"]
    assert all(each["value"] > 0 for row in rows for each in row["by_seed"])
    assert (out / "capacity.png").is_file()
    monkeypatch.setattr(capacity, "run_cell", None)  # nothing is searched again
    again, repeated, err = run_chimsim(monkeypatch, capsys, *arguments)
    assert (again, repeated, err) == (code, text, "")


def test_another_search_does_not_take_the_answers_place_and_one_seed_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = write_small(tmp_path), tmp_path / "out"
    given = ["capacity", "--trace", str(trace), "--combo", "qwen1.5b+7b", "--policy", "fcfs,stjf", "--seeds", "1",
             "--span", "20", "--tolerance", "0.5", "--slots", "4", "--out", str(out)]  # fmt: skip
    code, text, _ = run_chimsim(monkeypatch, capsys, *given, "--slo", "mean_latency:30s")
    assert code == 0
    assert "times the load" not in text
    before = (out / "capacity.json").read_bytes()
    code, _, err = run_chimsim(monkeypatch, capsys, *given, "--slo", "mean_latency:20s")
    assert code == 2
    assert "holds another capacity search" in err
    assert (out / "capacity.json").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "fcfs"), "--slo is missing"),
        (("--slo", "p99_latency:60", "--policy", "fcfs"), "--slo: 'p99_latency:60': the limit is '60'"),
        (("--slo", "p99_latency:60s", "--policy", "fcsf"), "did you mean 'fcfs'?"),
        (("--slo", "p99_latency:60s", "--policy", "fcfs", "--rps", "1", "--max-gpus", "1"), "needs at least 2"),
    ],
)
def test_wrong_input_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    trace = write_small(tmp_path)
    code, out, err = run_chimsim(
        monkeypatch, capsys, "capacity", "--trace", str(trace), "--combo", "qwen1.5b+7b", *arguments
    )
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err


def test_searches_are_named_by_all_that_decides_them(cell: Cell) -> None:
    job = Job(cell, GOAL, 0.02, 100.0)
    changed = [
        replace(job, tolerance=0.1), replace(job, span_s=10.0), replace(job, max_gpus=4),
        replace(job, goal=replace(GOAL, min_solved=0.1)), replace(job, cell=at_rate(cell, 2.0, 10.0)),
    ]  # fmt: skip
    assert len({key_of(each) for each in (job, *changed)}) == 6
