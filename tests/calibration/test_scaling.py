"""Scaled profiles: the shipped files follow the stated rules, and tensor parallelism divides and adds."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from calibration.profile import PROFILES, EngineProfile, ProfileError
from calibration.scaling import A6000, Architecture, kv_tokens, scaled_profile, tensor_parallel

BASE = PROFILES["Qwen2.5-7B"]
SCALED = ["Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen2.5-14B", "Llama-3.2-3B", "Ministral-8B", "Llama-3-70B"]


def card_of(profile: EngineProfile) -> Architecture:
    names = [field.name for field in fields(Architecture) if field.name != "context_source"]
    return Architecture(**{name: getattr(profile, name) for name in names})


@pytest.mark.parametrize("model", SCALED)
def test_the_shipped_file_follows_the_rules(model: str) -> None:
    shipped = PROFILES[model]
    made = scaled_profile(BASE, card_of(shipped), gpus=shipped.gpus)
    assert made.num_kv_tokens == shipped.num_kv_tokens
    for n, context, chunks in ((1, 100, []), (64, 64_000, []), (16, 9000, [(2000, 500)])):
        assert made.mixed_step_s(n, context, chunks) == pytest.approx(
            shipped.mixed_step_s(n, context, chunks), rel=1e-3
        )


def test_scaling_the_base_to_itself_gives_it_back() -> None:
    same = scaled_profile(BASE, card_of(BASE))
    for tokens, seconds in BASE.dense:
        assert same.dense_s(tokens) == pytest.approx(seconds, rel=2e-3)
    assert all(row.provenance != "measured" for row in same.provenance())


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_the_parameters_fit_the_shapes(profile: EngineProfile) -> None:
    assert profile.kv_bytes_per_token == 2 * profile.layers * profile.kv_heads * profile.head_dim * 2
    embedding = profile.parameters - profile.block_parameters - profile.head_parameters
    tied = abs(embedding) < 0.002 * profile.parameters
    assert tied or embedding == pytest.approx(profile.head_parameters, rel=0.02)


def test_llama_3_8b_is_llama_3_1_8b_with_less_context() -> None:
    old, new = PROFILES["Llama-3-8B"], PROFILES["Llama-3.1-8B"]
    assert replace(new, model=old.model, max_model_len=8192).digest == old.digest


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"Llama-3-70B on 1 RTX A6000: room for 0 KV tokens; .*use more GPUs"):
        scaled_profile(BASE, card_of(PROFILES["Llama-3-70B"]))


def test_tensor_parallel_divides_the_work_and_adds_the_all_reduce() -> None:
    one = PROFILES["Qwen2.5-14B"]
    two = tensor_parallel(one, 2)
    assert two.gpus == 2
    assert two.decode_slope_s() == pytest.approx(one.decode_slope_s() / 2)
    reduce_s = two.allreduce_base_s + 64 * two.allreduce_token_s
    assert two.decode_constant_s(64) == pytest.approx(one.decode_constant_s(64) / 2 + reduce_s)
    assert two.allreduce_base_s == pytest.approx(2 * 48 * 20e-6)
    assert two.allreduce_token_s == pytest.approx(2 * 48 * 5120 * 2 / 15.75e9, rel=1e-3)
    room = 2 * (0.9 * 48 * 2**30 - 1.5e9) - one.parameters * 2
    assert two.num_kv_tokens == pytest.approx(room / one.kv_bytes_per_token, rel=1e-3)
    assert two.figure("allreduce_base_s").provenance == "assumed"
    assert two.figure("dense[1]").source.endswith("over 2 GPUs")
    assert all("not stated" not in row.source for row in two.provenance())


def test_a_measured_number_that_was_divided_is_scaled() -> None:
    spread = tensor_parallel(BASE, 2)
    assert spread.figure("dense[8]").provenance == "scaled"
    assert spread.figure("m1").provenance == "assumed"


def test_tensor_parallel_of_the_same_degree_changes_nothing() -> None:
    assert tensor_parallel(PROFILES["Llama-3-70B"], 4) is PROFILES["Llama-3-70B"]
    assert tensor_parallel(BASE, 1) is BASE


@pytest.mark.parametrize(
    ("profile", "gpus", "message"),
    [
        (PROFILES["Llama-3-70B"], 8, "is 8, but the profile of Llama-3-70B is of 4 GPUs"),
        (BASE, 3, "is 3; expected a divisor of the 28 heads and 4 KV heads"),
        (replace(BASE, hidden_size=0, parameters=0.0), 2, "needs hidden_size, parameters in the profile"),
    ],
)
def test_tensor_parallel_that_cannot_be_is_refused(profile: EngineProfile, gpus: int, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        tensor_parallel(profile, gpus)


def test_the_example_of_the_readme_runs() -> None:
    readme = (Path(__file__).parents[2] / "calibration" / "README.md").read_text(encoding="utf-8")
    names: dict[str, str] = {}
    exec(readme.split("```python")[1].split("```")[0], names)
    assert names["text"].startswith('model = "Qwen2.5-32B"')


def test_kv_memory_is_in_whole_blocks() -> None:
    tokens = kv_tokens(BASE.parameters, BASE.kv_bytes_per_token, A6000.memory_bytes, 1)
    assert tokens % 16 == 0
    assert tokens == BASE.num_kv_tokens
