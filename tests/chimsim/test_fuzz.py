"""Files that are wrong, whatever they are, are refused in one line or read; `benchmarks/fuzz.py` tries many more."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from calibration.figures import ProfileError
from calibration.profile import load_profile
from chimsim.config import load_cluster
from chimsim.errors import ChimsimError
from chimsim.live.endpoints import command_of
from chimsim.measured import read_run
from chimsim.run_meta import read_timeseries
from chimsim.spec import read_document, spec_from
from tests.chimsim.fuzz_kinds import READERS, kinds
from tests.chimsim.fuzzed import Kind, tried
from traces import TraceError, files, read_trace
from traces.readers import import_trace, servegen

NAMES = (
    "trace.jsonl", "trace.jsonl.gz", "trace.parquet", "cluster.toml", "live.toml", "spec.toml", "experiment.toml",
    "profile.toml", "questions.jsonl", "prompts.toml", "parameters.toml", "model manifest", "results manifest",
    "cell summary", "cell table", "measured requests", "measured vllm bench", "engine settings", "timeseries.csv",
    "raw measurements", "model config.json", *(f"import {name}" for name in READERS),
)  # fmt: skip


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("fuzz")
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        return kinds(home)


def test_every_kind_is_tried(known: dict[str, Kind]) -> None:
    assert set(NAMES) == set(known)


@pytest.mark.parametrize("name", NAMES)
@settings(
    max_examples=20,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=list(HealthCheck),
    deadline=None,
)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_wrong_file_is_refused_or_read(
    name: str, seed: int, known: dict[str, Kind], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What fails fails again with ``benchmarks/fuzz.py --cases 1 --seed SEED --only NAME``."""
    folder = tmp_path_factory.mktemp("case")
    try:
        tried(Random(seed), known[name], folder)
    finally:
        shutil.rmtree(folder)


CLUSTER = '[[engine]]\nmodel = "qwen7b"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = " + "[" * 100_000, "nested too deeply"),
        (f"x = {'9' * 5000}", "4300 digits"),
        (f"x = 0x{'f' * 5000}", "an integer of more than 64 bits"),
        ('name = "' + "\ufffe" * 3, "not valid TOML"),
        (CLUSTER + 'profile = "a\\u0000.toml"', "cannot be read: embedded null"),
        (CLUSTER + f'profile = "{"x" * 5000}"', "cannot be read"),
    ],
)
def test_toml_that_no_parser_likes(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ChimsimError, match=message):
        load_cluster(tmp_path / "x.toml")
    if not text.startswith(CLUSTER):
        with pytest.raises(ChimsimError, match=message.replace("not valid TOML", "spec")):
            read_document(tmp_path / "x.toml")


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(CLUSTER, encoding="utf-8-sig")
    assert load_cluster(tmp_path / "x.toml").models == ("Qwen2.5-7B",)


@pytest.mark.parametrize("launch", ["serve {prot}", "serve {", "serve 'x", "serve {port.x}", "a\\u0000b"])
def test_a_launch_command_that_cannot_be(tmp_path: Path, launch: str) -> None:
    (tmp_path / "x.toml").write_text(f'{CLUSTER}url = "http://h:1"\nlaunch = "{launch}"\n')
    ((spec, address),) = load_cluster(tmp_path / "x.toml").addressed()
    with pytest.raises(ChimsimError, match="launch is"):
        command_of(spec, address)


def test_settings_that_would_fill_the_memory(tmp_path: Path) -> None:
    profile = Path(files.__file__).parents[1] / "calibration" / "profiles" / "rtx-a6000-qwen2.5-7b.toml"
    text = profile.read_text().replace(
        "max_num_batched_tokens = { value = 2048", "max_num_batched_tokens = { value = 2e12"
    )
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(ProfileError, match=r"max_num_batched_tokens.*at most 1,048,576"):
        load_profile(tmp_path / "p.toml")


def test_a_grid_of_too_many_cells_is_refused_before_it_is_made() -> None:
    from chimsim.grid import plan

    keys = {"trace": "apps", "combo": "qwen7b", "policy": "fcfs", "seeds": 10_000, "rps": [1, 2, 3, 4, 5, 6]}
    with pytest.raises(ChimsimError, match="multiply to 60,000 cells"):
        plan(spec_from(keys))


def test_a_line_that_would_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1000)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b"\n\n" + b" " * 5000))
    with pytest.raises(TraceError, match=r"x.jsonl.gz:3: a line of more than 1,000 bytes"):
        read_trace(tmp_path / "x.jsonl.gz")


def test_a_rhythm_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servegen, "MOST_CALLS", 2000)
    (tmp_path / "s.csv").write_text("0,2.0,9,Weibull,0.01,1\n600,1,1,Gamma,1,1\n")
    with pytest.raises(TraceError, match=r"s.csv:1: row: expected at most 2,000 calls in a window of 600 s"):
        import_trace(tmp_path / "s.csv", "servegen", ["m"])


def test_a_table_with_ragged_rows(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("time_s,running\n0,1,2,3\n")
    with pytest.raises(ChimsimError, match="column waiting is missing; found time_s, running"):
        read_timeseries(tmp_path / "t.csv")


def test_starts_that_are_no_list(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text('{"start_times": 3, "input_lens": [], "output_lens": [], "ttfts": [], "itls": []}')
    with pytest.raises(ChimsimError, match="start_times is 3; expected a list"):
        read_run(tmp_path / "b.json")
