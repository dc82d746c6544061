"""Readers of conversations, graphs and what else is no plain list of calls, on small files of our own."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces import Stage, Trace, TraceError, read_trace, write_trace
from traces.graph import parents
from traces.readers import READERS, import_trace

FILES = Path(__file__).parent / "files"
NAMES = sorted(path.name for path in FILES.iterdir())
A = ["A"]


def format_of(name: str) -> str:
    """The format of a file of ours, which its name begins with, more or less."""
    known = {"agentic-": "agentic_mooncake", "vllm-ben": "vllm_bench"}.get(name[:8])
    return known or next(format for format in READERS if name.startswith(format))


def imported(name: str, format: str, **more: Any) -> Trace:
    return import_trace(FILES / name, format, A, **more).trace


def stages_of(trace: Trace, index: int = 0) -> tuple[Stage, ...]:
    return trace.workflows[index].runs["A"].stages


def shape(stages: tuple[Stage, ...]) -> list[tuple[int, tuple[int, ...], float]]:
    """Of each stage the prompt, what it waits for, and its delay."""
    return [(stage.prompt_tokens, parents(stages, index), stage.delay_s) for index, stage in enumerate(stages)]


def test_otel_overlapping_branches_are_side_by_side_and_the_judge_waits_for_them() -> None:
    trace = imported("otel-fan-out.json", "otel")
    stages = stages_of(trace)
    assert [stage.name for stage in stages] == ["planner", "coder", "coder", "coder", "judge"]
    # The third call began after the second had ended, but in the branch of another coder.
    assert shape(stages) == [
        (900, (), 0.0), (1100, (0,), 0.2), (1100, (0,), 1.2), (1500, (1,), 1.6), (2100, (2, 3), 0.5)
    ]  # fmt: skip
    assert [stage.reused_tokens for stage in stages] == [0, 896, 0, 0, 0]
    assert [workflow.arrival_s for workflow in trace.workflows] == [0.0, 2.4]
    assert trace.workflows[0].workflow_id == "5b8efff798038103d269b633813fc60c"


def test_otel_spans_a_line_and_their_model() -> None:
    found = import_trace(FILES / "otel-spans.jsonl", "otel")
    assert found.trace.models == ("qwen-7b",)
    assert shape(found.trace.workflows[0].runs["qwen-7b"].stages) == [(12, (), 0.0), (20, (0,), 0.5)]
    assert found.notes == ("spans whose parent is not in the file (they count as begins of their traces): 1",)


def test_otel_pretty_printed_values_one_after_the_other(tmp_path: Path) -> None:
    spans = [json.loads(line) for line in (FILES / "otel-spans.jsonl").read_text().splitlines()]
    path = tmp_path / "spans.json"
    path.write_text("\n\n".join(json.dumps(span, indent=4) for span in spans))
    again = import_trace(path, "otel").trace
    assert again.workflows == import_trace(FILES / "otel-spans.jsonl", "otel").trace.workflows
    path.write_text(path.read_text()[:-30])
    with pytest.raises(TraceError, match=r"spans\.json:\d\d+: not valid JSON"):
        import_trace(path, "otel")


def test_agentic_mooncake_1_links_requests_into_workflows() -> None:
    trace = imported("agentic-1.jsonl", "agentic_mooncake")
    assert shape(stages_of(trace)) == [(1100, (), 0.0), (1300, (0,), 0.05), (700, (0,), 0.0), (1600, (1, 2), 0.005)]
    assert [stage.reused_tokens for stage in stages_of(trace)] == [0, 1024, 0, 1300]
    assert [workflow.arrival_s for workflow in trace.workflows] == [0.0, 0.5005]


def test_agentic_mooncake_2_dispatch_edges_and_joins_of_different_delays() -> None:
    found = import_trace(FILES / "agentic-2.jsonl", "agentic_mooncake")
    stages = found.trace.workflows[0].runs["qwen-7b"].stages
    # The third is sent 50 ms after the second, which is sent 250 ms after the first's end.
    assert shape(stages) == [(100, (), 0.0), (100, (0,), 0.25), (65, (0,), 0.3), (128, (1, 2), 0.01)]
    assert {stage.hash_block_tokens for stage in stages} == {64}
    assert [workflow.workflow_id for workflow in found.trace.workflows] == ["p", "q"]
    assert found.notes[0] == "joins whose edges have different delays (the shortest is kept): 1"


def test_conversations() -> None:
    burst = imported("burstgpt.csv", "burstgpt")
    assert shape(stages_of(burst)) == [(900, (), 0.0), (990, (0,), 26.0)]
    assert [(w.workflow_id, w.arrival_s) for w in burst.workflows] == [
        ("c-1", 0.0), ("burstgpt-000001", 2.0), ("c-2", 31.0)
    ]  # fmt: skip
    assert len(imported("burstgpt.csv", "burstgpt", limit=1).workflows[0].runs["A"].stages) == 2
    sim = imported("llmservingsim.jsonl", "llmservingsim")
    assert shape(stages_of(sim)) == [(4, (), 0.0), (7, (0,), 0.127)]
    assert stages_of(sim)[1].reused_tokens == 5
    cake = imported("mooncake-sessions.jsonl", "mooncake")
    assert [shape(stages_of(cake, index)) for index in range(3)] == [
        [(600, (), 0.0), (1100, (0,), 0.2505)], [(10, (), 0.0)], [(10, (), 0.0), (12, (0,), 0.4)]
    ]  # fmt: skip
    assert stages_of(cake)[1].reused_tokens == 512


def test_azure_2024_and_vllm_bench() -> None:
    assert [w.arrival_s for w in imported("azure-2024.csv", "azure").workflows] == [0.0, 0.99007]
    found = import_trace(FILES / "vllm-bench.json", "vllm_bench")
    assert found.trace.models == ("Qwen/Qwen2.5-7B",)
    assert [w.arrival_s for w in found.trace.workflows] == [0.0, 0.75]
    assert found.notes == ("failed calls, left out: 1",)


def test_servegen_draws_the_windows_rates() -> None:
    times = np.array([workflow.arrival_s for workflow in imported("servegen.csv", "servegen").workflows])
    assert np.all(np.diff(times) >= 0)
    counts, _ = np.histogram(times, [0, 600, 1199, 1801])
    assert counts[1] == 0
    for count, mean in zip(counts[[0, 2]], (450, 1200), strict=True):
        assert abs(count - mean) < 4 * 1.2 * mean**0.5


@pytest.mark.parametrize("name", NAMES)
def test_every_file_of_ours_reads_back_as_written(tmp_path: Path, name: str) -> None:
    trace = imported(name, format_of(name))
    write_trace(trace, tmp_path / "t.jsonl")
    assert read_trace(tmp_path / "t.jsonl").workflows == trace.workflows


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("agentic-1.jsonl", '["r0"], "delay"', '["r9"], "delay"', ":2: waits for 'r9', which is not in the file"),
        ("agentic-1.jsonl", '["r0"], "delay"', '["r3"], "delay"', ":2: expected calls that wait for earlier ones,"),
        ("agentic-1.jsonl", '"r2", "session', '"r1", "session', ":3: request_id: expected an id of its own, and not"),
        ("agentic-1.jsonl", '"delay": 20', '"delay": -20', ":2: delay: expected a number of ms, at least 0, found -20"),
        ("agentic-1.jsonl", '"delay": 20', '"timestamp": 999', ":2: time: expected none before that of 'r0', which it"),
        ("agentic-1.jsonl", ', "timestamp": 1000', "", ":1: field 'timestamp' is missing in a row that waits for none"),
        ("agentic-1.jsonl", '"wait_for": ["r2", "r1"]', '"wait_for": "r2"', ":5: wait_for: expected a list of request"),
        ("agentic-2.jsonl", '"version": 2', '"version": 3', ":1: header: expected dynamo.agentic_mooncake, version 2"),
        ("agentic-2.jsonl", '"dispatch"', '"start"', ":4: trigger: expected completion or dispatch, found 'start'"),
        ("agentic-2.jsonl", '"p/1", "play_id": "p"', '"p/1", "play_id": "z"', ":3: dependencies: expected calls of"),
        ("agentic-2.jsonl", "[3, 4]", "[3]", ":3: hash_ids: expected 2 ids (input_length 100 in blocks of 64;"),
        ("agentic-2.jsonl", '"not_before_ms": 2000.25', '"not_before": 1', ":6: field 'not_before_ms' is missing; did"),
        ("otel-spans.jsonl", '"0x0f"', '"0x0b"', ":2: span 0x0b: expected calls that wait for earlier ones, found"),
        ("otel-spans.jsonl", '"span_id": "0x0b"', '"span_id": "0x0a"', ":2: span 0x0a: expected an id of its own"),
        ("otel-spans.jsonl", "00:00:02.", "00:00:01.", ":2: span 0x0b: end: expected a time not before the start"),
        ("otel-spans.jsonl", "2026-05-10T00:00:00.25", "yesterday", ":1: span 0x0a: start: expected a time like"),
        ("otel-spans.jsonl", '"gen_ai.usage.prompt_tokens": 12', '"gen_ai.usage.prompt_tokens": -1', "0x0a:"),
        ("otel-spans.jsonl", '"trace_id": "0x01"', '"trace": "0x01"', ":1: field 'trace_id' of a span is missing"),
        ("otel-spans.jsonl", "_tokens", "_tok", "the file has no calls; spans whose parent"),
        ("otel-fan-out.json", '"spans": [', '"span": [', ":1: expected resourceSpans, scopeSpans and spans within"),
        ("burstgpt.csv", "Session ID", "Session", ":1: header: expected the columns Timestamp,Model"),
        ("burstgpt.csv", "130.0", "99.0", ":4: Timestamp: expected a turn not before the one before it (100 s), found"),
        ("burstgpt.csv", "130.0", "later", ":4: Timestamp: expected a number of s, at least 0, found 'later'"),
        ("burstgpt.csv", ",900,", ",0,", ":2: Request tokens: expected a positive integer, found 0"),
        ("burstgpt.csv", ",4,GPT-4", ",-4,GPT-4", ":2: Elapsed time: expected a number of s, at least 0, found -4"),
        ("llmservingsim.jsonl", "127000000", "-1", ":1: sub_requests[0]: tool_duration_ns: expected a number of ns"),
        ("llmservingsim.jsonl", '"output_tok_ids": [5, 6]', '"output_tok_ids": [5]', ":1: sub_requests[0]:"),
        ("llmservingsim.jsonl", '"input_toks": 7', '"input_toks": "7"', ":1: sub_requests[1]: input_tok"),
        ("llmservingsim.jsonl", '"arrival_time_ns": 9', '"session_id": "task-0", "sub_requests": [], "x": 9', ":2:"),
        ("llmservingsim.jsonl", '"task-0"', '""', ":1: session_id: expected text, found ''"),
        ("mooncake-sessions.jsonl", '"delay": 250.5, ', "", ":3: field 'delay' is missing, and 'timestamp' too"),
        ("mooncake-sessions.jsonl", "1900", "1400", ":5: timestamp: expected a turn not before the one before it"),
        ("servegen.csv", "Gamma,0.7", "Pareto,0.7", ":1: distribution: expected Gamma or Weibull, its shape and its"),
        ("servegen.csv", "Gamma,0.7", "Gamma,x", ":1: shape: expected a number from 0.01 to 1e6, found 'x'"),
        ("servegen.csv", "1200,2.0", "1200,-2", ":3: rate: expected calls a second, from 0 to 1e6, found '-2'"),
        ("servegen.csv", "600,", "soon,", ":2: begin: expected a number of s, at least 0, found 'soon'"),
        ("servegen.csv", ",0.5\n", ",0.5,7\n", ":3: row: expected begin, rate, cv, distribution, shape, scale"),
        ("vllm-bench.json", "start_times", "starts", ": start_times is missing; expected a result of vllm bench serve"),
        ("vllm-bench.json", "5.25", "-5.25", ": call 0: start_times: expected a number of s, at least 0"),
        ("vllm-bench.json", '"input_lens": [\n  7,', '"input_lens": [\n', ": input_lens: expected a list of as many"),
        ("vllm-bench.json", '  7,\n', '  0,\n', ": call 0: input_lens: expected a positive integer, found 0"),
        ("vllm-bench.json", '"timeout"', '"timeout', ": not valid JSON"),
        ("azure-2024.csv", "+00:00,2162", "+02:00,2162", ":2: TIMESTAMP: expected a time like"),
    ],
)  # fmt: skip
def test_each_mistake_has_its_message(tmp_path: Path, name: str, old: str, new: str, message: str) -> None:
    text = (FILES / name).read_text()
    assert old in text
    path = tmp_path / name
    path.write_text(text.replace(old, new, 1 if old != "_tokens" else -1))
    with pytest.raises(TraceError) as caught:
        import_trace(path, format_of(name), A)
    assert "\n" not in str(caught.value)
    assert message in str(caught.value).removeprefix(str(tmp_path))


TOKEN = re.compile(r'"[^"]*"|-?\d+(?:\.\d+)?|null|[\[\]{}]')
JUNK = ["null", "[]", "{}", "-1", "1e400", "0.5", '"x"', '""', "[[1]]", '{"a": 1}', "9" * 25, ",", '"\\ud800"', "0"]


@given(st.data())
def test_whatever_is_in_a_file_is_a_trace_or_a_mistake(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(NAMES))
    content = (FILES / name).read_text()
    begin, end = data.draw(st.sampled_from([match.span() for match in TOKEN.finditer(content)]))
    path = tmp_path_factory.mktemp("junk") / name
    path.write_text(content[:begin] + data.draw(st.sampled_from(JUNK)) + content[end:])
    with suppress(TraceError):
        write_trace(import_trace(path, format_of(name), A).trace, path.with_suffix(".jsonl"))
