"""Where the time went: pieces without gaps that add up, what was known at decisions, and the command."""

from __future__ import annotations

import hashlib
import json
import shutil
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chimsim.errors import ChimsimError
from chimsim.explain import Story, stories, sum_parts, tell, went_first
from chimsim.explain_cli import find_cell, simulate_again
from chimsim.explain_text import words
from chimsim.report import number
from chimsim.results import CHECKSUMS, Results, parquet_bytes
from chimsim.simulation import simulate
from chimsim.spec import spec_from
from chimsim.sweeps import run_sweep
from chimsim.watch import CHECKED, PREEMPTED, YIELDED
from policies import load_policy
from tests.chimsim.small import run_chimsim, small_keys, write_small
from tests.chimsim.test_graphs import FAN, Hopping
from tests.chimsim.watched import POLICIES, watched
from tests.chimsim.worlds import MODELS, TrueLengths, cluster, engine, traces, workflow
from traces import Run, Stage, Trace, Workflow

drawn = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])


def check(story: Story) -> None:
    """No gap, nothing twice, and sums that are exact."""
    flow = story.workflow
    for stage in story.stages:
        assert all(a.end_at == b.begin_at for a, b in pairwise(stage.pieces))
        assert stage.pieces[-1].end_at == stage.call["finished_at"]
        assert stage.spare_s >= 0
    assert all(a.end_at == b.begin_at for a, b in pairwise(story.path))
    assert (story.path[0].begin_at, story.path[-1].end_at) == (flow["arrived_at"], flow["finished_at"])
    assert sum(story.parts_s.values()) == flow["latency_s"]


@drawn
@given(
    traces(), st.sampled_from([*POLICIES, ""]), st.integers(1, 4), st.sampled_from([40, 60, 4000]), st.integers(0, 2)
)
def test_the_critical_path_adds_up_to_the_latency(
    trace: Trace, name: str, slots: int, kv_blocks: int, look_ahead: int
) -> None:
    result, watch = watched(trace, name or Hopping(), slots, kv_blocks, look_ahead=look_ahead)
    told = list(stories(result, watch))
    assert len(told) == len(result.workflows)
    for story in told:
        check(story)
        told_s = words(story, {stage.stage: (0, 0) for stage in story.stages})[0]
        assert told_s.startswith(f"{number(story.workflow['latency_s'])} s from arrival")
        held_up = {stage.waited_for for stage in story.stages if stage.stage in story.critical}
        for stage in story.stages:
            parts, call = sum_parts(stage.pieces), stage.call
            assert parts["predictor"] == call["enqueued_at"] - call["ready_at"]
            assert parts["waiting"] == call["admitted_at"] - call["enqueued_at"]
            if not story.workflow["mixed_models"]:
                assert not (stage.spare_s > 0 and stage.stage in held_up)
            # Calls of mlfq and ltr come back to their engine after a check, which computes the begun block again.
            if not call["preemptions"] and not call["yields"] and name not in ("mlfq", "ltr"):
                assert parts["prefill"] == call["first_token_at"] - call["admitted_at"]
                assert parts["decode"] == call["finished_at"] - call["first_token_at"]


@drawn
@given(traces(), st.sampled_from(POLICIES), st.integers(1, 3), st.sampled_from([40, 60, 4000]))
def test_watching_changes_nothing_and_sees_every_spell(trace: Trace, name: str, slots: int, kv_blocks: int) -> None:
    result, watch = watched(trace, name, slots, kv_blocks)
    engines = [engine(model, model, slots=slots, kv_blocks=kv_blocks) for model in MODELS]
    plain = simulate(trace, cluster(*engines), load_policy(name), predictor=TrueLengths(trace, 0.02, 0.004))
    for table in ("requests", "workflows", "engines", "timeline"):
        assert getattr(plain, table).equals(getattr(result, table))
    for call in result.requests.to_dict("records"):
        spells = watch.spells[call["request_id"]]
        ended = [spell.ended for spell in spells]
        assert ended.count(PREEMPTED) == call["preemptions"]
        # A call may give its slot up before the step that would have taken it into the batch.
        assert ended.count(YIELDED) <= call["yields"]
        assert CHECKED not in ended or name in ("mlfq", "ltr")
        assert spells[0].begin_at == call["admitted_at"]
        assert call["first_token_at"] in [spell.token_at for spell in spells]
        assert spells[-1].end_at == call["finished_at"]
        assert all(a.end_at <= b.begin_at for a, b in pairwise(spells))
        assert sum(spell.end_at - spell.begin_at for spell in spells) <= call["service_s"]


def test_a_judge_waits_for_the_slowest_coder() -> None:
    story = tell(*watched(Trace("test", (workflow("w", FAN, arrival_s=0.0),)), "fcfs"), "w")
    assert story.critical == [0, 2, 4]
    spare = {stage.stage: stage.spare_s for stage in story.stages}
    ends = {stage.stage: stage.call["finished_at"] for stage in story.stages}
    assert spare == {0: 0, 1: ends[2] - ends[1], 2: 0, 3: ends[2] - ends[3], 4: 0}
    assert [stage.waited_for for stage in story.stages] == [None, 0, 0, 0, 2]


def test_tools_and_other_first_stages_are_on_the_path() -> None:
    stages = (Stage("a", 10, 1), Stage("b", 10, 3, delay_s=2.0, after=()), Stage("join", 40, 1, after=(0, 1)))
    story = tell(*watched(Trace("test", (workflow("w", stages, arrival_s=0.0),)), "fcfs"), "w")
    check(story)
    assert story.critical == [0, 1, 2]  # of the first only the predictors' time, before the second began
    assert [piece.part for piece in story.path[:3]] == ["predictor", "tool", "predictor"]
    assert story.parts_s["tool"] == 2.0


