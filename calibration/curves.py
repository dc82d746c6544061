"""The parts of a step's time that no straight line fits: small tables over batch and chunk size.

Values and interpolation only. Every table is linear between its entries and constant before the first; beyond the
last one it grows in proportion to the sequences, or with the square of a chunk. Times are in seconds, attention's
are those of one layer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Any, ClassVar, Self

from calibration.figures import MOST, ProfileError

Numbers = tuple[float, ...]
_LEVELS = {"float": 0, "tuple[Numbers, ...]": 2}
"""Of lists, in a field of this type; the others are one list."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A table by name of column; what the four kinds have in common. Raises `ProfileError`."""

    section: ClassVar[str]
    key: ClassVar[str]
    axis: ClassVar[str]

    def __post_init__(self) -> None:
        axis: tuple[int, ...] = getattr(self, self.axis)
        _rising(axis, f"{self.key}.{self.axis}")
        for name, column in self.columns().items():
            if name == self.axis or isinstance(column, float):
                continue
            if len(column) != len(axis):
                raise ProfileError(
                    f"{self.key}.{name} has {len(column)} entries; expected {len(axis)}, one a {self.axis}"
                )
            for value in column:
                _number(value, f"{self.key}.{name}")

    def columns(self) -> dict[str, Any]:
        """The columns by name, as they stand in the file."""
        return asdict(self)

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Self:
        """The curve of a TOML table. Raises `ProfileError` for missing, unknown or wrong columns."""
        levels = {field.name: _LEVELS.get(str(field.type), 1) for field in fields(cls)}
        names = tuple(levels)
        for name in table:
            if name not in names:
                raise ProfileError(f"unknown key {name!r} in {cls.key}; known: {', '.join(names)}")
        missing = [name for name in names if name not in table]
        if missing:
            raise ProfileError(f"{cls.key} lacks {', '.join(missing)}")
        return cls(**{name: _frozen(table[name], f"{cls.key}.{name}", levels[name]) for name in names})

    def times(self, factor: float) -> Self:
        """The same table with all its times multiplied."""
        times = {name: _scaled(column, factor) for name, column in self.columns().items() if name.endswith("_s")}
        return replace(self, **times)


@dataclass(frozen=True, slots=True)
class RowCurve(Curve):
    """What a step does once a sequence: output projection and sampling, ``total_s`` of so many ``rows`` together."""

    section: ClassVar[str] = "step"
    key: ClassVar[str] = "sequences"
    axis: ClassVar[str] = "rows"
    rows: tuple[int, ...]
    total_s: Numbers

    def at(self, rows: int) -> float:
        """Seconds of a step with so many sequences."""
        if rows < 1:
            return 0.0
        return _between(self.rows, self.total_s, rows) * max(1.0, rows / self.rows[-1])


@dataclass(frozen=True, slots=True)
class DecodeCurve(Curve):
    """Attention of a pure decode step: ``base_s + context_s * (S + skew * X)`` by batch size.

    ``S`` is the decodes' total context, ``X`` their excess: batch size times the longest context, minus S. ``skew``
    says which share of the excess is paid for: 0 where a batch costs what its mean does, 1 where it costs what as
    many sequences of the longest length would.
    """

    section: ClassVar[str] = "attention"
    key: ClassVar[str] = "decode"
    axis: ClassVar[str] = "batch"
    batch: tuple[int, ...]
    base_s: Numbers
    context_s: Numbers
    skew: Numbers

    def at(self, n: int) -> tuple[float, float, float]:
        """base_s, context_s and skew of a batch of ``n``."""
        beyond = max(1.0, n / self.batch[-1])
        return (
            _between(self.batch, self.base_s, n) * beyond,
            _between(self.batch, self.context_s, n),
            _between(self.batch, self.skew, n),
        )


@dataclass(frozen=True, slots=True)
class ChunkCurve(Curve):
    """Attention of a prefill chunk alone: ``base_s + context_s * k`` by its tokens, k tokens of context before it.

    The first entry's ``base_s`` is the fixed cost of the kernel, paid once a step however many chunks it has.
    """

    section: ClassVar[str] = "attention"
    key: ClassVar[str] = "chunk"
    axis: ClassVar[str] = "tokens"
    tokens: tuple[int, ...]
    base_s: Numbers
    context_s: Numbers

    def at(self, tokens: int) -> tuple[float, float]:
        """base_s without the fixed cost, and context_s, of a chunk of so many tokens."""
        beyond = max(1.0, tokens / self.tokens[-1])
        return (
            (_between(self.tokens, self.base_s, tokens) - self.base_s[0]) * beyond * beyond,
            _between(self.tokens, self.context_s, tokens) * beyond,
        )


