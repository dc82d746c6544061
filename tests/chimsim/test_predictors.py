"""Predictors from a trace's truth: exact where they are oracles, else as wrong as they were asked to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import combinations, pairwise
from math import exp, inf, nan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score

from calibration.rows import PredictionInput
from calibration.scores import average_precision, kendall_distance
from chimsim.dials import Floats, noise, noisy_confidence, noisy_lengths
from chimsim.errors import ChimsimError
from chimsim.predictors import TracePredictor, build_predictor
from policies.interface import Prediction
from tests.chimsim.worlds import traces as drawn_traces
from traces import read_trace, write_trace
from traces.graph import ancestors
from traces.schema import Run, Stage, Trace, Workflow
from traces.sealed import SealedWorkflows

MODELS = ("small", "large")


def run(*outputs: int, solved: bool | None = None) -> Run:
    return Run(tuple(Stage(f"s{i}", 50, tokens) for i, tokens in enumerate(outputs)), solved)


def workflow(name: str, runs: Mapping[str, Run], workload: str = "apps", **confidence: float) -> Workflow:
    return Workflow(name, workload, runs, confidence=confidence)


TINY = Trace(
    "tiny",
    (
        workflow("a", {"small": run(10, 20, 30, solved=True), "large": run(5, solved=False)}, small=0.7, large=0.9),
        workflow("b", {"small": run(7, 0, solved=False), "large": run(1, 2, solved=True)}, small=0.2, large=0.8),
        workflow("c", {"small": run(9, solved=False), "large": run(9, solved=True)}, "maths", small=0.1, large=0.5),
    ),
)


def population(n: int, seed: int = 0) -> Trace:
    """Workflows of 1 to 4 stages, heavy-tailed; the small model solves 30 %, the large one 60 %."""
    rng = np.random.default_rng(seed)
    workflows = []
    for i in range(n):
        hard = rng.normal()
        runs = {}
        for model, rate in zip(MODELS, (0.3, 0.6), strict=True):
            outputs = [1 + int(exp(4 + hard + rng.normal())) for _ in range(rng.integers(1, 5))]
            runs[model] = run(*outputs, solved=bool(rng.random() < rate))
        workflows.append(workflow(f"w{i}", runs))
    return Trace("population", tuple(workflows))


POPULATION = population(1500)


def ask(predictor: TracePredictor, name: str, stage: int = 0, models: tuple[str, ...] = MODELS) -> Prediction:
    return predictor.predict(PredictionInput(name, "apps", stage, f"s{stage}", models, 50, None, None, None, ()))


def told(trace: Trace, predictor: TracePredictor, model: str) -> tuple[Floats, Floats, Floats, Floats]:
    """True and predicted stage tokens, true and predicted remaining tokens, over all calls of a model."""
    rows = []
    for each in trace.workflows:
        outputs = [stage.output_tokens for stage in each.runs[model].stages]
        for i, own in enumerate(outputs):
            answer = ask(predictor, each.workflow_id, i)
            left = sum(outputs[i:])
            rows.append((own, answer.stage_tokens[model], left, answer.remaining_tokens[model]))
    own_true, own, left_true, left = np.array(rows, np.float64).T
    return own_true, own, left_true, left


def test_what_a_predictor_sees_holds_no_future() -> None:
    assert {field.name for field in fields(PredictionInput)} == {
        "workflow_id", "workload", "stage", "stage_name", "models", "prompt_tokens", "system_tokens",
        "user_tokens", "prompt", "finished",
    }  # fmt: skip


def test_the_oracle_knows_lengths_and_labels() -> None:
    answer = ask(build_predictor(TINY, router="oracle"), "a", 1)
    assert answer.stage_tokens == {"small": 20, "large": 0}
    assert answer.remaining_tokens == {"small": 50, "large": 0}
    assert answer.rank == answer.stage_tokens
    assert answer.confidence == {"small": 1.0, "large": 0.0}
    assert type(answer.confidence["small"]) is type(answer.stage_tokens["small"]) is float


def test_a_model_with_fewer_stages_has_nothing_left() -> None:
    predictor = build_predictor(TINY, router="oracle", length_error=0.3)
    assert ask(predictor, "a", 2).remaining_tokens["large"] == 0
    assert ask(predictor, "a", 2).remaining_tokens["small"] > 0


def test_only_the_models_asked_for_are_answered() -> None:
    answer = ask(build_predictor(TINY), "a", models=("large",))
    assert set(answer.confidence) == set(answer.rank) == set(answer.remaining_tokens) == {"large"}


def test_recorded_confidence_is_passed_on() -> None:
    assert ask(build_predictor(TINY), "b").confidence == {"small": 0.2, "large": 0.8}


def test_without_a_router_confidence_is_the_solved_rate_on_the_workload() -> None:
    predictor = build_predictor(TINY, router="none")
    assert ask(predictor, "a").confidence == ask(predictor, "b").confidence == {"small": 0.5, "large": 0.5}
    assert ask(predictor, "c").confidence == {"small": 0.0, "large": 1.0}


def test_without_a_router_unlabelled_workflows_get_the_rate_of_the_labelled() -> None:
    more = replace(TINY, workflows=(*TINY.workflows, workflow("d", {"small": run(3), "large": run(4)})))
    assert ask(build_predictor(more, router="none"), "d").confidence == {"small": 0.5, "large": 0.5}


UNLABELLED = Trace("bare", tuple(replace(w, confidence={}, runs={m: run(3) for m in MODELS}) for w in TINY.workflows))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"router": "trace"}, "workflow 'a' of trace 'bare' has no confidence recorded for model 'large'"),
        ({"router": "oracle"}, "workflow 'a' of trace 'bare' has no label for model 'large'"),
        ({"router": "none"}, "trace 'bare' has no label for model 'large' in any workflow"),
        ({"router_map": 0.6}, "trace 'bare' has no label for model 'large' in any workflow"),
    ],
)
def test_confidence_that_is_missing_is_an_error_only_when_it_is_read(settings: dict[str, object], said: str) -> None:
    predictor = build_predictor(UNLABELLED, **settings)  # type: ignore[arg-type]
    answer = ask(predictor, "a")
    assert answer.remaining_tokens == {"small": 3, "large": 3}
    with pytest.raises(ChimsimError, match=said):
        answer.confidence["large"]


def test_one_unlabelled_workflow_does_not_hide_the_others() -> None:
    half = replace(TINY, workflows=(*TINY.workflows, workflow("d", {m: run(3) for m in MODELS})))
    predictor = build_predictor(half, router="oracle")
    assert ask(predictor, "a").confidence["small"] == 1
    with pytest.raises(ChimsimError, match="workflow 'd'"):
        ask(predictor, "d").confidence["small"]


def test_an_unlabelled_workload_is_named() -> None:
    odd = replace(TINY, workflows=(*TINY.workflows, workflow("d", {m: run(3) for m in MODELS}, "chess")))
    with pytest.raises(ChimsimError, match="workload 'chess'"):
        ask(build_predictor(odd, router="none"), "d").confidence["small"]


def test_unknown_workflows_and_models_are_named() -> None:
    predictor = build_predictor(TINY)
    with pytest.raises(ChimsimError, match="workflow 'z' is not in trace 'tiny'"):
        ask(predictor, "z")
    with pytest.raises(ChimsimError, match="has no run of model 'larg'; did you mean 'large'"):
        ask(predictor, "a", models=("larg",))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"router": "orcle"}, "did you mean 'oracle'"),
        ({"router": "noisy"}, "needs its average precision"),
        ({"router": "none", "router_map": 0.5}, "no average precision to set"),
        ({"router_map": 0.0}, "more than 0 and at most 1"),
        ({"router_map": nan}, "more than 0 and at most 1"),
        ({"length_error": 0.51}, "between 0 .* and 0.5"),
        ({"length_error": -0.1}, "between 0 .* and 0.5"),
        ({"length_error": nan}, "between 0 .* and 0.5"),
        ({"router_s": -1.0}, "router_s is -1.0"),
        ({"predictor_s": inf}, "predictor_s is inf"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ChimsimError, match=said):
        build_predictor(TINY, **settings)  # type: ignore[arg-type]


def test_overheads_are_passed_on() -> None:
    predictor = build_predictor(TINY, router_s=0.02, predictor_s=0.003)
    assert (predictor.router_s, predictor.predictor_s) == (0.02, 0.003)
    assert (build_predictor(TINY).router_s, build_predictor(TINY).predictor_s) == (0, 0)


@pytest.mark.parametrize("distance", [0.05, 0.2, 0.4, 0.5])
def test_the_length_dial_gives_the_kendall_distance_asked_for(distance: float) -> None:
    predictor = build_predictor(POPULATION, router="oracle", length_error=distance, seed=3)
    for model in MODELS:
        own_true, own, left_true, left = told(POPULATION, predictor, model)
        # A random order is one draw, not solved for: its distance scatters by 1 / (3 sqrt(n)).
        allowed = 0.03 if distance == 0.5 else 0.01
        assert kendall_distance(own_true, own) == pytest.approx(distance, abs=allowed)
        assert kendall_distance(left_true, left) == pytest.approx(distance, abs=allowed)
        assert min(own.min(), left.min()) > 0
        assert np.isfinite([own, left]).all()


def test_noise_multiplies_the_length_alike_for_a_call_and_what_is_left() -> None:
    predictor = build_predictor(POPULATION, router="oracle", length_error=0.2)
    own_true, own, left_true, left = told(POPULATION, predictor, "small")
    on_own, on_left = np.log(own / own_true), np.log(left / left_true)
    assert np.corrcoef(on_own, on_left)[0, 1] == pytest.approx(1)
    assert on_own.mean() == pytest.approx(0, abs=0.1)


def test_noise_hangs_on_seed_workflow_stage_and_model_only() -> None:
    whole = build_predictor(POPULATION, router_map=0.7, length_error=0.2, seed=1)
    backwards = replace(POPULATION, workflows=POPULATION.workflows[::-1])
    other = build_predictor(backwards, router_map=0.7, length_error=0.2, seed=1)
    for i in (0, 3, 700):
        mine, theirs = ask(whole, f"w{i}"), ask(other, f"w{i}", models=MODELS[::-1])
        for model in MODELS:
            assert mine.stage_tokens[model] == pytest.approx(theirs.stage_tokens[model], rel=1e-3)
            assert mine.confidence[model] == pytest.approx(theirs.confidence[model], rel=1e-3)
    reseeded = build_predictor(POPULATION, router_map=0.7, length_error=0.2, seed=2)
    assert ask(reseeded, "w0").stage_tokens != ask(whole, "w0").stage_tokens
    assert ask(reseeded, "w0").confidence != ask(whole, "w0").confidence


def test_named_noise_is_standard_normal_and_independent_between_names() -> None:
    names = [f"w{i}" for i in range(20_000)]
    z = noise(0, "length", names)
    assert z.mean() == pytest.approx(0, abs=0.03)
    assert z.std() == pytest.approx(1, abs=0.02)
    for other in (noise(1, "length", names), noise(0, "router", names), np.roll(z, 1)):
        assert np.corrcoef(z, other)[0, 1] == pytest.approx(0, abs=0.03)
    assert (noise(0, "length", names[::-1])[::-1] == z).all()


def test_equal_lengths_have_no_order_to_get_wrong() -> None:
    assert noisy_lengths(np.full(10, 7.0), noise(0, "x", map(str, range(10))), 0.3) == pytest.approx(7.0)


def test_a_long_trace_is_solved_on_a_sample() -> None:
    n = 50_000
    true = np.asarray(np.exp(np.random.default_rng(0).normal(5, 1, n)).round() + 1, np.float64)
    predicted = noisy_lengths(true, noise(0, "x", map(str, range(n))), 0.25)
    assert kendall_distance(true, predicted) == pytest.approx(0.25, abs=0.01)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=20))
def test_the_kendall_distance_counts_the_pairs_in_the_wrong_order(pairs: list[tuple[int, int]]) -> None:
    wrong = untied = 0.0
    for (true_a, seen_a), (true_b, seen_b) in combinations(pairs, 2):
        if true_a != true_b:
            untied += 1
            product = (true_a - true_b) * (seen_a - seen_b)
            wrong += 1.0 if product < 0 else 0.5 if product == 0 else 0.0
    true, seen = np.array(pairs, np.float64).reshape(-1, 2).T
    assert kendall_distance(true, seen) == pytest.approx(wrong / untied if untied else 0, abs=1e-9)


def labels_and_confidence(predictor: TracePredictor, trace: Trace, model: str) -> tuple[Floats, Floats]:
    labels = np.array([float(bool(w.runs[model].solved)) for w in trace.workflows])
    return labels, np.array([ask(predictor, w.workflow_id).confidence[model] for w in trace.workflows])


@pytest.mark.parametrize("target", [0.65, 0.8, 0.95])
def test_the_router_dial_gives_the_average_precision_asked_for(target: float) -> None:
    predictor = build_predictor(POPULATION, router_map=target, seed=4)
    for model in MODELS:
        labels, confidence = labels_and_confidence(predictor, POPULATION, model)
        assert average_precision_score(labels, confidence) == pytest.approx(target, abs=0.005)


@pytest.mark.parametrize("target", [0.45, 0.8])
def test_noisy_confidence_is_calibrated(target: float) -> None:
    labels = (np.random.default_rng(1).random(40_000) < 0.3).astype(np.float64)
    confidence = noisy_confidence(labels, noise(0, "y", map(str, range(len(labels)))), target)
    assert confidence.mean() == pytest.approx(0.3, abs=0.01)
    edges = np.quantile(confidence, np.linspace(0, 1, 11))
    for low, high in pairwise(edges):
        inside = (confidence >= low) & (confidence <= high)
        assert labels[inside].mean() == pytest.approx(confidence[inside].mean(), abs=0.03)


def test_an_average_precision_of_one_is_the_oracle() -> None:
    assert ask(build_predictor(TINY, router_map=1.0), "a").confidence == {"small": 1.0, "large": 0.0}


def test_an_average_precision_below_the_base_rate_is_refused_with_the_base_rate() -> None:
    with pytest.raises(ChimsimError, match=r"0.3 is below the base rate 0.667.*model 'large', trace 'tiny'"):
        build_predictor(TINY, models=("large",), router_map=0.3)
    late = build_predictor(TINY, router_map=0.3)
    with pytest.raises(ChimsimError, match="below the base rate"):
        ask(late, "a").confidence["large"]


def test_a_model_that_solves_nothing_has_no_average_precision() -> None:
    with pytest.raises(ChimsimError, match="no labelled workflow is solved"):
        noisy_confidence(np.zeros(5), np.zeros(5), 0.5)
    assert noisy_confidence(np.ones(5), np.zeros(5), 1.0).tolist() == [1.0] * 5


@given(st.lists(st.tuples(st.booleans(), st.floats(-1e6, 1e6)), min_size=1, max_size=30, unique_by=lambda x: x[1]))
def test_average_precision_is_the_usual_one(rows: list[tuple[bool, float]]) -> None:
    labels, scores = np.array(rows, np.float64).T
    if labels.any():
        assert average_precision(labels, scores) == pytest.approx(average_precision_score(labels, scores))
    else:
        assert np.isnan(average_precision(labels, scores))


@given(drawn_traces(), st.sampled_from([0.0, 0.3]))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_file_of_columns_is_predicted_as_its_workflows_are(tmp_path: Path, trace: Trace, error: float) -> None:
    path = tmp_path / "t.parquet"
    write_trace(trace, path)
    sealed = read_trace(path)
    assert isinstance(sealed.workflows, SealedWorkflows)
    plain, columns = (build_predictor(t, router="oracle", length_error=error) for t in (trace, sealed))
    for each in trace.workflows:
        for model, lived in each.runs.items():
            for index, before in enumerate(ancestors(lived.stages)):
                answer = ask(columns, each.workflow_id, index, tuple(each.runs))
                assert answer == ask(plain, each.workflow_id, index, tuple(each.runs))
                if not error:
                    left = [stage.output_tokens for i, stage in enumerate(lived.stages) if i not in before]
                    assert answer.remaining_tokens[model] == sum(left)
