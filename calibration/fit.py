"""Fits the step-time model to operation tables: numbers of an engine profile, and how well they fit.

Everywhere the squares of *relative* errors are minimised, under the condition that no time is negative. Attention is
fitted so that the error of the whole step is small: a kernel of 20 us in a step of 20 ms may be wrong, one of 500 us a
layer may not. It reads no files and talks to no engine; provenance and sources are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from calibration.curves import ChunkCurve, DecodeCurve, MixedGrid, RowCurve
from calibration.figures import ProfileError
from calibration.operations import OperationTables

Floats = npt.NDArray[np.float64]

THIN = 0.003
"""Entries of a table are left out where a straight line misses them by less than this share."""
USUAL_CONTEXT = (256, 4096)
"""Decode attention bends: kernels of short contexts are bound by latency. The line is for mean contexts in this range;
cells outside it count a tenth."""
ROUNDS = 6
"""Rounds of the two alternating fits of mixed attention, and of reweighting; both settle within three or four."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One measured time beside its fit, in seconds."""

    label: str
    data_s: float
    fit_s: float

    @property
    def error(self) -> float:
        """fit / data - 1."""
        return self.fit_s / self.data_s - 1.0


@dataclass(frozen=True, slots=True)
class Residuals:
    """How well one part of the model fits its cells: relative errors without sign, and the median with it."""

    part: str
    cells: tuple[Cell, ...]

    @property
    def median(self) -> float:
        """Median of the relative errors without sign."""
        return float(np.median(np.abs(self._errors())))

    @property
    def p95(self) -> float:
        """95th percentile of the relative errors without sign."""
        return float(np.percentile(np.abs(self._errors()), 95))

    @property
    def bias(self) -> float:
        """Median of the relative errors with their sign."""
        return float(np.median(self._errors()))

    def worst(self, count: int = 3) -> list[Cell]:
        """The cells with the largest errors."""
        return sorted(self.cells, key=lambda cell: -abs(cell.error))[:count]

    def _errors(self) -> Floats:
        return np.array([cell.error for cell in self.cells])


@dataclass(frozen=True, slots=True)
class Fit:
    """``numbers`` are keyword arguments of `EngineProfile`; ``residuals`` are by part of the model."""

    numbers: dict[str, Any]
    residuals: tuple[Residuals, ...]


def fit_operations(tables: OperationTables, layers: int) -> Fit:
    """``dense``, ``sequences``, ``decode``, ``chunk`` and ``mixed`` from one-layer tables and the number of layers.

    Raises `ProfileError` where a part of the model was not measured.
    """
    attention = tables.attention
    alone = attention[(attention["chunk"] > 0) & (attention["batch"] == 0)]
    pure = attention[(attention["chunk"] == 0) & (attention["batch"] > 0)]
    both = attention[(attention["chunk"] > 0) & (attention["batch"] > 0)]
    for name, part in (("pure decode", pure), ("prefill", alone), ("prefill with decodes", both)):
        if part.empty:
            raise ProfileError(f"{tables.folder}: attention.csv has no {name} row; expected some")
    dense = tables.block * layers + tables.once
    rest_s = _rest_of_step(tables, layers)
    dense_curve, dense_residuals = thinned("dense", "tokens", dense)
    row_curve, row_residuals = thinned("sequences", "sequences", tables.rows)
    decode = fit_decode(pure, rest_s(pure), _skew_of(tables, "decode"))
    chunk = fit_chunks(alone, rest_s(alone))
    mixed = fit_mixed(both, rest_s(both), chunk, _skew_of(tables, "mixed"))
    kernels = [
        attention_residuals("decode attention", pure, decode, chunk, mixed),
        attention_residuals("prefill attention", alone, decode, chunk, mixed),
        attention_residuals("mixed attention", both, decode, chunk, mixed),
    ]
    steps = [
        _with_rest(kernel, rest_s(part), name)
        for kernel, part, name in zip(kernels, (pure, alone, both), ("decode", "prefill", "mixed"), strict=True)
    ]
    numbers: dict[str, Any] = {
        "layers": layers,
        "dense": dense_curve,
        "sequences": RowCurve(*_columns(row_curve)),
        "decode": decode,
        "chunk": chunk,
        "mixed": mixed,
    }
    return Fit(
        numbers,
        (dense_residuals, row_residuals, *kernels, *steps),
    )


