"""Fitting a profile to raw measurements: a known law comes back, outliers and missing parts are met."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.engine_profile import EngineProfile
from calibration.figures import ProfileError
from calibration.measured_fit import fit_raw, steps_of, typical
from calibration.profile import load_profile
from calibration.raw_measurements import Header, Measurement, Raw, Skipped

HEADER = Header(
    model="tiny",
    gpu="RTX 4090",
    version="0.19.0",
    url="http://localhost:8000",
    date="2026-11-30",
    max_num_seqs=32,
    max_num_batched_tokens=2048,
    num_kv_tokens=40_000,
    block_tokens=16,
    max_model_len=8192,
    gpus=1,
    settings_from={"num_kv_tokens": "reported by /metrics", "max_num_batched_tokens": "assumed: usual"},
    cache_config={"cache_dtype": "auto"},
)
TRUE = EngineProfile(
    model="tiny",
    gpu="RTX 4090",
    dense=((1, 0.0180), (32, 0.0195), (128, 0.030), (2048, 0.210)),
    num_kv_tokens=40_000,
    max_model_len=8192,
    max_num_seqs=32,
    a1=2e-5,
    a2=1.5e-7,
    w0=4e-4,
    w1=3e-9,
    w2=2e-8,
    m0=6e-5,
    m1=3e-7,
)
BATCHES = (1, 2, 4, 8, 16, 32)
PROMPTS = (1, 16, 32, 64, 128, 256, 512, 1024, 1448, 2048, 4096, 6000)


def seconds(measurement: Measurement, profile: EngineProfile = TRUE) -> float:
    """What the stretch takes by a profile."""
    return sum(
        count * profile.mixed_step_s(batch, round(context), chunks)
        for count, batch, context, chunks in steps_of(measurement, profile.max_num_batched_tokens)
    )


def measured(noise: float = 0.0, repeats: int = 3, request_s: float | None = None, seed: int = 1) -> Raw:
    """A whole plan, measured on an engine that follows `TRUE`, each time so much off at most.

    With ``request_s`` the engine keeps its times to itself, and the client's have so much around them.
    """
    random = Random(seed)
    cells = [
        Measurement(f"{n} decodes after {c}", 0, "decode", n, n * (c + 30.0), 0, 0, 50.0, 1.0)
        for n in BATCHES
        for c in (128, 512, 2048)
        if n * c < 38_000
    ]
    cells += [Measurement(f"prefill of {p}", 0, "prefill", 0, 0.0, p, 1, 0.0, 1.0, 1.0) for p in PROMPTS]
    cells += [
        Measurement(f"{p} among {n} after {c}", 0, "mixed", n, n * (c + 20.0), p, 6, 25.0, 1.0)
        for n in (1, 8, 16, 31)
        for c in (128, 1024)
        for p in (64, 256, 1024)
    ]
    found = []
    for repeat in range(repeats):
        for cell in cells:
            time_s = seconds(cell) * (1.0 + noise * random.uniform(-1.0, 1.0))
            if cell.kind == "prefill" and request_s is None:
                found.append(replace(cell, repeat=repeat, seconds=time_s + 0.004, engine_s=time_s))
            else:
                around_s = request_s or 0.0 if cell.kind == "prefill" else 0.0
                found.append(replace(cell, repeat=repeat, seconds=time_s + around_s, engine_s=None))
    return Raw(HEADER, tuple(found), (Skipped("32 decodes after 2048", 0, "does not fit"),))


def differences(profile: EngineProfile) -> list[float]:
    """Relative errors against the true law where the fit saw nothing: other batches, contexts and chunks."""
    steps: list[tuple[int, int, tuple[tuple[int, int], ...]]] = [
        (n, n * c, ()) for n in (3, 6, 12, 24) for c in (200, 900)
    ]
    steps += [(0, 0, ((p, k),)) for p in (90, 700, 1700) for k in (0, 2000)]
    steps += [(n, n * 400, ((p, 0),)) for n in (4, 20) for p in (100, 800)]
    return [abs(profile.mixed_step_s(*step) / TRUE.mixed_step_s(*step) - 1.0) for step in steps]


def test_a_law_of_the_models_form_comes_back() -> None:
    fit = fit_raw(measured())
    assert max(differences(fit.profile)) < 0.01
    assert fit.profile.a2 == pytest.approx(TRUE.a2, rel=0.02)
    assert fit.profile.m1 == pytest.approx(TRUE.m1, rel=0.05)
    assert fit.request_s is None
    assert max(part.p95 for part in (*fit.in_sample, *fit.held_out)) < 0.01


def test_noise_of_repeats_stays_out_of_the_profile_and_is_reported() -> None:
    fit = fit_raw(measured(noise=0.05))
    assert max(differences(fit.profile)) < 0.06
    assert all(0.01 < share < 0.1 for share in fit.scatter.values())
    assert all(part.median < 0.05 for part in fit.held_out)


def test_a_stalled_repeat_does_not_count_and_a_stalled_cell_hardly() -> None:
    raw = measured()
    stalled = [
        replace(m, seconds=m.seconds * 5, engine_s=None if m.engine_s is None else m.engine_s * 5)
        if m.repeat == 2 or m.cell in ("8 decodes after 512", "prefill of 256")
        else m
        for m in raw.measurements
    ]
    fit = fit_raw(Raw(HEADER, tuple(stalled), ()))
    assert max(differences(fit.profile)) < 0.05


def test_held_out_cells_are_not_in_the_fit_that_they_judge() -> None:
    """A cell that was held out and is wrong shows in full; the cells fitted do not bend towards it."""
    raw = measured()
    clean = fit_raw(raw)
    victim = clean.held_out[0].cells[1].label
    spoilt = tuple(replace(m, seconds=m.seconds * 1.5) if m.cell == victim else m for m in raw.measurements)
    fit = fit_raw(Raw(HEADER, spoilt, ()))
    worst = fit.held_out[0].worst(1)[0]
    assert worst.label == victim
    assert worst.error == pytest.approx(1 / 1.5 - 1, abs=0.01)
    assert fit.in_sample == clean.in_sample
    labels = [{cell.label for part in parts for cell in part.cells} for parts in (clean.in_sample, clean.held_out)]
    assert not labels[0] & labels[1]
    assert len(labels[1]) >= len(labels[0]) / 3


def test_what_a_request_costs_around_the_engine_is_kept_out_of_the_profile() -> None:
    fit = fit_raw(measured(request_s=0.006))
    assert fit.request_s == pytest.approx(0.006, abs=5e-4)
    assert max(differences(fit.profile)) < 0.02


def test_the_engines_settings_and_sources_reach_the_profile_file(tmp_path: Path) -> None:
    profile = fit_raw(measured()).profile
    (tmp_path / "p.toml").write_text(profile.to_toml(), encoding="utf-8")
    again = load_profile(tmp_path / "p.toml")
    assert again.digest == profile.digest
    assert (again.num_kv_tokens, again.max_num_seqs, again.block_tokens) == (40_000, 32, 16)
    assert {again.figure(name).provenance for name in ("a2", "w1", "m1", "dense[32]", "num_kv_tokens")} == {"measured"}
    assert again.figure("max_num_batched_tokens").provenance == "assumed"
    source = again.figure("a2").source
    assert all(word in source for word in ("2026-11-30", "RTX 4090", "vLLM 0.19.0", "cache_dtype auto"))


def test_without_a_mixed_phase_its_terms_are_assumed() -> None:
    raw = measured()
    fit = fit_raw(Raw(HEADER, tuple(m for m in raw.measurements if m.kind != "mixed"), ()))
    assert fit.profile.m1 == fit.profile.a2
    assert fit.profile.figure("m1").provenance == "assumed"


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_without_decodes_or_prefills_there_is_no_profile(kind: str) -> None:
    raw = measured()
    with pytest.raises(ProfileError, match=f"no {kind} cell"):
        fit_raw(Raw(HEADER, tuple(m for m in raw.measurements if m.kind != kind), ()))


def test_one_batch_size_is_enough() -> None:
    some = tuple(m for m in measured().measurements if m.kind == "prefill" or m.batch == 1)
    fit = fit_raw(Raw(replace(HEADER, max_num_seqs=1), some, ()))
    assert fit.profile.decode_s_per_token(1, 500) == pytest.approx(TRUE.decode_s_per_token(1, 500), rel=0.01)


def test_the_mean_call_decides_the_batch_that_fits_memory() -> None:
    assert fit_raw(measured()).profile.max_batch_size == 20
    assert fit_raw(measured(), mean_call_tokens=500.0).profile.max_batch_size == 32


@given(st.permutations(range(3)), st.integers(2, 3))
def test_the_typical_repeat_is_one_that_was_measured_and_in_the_middle(order: list[int], repeats: int) -> None:
    cell = Measurement("c", 0, "decode", 1, 100.0, 0, 0, 10.0, 1.0)
    group = [replace(cell, repeat=i, seconds=1.0 + order[i]) for i in range(repeats)]
    chosen = typical(group)
    assert len(chosen) == 1
    assert chosen[0] in group
    assert sum(m.seconds < chosen[0].seconds for m in group) <= repeats // 2
    assert sum(m.seconds > chosen[0].seconds for m in group) <= repeats // 2


@given(st.integers(0, 300), st.integers(1, 9000), st.integers(1, 5))
def test_chunks_fill_the_budget_and_add_up(batch: int, prompt: int, prefills: int) -> None:
    kind = "mixed" if batch else "prefill"
    steps = steps_of(Measurement("c", 0, kind, batch, 10.0, prompt, prefills, 200.0, 1.0), 512)  # type: ignore[arg-type]
    chunks = [chunk for _, _, _, step in steps for chunk in step]
    assert sum(tokens for tokens, _ in chunks) == prompt
    assert all(before == sum(tokens for tokens, _ in chunks[:i]) for i, (_, before) in enumerate(chunks))
    assert all(tokens + batch == 512 for tokens, _ in chunks[:-1])
    if batch:
        assert sum(count for count, *_ in steps) == max(200.0, prefills * len(chunks))
