"""What is written for other tools says what the trace says, and reads back the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.traces.builders import row, stage, trace_rows
from traces import Run, Stage, Trace, TraceError, Workflow, workflow_from_dict
from traces.graph import is_chain, prefix_parent
from traces.readers import import_trace
from traces.writers import export_trace

FAN_OUT = [
    stage(name="planner", prompt_tokens=1024, output_tokens=600),
    *(stage(name="coder", prompt_tokens=1700 + n, reused_tokens=1624, after=[0], delay_s=0.25) for n in range(3)),
    stage(name="judge", prompt_tokens=3000, reused_tokens=1624, after=[1, 2, 3], delay_s=0.5),
]


def trace_of(*rows: dict[str, Any]) -> Trace:
    return Trace("mine", tuple(workflow_from_dict(item, "mine") for item in rows))


def written(trace: Trace, folder: Path, format: str, **more: Any) -> list[dict[str, Any]]:
    export_trace(trace, folder / "out.jsonl", format, "Qwen2.5-7B", **more)
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def back(folder: Path, format: str) -> Trace:
    return import_trace(folder / "out.jsonl", format, ["Qwen2.5-7B"]).trace


def test_a_fan_out_as_agentic_mooncake(tmp_path: Path) -> None:
    header, planner, *coders, judge = written(trace_of(row(stages=FAN_OUT, arrival_s=3)), tmp_path, "agentic_mooncake")
    assert (header["version"], header["block_size"]) == (2, 512)
    assert planner == {
        "request_id": "w-0/0", "play_id": "w-0", "session_id": "w-0/0", "model": "Qwen2.5-7B", "input_length": 1024,
        "output_length": 600, "hash_ids": [0, 1], "not_before_ms": 3000.0,
    }  # fmt: skip
    # The third block is the planner's answer, which its own prompt does not have; the last ones are partial.
    assert [coder["hash_ids"] for coder in coders] == [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 5]]
    assert [coder["session_id"] for coder in coders] == ["w-0/0", "w-0/2", "w-0/3"]
    assert coders[1]["dependencies"] == [
        {"request_id": "w-0/0", "trigger": "completion", "delay_ms": 250.0, "relation": "spawn"}
    ]
    assert judge["hash_ids"][:3] == [0, 1, 2]
    assert [edge["relation"] for edge in judge["dependencies"]] == ["join", "join", "sequence"]


def test_a_fan_out_reads_back_equal(tmp_path: Path) -> None:
    trace = trace_of(row(stages=FAN_OUT, arrival_s=0), row("w-1", stages=FAN_OUT, arrival_s=1.75))
    written(trace, tmp_path, "agentic_mooncake")
    again = back(tmp_path, "agentic_mooncake")
    assert [w.arrival_s for w in again.workflows] == [0.0, 1.75]
    for mine, theirs in zip(trace.workflows, again.workflows, strict=True):
        assert theirs.workflow_id == mine.workflow_id
        for index, (one, other) in enumerate(
            zip(mine.runs["Qwen2.5-7B"].stages, theirs.runs["Qwen2.5-7B"].stages, strict=True)
        ):
            reused = (0, 1024, 1024, 1024, 1536)[index]
            assert other == replace(one, name="call", reused_tokens=reused, hash_ids=other.hash_ids)


def test_chains_as_turns_of_mooncake(tmp_path: Path) -> None:
    stages = [stage(prompt_tokens=600), stage(prompt_tokens=900, reused_tokens=620, delay_s=0.125)]
    rows = written(trace_of(row(stages=stages, arrival_s=2), row("single", arrival_s=2.5)), tmp_path, "mooncake")
    assert rows == [
        {"session_id": "w-0", "timestamp": 2000.0, "input_length": 600, "output_length": 20, "hash_ids": [0, 1]},
        {"session_id": "w-0", "delay": 125.0, "input_length": 900, "output_length": 20, "hash_ids": [0, 2]},
        {"timestamp": 2500.0, "input_length": 100, "output_length": 20, "hash_ids": [3]},
    ]
    with pytest.raises(TraceError, match=r"workflow w-0 is a graph, and mooncake knows only turns"):
        written(trace_of(row(stages=FAN_OUT, arrival_s=0)), tmp_path, "mooncake")


def test_shared_prefixes_are_shared_across_workflows(tmp_path: Path) -> None:
    shared = stage(shared_prefix={"id": "coder-system", "tokens": 70})
    trace = trace_of(*(row(f"w-{n}", stages=[shared], arrival_s=n) for n in range(2)))
    assert [item["hash_ids"] for item in written(trace, tmp_path, "mooncake", block_tokens=32)] == [
        [0, 1, 2, 3], [0, 1, 4, 5]
    ]  # fmt: skip


@given(trace_rows(), st.sampled_from(["mooncake", "agentic_mooncake"]))
def test_what_was_read_is_written_and_read_again_the_same(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], format: str
) -> None:
    folder = tmp_path_factory.mktemp("round")
    runs = [next(iter(workflow_from_dict(item, "").runs.values())) for item in rows]
    runs = [Run(tuple(replace(s, hash_ids=(), hash_block_tokens=512) for s in run.stages)) for run in runs]
    runs = [Run(tuple(replace(s, delay_s=round(s.delay_s, 6)) for s in run.stages)) for run in runs]
    if format == "mooncake":
        runs = [run for run in runs if is_chain(run.stages)] or [Run((Stage("only", 5, 5),))]
    trace = Trace("t", tuple(Workflow(f"w-{n}", "x", {"Qwen2.5-7B": run}, float(n)) for n, run in enumerate(runs)))
    written(trace, folder, format)
    first = back(folder, format)
    written(first, folder, format)
    second = back(folder, format)
    assert second.workflows == first.workflows
    for mine, theirs in zip(trace.workflows, first.workflows, strict=True):
        one, other = mine.runs["Qwen2.5-7B"].stages, theirs.runs["Qwen2.5-7B"].stages
        assert [(s.prompt_tokens, s.output_tokens, s.after) for s in one] == [
            (s.prompt_tokens, s.output_tokens, s.after) for s in other
        ]
        for index, stage_ in enumerate(one):
            parent = prefix_parent(one, index)
            if parent is not None and stage_.shared_prefix is None:
                most = min(stage_.reused_tokens, one[parent].prompt_tokens) // 512 * 512
                assert other[index].reused_tokens == most
            if parent is not None:
                assert other[index].delay_s == stage_.delay_s


def test_what_cannot_be_said_is_said(tmp_path: Path) -> None:
    trace = trace_of(row(stages=FAN_OUT, arrival_s=0, prompt="Count the crates", confidence={"Qwen2.5-7B": 0.5}))
    unsaid, reuse = export_trace(trace, tmp_path / "out.jsonl.gz", "agentic_mooncake", "Qwen2.5-7B").notes
    assert unsaid == (
        "agentic_mooncake does not say the labels, the runs of Qwen2.5-1.5B, the names of stages, the workloads, "
        "texts, a router's confidence"
    )
    # Of 4 x 1624 tokens: 2 blocks of the planner's prompt for each coder, 3 of a coder's for the judge.
    assert "71% of 6,496 reused tokens" in reuse
    assert (tmp_path / "out.jsonl.gz").read_bytes()[:2] == b"\x1f\x8b"


def test_wrong_requests(tmp_path: Path) -> None:
    trace = trace_of(row(arrival_s=0))
    hashed = trace_of(row(stages=[stage(hash_ids=[1], hash_block_tokens=128)], arrival_s=0))
    for asked, format, model, block, message in (
        (trace, "moonkake", "Qwen2.5-7B", 512, "format 'moonkake' is unknown; did you mean 'mooncake'"),
        (trace, "mooncake", "Qwen2.5-8B", 512, "w-0 has no run of 'Qwen2.5-8B'; did you mean 'Qwen2.5-7B'"),
        (trace, "mooncake", "Qwen2.5-7B", 0, "block tokens: expected a positive integer, found 0"),
        (trace_of(row()), "mooncake", "Qwen2.5-7B", 512, "trace mine has no arrival times"),
        (hashed, "mooncake", "Qwen2.5-7B", 512, "export it with blocks of 128 tokens"),
    ):
        with pytest.raises(TraceError, match=message):
            export_trace(asked, tmp_path / "out.jsonl", format, model, block)
    assert not list(tmp_path.iterdir())
