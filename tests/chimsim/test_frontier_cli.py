"""`chimsim frontier` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from chimsim.frontier import hypervolume
from chimsim.sweeps import sweep
from tests.chimsim.small import run_chimsim, small_keys, write_small


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sweep(out=tmp_path / "x", **small_keys(write_small(tmp_path)))
    return tmp_path / "x"


def test_points_and_what_they_cover(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_chimsim(monkeypatch, capsys, "frontier", folder)
    assert (code, err) == (0, "")
    assert out.startswith("qwen1.5b+7b  small, 20 rps\n")
    assert max(map(len, out.splitlines())) <= 80
    code, text, _ = run_chimsim(monkeypatch, capsys, "frontier", folder, "--json", "--reference", "50,0")
    (block,) = json.loads(text)["blocks"]
    assert block["reference"] == [50.0, 0.0]
    summary = pd.read_csv(folder / "summary.csv")
    fcfs = summary[summary["policy"] == "fcfs"]
    runs = zip(fcfs["mean_workflow_latency_s"].to_list(), fcfs["solved_rate"].to_list(), strict=True)
    each = [hypervolume([(float(latency), float(solved))], (50.0, 0.0)) for latency, solved in runs]
    assert block["hypervolume"]["fcfs"]["mean"] == pytest.approx(sum(each) / len(each))
    assert {point["policy"] for point in block["points"]} == {"fcfs", "chimera"}
    assert any(point["not_dominated"] for point in block["points"])


def test_bands_are_written_and_rise(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run_chimsim(monkeypatch, capsys, "frontier", folder, "--csv", tmp_path / "bands.csv")
    bands = pd.read_csv(tmp_path / "bands.csv")
    chimera = bands[bands["policy"] == "chimera"]
    assert chimera["solved_rate"].is_monotonic_increasing
    assert (chimera["low"] <= chimera["solved_rate"]).all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--latency", "p98"), "latency 'p98' is unknown; choose from mean, p99, per-token"),
        (("--reference", "60"), "--reference: '60' is not of the form LATENCY,SOLVED, such as 60,0.2"),
        (("--reference", "60,7"), "expected a latency above 0 and a solved rate between 0 and 1"),
    ],
)
def test_wrong_words(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    message: str,
) -> None:
    code, out, err = run_chimsim(monkeypatch, capsys, "frontier", folder, *words)
    assert (code, out) == (2, "")
    assert message in err
