"""The generator and the shipped traces: published targets, determinism, and what a learner can know."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score

from traces import SHIPPED, Run, Trace, TraceError, load_trace, write_trace
from traces.parameters import load_parameters
from traces.schema import to_dict, workflow_from_dict
from traces.synthetic import generate

FAN_OUT = Path(__file__).resolve().parents[2] / "examples" / "fan-out.toml"
MODELS = ("Llama-3.2-3B", "Ministral-8B", "Qwen2.5-1.5B", "Qwen2.5-14B", "Qwen2.5-3B", "Qwen2.5-7B")


@cache
def shipped(name: str) -> Trace:
    return load_trace(name)


def runs_of(trace: Trace, model: str) -> list[Run]:
    return [workflow.runs[model] for workflow in trace.workflows]


def solved_of(trace: Trace, model: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.array([run.solved is True for run in runs_of(trace, model)])


def output_of(trace: Trace, model: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([float(sum(s.output_tokens for s in run.stages)) for run in runs_of(trace, model)])


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_file_is_what_the_parameters_make(name: str) -> None:
    assert generate(load_parameters(name)).digest == shipped(name).digest
    assert len((files("traces") / "data" / f"{name}.jsonl.gz").read_bytes()) < 2_000_000
    assert len(shipped(name).workflows) >= 2000
    assert shipped(name).models == MODELS
    assert all(workflow.arrival_s is None and workflow.prompt for workflow in shipped(name).workflows)


@pytest.mark.parametrize(("name", "mean", "std"), [("apps", 447, 1276), ("maths", 606, 2587)])
def test_output_of_the_smallest_model_has_the_published_moments(name: str, mean: float, std: float) -> None:
    output = output_of(shipped(name), "Qwen2.5-1.5B")
    assert output.mean() == pytest.approx(mean, rel=0.10)
    assert output.std() == pytest.approx(std, rel=0.25)


@pytest.mark.parametrize("name", SHIPPED)
def test_solved_rates_are_the_declared_ones(name: str) -> None:
    for model, declared in load_parameters(name).models.items():
        assert solved_of(shipped(name), model).mean() == pytest.approx(declared.solved_rate, abs=0.02), model


@pytest.mark.parametrize("name", SHIPPED)
def test_models_agree_often_but_a_small_one_is_sometimes_right_alone(name: str) -> None:
    small, large = (solved_of(shipped(name), model) for model in ("Qwen2.5-1.5B", "Qwen2.5-7B"))
    assert (small == large).mean() > 0.6
    assert 0.02 < (small & ~large).mean() < (large & ~small).mean()


@pytest.mark.parametrize("name", SHIPPED)
def test_hard_workflows_run_longer_on_all_models(name: str) -> None:
    lengths = {model: output_of(shipped(name), model) for model in MODELS}
    for model in MODELS:
        solved = solved_of(shipped(name), model)
        assert np.median(lengths[model][~solved]) > 1.2 * np.median(lengths[model][solved])
        together = np.corrcoef(np.log(lengths[model]), np.log(lengths["Qwen2.5-7B"]))[0, 1]
        assert together > 0.5


@pytest.mark.parametrize("name", SHIPPED)
def test_every_call_fits_the_context_and_its_tokens_add_up(name: str) -> None:
    for workflow in shipped(name).workflows:
        for run in workflow.runs.values():
            assert 1 <= len(run.stages) <= 4
            for stage in run.stages:
                assert stage.prompt_tokens + stage.output_tokens <= 32_768
                assert (stage.system_tokens or 0) + (stage.user_tokens or 0) == stage.prompt_tokens


@pytest.mark.parametrize(("name", "published"), [("apps", 0.52), ("maths", 0.74)])
def test_recorded_confidence_is_calibrated_and_as_good_as_published(name: str, published: float) -> None:
    precision = []
    for model in MODELS:
        solved = solved_of(shipped(name), model)
        confidence = np.array([workflow.confidence[model] for workflow in shipped(name).workflows])
        precision.append(float(average_precision_score(solved, confidence)))
        sure = confidence > np.median(confidence)
        for half in (sure, ~sure):
            assert solved[half].mean() == pytest.approx(confidence[half].mean(), abs=0.04), model
    assert np.mean(precision) == pytest.approx(published, abs=0.05)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_text_model_learns_something_but_not_everything(name: str) -> None:
    trace = shipped(name)
    texts = [workflow.prompt or "" for workflow in trace.workflows]
    train = len(texts) * 2 // 3
    words = TfidfVectorizer(max_features=2000, sublinear_tf=True)
    known, unknown = words.fit_transform(texts[:train]), words.transform(texts[train:])
    gains = []
    for model in ("Qwen2.5-1.5B", "Qwen2.5-7B"):
        solved = solved_of(trace, model)
        router = LogisticRegression(max_iter=300).fit(known, solved[:train])
        precision = average_precision_score(solved[train:], router.predict_proba(unknown)[:, 1])
        gains.append((precision - solved[train:].mean()) / (1 - solved[train:].mean()))
    assert 0.15 < np.mean(gains) < 0.75


def test_the_seed_and_the_size_decide(tmp_path: Path) -> None:
    parameters = load_parameters("maths")
    write_trace(generate(parameters, seed=5, workflows=40), tmp_path / "a.jsonl.gz")
    write_trace(generate(parameters, seed=5, workflows=40), tmp_path / "b.jsonl.gz")
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    assert generate(parameters, 6, 40).digest != generate(parameters, 5, 40).digest


def test_role_first_reuses_nothing_of_another_role_and_shares_the_role_prompt() -> None:
    stages = [s for w in generate(load_parameters("apps"), 1, 60).workflows for s in w.runs["Qwen2.5-7B"].stages]
    assert all(stage.reused_tokens == 0 for stage in stages)
    assert {s.shared_prefix.id for s in stages if s.shared_prefix} == {
        "apps-planner",
        "apps-coder",
        "apps-qa",
    }


def test_history_first_reuses_the_whole_history_that_is_carried_on() -> None:
    parameters = replace(load_parameters("apps"), layout="history-first")
    for workflow in generate(parameters, 1, 300).workflows:
        for run in workflow.runs.values():
            for before, stage in zip(run.stages, run.stages[1:], strict=False):
                carried = min(before.output_tokens, parameters.carry_tokens)
                assert stage.reused_tokens == before.prompt_tokens + carried
                assert stage.prompt_tokens > stage.reused_tokens
                assert stage.shared_prefix == before.shared_prefix


def test_the_layout_changes_prompts_only() -> None:
    parameters = load_parameters("maths")
    one, other = (generate(replace(parameters, layout=name), 1, 50) for name in ("role-first", "history-first"))
    for model in MODELS:
        assert (output_of(one, model) == output_of(other, model)).mean() > 0.95
        assert (solved_of(one, model) == solved_of(other, model)).all()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("slope = 2.0", "slop = 2.0", "unknown key 'slop'; did you mean 'slope'?"),
        ("slope = 2.0", "slope = nan", "slope: expected a number from 0 to 20, found nan"),
        ("slope = 2.0", "", "key 'slope' is missing"),
        ("slope = 2.0", "slope = ", "not valid TOML"),
        ('layout = "role-first"', 'layout = "roles"', "layout: expected one of role-first, history-first"),
        ("solved_rate = 0.18", "solved_rate = 18", "models.Qwen2.5-1.5B.solved_rate: expected"),
        ("solved_rate = 0.18", "solved = 0.18", "models.Qwen2.5-1.5B: unknown key 'solved'"),
        ('roles = ["coder"]', 'roles = ["koder"]', "patterns[0].roles: expected one of planner, coder, qa"),
        ("sentences = [1, 1]", "sentences = [1, 9]", "prompt.parts[7].sentences: expected [least, most]"),
        ("{place} has hired", "{plaice} has hired", "prompt.parts[0]: expected slots among n"),
    ],
)  # fmt: skip
def test_a_wrong_parameter_file_has_one_clear_message(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (files("traces") / "data" / "apps.toml").read_text()
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(TraceError) as caught:
        load_parameters(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")


def test_wrong_requests() -> None:
    with pytest.raises(TraceError, match="parameters 'math' are unknown; did you mean 'maths'"):
        load_parameters("math")
    with pytest.raises(TraceError, match="expected seed >= 0 and workflows >= 1"):
        generate(load_parameters("apps"), workflows=0)


@pytest.mark.parametrize("layout", ["role-first", "history-first"])
def test_roles_side_by_side_wait_for_the_one_before_and_are_waited_for(layout: str) -> None:
    parameters = replace(load_parameters(FAN_OUT), layout=layout)
    trace = generate(parameters, workflows=60)
    for workflow in trace.workflows:
        stages = workflow.runs["Qwen2.5-7B"].stages
        assert [stage.name for stage in stages[:5]] == ["planner", "coder", "coder", "coder", "judge"]
        assert [stage.after for stage in stages[:5]] == [None, None, (0,), (0,), (1, 2, 3)]
        assert all(stage.after is None for stage in stages[5:])
        assert stages[4].prompt_tokens > max(stage.prompt_tokens for stage in stages[1:4])
        assert workflow_from_dict(to_dict(workflow), "here") == workflow
        if layout == "history-first":
            longest_coder = max(stages[1:4], key=lambda s: s.prompt_tokens + s.output_tokens)
            carried = min(longest_coder.output_tokens, parameters.carry_tokens)
            assert stages[4].reused_tokens == longest_coder.prompt_tokens + carried


def test_a_file_may_say_only_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "maths"\nworkflows = 7\n[models."Qwen2.5-7B"]\nsolved_rate = 0.9\nlength_factor = 1.0\n'
                    "loop_rate = 0.0\n")  # fmt: skip
    mine, maths = load_parameters(path), load_parameters("maths")
    assert (mine.workflows, mine.roles, set(mine.models)) == (7, maths.roles, set(maths.models))
    assert mine.models["Qwen2.5-7B"].solved_rate == 0.9
    path.write_text('base = "math"')
    with pytest.raises(TraceError, match=r"mine.toml: base: expected one of apps, maths, found 'math'"):
        load_parameters(path)
    path.write_text('base = "apps"\npatterns = [{ roles = [["coder", "codr"]], weight = 1.0, tilt = 0.0 }]')
    with pytest.raises(TraceError, match=r"patterns\[0\].roles: expected one of .*found 'codr'"):
        load_parameters(path)
