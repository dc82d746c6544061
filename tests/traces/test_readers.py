"""Readers of public formats, on small files of our own and, where they are at hand, on the real ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from traces import TraceError, read_trace, write_trace
from traces.readers import READERS, import_trace

REAL = Path(__file__).parents[3] / "shared" / "data"
MODELS = ["Qwen2.5-7B", "Qwen2.5-1.5B"]

MOONCAKE = (
    '{"timestamp": 1000, "input_length": 600, "output_length": 52, "hash_ids": [0, 1]}\n'
    '{"timestamp": 1500.5, "input_length": 512, "output_length": 0, "hash_ids": [0]}\n'
)
AZURE = (
    "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:46.6805901,91,16\r\n"
    "2023-11-16 18:16:46.6805900,91,0"
)
LLMSERVINGSIM = (
    '{"input_toks": 100, "output_toks": 5, "arrival_time_ns": 46926808}\n'
    '{"input_toks": 9, "output_toks": 7, "arrival_time_ns": 1046926809}\n'
)
BENCH = (
    '{"request_id": "b-0", "input_toks": 8, "output_toks": 5, "arrival_time": 1787267980.25, "ts": 1.5}\n'
    '{"request_id": "b-1", "input_toks": 9, "output_toks": 7, "arrival_time": 1787267980.0, "ts": 1.2}\n'
)


def file_of(folder: Path, text: str) -> Path:
    path = folder / "calls.gz"
    path.write_bytes(gzip.compress(text.encode()))
    return path


def message_of(folder: Path, text: str, format: str) -> str:
    with pytest.raises(TraceError) as caught:
        import_trace(file_of(folder, text), format, MODELS)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{folder}/")


def test_mooncake(tmp_path: Path) -> None:
    trace = import_trace(file_of(tmp_path, MOONCAKE), "mooncake", MODELS).trace
    first, second = trace.workflows
    assert trace.models == ("Qwen2.5-1.5B", "Qwen2.5-7B")
    assert (first.workflow_id, first.workload, first.arrival_s) == ("mooncake-000000", "mooncake", 0.0)
    assert second.arrival_s == 0.5005
    assert first.runs["Qwen2.5-7B"] == first.runs["Qwen2.5-1.5B"]
    stage = first.runs["Qwen2.5-7B"].stages[0]
    assert (stage.prompt_tokens, stage.output_tokens, stage.hash_ids) == (600, 52, (0, 1))
    assert stage.hash_block_tokens == 512
    assert first.runs["Qwen2.5-7B"].solved is None


def test_a_call_without_output_gets_one_token_and_a_mark(tmp_path: Path) -> None:
    trace = import_trace(file_of(tmp_path, MOONCAKE), "mooncake", MODELS).trace
    assert [dict(w.meta) for w in trace.workflows] == [{}, {"clamped_output": 1}]
    assert trace.workflows[1].runs["Qwen2.5-7B"].stages[0].output_tokens == 1


def test_azure_keeps_the_seventh_digit(tmp_path: Path) -> None:
    trace = import_trace(file_of(tmp_path, AZURE), "azure", MODELS).trace
    assert [w.arrival_s for w in trace.workflows] == [0.0, 1e-7, 60.0]
    stage = trace.workflows[0].runs["Qwen2.5-7B"].stages[0]
    assert (stage.prompt_tokens, stage.output_tokens) == (374, 44)


def test_llmservingsim_workloads_and_recorded_runs(tmp_path: Path) -> None:
    flat = import_trace(file_of(tmp_path, LLMSERVINGSIM), "llmservingsim", MODELS).trace
    assert [w.arrival_s for w in flat.workflows] == [0.0, 1.000000001]
    bench = import_trace(file_of(tmp_path, BENCH), "llmservingsim", MODELS).trace
    assert [w.arrival_s for w in bench.workflows] == [0.25, 0.0]


def test_an_imported_trace_reads_back(tmp_path: Path) -> None:
    for format, text in (("mooncake", MOONCAKE), ("azure", AZURE), ("llmservingsim", LLMSERVINGSIM)):
        trace = import_trace(file_of(tmp_path, text), format, MODELS, limit=2).trace
        assert len(trace.workflows) == 2
        write_trace(trace, tmp_path / "t.jsonl")
        again = read_trace(tmp_path / "t.jsonl")
        assert (again.workflows, again.digest) == (trace.workflows, trace.digest)


@pytest.mark.parametrize(
    ("format", "text", "message"),
    [
        ("mooncake", MOONCAKE.replace("600", "-6"), "calls.gz:1: input_length: expected a positive"),
        ("mooncake", MOONCAKE.replace("1500.5", "NaN"), "calls.gz:2: timestamp: expected a number of ms"),
        ("mooncake", MOONCAKE.replace("[0, 1]", "[0]"), "calls.gz:1: hash_ids: expected 2 ids"),
        ("mooncake", MOONCAKE.replace("[0, 1]", '["0", 1]'), "calls.gz:1: hash_ids: expected a list"),
        ("mooncake", LLMSERVINGSIM, "calls.gz:1: field 'timestamp' is missing"),
        ("mooncake", "3\n", "calls.gz:1: expected an object with timestamp"),
        ("mooncake", "", "calls.gz: the file has no calls"),
        ("azure", AZURE.replace("374", "x"), "calls.gz:2: ContextTokens: expected a positive"),
        ("azure", AZURE.replace(",44", ",4.5"), "calls.gz:2: GeneratedTokens: expected a non-neg"),
        ("azure", AZURE.replace("11-16", "13-16"), "calls.gz:2: TIMESTAMP: expected a time like"),
        ("azure", AZURE.replace(",44", ""), "calls.gz:2: row: expected 3 columns"),
        ("azure", AZURE.replace("ContextTokens", "Context"), "calls.gz:1: header: expected the columns"),
        ("azure", "", "calls.gz:1: header: expected the columns"),
        ("azure", AZURE.partition("\n")[0], "calls.gz: the file has no calls"),
        ("llmservingsim", LLMSERVINGSIM.replace("100", "0"), "input_toks: expected a positive integer"),
        ("llmservingsim", LLMSERVINGSIM.replace("_toks", "_tok"), "missing; did you mean 'input_tok'?"),
        ("llmservingsim", LLMSERVINGSIM.replace("46926808}", "-1}"), "expected a number of ns, at least 0"),
        ("llmservingsim", LLMSERVINGSIM.replace("46926808}", '1, "input_tok_ids": [1]}'), "(100) token ids, found 1"),
        ("llmservingsim", '{"session": 1, "sub_requests": []}', "calls.gz:1: field 'session_id' is missing"),
    ],
)  # fmt: skip
def test_each_mistake_has_its_message(tmp_path: Path, format: str, text: str, message: str) -> None:
    assert message in message_of(tmp_path, text, format)


def test_wrong_requests(tmp_path: Path) -> None:
    path = file_of(tmp_path, MOONCAKE)
    with pytest.raises(TraceError, match="format 'moonkake' is unknown; did you mean 'mooncake'"):
        import_trace(path, "moonkake", MODELS)
    for models in (["a", "a"], [""]):
        with pytest.raises(TraceError, match="expected different model names"):
            import_trace(path, "mooncake", models)
    with pytest.raises(TraceError, match=r"expected a model of yours .* the file names none"):
        import_trace(path, "mooncake")
    for format, unit in (("mooncake", "min"), ("azure", "s")):
        with pytest.raises(TraceError, match="time unit: expected"):
            import_trace(path, format, MODELS, time_unit=unit)
    with pytest.raises(TraceError, match="block tokens: expected a positive integer, found 0"):
        import_trace(path, "mooncake", MODELS, block_tokens=0)
    with pytest.raises(TraceError, match="there is no such file"):
        import_trace(tmp_path / "none", "mooncake", MODELS)


@pytest.mark.parametrize(
    ("format", "name", "calls"),
    [
        ("mooncake", "mooncake/conversation_trace.jsonl.gz", 12_031),
        ("azure", "azure_llm_2023/AzureLLMInferenceTrace_conv.csv", 19_366),
        ("llmservingsim", "llmservingsim/bench/RTX4090/Llama-3.1-8B/vllm/requests.jsonl", 300),
    ],
)
def test_the_real_files(format: str, name: str, calls: int) -> None:
    if not (REAL / name).exists():
        pytest.skip("the public data sets are not at hand")
    trace = import_trace(REAL / name, format, ["Qwen2.5-7B"]).trace
    assert len(trace.workflows) == calls
    assert not any(workflow.meta for workflow in trace.workflows)


@pytest.mark.parametrize(
    ("unit", "gap", "likely"), [("us", "0.000294", "ms"), ("s", "294", "ms"), ("ms", None, None)]
)  # fmt: skip
def test_a_mistaken_unit_is_noticed(tmp_path: Path, unit: str, gap: str | None, likely: str | None) -> None:
    rows = [{"timestamp": 294 * n, "input_length": 5, "output_length": 1} for n in range(20)]
    path = file_of(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    notes = import_trace(path, "mooncake", MODELS, time_unit=unit).notes
    assert notes == (() if gap is None else notes[:1])
    if gap is not None:
        assert f"read as {unit}, which makes workflows arrive {gap} s apart" in notes[0]
        assert notes[0].endswith(f"--time-unit {likely}")


def test_every_reader_is_in_the_table() -> None:
    modules = {path.stem for path in (Path(__file__).parents[2] / "traces" / "readers").glob("*.py")}
    assert set(READERS) == modules - {"__init__", "call", "table"}
    assert json.loads(MOONCAKE.splitlines()[0])["hash_ids"] == [0, 1]
