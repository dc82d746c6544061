"""Which cells of two results folders, or of two policies of one, belong together.

Cells are matched on their axes. It reads summaries only and computes no differences; `chimsim.compare` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite, isnan
from typing import Any

from chimsim.errors import ChimsimError, near
from chimsim.results import Results
from chimsim.spec import Scalar, scalar_text

LOAD = ("trace", "combo", "slots", "rps", "burstiness", "seed")
"""Axes of what is served, and on what. All others but the policy are a policy's settings."""
Axes = Mapping[str, Scalar]
Values = Mapping[str, tuple[tuple[Scalar, ...], tuple[Scalar, ...]]]
"""Of each axis the values in A and those in B."""


@dataclass(frozen=True, slots=True)
class Row:
    """One finished cell: its hash, its axes, its metrics."""

    cell: str
    axes: Axes
    metrics: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two that are compared. ``chosen`` are the axes that its name fixes."""

    name: str
    results: Results
    rows: tuple[Row, ...]
    chosen: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Pair:
    """A cell of A and its partner of B; ``axes`` are those on which they were matched."""

    axes: Axes
    a: Row
    b: Row


@dataclass(frozen=True, slots=True)
class Matched:
    """All pairs, what A and B differ in besides, and how many cells of each have no partner."""

    pairs: tuple[Pair, ...]
    differ: Mapping[str, tuple[str, str]]
    alone_a: int
    alone_b: int


def folder_side(results: Results, name: str) -> Side:
    """All finished cells of a folder. Raises `ChimsimError` if there is none."""
    summary = results.summary
    if summary.empty:
        raise ChimsimError(f"{results.path} has no finished cell to compare")
    columns = [str(column) for column in summary.columns]
    axes = columns[: columns.index("cell")]
    rows = [
        Row(
            str(record["cell"]),
            {axis: _plain(record[axis]) for axis in axes},
            {str(key): value for key, value in record.items() if key not in axes and key != "cell"},
        )
        for record in summary.to_dict("records")
    ]
    return Side(name, results, tuple(rows))


def policy_side(folder: Side, text: str) -> Side:
    """The cells of one policy of a folder: ``label`` or ``label:axis=value,axis=value``.

    Raises `ChimsimError` for a label, an axis or a value that the folder does not have.
    """
    where = folder.results.path
    labels = list(dict.fromkeys(str(row.axes["policy"]) for row in folder.rows))
    # a label may have a colon of its own
    fitting = [label for label in labels if text == label or text.startswith(f"{label}:")]
    if not fitting:
        hint = near(text.split(":")[0], labels)
        raise ChimsimError(f"policy {text!r} is not in {where}; choose from {', '.join(labels)}{hint}")
    label = max(fitting, key=len)
    rows = [row for row in folder.rows if row.axes["policy"] == label]
    chosen = set()
    for part in filter(None, text.removeprefix(label).removeprefix(":").split(",")):
        axis, equals, value = (piece.strip() for piece in part.partition("="))
        known = [name for name in rows[0].axes if name != "policy"]
        if not equals or axis not in known:
            raise ChimsimError(
                f"{text}: {part!r} is no choice of a cell; expected axis=value, "
                f"with an axis of {', '.join(known)}{near(axis, known)}"
            )
        wanted = None if value == "-" else _plain(value)
        kept = [row for row in rows if row.axes[axis] == wanted]
        if not kept:
            there = _listed(row.axes[axis] for row in rows)
            raise ChimsimError(f"{text}: no cell has {axis} {value}; there is {there}")
        rows = kept
        chosen.add(axis)
    return Side(text, folder.results, tuple(rows), frozenset(chosen))


def match(a: Side, b: Side, *, policies: bool) -> Matched:
    """Pair the cells that agree on every axis but those in which A and B differ as a whole.

    With ``policies``, A and B are policies of one folder; then every setting must be one, or the same ones in both.
    Raises `ChimsimError` that names the axes if no cell has a partner, or if it could have several.
    """
    names = list(dict.fromkeys([*a.rows[0].axes, *b.rows[0].axes]))
    values = {name: (_values(a, name), _values(b, name)) for name in names}
    if policies:
        for side, position in ((a, 0), (b, 1)):
            _check_settings(side, position, values)
    exact: list[str] = []
    apart: list[str] = []
    differ: dict[str, tuple[str, str]] = {}
    for name, (mine, theirs) in values.items():
        words = (_listed(mine), _listed(theirs))
        if policies and name == "policy":
            continue
        if len(mine) == len(theirs) == 1 and mine != theirs and name != "seed":
            differ[name] = words
        elif name in LOAD or name == "policy" or not _one_each(mine, theirs):
            (exact if set(mine) & set(theirs) else apart).append(name)
        else:
            # a setting that only some policies have, another in A than in B
            differ[name] = (_listed(v for v in mine if v is not None), _listed(v for v in theirs if v is not None))
    if apart:
        shown = _words(values, apart)
        raise ChimsimError(f"{a.name} and {b.name} have no cell in common ({shown})")

    def key(row: Row) -> tuple[Any, ...]:
        return tuple(row.axes.get(name) for name in exact)

    theirs_by_key = {key(row): row for row in b.rows}
    mine_by_key = {key(row): row for row in a.rows}
    if len(theirs_by_key) < len(b.rows) or len(mine_by_key) < len(a.rows):
        raise ChimsimError(f"{a.name} and {b.name}: several cells have the same {', '.join(exact)}")
    pairs = [
        Pair({name: row.axes.get(name) for name in exact}, row, theirs_by_key[k])
        for k, row in mine_by_key.items() if k in theirs_by_key
    ]  # fmt: skip
    if not pairs:
        several = [name for name in exact if values[name][0] != values[name][1] or len(values[name][0]) > 1]
        shown = _words(values, several)
        raise ChimsimError(f"{a.name} and {b.name} have no cell in common, taken together ({shown})")
    return Matched(tuple(pairs), differ, len(a.rows) - len(pairs), len(b.rows) - len(pairs))


def _check_settings(side: Side, position: int, values: Values) -> None:
    """Refuse a policy that has several settings, unless the other has the same ones and they are matched."""
    several = [
        name for name, both in values.items()
        if name not in LOAD and name != "policy" and len(both[position]) > 1 and set(both[0]) != set(both[1])
    ]  # fmt: skip
    if not several:
        return
    settings = list(dict.fromkeys(
        ",".join(f"{name}={scalar_text(row.axes[name])}" for name in several) for row in side.rows
    ))  # fmt: skip
    joint = "," if side.chosen else ":"
    raise ChimsimError(
        f"{side.name} has {len(settings)} settings: {'; '.join(settings)}. "
        f"Choose one, say {side.name}{joint}{settings[0]}"
    )


def _words(values: Values, names: Iterable[str]) -> str:
    return "; ".join(f"{name}: {_listed(values[name][0])} in A, {_listed(values[name][1])} in B" for name in names)


def _one_each(mine: Iterable[Scalar], theirs: Iterable[Scalar]) -> bool:
    """Whether each side has one value besides none, and not the same."""
    first, second = ({v for v in values if v is not None} for values in (mine, theirs))
    return len(first) == len(second) == 1 and first != second


def _values(side: Side, axis: str) -> tuple[Scalar, ...]:
    return tuple(dict.fromkeys(row.axes.get(axis) for row in side.rows))


def _listed(values: Iterable[Scalar]) -> str:
    return ", ".join(dict.fromkeys(scalar_text(value) for value in values))


def _plain(value: Any) -> Scalar:
    """A value of an axis such that those of two summaries compare, whatever types their columns have."""
    if value is None or isinstance(value, bool):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    if isnan(number):
        return None
    return int(number) if isfinite(number) and number == int(number) else number
