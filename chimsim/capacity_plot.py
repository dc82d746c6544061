"""The figure of a capacity search: a bar a policy with the interval over the seeds, a panel a combination.

It draws what was found and computes nothing new.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from chimsim.capacity import interval
from chimsim.capacity_text import Row
from chimsim.plots import paper_style, policy_colour, write_figure


def draw_capacity(rows: Sequence[Row], gpus: bool, folder: Path) -> list[Path]:
    """Write ``capacity.png`` and ``.svg`` into the folder; the files written."""
    with paper_style():
        return write_figure(_figure(rows, gpus), [folder / f"capacity.{name}" for name in ("png", "svg")])


def _figure(rows: Sequence[Row], gpus: bool) -> Figure:
    groups = list(dict.fromkeys(row.group for row in rows))
    heights = [sum(row.group == group for row in rows) for group in groups]
    figure = Figure(figsize=(4.8, 0.24 * sum(heights) + 0.6 * len(groups) + 0.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = cast(Any, figure.subplots(len(groups), 1, squeeze=False, sharex=True, height_ratios=heights))[:, 0]
    for ax, group in zip(axes, groups, strict=True):
        mine = [row for row in rows if row.group == group]
        for place, row in enumerate(mine):
            values = row.values
            if values is None:
                ax.text(0.0, place, " not in every seed", va="center", fontsize=7)
                continue
            mean, low, high = interval(values, gpus)
            colour = policy_colour(str(row.cell.axes["policy"]))
            spread = [[mean - low], [high - mean]]
            ax.barh(place, mean, 0.7, xerr=spread, color=colour, alpha=0.85, error_kw={"lw": 0.8})
        ax.set_yticks(range(len(mine)), [row.title for row in mine])
        ax.invert_yaxis()
        ax.set_title(group)
        ax.grid(axis="y", visible=False)
    axes[-1].set_xlabel("fewest GPUs" if gpus else "largest rate (workflows/s)")
    axes[-1].set_xlim(left=0)
    return figure
