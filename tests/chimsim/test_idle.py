"""What is cached on an idle engine, by arithmetic: the cache itself says the same."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from chimsim.config import combo_cluster
from chimsim.idle import _hits, _plain_hits
from tests.chimsim.worlds import chains, engine
from traces import Run, SharedPrefix, Stage, load_trace

TOKENS = st.integers(1, 90)


@st.composite
def prefixed(draw: st.DrawFn) -> tuple[Stage, ...]:
    """Chains whose stages begin with one of two shared prefixes or none, and go on from what they may."""
    stages: list[Stage] = []
    for index in range(draw(st.integers(1, 5))):
        prompt, output = draw(TOKENS), draw(TOKENS)
        name = draw(st.sampled_from(["a", "b", None]))
        prefix = None if name is None else SharedPrefix(name, draw(st.integers(1, prompt)))
        reused = 0
        if stages and stages[-1].shared_prefix == prefix:
            reused = draw(st.integers(0, min(prompt, stages[-1].prompt_tokens + stages[-1].output_tokens)))
        stages.append(Stage(str(index), prompt, output, reused, shared_prefix=prefix))
    return tuple(stages)


@given(prefixed() | chains(), st.integers(13, 120), st.sampled_from([1, 4, 16]))
def test_hits_by_arithmetic_are_those_of_the_cache(stages: tuple[Stage, ...], blocks: int, block: int) -> None:
    spec = replace(engine(), block_tokens=block, num_kv_blocks=blocks + 180 // block)
    found = _plain_hits(spec, Run(stages))
    assert found is None or found == _hits(spec, Run(stages))


def test_the_shipped_traces_are_plain_on_the_shipped_engines() -> None:
    spec = combo_cluster("qwen1.5b+7b").engines[0]
    for name in ("apps", "maths"):
        for workflow in load_trace(name, 50).workflows:
            for run in workflow.runs.values():
                assert _plain_hits(spec, run) == _hits(spec, run)
