"""Engines that fail, come back, and are slow: what is lost, what is sent again and when, and that nothing vanishes."""

from __future__ import annotations

import tomllib
from functools import cache
from math import inf
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from chimsim.config import Cluster, load_cluster
from chimsim.engine import Engine
from chimsim.errors import ChimsimError
from chimsim.explain import PARTS, stories
from chimsim.failures import Spell, on_engines, parse_outage, parse_slowdown
from chimsim.grid import cells
from chimsim.metrics import summarise
from chimsim.records import RunResult
from chimsim.replay import BACKOFF_S, RETRIES
from chimsim.simulation import simulate
from chimsim.spec import Spec, spec_from
from chimsim.sweeps import sweep
from chimsim.watch import Watch
from policies import load_policy
from policies.fcfs import Fcfs
from policies.interface import ClusterView, Dispatch, PolicyError, RequestView
from tests.chimsim.reference import ReferenceEngine, takes_any_engine
from tests.chimsim.small import small_keys, tree_bytes, write_small
from tests.chimsim.test_engine_reference import agree
from tests.chimsim.worlds import (
    MODELS,
    TrueLengths,
    cluster,
    engine,
    outages,
    single_stage,
    slow_profile,
    traces,
    workflow,
)
from traces import SharedPrefix, Stage, Trace

Spans = tuple[tuple[str, float, float], ...]
POLICIES = ["fcfs", "stjf", "mlfq", "ltr", "chimera"]


def pair(slots: int = 2, kv_blocks: int = 4000) -> Cluster:
    """An engine of each model."""
    return cluster(*(engine(model, model, slots=slots, kv_blocks=kv_blocks) for model in MODELS))


def twins(step_s: float = 1.0, slots: int = 2) -> Cluster:
    """Two engines of one model whose every step takes ``step_s``."""
    return cluster(*(engine(name, "A", slots=slots, step=slow_profile(step_s)) for name in ("A/0", "A/1")))


def run(trace: Trace, spec: Cluster, policy: str = "fcfs", **keys: Any) -> RunResult:
    knobs = {"q0_s": 0.05, "starvation_s": 0.4} if policy == "mlfq" else {}
    return simulate(trace, spec, load_policy(policy, **knobs), predictor=TrueLengths(trace), **keys)


def texts(down: Spans) -> list[str]:
    return [str(Spell(name, inf, begin_s, end_s)) for name, begin_s, end_s in down]


def test_what_is_inside_is_lost_and_begins_anew_elsewhere() -> None:
    trace = single_stage([(5, 4)], arrivals=[0.0])
    result = run(trace, twins(), fail=["A/0@2.5s-60s"])
    call = result.requests.iloc[0]
    # Two tokens were out, at 1 and 2 s; half a second after the failure it begins from its first token.
    assert (call["engine"], call["retries"], call["lost_tokens"]) == ("A/1", 1, 2)
    assert (call["enqueued_at"], call["first_token_at"], call["finished_at"]) == (3.0, 4.0, 7.0)
    assert (call["lost_s"], call["output_tokens"], call["service_s"]) == (3.0, 4, 4.0)
    assert result.engines["output_tokens"].tolist() == [2, 4]
    assert result.engines["busy_s"].tolist() == [2.5, 4.0]
    assert result.engines["down_s"].tolist() == [4.5, 0.0]  # to the end of the run


def test_an_answer_that_is_whole_when_its_engine_fails_is_out() -> None:
    trace = single_stage([(5, 2), (5, 3)], arrivals=[0.0, 0.0])
    requests = run(trace, cluster(engine(step=slow_profile(1.0))), fail=["A@2s-4s"]).requests
    assert requests["retries"].tolist() == [0, 1]
    assert requests["lost_tokens"].tolist() == [0, 2]
    # Nobody is left at 2.5 s: it asks again every second.
    assert requests["finished_at"].tolist() == [2.0, 4.5 + 3.0]


def test_who_waits_for_an_engine_that_fails_is_refused_and_goes_elsewhere() -> None:
    trace = single_stage([(5, 9)] * 6, arrivals=[0.0] * 6)
    result = run(trace, twins(slots=1), fail=["A/0@1s-500s"])
    assert result.requests["retries"].tolist() == [1, 0, 1, 0, 1, 0]
    assert set(result.requests["engine"].astype(str)) == {"A/1"}
    again = result.requests[result.requests["retries"] == 1]
    assert again["enqueued_at"].tolist() == [1.0 + BACKOFF_S] * 3
    assert again["lost_tokens"].tolist() == [1, 0, 0]


