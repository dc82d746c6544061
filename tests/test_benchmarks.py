"""The benchmark of speed runs, and writes numbers that fit together; how large they are is the machine's business."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import speed
from benchmarks.measure import measure
from benchmarks.workloads import scenarios

ROOT = Path(__file__).resolve().parent.parent


def run_speed(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "speed.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def measured(name: str, folder: Path, calls: int, **more: Any) -> dict[str, Any]:
    scenario = scenarios(False, folder / "conversation.jsonl.gz")[name]
    return measure(scenario.job(folder, "chimera", calls, scenario.rates[0]) | more)


def test_a_measurement_counts_what_was_simulated(tmp_path: Path) -> None:
    found = measured("growth", tmp_path, 60)
    assert 40 <= found["calls"] <= 90
    assert found["steps"] > found["calls"]
    assert found["prompt_tokens"] > found["calls"] < found["output_tokens"]
    assert found["cpu_s"] > 0 < found["wall_s"]
    assert found["simulated_s"] > 0 < found["mean_e2el_ms"]
    assert found["peak_mb"] >= found["before_mb"] > 0
    assert found["heapq_calls_s"] > 0 < found["simpy_calls_s"]


def test_a_digest_is_of_the_results(tmp_path: Path) -> None:
    first, again, other = (measured("growth", tmp_path, 30, seed=seed)["digest"] for seed in (0, 0, 1))
    assert first == again != other


def test_peers_are_single_calls_of_the_lengths_that_are_told(tmp_path: Path) -> None:
    found = measured("peers", tmp_path, 300)
    assert found["calls"] == found["workflows"] == 300
    assert found["prompt_tokens"] / 300 == pytest.approx(500, rel=0.1)
    assert found["output_tokens"] / 300 == pytest.approx(300, rel=0.1)
    assert not found["prefix_hit_rate"]


def test_mooncakes_calls_keep_their_blocks_and_are_counted_where_they_do_not_fit(tmp_path: Path) -> None:
    calls = [(1024, 5, [1, 2]), (1024, 5, [1, 2]), (131_000, 500, list(range(10, 266))), (140_000, 5, [])]
    rows = [
        {"timestamp": 200_000 * number, "input_length": prompt, "output_length": output, "hash_ids": ids}
        for number, (prompt, output, ids) in enumerate(calls)
    ]
    (tmp_path / "conversation.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    found = measured("mooncake", tmp_path, 12_031, combo="llama8b")
    assert (found["calls"], found["clipped"], found["rejected"]) == (4, 1, 1)
    assert found["prefix_hit_rate"] > 0


@pytest.mark.slow
def test_the_command_times_two_checkouts_in_turn_and_compares_their_results(tmp_path: Path) -> None:
    out, plot = tmp_path / "speed.json", tmp_path / "speed.png"
    done = run_speed(
        "--scenario", "growth", "--policy", "fcfs", "--calls", "20", "--base", ROOT,
        "--json", out, "--plot", plot,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "results the same" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    found = json.loads(out.read_text())
    assert found["machine"]["cores"] == os.cpu_count()
    assert found["code"].keys() == {"this", "base"}
    runs = found["runs"]
    assert [run["version"] for run in runs] == ["base", "this"]
    assert runs[0]["digest"] == runs[1]["digest"]
    assert all(run["checkout"] == str(ROOT) and run["scenario"] == "growth" for run in runs)


def test_results_that_differ_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = {
        "calls": 100, "workflows": 50, "cpu_s": 2.0, "wall_s": 4.0, "simulated_s": 40.0, "steps": 250,
        "prompt_tokens": 1_000_000, "output_tokens": 10_000, "before_mb": 100.0, "peak_mb": 100.5, "bytes_a_call": 5e3,
        "simpy_calls_s": 500.0, "heapq_calls_s": 1000.0,
    }  # fmt: skip
    turns: list[str] = []

    def in_process(job: dict[str, Any], checkout: Path) -> dict[str, Any]:
        turns.append(checkout.name)
        slow = {} if checkout == ROOT else {"cpu_s": 4.0 + len(turns)}
        return found | {"digest": checkout.name} | slow

    monkeypatch.setattr(speed, "in_process", in_process)
    monkeypatch.setattr(speed, "version_of", lambda checkout: "no commit")
    old = tmp_path / "old"
    (old / "chimsim").mkdir(parents=True)
    (old / "chimsim" / "simulation.py").touch()
    arguments = ["--scenario", "growth", "--policy", "fcfs", "--calls", "100", "--repeat", "2", "--base", str(old)]
    assert speed.main(arguments) == 1
    assert turns == ["old", ROOT.name, "old", ROOT.name]
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()]
    assert [
        "fcfs",
        "100",
        "6",
        "base",
        "20",
        "17",
        "2.00k",
        "200k",
        "10",
        "2.5",
        "100",
        "5,000",
        "25.0x",
        "50x",
    ] in rows
    assert [
        "fcfs",
        "100",
        "6",
        "this",
        "50",
        "50",
        "5.00k",
        "500k",
        "10",
        "2.5",
        "100",
        "5,000",
        "10.0x",
        "20x",
    ] in rows
    assert "calls/s x2.50 by the best, x2.92 by the median of 2; memory a call x1.00; results DIFFER" in out
    assert "results differ between runs of ('growth', 'fcfs', 6.0, 50)" in err


def test_mooncake_is_left_out_where_its_file_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(speed, "MOONCAKE", tmp_path / "no.jsonl.gz")
    assert speed.main(["--scenario", "mooncake"]) == 0
    assert "left out, for it needs github.com/kvcache-ai/Mooncake: FAST25-release/traces/" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scenario", "grwth"], "'grwth' is unknown (known: growth, load, peers, mooncake, all)"),
        (["--policy", "chimra"], "did you mean 'chimera'"),
        (["--calls", "0"], "expected positive numbers"),
        (["--repeat", "0"], "expected a positive number"),
        (["--base", "tests"], "expected a checkout of the project"),
        (["--data", "no.jsonl"], "no such file"),
    ],
)
def test_what_cannot_be_done_is_told_at_once(arguments: list[str], message: str) -> None:
    done = run_speed(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
