"""`chimsim reproduce` as a user runs it: small experiments of every kind, resumed, judged, written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from chimsim.reproduce.experiment import read_experiment
from chimsim.reproduce.running import run_experiment
from tests.chimsim.small import run_chimsim, small_trace, write_small
from traces import write_trace

Chimsim = Callable[..., tuple[int, str, str]]

SWEEP = """
trace = "{trace}"
combo = "qwen1.5b+7b"
policy = ["fcfs", "stjf", "chimera"]
tau = [0, inf]
rps = 20
slots = 2
seeds = 3

[experiment]
title = "Small"
question = "Does it run?"

[quick]
workflows = 20

[choose]
seeds = [7, 8]

[[relation]]
claim = "stjf.mean_queue_time_s < fcfs.mean_queue_time_s"
says = "STJF waits less"
paper = "yes"

[[relation]]
claim = "chimera dominates fcfs"
says = "Chimera dominates"

[[relation]]
claim = "fcfs.p99_workflow_latency_s < 0.001"
says = "nobody waits"
"""


LEARNED = """
trace = "small.jsonl"
combo = "qwen1.5b+7b"
policy = ["fcfs", "stjf"]
rps = 20
split = "test"
length_predictor = "qrf:{models}/{trace}/length"

[experiment]
title = "Learned"
question = "Does it learn?"

[prepare]
predictor = true
test_share = 0.5

[[relation]]
claim = "stjf.mean_queue_time_s < fcfs.mean_queue_time_s"
says = "STJF waits less"
"""


@pytest.fixture
def chimsim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Chimsim:
    """The command line, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: run_chimsim(monkeypatch, capsys, *words)


def experiment(folder: Path, text: str, name: str = "small") -> str:
    path = folder / f"{name}.toml"
    path.write_text(text.replace("{trace}", write_small(folder)))
    return str(path)


def test_a_sweep_is_run_judged_and_written(chimsim: Chimsim, tmp_path: Path) -> None:
    path = experiment(tmp_path, SWEEP)
    code, out, _ = chimsim("reproduce", path, "--out", "out", "--workers", "1", "--no-report")
    assert code == 0
    assert "small: Small\nDoes it run?" in out
    assert "holds      STJF waits less" in out
    assert "FAILS      nobody waits" in out
    assert max(map(len, out.splitlines()[:10])) <= 80
    found = json.loads(Path("out/small/experiment.json").read_text())
    assert [relation["verdict"] for relation in found["relations"]][::2] == ["holds", "fails"]
    assert found["made"]["command"] == f"chimsim reproduce {path}"
    assert Path("out/small-choose/manifest.json").is_file()
    assert "| STJF waits less | yes | " in Path("out/summary.md").read_text()
    blocks = pd.read_csv("out/blocks.csv")
    assert set(blocks["claim"]) == {relation["claim"] for relation in found["relations"]}
    # nothing is simulated again
    before = Path("out/small/summary.parquet").stat().st_mtime_ns, found
    code, out, _ = chimsim("reproduce", path, "--out", "out", "--workers", "1", "--no-report", "--json")
    again = json.loads(out)["experiments"][0]
    assert again["relations"] == found["relations"]
    assert json.loads(Path("out/small/run.json").read_text())["runs"][-1]["cells_run"] == 0
    assert before[1]["made"]["wall_s"] <= again["made"]["wall_s"]


def test_models_are_trained_once_for_each_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_trace(small_trace(120), tmp_path / "small.jsonl")
    path = tmp_path / "learned.toml"
    path.write_text(LEARNED)
    outcome = run_experiment(read_experiment(path), tmp_path / "out", workers=1)
    (folder,) = (tmp_path / "out" / "models").glob("*/small/length")
    assert set(outcome.summary["length_predictor"].dropna()) == {"length"}
    trained = (folder / "manifest.json").stat().st_mtime_ns
    run_experiment(read_experiment(path), tmp_path / "out", workers=1)
    assert (folder / "manifest.json").stat().st_mtime_ns == trained


def test_a_study_of_lengths_is_drawn_and_kept(chimsim: Chimsim, tmp_path: Path) -> None:
    text = """trace = ["{trace}"]
[experiment]
title = "Lengths"
question = "How long?"
kind = "lengths"
[[relation]]
claim = "Qwen2.5-1.5B.mean_output_tokens > 10"
says = "not empty"
"""
    path = experiment(tmp_path, text, "lengths")
    code, out, _ = chimsim("reproduce", path, "--out", "out")
    assert code == 0
    assert "holds      not empty" in out
    assert Path("out/lengths/lengths.png").stat().st_size > 1000
    rows = pd.read_csv("out/lengths/rows.csv")
    tokens = [sum(s.output_tokens for s in w.runs["Qwen2.5-7B"].stages) for w in small_trace().workflows]
    mine = rows[rows["policy"] == "Qwen2.5-7B"]
    assert mine["mean_output_tokens"].mean() == pytest.approx(sum(tokens) / len(tokens))
    code, again, _ = chimsim("reproduce", path, "--out", "out")
    assert again == out


def test_the_list_and_what_is_missing(chimsim: Chimsim, tmp_path: Path) -> None:
    experiment(tmp_path, SWEEP.replace("[experiment]", '[experiment]\nneeds = "some trace"'))
    code, _, err = chimsim("reproduce", "small.toml", "--out", "out")
    assert code == 2
    assert "needs some trace as FOLDER/small.jsonl of --data FOLDER; --data is not given" in err
    code, _, err = chimsim("reproduce", "smal.toml")
    assert (code, err) == (2, "chimsim: error: experiment smal.toml: no such file\n")
