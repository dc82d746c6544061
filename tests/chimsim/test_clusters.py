"""Cells in other processes, on Ray and on Dask: the bytes of one worker, whoever is killed; and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from chimsim import clusters
from chimsim.errors import ChimsimError
from chimsim.forecast import Forecast
from chimsim.grid import Cell, cells
from chimsim.parcels import Refused, do, pack, remove, versions, with_files
from chimsim.results import Results
from chimsim.spec import spec_from
from chimsim.sweeps import run_sweep
from chimsim.workers import RETRIES, WorkerDied, Workers, run_jobs
from tests.chimsim.small import run_chimsim, small_keys, tree_bytes, write_small

WAITS = """
import os, time
from dataclasses import dataclass
from pathlib import Path
from policies.fcfs import Fcfs

MARKS = Path({marks!r})

@dataclass
class Waits(Fcfs):
    def dispatch(self, now, request, cluster):
        if (MARKS / "armed").exists():
            try:
                (MARKS / "armed").rename(MARKS / f"pid {{os.getpid()}}")
                time.sleep(60)
            except FileNotFoundError:
                pass
        return super().dispatch(now, request, cluster)
"""
"""A policy of a user's file. Who finds the mark takes it away, says which process it is, and waits to be killed."""


def kill_who_waits(marks: Path) -> None:
    while not (found := list(marks.glob("pid *"))):
        time.sleep(0.005)
    os.kill(int(found[0].name.split()[1]), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local", "ray", "dask"])
def test_a_worker_is_killed_and_the_bytes_are_those_of_one(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On clusters no file is read from its place once it has been sent, and nothing that was sent is left."""
    module = {"ray": "ray", "dask": "distributed"}.get(backend)
    if module is not None and find_spec(module) is None:
        pytest.skip(f"needs the extra {backend}")
    own, marks, node = tmp_path / "own.py", tmp_path / "marks", tmp_path / "node"
    marks.mkdir()
    node.mkdir()
    own.write_text(WAITS.format(marks=str(marks)))
    trace = write_small(tmp_path, count=12)
    # when one cell is done three have begun, and there is a fourth that waits
    keys = small_keys(trace) | {"policy": [f"{own}:Waits", "chimera"], "tau": 1, "seeds": 4}
    run_sweep(spec_from(keys), tmp_path / "one", workers=1)
    # where workers put what they are sent; Ray's own files would have too long names there
    monkeypatch.setenv("RAY_TMPDIR", tempfile.gettempdir())
    monkeypatch.setenv("TMPDIR", str(node))
    killer = threading.Thread(target=kill_who_waits, args=(marks,), daemon=True)
    killer.start()

    def begin(done: int, total: int, cell: Cell | None, forecast: Forecast) -> None:
        if done == 1:
            (marks / "armed").touch()
            if backend != "local":
                own.rename(tmp_path / "gone.py")
                Path(trace).rename(tmp_path / "gone.jsonl")

    run_sweep(spec_from(keys | {"backend": backend}), tmp_path / "two", workers=2, progress=begin)
    killer.join(timeout=10)
    assert not killer.is_alive()
    assert tree_bytes(tmp_path / "two") == tree_bytes(tmp_path / "one")
    (run,) = json.loads((tmp_path / "two" / "run.json").read_text())["runs"]
    assert (run["backend"], run["workers"], run["nodes"]) == (backend, 2, 1)
    assert run["retried"] >= 1
    assert not list(node.glob("chimsim-*"))


def die_at_two(job: int) -> int:
    if job == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return 10 * job


def test_a_job_that_kills_every_worker_is_given_up_after_all_others() -> None:
    seen: list[tuple[int, int]] = []
    with pytest.raises(WorkerDied) as caught:
        seen.extend(run_jobs(die_at_two, range(5), Workers(2)))
    assert sorted(seen) == [(0, 0), (1, 10), (3, 30), (4, 40)]
    assert caught.value.index == 2
    assert f"killed {1 + RETRIES} times (SIGKILL, perhaps for lack of memory)" in str(caught.value)


def leave(job: int) -> int:
    os._exit(3)


def test_a_worker_that_ends_by_itself_is_not_tried_again() -> None:
    with pytest.raises(WorkerDied, match=r"^a worker ended by itself \(exit code 3; a script"):
        list(run_jobs(leave, range(2), Workers(2)))


def test_workers_hand_back_every_outcome_once() -> None:
    jobs = [-3, -1, -2, 5, -4]
    wanted = [(0, 3), (1, 1), (2, 2), (3, 5), (4, 4)]
    assert sorted(run_jobs(abs, jobs, Workers(2))) == wanted
    assert list(run_jobs(abs, jobs, Workers(1))) == wanted


def own_pid(job: int) -> int:
    return os.getpid()


def test_short_work_starts_no_process() -> None:
    assert {pid for _, pid in run_jobs(own_pid, range(4), Workers(), work_s=1.0)} == {os.getpid()}
    assert os.getpid() not in {pid for _, pid in run_jobs(own_pid, range(2), Workers(2), work_s=1.0)}


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    own = tmp_path / "own.py"
    own.write_text(WAITS.format(marks=str(tmp_path)))
    keys = small_keys(write_small(tmp_path, count=4)) | {"policy": f"{own}:Waits", "tau": None, "seeds": 1}
    return cells(spec_from(keys | {"arrivals": keys["trace"]}))[0]


def name_of(cell: Cell) -> str:
    return "\n".join([cell.trace, cell.policy, cell.arrivals])


def test_every_file_of_a_cell_is_sent_and_found_again(cell: Cell, tmp_path: Path) -> None:
    parcel = pack([cell])
    names = {str(tmp_path / "own.py"), str(tmp_path / "small.jsonl")}
    assert set(parcel.files) == names
    fetched = []

    def fetch() -> bytes:
        fetched.append(1)
        return pickle.dumps(parcel.files)

    sent = pickle.dumps(cell)
    first = do(name_of, sent, parcel.token, parcel.versions, fetch)
    again = do(name_of, sent, parcel.token, parcel.versions, fetch)
    assert first == again
    assert fetched == [1]
    trace, policy, arrivals = first.split("\n")
    assert trace == arrivals
    assert Path(trace).read_bytes() == (tmp_path / "small.jsonl").read_bytes()
    assert (Path(trace).name, Path(policy).name) == ("small.jsonl", "own.py:Waits")
    assert not names & set(first.split("\n"))
    remove(parcel.token)
    assert not Path(trace).exists()


def test_names_of_saved_models_are_files_of_a_cell(cell: Cell) -> None:
    from dataclasses import replace

    feed = replace(cell.feed, router="models/r", lengths="qrf:models/l", rank="models/k")
    whole = replace(cell, trace="apps\nmodels/r\nmodels/l\t1/2", policy="fcfs", arrivals="poisson", feed=feed)
    moved = with_files(whole, lambda name: f"/there/{name}")
    assert moved.trace == "apps\n/there/models/r\n/there/models/l\t1/2"
    assert (moved.policy, moved.arrivals) == ("fcfs", "poisson")
    assert moved.feed.folders == ("/there/models/r", "/there/models/l", "/there/models/k")


def test_a_worker_with_other_versions_refuses(cell: Cell) -> None:
    wanted = versions(("numpy", "pyarrow")) | {"numpy": "0.1", "chimsim": "7"}
    outcome = do(name_of, b"never opened", "", wanted, bytes)
    assert isinstance(outcome, Refused)
    assert f"numpy {versions(('numpy',))['numpy']} instead of 0.1" in outcome.why
    assert "pyarrow" not in outcome.why


def test_a_worker_with_another_policy_of_that_name_refuses(cell: Cell, tmp_path: Path) -> None:
    parcel = pack([cell])
    other = {name: {"": data[""] + b"\n# edited"} for name, data in parcel.files.items()}
    outcome = do(name_of, pickle.dumps(cell), parcel.token, parcel.versions, lambda: pickle.dumps(other))
    assert isinstance(outcome, Refused)
    assert "has another policy" in outcome.why
    remove(parcel.token)


@pytest.fixture(scope="module")
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--backend ray --address ray://127.0.0.1:PORT", "no ray cluster can be reached there (connection refused)"),
        ("--backend dask --address tcp://127.0.0.1:PORT", "no dask cluster can be reached there (connection refused)"),
        ("--backend dask --address ray://127.0.0.1:PORT", "is none of dask; expected tcp://10.0.0.1:8786"),
        ("--backend ray --address somewhere", "is none of ray; expected auto, 10.0.0.1:6379"),
        ("--address auto", "--address is of a cluster; give --backend too: ray or dask"),
        ("--backend spark", "--backend: 'spark'"),
    ],
)
def test_a_cluster_that_cannot_be_had_is_one_line(
    options: str,
    message: str,
    closed_port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(clusters, "find_spec", lambda name: object())
    words = options.replace("PORT", str(closed_port)).split()
    code, _, err = run_chimsim(monkeypatch, capsys, *SWEEP, "--out", tmp_path / "out", *words)
    assert (code, len(err.splitlines())) == (2, 1)
    assert message in err


SWEEP = ("sweep", "--trace", "apps", "--combo", "qwen7b", "--policy", "fcfs", "--rps", "4", "--workflows", "4")


@pytest.mark.parametrize(("backend", "module"), [("ray", "ray"), ("dask", "distributed")])
def test_a_missing_extra_is_one_line(
    backend: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(clusters, "find_spec", lambda name: None)
    code, _, err = run_chimsim(monkeypatch, capsys, *SWEEP, "--out", tmp_path / "out", "--backend", backend)
    assert code == 2
    assert err == f"chimsim: error: --backend {backend} needs {module}; install it: pip install 'chimsim[{backend}]'\n"


def test_who_runs_it_decides_nothing(tmp_path: Path) -> None:
    keys = small_keys("apps")
    here, there = spec_from(keys), spec_from(keys | {"workers": 7, "backend": "dask", "address": "tcp://x:1"})
    assert here.to_dict() == there.to_dict()
    assert (there.workers, there.backend, there.address) == (7, "dask", "tcp://x:1")


def test_other_commands_stay_here(tmp_path: Path) -> None:
    from chimsim.options import local_workers

    with pytest.raises(ChimsimError, match="only sweep runs on ray"):
        local_workers(spec_from(small_keys("apps") | {"backend": "ray"}))
    assert local_workers(spec_from(small_keys("apps") | {"workers": 3})) == 3


def test_results_know_nothing_of_it(tmp_path: Path) -> None:
    trace = write_small(tmp_path, count=4)
    run_sweep(spec_from(small_keys(trace)), tmp_path / "out")
    assert "workers" not in Results(tmp_path / "out").manifest["spec"]