def test_an_engine_that_is_back_has_an_empty_prefix_cache() -> None:
    stages = [Stage("s", 64, 3, shared_prefix=SharedPrefix("system", 48))]
    trace = Trace("shared", tuple(workflow(f"w{at}", stages, arrival_s=at) for at in (0.0, 9.0)))
    spec = cluster(engine(step=slow_profile(1.0)))
    cached = {at: run(trace, spec, fail=[f"A@{at}s-{at + 1}s"]).requests["cached_tokens"].tolist() for at in (5, 60)}
    assert cached == {5: [0, 0], 60: [0, 48]}


def test_policies_see_who_is_well_from_the_very_instant() -> None:
    seen: dict[float, tuple[bool, ...]] = {}

    class Looks(Fcfs):
        def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
            seen[now] = tuple(engine.healthy for engine in cluster)
            return super().dispatch(now, request, cluster)

    trace = single_stage([(5, 1)] * 4, arrivals=[0.0, 2.0, 3.0, 4.0])
    simulate(trace, twins(), Looks(), predictor=TrueLengths(trace), fail=["A/1@2s-4s"])
    assert seen == {0.0: (True, True), 2.0: (True, False), 3.0: (True, False), 4.0: (True, True)}


def test_a_call_is_given_up_after_so_many_tries() -> None:
    trace = single_stage([(5, 50), (5, 1)], arrivals=[0.0, 100.0])
    # Each try has one step; the pauses are 0.5, 1, 2, 4 s.
    spans, now = [], 0.0
    for retry in range(RETRIES + 1):
        spans.append(f"A@{now + 1.25}s-{now + 1.5}s")
        now += 1.25 + BACKOFF_S * 2**retry
    result = run(trace, cluster(engine(step=slow_profile(1.0))), fail=spans)
    assert result.workflows["status"].tolist() == ["failed", "completed"]
    assert result.requests["retries"].tolist() == [RETRIES, 0]
    assert result.requests["lost_tokens"].tolist() == [RETRIES + 1, 0]
    summary = summarise(result)
    assert (summary["retries"], summary["lost_tokens"], summary["failed_workflows"]) == (RETRIES, RETRIES + 1, 1)


def test_a_policy_that_may_use_no_engine_for_ever_is_told_so() -> None:
    trace = single_stage([(5, 5)] * 2, arrivals=[0.0, 3.0])
    policy = load_policy("fcfs", placement="single:A/0")
    with pytest.raises(PolicyError, match="no healthy engine or model"):
        simulate(trace, twins(), policy, predictor=TrueLengths(trace), fail=["A/0@1s-"])


def test_an_outage_after_the_last_workflow_changes_nothing() -> None:
    trace = single_stage([(20, 30)] * 5, arrivals=[0.0] * 5)
    late, never = (run(trace, pair(), fail=[f"A@{begin}s-{begin + 9}s"]) for begin in (500, 90_000))
    plain = run(trace, pair())
    assert late.engines["makespan_s"].tolist() == never.engines["makespan_s"].tolist()
    assert late.requests[list(plain.requests)].equals(plain.requests)
    assert "retries" not in plain.requests
    assert "down_s" not in plain.engines
    assert "retries" not in summarise(plain)


def test_steps_of_a_slow_engine_take_so_much_longer() -> None:
    trace = single_stage([(5, 4)], arrivals=[0.0])
    spec = cluster(engine(step=slow_profile(1.0)))
    assert run(trace, spec, slow=["A=1.5x"]).requests["finished_at"].tolist() == [6.0]
    # Steps begin at 0, 1, 3 (two of 2 s), 5: the one that begins as the span ends is of the usual length.
    assert run(trace, spec, slow=["A=2x@1s-5s"]).requests["finished_at"].tolist() == [6.0]
    # What began before goes on as it was: 0, 1 and then 2 to 5 s.
    assert run(trace, spec, slow=["A=3x@1.5s-9s"]).requests["finished_at"].tolist() == [8.0]


