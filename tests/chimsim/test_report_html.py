"""The report's file: what it says, what it leaves out, the same bytes again, and that names stay text."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from chimsim import report_html, sweep
from chimsim.errors import ChimsimError
from chimsim.metrics import mean_and_interval
from chimsim.report_cli import report_command
from chimsim.report_html import MAX_BYTES, gather, page_bytes, write_report
from chimsim.report_html.details import QUANTILES, _binned, coarser
from chimsim.report_html.page import script_json
from chimsim.results import Results
from tests.chimsim.small import small_keys, write_small

HOSTILE = "</script><script>alert(1)</script><b>bold</b>"
EXPERIMENT = {
    "name": "x",
    "title": HOSTILE,
    "question": "Who wins?",
    "command": "chimsim reproduce x",
    "relations": [
        {
            "claim": "chimera dominates fcfs", "says": "Chimera is better", "paper": "3.4x", "ours": 0.5,
            "verdict": "fails", "holds": 1, "fails": 1, "undecided": 0,
            "blocks": [
                {"block": HOSTILE, "measure": "ratio", "value": 0.78, "low": 0.7, "high": 0.86, "verdict": "holds"},
                {"block": "b", "measure": "ratio", "value": None, "low": None, "high": None, "verdict": "fails"},
            ],
        }
    ],
    "numbers": [{"what": "speedup", "paper": "3.4", "ours": 1.23456}],
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("report")
    return sweep(**small_keys(write_small(folder)), out=folder / "out")


@pytest.fixture
def copy(results: Results, tmp_path: Path) -> Path:
    return Path(shutil.copytree(results.path, tmp_path / "copy"))


def gathered(results: Results, room: int = 1_000_000) -> dict[str, Any]:
    return gather(results, lambda rest: room)


def own_part(page: bytes) -> str:
    """The page without Plotly's script and the data."""
    text = page.decode()
    parts = re.split(r"<script[^>]*>.*?</script>", text, flags=re.DOTALL)
    return "".join(parts)


def test_the_same_folder_gives_the_same_bytes_and_no_request(results: Results, tmp_path: Path) -> None:
    sizes = [write_report(results, tmp_path / name)[0] for name in ("a.html", "b.html")]
    first, second = ((tmp_path / name).read_bytes() for name in ("a.html", "b.html"))
    assert first == second
    assert len(first) == sizes[0] < MAX_BYTES
    assert not re.search(r"(src|href)=\"(?!data:|#)", own_part(first))
    assert "http" not in own_part(first).replace("http-equiv", "")
    assert first.startswith(b'<!DOCTYPE html>\n<html lang="en">')
    assert b"default-src 'none'" in first


def test_points_are_those_of_the_summary(results: Results) -> None:
    data = gathered(results)
    (group,) = data["groups"]
    names = [line["name"] for line in data["series"]]
    found = {(names[p["series"]], p["tau"]): p for p in group["points"]}
    assert list(found) == [("fcfs", None), ("chimera", "0"), ("chimera", "1"), ("chimera", "inf")]
    summary = results.summary
    mine = summary[summary["tau"] == 1]
    point = found["chimera", "1"]
    for metric, (mean, half) in zip(data["metrics"], point["stats"], strict=True):
        assert (mean, half) == pytest.approx(mean_and_interval(mine[metric]), rel=1e-4)
    assert point["seeds"] == [0, 1]
    assert point["config"]["rps"] == "20"
    assert point["policy"].startswith("Chimera(tau=1.0,")
    assert [p["middle"] for p in group["points"]] == [True, False, True, False]
    assert data["left_out"] == [
        "Queue times, distributions, load and slow workflows are only of the middle tau of chimera."
    ]


def test_details_are_those_of_the_tables(results: Results) -> None:
    data = gathered(results)
    detail = data["groups"][0]["details"][0]
    cells = results.summary[results.summary["policy"] == "fcfs"]["cell"]
    tables = [results.table(str(cell), "workflows") for cell in cells]
    latency = pd.concat(tables)["latency_s"].to_numpy()
    assert len(detail["quantiles"]) == QUANTILES
    assert detail["quantiles"][0] == pytest.approx(latency.min(), rel=1e-3)
    assert detail["quantiles"][-1] == pytest.approx(latency.max(), rel=1e-3)
    slowest = [row["latency_s"] for row in detail["slowest"]]
    assert slowest == pytest.approx(sorted(tables[0]["latency_s"], reverse=True)[: len(slowest)], abs=1e-3)
    for workflow in detail["slowest"]:
        for _, _, _, *instants in workflow["calls"]:
            assert instants == sorted(instants)
        assert workflow["calls"][-1][-1] == pytest.approx(workflow["latency_s"], abs=2e-3)


@given(st.lists(st.tuples(st.floats(0.01, 5), st.integers(0, 50)), min_size=1, max_size=30), st.integers(1, 20))
def test_load_in_intervals_has_the_area_of_the_steps(steps: list[tuple[float, int]], bins: int) -> None:
    times = np.cumsum([gap for gap, _ in steps])
    values = np.array([float(value) for _, value in steps])
    edges = np.linspace(0.0, float(times[-1]), bins + 1)
    area = float((values[:-1] * np.diff(times)).sum())
    width = float(times[-1]) / bins
    assert width * sum(_binned(times, values, edges)) == pytest.approx(area, abs=0.051 * bins * width)


