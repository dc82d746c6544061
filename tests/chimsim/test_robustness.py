"""A sweep that something happened to: what is finished stays, what is half there is not read, and it can be gone on
with to the same bytes. More of each, and a disk that is really full: `benchmarks/robustness.py`."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from chimsim.errors import ChimsimError
from chimsim.feeds import trace_named
from chimsim.grid import plan
from chimsim.results import Results, cell_is_whole
from chimsim.spec import Spec, spec_from
from chimsim.sweeps import run_sweep
from tests.chimsim.small import run_chimsim, small_keys, tree_bytes, write_small

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_small(tmp_path_factory.mktemp("trace"), count=12)


@pytest.fixture(scope="module")
def spec(trace: str) -> Spec:
    return spec_from(small_keys(trace))


@pytest.fixture(scope="module")
def whole(spec: Spec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed sweep of eight cells; nobody changes it."""
    out = tmp_path_factory.mktemp("whole") / "out"
    run_sweep(spec, out)
    return out


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "copy")
    return tmp_path / "copy"


def cells_run(out: Path) -> int:
    return int(json.loads((out / "run.json").read_text())["runs"][-1]["cells_run"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_a_random_moment(seed: int, trace: str, spec: Spec, whole: Path, tmp_path: Path) -> None:
    draw = random.Random(seed)
    out = tmp_path / "out"
    command = [
        sys.executable, "-m", "chimsim", "sweep", "--trace", trace, "--combo", "qwen1.5b+7b", "--policy",
        "fcfs,chimera", "--tau", "0,1,inf", "--rps", "20", "--slots", "4", "--seeds", "2", "--no-plots",
        "--out", str(out), "--workers", str(1 + seed % 2),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    while process.poll() is None and not (out / "manifest.json").exists():
        time.sleep(0.002)
    time.sleep(draw.uniform(0, 0.2))
    process.send_signal(signal.SIGKILL)
    process.wait()
    _ended(process.pid)
    wanted = tree_bytes(whole)
    finished = [name for name in Results(whole).cells if (out / "cells" / name).exists()]
    for name in finished:
        assert cell_is_whole(out, name)
        assert tree_bytes(out / "cells" / name) == tree_bytes(whole / "cells" / name)
    run_sweep(spec, out)
    assert tree_bytes(out) == wanted
    assert cells_run(out) == 8 - len(finished)


def _ended(group: int) -> None:
    """Wait for its workers, which end by themselves: one may still finish its cell."""
    for _ in range(2000):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    pytest.fail("a worker outlives its parent")


def turn_into_a_folder(cell: Path) -> None:
    (cell / "itl.parquet").unlink()
    (cell / "itl.parquet").mkdir()


def turn_into_a_file(cell: Path) -> None:
    shutil.rmtree(cell)
    cell.write_text("x")


def turn_into_a_link(cell: Path) -> None:
    shutil.rmtree(cell)
    cell.symlink_to("nowhere")


def empty(cell: Path) -> None:
    shutil.rmtree(cell)
    cell.mkdir()


def flip_a_bit(cell: Path) -> None:
    data = (cell / "summary.json").read_bytes()
    (cell / "summary.json").write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit": flip_a_bit,
    "a folder instead of a file": turn_into_a_folder,
    "a file instead of the folder": turn_into_a_file,
    "a dangling link": turn_into_a_link,
    "an empty folder": empty,
    "sums of other files": lambda cell: (cell / "checksums.json").write_text('{"config.json": "x"}'),
    "sums that are none": lambda cell: (cell / "checksums.json").write_bytes(b"\xff["),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cell_is_not_read_and_made_anew(damage: str, copy: Path, whole: Path, spec: Spec) -> None:
    name = Results(copy).cells[5]
    DAMAGES[damage](copy / "cells" / name)
    with pytest.raises(ChimsimError, match=r"summary.json (has changed|cannot be)|itl.parquet cannot be read"):
        _ = Results(copy).cell_summary(name), Results(copy).table(name, "itl")
    run_sweep(spec, copy)
    assert tree_bytes(copy) == tree_bytes(whole)
    assert cells_run(copy) == 1


def test_files_of_others_are_left_alone(copy: Path, whole: Path, spec: Spec) -> None:
    first, second = Results(copy).cells[:2]
    foreign = [copy / "notes.txt", copy / "cells" / "notes.txt", copy / "cells" / first / "notes.txt"]
    for path in foreign:
        path.write_text("mine")
    (copy / "cells" / second / "summary.json").unlink()
    run_sweep(spec, copy)
    assert [path.read_text() for path in foreign] == ["mine"] * 3
    assert {name: data for name, data in tree_bytes(copy).items() if "notes" not in name} == tree_bytes(whole)


def test_a_limit_on_the_size_of_files_is_told(whole: Path, spec: Spec, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = max((path.stat().st_size, path) for path in whole.glob("cells/*/requests.parquet"))[0]
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1, limits[1]))
    try:
        with pytest.raises(ChimsimError, match=r"file too large; . of 8 cells are finished and kept"):
            run_sweep(spec, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "out").rglob("*.tmp"))
    run_sweep(spec, tmp_path / "out")
    assert tree_bytes(tmp_path / "out") == tree_bytes(whole)


def test_another_trace_under_the_same_name_is_told(trace: str, copy: Path, spec: Spec) -> None:
    content = Path(trace).read_bytes()
    other = content.replace(b'"output_tokens":', b'"output_tokens":1', 1)
    before = tree_bytes(copy)
    planned = plan(spec)
    try:
        Path(trace).write_bytes(other)
        with pytest.raises(ChimsimError, match=r"holds another sweep \(traces differ in content"):
            run_sweep(spec, copy)
        assert tree_bytes(copy) == before
        trace_named.cache_clear()
        shutil.rmtree(copy / "cells" / Results(copy).cells[0])
        with pytest.raises(ChimsimError, match="changed while the sweep was running"):
            run_sweep(spec, copy, planned=planned)
    finally:
        Path(trace).write_bytes(content)
        trace_named.cache_clear()
    run_sweep(spec, copy)
    assert tree_bytes(copy) == before


def test_a_clock_that_jumps_is_seen_in_run_json_alone(
    whole: Path, spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(0)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + draw.uniform(-3e8, 3e8))
    run_sweep(spec, tmp_path / "out")
    assert tree_bytes(tmp_path / "out") == tree_bytes(whole)
    assert 0 < json.loads((tmp_path / "out" / "run.json").read_text())["runs"][0]["wall_s"] < 1e4


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("cells", {}, "cells a list"),
        ("spec", None, "spec must be an object"),
        ("cells", [1], r"cells\[0\] has no hash"),
        ("cells", [{"hash": "../../../etc", "axes": {}}], r"cells\[0\] has no hash"),
        ("cells", [{"hash": "0" * 32, "axes": {"trace": "x", "combo": "y", "policy": 3, "seed": 0}}], "has no policy"),
        ("cells", [{"hash": "0" * 32, "axes": {"trace": "x", "combo": "y", "policy": "z", "seed": 2**64}}], "as seed"),
    ],
)
def test_a_manifest_that_is_none_of_ours(copy: Path, key: str, value: object, message: str) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {key: value}))
    with pytest.raises(ChimsimError, match=message):
        Results(copy)


def test_a_frontier_of_lines_with_other_seeds(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a sweep has that is not finished."""
    results = Results(copy)
    lacking = next(name for name in results.cells if "Chimera" in results.config(name)["policy"])
    shutil.rmtree(copy / "cells" / lacking)
    code, out, err = run_chimsim(monkeypatch, capsys, "frontier", copy, "--json")
    assert (code, "7 of 8 cells" in err) == (0, True)
    assert {point["share_of_seeds"] for block in json.loads(out)["blocks"] for point in block["points"]} <= {0, 0.5, 1}
