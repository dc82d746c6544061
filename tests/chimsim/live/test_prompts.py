"""What is sent shares exactly what the trace says is shared, and has exactly its lengths."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimsim.errors import ChimsimError
from chimsim.layout import Layout
from chimsim.live.prompts import LengthPrompts, TextPrompts
from tests.chimsim.worlds import workflow
from traces import Run, SharedPrefix, Stage


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


@given(st.integers(1, 200), st.integers(1, 50), st.data())
def test_a_later_stage_begins_with_what_it_reuses(first: int, answer: int, data: st.DataObject) -> None:
    prompt = data.draw(st.integers(2, 400))
    reused = data.draw(st.integers(1, min(first + answer, prompt - 1)))
    stages = (Stage("a", first, answer), Stage("b", prompt, 3, reused_tokens=reused))
    source, prompts = workflow("w", stages), LengthPrompts(1, 100, 1_000_000)
    one = prompts.of(0, source, 0, stages[0], Layout(0, Run(stages)))
    ids = tuple(range(10, 10 + answer))
    prompts.answered(0, 0, one, ids, "")
    two = prompts.of(0, source, 1, stages[1], Layout(0, Run(stages)))
    assert (len(one), len(two)) == (first, prompt)
    assert two[:reused] == (*one, *ids)[:reused]
    assert common(two, (*one, *ids)) < reused + 3, "the rest is its own"


def test_workflows_share_a_prefix_and_nothing_else() -> None:
    stage = Stage("a", 64, 3, shared_prefix=SharedPrefix("system", 40))
    source, prompts = workflow("w", (stage,)), LengthPrompts(1, 100, 1_000_000)
    a, b = (prompts.of(row, source, 0, stage, Layout(0, Run((stage,)))) for row in (0, 1))
    assert common(a, b) == 40
    other = LengthPrompts(2, 100, 1_000_000).of(0, source, 0, stage, Layout(0, Run((stage,))))
    assert common(a, other) == 0, "another run has other prompts"


def test_hashed_blocks_have_the_same_ids_wherever_they_stand() -> None:
    stage = Stage("a", 40, 3, hash_ids=(7, 8, 9), hash_block_tokens=16)
    longer = Stage("a", 64, 3, hash_ids=(7, 8, 10, 11), hash_block_tokens=16)
    prompts = LengthPrompts(1, 100, 1_000_000)
    a = prompts.of(0, workflow("w", (stage,)), 0, stage, Layout(0, Run((stage,))))
    b = prompts.of(1, workflow("v", (longer,)), 0, longer, Layout(0, Run((longer,))))
    assert (len(a), len(b), common(a, b)) == (40, 64, 32)


def test_texts_are_the_traces_own_and_follow_each_other() -> None:
    stages = (Stage("plan", 5, 3), Stage("code", 9, 3), Stage("own", 9, 3, prompt="as written"))
    source = replace(workflow("w", stages), prompt="do it")
    prompts = TextPrompts()
    first = prompts.of(0, source, 0, stages[0], Layout(0, Run(stages)))
    assert first == "do it\n\nplan:\n"
    prompts.answered(0, 0, first, (), "a plan")
    assert prompts.of(0, source, 1, stages[1], Layout(0, Run(stages))) == "do it\n\nplan:\na plan\n\ncode:\n"
    assert prompts.of(0, source, 2, stages[2], Layout(0, Run(stages))) == "as written"
    with pytest.raises(ChimsimError, match="workflow v has no prompt to send"):
        prompts.of(1, workflow("v", stages), 0, stages[0], Layout(0, Run(stages)))
