"""What capacity searches found, in words: a table a combination, and the best policy against the first.

It reads what was found; it neither searches nor prints.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from chimsim.capacity import Found, interval
from chimsim.grid import Cell
from chimsim.metrics import mean_and_interval
from chimsim.report import aligned, number
from chimsim.slo import Goal

WIDTH = 80


@dataclass(frozen=True, slots=True)
class Row:
    """One policy (and its knobs) on one trace, combination and rate: what was found for every seed."""

    title: str
    group: str
    cell: Cell
    found: tuple[Found, ...]

    @property
    def values(self) -> list[float] | None:
        """The answers by seed; None where a seed has none."""
        values = [found.value for found in self.found]
        return None if None in values else [float(value) for value in values if value is not None]


def against(row: Row, first: Row, gpus: bool) -> tuple[float, float, float] | None:
    """How a row's answers compare with the first's, paired by seed: mean and 95 % interval.

    Of GPUs the difference, of rates the ratio; None where a seed has no answer, or there is one.
    """
    mine, theirs = row.values, first.values
    if mine is None or theirs is None or len(mine) < 2:
        return None
    return interval([a - b if gpus else a / b for a, b in zip(mine, theirs, strict=True)], gpus)


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return groups


def capacity_text(rows: Sequence[Row], goal: Goal, seeds: int, gpus: bool) -> str:
    head = "fewest GPUs" if gpus else "largest rate, workflows/s,"
    asked = ", ".join(slo.text for slo in goal.slos)
    asked += f", at least {100 * goal.min_solved:g} % solved" if goal.min_solved is not None else ""
    blocks = [textwrap.fill(f"{head} within {asked}; {seeds} seeds", WIDTH)]
    for name, group in groups(rows).items():
        head_row = ["", "GPUs", "95 %", "to first", "95 %", "solved %", "engines"]
        if not gpus:
            head_row = ["", "rate", "95 %", "of first", "95 %", "solved %", "limited by"]
        table = [head_row]
        table += [_line(row, group[0], gpus) for row in group]
        blocks.append("\n".join([name, *aligned(table)]))
        blocks += [textwrap.fill(line, WIDTH) for line in _sentences(group, gpus)]
    return "\n\n".join(blocks)


def _line(row: Row, first: Row, gpus: bool) -> list[str]:
    values = row.values
    solved, _ = mean_and_interval(100 * float(each.summary["solved_rate"]) for each in row.found
                                  if each.summary["solved_rate"] is not None)  # fmt: skip
    last = _counts(row) if gpus else _limits(row)
    if values is None:
        reached = sum(each.value is not None for each in row.found)
        seeds = f"in {reached} of {len(row.found)}" if reached else "none"
        return [row.title, seeds, "", "", "", number(solved, 1), last]
    mean, spread = _mean(values, gpus)
    compared = None if row is first else against(row, first, gpus)
    shown = ["", ""] if compared is None else [number(compared[0]), f"{number(compared[1])}..{number(compared[2])}"]
    return [row.title, number(mean), spread, *shown, number(solved, 1), last]


def _mean(values: Sequence[float], gpus: bool) -> tuple[float, str]:
    """The mean over the seeds, and its 95 % interval in words."""
    mean, low, high = interval(values, gpus)
    return mean, f"{number(low)}..{number(high)}" if len(values) > 1 else ""


def _limits(row: Row) -> str:
    """What a slightly higher rate would break, most frequent first."""
    counts: dict[str, int] = {}
    for each in row.found:
        for miss in each.misses:
            counts[miss.partition(":")[0]] = counts.get(miss.partition(":")[0], 0) + 1
    return ", ".join(sorted(counts, key=lambda miss: (-counts[miss], miss))[:2])


def _counts(row: Row) -> str:
    """The split over the models that most seeds take."""
    splits = ["+".join(str(count) for count in each.counts.values()) for each in row.found if each.value is not None]
    return max(sorted(set(splits)), key=splits.count) if splits else f"({_limits(row)})"


def _sentences(group: Sequence[Row], gpus: bool) -> list[str]:
    """The best against the first, in words."""
    first = group[0]
    known = [(row, compared) for row in group[1:] if (compared := against(row, first, gpus)) is not None]
    if not known:
        return []
    row, (mean, low, high) = (min if gpus else max)(known, key=lambda pair: pair[1][0])
    if low == high == (0.0 if gpus else 1.0):
        return [f"No policy differs from {first.title}."]
    if gpus:
        fewer = -mean
        if low <= 0.0 <= high:
            return [f"No policy needs certainly fewer GPUs than {first.title} ({row.title}: {fewer:+.2f} fewer, "
                    f"95 % {-high:.2f} to {-low:.2f})."]  # fmt: skip
        word = "fewer" if fewer > 0 else "more"
        return [f"{row.title} needs {abs(fewer):.2f} GPUs {word} than {first.title} (95 % {-high:.2f} to {-low:.2f})."]
    if low <= 1.0 <= high:
        return [f"No policy takes certainly more load than {first.title} ({row.title}: {mean:.2f} times, "
                f"95 % {low:.2f} to {high:.2f})."]  # fmt: skip
    return [f"{row.title} takes {mean:.2f} times the load of {first.title} (95 % {low:.2f} to {high:.2f})."]
