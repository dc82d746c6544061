"""Small worlds to simulate in: profiles, clusters, traces and predictors made by hand or drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd
from hypothesis import strategies as st

from calibration.profile import EngineProfile
from calibration.rows import PredictionInput
from chimsim.config import Cluster, EngineSpec, Scheduling
from chimsim.records import RunResult
from policies.interface import Prediction
from traces import Run, SharedPrefix, Stage, Trace, Workflow
from traces.graph import longest

MODELS = ("A", "B")


def profile(model: str = "A", **fields: object) -> EngineProfile:
    """A quick profile with every kind of term in its step time."""
    given: dict[str, object] = {
        "dense": ((1, 0.020), (64, 0.031), (256, 0.070), (2048, 0.41)),
        "layers": 4,
        "host_s": 0.0013,
        "sequence_s": 1e-5,
        "a0": 1e-5,
        "a1": 2e-6,
        "a2": 2.3e-8,
        "w0": 2e-5,
        "w1": 1.1e-9,
        "w2": 7e-9,
        "m0": 3e-6,
        "m1": 4.1e-8,
        "num_kv_tokens": 400_000,
        "max_model_len": 32_768,
    }
    return EngineProfile(model=model, gpu="test", **(given | fields))  # type: ignore[arg-type]


def slow_profile(step_s: float, model: str = "A") -> EngineProfile:
    """Every step takes ``step_s``, whatever is in it."""
    return EngineProfile(model=model, gpu="test", dense=((1, step_s),), num_kv_tokens=1_000_000, max_model_len=100_000)


def engine(
    name: str = "A",
    model: str = "A",
    *,
    slots: int = 8,
    kv_blocks: int = 4000,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int = 2048,
    scheduling: Scheduling = "fcfs",
    prefix_caching: bool = True,
    step: EngineProfile | None = None,
) -> EngineSpec:
    """An engine with ``slots`` for the dispatcher and ``kv_blocks`` usable blocks."""
    return EngineSpec(
        name=name,
        model=model,
        profile=step or profile(model),
        max_num_seqs=max_num_seqs or slots,
        max_num_batched_tokens=max_num_batched_tokens,
        num_kv_blocks=kv_blocks + 1,
        max_batch_size=slots,
        max_model_len=32_768,
        scheduling=scheduling,
        prefix_caching=prefix_caching,
    )


def cluster(*engines: EngineSpec) -> Cluster:
    """A cluster of the engines."""
    return Cluster("test", tuple(sorted(engines, key=lambda spec: spec.name)))


def workflow(
    name: str, stages: Sequence[Stage], *, arrival_s: float | None = None, solved: bool | None = None
) -> Workflow:
    """The same stages on every model."""
    run = Run(tuple(stages), solved)
    return Workflow(name, "test", {model: run for model in MODELS}, arrival_s)


def single_stage(lengths: Sequence[tuple[int, int]], arrivals: Sequence[float] | None = None) -> Trace:
    """Workflows of one call each, (prompt, output) tokens."""
    rows = [
        workflow(f"w{i}", [Stage("s", prompt, output)], arrival_s=None if arrivals is None else arrivals[i])
        for i, (prompt, output) in enumerate(lengths)
    ]
    return Trace("test", tuple(rows))


class TrueLengths:
    """A predictor that knows all lengths of a trace, and is equally confident in every model."""

    router_s = 0.0
    predictor_s = 0.0

    def __init__(self, trace: Trace, router_s: float = 0.0, predictor_s: float = 0.0) -> None:
        self.runs = {workflow.workflow_id: workflow.runs for workflow in trace.workflows}
        self.router_s = router_s
        self.predictor_s = predictor_s

    def predict(self, inputs: PredictionInput) -> Prediction:
        runs = self.runs[inputs.workflow_id]
        stage = {m: float(sum(s.output_tokens for s in runs[m].stages[inputs.stage :][:1])) for m in inputs.models}
        left = {m: float(sum(s.output_tokens for s in runs[m].stages[inputs.stage :])) for m in inputs.models}
        return Prediction(dict.fromkeys(inputs.models, 0.5), stage, left, stage)


@st.composite
def chains(draw: st.DrawFn, max_output: int = 60, graph: bool = False) -> tuple[Stage, ...]:
    """One to three stages; each may share a system prompt, reuse some of the stage before, or start over.

    The prompts of some chains are named by content in hash blocks, as in Mooncake's traces. With ``graph`` one to five
    stages, each of which waits for any of those before it.
    """
    hash_block_tokens = draw(st.sampled_from([None, None, 32, 48]))
    stages: list[Stage] = []
    for index in range(draw(st.integers(1, 5 if graph else 3))):
        shared = None
        if draw(st.booleans()):
            shared = SharedPrefix(draw(st.sampled_from(["x", "y"])), draw(st.sampled_from([16, 40, 64])))
        after = tuple(sorted(draw(st.sets(st.integers(0, index - 1), max_size=2)))) if graph and index else None
        parent = longest(stages, range(index)[-1:] if after is None else after)
        source = None if parent is None else stages[parent]
        before = source.prompt_tokens + source.output_tokens if source is not None else 0
        least = max(1, shared.tokens if shared else 1)
        prompt = draw(st.one_of(st.integers(least, least + 100), st.just(least), st.integers(before + 1, before + 90)))
        prompt = max(prompt, least)
        reused = 0
        if source is not None and source.shared_prefix == shared:
            reused = draw(st.one_of(st.just(min(before, prompt)), st.integers(0, min(before, prompt))))
        stage = Stage(
            f"s{index}", prompt, draw(st.integers(1, max_output)), reused, draw(st.sampled_from([0.0, 0.0, 0.3])),
            shared_prefix=shared, after=after,
        )  # fmt: skip
        if hash_block_tokens is not None:
            hash_ids = draw(content_ids(prompt, hash_block_tokens, source.hash_ids if source is not None else ()))
            stage = replace(stage, hash_ids=hash_ids, hash_block_tokens=hash_block_tokens)
        stages.append(stage)
    return tuple(stages)


@st.composite
def content_ids(draw: st.DrawFn, tokens: int, block_tokens: int, before: Sequence[int] = ()) -> tuple[int, ...]:
    """Ids for all blocks of a prompt, of which some leading ones are those of the stage ``before``.

    An id stands for its block and all before it, as in Mooncake's traces, so that it never follows different ones.
    """
    count = -(-tokens // block_tokens)
    ids = list(before[: draw(st.integers(0, count))])
    while len(ids) < count:
        ids.append(2 * (ids[-1] if ids else block_tokens) + draw(st.integers(0, 1)))
    return tuple(ids)


@st.composite
def traces(draw: st.DrawFn, max_workflows: int = 12, graphs: bool = True) -> Trace:
    """Chains, and graphs unless told otherwise, that arrive close together, some at one instant."""
    now = 0.0
    rows = []
    for index in range(draw(st.integers(1, max_workflows))):
        now += draw(st.sampled_from([0.0, 0.0, 0.01, 0.07, 0.5]))
        graph = graphs and draw(st.booleans())
        runs = {model: Run(draw(chains(graph=graph)), draw(st.booleans())) for model in MODELS}
        rows.append(Workflow(f"w{index}", "test", runs, now))
    return Trace("drawn", tuple(rows))


@st.composite
def outages(draw: st.DrawFn) -> tuple[tuple[str, float, float], ...]:
    """(engine, from, to) in seconds, one after another on each of the engines A and B, of the length of few steps."""
    found = []
    for model in MODELS:
        now = 0.0
        for _ in range(draw(st.integers(0, 2))):
            begin_s = now + draw(st.integers(0, 48)) / 32
            now = begin_s + draw(st.sampled_from([1 / 32, 0.25, 1.0, 6.0]))
            found.append((model, begin_s, now))
    return tuple(found)


def events(result: RunResult) -> pd.DataFrame:
    """What two engines that follow the same rules must agree on to the last bit."""
    columns = [
        "request_id", "workflow", "engine", "prompt_tokens", "cached_tokens", "output_tokens", "ready_at",
        "enqueued_at", "admitted_at", "first_token_at", "finished_at", "service_s", "preemptions", "yields",
        "promotions", "longest_wait_s",
    ]  # fmt: skip
    return result.requests[columns]