@takes_any_engine
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    trace=traces(),
    policy=st.sampled_from(POLICIES),
    slots=st.integers(1, 4),
    kv_blocks=st.sampled_from([36, 60, 4000]),
    down=outages(),
    slow=st.sampled_from([[], ["A=1.5x"], ["A=3x@0.25s-2s", "B=1.7x@1s-"]]),
    hop_s=st.sampled_from([0.0, 0.003]),
)
def test_step_by_step_it_is_the_same_to_the_last_bit(
    trace: Trace, policy: str, slots: int, kv_blocks: int, down: Spans, slow: list[str], hop_s: float
) -> None:
    given_: dict[str, Any] = {"fail": texts(down), "slow": slow, "hop_s": hop_s, "log_decisions": True}
    fast = run(trace, pair(slots, kv_blocks), policy, **given_)
    reference = run(trace, pair(slots, kv_blocks), policy, engine_class=ReferenceEngine, **given_)
    agree(fast, reference)
    if down:
        columns = ["retries", "lost_tokens", "lost_s", "status"]
        assert fast.requests[columns].equals(reference.requests[columns])


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(traces(), st.sampled_from(POLICIES), st.integers(1, 4), outages(), st.sampled_from([0.0, 0.003]))
def test_every_call_is_served_once_or_given_up_and_tokens_add_up(
    trace: Trace, policy: str, slots: int, down: Spans, hop_s: float
) -> None:
    assume(down)
    counts: list[int] = []

    class Counts(Engine):
        def finish(self) -> list[Any]:
            over = super().finish()
            counts.extend(r.request_id for r in over if r.produced >= r.output_tokens)
            return over

    result = run(trace, pair(slots), policy, fail=texts(down), hop_s=hop_s, engine_class=Counts)
    requests = result.requests
    done = requests[requests["status"] == "completed"]
    assert sorted(counts) == done["request_id"].tolist()
    assert set(requests["status"].astype(str)) <= {"completed", "failed"}
    assert (requests[requests["status"] == "failed"]["retries"] == RETRIES).all()
    assert len(result.workflows) == len(trace.workflows)
    assert result.engines["output_tokens"].sum() == done["output_tokens"].sum() + requests["lost_tokens"].sum()
    assert (requests["lost_s"][requests["retries"] > 0] >= BACKOFF_S).all()
    for name, begin_s, end_s in down:
        mine = done[done["engine"] == name]
        inside = (mine["admitted_at"] < begin_s) & (mine["finished_at"] > begin_s)
        assert not inside.any()
        assert not ((mine["admitted_at"] >= begin_s) & (mine["admitted_at"] < end_s)).any()


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(traces(), st.sampled_from(POLICIES), outages())
def test_explained_parts_of_a_run_with_failures_add_up(trace: Trace, policy: str, down: Spans) -> None:
    watch = Watch()
    result = simulate(
        trace, pair(), watch.policy(load_policy(policy)), predictor=TrueLengths(trace, 0.02, 0.004), fail=texts(down),
        engine_class=watch.engine,
    )  # fmt: skip
    for story in stories(result, watch):
        assert set(story.parts_s) == set(PARTS)
        if story.path:
            assert sum(story.parts_s.values()) == pytest.approx(story.workflow["latency_s"])


@pytest.mark.parametrize(
    ("text", "spell"),
    [
        ("qwen7b@120s-180s", ("qwen7b", 120.0, 180.0)),
        ("Qwen2.5-7B/2@2m-1h", ("Qwen2.5-7B/2", 120.0, 3600.0)),
        ("x@120-", ("x", 120.0, inf)),
        (" a b @ 1.5m - 100 ", ("a b", 90.0, 100.0)),
        ("odd@name@250ms-1e1s", ("odd@name", 0.25, 10.0)),
    ],
)
def test_outages_as_they_are_written(text: str, spell: tuple[str, float, float]) -> None:
    found = parse_outage(text, "--fail")
    assert (found.name, found.begin_s, found.end_s) == spell
    assert parse_outage(str(found), "") == found


def test_slow_engines_as_they_are_written() -> None:
    assert parse_slowdown("qwen7b=1.5x", "") == Spell("qwen7b", 1.5)
    assert parse_slowdown("qwen7b=2@1m-2m", "") == Spell("qwen7b", 2.0, 60.0, 120.0)
    for text in ("qwen7b=1.25x", "qwen7b=1.25x@0.5s-", "a=b=3x@1s-2s"):
        assert parse_slowdown(str(parse_slowdown(text, "")), "") == parse_slowdown(text, "")


@settings(deadline=None)
@given(st.text(alphabet="q7b=@-.x0123456789smhe, ", max_size=24) | st.text(max_size=12))
def test_whatever_is_written_is_read_or_refused_with_one_line(text: str) -> None:
    for parse in (parse_outage, parse_slowdown):
        try:
            found = parse(text, "here")
        except ChimsimError:
            continue
        assert parse(str(found), "here") == found


@cache
def small() -> str:
    return write_small(Path(mkdtemp()))


