"""Laws that hold whatever the policy: conservation, causality, Little's law and the textbook's queues."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chimsim.errors import ChimsimError
from chimsim.idle import fit
from chimsim.records import RunResult
from chimsim.replay import Oversize
from chimsim.simulation import simulate
from chimsim.ticks import TICKS_PER_S
from policies import load_policy
from policies.mlfq import Mlfq
from tests.chimsim.worlds import (
    MODELS,
    TrueLengths,
    chains,
    cluster,
    engine,
    single_stage,
    slow_profile,
    traces,
    workflow,
)
from traces import Stage, Trace
from traces.graph import is_chain, parents

Floats = npt.NDArray[np.float64]
POLICIES = ["fcfs", "stjf", "sjf", "plas", "atlas", "chimera", "mlfq", "ltr"]
STEP_S = 0.01
quick = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


def column(result: RunResult, name: str) -> Floats:
    return result.requests[name].to_numpy(dtype=np.float64)


def run_drawn(trace: Trace, name: str, slots: int, kv_blocks: int = 4000) -> RunResult:
    """The drawn trace on one engine a model, with predictor overheads."""
    engines = [engine(model, model, slots=slots, kv_blocks=kv_blocks) for model in MODELS]
    return simulate(trace, cluster(*engines), name, predictor=TrueLengths(trace, 0.02, 0.004))


def one_slot(outputs: npt.NDArray[np.int64], arrivals: Floats, policy: str = "fcfs") -> RunResult:
    """Calls of one prompt token, whose service takes ``STEP_S`` an output token, through one slot."""
    trace = single_stage([(1, int(tokens)) for tokens in outputs])
    spec = engine(slots=1, step=slow_profile(STEP_S), prefix_caching=False)
    return simulate(trace, cluster(spec), policy, arrivals=arrivals, shuffle=False, predictor=TrueLengths(trace))


def integral(ups: Floats, downs: Floats) -> float:
    """Of the number present over time, by walking through its changes."""
    times = np.concatenate([ups, downs])
    changes = np.concatenate([np.ones_like(ups), -np.ones_like(downs)])
    order = np.argsort(times, kind="stable")
    present = np.cumsum(changes[order])
    return float(np.sum(present[:-1] * np.diff(times[order])))


@quick
@given(traces(), st.sampled_from(POLICIES), st.integers(1, 4), st.sampled_from([36, 60, 4000]))
def test_each_call_is_served_once_with_the_tokens_of_the_trace(
    trace: Trace, policy: str, slots: int, kv_blocks: int
) -> None:
    result = run_drawn(trace, policy, slots, kv_blocks)
    requests, flows, engines = result.requests, result.workflows, result.engines
    by_id = {flow.workflow_id: flow for flow in trace.workflows}
    assert sorted(flows["workflow_id"].astype(str)) == sorted(by_id)
    assert set(requests["status"].astype(str)) == {"completed"}
    served: dict[str, list[int]] = {name: [] for name in by_id}
    for name, stage, model, prompt, output in zip(
        *(requests[key].tolist() for key in ("workflow_id", "stage", "model", "prompt_tokens", "output_tokens")),
        strict=True,
    ):
        served[name].append(stage)
        stages = by_id[name].runs[model].stages
        if stage < len(stages):
            assert (prompt, output) == (stages[stage].prompt_tokens, stages[stage].output_tokens)
    for name, model, mixed, done in zip(
        *(flows[key].tolist() for key in ("workflow_id", "model", "mixed_models", "stages")), strict=True
    ):
        assert len(set(served[name])) == len(served[name]) == done
        stages = by_id[name].runs[model].stages
        if not mixed:
            assert sorted(served[name]) == list(range(len(stages)))
        if is_chain(stages):
            assert served[name] == sorted(served[name])
    assert flows["prompt_tokens"].sum() == requests["prompt_tokens"].sum()
    assert flows["output_tokens"].sum() == requests["output_tokens"].sum() == engines["output_tokens"].sum()
    assert engines["requests"].sum() == len(requests)
    assert engines["preemptions"].sum() == requests["preemptions"].sum()
    assert engines["yields"].sum() == requests["yields"].sum()
    processed = int(engines["prefill_tokens"].sum() + engines["cached_tokens"].sum())
    sliced = policy in ("mlfq", "ltr")  # a call that goes on after a check has come back to its engine
    if sliced or requests["preemptions"].sum() + requests["yields"].sum():
        assert processed >= requests["prompt_tokens"].sum()
    else:
        assert processed == requests["prompt_tokens"].sum()
        assert engines["cached_tokens"].sum() == requests["cached_tokens"].sum()


@quick
@given(traces(), st.sampled_from(POLICIES), st.integers(1, 4), st.sampled_from([36, 60, 4000]))
def test_nothing_happens_before_its_cause(trace: Trace, policy: str, slots: int, kv_blocks: int) -> None:
    result = run_drawn(trace, policy, slots, kv_blocks)
    ready, enqueued, admitted, first, finished = (
        column(result, name) for name in ("ready_at", "enqueued_at", "admitted_at", "first_token_at", "finished_at")
    )
    assert (ready < enqueued).all()  # the predictors take time here
    assert (enqueued <= admitted).all()
    assert (admitted < first).all()
    assert (first <= finished).all()
    one_token = result.requests["output_tokens"].to_numpy() == 1
    assert ((first == finished) == one_token).all()
    flows = result.workflows
    by_id = {flow.workflow_id: flow for flow in trace.workflows}
    for row, arrived_at, finished_at in zip(
        *(flows[key].tolist() for key in ("workflow", "arrived_at", "finished_at")), strict=True
    ):
        calls = result.requests[result.requests["workflow"] == row].set_index("stage")
        assert calls["ready_at"].iloc[0] == arrived_at
        assert calls["finished_at"].max() == finished_at
        models = set(calls["model"].astype(str))
        stages = by_id[str(calls["workflow_id"].iloc[0])].runs[min(models)].stages
        if len(models) > 1 and not is_chain(stages):
            continue  # which of the graphs a stage waited in depends on when the model changed
        for index, call in calls.iterrows():
            stages = by_id[str(call["workflow_id"])].runs[str(call["model"])].stages
            if index == 0 or int(index) >= len(stages):
                continue
            before = [calls.loc[parent] for parent in parents(stages, int(index))]
            # A graph's other first stages follow the one that chooses the model.
            since = max((each["finished_at"] for each in before), default=calls.loc[0]["enqueued_at"])
            delay_s = stages[int(index)].delay_s
            assert call["ready_at"] - since == pytest.approx(delay_s, abs=2 / TICKS_PER_S)


@quick
@given(
    chains() | chains(graph=True),
    st.sampled_from(["fcfs", "ltr", "chimera"]),
    st.sampled_from([8, 20, 64, 2048]),
    st.booleans(),
    st.sampled_from([(0.0, 0.0), (0.02, 0.004)]),
)
def test_a_workflow_alone_takes_exactly_its_idle_latency(
    stages: tuple[Stage, ...], policy: str, budget: int, caching: bool, overheads: tuple[float, float]
) -> None:
    # The order of branches that are ready together is the policy's.
    policy = policy if is_chain(stages) else "fcfs"
    trace = Trace("test", (workflow("w", stages, arrival_s=0.7),))
    spec = cluster(engine(slots=5, max_num_batched_tokens=budget, prefix_caching=caching))
    row = simulate(trace, spec, policy, predictor=TrueLengths(trace, *overheads)).workflows.iloc[0]
    assert row["latency_s"] == row["idle_latency_s"]
    assert row["slowdown"] == 1.0


def test_slices_cost_a_call_alone_the_part_of_a_block_that_is_computed_again() -> None:
    trace = Trace("test", (workflow("w", (Stage("a", 64, 40),), arrival_s=0.0),))
    spec = cluster(engine(slots=4))
    row = simulate(trace, spec, Mlfq(q0_s=1e-9, ratio=1.0, levels=4), predictor=TrueLengths(trace)).workflows.iloc[0]
    whole = simulate(trace, spec, "fcfs", predictor=TrueLengths(trace)).workflows.iloc[0]
    profile = spec.engines[0].profile
    # Three slices of one token each: every time the newest token's block is begun, and its prompt part found.
    decode_s = [profile.decode_constant_s(1) + profile.decode_slope_s() * (64 + done) for done in range(3)]
    again_s = [profile.mixed_step_s(0, 0, [(1 + done, 64)]) for done in range(3)]
    assert row["latency_s"] - whole["latency_s"] == pytest.approx(sum(again_s) - sum(decode_s), abs=1e-8)


@quick
@given(traces(), st.sampled_from(["fcfs", "stjf", "sjf", "plas", "chimera"]), st.integers(1, 4))
def test_littles_law_in_the_queue_and_in_the_engine(trace: Trace, policy: str, slots: int) -> None:
    result = run_drawn(trace, policy, slots)
    engines = result.engines.set_index("engine")
    assert result.engines["preemptions"].sum() == 0
    for name in MODELS:
        calls = result.requests[result.requests["engine"].astype(str) == name]
        enqueued, admitted, finished, service_s = (
            calls[key].to_numpy(dtype=np.float64) for key in ("enqueued_at", "admitted_at", "finished_at", "service_s")
        )
        row = engines.loc[name]
        slot_at = finished - service_s
        waiting_s = integral(enqueued, slot_at)
        assert row["mean_waiting"] * row["makespan_s"] == pytest.approx(waiting_s, rel=1e-9, abs=1e-9)
        # A slot can be had in the middle of a step, but running starts with the next one.
        in_engine_s = admitted - slot_at
        assert (in_engine_s >= 0.0).all()
        running_s = float((service_s - in_engine_s).sum())
        assert row["mean_running"] * row["makespan_s"] == pytest.approx(running_s, rel=1e-9, abs=1e-9)
        assert integral(admitted, finished) == pytest.approx(running_s, rel=1e-9, abs=1e-9)
        assert row["max_running"] <= slots


@pytest.mark.parametrize("distribution", ["fixed", "geometric"])
def test_mean_wait_of_a_one_slot_engine_is_the_textbooks(distribution: str) -> None:
    """M/D/1, and M/M/1 as its discrete twin: geometric lengths of many steps are close to exponential."""
    count, rho, mean_tokens = 20_000, 0.5, 40
    rng = np.random.default_rng(11)
    service_s = mean_tokens * STEP_S
    arrivals = np.cumsum(rng.exponential(service_s / rho, count))
    if distribution == "fixed":
        outputs = np.full(count, mean_tokens, dtype=np.int64)
        expected_s = rho * service_s / (2.0 * (1.0 - rho))
    else:
        outputs = rng.geometric(1.0 / mean_tokens, count).astype(np.int64)
        expected_s = rho * service_s / (1.0 - rho)
    result = one_slot(outputs, arrivals)
    wait_s = column(result, "admitted_at") - column(result, "enqueued_at")
    assert wait_s.mean() == pytest.approx(expected_s, rel=0.08)
    assert column(result, "service_s") == pytest.approx(outputs * STEP_S, abs=1e-6)
    # Lindley's recursion has every single wait, not only their mean.
    lindley_s = 0.0
    gaps = np.diff(arrivals, append=arrivals[-1])
    for seen_s, tokens, gap_s in zip(wait_s.tolist(), outputs.tolist(), gaps.tolist(), strict=True):
        assert abs(seen_s - lindley_s) < 1e-4
        lindley_s = max(0.0, lindley_s + tokens * STEP_S - gap_s)


def test_a_one_slot_engine_never_idles_while_somebody_waits() -> None:
    rng = np.random.default_rng(5)
    outputs = rng.geometric(0.05, 1500).astype(np.int64)
    arrivals = np.cumsum(rng.exponential(20 * STEP_S / 0.9, 1500))
    makespans = []
    for policy in ("fcfs", "stjf"):
        result = one_slot(outputs, arrivals, policy)
        enqueued, admitted, finished = (column(result, n) for n in ("enqueued_at", "admitted_at", "finished_at"))
        order = np.argsort(admitted, kind="stable")
        earliest = np.minimum.accumulate(enqueued[order][::-1])[::-1]  # of this call and those served after it
        before = np.concatenate([[0.0], finished[order][:-1]])
        assert (admitted[order] == np.maximum(before, earliest)).all()
        row = result.engines.iloc[0]
        assert row["busy_s"] == pytest.approx(column(result, "service_s").sum(), rel=1e-12)
        assert row["steps"] == outputs.sum()
        makespans.append(float(row["makespan_s"]))
        if policy == "stjf":
            assert (order != np.arange(len(order))).any()  # else the two runs were the same
    assert makespans[0] == makespans[1]


def oversized() -> tuple[Trace, list[Stage]]:
    """Stages for 10 blocks of 16: one that fits exactly, one that is too long, a prompt that is too long."""
    stages = [Stage("s", 100, 61), Stage("s", 100, 62), Stage("s", 161, 1)]
    rows = [workflow(f"w{i}", [stage], arrival_s=float(i), solved=True) for i, stage in enumerate(stages)]
    return Trace("test", tuple(rows)), stages


def run_oversized(trace: Trace, oversize: Oversize) -> RunResult:
    return simulate(trace, cluster(engine(kv_blocks=10)), load_policy("fcfs"), oversize=oversize)


def test_a_call_that_can_never_fit_is_an_error_that_names_it() -> None:
    trace, _ = oversized()
    fitting = Trace("test", trace.workflows[:1])
    assert run_oversized(fitting, "error").workflows["status"].tolist() == ["completed"]
    with pytest.raises(ChimsimError, match=r"workflow w1, stage 0 .* engine A \(KV memory for 160 tokens\)"):
        run_oversized(trace, "error")


@pytest.mark.parametrize(
    ("oversize", "status", "outputs"),
    [
        ("reject", ["completed", "rejected", "rejected"], [61, 0, 0]),
        ("clip", ["completed", "completed", "rejected"], [61, 61, 0]),
    ],
)
def test_a_call_that_can_never_fit_is_rejected_or_clipped(
    oversize: Oversize, status: list[str], outputs: list[int]
) -> None:
    trace, stages = oversized()
    result = run_oversized(trace, oversize)
    requests, flows = result.requests, result.workflows
    rejected = np.array([name == "rejected" for name in status])
    assert requests["status"].tolist() == flows["status"].tolist() == status
    assert requests["output_tokens"].tolist() == outputs
    assert [fit(engine(kv_blocks=10), s.prompt_tokens, s.output_tokens) for s in stages] == [61, 61, 0]
    for name in ("admitted_at", "first_token_at", "finished_at"):
        assert (requests[name].isna().to_numpy() == rejected).all()
    for name in ("finished_at", "latency_s", "slowdown"):
        assert (flows[name].isna().to_numpy() == rejected).all()
    assert flows["solved"].tolist() == [0.0 if no else 1.0 for no in rejected]
    assert result.engines["output_tokens"].sum() == sum(outputs)


def test_the_stages_after_a_rejected_one_never_happen() -> None:
    stages = [Stage("a", 20, 5), Stage("b", 400, 5), Stage("c", 20, 5)]
    result = run_oversized(Trace("test", (workflow("w", stages, arrival_s=0.0),)), "reject")
    assert result.requests["stage_name"].tolist() == ["a", "b"]
    assert result.workflows["stages"].tolist() == [1]
    assert result.workflows["solved"].isna().all()  # no label, no verdict


@pytest.mark.parametrize(
    ("output", "prompt", "cached"),
    [
        (28, 200, 112),  # 128 tokens, of which the last is not stored
        (29, 200, 128),
        (30, 200, 128),
        (44, 200, 128),
        (45, 200, 144),
        (28, 128, 112),  # nothing new in the prompt: one token has to be computed
        (30, 130, 128),
    ],
)
def test_a_stage_that_reuses_all_before_it_finds_the_whole_blocks(output: int, prompt: int, cached: int) -> None:
    stages = [Stage("a", 100, output), Stage("b", prompt, 10, reused_tokens=100 + output)]
    trace = Trace("test", (workflow("w", stages, arrival_s=0.0),))
    result = simulate(trace, cluster(engine()), "fcfs")
    assert result.requests["cached_tokens"].tolist() == [0, cached]
    assert result.engines["cached_tokens"].tolist() == [cached]
    assert result.engines["prefill_tokens"].tolist() == [100 + prompt - cached]
    assert result.workflows["slowdown"].tolist() == [1.0]
    without = simulate(trace, cluster(engine(prefix_caching=False)), "fcfs")
    assert without.requests["cached_tokens"].tolist() == [0, 0]
    assert result.workflows["latency_s"].iloc[0] <= without.workflows["latency_s"].iloc[0]
