"""Fits give known coefficients back from operation tables, and say how well they fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.engine_profile import EngineProfile
from calibration.figures import ProfileError
from calibration.fit import Cell, Residuals, fit_operations, thinned
from calibration.operations import read_tables
from tests.calibration import tables as known

LAYERS = 10
ROOM: dict[str, Any] = {"model": "m", "gpu": "g", "num_kv_tokens": 100_000, "max_model_len": 8192}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> EngineProfile:
    folder = known.write_tables(tmp_path_factory.mktemp("ops") / "tp1", skew=True)
    return EngineProfile(**ROOM, **fit_operations(read_tables(folder), LAYERS).numbers)


def step_us(n: int, context: int, chunks: list[tuple[int, int]], excess: int = 0) -> float:
    """What the tables' step takes, with one chunk at most."""
    tokens = n + sum(c for c, _ in chunks)
    total = LAYERS * known.block_us(tokens) + known.once_us(tokens) + known.rows_us(n + len(chunks))
    if not chunks:
        return total + LAYERS * known.decode_us(n, context + 0.2 * excess / n)  # type: ignore[arg-type]
    ((chunk, before),) = chunks
    attention = known.chunk_us(chunk, before)
    if n:
        attention += known.mixed_us(n, context + 0.4 * excess / n, chunk)  # type: ignore[arg-type]
    return total + LAYERS * attention


@pytest.mark.parametrize("n", [1, 2, 8, 13, 32])
@pytest.mark.parametrize("context", [16, 300, 4000])
def test_a_pure_decode_step_is_the_sum_of_its_operations(fitted: EngineProfile, n: int, context: int) -> None:
    assert fitted.mixed_step_s(n, n * context, []) * 1e6 == pytest.approx(step_us(n, context, []), rel=0.006)


@pytest.mark.parametrize(("chunk", "before"), [(16, 0), (100, 0), (256, 900), (1024, 4096)])
@pytest.mark.parametrize(("n", "context"), [(0, 0), (4, 256), (16, 1024), (24, 2000)])
def test_a_mixed_step_is_too(fitted: EngineProfile, chunk: int, before: int, n: int, context: int) -> None:
    step_s = fitted.mixed_step_s(n, n * context, [(chunk, before)])
    assert step_s * 1e6 == pytest.approx(step_us(n, context, [(chunk, before)]), rel=0.02)


def test_unequal_lengths_cost_their_share_of_the_longest(fitted: EngineProfile) -> None:
    assert fitted.skewed
    for chunks in ([], [(256, 0)]):
        step_s = fitted.mixed_step_s(16, 16 * 1000, chunks, excess_tokens=16 * 500)
        assert step_s * 1e6 == pytest.approx(step_us(16, 1000, chunks, excess=16 * 500), rel=0.01)


def test_the_fixed_cost_of_prefill_is_paid_once_a_step(fitted: EngineProfile) -> None:
    one, two = (fitted.mixed_step_s(0, 0, chunks) for chunks in ([(128, 0)], [(64, 0), (64, 0)]))
    assert fitted.chunk is not None
    assert fitted.sequences is not None
    more_rows = fitted.sequences.at(2) - fitted.sequences.at(1)
    attention = [LAYERS * fitted.chunk.at(tokens)[0] for tokens in (128, 64)]
    assert two - one == pytest.approx(more_rows + 2 * attention[1] - attention[0])


def test_exact_tables_leave_no_residuals(tmp_path: Path) -> None:
    fit = fit_operations(read_tables(known.write_tables(tmp_path / "tp1")), LAYERS)
    by_part = {part.part: part for part in fit.residuals}
    for name in ("dense", "sequences", "decode attention", "prefill attention", "whole decode step"):
        assert by_part[name].p95 < 0.006, name
    assert by_part["mixed attention"].p95 < 0.06


def test_a_kernel_that_bends_is_fitted_where_contexts_usually_are(tmp_path: Path) -> None:
    def bent(n: int, context: int) -> float:
        return known.decode_us(n, max(context, 200)) if context < 4096 else 1.5 * known.decode_us(n, context)

    folder = known.write_tables(tmp_path / "tp1", attention=bent)
    fit = fit_operations(read_tables(folder), LAYERS)
    residuals = next(part for part in fit.residuals if part.part == "decode attention")
    assert residuals.worst(1)[0].label.endswith("of 16")
    assert residuals.bias != 0.0


def test_a_part_that_was_not_measured_is_named(tmp_path: Path) -> None:
    tables = read_tables(known.write_tables(tmp_path / "tp1"))
    attention = tables.attention
    with pytest.raises(ProfileError, match=r"attention.csv has no pure decode row"):
        fit_operations(replace(tables, attention=attention[attention["chunk"] > 0]), LAYERS)
    with pytest.raises(ProfileError, match=r"attention.csv has no prefill with decodes row"):
        fit_operations(replace(tables, attention=attention[(attention["chunk"] == 0) | (attention["batch"] == 0)]), 1)


def test_residuals_are_relative() -> None:
    cells = tuple(Cell(str(i), 1.0, 1.0 + e) for i, e in enumerate((-0.1, 0.0, 0.02, 0.3)))
    part = Residuals("x", cells)
    assert part.median == pytest.approx(0.06)
    assert part.bias == pytest.approx(0.01)
    assert [cell.label for cell in part.worst(2)] == ["3", "0"]


@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=30))
def test_thinning_keeps_every_entry_within_its_bound(factors: list[float]) -> None:
    series = pd.Series(np.cumprod(factors), index=np.arange(1, len(factors) + 1), dtype=float)
    points, residuals = thinned("x", "tokens", series)
    assert points[-1][1] >= points[-2][1]  # noise at the end is not continued downwards
    before_end = residuals.cells[: points[-2][0]]
    assert max(abs(cell.error) for cell in before_end) < 0.0031