def keys(**more: Any) -> dict[str, Any]:
    return {"trace": small(), "combo": "qwen1.5b+7bx2", "policy": "fcfs", "rps": 8, "workflows": 20, **more}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("fail", "qwen7b", "fail: 'qwen7b' is no outage; expected one such as qwen7b@120s-180s"),
        ("fail", "qwen8b@1s-2s", "fail: there is no engine 'qwen8b'; did you mean 'qwen7b'?"),
        ("fail", "qwen7b/7@1s-2s", "there is no engine 'qwen7b/7'; did you mean"),
        ("fail", "qwen7b@9s-2s", "ends before it begins; expected an end after 9s"),
        ("fail", "qwen7b@1s-2d", "'2d' is no time; expected 90, 90s, 1.5m or 1h"),
        ("fail", "qwen7b@1s-9000h", "a run has at most 524288 s"),
        ("fail", ["qwen7b@1s-5s", "Qwen2.5-7B/1@4s-8s"], "Qwen2.5-7B/1@1s-5s and Qwen2.5-7B/1@4s-8s overlap"),
        ("fail", "qwen7b@1s-,qwen1.5b@60s-", "no engine of qwen1.5b+7bx2 is left, and none comes back"),
        ("fail", 7, "fail: found 7, expected a text"),
        ("fail", "qwen7b@1s-2s,", "the list is empty or has an empty entry"),
        ("slow", "qwen7b", "slow: 'qwen7b' is no slow engine; expected one such as qwen7b=1.5x"),
        ("slow", "qwen7b=0.5x", "cannot take '0.5' times as long; expected a number from 1"),
        ("slow", "qwen7b=1.5x@5", "no such span; expected one such as qwen7b=1.5x@120s-180s"),
        ("slow", "qwen7b=2x,qwen7b/0=3x@1s-2s", "overlap"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_runs(key: str, value: Any, message: str) -> None:
    with pytest.raises(ChimsimError) as refused:
        cells(spec_from(keys(**{key: value})))
    assert message in str(refused.value)


def test_a_model_means_all_its_engines_and_a_cluster_without_it_none() -> None:
    spells = [parse_outage("qwen7b@1s-2s", "")]
    both = [spell.name for spell in on_engines(spells, load_cluster("qwen1.5b+7bx2"), "")]
    assert both == ["Qwen2.5-7B/0", "Qwen2.5-7B/1"]
    assert on_engines(spells, load_cluster("qwen1.5b"), "") == ()
    plain, failing = cells(spec_from(keys(combo="qwen1.5b,qwen7b", fail="qwen7b@1s-2s")))
    assert (plain.fail, failing.fail) == ((), ("Qwen2.5-7B@1s-2s",))
    assert "fail" not in plain.config
    assert failing.config["fail"] == ["Qwen2.5-7B@1s-2s"]


def test_a_cell_is_the_same_whatever_its_engines_are_called_and_as_before_without_failures() -> None:
    def named(**more: Any) -> list[str]:
        return [cell.name for cell in cells(spec_from(keys(**more)))]

    assert named(fail="qwen7b/0@60s-120s") == named(fail=["Qwen2.5-7B/0@1m-2m"]) != named()
    assert named(slow="qwen7b=1.5x") == named(slow="qwen7b/0=1.5x,qwen7b/1=1.5") != named()
    assert named(fail=[]) == named()
    assert "fail" not in cells(spec_from(keys()))[0].axes


def test_a_policys_own_table_says_what_fails_for_it() -> None:
    text = 'fail = "qwen7b@60s-61s"\n[policy.fcfs]\nfail = []\n[policy.down]\npolicy = "fcfs"'
    document = tomllib.loads(text)
    spec = spec_from({}, keys(**document))
    assert [cell.axes["fail"] for cell in cells(spec)] == [None, "qwen7b@60s-61s"]
    again: Spec = spec_from({}, spec.to_dict())
    assert [cell.name for cell in cells(again)] == [cell.name for cell in cells(spec)]


def test_a_sweep_with_failures_is_the_same_bytes_with_two_workers(tmp_path: Path) -> None:
    given_ = small_keys(write_small(tmp_path)) | {"fail": "qwen7b@0.5s-3s", "slow": "qwen1.5b=1.5x@1s-2s", "seeds": 1}
    results = sweep(out=tmp_path / "one", **given_)
    sweep(out=tmp_path / "two", workers=2, **given_)
    assert tree_bytes(tmp_path / "one") == tree_bytes(tmp_path / "two")
    summary = results.summary
    assert (summary[["retries", "lost_tokens"]] > 0).all(axis=None)
    assert np.isclose(results.table(results.cells[0], "engines")["down_s"].max(), 2.5)