def fit_decode(pure: pd.DataFrame, rest_s: Floats, skew: dict[int, float]) -> DecodeCurve:
    """A straight line in the context for every batch size; ``rest_s`` is the rest of the step, a layer, by row."""
    rows = []
    for batch, places in pure.groupby("batch").indices.items():
        n = int(str(batch))
        part = pure.iloc[places]
        usual = np.where(part["decode_context"].between(*USUAL_CONTEXT), 1.0, 0.1)
        line = _line(n * part["decode_context"], part["seconds"], rest_s[places], usual)
        rows.append((n, *line, _at(skew, n)))
    return DecodeCurve(*_columns(rows))


def fit_chunks(alone: pd.DataFrame, rest_s: Floats) -> ChunkCurve:
    """As `fit_decode`, for every chunk size, never below a smaller one's."""
    rows = []
    for chunk, places in alone.groupby("chunk").indices.items():
        part = alone.iloc[places]
        rows.append((int(str(chunk)), *_line(part["context"], part["seconds"], rest_s[places])))
    tokens, base_s, context_s = _columns(rows)
    return ChunkCurve(tokens, tuple(accumulate(base_s, max)), tuple(accumulate(context_s, max)))


def fit_mixed(both: pd.DataFrame, rest_s: Floats, chunk: ChunkCurve, skew: dict[int, float]) -> MixedGrid:
    """What decodes add, by batch and context: the mean over all chunks, and what each prefill token adds a decode."""
    alone_s = np.array([_chunk_s(chunk, c, k) for c, k in zip(both["chunk"], both["context"], strict=True)])
    seconds = both["seconds"].to_numpy(float)
    weight = (seconds + rest_s) ** -2.0
    pairs = (both["batch"] * both["chunk"]).to_numpy(float)
    groups = both.groupby(["batch", "decode_context"], sort=True)
    index = groups.ngroup().to_numpy()
    count = int(index.max()) + 1
    weights = np.bincount(index, weight, count)
    token_s = 0.0
    for _ in range(ROUNDS):
        added = seconds - alone_s - token_s * pairs
        means = np.maximum(np.bincount(index, weight * added, count) / weights, 0.0)
        rest = seconds - alone_s - means[index]
        token_s = max(float((weight * pairs * rest).sum() / (weight * pairs * pairs).sum()), 0.0)
    grid = both.assign(added_s=means[index]).pivot_table(
        index="batch", columns="decode_context", values="added_s", aggfunc="first"
    )
    grid = grid.interpolate(axis=1, method="index", limit_area="inside").dropna(axis=1, how="any")
    if grid.empty:
        raise ProfileError("prefill with decodes was measured at no context common to all batch sizes; expected some")
    batch = tuple(int(str(n)) for n in grid.index)
    context = tuple(int(str(d)) for d in grid.columns)
    total_s = tuple(tuple(_short(value) for value in row) for row in grid.to_numpy(float))
    return MixedGrid(batch, context, total_s, tuple(_at(skew, n) for n in batch), _short(token_s))


def attention_residuals(
    part: str, table: pd.DataFrame, decode: DecodeCurve, chunk: ChunkCurve, mixed: MixedGrid
) -> Residuals:
    """One layer's attention beside the fit, a cell a row of the table."""
    cells = []
    for row in table.itertuples(index=False):
        c, k, n, d, seconds = (
            getattr(row, name) for name in ("chunk", "context", "batch", "decode_context", "seconds")
        )
        if c:
            fitted = _chunk_s(chunk, c, k) + mixed.at(n, n * d, 0, c)
            label = f"chunk {c} after {k}" + (f" + {n} decodes of {d}" if n else "")
        else:
            base_s, context_s, _ = decode.at(n)
            fitted, label = base_s + context_s * n * d, f"{n} decodes of {d}"
        cells.append(Cell(label, seconds, fitted))
    return Residuals(part, tuple(cells))


def _chunk_s(chunk: ChunkCurve, tokens: int, context: int) -> float:
    base_s, context_s = chunk.at(tokens)
    return chunk.base_s[0] + base_s + context_s * context


def _line(
    x: pd.Series[Any], seconds: pd.Series[Any], rest_s: Floats, counts: Floats | float = 1.0
) -> tuple[float, float]:
    """Offset and slope of the line with the least errors relative to the step, neither of them negative."""
    times = seconds.to_numpy(float)
    if x.nunique() == 1:
        return _short(float(times.mean())), 0.0
    matrix = np.stack([np.ones(len(x)), x.to_numpy(float)], axis=1)
    offset, slope = nonnegative(matrix, times, rest_s, counts)
    return _short(offset), _short(slope)


