"""Claims about a summary, checked: does it hold, fail, or can these seeds not tell?

A claim compares two lines seed by seed, for all policies of a sweep see the same arrivals and workflows. It is judged
in every block (trace, combination, rate, ...) by the 95 % interval of the paired differences. As a whole it holds if it
holds in every block, and fails if in some block even an interval widened for the number of blocks (Bonferroni) lies on
the wrong side. Nothing is simulated here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from chimsim.errors import ChimsimError, near
from chimsim.frontier import frontier_of, reference_point
from chimsim.reproduce.claims import LATENCY, Claim, Side
from chimsim.reproduce.verdicts import (
    Block,
    Judgement,
    compare,
    corners_by_other_seeds,
    corners_for,
    dominates,
    measure_of,
    trend,
)
from chimsim.results import PANEL_AXES, axis_columns, own_axes
from chimsim.spec import POLICY_AXES, Scalar

HYPERVOLUME = "hypervolume"
"""Besides the summary's columns: what a line's points cover (`chimsim.frontier.reference_point` says from where)."""


@dataclass(frozen=True, slots=True)
class Relation:
    """What should hold: its claim, where it is asked (``where`` by column, ``when`` by a claim on means), in words."""

    claim: Claim
    says: str
    paper: str = ""
    reason: str = ""
    where: Mapping[str, Sequence[Scalar]] = field(default_factory=dict)
    when: Claim | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """A relation judged. In ``skipped`` blocks ``when`` does not hold, or the axis of a trend has one value."""

    relation: Relation
    verdict: Judgement
    blocks: tuple[Block, ...]
    skipped: int
    ours: str

    def count(self, verdict: Judgement) -> int:
        """Blocks with this verdict."""
        return sum(block.verdict == verdict for block in self.blocks)

    def to_dict(self) -> dict[str, Any]:
        """For experiment.json."""
        return {
            "claim": self.relation.claim.text,
            "says": self.relation.says,
            "paper": self.relation.paper,
            "ours": self.ours,
            "verdict": self.verdict,
            **{name: self.count(name) for name in ("holds", "fails", "undecided")},
            "skipped": self.skipped,
            "reason": self.relation.reason,
            "blocks": [
                {
                    "block": block.title,
                    "axes": dict(block.axes),
                    "left": block.left,
                    "right": block.right,
                    "measure": block.measure,
                    "value": block.value,
                    "low": block.low,
                    "high": block.high,
                    "verdict": block.verdict,
                    "note": block.note,
                }
                for block in self.blocks
            ],
        }


def judge(relation: Relation, summary: pd.DataFrame, choose: pd.DataFrame | None = None) -> Finding:
    """Judge a relation on a summary: one row a run, the axes up to the column ``cell``, then metrics.

    ``choose`` are the runs on which settings are chosen for ``dominates``; without them each seed is judged by the
    settings that the other seeds chose. Raises `ChimsimError` for labels and columns that there are not.
    """
    data = _where(relation, summary)
    claim = relation.claim
    if data.empty:
        return Finding(relation, "undecided", (), 0, _in_words(claim, []))
    for asked in (claim, relation.when):
        if asked is not None:
            _check(asked, data)
    blocks: list[Block] = []
    skipped = 0
    apart = {claim.axis, *(name for side in _sides(claim) for name in side.where)}
    panels = [axis for axis in PANEL_AXES if axis in data and axis not in apart]
    varying = [axis for axis in axis_columns(summary) if axis in panels and data[axis].nunique(dropna=False) > 1]
    groups = list(_groups(data, panels))
    pairs = [(axes, rows) for axes, rows in groups if not _lacks(claim, rows)]
    if not pairs:
        raise ChimsimError(f"relation {claim.text!r}: no block has runs of both sides")
    comparisons = [(axes, rows, c) for axes, rows in pairs for c in _comparisons(claim, rows)]
    for axes, rows, (own, left, right) in comparisons:
        shown = {name: value for name, value in axes.items() if name in varying} | own
        still = claim.axis and left[claim.axis].nunique() < 2
        if still or (relation.when is not None and not _met(relation.when, rows)):
            skipped += 1
            continue
        chosen = None if choose is None else _same(choose, axes)
        level = 1 - 0.05 / len(comparisons)
        blocks.append(_judged(claim, shown, rows, left, right, chosen, level))
    return Finding(relation, _overall(blocks), tuple(blocks), skipped, _in_words(claim, blocks))


def check(relation: Relation, planned: pd.DataFrame) -> None:
    """Refuse what is wrong with a relation before anything runs; ``planned`` has the axes only, up to ``cell``."""
    _where(relation, planned)
    for asked in (relation.claim, relation.when):
        if asked is not None:
            _check(asked, planned)


def _overall(blocks: Sequence[Block]) -> Judgement:
    if any(block.surely_wrong for block in blocks):
        return "fails"
    return "holds" if blocks and all(block.verdict == "holds" for block in blocks) else "undecided"


def _where(relation: Relation, summary: pd.DataFrame) -> pd.DataFrame:
    data = summary
    for name, values in relation.where.items():
        if name not in summary:
            raise ChimsimError(f"relation {relation.claim.text!r}: where: there is no column {name!r}"
                               f"{near(name, list(summary.columns))}")  # fmt: skip
        data = data[data[name].isin(list(values))]
    return data


def _groups(data: pd.DataFrame, names: Sequence[str]) -> Iterator[tuple[dict[str, Scalar], pd.DataFrame]]:
    """The rows by their values in these columns, in order of appearance."""
    if not names:
        yield {}, data
        return
    for key, rows in data.groupby(list(names), sort=False, dropna=False, observed=True):
        yield {name: _plain(value) for name, value in zip(names, key, strict=True)}, rows


def _plain(value: Any) -> Scalar:
    """A value of a frame as Python's own; None where there is none."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if value is None or value is pd.NA or value != value else value


