"""Readers of measured runs: what each format becomes, and one clear message for everything wrong with a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chimsim.errors import ChimsimError
from chimsim.measured import Record, read_records, read_run, record_line, write_records
from tests.chimsim.measured_runs import bench_result, llmservingsim, made_run, own

RECORD = Record("r0", "A", "http://one", 0.5, 100, 10, None, None, 0.75, 2.0)


def line(**change: Any) -> str:
    """A record as a line, with keys changed (or dropped: ``...``)."""
    row = {**json.loads(record_line(RECORD)), **change}
    return json.dumps({key: value for key, value in row.items() if value is not ...}) + "\n"


def refused(path: Path, text: str, format: str | None = None) -> str:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ChimsimError) as caught:
        read_run(path, format)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    records = [
        RECORD,
        replace(RECORD, request_id="r1", workflow_id="w1", stage=2, cached_tokens=32, queued_s=0.1),
        replace(RECORD, request_id="r2", status="failed", output_tokens=0, first_token_at=None, last_token_at=None),
    ]
    path = tmp_path / "run.jsonl"
    write_records(path, records)
    assert read_records(path) == records
    first = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    assert first == {key: value for key, value in asdict(RECORD).items() if key not in ("workflow_id", "stage")}
    path.write_text("".join(record_line(record) + "\n" for record in records), encoding="utf-8")
    assert read_records(path) == records


def test_a_record_that_is_none_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with pytest.raises(ChimsimError, match=r"record 'r0': last_token_at .*is before first_token_at"):
        write_records(path, [replace(RECORD, last_token_at=0.6)])
    assert not path.exists()


def test_own_records_become_a_table_that_begins_with_the_first_request(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    late = replace(RECORD, request_id="late", submitted_at=1.5, queued_s=0.25, first_token_at=2.0, last_token_at=3.0)
    failed = replace(RECORD, request_id="gone", status="failed", last_token_at=None)
    write_records(path, [late, RECORD, failed])
    run = read_run(path)
    assert (run.format, run.model, run.started_at, run.left_out) == ("chimsim", "A", 0.5, {"failed": 1})
    assert run.requests["request_id"].tolist() == ["r0", "late"]
    assert run.requests["ready_at"].tolist() == [0.0, 1.0]
    assert run.requests["finished_at"].tolist() == [1.5, 2.5]
    np.testing.assert_array_equal(run.requests["admitted_at"], [np.nan, 1.25])
    assert run.requests["cached_tokens"].isna().all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("{bad\n", ":1: not valid JSON"),
        ("[1]\n", ":1: expected an object, found [1]"),
        ('{"time": 1, "tokens": 2}\n', "no format known has lines of time, tokens"),
        ('{"time": 1,\n "tokens": 2}\n', "no format known has lines of time, tokens"),
        ('{"request_throughput": 1, "a": 2}\n' * 2, "several results of vllm bench serve in one file"),
        (line() + line(request_id="r0"), ":2: request_id 'r0' is also at"),
        (line(prompt_tokens=0), ":1: prompt_tokens is 0; expected a whole number of at least 1"),
        (line(output_tokens="9"), ":1: output_tokens is '9'; expected a whole number"),
        (line(output_tokens=True), ":1: output_tokens is True"),
        (line(cached_tokens=101), ":1: cached_tokens is 101; expected a whole number from 0 to 100"),
        (line(submitted_at=None), ":1: submitted_at is None; expected a finite number of seconds"),
        (line(queued_s=0.5), ":1: first_token_at (0.75) is before submitted_at + queued_s (1)"),
        (line(queued_s=...), ":1: queued_s is missing"),
        (line(last_token_at=None), ":1: last_token_at is null"),
        (line(status="done"), ":1: status is 'done'; expected completed, failed, aborted"),
        (line(tokens=3), ":1: unknown key 'tokens'"),
        (line(stages=3), ":1: unknown key 'stages'; did you mean 'stage'?"),
        (line(status="aborted"), "no completed request to compare with (1 aborted)"),
        (line() + line(request_id="r1", engine="http://two"), "requests to 2 engines (http://one, http://two)"),
    ],
)
def test_what_is_wrong_with_records_is_said(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path / "run.jsonl", text)


def test_missing_files_and_formats_are_said(tmp_path: Path) -> None:
    with pytest.raises(ChimsimError, match=r"gone\.jsonl: no such file of a measured run"):
        read_run(tmp_path / "gone.jsonl")
    (tmp_path / "run.jsonl").write_text(line(), encoding="utf-8")
    with pytest.raises(ChimsimError, match="did you mean 'vllm-bench'"):
        read_run(tmp_path / "run.jsonl", "vllmbench")
    with pytest.raises(ChimsimError, match="input_toks is missing; expected a line of LLMServingSim's bench"):
        read_run(tmp_path / "run.jsonl", "llmservingsim")


def test_llmservingsims_arrivals_are_the_clients_on_the_engines_clock(tmp_path: Path) -> None:
    """A request that came in mid-step is queued at its end; the wait until then belongs to its queue time."""
    requests = made_run(count=30)
    path = tmp_path / "requests.jsonl"
    llmservingsim(requests, path)
    run = read_run(path)
    assert run.format == "llmservingsim"
    assert run.started_at == 2.0**20
    np.testing.assert_allclose(run.requests["ready_at"], requests["ready_at"], atol=1e-9)
    np.testing.assert_allclose(run.requests["admitted_at"], requests["admitted_at"], atol=1e-9)
    rows = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        del row["arrival_time"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    without = read_run(path)
    assert without.ready_from == "queued_ts"
    queued = [row["queued_ts"] - 100.0 for row in rows]
    np.testing.assert_allclose(without.requests["ready_at"], sorted(queued), atol=1e-9)


def test_an_llmservingsim_request_without_an_end_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    llmservingsim(made_run(count=5), path)
    rows = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    rows[2]["last_token_ts"] = None
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run = read_run(path)
    assert run.left_out == {"failed": 1}
    assert "bench-2" not in run.requests["request_id"].tolist()
    rows[3]["scheduled_ts"] = rows[3]["queued_ts"] - 1
    assert ":4: scheduled_ts" in refused(path, "".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("latencies", [False, True])
def test_both_generations_of_bench_results_are_read(tmp_path: Path, latencies: bool) -> None:
    requests = made_run(count=20)
    path = tmp_path / "bench.json"
    result = bench_result(requests, latencies=latencies)
    result["errors"][4] = "Traceback: timeout"
    result["output_lens"][7] = 0
    path.write_text(json.dumps(result, indent=1), encoding="utf-8")
    run = read_run(path)
    assert (run.format, run.model, run.left_out) == ("vllm-bench", "org/A-Instruct", {"failed": 2})
    kept = requests.drop([4, 7])
    assert run.requests["request_id"].tolist() == [str(i) for i in range(20) if i not in (4, 7)]
    np.testing.assert_allclose(run.requests["finished_at"], kept["finished_at"], atol=1e-9)
    np.testing.assert_allclose(run.requests["first_token_at"], kept["first_token_at"], atol=1e-9)
    assert run.requests["admitted_at"].isna().all()


def without(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda result: result.pop(key)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("start_times"), "did not save when requests were sent, so the run cannot be replayed"),
        (without("itls"), "itls is missing; expected a result of vllm bench serve saved with --save-result"),
        (lambda r: r["ttfts"].pop(), "ttfts is [0."),
        (lambda r: r.update(itls=[0.1] * 5), "request 0: itls is 0.1; expected a list of seconds"),
        (lambda r: r["ttfts"].__setitem__(1, -1.0), "request 1: ttfts is -1.0; expected a finite number"),
        (lambda r: r.update(errors=["no"] * 5), "no completed request to compare with (5 failed)"),
    ],
)
def test_what_is_wrong_with_a_bench_result_is_said(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    result = bench_result(made_run(count=5))
    change(result)
    assert message in refused(tmp_path / "bench.json", json.dumps(result))


def test_a_result_without_details_is_told_from_other_json(tmp_path: Path) -> None:
    message = refused(tmp_path / "bench.json", json.dumps({"request_throughput": 2.0, "completed": 5}))
    assert "--save-detailed" in message
    own(made_run(count=3), tmp_path / "run.jsonl")
    text = (tmp_path / "run.jsonl").read_text(encoding="utf-8")
    assert "expected one JSON object of vllm bench serve" in refused(tmp_path / "run.jsonl", text, "vllm-bench")


def test_a_request_that_stands_there_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    llmservingsim(made_run(count=5), path)
    text = path.read_text(encoding="utf-8")
    assert "request_id 'bench-0' stands there twice" in refused(path, text + text.splitlines()[0] + "\n")