def nonnegative(
    matrix: Floats,
    seconds: Floats,
    rest_s: Floats | float = 0.0,
    counts: Floats | float = 1.0,
    robust: bool = False,
) -> Floats:
    """Non-negative least squares of errors relative to ``seconds + rest_s``; a row counts as so many.

    ``robust`` reweighs them after Huber, at 1.345 standard deviations.
    """
    from scipy.optimize import nnls

    whole = seconds + rest_s
    # columns of tokens squared and of ones side by side: without scaling the solver's tolerance would cut off terms
    scale = np.abs(matrix / whole[:, None]).max(axis=0)
    scale[scale == 0.0] = 1.0
    relative = matrix / whole[:, None] / scale
    wanted = seconds / whole
    root = np.sqrt(np.broadcast_to(np.asarray(counts, dtype=np.float64), seconds.shape))
    weight = root
    values = np.zeros(matrix.shape[1])
    for _ in range(ROUNDS if robust else 1):
        values, _norm = nnls(relative * weight[:, None], wanted * weight)
        errors = np.abs(relative @ values - wanted)
        deviation = max(float(np.median(errors)) / 0.6745, 1e-9)
        weight = root * np.sqrt(np.minimum(1.0, 1.345 * deviation / np.maximum(errors, 1e-12)))
    return np.asarray(values / scale, dtype=np.float64)


def thinned(part: str, axis: str, series: pd.Series[float]) -> tuple[tuple[tuple[int, float], ...], Residuals]:
    """The entries of a table that a straight line between others does not give within `THIN`."""
    x = series.index.to_numpy(float)
    y = series.to_numpy(float)
    keep = {0, len(x) - 1}
    spans = [(0, len(x) - 1)]
    while spans:
        left, right = spans.pop()
        if right - left < 2:
            continue
        inner = slice(left + 1, right)
        line = y[left] + (y[right] - y[left]) * (x[inner] - x[left]) / (x[right] - x[left])
        errors = np.abs(line / y[inner] - 1.0)
        worst = int(errors.argmax())
        if errors[worst] > THIN:
            middle = left + 1 + worst
            keep.add(middle)
            spans += [(left, middle), (middle, right)]
    points = [(int(x[i]), _short(y[i])) for i in sorted(keep)]
    if len(points) > 1 and points[-1][1] < points[-2][1]:  # noise at the end must not be continued downwards
        points[-1] = (points[-1][0], points[-2][1])
    fitted = np.interp(x, *np.array(points).T)
    cells = tuple(Cell(f"{int(t)} {axis}", float(s), float(f)) for t, s, f in zip(x, y, fitted, strict=True))
    return tuple(points), Residuals(part, cells)


def _rest_of_step(tables: OperationTables, layers: int) -> Callable[[pd.DataFrame], Floats]:
    """What a step takes besides attention, divided by the layers, for the rows of an attention table."""
    dense = tables.block * layers + tables.once

    def rest_s(part: pd.DataFrame) -> Floats:
        tokens = (part["chunk"] + part["batch"]).to_numpy(float)
        rows = (part["batch"] + (part["chunk"] > 0)).to_numpy(float)
        dense_s = np.interp(tokens, dense.index.to_numpy(float), dense.to_numpy(float))
        rows_s = np.interp(rows, tables.rows.index.to_numpy(float), tables.rows.to_numpy(float))
        return np.asarray((dense_s + rows_s) / layers, dtype=np.float64)

    return rest_s


def _with_rest(kernels: Residuals, rest_s: Floats, kind: str) -> Residuals:
    """The same cells as whole steps, a layer."""
    cells = (
        Cell(cell.label, cell.data_s + rest, cell.fit_s + rest)
        for cell, rest in zip(kernels.cells, map(float, rest_s), strict=True)
    )
    return Residuals(f"whole {kind} step", tuple(cells))


def _skew_of(tables: OperationTables, kind: str) -> dict[int, float]:
    """Skew by batch size, with 0 for a single sequence, which has no other to wait for."""
    if tables.skew is None:
        return {}
    column = tables.skew[kind].dropna()
    return {1: 0.0} | {int(str(n)): float(value) for n, value in column.items()}


def _at(values: dict[int, float], n: int) -> float:
    """Linear between entries, constant outside; 0 without any."""
    if not values:
        return 0.0
    keys = sorted(values)
    return _short(float(np.interp(n, keys, [values[key] for key in keys])))


def _columns(rows: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(zip(*sorted(rows), strict=True))


def _short(value: float) -> float:
    """Five digits: more would pretend."""
    return float(f"{value:.5g}")