def _same(data: pd.DataFrame, axes: Mapping[str, Scalar]) -> pd.DataFrame:
    """The rows that have these values, of the columns that there are."""
    for name, value in axes.items():
        if name in data:
            data = data[data[name].isna() if value is None else data[name] == value]
    return data


def _rows(side: Side, data: pd.DataFrame) -> pd.DataFrame:
    mine = data if side.label == "*" else data[data["policy"] == side.label]
    return _same(mine, side.where)


def _sides(claim: Claim) -> list[Side]:
    return [claim.left, *([claim.right] if claim.right is not None else [])]


def _lacks(claim: Claim, rows: pd.DataFrame) -> bool:
    return any(_rows(side, rows).empty for side in _sides(claim))


def _check(claim: Claim, data: pd.DataFrame) -> None:
    """Refuse labels and axes that there are not, metrics that are no numbers, and a side against itself."""
    labels, axes = list(dict.fromkeys(data["policy"])), axis_columns(data)
    numbers = [str(name) for name in data if name not in axes and pd.api.types.is_numeric_dtype(data[name])]
    metrics = [*numbers, HYPERVOLUME]
    wanted = [(claim.metric, "metric", metrics)] if numbers else []
    wanted += [(claim.right_metric, "metric", metrics)] if claim.right_metric and numbers else []
    wanted += [(claim.axis, "axis", axes)] if claim.axis else []
    if claim.right == claim.left and claim.right_metric in ("", claim.metric):
        raise ChimsimError(f"relation {claim.text!r} compares a side with itself")
    for side in _sides(claim):
        wanted += [(name, "axis", axes) for name in side.where]
        wanted += [(side.label, "policy", [*labels, "*"])]
    for name, what, known in wanted:
        if name not in known:
            hint = near(name, known) or f" (there are {', '.join(map(str, known[:12]))})"
            raise ChimsimError(f"relation {claim.text!r}: there is no {what} {name!r}{hint}")


_Comparison = tuple[dict[str, Scalar], pd.DataFrame, pd.DataFrame | None]


def _comparisons(claim: Claim, rows: pd.DataFrame) -> Iterator[_Comparison]:
    """Within a panel: both sides' rows for each of their own settings; what both vary in is held equal.

    ``dominates`` and the hypervolume take all knobs of a side together, but no two predictors.
    """
    left = _rows(claim.left, rows)
    split = own_axes(left)
    if claim.left.label == "*":
        split = ["policy", *split]
    if claim.kind == "dominates" or claim.metric == HYPERVOLUME:
        split = [name for name in split if name in ("policy", *POLICY_AXES)]
    split = [name for name in split if name != claim.axis]
    for own, mine in _groups(left, split):
        if claim.right is None:
            yield own, mine, None
            continue
        right = _rows(claim.right, rows)
        theirs = own_axes(right)
        if claim.right_metric == HYPERVOLUME:
            theirs = [name for name in theirs if name in POLICY_AXES]
        if claim.right.label == "*":
            theirs = ["policy", *theirs]
        for other, partner in _groups(right, theirs):
            if any(own[name] != value for name, value in other.items() if name in own):
                continue
            named = {f"{claim.right.label}'s {name}": value for name, value in other.items() if name not in own}
            yield own | named, mine, partner


def _met(when: Claim, rows: pd.DataFrame) -> bool:
    """Whether the means of the panel fulfil a condition."""
    left = float(_rows(when.left, rows)[when.metric].mean())
    right = when.number if when.right is None else float(_rows(when.right, rows)[when.right_metric].mean())
    assert right is not None
    return left < right if when.kind == "<" else left > right


