"""Tuning: it finds what is there to find, the same whatever interrupts it, and does not sell noise as a gain."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import chimsim.tune as tune
from chimsim.errors import ChimsimError
from chimsim.grid import Cell, cells
from chimsim.spec import spec_from
from chimsim.tune import Objective, Range, Runs, Setting, changed, gain, ranges_for, search
from tests.chimsim.small import run_chimsim, write_small

pytest.importorskip("optuna")
LATENCY = Objective("mean_workflow_latency_s")


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    trace = write_small(tmp_path_factory.mktemp("trace"))
    return cells(spec_from({"trace": trace, "combo": "qwen1.5b+7b", "policy": "chimera", "rps": 1}))[0]


def pretend(monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    """Runs cost nothing: latency is least at tau 2.5, and what is solved rises with tau. The cells that were run."""
    ran: list[Cell] = []

    def run(cell: Cell) -> tuple[None, dict[str, Any]]:
        ran.append(cell)
        tau = float(str(cell.knobs.get("tau", 0.5)))
        value = 10.0 + (tau - 2.5) ** 2 + 0.01 * (cell.seed % 7)
        return None, dict.fromkeys(tune.KEPT, 0.0) | {LATENCY.key: value, "solved_rate": 0.1 * tau}

    monkeypatch.setattr(tune, "run_cell", run)
    return ran


RANGES = [Range("tau", 0.0, 4.0)]


def test_the_search_finds_the_minimum_and_the_same_again(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = pretend(monkeypatch)
    best = search(cell, RANGES, LATENCY, [1000, 1001], 36, Runs(1), seed=0)
    assert best["tau"] == pytest.approx(2.5, abs=0.2)
    assert {each.seed for each in ran} == {1000, 1001}
    assert search(cell, RANGES, LATENCY, [1000, 1001], 36, Runs(1), seed=0) == best


def test_enough_must_be_solved_before_anything_is_gained(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    goal = Objective(LATENCY.key, min_solved=0.33)
    best = search(cell, RANGES, goal, [1000], 36, Runs(1), seed=0)
    assert best["tau"] == pytest.approx(3.3, abs=0.15)
    assert float(str(best["tau"])) >= 3.3
    out_of_reach = search(cell, RANGES, Objective(LATENCY.key, 0.9), [1000], 24, Runs(1), seed=0)
    assert out_of_reach["tau"] == pytest.approx(4.0, abs=0.2), "what solves most is nearest"


def test_kept_runs_are_not_run_again(cell: Cell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = pretend(monkeypatch)
    first = search(cell, RANGES, LATENCY, [1000], 12, Runs(1, tmp_path), seed=0)
    kept = sorted(os.listdir(tmp_path))
    assert len(kept) == len(ran)
    for name in kept[::2]:
        (tmp_path / name).write_text("{" if name == kept[0] else "[]")  # damaged ones are
    ran.clear()
    assert search(cell, RANGES, LATENCY, [1000], 12, Runs(1, tmp_path), seed=0) == first
    assert len(ran) == len(kept[::2])


def test_slots_and_knobs_are_changed(cell: Cell) -> None:
    made = changed(cell, {"tau": 1.5, "slots": 7})
    assert made.knobs["tau"] == 1.5
    assert {spec.max_batch_size for spec in made.cluster.engines} == {7}
    assert made.name not in (cell.name, changed(cell, {"tau": 1.5}).name)


def test_a_gain_is_certain_only_if_its_interval_is() -> None:
    def setting(*values: float) -> Setting:
        return Setting("x", {}, values, (1.0,) * len(values))

    clear = gain(setting(9.0, 4.5, 18.0), setting(10.0, 5.0, 20.0), "b")
    assert clear.percent == pytest.approx(10.0)
    assert clear.certain
    noise = gain(setting(9.0, 11.0, 10.0), setting(10.0, 10.0, 10.5), "b")
    assert noise.low < 0.0 < noise.high
    assert not noise.certain


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tau", "expected name=low..high"),
        ("tau=1..x", "expected name=low..high"),
        ("tau=2..1", "expected 0 <= low < high"),
        ("tau=0..1:log", "low above 0 with :log"),
        ("tao=0..1", "no knob 'tao'; did you mean 'tau'?"),
        ("slots=1.5..4", "slots takes whole numbers"),
    ],
)
def test_wrong_ranges_are_said(text: str, message: str) -> None:
    with pytest.raises(ChimsimError, match=r".") as caught:
        ranges_for("chimera", [text])
    assert message in str(caught.value)


def test_ranges_are_the_policys_own_or_the_users() -> None:
    assert [each.name for each in ranges_for("chimera", [])] == ["tau", "delta_s", "aging_tokens_per_s"]
    assert [each.name for each in ranges_for("stjf", [])] == ["aging_tokens_per_s"]
    assert ranges_for("ltr", ["starvation_steps=10..2000:log"]) == [Range("starvation_steps", 10, 2000, True, True)]
    with pytest.raises(ChimsimError, match="fcfs has no knob with a range"):
        ranges_for("fcfs", [])


def test_the_command_tunes_judges_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = write_small(tmp_path), tmp_path / "out"
    arguments = ["tune", "--trace", trace, "--combo", "qwen1.5b+7b", "--rps", "20", "--slots", "4", "--trials", "4",
                 "--search-seeds", "1", "--judge-seeds", "2", "--min-solved", "0.1", "--out", str(out)]  # fmt: skip
    code, text, _ = run_chimsim(monkeypatch, capsys, *arguments)
    assert code == 0
    table = [line for line in text.splitlines() if not line.startswith(("use it", "written"))]
    assert max(map(len, table)) <= 80
    for words in ("chimera, tuned", "chimera, as it is", "stjf", "found: tau "):
        assert words in text
    assert ("use it: --policy chimera --knob tau=" in text) != ("keep chimera as it is" in text)
    result = json.loads((out / "tune.json").read_text())
    assert set(result["search_seeds"]).isdisjoint(result["judge_seeds"])
    monkeypatch.setattr(tune, "run_cell", None)
    assert run_chimsim(monkeypatch, capsys, *arguments)[:2] == (0, text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--objective", "latency"), "--objective: 'latency' is unknown"),
        (("--policy", "chimra"), "did you mean 'chimera'?"),
        (("--rps", "1,2"), "tune takes one value of everything; there are several of rps"),
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
    given = ("--rps", "1", *arguments)
    code, out, err = run_chimsim(monkeypatch, capsys, "tune", "--trace", trace, "--combo", "qwen1.5b+7b", *given)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err
