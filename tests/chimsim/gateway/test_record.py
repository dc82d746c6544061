"""The recorder: its file is a trace, whatever happens to the disk, to its size, or to the process."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from pathlib import Path

import pytest

from chimsim.errors import ChimsimError
from chimsim.gateway.ask import Ask
from chimsim.gateway.record import Recorder
from chimsim.gateway.relay import Outcome
from chimsim.gateway.sessions import Session, Sessions
from traces import load_trace
from traces.schema import TraceError

SECRET = "a secret"


def session(name: str, at: float = 0.0) -> Session:
    ask = Ask("/v1/completions", {}, "auto", False, name, "apps", "", False, SECRET, SECRET)
    return Sessions(10.0).enter(at, ask)


def stage(
    recorder: Recorder, of: Session, text: str, said: str, at: float, *, model: str = "A", system: int = 0, ids: int = 0
) -> None:
    ask = Ask("/v1/completions", {}, "auto", False, of.workflow_id, "apps", "", False, text, text, system, ids)
    tokens = len(text) or ids
    recorder.stage(of, ask, model, f"stage-{len(of.recorded)}", at, at + 1.0, Outcome(tokens, len(said), said))


def record_one(recorder: Recorder, name: str = "w", at: float = 0.0) -> None:
    made = session(name, at)
    stage(recorder, made, SECRET, "said", at)
    recorder.workflow(made)


def test_what_is_written_is_a_trace_with_its_lengths_delays_and_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    with Recorder(path) as recorder:
        made = session("w", 5.0)
        stage(recorder, made, SECRET, " is here", 5.0, system=2)
        # the prompt of the second call begins with all of the first
        stage(recorder, made, f"{SECRET} is here, and more", "yes", 6.5, model="B")
        stage(recorder, made, "", "no", 7.0, model="B", ids=30)
        recorder.workflow(made)
        recorder.workflow(session("nothing came of it"))
    (workflow,) = load_trace(path).workflows
    assert (workflow.workflow_id, workflow.workload, workflow.arrival_s) == ("w", "apps", 5.0)
    assert workflow.meta["models"] == ["A", "B", "B"]
    ((model, run),) = workflow.runs.items()
    assert model == "B"
    assert run.solved is None
    first, second, third = run.stages
    assert (first.prompt_tokens, first.output_tokens, first.reused_tokens, first.delay_s) == (8, 8, 0, 0.0)
    assert (first.system_tokens, first.user_tokens) == (2, 6)
    assert (second.prompt_tokens, second.reused_tokens, second.delay_s) == (26, 16, 0.5)
    # it was ready before the second was over, and token ids cannot be compared with text
    assert (third.prompt_tokens, third.reused_tokens, third.delay_s, third.system_tokens) == (30, 0, 0.0, None)


def test_texts_are_kept_only_where_asked_for(tmp_path: Path) -> None:
    for texts in (False, True):
        path = tmp_path / f"{texts}.jsonl"
        with Recorder(path, texts=texts) as recorder:
            record_one(recorder)
        assert (SECRET in path.read_text()) is texts
        assert ("said" in path.read_text()) is texts
    (workflow,) = load_trace(path).workflows
    assert workflow.prompt == SECRET
    (made,) = workflow.runs["A"].stages
    assert (made.prompt, made.output) == (SECRET, "said")


def test_half_a_character_costs_no_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    with Recorder(path, texts=True) as recorder:
        made = session("w")
        stage(recorder, made, SECRET, "\ud83d, half a face", 0.0)
        recorder.workflow(made)
    assert load_trace(path).workflows[0].runs["A"].stages[0].output == "?, half a face"


def test_a_name_stands_once_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    with Recorder(path) as recorder:
        for name in ("w", "v", "w", "w"):
            record_one(recorder, name)
    assert [each.workflow_id for each in load_trace(path).workflows] == ["w", "v", "w#2", "w#3"]


def test_a_file_that_is_there_is_set_aside_and_an_empty_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    for _ in range(3):
        with Recorder(path) as recorder:
            record_one(recorder)
    with Recorder(path):
        pass
    with Recorder(path):
        pass
    assert path.read_bytes() == b""
    aside = sorted(set(tmp_path.iterdir()) - {path})
    assert len(aside) == 3
    assert all(re.fullmatch(r"mine-\d{8}T\d{6}(-\d)?\.jsonl", each.name) for each in aside)
    assert all(len(load_trace(each).workflows) == 1 for each in aside)


def test_it_begins_a_new_file_beyond_the_size_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    with Recorder(path, max_bytes=500) as recorder:
        for at in range(12):
            record_one(recorder, "w" if at % 2 else f"v{at}", float(at))
    files = list(tmp_path.iterdir())
    assert len(files) > 2
    assert all(each.stat().st_size < 900 for each in files)
    arrivals = [workflow.arrival_s for each in files for workflow in load_trace(each).workflows]
    assert sorted(at for at in arrivals if at is not None) == [float(at) for at in range(12)]


def test_a_line_that_a_crash_cut_is_named_and_the_lines_before_it_stay(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    with Recorder(path) as recorder:
        for name in "abc":
            record_one(recorder, name)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(TraceError, match=r"mine\.jsonl:3: not valid JSON.*the line ends too early \(a truncated file"):
        load_trace(path)
    assert [each.workflow_id for each in load_trace(path, limit=2).workflows] == ["a", "b"]


def test_a_disk_that_fails_costs_the_lines_meanwhile_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "mine.jsonl"
    synced: list[int] = []

    def sync(number: int) -> None:
        synced.append(number)
        if len(synced) in (2, 3):
            # a line of which only a part found room
            os.truncate(path, path.stat().st_size - 20)
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", sync)
    with Recorder(path) as recorder:
        for number, name in enumerate("abcd"):
            record_one(recorder, name)
            while len(synced) <= number:
                time.sleep(0.001)
    assert [each.workflow_id for each in load_trace(path).workflows] == ["a", "d"]
    errors = [record for record in caplog.records if record.message == "recording failed"]
    assert len(errors) == 1
    assert errors[0].__dict__["fields"]["error"].endswith("No space left on device")


def test_a_file_that_was_moved_away_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    with Recorder(path) as recorder:
        record_one(recorder, "a")
        while not path.stat().st_size:
            time.sleep(0.001)
        path.rename(tmp_path / "moved.jsonl")
        record_one(recorder, "b")
    assert load_trace(tmp_path / "moved.jsonl").workflows[0].workflow_id == "a"
    assert load_trace(path).workflows[0].workflow_id == "b"


def test_a_place_that_cannot_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ChimsimError, match="there is no folder"):
        Recorder(tmp_path / "no" / "mine.jsonl")
    with pytest.raises(ChimsimError, match=r"mine\.parquet: .*expected a name ending in \.jsonl"):
        Recorder(tmp_path / "mine.parquet")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ChimsimError, match="is a folder"):
        Recorder(tmp_path / "folder.jsonl")


def test_lines_are_whole_at_any_time(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    with Recorder(path) as recorder:
        for at in range(20):
            record_one(recorder, f"w{at}")
            time.sleep(0.001)
            data = path.read_bytes()
            assert not data or data.endswith(b"\n")
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 20
