"""The length predictor: it learns, sees nothing of the future, survives what it never saw, and is deterministic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from quantile_forest import RandomForestQuantileRegressor

from calibration.features import CallFeatures
from calibration.length_model import LengthModel, LengthSettings, load_length, save_length, train_length
from calibration.rows import FinishedStage, PredictionInput, TrainingError, rows, split
from calibration.saved import ModelError, training_record
from calibration.scores import Floats, coverage, kendall_distance
from tests.calibration.learnable import MODELS, TINY, learnable, lengthened

TRACE = learnable(160)
PARTS = split(TRACE, 0.5, 1)
TEST = rows(PARTS.test, MODELS)
REMAINING = np.array([row.remaining_tokens for row in TEST], np.float64)


@pytest.fixture(scope="module")
def model() -> LengthModel:
    return train_length(PARTS.train, MODELS, replace(TINY, trees=40))


def median(model: LengthModel) -> Floats:
    return model.quantiles([row.known for row in TEST], [0.5])[:, :, 0]


def call(**changes: object) -> PredictionInput:
    known = PredictionInput("new", "load0", 0, "plan", MODELS, 70, 10, 50, "Find the sum of things.", ())
    return replace(known, **changes)  # type: ignore[arg-type]


def test_it_ranks_unseen_workflows_far_better_than_prompt_length(model: LengthModel) -> None:
    prompt = np.array([row.known.prompt_tokens for row in TEST], np.float64)
    assert kendall_distance(REMAINING, median(model)[:, 1]) < 0.25
    assert kendall_distance(REMAINING, prompt) > 0.4


def test_its_interval_holds_about_as_many_as_it_says(model: LengthModel) -> None:
    low, high = np.moveaxis(model.quantiles([row.known for row in TEST], [0.1, 0.9])[:, 1], 1, 0)
    assert 0.6 < coverage(REMAINING, low, high) < 0.95


def test_prompts_and_history_are_worth_something() -> None:
    def distance(**changes: bool) -> float:
        made = train_length(PARTS.train, MODELS, replace(TINY, trees=40, text=changes.get("text", True),
                                                         history=changes.get("history", True)))  # fmt: skip
        later = np.array([row.known.stage > 0 for row in TEST])
        return kendall_distance(REMAINING[later], median(made)[later, 1])

    assert distance() < distance(text=False) < distance(text=False, history=False)


def test_the_quantiles_are_those_of_quantile_forest() -> None:
    # 21 trees: 10, 50 and 90 % are lengths of rows, so that it does not matter on what scale one interpolates
    model = train_length(PARTS.train, MODELS, replace(TINY, trees=21))
    learned = rows(PARTS.train, MODELS)
    matrix = CallFeatures(components=TINY.components).fit(learned)
    lengths = np.log([(row.stage_tokens, row.remaining_tokens) for row in learned])
    forest = RandomForestQuantileRegressor(
        21, min_samples_leaf=3, max_features=0.3, max_samples_leaf=1, random_state=0
    ).fit(matrix, lengths)
    known = [row.known for row in TEST]
    theirs = np.exp(forest.predict(model.features.transform(known), quantiles=[0.1, 0.5, 0.9]))
    assert np.allclose(model.quantiles(known, [0.1, 0.5, 0.9]), np.maximum.accumulate(theirs, axis=1), rtol=1e-5)


def test_quantiles_rise_and_the_rest_is_never_less_than_the_call(model: LengthModel) -> None:
    made = model.quantiles([row.known for row in TEST], [0.1, 0.5, 0.9])
    assert (np.diff(made, axis=2) >= 0).all()
    assert (made[:, 1] >= made[:, 0]).all()
    assert (made >= 1).all()


def test_the_default_quantile_is_the_settings() -> None:
    high = train_length(PARTS.train, MODELS, replace(TINY, quantile=0.9))
    assert high.predict([call()]) == high.predict([call()], 0.9)
    assert high.predict([call()]) != high.predict([call()], 0.5)
    for wrong in (0.0, 1.0, 1.5, float("nan")):
        with pytest.raises(ModelError, match="quantile"):
            high.predict([call()], wrong)
        with pytest.raises(ModelError, match="quantile"):
            train_length(PARTS.train, MODELS, replace(TINY, quantile=wrong))


def test_a_batch_predicts_what_single_calls_do(model: LengthModel) -> None:
    known = [replace(row.known, models=MODELS) for row in TEST[:12]]
    assert model.predict(known) == [model.predict([each])[0] for each in known]
    assert model.predict([]) == []
    assert list(model.predict([call(models=("small",)), call()])[1]) == list(MODELS)


def test_the_inputs_of_a_simulation_will_do(model: LengthModel) -> None:
    done = FinishedStage(0, "plan", "small", 70, 33)
    known = PredictionInput("new", "load0", 1, "solve", MODELS, 120, 10, 50, "Find the sum of things.", (done,))
    same = call(stage=1, stage_name="solve", prompt_tokens=120, finished=(FinishedStage(0, "plan", "small", 70, 33),))
    assert model.predict([known]) == model.predict([same])


def test_the_future_is_out_of_reach(model: LengthModel) -> None:
    """A cheat would have to change with true lengths, stages and labels that are still to come."""
    for workflow in PARTS.test[:25]:
        for stage in range(len(workflow.runs["small"].stages)):
            later = lengthened(workflow, stage)
            now = [
                [row.known for row in rows([each], MODELS) if row.known.stage == stage] for each in (workflow, later)
            ]
            assert model.predict(now[0]) == model.predict(now[1])


def test_the_regression_of_a_training_row_has_not_seen_its_workflow() -> None:
    """Else the forest would trust it more than it deserves: other lengths of a workflow must not move its own."""
    train = list(PARTS.train)
    before = CallFeatures(components=4).fit(rows(train, MODELS))
    train[0] = replace(
        train[0],
        runs={model: replace(run, stages=(replace(run.stages[0], output_tokens=9_999), *run.stages[1:]))
              for model, run in train[0].runs.items()},
    )  # fmt: skip
    after = CallFeatures(components=4).fit(rows(train, MODELS))
    mine = rows(train[:1], MODELS)[0].known
    columns = CallFeatures(text=False).fit(rows(train, MODELS)).shape[1]
    assert mine.stage == 0
    assert np.array_equal(before[0, columns : columns + 2], after[0, columns : columns + 2])
    assert not np.array_equal(before[:, columns : columns + 2], after[:, columns : columns + 2])


@pytest.mark.parametrize(
    "changes",
    [
        {"models": ("unheard-of",)},
        {"workload": "new", "stage_name": "new", "stage": 17},
        {"prompt": None, "system_tokens": None, "user_tokens": None},
        {"prompt": ""},
        {"prompt": "\x00\ud800 ∑ 数 " * 9_000},
        {"prompt_tokens": 10**9},
    ],
)
def test_what_it_never_saw_has_a_prediction_all_the_same(model: LengthModel, changes: dict[str, object]) -> None:
    lengths = next(iter(model.predict([call(**changes)])[0].values()))
    assert 1 <= lengths.stage_tokens <= lengths.remaining_tokens < 10_000


def test_an_unknown_model_is_predicted_between_the_known(model: LengthModel) -> None:
    made = model.predict([call(models=("large", "unheard-of", "small"), prompt="Find the proof integral.")])[0]
    assert made["large"].remaining_tokens <= made["unheard-of"].remaining_tokens <= made["small"].remaining_tokens
    assert made["large"].remaining_tokens < made["small"].remaining_tokens


def test_without_prompts_the_text_is_left_out() -> None:
    bare = learnable(prompts=False)
    made = train_length(bare.workflows, MODELS, TINY)
    assert not made.reads_text
    assert made.predict([call()]) == made.predict([call(prompt=None)])
    alike = [replace(workflow, prompt="all the same") for workflow in bare.workflows]
    assert not train_length(alike, MODELS, TINY).reads_text
    different = [replace(workflow, prompt=workflow.workflow_id) for workflow in bare.workflows]
    assert not train_length(different, MODELS, TINY).reads_text


def test_one_model_or_missing_runs_are_enough() -> None:
    some = [
        replace(workflow, runs={"large": workflow.runs["large"]}) if number % 3 else workflow
        for number, workflow in enumerate(PARTS.train)
    ]
    assert train_length(some, MODELS, TINY).models == MODELS
    assert train_length(some, ["large"], TINY).models == ("large",)
    with pytest.raises(TrainingError, match="no workflow has a run of small"):
        train_length([each for each in some if "small" not in each.runs], ["small"], TINY)


def test_the_same_seed_gives_the_same_bytes(model: LengthModel) -> None:
    again = train_length(PARTS.train, MODELS, replace(TINY, trees=40))
    other = train_length(PARTS.train, MODELS, replace(TINY, trees=40, seed=1))
    assert median(again).tobytes() == median(model).tobytes()
    assert median(other).tobytes() != median(model).tobytes()


def test_trees_of_a_large_trace_draw_some_of_its_rows() -> None:
    few = train_length(PARTS.train, MODELS, replace(TINY, rows_a_tree=60))
    assert max(tree.n_node_samples[0] for tree in few._trees) <= 60


def test_a_saved_model_predicts_the_same(model: LengthModel, tmp_path: Path) -> None:
    record = training_record(TRACE, PARTS, MODELS, 1, 0.5)
    save_length(tmp_path / "m", model, training=record, scores={}, cost_ms={"per_call": 0.1}, made_by="0")
    read = load_length(tmp_path / "m")
    assert median(read).tobytes() == median(model).tobytes()
    assert read.settings == model.settings
    assert isinstance(read.settings, LengthSettings)
    assert read.saved is not None
    assert read.saved.held_out == {workflow.workflow_id for workflow in PARTS.test}
