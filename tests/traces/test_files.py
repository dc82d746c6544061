"""Trace files: the same trace in every format, and one clear message for each kind of broken file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.traces.builders import row, stage, trace_rows, write_lines
from traces import Trace, TraceError, load_trace, read_trace, workflow_from_dict, write_trace
from traces.files import SHIPPED, SUFFIXES


def message_of(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@given(trace_rows())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_format_gives_back_the_same_trace(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    trace = Trace("t", tuple(workflow_from_dict(line, "x") for line in rows))
    read = []
    for suffix in SUFFIXES:
        write_trace(trace, tmp_path / f"t{suffix}")
        read.append(read_trace(tmp_path / f"t{suffix}"))
    assert [item.workflows for item in read] == [trace.workflows] * 3
    assert {item.digest for item in read} == {read[0].digest}
    assert read[0].name == "t"


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    rows = [row("a"), row("b")]
    plain = read_trace(write_lines(tmp_path / "a.jsonl", rows))
    spaced = tmp_path / "b.jsonl"
    spaced.write_text("\ufeff" + "\n\n".join(json.dumps(dict(reversed(r.items())), indent=None) for r in rows))
    assert read_trace(spaced).digest == plain.digest
    assert read_trace(write_lines(tmp_path / "c.jsonl", rows[::-1])).digest != plain.digest
    rows[1]["runs"]["Qwen2.5-7B"]["solved"] = False
    assert read_trace(write_lines(tmp_path / "d.jsonl", rows)).digest != plain.digest


def test_gzip_bytes_depend_on_the_trace_alone(tmp_path: Path) -> None:
    trace = read_trace(write_lines(tmp_path / "a.jsonl", [row()]))
    write_trace(trace, tmp_path / "one.jsonl.gz")
    write_trace(trace, tmp_path / "two.jsonl.gz")
    assert (tmp_path / "one.jsonl.gz").read_bytes() == (tmp_path / "two.jsonl.gz").read_bytes()


def test_a_limit_reads_the_front_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row(f"w-{i}")) + "\n" for i in range(3)) + "not JSON\n")
    assert [w.workflow_id for w in read_trace(path, limit=2).workflows] == ["w-0", "w-1"]
    with pytest.raises(TraceError, match=r"a\.jsonl:4: not valid JSON"):
        read_trace(path)
    with pytest.raises(TraceError, match="limit: expected a positive integer, found 0"):
        read_trace(path, limit=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file has no workflows"),
        (b"\n \n", "the file has no workflows"),
        (b'{"workflow_id": "w-0", "workload', "a.jsonl:1: not valid JSON"),
        (b'{"workflow_id": "w-0", "workload": "apps", "runs": {', "a truncated file?"),
        (b"\xff\xfe{}", "a.jsonl:1: expected UTF-8 text, found the byte 0xff at position 1"),
        (b'{"a": 1, "a": 2}', "the key 'a' is given twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 5000, "not valid JSON for a trace"),
        (b"[1, 2]", "a.jsonl:1: expected an object, found [1, 2]"),
        (b"\x1f\x8bgarbage in here", "the gzip data is damaged"),
    ],
)
def test_a_broken_file_has_one_clear_message(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    assert message in message_of(path)


def test_the_line_of_a_wrong_field_is_named(tmp_path: Path) -> None:
    wrong = row("w-1", stages=[stage(), stage(output_tokens=-3)])
    message = message_of(write_lines(tmp_path / "my.jsonl", [row("w-0"), wrong]))
    expected = "my.jsonl:2: runs.Qwen2.5-1.5B.stages[1].output_tokens: expected a positive integer, found -3"
    assert message == f"{tmp_path}/{expected}"


@pytest.mark.parametrize("kept", [9, 30, -20, -4])
def test_truncated_gzip(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "a.jsonl.gz"
    rows = [json.dumps(row(f"w-{i}", prompt=str(i**9))) for i in range(200)]
    path.write_bytes(gzip.compress("\n".join(rows).encode())[:kept])
    assert "truncated" in message_of(path)


def test_damaged_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 this is not Parquet PAR1")
    assert "a.parquet: not a readable Parquet file" in message_of(path)
    write_trace(read_trace(write_lines(tmp_path / "a.jsonl", [row()])), path)
    path.write_bytes(path.read_bytes()[:-40])
    assert "a.parquet: not a readable Parquet file" in message_of(path)


def test_what_only_the_whole_trace_shows(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [row("a"), row("b"), row("a")])
    assert f"a.jsonl:3: workflow_id: expected an id of its own, found 'a', which {path}:1" in message_of(path)
    for rows in ([row("a", arrival_s=1), row("b")], [row("a"), row("b", arrival_s=1)]):
        path = write_lines(tmp_path / "a.jsonl", rows)
        assert "a.jsonl:2: arrival_s: expected on all workflows or on none" in message_of(path)


def test_paths_that_are_no_trace_files(tmp_path: Path) -> None:
    write_lines(tmp_path / "trace.jsonl", [row()])
    assert "trace.jsonI.jsonl: there is no such file" in message_of(tmp_path / "trace.jsonI.jsonl")
    assert "did you mean 'trace.jsonl'?" in message_of(tmp_path / "trac.jsonl")
    assert "chimsim trace import" in message_of(tmp_path / "calls.csv")
    (tmp_path / "folder.jsonl").mkdir()
    assert "expected a file, found a directory" in message_of(tmp_path / "folder.jsonl")
    with pytest.raises(TraceError, match="trace 'app' is unknown; did you mean 'apps'"):
        load_trace("app")


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    trace = read_trace(write_lines(tmp_path / "a.jsonl", [row()]))
    with pytest.raises(TraceError, match="cannot be written"):
        write_trace(trace, tmp_path / "missing" / "b.jsonl")
    wrong = Trace("t", (*trace.workflows, *trace.workflows))
    with pytest.raises(TraceError, match="expected an id of its own"):
        write_trace(wrong, tmp_path / "b.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_traces_load_by_name(name: str) -> None:
    trace = load_trace(name, limit=3)
    assert (trace.name, len(trace.workflows), len(trace.models)) == (name, 3, 6)


def test_the_example_in_the_readme_is_a_valid_workflow() -> None:
    text = (Path(__file__).parents[2] / "traces" / "README.md").read_text(encoding="utf-8")
    example = text.split("```json\n")[1].split("```")[0]
    workflow = workflow_from_dict(json.loads(example), "README.md")
    assert workflow.runs["Qwen2.5-1.5B"].stages[1].reused_tokens == 518
