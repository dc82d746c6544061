"""`chimsim router`: train and eval as a user runs them, on a made-up trace of words."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from calibration.router_encoder import EncoderError
from calibration.rows import TrainingError
from calibration.saved import ModelError
from chimsim.cli import app
from chimsim.errors import ChimsimError
from traces import Trace, write_trace
from traces.schema import Run, Stage, Workflow

WORDS = ("sum", "graph", "prime", "tree", "angle", "proof", "list", "limit", "coin", "matrix")
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "mint" / "solo.programs.jsonl.gz"


def words_trace(count: int = 150) -> Trace:
    """Large solves what mentions a graph or a prime, small what mentions a prime; two workloads."""
    rng = np.random.default_rng(0)
    workflows = []
    for i in range(count):
        prompt = " ".join(rng.choice(WORDS, 6))
        solved = {"small": "prime" in prompt, "large": "prime" in prompt or "graph" in prompt}
        runs = {model: Run((Stage("solver", 10, 20),), bool(label)) for model, label in solved.items()}
        workflows.append(Workflow(f"w{i}", "even" if i % 2 else "odd", runs, prompt=prompt))
    return Trace("words", tuple(workflows))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("trace") / "words.jsonl"
    write_trace(words_trace(), path)
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["router", *arguments])


def run_json(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    loaded: dict[str, Any] = json.loads(result.stdout)
    return loaded


def test_train_then_judge_the_saved_router_on_what_it_has_not_seen(trace: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    trained = run("train", "--trace", trace, "--out", str(folder), "--seed", "3")
    assert trained.exit_code == 0, trained.output
    assert max(map(len, trained.stdout.replace(str(folder), "model").splitlines())) <= 88
    assert "learned from 120 workflows" in trained.stdout
    assert "judged on 30 workflows held out (seed 3)" in trained.stdout
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["settings"]["backend"] == "forest"
    assert manifest["settings"]["train_s"] > 0
    assert manifest["cost_ms"]["per_call"] > 0
    judged = run_json("eval", "--trace", trace, "--model-dir", str(folder))
    (router,) = judged["routers"]
    # the very scores that training stored
    assert router["map"] == manifest["scores"]["map"] > router["base_rate"]
    assert router["n"] == 30
    assert router["gap_auc"] == manifest["scores"]["gap_auc"]
    text = run("eval", "--trace", trace, "--model-dir", str(folder))
    assert f"{router['map']:.3f}" in text.stdout


def test_folds_give_tables_a_figure_and_the_same_numbers_again(trace: str, tmp_path: Path) -> None:
    figure = tmp_path / "router.png"
    arguments = ("eval", "--trace", trace, "--folds", "3", "--plot", str(figure))
    first = run(*arguments)
    assert first.exit_code == 0, first.output
    drawn = figure.read_bytes()
    assert drawn.startswith(b"\x89PNG")
    again = run(*arguments)
    assert again.stdout == first.stdout
    assert figure.read_bytes() == drawn
    rows = {line.split()[0]: line.split() for line in first.stdout.splitlines() if line.strip()}
    assert rows["random"][1] == rows["router"][1] == rows["oracle"][1]
    assert float(rows["random"][6]) < float(rows["router"][6]) <= float(rows["oracle"][6])
    assert "Between small and large" in first.stdout


def test_a_list_of_targets_compares_them(trace: str, tmp_path: Path) -> None:
    figure = tmp_path / "router.svg"
    result = run("eval", "--trace", trace, "--folds", "2", "--target", "solved,joint,difference", "--plot", str(figure))
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()[2:5]]
    assert [row[1] for row in rows] == ["solved", "joint", "difference"]
    assert all(float(row[2]) > float(row[3]) for row in rows)
    assert figure.read_text().startswith("<?xml")


def test_one_workload_left_out_at_a_time(trace: str) -> None:
    judged = run_json("eval", "--trace", trace, "--group-by", "workload", "--models", "small")
    assert judged["judged_on"] == "2 workloads, each left out in turn"
    (router,) = judged["routers"]
    assert router["n"] == 150
    assert "curve" not in router
    assert run("eval", "--trace", trace, "--group-by", "workload", "--models", "small").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("--models", "smal"), TrainingError, "did you mean 'small'"),
        (("--group-by", "task"), ChimsimError, "expected workload"),
        (("--pair", "small,huge"), TrainingError, "'huge' is not among"),
        (("--folds", "1"), TrainingError, "at least 2"),
        (("--plot", "figure.gif"), ChimsimError, "expected a figure ending in"),
        (("--model-dir", "nowhere"), ModelError, "no such folder"),
        (("--backend", "embeddings"), EncoderError, "base model|chimsim"),
    ],
)
def test_wrong_options(trace: str, arguments: tuple[str, ...], error: type[Exception], message: str) -> None:
    result = run("eval", "--trace", trace, *arguments)
    assert isinstance(result.exception, error)
    assert re.search(message, str(result.exception))


def test_traces_that_nothing_is_to_be_learned_from(tmp_path: Path) -> None:
    whole = words_trace(60)

    def refused(name: str, workflows: Sequence[Workflow]) -> str:
        path = tmp_path / f"{name}.jsonl"
        write_trace(Trace(name, workflows), path)
        result = run("train", "--trace", str(path), "--out", str(tmp_path / "model"))
        assert isinstance(result.exception, TrainingError)
        return str(result.exception)

    assert "has 10 workflows" in (message := refused("ten", whole.workflows[:10]))
    assert "at least 50" in message
    textless = tuple(replace(workflow, prompt=None) for workflow in whole.workflows)
    assert "no workflow has a prompt" in refused("textless", textless)
    unlabelled = tuple(
        replace(workflow, runs={model: replace(each, solved=None) for model, each in workflow.runs.items()})
        for workflow in whole.workflows
    )
    assert "no label in any workflow" in refused("unlabelled", unlabelled)
    assert not (tmp_path / "model").exists()


def test_workflows_without_a_prompt_are_left_out_with_a_note(tmp_path: Path) -> None:
    whole = words_trace(100)
    some = tuple(replace(w, prompt=None) if i < 20 else w for i, w in enumerate(whole.workflows))
    write_trace(Trace("some", some), tmp_path / "some.jsonl")
    result = run("eval", "--trace", str(tmp_path / "some.jsonl"), "--folds", "2")
    assert result.exit_code == 0
    assert "20 workflows have no prompt and are left out" in result.stderr


@pytest.mark.skipif(not SHARED.exists(), reason="the public data is not beside the project")
def test_real_tasks_are_ranked_above_their_base_rate() -> None:
    import gzip

    from calibration.router_eval import cross_validated, evaluate
    from calibration.rows import folds

    names = {"Meta-Llama-3-8B-Instruct": "8B", "Meta-Llama-3-70B-Instruct": "70B"}
    workflows = []
    with gzip.open(SHARED, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            runs = {
                ours: Run((Stage("turn1", 10, 20),), bool(row["models"][name]["success"]))
                for name, ours in names.items()
                if name in row["models"]
            }
            if len(runs) == 2:
                prompt = row.get("task_prompt") or row["prompt"]
                workflows.append(Workflow(row["program_id"], row["dataset"].split("/")[0], runs, prompt=prompt))
    data, probabilities = cross_validated(folds(Trace("mint", tuple(workflows)), 3), ("8B", "70B"))
    scores = evaluate(data, probabilities)
    assert scores["base_rate"] == pytest.approx(0.502, abs=0.001)
    assert scores["map"] > 0.62
    assert scores["ece"] < 0.1
    assert not math.isnan(scores["gap_auc"])
