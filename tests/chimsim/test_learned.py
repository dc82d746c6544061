"""Saved models in a sweep: their predictions, their cost, and what keeps them from being judged on their lessons."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from calibration.length_model import load_length, save_length, train_length
from calibration.router_model import learning_set, load_router, save_router, train_router
from calibration.rows import FinishedStage, PredictionInput, calls_of, split
from calibration.saved import ModelError, training_record
from chimsim.errors import ChimsimError
from chimsim.feeds import predictor_for, trace_named, training_overlap
from chimsim.grid import cells
from chimsim.learned import LearnedPredictor, manifest_of
from chimsim.plots import series_labels
from chimsim.predictors import build_predictor
from chimsim.spec import spec_from
from chimsim.sweeps import sweep
from tests.calibration.learnable import TINY, learnable
from traces import Run, Trace, load_trace, write_trace

MODELS = ("Qwen2.5-1.5B", "Qwen2.5-7B")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """A trace file, and folders of a length model and a router that learned from most of it."""
    root = tmp_path_factory.mktemp("learned")
    workflows = []
    for number, workflow in enumerate(learnable(120).workflows):
        runs = {
            model: replace(workflow.runs[like], solved=number % period == 0)
            for model, like, period in zip(MODELS, ("small", "large"), (3, 2), strict=True)
        }
        workflows.append(replace(workflow, runs=runs))
    path = root / "tasks.jsonl"
    write_trace(Trace("tasks", tuple(workflows)), path)
    trace = load_trace(path)
    parts = split(trace, 0.5, 0)
    record = training_record(trace, parts, MODELS, 0, 0.5)
    length, router = root / "length", root / "router"
    save_length(
        length, train_length(parts.train, MODELS, TINY), training=record, scores={}, cost_ms={"per_call": 2.0},
        made_by="test",
    )  # fmt: skip
    learned = train_router(learning_set(parts.train, MODELS), backend="tfidf")
    save_router(router, learned, training=record, scores={}, cost_ms={"per_call": 5.0}, made_by="test")
    return str(path), str(length), str(router)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trace_named.cache_clear()
    manifest_of.cache_clear()
    return tmp_path / "cache"


def keys_of(made: tuple[str, str, str], **more: Any) -> dict[str, Any]:
    path, length, router = made
    return {
        "trace": path, "combo": "qwen1.5b+7b", "policy": "stjf,chimera", "rps": 4, "tau": 1,
        "length_predictor": f"oracle,qrf:{length}", "router": f"oracle,{router}", "split": "test", **more,
    }  # fmt: skip


def test_a_sweep_over_saved_models_and_oracles(made: tuple[str, str, str], cache: Path) -> None:
    found = sweep(**keys_of(made)).summary
    assert found["length_predictor"].tolist() == ["oracle", "length"] * 3
    assert found["router"].fillna("").tolist() == ["", "", "oracle", "oracle", "router", "router"]
    assert found["workflows"].tolist() == [60] * 6
    labels = series_labels(found).tolist()
    assert len(set(labels)) == 6, "no two cells share a line or a row"
    again = sweep(**keys_of(made)).summary
    assert again.equals(found)
    assert {path.name.split("-")[0] for path in (cache / "chimsim").iterdir()} == {"length", "router"}


def test_predictions_are_the_models_own(made: tuple[str, str, str]) -> None:
    _, length, router = made
    [cell] = cells(spec_from(keys_of(made, policy="chimera", length_predictor=f"qrf:{length}", router=router)))
    predictor = predictor_for(cell.feed, cell.trace, MODELS, 0)
    assert (predictor.router_s, predictor.predictor_s) == (0.005, 0.002), "as measured when they were trained"
    model, (judge, _) = load_length(length), load_router(router)
    for workflow in trace_named(cell.trace).workflows[:10]:
        first = workflow.runs[MODELS[0]].stages[0]
        for finished in ((), (FinishedStage(0, first.name, MODELS[0], first.prompt_tokens, 999),)):
            inputs = PredictionInput(
                workflow.workflow_id, workflow.workload, len(finished), "solve", MODELS, 80, 10, 50, workflow.prompt,
                finished,
            )  # fmt: skip
            if not finished:
                inputs = replace(inputs, stage_name=first.name, prompt_tokens=first.prompt_tokens)
            if finished and len(workflow.runs[MODELS[0]].stages) > 1:
                continue
            given, own = predictor.predict(inputs), model.predict([inputs])[0]
            assert dict(given.remaining_tokens) == {name: own[name].remaining_tokens for name in MODELS}
            assert dict(given.stage_tokens) == {name: own[name].stage_tokens for name in MODELS}
            sure = judge.predict_proba([workflow.prompt or ""])[0]
            assert [given.confidence[name] for name in judge.models] == sure.tolist()


def test_a_policy_may_ask_for_another_quantile(made: tuple[str, str, str], cache: Path) -> None:
    [cell] = cells(spec_from(keys_of(made, policy="stjf", tau=None, length_predictor=f"qrf:{made[1]}")))
    model, trace = load_length(made[1]), trace_named(cell.trace)
    inputs = calls_of(trace.workflows[0], MODELS[0], MODELS)[0]
    later = replace(inputs, stage=1, finished=(FinishedStage(0, "solve", MODELS[1], 80, 999),))
    given = {}
    for quantile in (None, 0.5, 0.9):
        predictor = predictor_for(replace(cell.feed, quantile=quantile), cell.trace, MODELS, 0)
        for call in (inputs, later):
            own = model.predict([call], quantile)[0]
            tokens = predictor.predict(call).remaining_tokens
            assert dict(tokens) == {name: own[name].remaining_tokens for name in MODELS}
        given[quantile] = dict(predictor.predict(inputs).remaining_tokens)
    assert given[None] == given[0.5]
    assert all(given[0.9][name] > given[0.5][name] for name in MODELS)
    assert len(list((cache / "chimsim").glob("length-*"))) == 2, "the model's own and 0.5 share a table"
    with pytest.raises(ModelError, match=r"quantile is 1.5; expected between 0 and 1"):
        predictor_for(replace(cell.feed, quantile=1.5), cell.trace, MODELS, 0)


def test_a_sweep_over_quantiles_changes_learned_lengths_alone(made: tuple[str, str, str]) -> None:
    keys = keys_of(
        made, policy="stjf,fcfs", tau=None, knobs="quantile=0.5,0.9", length_predictor=f"oracle,qrf:{made[1]}"
    )
    found = {(c.policy, c.feed.lengths, c.knobs.get("quantile")): c.feed.quantile for c in cells(spec_from(keys))}
    assert found == {
        ("stjf", 0.0, 0.5): None, ("stjf", 0.0, 0.9): None, ("fcfs", None, None): None,
        ("stjf", f"qrf:{made[1]}", 0.5): 0.5, ("stjf", f"qrf:{made[1]}", 0.9): 0.9,
    }  # fmt: skip


def test_a_router_reads_what_it_learned_from_wherever_the_trace_keeps_it(made: tuple[str, str, str]) -> None:
    trace = load_trace(made[0])
    moved = []
    for workflow in trace.workflows[:5]:
        (first, *rest), solved = workflow.runs[MODELS[0]].stages, workflow.runs[MODELS[0]].solved
        run = Run((replace(first, prompt=workflow.prompt), *rest), solved)
        moved.append(replace(workflow, prompt=None, runs={**workflow.runs, MODELS[0]: run}))
    both = [
        replace(trace, workflows=tuple(part), digest=name) for name, part in (("a", trace.workflows[:5]), ("b", moved))
    ]
    told = [LearnedPredictor(each, MODELS, build_predictor(each, router="oracle"), router=made[2]) for each in both]
    for workflow in moved:
        inputs = calls_of(workflow, MODELS[0], MODELS)[0]
        assert told[0].predict(inputs).confidence == told[1].predict(inputs).confidence


def test_what_was_learned_is_not_what_is_judged_on(made: tuple[str, str, str]) -> None:
    [cell] = cells(spec_from(keys_of(made, policy="chimera", length_predictor="oracle", router=made[2])))
    assert training_overlap(cell.feed, cell.trace) is None
    warned = training_overlap(cell.feed, made[0])
    assert warned is not None
    assert "was trained on 60 of the 120 workflows it is judged on here" in warned
    with pytest.raises(ChimsimError, match="split test: no saved model is used"):
        cells(spec_from(keys_of(made, policy="chimera", length_predictor="oracle", router="oracle")))
    with pytest.raises(ChimsimError, match="held no workflow of trace apps back"):
        cells(spec_from(keys_of(made, trace="apps")))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"router": "no-such-folder"},
            r"router: 'no-such-folder' is unknown; choose from none, oracle, trace or a router's",
        ),
        ({"length_predictor": "forest"}, r"length_predictor: 'forest' is unknown; choose from oracle, noisy:0.2, qrf:"),
        ({"length_predictor": "noisy:0.7"}, r"length_predictor: 0.7 is not allowed"),
        ({"rank_predictor": "nowhere", "policy": "ltr"}, r"rank_predictor: 'nowhere' is unknown"),
        ({"split": "train"}, r"split: 'train' is unknown"),
        ({"combo": "qwen1.5b+3b"}, r"was not trained for Qwen2.5-3B|has no run of Qwen2.5-3B"),
    ],
)
def test_wrong_words_are_one_clear_error(made: tuple[str, str, str], keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ChimsimError, match=message):
        cells(spec_from(keys_of(made) | keys))


def test_a_damaged_folder_and_one_of_another_kind_are_refused(made: tuple[str, str, str], tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelError, match="empty"):
        cells(spec_from(keys_of(made, router=str(empty), length_predictor="oracle", split="all")))
    with pytest.raises(ModelError, match="router"):
        cells(spec_from(keys_of(made, router=made[1], length_predictor="oracle", split="all")))
