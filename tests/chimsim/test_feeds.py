"""Parts of a trace, confidences of other workflows, and true lengths that would choose a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from calibration.rows import FinishedStage, PredictionInput, calls_of
from chimsim.errors import ChimsimError
from chimsim.feeds import Feed, in_part, label_leak, predictor_for, trace_named
from chimsim.grid import Cell, cells
from chimsim.predictors import ShuffledRouter, build_predictor
from chimsim.spec import spec_from
from chimsim.sweeps import run_cell, run_sweep
from tests.chimsim.small import small_keys, small_trace, tree_bytes
from tests.chimsim.test_predictors import MODELS, POPULATION, TINY, ask
from traces import Run, Stage, Trace, load_trace, write_trace


def cells_of(**keys: Any) -> list[Cell]:
    return cells(spec_from({"trace": "apps", "combo": "qwen1.5b+7b", "policy": "chimera", "rps": 8, **keys}))


def ids(cell: Cell) -> set[str]:
    return {workflow.workflow_id for workflow in trace_named(cell.trace).workflows}


def test_the_parts_make_up_the_trace_and_share_nothing() -> None:
    whole = {workflow.workflow_id for workflow in load_trace("apps").workflows}
    parts = [ids(cells_of(part=f"{number}/3")[0]) for number in (1, 2, 3)]
    assert set.union(*parts) == whole
    assert sum(map(len, parts)) == len(whole)
    assert all(len(part) > len(whole) / 4 for part in parts)


def test_a_workflow_is_in_the_same_part_whatever_it_stands_among() -> None:
    few = [workflow.workflow_id for workflow in load_trace("apps").workflows][:50]
    assert {name for name in few if in_part(name, "1/2")} == ids(cells_of(part="1/2")[0]) & set(few)


def test_a_part_is_another_cell_of_the_same_name() -> None:
    (whole,), (first,), (second,) = cells_of(), cells_of(part="1/2"), cells_of(part="2/2")
    assert len({cell.name for cell in (whole, first, second)}) == 3
    assert whole.axes == first.axes == second.axes
    result, _ = run_cell(replace(second, workflows=20))
    assert set(result.workflows["source_id"]) <= ids(second)


def test_a_part_without_workflows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    write_trace(Trace("one", load_trace("apps").workflows[:1]), path)
    empty = 2 if in_part(load_trace(path).workflows[0].workflow_id, "1/2") else 1
    with pytest.raises(ChimsimError, match=f"part {empty}/2: none of the workflows of trace one is in it"):
        cells_of(trace=str(path), part=f"{empty}/2")


def test_a_part_stands_in_the_manifest() -> None:
    spec = spec_from({"trace": "apps", "combo": "qwen1.5b", "policy": "fcfs", "rps": 1, "part": "02/2"})
    assert spec.part == "2/2"
    assert spec_from({}, spec.to_dict()) == spec


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "a/b", "1/2/3", "-1/2"])
def test_a_part_that_is_none_is_refused(part: str) -> None:
    with pytest.raises(ChimsimError, match=f"part: '{part}' is no part of the workflows; expected one such as 1/2"):
        cells_of(part=part)


def test_shuffled_confidences_are_those_of_another_workflow_of_the_workload_for_all_models() -> None:
    workloads = tuple(replace(w, workload="ab"[i % 2]) for i, w in enumerate(POPULATION.workflows[:200]))
    trace = replace(POPULATION, workflows=workloads)
    base = build_predictor(trace, router="oracle")
    shuffled, again, other = (ShuffledRouter(trace, base, seed) for seed in (1, 1, 2))

    def pairs(predictor: Any, workload: str) -> list[tuple[float, ...]]:
        mine = [w.workflow_id for w in trace.workflows if w.workload == workload]
        return [tuple(ask(predictor, name).confidence[m] for m in MODELS) for name in mine]

    for workload in "ab":
        drawn = pairs(shuffled, workload)
        assert sorted(drawn) == sorted(pairs(base, workload)), "as many of each pair as before"
        assert drawn != pairs(base, workload)
        assert drawn == pairs(again, workload) != pairs(other, workload)


def test_shuffled_confidences_leave_lengths_alone_at_every_stage() -> None:
    base = build_predictor(TINY, router="trace", router_s=0.5)
    shuffled = ShuffledRouter(TINY, base, 0)
    assert (shuffled.router_s, shuffled.predictor_s) == (0.5, 0.0)
    for call in calls_of(TINY.workflows[0], "small", MODELS):
        known, told = base.predict(call), shuffled.predict(call)
        assert (told.stage_tokens, told.remaining_tokens) == (known.stage_tokens, known.remaining_tokens)
        assert dict(told.confidence) in ({"small": 0.7, "large": 0.9}, {"small": 0.2, "large": 0.8})
    late = PredictionInput(
        "c", "maths", 1, "s1", MODELS, 50, None, None, None, (FinishedStage(0, "s0", "large", 1, 9),)
    )
    assert dict(shuffled.predict(late).confidence) == {"small": 0.1, "large": 0.5}, "the only one of its workload"


def test_a_shuffled_router_is_an_axis_of_its_own() -> None:
    plain, mixed = cells_of(router="trace,shuffled:trace", tau="inf", delta_s=0.2)
    assert (plain.axes["router"], mixed.axes["router"]) == ("trace", "shuffled:trace")
    assert plain.config["predictor"] | {"shuffled": True} == mixed.config["predictor"]
    assert isinstance(predictor_for(mixed.feed, mixed.trace, mixed.cluster.models, 0), ShuffledRouter)
    assert run_cell(replace(plain, workflows=40))[1] != run_cell(replace(mixed, workflows=40))[1]
    with pytest.raises(ChimsimError, match=r"'tracee' is unknown.*did you mean 'trace'"):
        cells_of(router="shuffled:tracee")


def test_the_format_of_a_trace_changes_no_byte_of_a_cell(tmp_path: Path) -> None:
    found = []
    for suffix in (".jsonl", ".parquet"):
        write_trace(small_trace(20), tmp_path / f"small{suffix}")
        run_sweep(spec_from(small_keys(str(tmp_path / f"small{suffix}"))), tmp_path / suffix)
        found.append(tree_bytes(tmp_path / suffix / "cells"))
    assert found[0] == found[1]
    assert len(found[0]) > 20


@pytest.mark.parametrize(
    ("change", "keys", "said"),
    [
        ("untold", {"router": "trace"}, "workflow w002 of t has no confidence for Qwen2.5-1.5B"),
        ("untold", {}, ""),
        ("unlabelled", {"router": "oracle"}, "workflow w002 of trace t has no label (solved) for Qwen2.5-7B"),
        ("missing", {}, "workflow w002 has no run of Qwen2.5-7B"),
        ("long", {}, "workflow w002, stage 1 (late): 99999 prompt + 5 output tokens do not fit"),
        ("long", {"oversize": "reject"}, ""),
        ("hashed", {}, "workflow w002, stage 0: hash_block_tokens is 24; expected a multiple of the 16"),
    ],
)
def test_what_a_run_cannot_do_with_a_trace_is_said_alike_of_every_format(
    tmp_path: Path, change: str, keys: dict[str, Any], said: str
) -> None:
    workflows = list(small_trace(4).workflows)
    small, large = (workflows[2].runs[model] for model in ("Qwen2.5-1.5B", "Qwen2.5-7B"))
    changed = {
        "unlabelled": {"Qwen2.5-1.5B": small, "Qwen2.5-7B": replace(large, solved=None)},
        "missing": {"Qwen2.5-1.5B": small},
        "long": {"Qwen2.5-1.5B": small, "Qwen2.5-7B": Run((*large.stages[:1], Stage("late", 99_999, 5)))},
        "hashed": {"Qwen2.5-1.5B": Run((Stage("s", 24, 5, hash_ids=(1,), hash_block_tokens=24),)), "Qwen2.5-7B": large},
    }.get(change, {"Qwen2.5-1.5B": small, "Qwen2.5-7B": large})
    confidence = {} if change == "untold" else dict.fromkeys(changed, 0.5)
    workflows[2] = replace(workflows[2], runs=changed, confidence=confidence)
    messages = []
    for suffix in (".jsonl", ".parquet"):
        path = tmp_path / f"t{suffix}"
        write_trace(Trace("t", tuple(workflows)), path)
        try:
            cells_of(trace=str(path), **keys)
            messages.append("")
        except ChimsimError as error:
            messages.append(str(error))
    assert messages[0] == messages[1]
    assert said in messages[0]
    assert bool(said) == bool(messages[0])


@pytest.mark.parametrize(
    ("policy", "lengths", "warned"),
    [
        ("costaware", 0.0, True),
        ("costaware", 0.2, True),
        ("costaware", "qrf:models/length", False),
        ("chimera", 0.0, False),
        ("fcfs", None, False),
    ],
)
def test_true_lengths_that_choose_the_model_are_warned_of(
    policy: str, lengths: float | str | None, warned: bool
) -> None:
    told = label_leak(policy, Feed("trace", lengths, None, 0.0, 0.0))
    assert (told is not None) == warned
    if told is not None:
        assert told.startswith("costaware chooses the model by lengths that come from the true ones")
