"""Replay and comparison: our own runs come back with no error, changed ones with the error that was put in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.profile import EngineProfile
from chimsim.config import EngineSpec
from chimsim.errors import ChimsimError
from chimsim.measured import MeasuredRun, Record, read_run, write_records
from chimsim.run_meta import read_engine_file, read_timeseries, resolve
from chimsim.validate_cli import clock_offset_s
from chimsim.validation import METRICS, Comparison, compare, relative_errors, replay
from tests.chimsim.measured_runs import bench, busy_engine, llmservingsim, made_run, own, records_of, simulated
from tests.chimsim.worlds import engine, profile, slow_profile

BENCH = Path(__file__).resolve().parents[3] / "shared" / "data" / "llmservingsim" / "bench"


@pytest.fixture(scope="module")
def requests() -> pd.DataFrame:
    return made_run()


def run_of(path: Path, records: list[Record]) -> MeasuredRun:
    write_records(path, records)
    return read_run(path)


def held_against(run: MeasuredRun, spec: EngineSpec | None = None) -> Comparison:
    return compare(run, replay(run, spec or busy_engine()))


def errors_of(figures: dict[str, Any]) -> dict[str, float]:
    """Every error in percent that a comparison has, by the path to it."""
    found: dict[str, float] = {}

    def walk(value: object, path: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{path}.{key}")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                walk(item, f"{path}[{index}]")
        elif path.endswith("percent") and value is not None:
            assert isinstance(value, float)
            found[path] = value

    walk(figures, "")
    return found


@pytest.mark.parametrize(
    ("write", "absent"),
    [
        (own, set()),
        (llmservingsim, set()),
        (bench, {"queue_time_s"}),
        (lambda requests, path: bench(requests, path, latencies=True), {"queue_time_s"}),
    ],
)
def test_our_own_run_has_no_error_in_any_format(
    tmp_path: Path, requests: pd.DataFrame, write: Callable[[pd.DataFrame, Path], None], absent: set[str]
) -> None:
    path = tmp_path / "run"
    write(requests, path)
    run = read_run(path)
    figures = held_against(run).figures
    errors = errors_of(figures)
    assert len(errors) > 30
    assert max(map(abs, errors.values())) < 1e-5
    assert set(figures["absent"]) == absent
    assert set(figures["metrics"]) == set(METRICS) - absent
    assert figures["requests"] == len(requests)
    # the run must have been worth replaying
    assert figures["preemptions"]["simulated"] == requests["preemptions"].sum() > 0
    assert (requests["admitted_at"] - requests["ready_at"]).max() > 5


lengths = st.tuples(st.integers(1, 300), st.integers(1, 40))


@given(
    st.lists(st.tuples(lengths, st.floats(0, 0.3)), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(24, 60),
    st.booleans(),
)
@settings(deadline=None)
def test_any_run_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: list[tuple[tuple[int, int], float]],
    slots: int,
    kv_blocks: int,
    prefix_caching: bool,
) -> None:
    spec = engine(slots=slots, kv_blocks=kv_blocks, max_num_batched_tokens=64, prefix_caching=prefix_caching)
    times = np.cumsum([gap for _, gap in drawn]).tolist()
    requests = simulated([both for both, _ in drawn], times, spec)
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    again = replay(run_of(path, records_of(requests)), spec)
    shift = requests["ready_at"].iloc[0]
    for name in ("ready_at", "admitted_at", "first_token_at", "finished_at"):
        np.testing.assert_allclose(again.requests[name], requests[name] - shift, atol=1e-9)
    assert again.requests["preemptions"].tolist() == requests["preemptions"].tolist()
    assert again.load["kv_used_fraction"].iloc[-1] == 0
    assert again.load["running"].iloc[-1] == 0


def test_a_request_that_took_longer_shows_as_that_error(tmp_path: Path, requests: pd.DataFrame) -> None:
    records = records_of(requests)
    changed = records[10]
    assert changed.last_token_at is not None
    assert changed.first_token_at is not None
    latency_s = changed.last_token_at - changed.submitted_at
    records[10] = replace(changed, last_token_at=changed.submitted_at + 1.25 * latency_s)
    comparison = held_against(run_of(tmp_path / "run.jsonl", records))
    figures = comparison.figures
    found = figures["per_request"]["e2el_ms"]
    assert found["max_absolute_percent"] == pytest.approx(20.0, abs=1e-6)
    assert found["mean_absolute_percent"] == pytest.approx(20.0 / 60, abs=1e-6)
    assert found["mean_error_percent"] == pytest.approx(-20.0 / 60, abs=1e-6)
    assert found["p50_absolute_percent"] == pytest.approx(0.0, abs=1e-6)
    assert found["mean_absolute_difference"] == pytest.approx(1000 * 0.25 * latency_s / 60, abs=1e-6)
    assert figures["per_request"]["ttft_ms"]["max_absolute_percent"] == pytest.approx(0.0, abs=1e-6)
    mean_s = float((requests["finished_at"] - requests["ready_at"]).mean())
    expected = 100 * (mean_s / (mean_s + 0.25 * latency_s / 60) - 1)
    assert figures["metrics"]["e2el_ms"]["mean"]["error_percent"] == pytest.approx(expected, abs=1e-6)
    worst = figures["worst"][0]
    assert (worst["request_id"], worst["prompt_tokens"]) == (changed.request_id, changed.prompt_tokens)
    assert worst["error_percent"] == pytest.approx(-20.0, abs=1e-6)
    assert worst["measured_e2el_ms"] == pytest.approx(1250 * latency_s)
    decode_s = changed.last_token_at - changed.first_token_at
    tpot = (decode_s + 0.25 * latency_s) / (changed.output_tokens - 1)
    assert comparison.requests["measured_tpot_ms"][10] == pytest.approx(1000 * tpot)


def test_an_engine_twice_as_slow_is_twice_as_slow(tmp_path: Path) -> None:
    fast = simulated([(8, 21), (8, 41)], [0.0, 10.0], engine(step=slow_profile(0.01)))
    run = run_of(tmp_path / "run.jsonl", records_of(fast))
    figures = held_against(run, engine(step=slow_profile(0.02))).figures
    for name in ("ttft_ms", "tpot_ms", "e2el_ms"):
        for statistic in ("mean", "p50", "p90", "p99"):
            assert figures["metrics"][name][statistic]["error_percent"] == pytest.approx(100.0, abs=1e-6)
    # both were admitted as they came: a relative error of nothing does not exist
    assert figures["metrics"]["queue_time_s"]["mean"] == {"measured": 0.0, "simulated": 0.0, "error_percent": None}
    makespan = figures["totals"]["makespan_s"]
    assert makespan["measured"] == pytest.approx(10.41)
    assert makespan["simulated"] == pytest.approx(10.82)
    assert figures["totals"]["request_throughput"]["measured"] == pytest.approx(2 / 10.41)
    assert figures["totals"]["output_throughput"]["simulated"] == pytest.approx(62 / 10.82)
    assert figures["totals"]["total_token_throughput"]["simulated"] == pytest.approx(78 / 10.82)


def test_what_was_not_stamped_is_absent_and_said_so(tmp_path: Path, requests: pd.DataFrame) -> None:
    records = [replace(record, queued_s=None, first_token_at=None) for record in records_of(requests)]
    figures = held_against(run_of(tmp_path / "run.jsonl", records)).figures
    assert set(figures["absent"]) == {"queue_time_s", "ttft_ms", "tpot_ms"}
    assert set(figures["metrics"]) == set(figures["per_request"]) == {"e2el_ms"}
    assert figures["load"]["running"]["mean_measured"] is None
    assert figures["load"]["in_system"]["mean_absolute_difference"] == pytest.approx(0.0, abs=1e-9)


def test_a_metric_is_compared_over_the_requests_that_have_it(tmp_path: Path, requests: pd.DataFrame) -> None:
    records = records_of(requests)
    records[:50] = [replace(record, queued_s=None) for record in records[:50]]
    figures = held_against(run_of(tmp_path / "run.jsonl", records)).figures
    waits = (requests["admitted_at"] - requests["ready_at"])[50:]
    assert figures["metrics"]["queue_time_s"]["mean"]["simulated"] == pytest.approx(waits.mean())
    assert figures["per_request"]["queue_time_s"]["requests"] == 10


def test_recorded_cache_hits_are_not_computed_again(tmp_path: Path) -> None:
    spec = engine(kv_blocks=100)
    record = Record("r", "A", "e", 0.0, 400, 1, 325, 0.0, 1.0, 1.0)
    again = replay(run_of(tmp_path / "run.jsonl", [record]), spec)
    # whole blocks only: 20 of 16 tokens
    assert again.requests["cached_tokens"].tolist() == [320]
    assert again.requests["first_token_at"][0] == pytest.approx(profile().mixed_step_s(0, 0, [(80, 320)]))
    assert again.load["kv_used_fraction"].max() == pytest.approx(25 / 100)
    figures = held_against(run_of(tmp_path / "run.jsonl", [record]), spec).figures
    assert figures["cached_tokens"] == {"measured": 325, "simulated": 320}


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_recorded_hits_keep_the_books_of_the_blocks(
    tmp_path: Path, requests: pd.DataFrame, prefix_caching: bool
) -> None:
    records = [
        replace(record, cached_tokens=record.prompt_tokens * (i % 3) // 3)
        for i, record in enumerate(records_of(requests))
    ]
    spec = replace(busy_engine(), prefix_caching=prefix_caching)
    again = replay(run_of(tmp_path / "run.jsonl", records), spec)
    used = again.load["kv_used_fraction"]
    assert used.iloc[-1] == 0
    assert 0 <= used.min() <= used.max() <= 1
    assert again.requests["preemptions"].sum() > 0
    recorded = np.array([record.cached_tokens for record in records]) // 16 * 16
    assert (again.requests["cached_tokens"] >= recorded - 16).all()


def test_a_request_that_cannot_fit_says_which_settings_are_wrong(tmp_path: Path, requests: pd.DataFrame) -> None:
    run = run_of(tmp_path / "run.jsonl", records_of(requests))
    with pytest.raises(ChimsimError, match=r"request r\d+ .* does not fit .*give the run's own settings"):
        replay(run, engine(kv_blocks=60))


def test_load_over_time_is_counted_alike_on_both_sides(tmp_path: Path, requests: pd.DataFrame) -> None:
    run = run_of(tmp_path / "run.jsonl", records_of(requests))
    again = replay(run, busy_engine())
    times = np.arange(0.5, float(run.requests["finished_at"].max()), 1.0)
    series = pd.DataFrame({"time_s": times, "running": 3.0, "waiting": 1.0, "kv_used_fraction": np.nan})
    comparison = compare(run, again, series)
    load = comparison.load
    ready, finished = run.requests["ready_at"].to_numpy(), run.requests["finished_at"].to_numpy()
    present = [int(((ready <= time) & (finished > time)).sum()) for time in times]
    np.testing.assert_array_equal(load["simulated_in_system"], present)
    np.testing.assert_array_equal(load["simulated_running"] + load["simulated_waiting"], present)
    assert load["simulated_running"].max() == 8
    assert (load["simulated_waiting"] >= 0).all()
    assert 0.5 < load["simulated_kv_used_fraction"].max() <= 1
    figures = comparison.figures["load"]
    assert figures["running"]["mean_measured"] == 3.0
    assert figures["in_system"]["mean_measured"] == 4.0
    assert figures["kv_used_fraction"]["mean_measured"] is None


def test_relative_errors_of_nothing_are_none() -> None:
    np.testing.assert_array_equal(
        relative_errors(np.array([0.0, 2.0, np.nan]), np.array([1.0, 1.0, 1.0])), [np.nan, -50.0, np.nan]
    )


@pytest.mark.parametrize(
    ("gpu", "bandwidth", "operations", "queue_s", "tpot_ms", "makespan_s"),
    [("RTX4090", 1.008e12, 1.65e14, 65.19, 32.4, 183.6), ("RTXPRO6000", 1.792e12, 4.0e14, 6.98, 32.5, 65.9)],
)
def test_public_runs_are_read_and_lie_on_one_clock(
    gpu: str, bandwidth: float, operations: float, queue_s: float, tpot_ms: float, makespan_s: float
) -> None:
    """Means as published beside the data; the load that its client sampled is what the stamps say."""
    folder = BENCH / gpu / "Llama-3.1-8B" / "vllm"
    if not folder.is_dir():
        pytest.skip("the public runs are not here")
    run = read_run(folder / "requests.jsonl")
    file = read_engine_file(folder / "meta.json")
    kv_s = 4096 / bandwidth
    roofline = EngineProfile(
        model="Llama-3.1-8B", gpu=gpu, layers=32, num_kv_tokens=400_000, max_model_len=131_072,
        dense=((1, 1.6e10 / bandwidth), (128, 1.6e10 / bandwidth), (2048, 1.6e10 * 2048 / operations)),
        a2=kv_s, w1=4 * 4096 / operations, w2=kv_s, m1=2 * kv_s,
    )  # fmt: skip
    spec, _ = resolve(roofline, {}, file)
    load = read_timeseries(folder / "timeseries.csv")
    load["time_s"] -= clock_offset_s(run, file)
    comparison = compare(run, replay(run, spec), load)
    figures = comparison.figures
    assert figures["requests"] == 300
    assert not figures["absent"]
    assert figures["metrics"]["queue_time_s"]["mean"]["measured"] == pytest.approx(queue_s, rel=0.005)
    assert figures["metrics"]["tpot_ms"]["mean"]["measured"] == pytest.approx(tpot_ms, rel=0.005)
    assert figures["totals"]["makespan_s"]["measured"] == pytest.approx(makespan_s, rel=0.001)
    stamped = compare(run, replay(run, spec)).load
    there = np.interp(load["time_s"], stamped["time_s"], stamped["measured_in_system"])
    assert np.abs(there - load["running"] - load["waiting"]).mean() < 1.0
    # data sheets give a bound, which no engine beats and a real one does not miss by much
    assert -45 < figures["metrics"]["e2el_ms"]["mean"]["error_percent"] < 0
