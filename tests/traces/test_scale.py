"""A scaled trace is the same trace with other lengths, and still a valid one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces import Stage, Trace, TraceError, load_trace, to_dict, workflow_from_dict
from traces.scale import scaled


@cache
def apps() -> Trace:
    return load_trace("apps")


@settings(deadline=None, max_examples=20)
@given(st.floats(0.001, 5.0), st.none() | st.integers(1, 500))
def test_what_comes_out_is_a_trace(factor: float, most: int | None) -> None:
    small = Trace("apps", apps().workflows[:40])
    made = scaled(small, factor, most)
    for before, after in zip(small.workflows, made.workflows, strict=True):
        assert workflow_from_dict(to_dict(after), "here") == after
        assert (after.workflow_id, after.prompt, after.confidence) == (
            before.workflow_id, before.prompt, before.confidence,
        )  # fmt: skip
        for model, run in before.runs.items():
            assert after.runs[model].solved == run.solved
            for old, new in zip(run.stages, after.runs[model].stages, strict=True):
                assert new.prompt_tokens == max(round(old.prompt_tokens * factor), 1)
                assert new.output_tokens <= (most or 10**9)


def test_one_changes_nothing() -> None:
    trace = load_trace("maths")
    assert scaled(trace, 1.0).workflows == trace.workflows


def test_wrong_factors_and_hashed_blocks_are_refused(tmp_path: Path) -> None:
    trace = load_trace("apps")
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(TraceError, match=r"lengths factor is .*; expected a number above 0"):
            scaled(trace, factor)
    with pytest.raises(TraceError, match="max output tokens is 0"):
        scaled(trace, 1.0, 0)
    run = replace(trace.workflows[0].runs["Qwen2.5-7B"], stages=(Stage("a", 10, 1, hash_ids=(1,)),))
    with pytest.raises(TraceError, match="hash_ids cannot be scaled"):
        scaled(Trace("x", (replace(trace.workflows[0], runs={"Qwen2.5-7B": run}),)), 0.5)
