"""Sealed Parquet files: columns that are what the tuple of workflows would be, and seals that do not fit."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings

from tests.traces.builders import MODELS, row, stage, trace_rows, write_lines
from traces import Trace, TraceError, Workflow, parquet, read_trace, to_dict, workflow_from_dict, write_trace
from traces.arrivals import arrival_order
from traces.columns import RunColumns, columns_of
from traces.files import digest_of
from traces.sealed import SealedColumns, SealedWorkflows


def plain(rows: list[dict[str, Any]]) -> Trace:
    return Trace("t", tuple(workflow_from_dict(line, "x") for line in rows))


def sealed(trace: Trace, path: Path) -> Trace:
    write_trace(trace, path)
    read = read_trace(path)
    assert isinstance(read.workflows, SealedWorkflows)
    return read


def is_sealed(path: Path) -> bool:
    return isinstance(read_trace(path).workflows, SealedWorkflows)


def edited(path: Path, out: Path, change: Any = lambda rows: rows) -> None:
    """The file as another tool writes it, with its rows changed."""
    table = pq.read_table(path)
    pq.write_table(pa.Table.from_pylist(change(table.to_pylist()), schema=table.schema), out)


@given(trace_rows())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_columns_are_what_the_workflows_are(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    trace = plain(rows)
    read = sealed(trace, tmp_path / "t.parquet")
    assert read.workflows == trace.workflows
    assert trace.workflows == read.workflows
    assert read.digest == digest_of(trace.workflows) == digest_of(read.workflows)
    assert [to_dict(workflow) for workflow in read.workflows] == [to_dict(workflow) for workflow in trace.workflows]
    assert read.models == trace.models
    copy = pickle.loads(pickle.dumps(read))
    assert (copy, copy.models) == (trace.__class__("t", trace.workflows, read.digest), trace.models)
    assert pickle.loads(pickle.dumps(read.workflows[0])) == trace.workflows[0]
    theirs, ours = columns_of(trace), columns_of(read)
    assert (ours.ids, ours.workloads, ours.rows, ours.models) == (
        theirs.ids,
        theirs.workloads,
        theirs.rows,
        theirs.models,
    )
    np.testing.assert_array_equal(ours.arrivals_s, theirs.arrivals_s)
    for model in {model for workflow in trace.workflows for model in workflow.runs} | {"unheard of"}:
        for field in fields(RunColumns):
            mine, its = (getattr(columns.runs(model), field.name) for columns in (ours, theirs))
            if field.name == "afters":
                assert mine == its
            else:
                np.testing.assert_array_equal(mine, its, field.name)


def test_they_are_used_like_a_tuple(tmp_path: Path) -> None:
    trace = plain([row(f"w-{i}", arrival_s=float(9 - i)) for i in range(5)])
    read = sealed(trace, tmp_path / "t.parquet")
    assert read.workflows[-1] == trace.workflows[-1]
    assert read.workflows[1:4:2] == trace.workflows[1:4:2]
    assert trace.workflows[3] in read.workflows
    assert replace(trace.workflows[3], workload="x") not in read.workflows
    assert (*read.workflows,) == trace.workflows
    assert read.workflows != trace.workflows[:4]
    with pytest.raises(IndexError):
        read.workflows[5]
    assert arrival_order(read) == arrival_order(trace) == [4, 3, 2, 1, 0]
    front = read_trace(tmp_path / "t.parquet", limit=2)
    assert (front.workflows, front.digest) == (trace.workflows[:2], digest_of(trace.workflows[:2]))


def test_a_workflow_makes_each_run_once_and_copies_are_plain(tmp_path: Path) -> None:
    (workflow,) = sealed(plain([row()]), tmp_path / "t.parquet").workflows
    assert workflow.runs[MODELS[0]] is workflow.runs[MODELS[0]]
    assert "gpt" not in workflow.runs
    assert workflow.runs.get("gpt") is None
    other = replace(workflow, workload="other")
    assert type(other) is Workflow
    assert replace(other, workload=workflow.workload) == workflow


def test_models_that_nobody_asks_for_are_left_alone(tmp_path: Path) -> None:
    sealed(plain([row(f"w-{i}", prompt="?") for i in range(3)]), tmp_path / "t.parquet")
    table = pq.read_table(tmp_path / "t.parquet")
    asked: list[str] = []

    class Source:
        schema = table.schema

        def read(self, *paths: str) -> pa.Table:
            asked.extend(paths)
            return table

    first = SealedWorkflows(SealedColumns(Source()))[1]
    assert first.runs[MODELS[0]].stages[0].prompt_tokens == 100
    assert not [path for path in asked if MODELS[1] in path or path == "prompt"]
    assert first.prompt == "?"
    assert asked[-1] == "prompt"


def test_what_other_tools_write_is_checked_row_by_row(tmp_path: Path) -> None:
    path, out = tmp_path / "t.parquet", tmp_path / "o.parquet"
    stages = [stage(shared_prefix={"id": "p", "tokens": 7}), stage(after=[], hash_ids=[1], delay_s=0.5)]
    trace = sealed(
        plain([row("w-0", stages, prompt="", meta={"a": [1]}), row("w-1", confidence={MODELS[0]: 0.5})]), path
    )
    edited(path, out)
    assert not is_sealed(out)
    assert read_trace(out) == replace(trace, name="o")

    def wrong(rows: list[Any]) -> list[Any]:
        rows[1]["runs"][MODELS[1]]["stages"][0]["output_tokens"] = 0
        return rows

    edited(path, out, wrong)
    expected = rf"o\.parquet:2: runs.{MODELS[1]}.stages\[0\].output_tokens: expected a positive integer, found 0"
    with pytest.raises(TraceError, match=expected):
        read_trace(out)
    # The seal of the file that it was is no good.
    data, seal = out.read_bytes(), parquet._SEAL.search(path.read_bytes())
    assert seal is not None
    footer = 8 + int.from_bytes(data[-8:-4], "little")
    out.write_bytes(data[:-footer] + seal[0] + data[-footer:])
    with pytest.raises(TraceError, match=expected):
        read_trace(out)


def test_every_byte_is_sealed(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    sealed(plain([row(f"w-{i}") for i in range(3)]), path)
    data = path.read_bytes()
    for at in [*Random(0).sample(range(len(data)), 300), *range(len(data) - 12, len(data))]:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert parquet.sealed_columns(path) is None, at
    path.write_bytes(data)
    assert is_sealed(path)


def test_a_byte_that_changes_in_a_page_is_noticed_behind_a_broken_seal(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_trace(plain([row(f"w{number}") for number in range(300)]), path)
    whole = path.read_bytes()
    group = pq.ParquetFile(path).metadata.row_group(0)
    for column in range(group.num_columns):
        chunk = group.column(column)
        data = bytearray(whole)
        first = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
        data[first + chunk.total_compressed_size - 1] ^= 4
        path.write_bytes(data)
        with pytest.raises(TraceError, match="not a readable Parquet file"):
            read_trace(path)


def test_the_index_that_pandas_leaves_says_nothing_of_workflows(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_trace(plain([row(f"w{number}") for number in range(4)]), path)
    table = pq.read_table(path)
    pq.write_table(table.append_column("__index_level_0__", pa.array([3, 1, 2, 0])), path)
    assert [workflow.workflow_id for workflow in read_trace(path).workflows] == ["w0", "w1", "w2", "w3"]


def test_seals_of_other_rules_are_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.parquet"
    trace = sealed(plain([row()]), path)
    monkeypatch.setattr(parquet, "SEAL_VERSION", parquet.SEAL_VERSION + 1)
    assert not is_sealed(path)
    assert read_trace(path) == trace


def test_columns_of_json_text_are_read(tmp_path: Path) -> None:
    rows = [row("w-0", meta={"a": 1}), row("w-1", confidence={MODELS[0]: 1})]
    texts = {
        name: [json.dumps(r[name]) if name in r else None for r in rows] for name in ("runs", "confidence", "meta")
    }
    same = {name: [r[name] for r in rows] for name in ("workflow_id", "workload")}
    pq.write_table(pa.table(same | texts), tmp_path / "t.parquet")
    assert read_trace(tmp_path / "t.parquet").workflows == plain(rows).workflows


def test_a_file_that_is_written_to_while_it_is_in_use(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    trace = plain([row()])
    read = sealed(trace, path)
    write_trace(plain([row("other")]), path)  # in its place: whoever has the old one keeps it
    assert read.workflows == trace.workflows
    read = read_trace(path)
    path.write_bytes(path.read_bytes()[:-20])
    os.utime(path, (0, 0))
    with pytest.raises(TraceError, match=r"t\.parquet: the file was changed while it was in use"):
        read.workflows[0].runs[MODELS[0]]


def test_a_trace_that_would_not_read_back_leaves_nothing_behind(tmp_path: Path) -> None:
    trace = read_trace(write_lines(tmp_path / "a.jsonl", [row()]))
    with pytest.raises(TraceError, match="expected an id of its own"):
        write_trace(Trace("t", (*trace.workflows, *trace.workflows)), tmp_path / "b.parquet")
    wrong = replace(trace.workflows[0], runs={"m": replace(trace.workflows[0].runs[MODELS[0]], stages=())})
    with pytest.raises(TraceError, match=r"workflow 2 of trace 't': runs\.m\.stages: expected a list"):
        write_trace(Trace("t", (*trace.workflows, replace(wrong, workflow_id="b"))), tmp_path / "b.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
