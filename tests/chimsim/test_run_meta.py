"""Engine settings and load of a measured run: who wins, where a value came from, what is warned about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chimsim.errors import ChimsimError
from chimsim.run_meta import EngineFile, disagreements, read_engine_file, read_timeseries, resolve
from tests.chimsim.worlds import profile

NESTED = {
    "model": "org/A",
    "started_at": "2026-01-01T00:00:10Z",
    "engine_kwargs": {"max_num_seqs": 64, "max_num_batched_tokens": None, "tensor_parallel_size": 1},
    "kv_cache": {"num_gpu_blocks": 101, "block_size": 32, "num_kv_tokens": None, "enable_prefix_caching": False},
    "resolved_config": {"scheduler_config": {"max_num_batched_tokens": 1024, "max_num_seqs": 48, "policy": "fcfs"}},
    "hardware": {"device_name": "NVIDIA TEST"},
}


def by_name(options: dict[str, int | bool | None], tree: dict[str, Any] | None) -> dict[str, tuple[Any, str]]:
    file = EngineFile("meta.json", tree) if tree is not None else None
    _, settings = resolve(profile(), options, file)
    return {setting.name: (setting.value, setting.source) for setting in settings}


def test_options_go_before_the_file_and_the_file_before_the_profile() -> None:
    assert by_name({"max_num_seqs": 7}, NESTED) == {
        "max_num_seqs": (7, "option"),
        "max_num_batched_tokens": (1024, "meta.json"),
        "num_kv_tokens": (101 * 32, "meta.json"),
        "max_model_len": (32_768, "profile"),
        "block_tokens": (32, "meta.json"),
        "prefix_caching": (False, "meta.json"),
    }
    assert by_name({}, NESTED)["max_num_seqs"] == (48, "meta.json")
    assert by_name({"num_kv_tokens": 3200, "prefix_caching": True}, NESTED) == {
        **by_name({}, NESTED),
        "num_kv_tokens": (3200, "option"),
        "prefix_caching": (True, "option"),
    }
    nothing = by_name({}, None)
    assert nothing["num_kv_tokens"] == (400_000, "profile")
    assert nothing["prefix_caching"] == (True, "default")


def test_the_engine_is_made_of_the_settings() -> None:
    spec, _ = resolve(profile(), {"max_model_len": 3000}, EngineFile("meta.json", NESTED))
    assert (spec.max_num_seqs, spec.max_num_batched_tokens, spec.num_kv_blocks) == (48, 1024, 101)
    assert (spec.block_tokens, spec.prefix_caching, spec.max_model_len) == (32, False, 3000)


def test_flat_files_and_metadata_kept_as_text_serve_too() -> None:
    flat = {"max_num_seqs": "32", "num_kv_tokens": 6400, "enable_prefix_caching": "False", "model_id": "A"}
    found = by_name({}, flat)
    assert found["max_num_seqs"] == (32, "meta.json")
    assert found["num_kv_tokens"] == (6400, "meta.json")
    assert found["prefix_caching"] == (False, "meta.json")


@pytest.mark.parametrize(
    ("options", "tree", "message"),
    [
        ({}, {"max_num_seqs": "many"}, "meta.json: max_num_seqs is 'many'; expected a whole number above 0"),
        ({}, {"num_gpu_blocks": 0}, "meta.json: num_kv_blocks is 0"),
        ({}, {"enable_prefix_caching": 1}, "meta.json: prefix_caching is 1; expected true or false"),
        ({"block_tokens": 0}, None, "block_tokens is 0; expected a whole number above 0"),
        ({"num_kv_tokens": 16}, None, "expected at least 2"),
        ({"max_num_seqs": 4096}, None, "give the run's own with --max-num-batched-tokens"),
    ],
)
def test_wrong_settings_are_said(
    options: dict[str, int | bool | None], tree: dict[str, Any] | None, message: str
) -> None:
    with pytest.raises(ChimsimError) as caught:
        by_name(options, tree)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected an object of engine settings, found list"),
        ('{"max_seqs": 3}', "no engine setting in it; expected max_num_seqs"),
    ],
)
def test_a_file_that_is_none_is_said(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "meta.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ChimsimError) as caught:
        read_engine_file(path)
    assert message in str(caught.value)
    with pytest.raises(ChimsimError, match="no such file of engine settings"):
        read_engine_file(tmp_path / "gone.json")


def test_the_date_of_the_start() -> None:
    assert EngineFile("meta.json", NESTED).started_at == 1767225610.0
    assert EngineFile("meta.json", {}).started_at is None
    with pytest.raises(ChimsimError, match="started_at is 'noon'"):
        _ = EngineFile("meta.json", {"started_at": "noon"}).started_at


def test_a_run_of_the_profiles_model_and_gpu_is_no_disagreement() -> None:
    assert disagreements(profile(), EngineFile("meta.json", NESTED), "A-Instruct") == []
    assert disagreements(profile(), None, None) == []
    long_name = profile("Llama-3.1-8B")
    assert disagreements(long_name, None, "meta-llama/Llama-3.1-8B-Instruct") == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "org/B"}, "the model is 'org/B' in meta.json and 'A' in the profile"),
        ({"hardware": {"device_name": "NVIDIA H100"}}, "the GPU is 'NVIDIA H100' in meta.json and 'test'"),
        ({"engine_kwargs": {"tensor_parallel_size": 2}}, "tensor parallel is 2 in meta.json and 1 in the profile"),
        ({"engine_kwargs": {"data_parallel_size": 4}}, "the run had 4 data-parallel engines"),
        (
            {"resolved_config": {"scheduler_config": {"policy": "priority"}}},
            "the run's queue order was 'priority'; it is replayed first come, first served",
        ),
        ({"engine_kwargs": {"enable_chunked_prefill": False}}, "the run had chunked prefill off"),
    ],
)
def test_what_the_replay_cannot_be_is_warned_about(change: dict[str, Any], message: str) -> None:
    found = disagreements(profile(), EngineFile("meta.json", NESTED | change), None)
    assert len(found) == 1
    assert message in found[0]


def test_the_models_of_requests_and_settings_are_both_looked_at() -> None:
    found = disagreements(profile("Other"), EngineFile("meta.json", NESTED), "A")
    assert found == [
        "the model is 'A' in the requests and 'Other' in the profile",
        "the model is 'org/A' in meta.json and 'Other' in the profile",
    ]


def test_time_series_of_both_kinds(tmp_path: Path) -> None:
    path = tmp_path / "load.csv"
    path.write_text("t,gen_throughput,running,waiting,kv_cache_pct\n1.0,5,2,3,50\n2.0,5,1,0,25\n", encoding="utf-8")
    load = read_timeseries(path)
    assert load["time_s"].tolist() == [1.0, 2.0]
    assert load["kv_used_fraction"].tolist() == [0.5, 0.25]
    path.write_text("time_s,running,waiting,kv_used_fraction\n1.0,2,3,0.5\n", encoding="utf-8")
    assert read_timeseries(path)["kv_used_fraction"].tolist() == [0.5]
    path.write_text("t,running,waiting,kv_cache_pct\n1.0,2,3,0\n2.0,0,0,0\n", encoding="utf-8")
    np.testing.assert_array_equal(read_timeseries(path)["kv_used_fraction"], [np.nan, np.nan])
    path.write_text("t,running,waiting\n1.0,2,3\n", encoding="utf-8")
    assert read_timeseries(path)["kv_used_fraction"].isna().all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no sample in it"),
        ("t,running\n1,2\n", "column waiting is missing; found t, running"),
        ("t,running,waiting\n1,2,x\n", ":2: waiting is 'x'; expected a number from 0 on"),
        ("t,running,waiting\n1,2\n", ":2: waiting is None"),
        ("t,running,waiting\n2,1,1\n1,1,1\n", ":3: time runs backwards"),
        ("t,running,waiting,kv_cache_pct\n1,1,1,101\n", ":2: kv_cache_pct is 101; expected 0 to 100"),
        ("t,running,waiting,kv_used_fraction\n1,1,1,50\n", ":2: kv_used_fraction is 50; expected 0 to 1"),
    ],
)
def test_a_time_series_that_is_none_is_said(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "load.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ChimsimError) as caught:
        read_timeseries(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