@dataclass(frozen=True, slots=True)
class MixedGrid(Curve):
    """What decodes add to the attention of a step with prefill: ``total_s`` by batch and mean context.

    A decode pays ``chunk_token_s`` more for every prefill token of the step. ``skew`` is as in `DecodeCurve`: the
    batch is looked up at mean + skew x (longest - mean). Beyond the last context the last slope goes on.
    """

    section: ClassVar[str] = "attention"
    key: ClassVar[str] = "mixed"
    axis: ClassVar[str] = "batch"
    batch: tuple[int, ...]
    context: tuple[int, ...]
    total_s: tuple[Numbers, ...]
    skew: Numbers
    chunk_token_s: float

    def __post_init__(self) -> None:
        _rising(self.batch, "mixed.batch")
        _rising(self.context, "mixed.context")
        for name, size in (("total_s", len(self.total_s)), ("skew", len(self.skew))):
            if size != len(self.batch):
                raise ProfileError(f"mixed.{name} has {size} entries; expected {len(self.batch)}, one a batch")
        for row in self.total_s:
            if len(row) != len(self.context):
                raise ProfileError(
                    f"mixed.total_s has a row of {len(row)} entries; expected {len(self.context)}, one a context"
                )
        for value in (*self.skew, self.chunk_token_s, *(value for row in self.total_s for value in row)):
            _number(value, "mixed")

    def at(self, n: int, context_tokens: float, excess_tokens: float, prefill_tokens: int) -> float:
        """Seconds that ``n`` decodes of so much total context and excess add."""
        if n < 1:
            return 0.0
        context = (context_tokens + _between(self.batch, self.skew, n) * excess_tokens) / n
        if n <= self.batch[0] or len(self.batch) == 1:
            seconds = self._row(0, context)
        else:
            right = min(bisect_right(self.batch, n), len(self.batch) - 1)
            left = right - 1
            x0, x1 = self.batch[left], self.batch[right]
            weight = min((n - x0) / (x1 - x0), 1.0)
            seconds = self._row(right, context)
            if weight < 1.0:
                seconds = self._row(left, context) * (1.0 - weight) + seconds * weight
        return seconds * max(1.0, n / self.batch[-1]) + self.chunk_token_s * n * prefill_tokens

    def _row(self, index: int, context: float) -> float:
        axis, row = self.context, self.total_s[index]
        if context <= axis[0] or len(axis) == 1:
            return row[0]
        right = min(bisect_right(axis, context), len(axis) - 1)
        x0, x1, y0, y1 = axis[right - 1], axis[right], row[right - 1], row[right]
        return y0 + (y1 - y0) * ((context - x0) / (x1 - x0))


CURVES: dict[str, type[RowCurve] | type[DecodeCurve] | type[ChunkCurve] | type[MixedGrid]] = {
    curve.key: curve for curve in (RowCurve, DecodeCurve, ChunkCurve, MixedGrid)
}
"""The kinds of table by their key in a profile's file."""


def _between(axis: Sequence[int], values: Sequence[float], x: float) -> float:
    """Linear between entries, constant outside."""
    if x <= axis[0]:
        return values[0]
    if x >= axis[-1]:
        return values[-1]
    right = bisect_right(axis, x)
    x0, x1, y0, y1 = axis[right - 1], axis[right], values[right - 1], values[right]
    return y0 + (y1 - y0) * ((x - x0) / (x1 - x0))


def _rising(axis: Sequence[int], where: str) -> None:
    whole = all(type(value) is int and value > 0 for value in axis)
    if not axis or not whole or any(later <= earlier for earlier, later in pairwise(axis)):
        raise ProfileError(f"{where} is {list(axis)}; expected a rising list of whole numbers above 0")


def _number(value: object, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
        raise ProfileError(f"{where} has {value!r:.60}; expected numbers of at least 0")


def _frozen(value: object, where: str, levels: int) -> Any:
    """Numbers within so many levels of lists, as tuples."""
    if levels:
        if not isinstance(value, list):
            raise ProfileError(f"{where} has {value!r:.60}; expected a list")
        return tuple(_frozen(each, where, levels - 1) for each in value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ProfileError(f"{where} has {value!r}; expected a number")
    return value


def _scaled(column: Any, factor: float) -> Any:
    if isinstance(column, tuple):
        return tuple(_scaled(value, factor) for value in column)
    return float(f"{column * factor:.5g}")
