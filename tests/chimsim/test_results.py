"""The results folder: whole files or none, equal bytes, damage found, other sweeps and writers refused."""

from __future__ import annotations

import errno
import json
from math import inf, nan
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from chimsim.errors import ChimsimError
from chimsim.results import (
    Results,
    canonical,
    cell_is_whole,
    check_file,
    folder_lock,
    json_bytes,
    parquet_bytes,
    summary_frame,
    write_file,
)
from chimsim.spec import spec_from
from chimsim.sweeps import run_sweep
from tests.chimsim.small import small_keys, tree_bytes, write_small


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished sweep; tests that change it copy it first."""
    folder = tmp_path_factory.mktemp("results")
    out = folder / "out"
    run_sweep(spec_from(small_keys(write_small(folder))), out)
    return out


def test_json_is_sorted_and_has_no_nan() -> None:
    assert json_bytes({"b": nan, "a": (1, inf)}, indent=None) == b'{"a":[1,"inf"],"b":null}\n'
    assert canonical({1: {"y", "x"}}) == {"1": ["x", "y"]}


def test_parquet_has_no_library_notes(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(parquet_bytes(pd.DataFrame({"a": [1.5, 2.0], "b": ["x", None]})))
    assert b"pandas" not in (pq.read_schema(path).metadata or {})
    assert pd.read_parquet(path)["a"].tolist() == [1.5, 2.0]


def test_columns_of_the_summary_have_one_type_each() -> None:
    frame = summary_frame([{"tau": None, "n": 1, "k": "x"}, {"tau": "inf", "n": 2, "k": 3, "late": 1.5}])
    assert [str(dtype) for dtype in frame.dtypes] == ["float64", "int64", "str", "float64"]
    assert frame["tau"].tolist()[1] == inf


def test_a_finished_folder_explains_itself(done: Path) -> None:
    results = Results(done)
    assert results.complete
    assert results.planned == 8
    manifest = results.manifest
    assert manifest["seeds"] == [0, 1]
    assert all(len(entry["sha256"]) == 64 for entry in manifest["traces"].values())
    summary = pd.read_parquet(done / "summary.parquet")
    pd.testing.assert_frame_equal(summary, results.summary)
    assert len(pd.read_csv(done / "summary.csv")) == 8
    for name in results.cells:
        assert cell_is_whole(done, name)
        assert len(results.table(name, "workflows")) == 40
        assert results.config(name)["seed"] in (0, 1)
    assert json.loads((done / "run.json").read_text())["runs"][0]["cells_run"] == 8


@pytest.mark.parametrize("damage", ["truncated", "missing", "other bytes"])
def test_a_damaged_cell_is_run_again(done: Path, tmp_path: Path, damage: str) -> None:
    trace = write_small(tmp_path)
    out = tmp_path / "out"
    spec = spec_from(small_keys(trace))
    run_sweep(spec, out)
    whole = tree_bytes(out)
    name = Results(out).cells[3]
    victim = out / "cells" / name / "requests.parquet"
    if damage == "truncated":
        victim.write_bytes(victim.read_bytes()[:100])
    elif damage == "missing":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[::-1])
    assert not cell_is_whole(out, name)
    run_sweep(spec, out)
    assert tree_bytes(out) == whole
    assert json.loads((out / "run.json").read_text())["runs"][1]["cells_run"] == 1


def test_another_sweep_in_the_folder_is_refused_by_what_differs(done: Path) -> None:
    before = tree_bytes(done)
    keys = small_keys(str(done.parent / "small.jsonl")) | {"rps": [20, 30]}
    with pytest.raises(ChimsimError, match=r"holds another sweep \(rps: \[20.0\] there, \[20.0, 30.0\] here\)"):
        run_sweep(spec_from(keys), done)
    assert tree_bytes(done) == before


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter1.tex").write_text("words")
    with pytest.raises(ChimsimError, match=r"is not empty and holds no sweep \(found chapter1.tex\)"):
        run_sweep(spec_from(small_keys(write_small(tmp_path))), out)
    assert [path.name for path in out.iterdir()] == ["chapter1.tex"]


def test_a_second_sweep_into_the_folder_waits_for_nobody(done: Path) -> None:
    with (
        folder_lock(done),
        pytest.raises(ChimsimError, match="another chimsim is writing"),
        folder_lock(done),
    ):
        pass
    # a lock file that a dead process left holds nobody up
    (done / ".lock").write_text("999999\n")
    with folder_lock(done):
        pass


def test_a_full_disk_is_one_message_and_finished_cells_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import chimsim.results as results

    spec = spec_from(small_keys(write_small(tmp_path)))
    run_sweep(spec, tmp_path / "whole")
    real = results._write_bytes
    budget = [40]

    def limited(path: Path, data: bytes) -> None:
        budget[0] -= 1
        if budget[0] < 0:
            path.write_bytes(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, data)

    out = tmp_path / "out"
    monkeypatch.setattr(results, "_write_bytes", limited)
    with pytest.raises(ChimsimError, match=r"no space left .*; 4 of 8 cells are finished and kept"):
        run_sweep(spec, out)
    assert not list(out.rglob("*.tmp"))
    assert len(Results(out).cells) == 4
    monkeypatch.setattr(results, "_write_bytes", real)
    run_sweep(spec, out)
    assert tree_bytes(out) == tree_bytes(tmp_path / "whole")


def test_a_file_that_cannot_be_is_told_before_the_work(tmp_path: Path) -> None:
    check_file(tmp_path / "new.toml")
    with pytest.raises(ChimsimError, match="is a folder"):
        check_file(tmp_path)
    with pytest.raises(ChimsimError, match="there is no folder"):
        check_file(tmp_path / "gone" / "new.toml")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_file(path, b"old")

    def broken(source: object, target: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr("os.replace", broken)
    with pytest.raises(OSError, match="broken") as caught:
        write_file(path, b"new")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not the manifest of a sweep"), ('{"format": 99, "spec": {}, "cells": []}', "has format 99")],
)
def test_a_broken_manifest_is_a_clear_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ChimsimError, match=message):
        Results(tmp_path)
