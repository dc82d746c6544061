"""Validation of single workflows: defaults, and what each mistake is told."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traces.builders import row, stage, trace_rows
from traces import TraceError, to_dict, workflow_from_dict

PREFIX = {"id": "coder-system", "tokens": 50}


def message_of(data: object) -> str:
    with pytest.raises(TraceError) as caught:
        workflow_from_dict(data, "my.jsonl:17")
    message = str(caught.value)
    assert message.startswith("my.jsonl:17: ")
    assert "\n" not in message
    return message.removeprefix("my.jsonl:17: ")


def stage_message(*stages: dict[str, Any]) -> str:
    return message_of(row(stages=list(stages))).removeprefix("runs.Qwen2.5-1.5B.stages")


def reuse_of(*stages: dict[str, Any]) -> int:
    return workflow_from_dict(row(stages=list(stages)), "x").runs["Qwen2.5-7B"].stages[-1].reused_tokens


def test_a_wrong_number_is_named_by_file_line_and_field() -> None:
    assert message_of(row(stages=[stage(), stage(output_tokens=-3)])) == (
        "runs.Qwen2.5-1.5B.stages[1].output_tokens: expected a positive integer, found -3"
    )


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "12", None, float("nan"), float("inf"), [], 10**10])
@pytest.mark.parametrize("name", ["prompt_tokens", "output_tokens"])
def test_lengths_are_positive_integers(name: str, value: object) -> None:
    assert f"[0].{name}: expected a positive integer" in stage_message(stage(**{name: value}))


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), True, "1", [], 10**400])
def test_times_are_finite_seconds(value: object) -> None:
    assert "[0].delay_s: expected a finite number of seconds" in stage_message(stage(delay_s=value))
    assert "arrival_s: expected a finite number of seconds" in message_of(row(arrival_s=value))


def test_reuse_defaults_to_all_of_the_previous_stage_that_fits() -> None:
    assert reuse_of(stage()) == 0
    assert reuse_of(stage(), stage(prompt_tokens=500)) == 120
    assert reuse_of(stage(), stage(prompt_tokens=110)) == 109
    assert reuse_of(stage(), stage(prompt_tokens=500, reused_tokens=3)) == 3
    assert reuse_of(stage(shared_prefix=PREFIX), stage(prompt_tokens=500, shared_prefix=PREFIX)) == 120
    assert reuse_of(stage(), stage(prompt_tokens=500, shared_prefix=PREFIX)) == 0


def test_reuse_of_what_is_not_there_is_refused() -> None:
    assert "[0].reused_tokens: expected 0 in a stage that has nothing before it" in stage_message(
        stage(reused_tokens=1)
    )
    assert "[1].reused_tokens: expected at most 120" in stage_message(
        stage(), stage(prompt_tokens=500, reused_tokens=121)
    )
    assert "[1].reused_tokens: expected at most 90" in stage_message(stage(), stage(prompt_tokens=90, reused_tokens=91))
    assert "the shared_prefix is not that of the stage it goes on from" in stage_message(
        stage(), stage(shared_prefix=PREFIX, reused_tokens=1)
    )


def test_a_stage_waits_for_the_one_before_unless_it_says_for_which() -> None:
    plain = workflow_from_dict(row(stages=[stage(), stage(), stage()]), "x")
    assert workflow_from_dict(row(stages=[stage(after=[]), stage(after=[0]), stage(after=[1])]), "x") == plain
    graph = workflow_from_dict(row(stages=[stage(), stage(), stage(after=[0]), stage(after=[2, 1])]), "x")
    stages = next(iter(graph.runs.values())).stages
    assert [each.after for each in stages] == [None, None, (0,), (1, 2)]
    assert workflow_from_dict(to_dict(graph), "x") == graph


@pytest.mark.parametrize(
    ("after", "message"),
    [
        ([2], "expected numbers below 2 (stages stand after those they wait for, in no circle), found [2]"),
        ([0, 7], "expected numbers below 2"),
        ([0, 0], "expected each stage once, found [0, 0]"),
        (1, "expected a list of the numbers of earlier stages, found 1"),
        (None, "expected a list of the numbers of earlier stages, found null"),
        ([True], "expected a list of the numbers of earlier stages"),
        ([-1], "expected a list of the numbers of earlier stages"),
    ],
)
def test_what_a_stage_waits_for_must_stand_before_it(after: object, message: str) -> None:
    assert f"[2].after: {message}" in stage_message(stage(), stage(), stage(after=after))


def test_a_prompt_goes_on_from_the_longest_of_its_parents() -> None:
    fan = [stage(prompt_tokens=10, output_tokens=5), stage(prompt_tokens=30, output_tokens=9, after=[0]),
           stage(prompt_tokens=35, output_tokens=8, after=[0])]  # fmt: skip
    workflow = workflow_from_dict(row(stages=[*fan, stage(prompt_tokens=100, after=[1, 2])]), "x")
    assert [each.reused_tokens for each in next(iter(workflow.runs.values())).stages] == [0, 15, 15, 43]
    text = stage_message(*fan, stage(prompt_tokens=100, reused_tokens=44, after=[1, 2]))
    assert "[3].reused_tokens: expected at most 43" in text


def test_unknown_fields_are_refused_with_the_nearest_name() -> None:
    assert "did you mean 'output_tokens'?" in stage_message(stage(output_token=3))
    assert "unknown field 'arival_s'; did you mean 'arrival_s'?" in message_of(row(arival_s=1))
    assert "confidence: expected models that have a run, found 'Qwen2.5-7b'; did you mean 'Qwen2.5-7B'?" in (
        message_of(row(confidence={"Qwen2.5-7b": 0.5}))
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workflow_id": ""}, "workflow_id: expected a non-empty string"),
        ({"workload": 3}, "workload: expected a non-empty string, found 3"),
        ({"runs": {}}, "runs: expected an object of at least one model's run, found {}"),
        ({"runs": {"": {"stages": [stage()]}}}, "runs: expected a model name"),
        ({"runs": {"a": {"stages": []}}}, "runs.a.stages: expected a list of at least one stage"),
        ({"runs": {"a": {}}}, "runs.a: field 'stages' is missing"),
        ({"runs": {"a": {"stages": [7]}}}, "runs.a.stages[0]: expected an object, found 7"),
        ({"runs": {"a": {"solved": 1, "stages": [stage()]}}}, "runs.a.solved: expected true, false or null"),
        ({"confidence": {"Qwen2.5-7B": 1.5}}, "expected a number from 0 to 1, found 1.5"),
        ({"confidence": {"Qwen2.5-7B": float("nan")}}, "confidence.Qwen2.5-7B: expected a number"),
        ({"confidence": {"Qwen2.5-7B": True}}, "expected a number from 0 to 1, found true"),
        ({"meta": {"x": float("nan")}}, "meta: expected plain JSON"),
        ({"prompt": "\ud800"}, "prompt: expected text, found half a surrogate pair"),
        ({"prompt": 5}, "prompt: expected a string or null, found 5"),
    ],
)  # fmt: skip
def test_each_mistake_has_its_message(change: dict[str, Any], message: str) -> None:
    assert message in message_of(row() | change)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shared_prefix": {"id": "s", "tokens": 101}}, "shared_prefix.tokens: expected at most"),
        ({"shared_prefix": {"id": "s"}}, "shared_prefix: field 'tokens' is missing"),
        ({"hash_ids": [1, 2]}, "hash_ids: expected 1 ids (prompt_tokens 100 in blocks of 512), found 2"),
        ({"hash_ids": [-1]}, "hash_ids[0]: expected an integer from 0"),
        ({"hash_ids": list(range(6)), "hash_block_tokens": 16}, "hash_ids: expected 7 ids"),
        ({"system_tokens": 101}, "system_tokens: expected at most prompt_tokens (100), found 101"),
        ({"system_tokens": 60, "user_tokens": 41}, "user_tokens: expected with system_tokens (60) at most"),
    ],
)  # fmt: skip
def test_each_mistake_of_a_stage_has_its_message(fields: dict[str, Any], message: str) -> None:
    assert message in stage_message(stage(**fields))


@pytest.mark.parametrize("data", [None, [], "x", 3])
def test_a_line_is_an_object(data: object) -> None:
    assert message_of(data).startswith("expected an object")


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in items for found in paths_of(item, (*path, key)))]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just("\udc80"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(trace_rows(), anything, st.data())
@settings(max_examples=60)
def test_a_damaged_workflow_raises_nothing_but_a_trace_error(
    rows: list[dict[str, Any]], value: Any, data: st.DataObject
) -> None:
    damaged = copy.deepcopy(rows[0])
    *outer, last = data.draw(st.sampled_from(paths_of(damaged)[1:]))
    target: Any = damaged
    for key in outer:
        target = target[key]
    action = data.draw(st.sampled_from(["replace", "remove", "rename"]))
    if action == "replace" or not isinstance(target, dict):
        target[last] = value
    elif action == "remove":
        del target[last]
    else:
        target[last + "x"] = target.pop(last)
    try:
        workflow = workflow_from_dict(damaged, "my.jsonl:1")
    except TraceError:
        return
    assert workflow_from_dict(to_dict(workflow), "again") == workflow
