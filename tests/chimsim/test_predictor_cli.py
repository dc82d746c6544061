"""`chimsim predictor`: train, eval, tables in 80 columns, JSON, and one line for what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from calibration import length_eval
from calibration.length_eval import Judged, evaluate
from calibration.rows import PredictionInput, Row
from calibration.saved import read_manifest
from tests.calibration.learnable import MODELS, learnable
from tests.chimsim.small import run_chimsim
from traces import write_trace

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    def run(*arguments: object) -> tuple[int, str, str]:
        return run_chimsim(monkeypatch, capsys, "predictor", *arguments)

    return run


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    from calibration.length_model import LengthSettings

    tiny = {"trees": 8, "components": 4}
    monkeypatch.setattr("calibration.length_model.LengthSettings", lambda **given: LengthSettings(**tiny | given))
    real = length_eval.cost_ms
    monkeypatch.setattr(length_eval, "cost_ms", lambda model, workflows: real(model, workflows, 64))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "my.jsonl"
    write_trace(learnable(80), path)
    return path


def test_train_writes_a_model_that_eval_judges_on_what_was_held_out(main: Main, trace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "length"
    code, out, err = main("train", "--trace", trace, "--out", folder, "--quantile", "0.7", "--seed", "2")
    assert (code, err) == (0, "")
    assert max(len(line) for line in out.splitlines() if not line.startswith("written")) <= 80
    assert "learned from 64 workflows" in out
    assert "judged on 16 workflows held out (seed 2)" in out
    manifest = read_manifest(folder).manifest
    assert manifest["settings"]["quantile"] == 0.7
    assert manifest["training"]["workflows_held_out"] == 16
    assert manifest["cost_ms"]["per_call"] == manifest["cost_ms"]["batch_32_p50"] > 0
    kept = manifest["scores"]["held_out"]
    assert {(row["workload"], row["model"]) for row in kept} == {
        (workload, model) for workload in ("load0", "load1", None) for model in MODELS
    }
    code, out, err = main("eval", "--trace", trace, "--model-dir", folder, "--json")
    assert (code, err) == (0, "")
    judged = json.loads(out)
    assert judged["judged_on"].startswith("16 workflows that")
    assert judged["scores"] == kept


def test_eval_by_folds_prints_the_baselines_beside_the_forest(main: Main, trace: Path) -> None:
    code, out, err = main("eval", "--trace", trace, "--folds", "3", "--models", "small")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "my: length predictor, 3 folds (seed 0)" in out
    for head in ("FCFS", "prompt", "forest", "oracle", "pinball", "cover", "all workloads"):
        assert head in out
    row = next(line for line in out.split("all workloads")[1].splitlines() if line.startswith("small"))
    calls, *distances = row.split()[1:]
    fcfs, prompt, forest, oracle, *_ = map(float, distances)
    assert int(calls) == sum(len(workflow.runs["small"].stages) for workflow in learnable(80).workflows)
    assert oracle == 0.0 < forest < min(fcfs, prompt)


def test_eval_can_leave_workloads_out_and_prompts_alone(main: Main, trace: Path) -> None:
    code, out, _ = main("eval", "--trace", trace, "--group-by", "workload", "--no-text", "--no-history", "--json")
    assert code == 0
    assert json.loads(out)["judged_on"] == "2 workloads, each left out in turn"


def test_a_trace_without_prompts_is_noted_and_learned_from(main: Main, tmp_path: Path) -> None:
    path = tmp_path / "bare.jsonl"
    write_trace(learnable(60, prompts=False), path)
    code, _, err = main("train", "--trace", path, "--out", tmp_path / "m", "--models", "small")
    assert code == 0
    assert err == "chimsim: note: trace bare has no prompts to learn from; text features are left out\n"
    assert read_manifest(tmp_path / "m").manifest["settings"]["text"] is False


def test_a_rank_model_is_trained_and_judged(main: Main, trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("lightgbm")
    code, out, _ = main("train", "--trace", trace, "--kind", "rank", "--out", tmp_path / "m", "--models", "small")
    assert code == 0
    assert "ranker" in out
    assert "pinball" not in out
    code, out, _ = main("eval", "--trace", trace, "--model-dir", tmp_path / "m", "--json")
    assert (code, json.loads(out)["kind"]) == (0, "rank")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["eval", "--trace", "TEN"], "ten has 10 workflows; learning and judging needs at least 50"),
        (["eval", "--trace", "MY", "--models", "smal"], "no run of model 'smal'; did you mean 'small'?"),
        (["eval", "--trace", "MY", "--group-by", "stage"], "group-by 'stage' is unknown; expected workload"),
        (["eval", "--trace", "MY", "--kind", "lenght"], "kind 'lenght' is unknown; did you mean 'length'?"),
        (["eval", "--trace", "MY", "--folds", "1"], "folds is 1; expected at least 2"),
        (["eval", "--trace", "MY", "--model-dir", "TEN"], "is a file; expected the folder of a saved model"),
        (["train", "--trace", "MY", "--out", "OUT", "--quantile", "1.5"], "quantile is 1.5; expected between 0 and 1"),
        (["train", "--trace", "MY", "--out", "OUT", "--test-share", "1"], "test share is 1.0"),
        (["train", "--trace", "MY", "--out", "TEN"], "is there already and is no saved model"),
    ],
)
def test_what_is_wrong_is_one_line(main: Main, trace: Path, tmp_path: Path, options: list[str], says: str) -> None:
    write_trace(learnable(10), tmp_path / "ten.jsonl")
    places = {"MY": str(trace), "TEN": str(tmp_path / "ten.jsonl"), "OUT": str(tmp_path / "out")}
    code, out, err = main(*(places.get(option, option) for option in options))
    assert (code, out) == (2, "")
    assert err.startswith("chimsim: error: ")
    assert err.count("\n") == 1
    assert says in err
    assert not (tmp_path / "out").exists()


def test_a_damaged_or_exhausted_model_is_one_line(main: Main, trace: Path, tmp_path: Path) -> None:
    assert main("train", "--trace", trace, "--out", tmp_path / "m", "--test-share", "0")[0] == 0
    code, _, err = main("eval", "--trace", trace, "--model-dir", tmp_path / "m")
    assert code == 2
    assert "has learned from every workflow of trace my" in err
    (tmp_path / "m" / "model.joblib").write_bytes(b"no model")
    code, _, err = main("eval", "--trace", trace, "--model-dir", tmp_path / "m")
    assert (code, err.count("\n")) == (2, 1)
    assert "model.joblib is damaged" in err


def test_the_scores_are_those_of_the_group_they_stand_for() -> None:
    calls = [
        Row(
            PredictionInput(f"w{n}", "a" if n < 3 else "b", 0, "s", ("m",), 10 - n, None, None, None, ()),
            "m",
            10 * n,
            10 * n,
        )
        for n in range(1, 6)
    ]
    right = np.array([row.remaining_tokens for row in calls], np.float64)
    quantiles = np.repeat(np.stack([right, -right], axis=1)[:, :, None], 3, axis=2)
    table = evaluate(Judged(calls, quantiles, np.full((5, 2), 30.0), None), [f"w{n}" for n in (5, 4, 3, 2, 1)])
    assert [(row["workload"], row["calls"]) for row in table] == [("a", 2), ("b", 3), (None, 5)]
    whole = table[-1]
    distances = {"fcfs": 1.0, "prompt": 1.0, "predicted": 0.0, "oracle": 0.0}
    assert whole["kendall"]["stage"] == pytest.approx(distances)
    assert whole["kendall"]["workflow"]["predicted"] == pytest.approx(1.0)
    assert whole["stage"]["pinball_50"] == 0.0
    assert whole["stage"]["pinball_50_constant"] == pytest.approx(0.5 * np.abs(right - 30).mean())
    assert (whole["stage"]["coverage"], whole["remaining"]["coverage"]) == (1.0, 0.0)