def test_what_does_not_fit_is_left_out_and_said(results: Results) -> None:
    whole = gathered(results)
    points = size_of([{**whole["groups"][0], "details": []}])
    size = size_of(whole["groups"])
    assert gathered(results, size + 50) == whole
    half = gathered(results, points + int(0.7 * (size - points)))
    line, fewer = whole["groups"][0]["details"][0], half["groups"][0]["details"][0]
    assert fewer["quantiles"] == line["quantiles"][::2]
    assert any("half of their samples" in text for text in half["left_out"])
    none = gathered(results, points + 500)
    assert none["groups"][0]["details"] == []
    assert len(none["groups"][0]["points"]) == 4
    assert any("Only the first 0 of 1 workloads" in text for text in none["left_out"])
    with pytest.raises(ChimsimError, match="has room for"):
        gathered(results, points // 2)


def size_of(value: Any) -> int:
    return len(json.dumps(value, separators=(",", ":")))


def test_many_cells_stay_within_the_limit(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    many: list[dict[str, Any]] = []
    for rate in range(20):
        for entry in manifest["cells"]:
            name = f"{len(many):032x}"
            (copy / "cells" / name).symlink_to(copy / "cells" / entry["hash"])
            many.append({"axes": entry["axes"] | {"rps": 1.0 + rate}, "hash": name})
    (copy / "manifest.json").write_text(json.dumps(manifest | {"cells": many}))
    few = len(page_bytes(gather(Results(copy), lambda rest: 3_000)))
    limit = few + 80_000
    monkeypatch.setattr(report_html, "MAX_BYTES", limit)
    size, left_out = write_report(Results(copy), copy / "report.html")
    assert size == (copy / "report.html").stat().st_size
    assert limit - 10_000 < size <= limit
    assert any("an eighth of their samples" in line for line in left_out)
    assert any(re.match(r"Only the first \d+ of 20 workloads", line) for line in left_out)


def test_coarser_keeps_the_ends() -> None:
    engine = {"engine": "e", "model": "m", "slots": 4, "running": [1, 2, 3], "waiting": [0, 0, 4]}
    detail = {
        "quantiles": list(range(9)),
        "slowest": [{}] * 6,
        "load": {"step_s": 1.0, "engines": [engine]},
    }
    half = coarser(detail)
    assert half["quantiles"] == [0, 2, 4, 6, 8]
    assert half["load"]["engines"][0]["running"] == [1.5, 3]
    assert half["load"]["step_s"] == 2.0
    assert len(half["slowest"]) == 3


@given(st.text())
def test_no_text_ends_the_script_element(text: str) -> None:
    found = script_json({"text": text})
    assert "<" not in found
    assert json.loads(found) == {"text": text}


def test_verdicts_stand_beside_the_paper_and_names_stay_text(copy: Path) -> None:
    (copy / "experiment.json").write_text(json.dumps(EXPERIMENT))
    page = page_bytes(gathered(Results(copy)))
    text = own_part(page)
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in text
    assert b"<script>alert" not in page
    assert b"<b>bold" not in page
    assert '<span class="verdict fails">fails</span>' in text
    assert "2 blocks: 1 holds, 1 fails, 0 undecided" in text
    for number in ("3.4x", "0.78", "0.70 to 0.86", "1.23"):
        assert number in text
    assert "chimsim reproduce x" in text


def test_a_plain_sweep_asks_and_is_named_by_its_spec(results: Results) -> None:
    data = gathered(results)
    assert data["title"].startswith("fcfs and chimera on ")
    assert "qwen1.5b+7b at 20 workflows a second?" in data["question"]
    assert next(iter(data["provenance"]["traces"].values()))["sha256"]
    assert "What should hold" not in own_part(page_bytes(data))


def test_a_trace_without_labels_has_a_report(tmp_path: Path) -> None:
    keys = small_keys(write_small(tmp_path, labels=False)) | {"policy": ["fcfs"]}
    del keys["tau"]
    data = gathered(sweep(**keys, out=tmp_path / "out"))
    assert data["groups"][0]["points"][0]["stats"][3] == [None, 0.0]
    assert data["groups"][0]["details"][0]["slowest"][0]["solved"] is None


def report(*arguments: object) -> Any:
    app = typer.Typer()
    app.command()(report_command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_writes_the_page_and_says_what_is_missing(copy: Path, tmp_path: Path) -> None:
    done = report(copy)
    assert done.exit_code == 0
    assert re.fullmatch(rf"{re.escape(str(copy))}/report\.html  \d\.\d MB\n", done.stdout)
    shutil.rmtree(copy / "cells" / Results(copy).cells[0])
    again = report(copy, "--out", tmp_path / "other.html")
    assert "is not complete: 7 of 8 cells are finished" in again.stderr
    assert "7 of 8 runs are finished" in own_part((tmp_path / "other.html").read_bytes())


def test_wrong_input_is_one_clear_error(copy: Path, tmp_path: Path) -> None:
    (copy / "experiment.json").write_text("[1")
    shutil.copytree(copy, tmp_path / "empty")
    shutil.rmtree(tmp_path / "empty" / "cells")
    for arguments, words in (
        ([copy], "experiment.json: not valid JSON"),
        ([tmp_path / "empty"], "no finished cell to report"),
        ([tmp_path], "is not a results folder"),
        ([copy, "--out", tmp_path / "no" / "x.html"], "there is no folder"),
    ):
        done = report(*arguments)
        assert isinstance(done.exception, ChimsimError)
        assert words in str(done.exception)
