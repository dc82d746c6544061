"""`chimsim validate`: tables in 80 columns, JSON, files, warnings, and one line for what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from chimsim.measured import read_run
from chimsim.run_meta import EngineFile
from chimsim.validate_cli import clock_offset_s
from chimsim.validation import compare, replay
from chimsim.validation_plots import draw_validation
from tests.chimsim.measured_runs import META, bench, bench_result, busy_engine, llmservingsim, made_run, own
from tests.chimsim.small import run_chimsim
from tests.chimsim.worlds import profile

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def requests() -> pd.DataFrame:
    return made_run()


@pytest.fixture
def folder(tmp_path: Path, requests: pd.DataFrame) -> Path:
    """A run in our own format with its settings and its profile."""
    own(requests, tmp_path / "run.jsonl")
    (tmp_path / "meta.json").write_text(json.dumps(META), encoding="utf-8")
    (tmp_path / "a.toml").write_text(profile().to_toml(), encoding="utf-8")
    return tmp_path


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path) -> Main:
    """Run ``chimsim validate`` in the folder: exit code, stdout, stderr."""
    monkeypatch.chdir(folder)

    def run(*arguments: str) -> tuple[int, str, str]:
        given = ["--measured", "run.jsonl", "--profile", "a.toml", "--engine-settings", "meta.json"]
        for option, value in zip(arguments[::2], arguments[1::2], strict=False):
            if option in given:
                given[given.index(option) + 1] = value
        rest = [word for i, word in enumerate(arguments) if arguments[i - i % 2] not in given]
        return run_chimsim(monkeypatch, capsys, "validate", *given, *rest)

    return run


def test_tables_json_and_figures(main: Main, folder: Path) -> None:
    code, out, err = main("--out", "check")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("60 requests of run.jsonl (chimsim) replayed on A, test, simulated in 0.")
    assert any(line.split() == ["max_num_seqs", "8", "meta.json"] for line in lines)
    assert any(line.split() == ["max_model_len", "32,768", "profile"] for line in lines)
    errors = [
        line.split()[-1] for line in lines if line.split()[-3:-2] and line.split()[0] in ("makespan", "TTFT", "p99")
    ]
    assert errors
    assert set(errors) == {"0.0"}
    assert "Preemptions: " in out
    check = folder / "check"
    assert sorted(path.name for path in check.iterdir()) == ["validation.json", "validation.png", "validation.svg"]
    kept = json.loads((check / "validation.json").read_text(encoding="utf-8"))
    assert kept["metrics"]["e2el_ms"]["p99"]["error_percent"] == pytest.approx(0.0, abs=1e-5)
    assert kept["settings"]["num_kv_tokens"] == {"value": 6416, "source": "meta.json"}
    assert kept["measured"]["format"] == "chimsim"
    assert kept["simulation_s"] > 0
    assert (check / "validation.png").read_bytes().startswith(b"\x89PNG")
    assert (check / "validation.svg").read_text(encoding="utf-8").rstrip().endswith("</svg>")


def test_json_alone_goes_to_stdout(main: Main) -> None:
    code, out, err = main("--max-num-seqs", "4", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["settings"]["max_num_seqs"] == {"value": 4, "source": "option"}
    assert found["metrics"]["queue_time_s"]["mean"]["error_percent"] > 5
    assert found["preemptions"]["measured"] is None


def test_a_bench_result_lacks_the_queue_time_and_says_so(main: Main, folder: Path, requests: pd.DataFrame) -> None:
    bench(requests, folder / "bench.json")
    code, out, _ = main("--measured", "bench.json")
    assert code == 0
    assert "queue time: absent, the record has no time of admission." in out
    assert not any(line.startswith("queue time s") for line in out.splitlines())


def test_a_measured_load_is_put_on_the_requests_clock(main: Main, folder: Path) -> None:
    """The records begin 2.5 s after the run's clock does."""
    run = read_run(folder / "run.jsonl")
    assert run.started_at == 2.5
    load = compare(run, replay(run, busy_engine())).load
    series = pd.DataFrame(
        {
            "time_s": load["time_s"] + 2.5,
            "running": load["simulated_running"],
            "waiting": load["simulated_waiting"],
            "kv_used_fraction": load["simulated_kv_used_fraction"],
        }
    )
    series.to_csv(folder / "load.csv", index=False)
    code, out, _ = main("--timeseries", "load.csv", "--json")
    assert code == 0
    for name, found in json.loads(out)["load"].items():
        # the grid lies on step boundaries here and there, where rounding decides
        assert found["mean_absolute_difference"] < 0.02 * max(found["mean_simulated"], 0.05), name