def test_a_decision_tells_what_chimera_knew() -> None:
    runs = dict.fromkeys(MODELS, Run((Stage("s", 50, 30), Stage("t", 100, 10)), True))
    trace = Trace("test", tuple(Workflow(f"w{i}", "test", runs, 0.1 * i) for i in range(8)))
    policy = load_policy("chimera", tau=0.0)
    result, watch = watched(trace, policy, slots=1)
    first, second = tell(result, watch, "w5").stages
    known = first.decision
    assert known.latency_ms.keys() == set(MODELS)
    assert known.engine == min(known.latency_ms, key=lambda model: (known.latency_ms[model], model))
    assert known.known["remaining_tokens"] == {"A": 40.0, "B": 40.0}
    assert "q=0.500 L=" in known.reason
    assert second.decision.reason == f"keeps {known.engine}; y=10"
    count, later = went_first(first.call, result.requests)
    same = result.requests[result.requests["engine"] == known.engine]
    between = same[same["admitted_at"].between(first.call["enqueued_at"], first.call["admitted_at"], inclusive="left")]
    assert (count, later) == (len(between), sum(between["enqueued_at"] > first.call["enqueued_at"]))
    assert count > 0


def test_a_rejected_workflow_has_no_path() -> None:
    stages = (FAN[0], Stage("coder", 20_000, 50, after=(0,)))
    trace = Trace("test", (workflow("w", stages, arrival_s=0.0),))
    story = tell(*watched(trace, "fcfs", kv_blocks=1000, oversize="reject"), "w")
    assert story.path == ()
    assert words(story, {0: (0, 0), 1: (0, 0)}) == ["rejected: stage 1 can never fit its engine; there is no latency"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("explain")
    keys = small_keys(write_small(home)) | {"tau": [0, "inf"], "seeds": 1}
    run_sweep(spec_from(keys), home / "out")
    return home / "out"


def test_every_cell_gives_its_records_again(folder: Path) -> None:
    results = Results(folder)
    for name in results.cells:
        _, result, _ = simulate_again(results, name)
        assert parquet_bytes(result.requests) == (folder / "cells" / name / "requests.parquet").read_bytes()


def test_the_slowest_are_listed_and_one_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pick = "--cell", "policy=chimera,tau=inf"
    code, out, _ = run_chimsim(monkeypatch, capsys, "explain", folder, "--slowest", 3, *pick)
    results = Results(folder)
    name = find_cell(results, pick[1])
    flows = results.table(name, "workflows").sort_values("latency_s", ascending=False)
    slow = str(flows["workflow_id"].iloc[0])
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:4]] == list(flows["workflow_id"].astype(str)[:3])
    code, out, _ = run_chimsim(
        monkeypatch, capsys, "explain", folder / "cells" / name, slow, "--plot", tmp_path / "p.svg"
    )
    assert code == 0
    assert max(map(len, out.replace(str(tmp_path), "").splitlines())) <= 80
    assert "along the path" in out
    assert "0 stage0, 0.00 s after the arrival: Qwen2.5" in out
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")
    code, out, _ = run_chimsim(monkeypatch, capsys, "explain", folder, slow, "--json", "--cell", name[:6])
    told = json.loads(out)
    assert sum(told["parts_s"].values()) == told["workflow"]["latency_s"] == flows["latency_s"].iloc[0]
    assert told["stages"][0]["decision"]["latency_ms"].keys() == {"Qwen2.5-1.5B", "Qwen2.5-7B"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["OUT", "w001"], "3 cells of OUT are meant (policy fcfs, chimera; tau -, 0, inf"),
        (["OUT", "w001", "--cell", "polcy=fcfs"], "'polcy' is no axis of this sweep; did you mean 'policy'?"),
        (["OUT", "w001", "--cell", "policy=stjf"], "none of the 3 finished cells of OUT (policy fcfs, chimera;"),
        (["OUT", "w999", "--cell", "policy=fcfs"], "workflow 'w999' is not in this run"),
        (["OUT", "w001", "--slowest", "3", "--cell", "policy=fcfs"], "a workflow's id or --slowest, not both"),
        (["OUT", "--plot", "p.png", "--cell", "policy=fcfs"], "--plot draws one workflow"),
        (["OUT", "w001", "--plot", "p.gif", "--cell", "policy=fcfs"], "ends in .png, .svg, .pdf"),
        (["OUT/no", "w001"], "is not a results folder"),
    ],
)
def test_wrong_input_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], message: str,
) -> None:  # fmt: skip
    given_ = [text.replace("OUT", str(folder)) for text in arguments]
    code, _, err = run_chimsim(monkeypatch, capsys, "explain", *given_)
    assert code == 2
    assert message.replace("OUT", str(folder)) in err
    assert err.count("\n") == 1


def test_records_that_come_out_otherwise_are_told(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    results = Results(tmp_path / "copy")
    name = find_cell(results, "policy=fcfs")
    path = results.path / "cells" / name / "requests.parquet"
    changed = pd.read_parquet(path)
    changed["admitted_at"] += (changed["request_id"] == 3) * 0.5
    path.write_bytes(parquet_bytes(changed))
    # as another version would have written them
    sums = json.loads((path.parent / CHECKSUMS).read_text())
    sums[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    (path.parent / CHECKSUMS).write_text(json.dumps(sums))
    with pytest.raises(ChimsimError, match=r"does not give the requests stored there \(row 3, admitted_at: "):
        simulate_again(results, name)


def test_a_live_run_cannot_be_run_again(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    manifest = tmp_path / "copy" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"live": True}))
    results = Results(tmp_path / "copy")
    with pytest.raises(ChimsimError, match="live run"):
        simulate_again(results, results.cells[0])
