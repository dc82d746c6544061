"""`chimsim calibrate from-ops`: what it prints, writes and asks for, and how near real runs its profiles come."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from calibration.figures import ProfileError
from calibration.profile import load_profile
from chimsim.cli import app
from chimsim.errors import ChimsimError
from chimsim.measured import read_run
from chimsim.run_meta import read_engine_file, resolve
from chimsim.validation import compare, replay
from tests.calibration import tables as known

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "llmservingsim"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["calibrate", "from-ops", *map(str, arguments)])


def test_it_writes_a_profile_and_prints_residuals_in_80_columns(tmp_path: Path) -> None:
    folder = known.write_tables(tmp_path / "bf16" / "tp1", known.META.format(enabled="false"), skew=True)
    out, figure = tmp_path / "p.toml", tmp_path / "fit.png"
    result = run(folder, "--out", out, "--plot", figure, "--num-kv-tokens", 41_408, "--max-num-seqs", 64)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert max(map(len, lines[1:-1])) <= 80
    for part in ("dense", "decode attention", "mixed attention", "whole mixed step"):
        assert any(line.startswith(part) for line in lines)
    assert "switches skew_fit off" in result.output
    profile = load_profile(out)
    assert (profile.model, profile.gpu, profile.num_kv_tokens) == ("Llama-3.1-8B", "RTX 4090", 41_408)
    assert profile.capture_tokens[-1] == 128
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_json(tmp_path: Path) -> None:
    known.write_tables(tmp_path / "tp1")
    out = tmp_path / "p.toml"
    result = run(tmp_path, "--model", "Llama-3.1-8B", "--gpu", "RTX A6000", "--out", out, "--json")
    printed = json.loads(result.stdout)
    assert printed["digest"] == load_profile(out).digest
    assert printed["written"] == [str(out)]
    assert {part["part"] for part in printed["residuals"]} >= {"dense", "sequences", "decode attention"}
    assert all(part["p95"] >= part["median"] >= 0 for part in printed["residuals"])


def test_tensor_parallel_tables_of_a_model_by_its_config(tmp_path: Path) -> None:
    for tp in (1, 2):
        known.write_tables(tmp_path / "RTXPRO6000" / "org" / "New-1B" / "bf16" / f"tp{tp}")
    config = {"num_hidden_layers": 12, "hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": 8192,
              "vocab_size": 50_000, "max_position_embeddings": 8192}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = tmp_path / "p.toml"
    result = run(tmp_path, "--tp", 2, "--config", tmp_path / "config.json", "--out", out)
    assert result.exit_code == 0, result.output
    assert "all-reduce:" in result.output
    profile = load_profile(out)
    assert (profile.gpus, profile.layers, profile.kv_heads) == (2, 12, 16)
    assert profile.allreduce_token_s > 0
    by_hand = run(tmp_path, "--tp", 2, "--model", "New-1B", "--layers", 12, "--max-model-len", 8192,
                  "--num-kv-tokens", 9000, "--out", out)  # fmt: skip
    assert isinstance(by_hand.exception, ProfileError)
    assert "needs the hidden size of New-1B; give --config" in str(by_hand.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plot", "fit.jpeg"], "--plot fit.jpeg: expected a file that ends in .png, .svg, .pdf"),
        (["--memory-gib", "0"], "--memory-gib is 0; expected a number above 0"),
        (["--allreduce-us", "-1"], "--allreduce-us is -1; expected a number of at least 0"),
        (
            ["--model", "Mystery-9B"],
            "the shapes of Mystery-9B are not known; give its --config config.json, or at least",
        ),
        (["--model", "Mystery-9B", "--layers", "4", "--max-model-len", "99"], "give --num-kv-tokens"),
        (["--model", "Llama-3.1-8B"], "do not name their GPU|how much KV memory"),
    ],
)
def test_what_is_wrong_or_missing_is_said(tmp_path: Path, arguments: list[str], message: str) -> None:
    known.write_tables(tmp_path / "tp1")
    result = run(tmp_path, "--out", tmp_path / "p.toml", *arguments)
    assert isinstance(result.exception, ChimsimError | ProfileError)
    assert re.search(message, str(result.exception)), result.exception
    assert not (tmp_path / "p.toml").exists()


@pytest.mark.parametrize(
    ("gpu", "max_num_seqs", "each_percent", "mean_percent"),
    [("RTX4090", 256, 1.6, 1.3), ("RTXPRO6000", 128, 1.8, 1.0)],
)
def test_profiles_from_tables_alone_replay_the_public_runs_this_well(
    gpu: str, max_num_seqs: int, each_percent: float, mean_percent: float, tmp_path: Path
) -> None:
    measured = DATA / "bench" / gpu / "Llama-3.1-8B" / "vllm"
    if not measured.is_dir():
        pytest.skip("the public runs are not here")
    out = tmp_path / "p.toml"
    result = run(DATA / "profiler" / "perf" / gpu, "--max-num-seqs", max_num_seqs, "--out", out)
    assert result.exit_code == 0, result.output
    requests = read_run(measured / "requests.jsonl")
    spec, _ = resolve(load_profile(out), {}, read_engine_file(measured / "meta.json"))
    figures = compare(requests, replay(requests, spec)).figures
    assert figures["per_request"]["e2el_ms"]["mean_absolute_percent"] < each_percent
    for name in ("e2el_ms", "tpot_ms", "queue_time_s"):
        error = figures["metrics"][name]["mean"]["error_percent"]
        assert abs(error) < (1.6 if name == "queue_time_s" else mean_percent), name
    assert abs(figures["totals"]["makespan_s"]["error_percent"]) < 1.5