def _judged(
    claim: Claim,
    axes: Mapping[str, Scalar],
    panel: pd.DataFrame,
    left: pd.DataFrame,
    right: pd.DataFrame | None,
    choose: pd.DataFrame | None,
    level: float,
) -> Block:
    if claim.kind == "dominates":
        assert right is not None
        return _dominates(claim, axes, left, right, choose, level)
    if claim.kind in ("rises", "falls"):
        return _trend(claim, axes, left, level)
    ours = _values(claim, claim.metric, panel, left)
    if right is None:
        theirs = pd.Series(claim.number, index=ours.index, dtype=float)
    else:
        theirs = _values(claim, claim.right_metric, panel, right)
    seeds = ours.index.intersection(theirs.index)
    a, b = ours[seeds].to_numpy(), theirs[seeds].to_numpy()
    measure = "difference" if right is None else measure_of(claim.metric, a, b)
    return compare(axes, a, b, measure, lower=claim.kind == "<", level=level)


def _values(claim: Claim, metric: str, panel: pd.DataFrame, rows: pd.DataFrame) -> pd.Series[float]:
    """One value a seed, without those that have none."""
    if metric == HYPERVOLUME:
        line = frontier_of(rows, own_axes(rows))
        points = list(panel[[LATENCY, "solved_rate"]].dropna().itertuples(index=False, name=None))
        if line is None:
            return pd.Series(dtype=float)
        return pd.Series(line.hypervolumes(reference_point(points)), index=line.seeds)
    values = rows.set_index("seed")[metric].dropna()
    if values.index.has_duplicates:
        raise ChimsimError(f"relation {claim.text!r}: several runs of one seed are meant; name the setting in [...]")
    return values.astype(float)


def _trend(claim: Claim, axes: Mapping[str, Scalar], rows: pd.DataFrame, level: float) -> Block:
    steps = sorted(rows[claim.axis].dropna().unique())
    by_step = [_values(claim, claim.metric, rows, rows[rows[claim.axis] == value]) for value in steps]
    seeds = sorted(set.intersection(*(set(values.index) for values in by_step)))
    columns = [values[seeds].to_numpy() for values in by_step]
    measure = measure_of(claim.metric, columns[0], columns[-1])
    return trend(axes, claim.axis, steps, columns, measure, falls=claim.kind == "falls", level=level)


def _dominates(
    claim: Claim,
    axes: Mapping[str, Scalar],
    left: pd.DataFrame,
    right: pd.DataFrame,
    choose: pd.DataFrame | None,
    level: float,
) -> Block:
    names = own_axes(left)
    line, goal = frontier_of(left, names, claim.metric), frontier_of(right, [], claim.metric)
    if line is None or goal is None or line.seeds != goal.seeds:
        raise ChimsimError(f"relation {claim.text!r}: solved labels or seeds are missing")
    if choose is None:
        return dominates(axes, line, goal, corners_by_other_seeds(line, goal), level)
    ours, theirs = (_rows(side, choose) for side in (claim.left, claim.right or claim.left))
    ours = _same(ours, {name: value for name, value in axes.items() if name not in PANEL_AXES})
    other, target = frontier_of(ours, names, claim.metric), frontier_of(theirs, [], claim.metric)
    if other is None or target is None or other.settings != line.settings:
        raise ChimsimError(f"relation {claim.text!r}: the runs to choose by lack settings of those to judge")
    return dominates(axes, line, goal, [corners_for(other, target)] * len(line.seeds), level)


def _in_words(claim: Claim, blocks: Sequence[Block]) -> str:
    """What came out, over the blocks: the range, and the middle of it."""
    values = [block.value for block in blocks if not isnan(block.value)]
    if not values:
        return "no block to judge" if not blocks else "out of reach"
    if claim.number is not None:
        return _span([block.left for block in blocks])
    if not all(block.measure == "ratio" for block in blocks):
        points = claim.metric.endswith("rate")
        sides = f": {_span([block.left for block in blocks])} against {_span([block.right for block in blocks])}"
        return _span([100 * v if points else v for v in values], "+.2g") + (" points" if points else sides)
    if claim.kind == "dominates":
        return f"latency {_span(values)} times"
    return f"{_span([100 * (value - 1) for value in values], '+.0f')} %"


def _span(values: Sequence[float], form: str = ".3g") -> str:
    ordered = sorted(values)
    if len(ordered) == 1:
        return f"{ordered[0]:{form}}"
    return f"{ordered[0]:{form}} to {ordered[-1]:{form}} (median {median(ordered):{form}})"
