"""`chimsim live` against fake engines in this process, and `chimsim validate --live` after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chimsim.errors import ChimsimError
from chimsim.grid import plan
from chimsim.live.experiment import live_cells, run_live
from chimsim.live_validation import Limits, to_dict, validate_live, verdict
from chimsim.served import as_served
from chimsim.spec import spec_from
from tests.chimsim.live.served import engines_served
from traces import load_trace, write_trace
from traces.scale import scaled


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "short.jsonl"
    whole = load_trace("apps")
    write_trace(scaled(type(whole)("short", whole.workflows[:12]), 0.05, 24), path)
    return str(path)


def test_a_live_run_is_a_results_folder_that_can_be_validated(tmp_path: Path, trace: str) -> None:
    out = tmp_path / "live"
    with engines_served(tmp_path, ["qwen1.5b", "qwen7b"]) as cluster:
        spec = spec_from({"trace": trace, "cluster": str(cluster), "policy": "fcfs,mlfq,chimera", "rps": "20"})
        cells, manifest = plan(spec)
        said: list[str] = []
        results = run_live(live_cells(cells, 2, "lengths", None), manifest, out, say=said.append)
        assert results.complete
        assert said == []
        again = run_live(live_cells(cells, 2, "lengths", None), manifest, out)
    summary = again.summary
    assert summary["policy"].tolist() == ["fcfs", "mlfq", "chimera"] * 2
    assert summary["repeat"].tolist() == [0, 0, 0, 1, 1, 1]
    assert summary["completed_workflows"].tolist() == [12] * 6
    by_id = {workflow.workflow_id: workflow for workflow in load_trace(trace).workflows}
    for name in again.cells:
        requests = again.table(name, "requests")
        columns = ("workflow_id", "model", "stage", "prompt_tokens", "output_tokens")
        for workflow, model, index, prompt, output in zip(*(requests[c].tolist() for c in columns), strict=True):
            stage = by_id[workflow].runs[model].stages[index]
            assert (prompt, output) == (stage.prompt_tokens, stage.output_tokens)
        assert (requests["ready_at"] <= requests["admitted_at"]).all()
        assert (requests["admitted_at"] < requests["first_token_at"]).all()
        assert (requests["first_token_at"] <= requests["finished_at"]).all()
    notes = json.loads((out / "live.json").read_text())
    assert set(notes) == {"command", "started_at", "wall_s", "cells"}
    blocks = validate_live(out)
    assert [len(block.entries) for block in blocks] == [3]
    assert blocks[0].pairs == 3
    found = to_dict(blocks, verdict(blocks, Limits()), Limits())
    policies = found["blocks"][0]["policies"]
    assert [entry["repeats"] for entry in policies] == [2, 2, 2]
    assert all(entry["metrics"]["mean_workflow_latency_s"]["simulated"] > 0 for entry in policies)


def test_an_engine_without_address_and_a_wrong_folder_are_refused(tmp_path: Path, trace: str) -> None:
    bare = tmp_path / "bare.toml"
    bare.write_text('[[engine]]\nmodel = "qwen7b"\n')
    cells, manifest = plan(spec_from({"trace": trace, "cluster": str(bare), "policy": "fcfs", "rps": "2"}))
    with pytest.raises(ChimsimError, match=r"engine Qwen2\.5-7B has no url"):
        run_live(live_cells(cells, 1, "lengths", None), manifest, tmp_path / "out")
    with pytest.raises(ChimsimError, match="is not a results folder"):
        validate_live(tmp_path / "nothing")


def test_nobody_listening_is_one_clear_error(tmp_path: Path, trace: str) -> None:
    lonely = tmp_path / "lonely.toml"
    lonely.write_text('[[engine]]\nmodel = "qwen7b"\nurl = "http://127.0.0.1:9"\n')
    cells, manifest = plan(spec_from({"trace": trace, "cluster": str(lonely), "policy": "fcfs", "rps": "2"}))
    with pytest.raises(ChimsimError, match=r"http://127.0.0.1:9/v1/models: no connection"):
        run_live(live_cells(cells, 1, "lengths", None), manifest, tmp_path / "out")


def test_texts_are_validated_with_the_lengths_that_were_served(tmp_path: Path, trace: str) -> None:
    out = tmp_path / "live"
    with engines_served(tmp_path, ["qwen1.5b", "qwen7b"]) as cluster:
        spec = spec_from({"trace": trace, "cluster": str(cluster), "policy": "fcfs,stjf", "rps": "20"})
        cells, manifest = plan(spec)
        results = run_live(live_cells(cells, 1, "text", 16), manifest, out)
    (block,) = validate_live(out)
    by_id = {workflow.workflow_id: workflow for workflow in load_trace(trace).workflows}
    told = False
    for name, entry in zip(results.cells, block.entries, strict=True):
        requests, workflows = results.table(name, "requests"), results.table(name, "workflows")
        assert requests["output_tokens"].max() <= 16
        served = as_served(load_trace(trace), requests, workflows)
        lengths = {
            (int(row), int(stage)): (int(prompt), int(output))
            for row, stage, prompt, output in zip(
                *(requests[c] for c in ("workflow", "stage", "prompt_tokens", "output_tokens")), strict=True
            )
        }
        for row, (workflow, model) in enumerate(zip(served.workflows, workflows["model"].astype(str), strict=True)):
            original = by_id[workflow.workflow_id].runs[model].stages
            for index, stage in enumerate(workflow.runs[model].stages):
                assert (stage.prompt_tokens, stage.output_tokens) == lengths[row, index]
                told = told or stage.output_tokens != original[index].output_tokens
            others = [other for other in workflow.runs if other != model]
            assert all(workflow.runs[other] == by_id[workflow.workflow_id].runs[other] for other in others)
        # fcfs and stjf place by turns, live and simulated alike: the very same lengths were simulated.
        simulated = entry.workflows[1]
        assert simulated["output_tokens"].sum() == requests["output_tokens"].sum()
    assert told, "the answers had lengths of their own"


def test_an_address_that_answers_already_is_not_launched_upon(tmp_path: Path, trace: str) -> None:
    with engines_served(tmp_path, ["qwen7b"]) as cluster:
        cluster.write_text(cluster.read_text() + 'launch = "chimsim mock-engine --profile qwen7b --port {port}"\n')
        cells, manifest = plan(spec_from({"trace": trace, "cluster": str(cluster), "policy": "fcfs", "rps": "2"}))
        with pytest.raises(ChimsimError, match=r"something answers at http://127.0.0.1:\d+ already"):
            run_live(live_cells(cells, 1, "lengths", None), manifest, tmp_path / "out", launch=True)
