"""Engine profiles: the step-time law, the shipped numbers, and what a profile file may not say."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.figures import FIELDS, PROVENANCES
from calibration.profile import PROFILES, EngineProfile, ProfileError, find_profile, load_profile

PLAIN = EngineProfile(
    model="m",
    gpu="g",
    dense=((4, 0.010), (8, 0.014), (16, 0.030)),
    num_kv_tokens=100_000,
    max_model_len=8192,
    layers=10,
    host_s=0.001,
    sequence_s=1e-5,
    a0=1e-5,
    a1=2e-6,
    a2=3e-9,
    w0=2e-5,
    w1=4e-10,
    w2=5e-9,
    m0=3e-6,
    m1=6e-9,
    allreduce_base_s=0.0002,
    allreduce_token_s=1e-6,
)
COUNTS = st.integers(0, 300)
CONTEXTS = st.integers(0, 200_000)
CHUNKS = st.lists(st.tuples(st.integers(1, 2048), st.integers(0, 30_000)), max_size=3)
SHIPPED = st.sampled_from(list(PROFILES.values()))


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [(0, 0.010), (1, 0.010), (4, 0.010), (6, 0.012), (8, 0.014), (12, 0.022), (16, 0.030), (20, 0.038), (5000, 9.998)],
)
def test_dense_is_constant_before_linear_between_and_continued_after_its_entries(tokens: int, seconds: float) -> None:
    assert PLAIN.dense_s(tokens) == pytest.approx(seconds)


def test_one_entry_is_a_constant() -> None:
    profile = replace(PLAIN, dense=((1, 0.02),))
    assert {profile.dense_s(tokens) for tokens in (0, 1, 7, 9999)} == {0.02}


def test_tokens_are_padded_to_graph_sizes_up_to_the_largest() -> None:
    profile = replace(PLAIN, capture_tokens=(1, 8, 16))
    assert profile.dense_s(2) == profile.dense_s(8) == 0.014
    assert profile.dense_s(9) == 0.030
    assert profile.dense_s(20) == PLAIN.dense_s(20)


def test_a_pure_decode_step_is_the_formula() -> None:
    expected = 0.001 + 0.012 + 6e-5 + 10 * (1e-5 + 6 * 2e-6 + 3e-9 * 900) + 0.0002 + 6e-6
    assert PLAIN.mixed_step_s(6, 900, []) == pytest.approx(expected, rel=1e-12)


def test_a_mixed_step_is_the_formula() -> None:
    pairs = 5 * (100 + 2.5) + 3 * (0 + 1.5)
    attention = 2e-5 + 4e-10 * pairs + 5e-9 * 100 + 2 * 3e-6 + 6e-9 * 700
    expected = 0.001 + PLAIN.dense_s(10) + 4e-5 + 10 * attention + 0.0002 + 10e-6
    assert PLAIN.mixed_step_s(2, 700, [(5, 100), (3, 0)]) == pytest.approx(expected, rel=1e-12)


@given(SHIPPED, COUNTS, CONTEXTS)
def test_without_chunks_a_mixed_step_is_a_decode_step(profile: EngineProfile, n: int, context: int) -> None:
    assert profile.mixed_step_s(n, context, []) == profile.decode_constant_s(n) + profile.decode_slope_s() * context


@given(SHIPPED, COUNTS, CONTEXTS, CHUNKS, st.integers(1, 5000))
def test_more_work_never_takes_less_time(
    profile: EngineProfile, n: int, context: int, chunks: list[tuple[int, int]], more: int
) -> None:
    step_s = profile.mixed_step_s(n, context, chunks)
    assert 0 < step_s < math.inf
    assert profile.mixed_step_s(n + more, context, chunks) >= step_s
    assert profile.mixed_step_s(n, context + more, chunks) >= step_s
    for index, (c, k) in enumerate(chunks):
        for larger in ((c + more, k), (c, k + more)):
            assert profile.mixed_step_s(n, context, [*chunks[:index], larger, *chunks[index + 1 :]]) >= step_s


def test_steps_beyond_the_lookup_table_follow_the_same_law() -> None:
    wide = replace(PLAIN, max_num_batched_tokens=10_000)
    assert PLAIN.mixed_step_s(3, 10, [(5000, 0)]) == pytest.approx(wide.mixed_step_s(3, 10, [(5000, 0)]))
    assert PLAIN.decode_constant_s(4000) == wide.decode_constant_s(4000)


def test_a_used_profile_is_still_a_value() -> None:
    used = replace(PLAIN)
    used.mixed_step_s(1, 1, [(1, 0)])
    assert used == PLAIN
    assert hash(used) == hash(PLAIN)
    assert pickle.loads(pickle.dumps(used)) == PLAIN


def test_the_measured_ladder_of_the_7b() -> None:
    profile = find_profile("qwen7b")
    ladder = [profile.decode_s_per_token(batch) for batch in (1, 8, 64, 128, 256)]
    assert ladder == pytest.approx([0.0219, 0.0223, 0.0275, 0.0360, 0.0531], abs=1e-12)
    assert all(profile.figure(f"dense[{batch}]").provenance == "measured" for batch in (1, 8, 64, 128, 256))


def test_time_per_token_divides_a_step_by_its_own_batch() -> None:
    profile = find_profile("qwen7b")
    batch = profile.max_batch_size
    assert batch == 256
    assert profile.decode_s_per_token(batch) / batch * 1e3 == pytest.approx(0.207, abs=5e-4)
    assert profile.decode_s_per_token(1) / batch * 1e3 == pytest.approx(0.086, abs=5e-4)


def test_context_adds_to_the_step_time() -> None:
    profile = find_profile("qwen7b")
    read_s = 256 * 1000 * 57344 / (0.84 * 768e9)
    assert profile.decode_s_per_token(256, 1000) - profile.decode_s_per_token(256) == pytest.approx(read_s, rel=1e-3)


def test_the_14b_is_bound_by_kv_memory() -> None:
    profile = find_profile("qwen14b")
    assert profile.max_batch_size == 39
    assert profile.num_kv_tokens == pytest.approx(78_000, rel=0.01)


@pytest.mark.parametrize(
    ("model", "decode_ms", "kv_tokens", "kv_bytes"),
    [
        ("Qwen2.5-1.5B", 4.8, 1.46e6, 28_672),
        ("Qwen2.5-3B", 9.6, 1.05e6, 36_864),
        ("Llama-3.2-3B", 10.0, 335e3, 114_688),
        ("Qwen2.5-7B", 21.9, 517e3, 57_344),
        ("Ministral-8B", 23.2, 196e3, 147_456),
        ("Llama-3.1-8B", 23.8, 220e3, 131_072),
        ("Qwen2.5-14B", 43.4, 78e3, 196_608),
    ],
)
def test_published_facts_of_the_shipped_profiles(model: str, decode_ms: float, kv_tokens: float, kv_bytes: int) -> None:
    profile = PROFILES[model]
    assert profile.decode_s_per_token(1) * 1e3 == pytest.approx(decode_ms, abs=0.06)
    assert profile.num_kv_tokens == pytest.approx(kv_tokens, rel=0.006)
    assert profile.kv_bytes_per_token == kv_bytes
    assert (profile.max_num_seqs, profile.max_num_batched_tokens, profile.block_tokens) == (256, 2048, 16)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_every_shipped_number_says_where_it_comes_from(profile: EngineProfile, tmp_path: Path) -> None:
    rows = profile.provenance()
    assert {row.field for row in rows} >= set(FIELDS)
    assert all(row.provenance in PROVENANCES and row.source and "not stated" not in row.source for row in rows)
    path = tmp_path / "copy.toml"
    path.write_text(profile.to_toml(), encoding="utf-8")
    assert load_profile(path) == profile
    assert load_profile(path).digest == profile.digest


def test_only_models_that_were_measured_say_so() -> None:
    measured = {m for m, p in PROFILES.items() if any(row.provenance == "measured" for row in p.provenance())}
    assert measured == {"Qwen2.5-7B", "Llama-3.1-8B"}


def test_the_digest_follows_the_numbers_and_not_the_words() -> None:
    assert replace(PLAIN, notes="other", aliases=("x",)).digest == PLAIN.digest
    assert replace(PLAIN, m1=PLAIN.m1 * 2).digest != PLAIN.digest
    assert replace(PLAIN, dense=((4, 0.010), (8, 0.0141), (16, 0.030))).digest != PLAIN.digest


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("qwen1.5b", "Qwen2.5-1.5B"),
        ("QWEN7B", "Qwen2.5-7B"),
        ("qwen2.5-7b", "Qwen2.5-7B"),
        ("Qwen/Qwen2.5-14B-Instruct", "Qwen2.5-14B"),
        ("llama3b", "Llama-3.2-3B"),
        ("llama-3.2-3b", "Llama-3.2-3B"),
        ("ministral8b", "Ministral-8B"),
        ("Ministral-8B-Instruct-2410", "Ministral-8B"),
        ("llama8b", "Llama-3.1-8B"),
        ("Meta-Llama-3-8B-Instruct", "Llama-3-8B"),
        ("llama3-70b", "Llama-3-70B"),
    ],
)
def test_models_are_found_by_name_and_alias_in_any_case(name: str, model: str) -> None:
    assert find_profile(name).model == model
    assert load_profile(name) is PROFILES[model]


def test_an_unknown_model_gets_near_names() -> None:
    with pytest.raises(ProfileError, match=r"'qwn7b'; did you mean 'qwen7b'\?"):
        find_profile("qwn7b")
    with pytest.raises(ProfileError, match=r"known: .*Qwen2\.5-7B"):
        find_profile("zzz")
    with pytest.raises(ProfileError, match="no such profile file"):
        load_profile("absent.toml")


TEXT = PROFILES["Qwen2.5-7B"].to_toml()
CAPTURES = 'capture_tokens = { value = [2, 1], provenance = "assumed", source = "x" }'


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.replace("gpus = 1", "gpuss = 1"), r"unknown key: 'gpuss'; did you mean 'gpus'"),
        (lambda t: t.replace("host_s =", "hosts ="), r"unknown key in \[step\]: 'hosts'; did you mean 'host_s'"),
        (lambda t: t.replace("[attention]", "[atention]"), r"'atention'; did you mean 'attention'"),
        (lambda t: t.replace("{ value = 28, prov", "{ valeu = 28, prov"), r"layers: 'valeu'; did you mean"),
        (lambda t: t.replace("value = 28,", "value = 28.5,", 1), r"layers.value is 28.5; expected a whole"),
        (lambda t: t.replace("value = 28,", "value = 0,", 1), r"architecture.layers.value is 0; .* above 0"),
        (lambda t: t.replace("value = 28,", "value = true,", 1), r"architecture.layers.value is True"),
        (lambda t: t.replace("value = 28,", 'value = "28",', 1), r"architecture.layers.value is '28'"),
        (lambda t: t.replace("value = 0.0219", "value = nan"), r"step.dense entry 1: value is nan"),
        (lambda t: t.replace("value = 0.0219", "value = inf"), r"step.dense entry 1: value is inf"),
        (lambda t: t.replace("value = 0.0219", "value = 0.0"), r"step.dense entry 1: value is 0.0"),
        (lambda t: t.replace("value = 3.175e-09", "value = -3.175e-09"), r"attention.a2.value is -3.175e-09"),
        (lambda t: t.replace("tokens = 8,", "tokens = 64,"), r"entry 3: tokens is 64 after 64; expected a rising list"),
        (lambda t: t.replace("tokens = 8,", "token = 8,"), r"'token'; did you mean 'tokens'"),
        (lambda t: t.replace('"measured"', '"guessed"', 1), r"provenance is 'guessed'; .*measured, scaled, assumed"),
        (lambda t: t.replace('source = "vLLM default"', 'source = " "', 1), r"max_num_seqs.source is ' '"),
        (lambda t: t.replace('model = "Qwen2.5-7B"', 'model = ""'), r"model is ''"),
        (lambda t: t.replace('aliases = ["qwen7b"]', "aliases = [7]"), r"aliases is \[7\]"),
        (lambda t: t.replace("gpus = 1", "gpus = 0"), r"gpus is 0"),
        (lambda t: t.replace("value = 2048,", "value = 128,"), r"max_num_batched_tokens is 128; expected at least"),
        (lambda t: t.replace("value = 517152,", "value = 1000,"), r"num_kv_tokens is 1000"),
        (lambda t: t.replace("value = 0.3104", "value = 0.1"), r"dense ends falling"),
        (lambda t: t.split("[attention]")[0].split("dense =")[0], r"step.dense is missing"),
        (lambda t: t.replace("dense = [", f"{CAPTURES}\ndense = ["),
         r"capture_tokens.value is \[2, 1\]"),
        (lambda t: "\n".join(line for line in t.splitlines() if not line.startswith("layers")),
         r"architecture.layers is missing"),
        (lambda t: t.replace("gpus = 1", "gpus = "), r"not valid TOML: .*line 4"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_by_name_and_key(edit: Callable[[str], str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    changed = edit(TEXT)
    assert changed != TEXT
    path.write_text(changed, encoding="utf-8")
    with pytest.raises(ProfileError, match=rf"mine\.toml: .*{message}"):
        load_profile(path)


def test_capture_sizes_survive_the_file(tmp_path: Path) -> None:
    padded = replace(
        PROFILES["Qwen2.5-7B"],
        capture_tokens=(1, 2, 4, 8),
        origins=(*PROFILES["Qwen2.5-7B"].origins, ("capture_tokens", "assumed", "vLLM default")),
    )
    path = tmp_path / "padded.toml"
    path.write_text(padded.to_toml(), encoding="utf-8")
    assert load_profile(path).capture_tokens == (1, 2, 4, 8)
    assert load_profile(path).digest == padded.digest


def test_numbers_set_in_code_are_checked_too() -> None:
    with pytest.raises(ProfileError, match="host_s is nan"):
        replace(PLAIN, host_s=math.nan)
    with pytest.raises(ProfileError, match="dense is empty"):
        replace(PLAIN, dense=())
    with pytest.raises(ProfileError, match="unknown number 'hostt_s'; did you mean 'host_s'"):
        PLAIN.figure("hostt_s")
