"""The timeline: a strict reading of Chrome's trace event format, and what the slices say against the records."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chimsim.errors import ChimsimError
from chimsim.timeline import check_timeline, trace_events, write_timeline
from tests.chimsim.small import run_chimsim, write_small
from tests.chimsim.test_graphs import FAN
from tests.chimsim.watched import POLICIES, watched
from tests.chimsim.worlds import MODELS, single_stage, traces, workflow
from traces import Trace

ALONE = Trace("test", (workflow("w", FAN, arrival_s=0.0),))
drawn = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


def check_format(document: dict[str, Any]) -> None:
    """Raises AssertionError at what a trace viewer would refuse, drop, or draw otherwise than meant."""
    events = document["traceEvents"]
    assert events
    fields = {"M": {"args"}, "X": {"tid", "ts", "dur"}, "i": {"tid", "ts", "s"}, "C": {"ts", "args"},
              "s": {"tid", "ts", "id", "cat"}, "f": {"tid", "ts", "id", "cat", "bp"}}  # fmt: skip
    threads: dict[int, int] = {}
    pids = {event["pid"] for event in events}
    named: set[tuple[str, int, int | None]] = set()
    last: dict[tuple[int, Any], int] = defaultdict(int)
    open_slices: dict[int, list[tuple[int, int]]] = defaultdict(list)
    begun: dict[int, dict[str, Any]] = {}
    ended: set[int] = set()
    for event in events:
        phase = event["ph"]
        assert fields[phase] <= event.keys()
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is int
        if "tid" in event:
            # One process a thread, and no thread with a process's number: Perfetto would take it for its main thread.
            assert threads.setdefault(event["tid"], event["pid"]) == event["pid"]
            assert event["tid"] not in pids
        if phase == "M":
            assert (event["name"], event["pid"], event.get("tid")) not in named
            named.add((event["name"], event["pid"], event.get("tid")))
            continue
        at = event["ts"]
        assert type(at) is int
        track = event["pid"], event.get("tid", event["name"])
        assert at >= last[track], "a track goes back in time"
        last[track] = at
        if phase == "C":
            assert all(type(v) in (int, float) and isfinite(v) and v >= 0 for v in event["args"].values())
        elif phase == "X":
            assert type(event["dur"]) is int
            assert event["dur"] >= 0
            stack, end = open_slices[event["tid"]], at + event["dur"]
            while stack and stack[-1][1] <= at:
                stack.pop()
            assert not stack or end <= stack[-1][1], "a slice outlives the one it is in"
            stack.append((at, end))
        elif phase == "i":
            assert event["s"] in ("t", "p", "g")
        elif phase == "s":
            assert event["id"] not in begun, "an arrow that begins twice"
            assert is_over(open_slices[event["tid"]], at)
            begun[event["id"]] = event
        else:
            assert is_over(open_slices[event["tid"]], at)
            start = begun[event["id"]]
            assert (event["cat"], event["name"], event["bp"]) == (start["cat"], start["name"], "e")
            assert event["id"] not in ended, "an arrow that ends twice"
            ended.add(event["id"])
    assert begun.keys() == ended
    for event in events:
        if event["ph"] in ("X", "i"):
            assert ("thread_name", event["pid"], event["tid"]) in named
    assert {("process_name", pid, None) for pid in pids} <= named


def is_over(stack: list[tuple[int, int]], at: int) -> bool:
    """Whether an arrow's end has a slice under it: the one that began last, of those that stand before it."""
    return bool(stack) and stack[-1][0] <= at <= stack[-1][1]


def slices(events: list[dict[str, Any]], pid_name: str) -> list[dict[str, Any]]:
    pid = next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == pid_name)
    return [event for event in events if event["ph"] == "X" and event["pid"] == pid]


@drawn
@given(traces(), st.sampled_from(POLICIES), st.integers(1, 4), st.sampled_from([40, 60, 4000]))
def test_every_timeline_keeps_the_format(trace: Trace, name: str, slots: int, kv_blocks: int) -> None:
    result, watch = watched(trace, name, slots, kv_blocks)
    events, shown = trace_events(result, watch)
    check_format({"traceEvents": events})
    assert shown == len(result.workflows)
    for model in MODELS:
        rows = {event["tid"] for event in slices(events, model)}
        assert len(rows) <= slots
        calls = result.requests[result.requests["engine"] == model]
        tokens = [event for event in events if event["name"] == "first token" and event["tid"] in rows]
        assert [event["ts"] for event in tokens] == sorted(round(1e6 * at) for at in calls["first_token_at"])
        of_calls = [event for event in slices(events, model) if "args" in event]
        last = {event["args"]["request_id"]: event["ts"] + event["dur"] for event in of_calls}
        assert last == {r: round(1e6 * at) for r, at in zip(calls["request_id"], calls["finished_at"], strict=True)}
        final = [event for event in events if event["ph"] == "C" and event["pid"] == 1 + MODELS.index(model)][-3:]
        assert not final or all(value == 0 for event in final for value in event["args"].values())


