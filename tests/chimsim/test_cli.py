"""The command line: wrong input is one line and exit code 2, output goes where it belongs, help helps."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import chimsim
from chimsim import cli
from tests.chimsim.small import run_chimsim, write_small

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_small(tmp_path_factory.mktemp("trace"))


@pytest.fixture
def chimsim_main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> object:
    """Run the command in this process and folder ``tmp_path``: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        return run_chimsim(monkeypatch, capsys, *arguments)

    return run


def call(main: object, *arguments: str) -> tuple[int, str, str]:
    assert callable(main)
    code, out, err = main(*arguments)
    return int(code), str(out), str(err)


GOOD = {"--trace": "TRACE", "--combo": "qwen1.5b+7b", "--policy": "fcfs", "--rps": "20", "--out": "out"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--policy": "chimra"}, "policy 'chimra' is unknown; did you mean 'chimera'?"),
        ({"--policy": ""}, "--policy: the list is empty"),
        ({"--policy": "gone.py:Mine"}, "gone.py"),
        ({"--combo": "qwen1.5b+8b"}, "8b"),
        ({"--combo": "qwin7b"}, "qwin7b"),
        ({"--trace": "apsp"}, "did you mean 'apps'?"),
        ({"--trace": "no/such.jsonl"}, "there is no such file"),
        ({"--trace": "EMPTY"}, "has no workflows"),
        ({"--trace": "CUT"}, "CUT"),
        ({"--combo": "qwen14b"}, "has no run of Qwen2.5-14B"),
        ({"--rps": "0"}, "--rps: 0 is not allowed; give a number above 0"),
        ({"--rps": "nan"}, "--rps: nan is not allowed"),
        ({"--rps": "-3"}, "--rps: -3 is not allowed"),
        ({"--tau": "-1", "--policy": "chimera"}, "--tau: -1 is not allowed"),
        ({"--tau": "1"}, "knob 'tau': none of the policies fcfs has it"),
        ({"--knob": "speed"}, "--knob: 'speed' is not of the form name=value"),
        ({"--delta-s": "x", "--policy": "chimera"}, "--delta-s: 'x' is not a number"),
        ({"--workflows": "0"}, "--workflows: 0 is not allowed"),
        ({"--seeds": "0"}, "--seeds: 0 is not allowed"),
        ({"--router": "orcale"}, "did you mean 'oracle'?"),
        ({"--router-map": "0.1", "--policy": "chimera"}, "0.1"),
        ({"--cluster": "no.toml"}, "no.toml"),
        ({"--arrivals": "no.jsonl"}, "no.jsonl"),
        ({"--engines": "qwen3b=2"}, "qwen3b"),
        ({"--out": None}, "--out is missing"),
        ({"--rsp": "8"}, "--rsp"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    chimsim_main: object, trace: str, tmp_path: Path, change: dict[str, str | None], message: str
) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "CUT.jsonl").write_text(Path(trace).read_text()[:-40])
    places = {"TRACE": trace, "EMPTY": "empty.jsonl", "CUT": "CUT.jsonl"}
    options = {name: value for name, value in (GOOD | change).items() if value is not None}
    words = [word for name, value in options.items() for word in (name, places.get(value, value))]
    code, out, err = call(chimsim_main, "sweep", *words)
    assert (code, out) == (2, "")
    assert err.startswith("chimsim: error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert message in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep", "no.toml", "--out", "x"], "spec no.toml: no such file"),
        (["sweep", "bad.toml", "--out", "x"], "spec bad.toml: "),
        (["sweep", "typo.toml", "--out", "x"], "typo.toml: polici: unknown key; did you mean 'policy'?"),
        (["plot", "nowhere"], "nowhere is not a results folder: no such directory"),
        (["plot", "."], "is not a results folder: it has no manifest.json"),
        (["swep"], "swep"),
        (["run"], "no trace; give --trace"),
        (["profiles", "qwen9b"], "qwen9b"),
        (["trace", "describe", "apsp"], "apsp"),
    ],
)
def test_other_commands_too(chimsim_main: object, tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "bad.toml").write_text("trace = [")
    (tmp_path / "typo.toml").write_text('trace = "apps"\ncombo = "qwen7b"\npolici = "fcfs"\nrps = 8\n')
    code, out, err = call(chimsim_main, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("chimsim: error: ")
    assert message in err


def test_an_output_folder_that_is_a_file_or_in_use(chimsim_main: object, trace: str, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("words")
    words = [word for pair in (GOOD | {"--trace": trace}).items() for word in pair]
    code, _, err = call(chimsim_main, "sweep", *words)
    assert (code, err) == (2, "chimsim: error: out is a file; --out needs a folder\n")


def test_a_sweep_prints_its_table_and_where_things_are(chimsim_main: object, trace: str, tmp_path: Path) -> None:
    words = [
        "--trace",
        trace,
        "--combo",
        "qwen1.5b+7b",
        "--policy",
        "fcfs,chimera",
        "--rps",
        "20",
        "--slots",
        "4",
    ]
    code, out, err = call(chimsim_main, "sweep", *words, "--tau", "0,inf", "--out", "out")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "qwen1.5b+7b  small, 20 rps"
    assert "written: out/summary.csv, out/frontier.png, out/frontier.svg, out/queue.png" in out
    assert (tmp_path / "out" / "frontier.png").stat().st_size > 1000
    code, out, err = call(chimsim_main, "plot", "out", "--kind", "cdf", "--format", "svg")
    assert (code, out, err) == (0, "out/cdf.svg\n", "")


def test_a_sweep_without_queues_warns(chimsim_main: object, trace: str) -> None:
    words = [
        "--trace",
        trace,
        "--combo",
        "qwen1.5b+7b",
        "--policy",
        "fcfs,stjf",
        "--rps",
        "1",
        "--out",
        "out",
    ]
    code, _, err = call(chimsim_main, "sweep", *words, "--no-plots")
    assert code == 0
    assert err.startswith("chimsim: warning: queues never fill in 1 of 1 blocks")


def test_dry_run_prints_the_grid_and_runs_nothing(chimsim_main: object, tmp_path: Path) -> None:
    spec = str(ROOT / "experiments" / "fig5.toml")
    code, out, err = call(chimsim_main, "sweep", spec, "--trace", "maths", "--rps", "8", "--dry-run", "--out", "x")
    assert (code, err) == (0, "")
    assert "cells         fcfs 20, sjf 20, stjf 20, mlfq 20, ltr 20, plas 20, chimera 180" in out
    assert out.endswith("300 cells in all\n")
    assert not (tmp_path / "x").exists()


def test_run_prints_tables_or_json(chimsim_main: object, trace: str) -> None:
    words = [
        "run",
        "--trace",
        trace,
        "--combo",
        "qwen1.5b+7b",
        "--policy",
        "chimera",
        "--rps",
        "20",
        "--slots",
        "4",
    ]
    code, out, err = call(chimsim_main, *words, "--seed", "3")
    assert (code, err) == (0, "")
    assert "mean_workflow_latency_s" in out
    code, kept, err = call(chimsim_main, *words, "--seed", "3", "--json", "--out", "cell")
    assert (code, err) == (0, "")
    code, as_json, err = call(chimsim_main, *words, "--seed", "3", "--json")
    assert kept == as_json
    found = json.loads(as_json)
    assert found["config"]["seed"] == 3
    assert found["metrics"]["workflows"] == 40
    code, _, err = call(chimsim_main, *words, "--tau", "0,1")
    assert code == 2
    assert "run takes one cell, these options make 2 (tau vary)" in err


def test_policies_and_profiles_are_listed(chimsim_main: object) -> None:
    code, out, _ = call(chimsim_main, "policies")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    code, listed, _ = call(chimsim_main, "policies", "--json")
    policies = {row["policy"]: row for row in json.loads(listed)["policies"]}
    assert [knob["default"] for knob in policies["chimera"]["knobs"] if knob["name"] == "tau"] == [0.5]
    assert call(chimsim_main, "profiles")[0] == 0


@pytest.mark.parametrize("command", ["sweep", "run", "plot", "policies"])
def test_help_has_examples_on_lines_of_their_own(chimsim_main: object, command: str) -> None:
    code, out, _ = call(chimsim_main, command, "--help")
    assert code == 0
    assert re.search(rf"^  chimsim {command}\b", out, re.MULTILINE)


def test_the_version_is_the_projects(chimsim_main: object) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert call(chimsim_main, "--version")[1] == f"chimsim {project['version']}\n"
    assert chimsim.__version__ == project["version"]


def test_an_intruder_among_the_packages_is_named(
    chimsim_main: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    intruder = ModuleType("policies")
    intruder.__file__ = str(tmp_path / "policies" / "__init__.py")
    monkeypatch.setattr(cli, "policies_package", intruder)
    code, _, err = call(chimsim_main, "policies")
    assert code == 2
    assert str(tmp_path / "policies") in err
    assert "an environment of its own" in err


def test_a_closed_pipe_is_no_error() -> None:
    script = f"{sys.executable} -m chimsim policies --json | head -c 1"
    done = subprocess.run(["sh", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("{", "")


@pytest.mark.slow
def test_the_example_script_runs() -> None:
    done = subprocess.run(
        [sys.executable, "examples/first_steps.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "chimera is faster than fcfs for" in done.stdout
