"""Semantic routers on made-up prompts whose solvers their words give away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from calibration.router_eval import cost_ms, cross_validated, evaluate, routing_curve
from calibration.router_heads import Forest, platt
from calibration.router_model import (
    MIN_LABELLED,
    TARGETS,
    LearningSet,
    Router,
    learning_set,
    load_router,
    save_router,
    train_router,
)
from calibration.rows import TrainingError, folds
from calibration.saved import ModelError
from traces.schema import Run, Stage, Trace, Workflow

Floats = npt.NDArray[np.float64]
WORDS = ("sum", "graph", "prime", "tree", "angle", "proof", "list", "limit", "coin", "matrix", "field", "queue")
MODELS = ("large", "small")


def examples(count: int = 240, seed: int = 0) -> LearningSet:
    """The large model solves prompts with a graph or a prime, the small one those with a prime; 10 % are flipped."""
    rng = np.random.default_rng(seed)
    prompts = [" ".join(rng.choice(WORDS, 6)) + f" {rng.integers(1000)}" for _ in range(count)]
    truth = np.array([["prime" in text or "graph" in text, "prime" in text] for text in prompts])
    return LearningSet(MODELS, prompts, (truth ^ (rng.random(truth.shape) < 0.1)).astype(np.float64))


def trace_of(data: LearningSet) -> Trace:
    workflows = []
    for i, (prompt, row) in enumerate(zip(data.prompts, data.labels, strict=True)):
        runs = {
            model: Run((Stage("solver", 10, 20),), None if np.isnan(label) else bool(label))
            for model, label in zip(data.models, row, strict=True)
        }
        workflows.append(Workflow(f"w{i}", "words", runs, prompt=prompt))
    return Trace("words", tuple(workflows), "0" * 64)


def save(folder: Path, router: Router) -> None:
    training: dict[str, Any] = {"trained_on": ["w0"], "held_out": ["w1"], "models": list(router.models)}
    save_router(folder, router, training=training, scores={}, cost_ms={"per_call": 0.1}, made_by="test")


@pytest.mark.parametrize("target", TARGETS)
def test_held_out_prompts_are_told_apart_with_calibrated_confidence(target: str) -> None:
    trace = trace_of(examples(400))
    data, probabilities = cross_validated(folds(trace, 4), MODELS, target=target)
    assert sorted(data.prompts) == sorted(workflow.prompt or "" for workflow in trace.workflows)
    scores = evaluate(data, probabilities)
    assert scores["pair"] == ["small", "large"]
    assert scores["map"] > scores["base_rate"] + 0.2
    assert scores["ece"] < 0.12
    assert scores["brier"] < 0.15
    assert scores["gap_auc"] > 0.7
    assert scores["curve_area"] > 0.3


def test_a_forest_learns_what_words_by_themselves_do_not_tell() -> None:
    # the small model solves prompts with exactly one of two words: nothing linear tells
    rng = np.random.default_rng(3)
    prompts = [" ".join(rng.permutation([*rng.choice(WORDS[4:], 3), *rng.choice(["prime", "tree", "even"], 2)]))
               for _ in range(500)]  # fmt: skip
    labels = np.array([[("prime" in text) != ("tree" in text)] for text in prompts], np.float64)
    data = LearningSet(("small",), prompts[:400], labels[:400])
    test = LearningSet(("small",), prompts[400:], labels[400:])
    brier = {
        backend: evaluate(test, train_router(data, backend=backend).predict_proba(test.prompts))["brier"]
        for backend in ("tfidf", "forest")
    }
    assert brier["forest"] < 0.9 * brier["tfidf"]


@pytest.mark.parametrize(("backend", "target"), [("tfidf", "joint"), ("forest", "difference"), ("forest", "solved")])
def test_the_same_seed_and_a_saved_router_give_the_same_probabilities(
    backend: str, target: str, tmp_path: Path
) -> None:
    data = examples(120)
    router = train_router(data, backend=backend, target=target, seed=4)
    expected = router.predict_proba(data.prompts[:40])
    again = train_router(data, backend=backend, target=target, seed=4)
    np.testing.assert_array_equal(again.predict_proba(data.prompts[:40]), expected)
    save(tmp_path / "m", router)
    loaded, saved = load_router(tmp_path / "m")
    assert (loaded.models, loaded.backend, loaded.target) == (MODELS, backend, target)
    np.testing.assert_array_equal(loaded.predict_proba(data.prompts[:40]), expected)
    assert "torch" not in saved.manifest["packages"]
    # of a prompt alone as in any company
    np.testing.assert_allclose(router.predict_proba(data.prompts[7:8])[0], expected[7], atol=1e-12)


@pytest.mark.parametrize("backend", ["tfidf", "forest"])
def test_any_text_gets_probabilities(backend: str) -> None:
    router = train_router(examples(120), backend=backend)
    odd = ["", " ", "\n\n", "日本語のテキスト", "∫∑√", "a" * 50_000, "prime " * 20_000]
    found = router.predict_proba(odd)
    assert found.shape == (7, 2)
    assert ((found >= 0) & (found <= 1)).all()
    assert router.predict_proba([]).shape == (0, 2)


def test_missing_labels_are_masked_out() -> None:
    data = examples(300)
    labels = data.labels.copy()
    labels[::2, 0] = np.nan
    labels[1::3, 1] = np.nan
    test = examples(200, seed=1)
    whole = evaluate(test, train_router(data).predict_proba(test.prompts))
    for backend, target in (("tfidf", "solved"), ("tfidf", "difference"), ("forest", "solved")):
        router = train_router(replace(data, labels=labels), backend=backend, target=target)
        scores = evaluate(test, router.predict_proba(test.prompts))
        assert whole["base_rate"] + 0.15 < scores["map"] < whole["map"] + 0.05
    # rows without a label change nothing
    known = ~np.isnan(labels[:, 1])
    kept = LearningSet(("small",), [p for p, k in zip(data.prompts, known, strict=True) if k], labels[known, 1:])
    assert evaluate(data, train_router(data).predict_proba(data.prompts))["models"]["small"]["n"] == 300
    judged = evaluate(kept, train_router(kept).predict_proba(kept.prompts))
    assert judged["models"]["small"]["n"] == known.sum()
    assert "curve" not in judged


def test_a_label_that_never_changes_gives_its_rate() -> None:
    data = examples(100)
    labels = data.labels.copy()
    labels[:, 0] = 1.0
    for backend in ("tfidf", "forest"):
        found = train_router(replace(data, labels=labels), backend=backend).predict_proba(data.prompts)
        np.testing.assert_allclose(found[:, 0], 101 / 102, atol=1e-9)


def test_what_cannot_be_learned_from_is_refused() -> None:
    data = examples(100)
    few = data.labels.copy()
    few[12:, 1] = np.nan
    with pytest.raises(TrainingError, match=rf"'small' has 12 labelled .* at least {MIN_LABELLED}"):
        train_router(replace(data, labels=few))
    few[:, 1] = np.nan
    with pytest.raises(TrainingError, match=r"'small' has no label in any workflow \(solved is null\)"):
        train_router(replace(data, labels=few))
    with pytest.raises(TrainingError, match="backend 'tfdf' is unknown; did you mean 'tfidf'"):
        train_router(data, backend="tfdf")
    with pytest.raises(TrainingError, match="target 'solve' is unknown; did you mean 'solved'"):
        train_router(data, target="solve")
    with pytest.raises(TrainingError, match="has no base model"):
        train_router(data, base_model="x")
    one = LearningSet(("small",), data.prompts, data.labels[:, 1:])
    with pytest.raises(TrainingError, match="there is only small"):
        train_router(one, target="joint")
    textless = [replace(workflow, prompt=None) for workflow in trace_of(data).workflows]
    with pytest.raises(TrainingError, match="no workflow has a prompt"):
        learning_set(textless, MODELS)
    rare = data.labels.copy()
    rare[:] = 1.0
    with pytest.raises(TrainingError, match="target joint"):
        train_router(replace(data, labels=rare), target="joint")


def test_a_router_learns_from_the_text_of_the_task() -> None:
    workflow = trace_of(examples(1)).workflows[0]
    stages = (Stage("planner", 10, 20, prompt="first call"), Stage("solver", 10, 20, prompt="second"))
    both = replace(workflow, runs={**workflow.runs, "small": Run(stages, True)})
    assert learning_set([both], ("small",)).prompts == [workflow.prompt]
    assert learning_set([replace(both, prompt=None)], ("large",)).prompts == ["first call"]
    # a model that has no run has no label
    assert np.isnan(learning_set([workflow], ("small", "other")).labels[0, 1])


def test_a_damaged_model_is_not_unpickled(tmp_path: Path) -> None:
    save(tmp_path / "m", train_router(examples(80)))
    path = tmp_path / "m" / "model.joblib"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ModelError, match="damaged"):
        load_router(tmp_path / "m")


def test_the_flat_forest_is_scikit_learns() -> None:
    from scipy.special import expit
    from sklearn.ensemble import ExtraTreesRegressor

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(150, 5)), rng.integers(0, 2, (150, 3)).astype(np.float64)
    reference = ExtraTreesRegressor(150, min_samples_leaf=3, max_features=0.3, random_state=7).fit(x, y)
    fresh = rng.normal(size=(60, 5))
    expected = np.clip(reference.predict(fresh), 1e-3, 1 - 1e-3)
    np.testing.assert_allclose(expit(Forest.fit(x, y, 7).scores(fresh)), expected, atol=1e-12)


def test_platt_undoes_a_distortion() -> None:
    rng = np.random.default_rng(0)
    odds = rng.normal(size=20_000)
    labels = (rng.random(20_000) < 1 / (1 + np.exp(-odds))).astype(np.float64)
    slope, offset = platt(3 * odds - 1, labels)
    assert slope == pytest.approx(1 / 3, rel=0.05)
    assert offset == pytest.approx(1 / 3, abs=0.05)
    # a score that runs the wrong way says nothing
    assert platt(-odds, labels)[0] == 0


@given(arrays.arrays(np.float64, st.integers(1, 40), elements=st.sampled_from([-0.5, 0.0, 0.1, 0.9])), st.data())
def test_a_routing_curve_lies_under_the_oracles(gain: Floats, data: st.DataObject) -> None:
    bits = arrays.arrays(np.float64, len(gain), elements=st.sampled_from([0.0, 1.0]))
    small, large = data.draw(bits), data.draw(bits)
    curve = routing_curve(small, large, gain)
    assert curve.router[0] == pytest.approx(small.mean())
    assert curve.router[-1] == pytest.approx(large.mean())
    assert (curve.router <= curve.oracle + 1e-12).all()
    perfect = routing_curve(small, large, large - small)
    assert perfect.area == pytest.approx(1) or np.isnan(perfect.area)
    # ties are mixed, so nothing depends on the order of the workflows
    turned = routing_curve(small[::-1], large[::-1], gain[::-1])
    np.testing.assert_allclose(turned.router, curve.router, atol=1e-12)
    assert routing_curve(small, large, np.zeros(len(gain))).router == pytest.approx(curve.random)


def test_a_pair_of_ones_own() -> None:
    data = examples(100)
    probabilities = np.full((100, 2), 0.5)
    scores = evaluate(data, probabilities, ["large", "small"])
    assert scores["pair"] == ["large", "small"]
    # equal confidences say nothing
    assert scores["gap_auc"] == 0.5
    assert scores["curve_area"] == pytest.approx(0)
    assert scores["map"] == pytest.approx(scores["base_rate"])
    for wrong in (["small"], ["small", "small"], ["small", "larg"]):
        with pytest.raises(TrainingError, match="pair"):
            evaluate(data, probabilities, wrong)


def test_cost_is_measured_for_one_call_and_for_batches() -> None:
    data = examples(60)
    cost = cost_ms(train_router(data), data.prompts, calls=64)
    assert set(cost) == {"per_call", "batch_1_p50", "batch_1_p99", "batch_32_p50", "batch_32_p99"}
    assert cost["per_call"] == cost["batch_32_p50"] > 0
    assert cost["batch_1_p99"] >= cost["batch_1_p50"]
