"""Tables in place of straight lines: what lies between and beyond their entries, and what a file may not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.curves import ChunkCurve, DecodeCurve, MixedGrid, RowCurve
from calibration.datasheets import data_sheet
from calibration.engine_profile import EngineProfile
from calibration.figures import ProfileError
from calibration.profile import load_profile
from calibration.scaling import on_other_gpu, tensor_parallel

ROWS = RowCurve((1, 4, 8), (1.0, 4.0, 6.0))
DECODE = DecodeCurve((1, 4), (1.0, 7.0), (0.1, 0.4), (0.0, 0.6))
CHUNK = ChunkCurve((16, 32), (2.0, 6.0), (0.5, 0.7))
MIXED = MixedGrid((1, 3), (10, 20), ((1.0, 2.0), (5.0, 8.0)), (0.0, 0.5), 0.01)
PROFILE = EngineProfile(
    model="m", gpu="RTX 4090", dense=((1, 0.01), (64, 0.02)), num_kv_tokens=100_000, max_model_len=8192, layers=2,
    hidden_size=512, heads=4, kv_heads=4, head_dim=128, parameters=1e9, memory_bytes=24 * 2**30,
    kv_bytes_per_token=4096,
    sequences=ROWS, decode=DECODE, chunk=CHUNK, mixed=MIXED,
    origins=(("mixed", "measured", "test"), ("decode", "measured", "test")),
)  # fmt: skip


def test_rows_are_linear_between_and_proportional_beyond() -> None:
    assert [ROWS.at(n) for n in (0, 1, 2, 4, 6, 8, 16)] == pytest.approx([0, 1, 2, 4, 5, 6, 12])


def test_decodes_interpolate_all_three_columns() -> None:
    assert DECODE.at(1) == (1.0, 0.1, 0.0)
    assert DECODE.at(2) == pytest.approx((3.0, 0.2, 0.2))
    assert DECODE.at(8) == pytest.approx((14.0, 0.4, 0.6))


def test_chunks_leave_their_fixed_cost_to_the_step_and_grow_with_the_square() -> None:
    assert CHUNK.at(5) == CHUNK.at(16) == (0.0, 0.5)
    assert CHUNK.at(24) == pytest.approx((2.0, 0.6))
    assert CHUNK.at(64) == pytest.approx((16.0, 1.4))


def test_the_grid_is_linear_in_both_directions_and_goes_on_in_the_context() -> None:
    assert MIXED.at(0, 0, 0, 100) == 0.0
    assert MIXED.at(1, 15, 0, 0) == pytest.approx(1.5)
    assert MIXED.at(2, 30, 0, 0) == pytest.approx((1.5 + 6.5) / 2)
    assert MIXED.at(1, 30, 0, 0) == pytest.approx(3.0)
    assert MIXED.at(1, 3, 0, 0) == pytest.approx(1.0)
    assert MIXED.at(6, 60, 0, 0) == pytest.approx(10.0)
    assert MIXED.at(3, 30, 0, 100) == pytest.approx(5.0 + 3.0)


def test_excess_moves_the_batch_towards_its_longest() -> None:
    assert MIXED.at(3, 30, 30, 0) == pytest.approx(MIXED.at(3, 45, 0, 0))
    step_s = PROFILE.decode_constant_s(4, 100)
    assert step_s - PROFILE.decode_constant_s(4) == pytest.approx(2 * 0.4 * 0.6 * 100)


@given(st.integers(1, 9), st.integers(0, 500), st.integers(0, 900))
def test_a_pure_decode_step_stays_linear_in_its_context(n: int, context: int, excess: int) -> None:
    expected = PROFILE.decode_constant_s(n, excess) + PROFILE.decode_slope_s(n) * context
    assert PROFILE.mixed_step_s(n, context, [], excess) == expected


def test_a_mixed_step_is_the_sum_of_the_tables() -> None:
    attention = 2.0 + CHUNK.at(24)[0] + CHUNK.at(24)[1] * 7 + CHUNK.at(16)[0] + MIXED.at(3, 40, 5, 40)
    expected = PROFILE.dense_s(43) + ROWS.at(5) + 2 * attention
    assert PROFILE.mixed_step_s(3, 40, [(24, 7), (16, 0)], 5) == pytest.approx(expected)


def test_a_file_keeps_the_tables(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(PROFILE.to_toml(), encoding="utf-8")
    loaded = load_profile(path)
    assert (loaded.mixed, loaded.decode, loaded.chunk, loaded.sequences) == (MIXED, DECODE, CHUNK, ROWS)
    assert loaded.digest == PROFILE.digest
    assert loaded.figure("mixed").provenance == "measured"
    assert loaded.to_toml() == path.read_text(encoding="utf-8")


def test_more_gpus_and_another_gpu_scale_the_tables() -> None:
    two = tensor_parallel(PROFILE, 2)
    assert two.decode_slope_s(4) == pytest.approx(PROFILE.decode_slope_s(4) / 2)
    assert two.figure("decode").provenance == "scaled"
    here, there = data_sheet("NVIDIA GeForce RTX 4090"), data_sheet("RTXPRO6000")
    assert here is not None
    assert there is not None
    moved = on_other_gpu(PROFILE, here, there)
    assert moved.gpu == "RTX PRO 6000"
    assert moved.decode_slope_s(4) == pytest.approx(PROFILE.decode_slope_s(4) * 1008 / 1792, rel=1e-4)
    assert moved.dense[0][1] == pytest.approx(0.01 * 1008 / 1792, rel=1e-3)
    assert moved.dense[1][1] - moved.dense[0][1] == pytest.approx(0.01 * 165.2 / 503.8, rel=2e-3)
    assert moved.figure("mixed").provenance == "scaled"
    assert moved.num_kv_tokens > 4 * PROFILE.num_kv_tokens


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: DecodeCurve((4, 2), (1.0, 1.0), (0.0, 0.0), (0.0, 0.0)), r"decode.batch is \[4, 2\]; expected a ris"),
        (lambda: DecodeCurve((1, 2), (1.0,), (0.0, 0.0), (0.0, 0.0)), "decode.base_s has 1 entries; expected 2"),
        (lambda: RowCurve((1, 2), (1.0, -1.0)), "sequences.total_s has -1.0; expected numbers of at least 0"),
        (lambda: ChunkCurve((), (), ()), r"chunk.tokens is \[\]; expected a rising list"),
        (lambda: MixedGrid((1,), (1, 2), ((1.0,),), (0.0,), 0.0), "a row of 1 entries; expected 2, one a context"),
        (lambda: MixedGrid((1,), (1,), ((1.0,),), (), 0.0), "mixed.skew has 0 entries; expected 1, one a batch"),
        (lambda: RowCurve.read({"rows": [1], "total_s": [1], "x": 1}), "unknown key 'x' in sequences"),
        (lambda: RowCurve.read({"rows": [1]}), "sequences lacks total_s"),
        (lambda: RowCurve.read({"rows": [1], "total_s": ["fast"]}), "sequences.total_s has 'fast'; expected a number"),
        (lambda: RowCurve.read({"rows": [1.5], "total_s": [1]}), r"sequences.rows is \[1.5\]; expected a rising list"),
        (lambda: on_profile(mixed=None), "attention.chunk and attention.mixed go together"),
        (lambda: on_profile(a2=1.0), "a2 beside the table decode"),
        (lambda: on_profile(sequence_s=1.0), "sequence_s beside the table sequences"),
    ],
)  # fmt: skip
def test_tables_that_make_no_sense_are_refused(made: Any, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        made()


def on_profile(**numbers: Any) -> EngineProfile:
    from dataclasses import replace

    return replace(PROFILE, **numbers)


def test_a_file_with_a_wrong_table_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(PROFILE.to_toml().replace("chunk_token_s = 0.01", "chunk_token_s = 'x'"), encoding="utf-8")
    with pytest.raises(ProfileError, match=r"p.toml: mixed.chunk_token_s has 'x'; expected a number"):
        load_profile(path)
    path.write_text(PROFILE.to_toml().replace("rows = [1, 4, 8], ", ""), encoding="utf-8")
    with pytest.raises(ProfileError, match=r"p.toml: sequences lacks rows"):
        load_profile(path)