@drawn
@given(traces(), st.sampled_from(POLICIES))
def test_a_workflows_slice_is_cut_into_its_critical_path(trace: Trace, name: str) -> None:
    result, watch = watched(trace, name)
    events, _ = trace_events(result, watch)
    rows = defaultdict(list)
    for event in slices(events, "workflows"):
        rows[event["tid"]].append((event["ts"], event["ts"] + event["dur"], "args" in event))
    for row in rows.values():
        at = -1
        for begin, end, whole in row:
            if whole:
                at = begin
            else:
                assert begin == at
                at = end
    assert sum(whole for row in rows.values() for _, _, whole in row) == len(result.workflows)


def test_arrows_join_a_fan_out_and_its_judge() -> None:
    events, _ = trace_events(*watched(ALONE, "fcfs"))
    begins = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    ends = [(event["ts"], event["id"]) for event in events if event["ph"] == "f"]
    judge = max(at for at, _ in ends)
    assert len(ends) == 1 + 3 + 3  # the workflow's to its planner, from that to the coders, from those to the judge
    assert sum(at == judge for at, _ in ends) == 3
    assert max(begins[flow] for at, flow in ends if at == judge) <= judge


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dur": 10**9}, "outlives"),
        ({"ts": 0}, "back in time"),
        ({"tid": 1}, "assert"),
        ({"ts": 0.5}, "assert"),
    ],
)
def test_the_checker_sees_a_slice_that_is_wrong(change: dict[str, Any], message: str) -> None:
    events, _ = trace_events(*watched(ALONE, "fcfs"))
    [wrong] = [event for event in events if event["name"] == "decode" and event["ts"] > 0][:1]
    wrong.update(change)
    with pytest.raises(AssertionError, match=message):
        check_format({"traceEvents": events})


def test_more_than_viewers_take_leaves_out_the_last_workflows() -> None:
    result, watch = watched(single_stage([(20, 5)] * 9, [0.1 * i for i in range(9)]), "fcfs")
    events, shown = trace_events(result, watch, limit=60)
    check_format({"traceEvents": events})
    assert 0 < shown < 9
    assert {e["name"] for e in slices(events, "workflows") if "args" in e} == {f"w{i}" for i in range(shown)}


def test_the_file_is_json_zipped_or_not_and_the_same_again(tmp_path: Path) -> None:
    result, watch = watched(single_stage([(20, 5)] * 4, [0.0, 0.1, 0.2, 0.3]), "chimera")
    plain, packed = tmp_path / "t.json", tmp_path / "t.json.gz"
    told = write_timeline(result, watch, plain)
    write_timeline(result, watch, packed)
    document = json.loads(plain.read_bytes())
    check_format(document)
    assert f"{len(document['traceEvents'])} events of 4 workflows" in told
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.json", "t.json.gz"]
    assert any("reason" in event.get("args", {}) for event in document["traceEvents"])


@pytest.mark.parametrize(("name", "message"), [("t.txt", "ends in .json"), ("no/t.json", "there is no folder")])
def test_a_name_that_cannot_be_written_is_told_before_the_run(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ChimsimError, match=message):
        check_timeline(tmp_path / name)


def test_run_writes_a_timeline_beside_its_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--trace", write_small(tmp_path), "--combo", "qwen1.5b+7b", "--policy", "chimera", "--rps", "20"]
    _, plain, _ = run_chimsim(monkeypatch, capsys, "run", *options)
    path = tmp_path / "t.json"
    code, out, err = run_chimsim(monkeypatch, capsys, "run", *options, "--timeline", path)
    assert (code, out) == (0, plain)
    assert "events of 40 workflows" in err
    check_format(json.loads(path.read_bytes()))
    code, _, err = run_chimsim(monkeypatch, capsys, "run", *options, "--timeline", tmp_path / "t.txt")
    assert code == 2
    assert "expected a name that ends in .json or .json.gz" in err
