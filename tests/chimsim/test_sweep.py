"""Sweeps: what a spec means, which cells it makes, equal bytes however it runs, resuming after a kill."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import tomllib
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimsim import sweep
from chimsim.errors import ChimsimError
from chimsim.grid import plan
from chimsim.results import Results, json_bytes
from chimsim.spec import read_spec, spec_from
from chimsim.sweeps import cells, run_sweep
from policies import PolicyError
from tests.chimsim.small import small_keys, tree_bytes, write_small
from traces import TraceError

ROOT = Path(__file__).resolve().parents[2]
BASE: dict[str, Any] = {"trace": "apps", "combo": "qwen1.5b+7b", "policy": "fcfs", "rps": 8}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_small(tmp_path_factory.mktemp("trace"))


def test_text_lists_and_toml_mean_the_same() -> None:
    text = spec_from({**BASE, "policy": "fcfs, chimera", "tau": "0,0.5,inf", "knobs": ["aging_tokens_per_s=0,5"]})
    toml = """
        trace = "apps"
        combo = ["qwen1.5b+7b"]
        policy = ["fcfs", "chimera"]
        rps = [8]
        tau = [0, 0.5, inf]
        [knobs]
        aging_tokens_per_s = [0, 5]
    """
    assert spec_from({}, tomllib.loads(toml)) == text
    assert text.knobs["tau"] == (0.0, 0.5, inf)


def test_options_override_the_file_key_by_key(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(
        'trace="apps"\ncombo="qwen7b"\nrps=[8,12]\nseeds=3\n[policy.stjf]\n[policy.sjf]\nlength_error=0.2\n'
    )
    spec = spec_from({"rps": "16", "policy": "sjf,fcfs"}, read_spec(path))
    assert spec.rps == (16.0,)
    assert spec.seeds == (0, 1, 2)
    assert [(entry.label, dict(entry.overrides)) for entry in spec.policy] == [
        ("sjf", {"length_error": (0.2,)}),
        ("fcfs", {}),
    ]


def test_knobs_of_the_file_go_with_its_policies(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(
        'trace="apps"\ncombo="qwen7b"\nrps=8\npolicy=["fcfs","chimera"]\ntau=[0,1]\nknobs={aging_tokens_per_s=5}\n'
    )
    file = read_spec(path)
    assert spec_from({"policy": "fcfs"}, file).knobs == {}
    assert spec_from({"policy": "chimera"}, file).knobs == {"tau": (0.0, 1.0), "aging_tokens_per_s": (5,)}
    assert spec_from({"policy": "fcfs", "tau": "2"}, file).knobs == {"tau": (2.0,)}, (
        "asked for: left for the grid to refuse"
    )


keys = st.fixed_dictionaries(
    {
        "trace": st.just(["apps"]),
        "combo": st.lists(st.sampled_from(["qwen7b", "qwen1.5b+7b"]), min_size=1, unique=True),
        "policy": st.lists(st.sampled_from(["fcfs", "sjf", "chimera"]), min_size=1, unique=True),
        "rps": st.lists(st.floats(0.01, 1e6), min_size=1, max_size=3, unique=True),
    },
    optional={
        "tau": st.lists(st.one_of(st.floats(0, 100), st.just(inf)), min_size=1, max_size=3, unique=True),
        "seeds": st.one_of(st.integers(1, 9), st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True)),
        "slots": st.lists(st.integers(1, 512), min_size=1, max_size=2, unique=True),
        "engines": st.just({"qwen7b": 2}),
        "router": st.lists(st.sampled_from(["trace", "oracle", "none"]), min_size=1, unique=True),
        "length_error": st.lists(st.floats(0, 0.5), min_size=1, max_size=2, unique=True),
    },
)


@given(keys)
def test_a_resolved_spec_reads_back_as_itself(drawn: dict[str, Any]) -> None:
    spec = spec_from(drawn)
    assert spec_from({}, json.loads(json_bytes(spec.to_dict()))) == spec


@given(keys)
def test_a_list_and_its_comma_text_are_one_spec(drawn: dict[str, Any]) -> None:
    texts = {
        name: ",".join(str(item) for item in value)
        for name, value in drawn.items()
        if isinstance(value, list) and not (name == "seeds" and len(value) == 1)
    }
    assert spec_from(drawn | texts) == spec_from(drawn)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rps": 0}, "rps: 0 is not allowed; give a number above 0"),
        ({"rps": "nan"}, "rps: nan is not allowed"),
        ({"rps": "-1"}, "rps: -1 is not allowed"),
        ({"rps": "inf"}, "rps: inf is not allowed"),
        ({"rps": "fast"}, "rps: 'fast' is not a number"),
        ({"rps": True}, "rps: True is not a number"),
        ({"rps": []}, "rps: the list is empty"),
        ({"rps": "8,,9"}, "rps: the list is empty or has an empty entry"),
        ({"rps": "8,8.0,8"}, "rps: '8' stands there twice"),
        ({"tau": -0.1}, "tau: -0.1 is not allowed; give a number of at least 0"),
        ({"policy": ""}, "policy: the list is empty"),
        ({"policy": "fcfs,fcfs"}, "stands there twice"),
        ({"workflows": 0}, "workflows: 0 is not allowed; give a whole number of at least 1"),
        ({"workflows": 2.5}, "workflows: 2.5 is not a whole number"),
        ({"workflows": 5, "warmup": 5}, "warmup: 5 workflows of warm-up leave none of 5"),
        ({"seeds": 0}, "seeds: 0 is not allowed"),
        ({"router": "orcle"}, "did you mean 'oracle'"),
        (
            {"length_error": 0.6},
            "length_error: 0.6 is not allowed; give a number of at least 0 and at most 0.5",
        ),
        ({"oversize": "reject,clip"}, "oversize: takes one value, found 2"),
        ({"engines": "qwen7b"}, "engines: 'qwen7b' is not of the form name=value"),
        ({"goodput": "speed=3"}, "goodput: 'speed' is unknown"),
        ({"goodput": "latency:60m"}, "goodput: latency is '60m'; expected a time with its unit, such as 60s"),
        ({"goodput": "latency=60"}, "goodput: latency is '60'; expected a time with its unit"),
        ({"goodput": "ttft=5,ttft=6"}, "goodput: 'ttft' stands there twice"),
        ({"rsp": 8}, "rsp: unknown key; did you mean 'rps'"),
        ({"arrivals": "poisson", "rps": None}, "Poisson arrivals need rps"),
        ({"trace": None}, "no trace"),
        ({"combo": None}, "no cluster"),
        ({"policy": None}, "no policy"),
    ],
)
def test_a_wrong_spec_says_where_and_what(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ChimsimError) as caught:
        spec_from(BASE | change)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"policy": "chimra"}, PolicyError, "did you mean 'chimera'"),
        ({"combo": "qwen1.5b+9b"}, ChimsimError, "9b"),
        ({"trace": "appz"}, TraceError, "did you mean 'apps'"),
        ({"knobs": ["placemnt=random"]}, ChimsimError, "did you mean 'placement'"),
        ({"policy": "chimera", "knobs": ["explain=maybe"]}, PolicyError, "explain"),
        ({"trace": "apps", "arrivals": "recorded", "rps": None}, TraceError, "no arrival times"),
        ({"cluster": "no.toml", "combo": None}, ChimsimError, "no.toml"),
    ],
)
def test_what_a_spec_names_must_be_there_before_anything_runs(
    trace: str, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        cells(spec_from(BASE | {"trace": trace} | change))
    assert message in str(caught.value)


def test_a_trace_without_a_run_of_the_model_is_named(trace: str) -> None:
    with pytest.raises(ChimsimError, match=r"workflow w000 has no run of Qwen2.5-14B"):
        cells(spec_from(BASE | {"trace": trace, "combo": "qwen1.5b+14b"}))


def test_a_stage_that_cannot_fit_is_found_up_front_and_may_be_clipped(trace: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text('[[engine]]\nmodel = "qwen1.5b"\nmax_model_len = 400\n')
    tiny = BASE | {"trace": trace, "combo": None, "cluster": str(path)}
    with pytest.raises(ChimsimError, match=r"workflow w\d+, stage .* --oversize reject"):
        cells(spec_from(tiny))
    assert len(cells(spec_from(tiny | {"oversize": "reject"}))) == 1
    rejecting = sweep(**tiny | {"oversize": "reject"}).summary
    assert rejecting["rejected_workflows"].iloc[0] > 0


def test_parameters_that_a_policy_does_not_have_or_read_do_not_multiply_it(trace: str) -> None:
    found = cells(
        spec_from(
            BASE
            | {"trace": trace, "policy": "fcfs,sjf,chimera", "tau": "0,1,inf", "length_error": "0,0.2",
               "router": "oracle,none", "seeds": 2}
        )
    )  # fmt: skip
    counts = {name: sum(cell.axes["policy"] == name for cell in found) for name in ("fcfs", "sjf", "chimera")}
    assert counts == {"fcfs": 2, "sjf": 2 * 2, "chimera": 2 * 3 * 2 * 2}
    assert len({cell.name for cell in found}) == len(found)


def test_a_policy_table_sets_its_own_knobs_label_and_predictor(trace: str) -> None:
    table = {
        "chimera": {},
        "no-router": {"policy": "chimera", "router": "none", "tau": 0.5},
        "mlfq": {"skip_join": True, "label": "mlfq, skip-join"},
    }
    found = cells(spec_from(BASE | {"trace": trace, "policy": table, "tau": "0,1", "router": "oracle"}))
    shown = [(cell.axes["policy"], cell.axes["tau"], cell.axes["router"]) for cell in found]
    assert shown == [
        ("chimera", 0.0, "oracle"),
        ("chimera", 1.0, "oracle"),
        ("no-router", 0.5, "none"),
        ("mlfq, skip-join", None, None),
    ]
    assert "skip_join=True" in found[-1].config["policy"]


def test_engine_counts_go_to_the_combinations_that_have_the_model(trace: str) -> None:
    keys = BASE | {"trace": trace, "combo": ["qwen1.5b+7b", "qwen1.5b"], "engines": {"qwen7b": 2}}
    found, manifest = plan(spec_from(keys))
    engines = [(cell.axes["combo"], [engine.name for engine in cell.cluster.engines]) for cell in found]
    assert engines == [
        ("qwen1.5b+7b", ["Qwen2.5-1.5B", "Qwen2.5-7B/0", "Qwen2.5-7B/1"]),
        ("qwen1.5b", ["Qwen2.5-1.5B"]),
    ]
    assert [cluster["name"] for cluster in manifest["clusters"].values()] == ["qwen1.5b+7bx2", "qwen1.5b"]
    with pytest.raises(
        ChimsimError, match=r"all combinations: engines of 'qwen14b', but the models are Qwen2\.5-1\.5B"
    ):
        plan(spec_from(keys | {"engines": {"qwen7b": 2, "qwen14b": 3}}))


def test_policies_of_a_sweep_see_the_same_arrivals(trace: str) -> None:
    results = sweep(**small_keys(trace))
    by_seed: dict[int, set[tuple[Any, ...]]] = {}
    for name in results.cells:
        table = results.table(name, "workflows")
        seen = (*table["source_id"].astype(str), *table["arrived_at"])
        by_seed.setdefault(results.config(name)["seed"], set()).add(seen)
    assert [len(arrivals) for arrivals in by_seed.values()] == [1, 1]
    assert by_seed[0] != by_seed[1]


def test_borrowed_and_recorded_arrivals(trace: str, tmp_path: Path) -> None:
    keys = BASE | {"trace": trace, "rps": None}
    recorded = sweep(**keys)
    arrived = recorded.table(recorded.cells[0], "workflows")["arrived_at"]
    assert arrived.tolist() == pytest.approx([0.2 * i for i in range(40)])
    stretched = sweep(**keys | {"arrivals": trace, "rps": 10})
    arrived = stretched.table(stretched.cells[0], "workflows")["arrived_at"]
    assert arrived.tolist() == pytest.approx([0.1 * i for i in range(40)])


def test_one_and_two_workers_and_another_order_give_the_same_bytes(trace: str, tmp_path: Path) -> None:
    spec = spec_from(small_keys(trace))
    run_sweep(spec, tmp_path / "one", workers=1)
    run_sweep(spec, tmp_path / "two", workers=2)
    assert tree_bytes(tmp_path / "one") == tree_bytes(tmp_path / "two")
    again = spec_from({}, read_spec(tmp_path / "one" / "manifest.json"))
    run_sweep(again, tmp_path / "again")
    assert tree_bytes(tmp_path / "one") == tree_bytes(tmp_path / "again")


def test_a_failing_cell_is_named_and_the_others_kept(trace: str, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from dataclasses import dataclass\n"
        "from policies.interface import Dispatch, Policy\n"
        "@dataclass\n"
        "class Broken(Policy):\n"
        "    def dispatch(self, now, request, cluster):\n"
        "        return Dispatch('nowhere')\n"
    )
    spec = spec_from(small_keys(trace) | {"policy": ["fcfs", f"{own}:Broken"], "tau": None, "seeds": 1})
    with pytest.raises(ChimsimError, match=r"1 of 2 cells failed, 1 are kept in .*Broken.*nowhere"):
        run_sweep(spec, tmp_path / "out")
    assert len(Results(tmp_path / "out").cells) == 1


def test_an_edited_policy_is_run_anew(trace: str, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    text = (
        "from dataclasses import dataclass\n"
        "from policies.interface import Dispatch, Policy\n"
        "@dataclass\n"
        "class First(Policy):\n"
        "    def dispatch(self, now, request, cluster):\n"
        "        return Dispatch(cluster[0].name)\n"
    )
    spec = spec_from(small_keys(trace) | {"policy": f"{own}:First", "tau": None})
    own.write_text(text)
    before = [cell.name for cell in cells(spec)]
    own.write_text(text.replace("cluster[0]", "cluster[-1]"))
    assert not {cell.name for cell in cells(spec)} & set(before)


def _command(trace: str, out: Path) -> list[str]:
    keys = small_keys(trace)
    return [
        sys.executable, "-m", "chimsim", "sweep", "--trace", trace, "--combo", keys["combo"], "--policy",
        "fcfs,chimera", "--tau", "0,1,inf", "--rps", "20", "--slots", "4", "--seeds", "4", "--no-plots",
        "--out", str(out),
    ]  # fmt: skip


def _stop_after_a_cell(command: list[str], out: Path, how: signal.Signals) -> tuple[int, str]:
    """Send the signal to the sweep when its first cell is there; exit code and stderr."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not any((out / "cells").glob("[0-9a-f]*")):
        time.sleep(0.002)
    process.send_signal(how)
    _, stderr = process.communicate()
    return process.returncode, stderr


@pytest.mark.slow
def test_killed_and_resumed_is_the_same_as_undisturbed(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, _ = _stop_after_a_cell([*_command(trace, out), "--workers", "2"], out, signal.SIGKILL)
    assert code == -signal.SIGKILL
    partial = Results(out)
    assert 0 < len(partial.cells) < 16
    spec = spec_from(small_keys(trace) | {"seeds": 4})
    run_sweep(spec, out)
    run_sweep(spec, tmp_path / "whole")
    assert tree_bytes(out) == tree_bytes(tmp_path / "whole")


@pytest.mark.slow
def test_ctrl_c_keeps_finished_cells_and_says_how_to_go_on(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, stderr = _stop_after_a_cell([*_command(trace, out), "--workers", "2"], out, signal.SIGINT)
    assert code == 130
    assert len(stderr.splitlines()) == 1
    assert "interrupted;" in stderr
    assert "the same command goes on with the rest" in stderr
    assert not list(out.rglob("*.tmp"))
    assert 0 < len(Results(out).cells) < 16