def test_dated_requests_and_settings_share_their_clock(tmp_path: Path, requests: pd.DataFrame) -> None:
    llmservingsim(requests, tmp_path / "requests.jsonl")
    run = read_run(tmp_path / "requests.jsonl")
    assert clock_offset_s(run, None) == 0.0
    # the first request is stamped 2**20 seconds after 1970
    file = EngineFile("meta.json", {"started_at": "1970-01-13T03:16:15Z"})
    assert file.started_at == 2**20 - 1
    assert clock_offset_s(run, file) == 1.0
    assert clock_offset_s(run, EngineFile("meta.json", {"started_at": "2026-01-01T00:00:00Z"})) == 0.0


def test_the_wrong_profile_is_warned_about(main: Main, folder: Path) -> None:
    other = profile("B", gpus=2)
    (folder / "b.toml").write_text(other.to_toml(), encoding="utf-8")
    (folder / "meta.json").write_text(json.dumps({**META, "tensor_parallel_size": 1, "gpu": "H100"}), encoding="utf-8")
    code, out, err = main("--profile", "b.toml", "--json")
    assert code == 0
    assert err.splitlines() == [
        "chimsim: warning: the model is 'A' in the requests and 'B' in the profile",
        "chimsim: warning: the GPU is 'H100' in meta.json and 'test' in the profile",
        "chimsim: warning: tensor parallel is 1 in meta.json and 2 in the profile",
    ]
    assert len(json.loads(out)["warnings"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--measured", "gone.jsonl"), "gone.jsonl: no such file of a measured run"),
        (("--profile", "qwn7b"), "did you mean 'qwen7b'"),
        (("--engine-settings", "gone.json"), "gone.json: no such file of engine settings"),
        (("--timeseries", "gone.csv"), "gone.csv: no such time series"),
        (("--format", "bench"), "format 'bench' is unknown; choose from chimsim, llmservingsim, vllm-bench"),
        (("--num-kv-tokens", "320"), "give the run's own settings"),
        (("--out", __file__), "is a file; expected a folder"),
        (("--max-num-seqs", "0"), "max_num_seqs is 0; expected a whole number above 0"),
    ],
)
def test_what_is_wrong_is_one_line_and_code_2(main: Main, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = main(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("chimsim: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_bench_result_without_start_times_cannot_be_replayed(
    main: Main, folder: Path, requests: pd.DataFrame
) -> None:
    result = bench_result(requests)
    del result["start_times"]
    (folder / "old.json").write_text(json.dumps(result), encoding="utf-8")
    code, _, err = main("--measured", "old.json")
    assert code == 2
    assert "old.json: start_times is missing" in err


def test_the_figure_is_the_same_bytes_whatever_is_recorded(tmp_path: Path, requests: pd.DataFrame) -> None:
    """Also of a run that recorded neither admissions nor load."""
    bench(requests, tmp_path / "bench.json")
    run = read_run(tmp_path / "bench.json")
    comparison = compare(run, replay(run, busy_engine()))
    one, two = tmp_path / "one", tmp_path / "two"
    for place in (one, two):
        place.mkdir()
        files = draw_validation(comparison, place, ("svg",))
        assert [path.name for path in files] == ["validation.svg"]
    assert (one / "validation.svg").read_bytes() == (two / "validation.svg").read_bytes()
