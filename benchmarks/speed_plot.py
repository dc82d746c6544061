"""The picture of `benchmarks/speed.py`: speed and memory against the number of calls, and speed against the load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axis import Axis
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FixedLocator, NullLocator

from chimsim.figures_style import SCREEN, grid, line_legend, line_styles, paper_style, write_figure

Run = dict[str, Any]
_BASE: dict[str, Any] = {"linestyle": ":", "markerfacecolor": "white"}
_THIS: dict[str, Any] = {"linestyle": "-", "markeredgecolor": "white", "markeredgewidth": 0.4}
_GREY = "#7F7F7F"


def draw(runs: Sequence[Run], path: Path) -> bool:
    """Write the figure, a panel for each thing that was measured; False where there is nothing to draw."""
    panels: list[tuple[str, str, str, str, Callable[[Run], float]]] = [
        ("growth", "calls", "LLM calls", "calls per CPU second", lambda run: run["calls"] / run["cpu_s"]),
        ("growth", "calls", "LLM calls", "peak memory, MB", lambda run: run["peak_mb"]),
        ("load", "rps", "workflows per second", "calls per CPU second", lambda run: run["calls"] / run["cpu_s"]),
    ]
    panels = [panel for panel in panels if any(run["scenario"] == panel[0] for run in runs)]
    if not panels:
        return False
    styles = line_styles([run["policy"] for run in runs])
    lines = sorted({(run["version"], run["policy"]) for run in runs})
    with paper_style(SCREEN):
        figure, axes = grid(SCREEN, 1, len(panels))
        for ax, (scenario, x, x_label, y_label, value) in zip(axes[0], panels, strict=True):
            for version, policy in lines:
                mine = [
                    run for run in runs
                    if (run["scenario"], run["version"], run["policy"]) == (scenario, version, policy)
                ]  # fmt: skip
                points = sorted((run[x], value(run)) for run in mine)
                colour, marker = styles[policy]
                look = _BASE if version == "base" else _THIS
                ax.plot(*zip(*points, strict=True), color=colour, marker=marker, **look)
            ax.set_xscale("log")
            ax.set_yscale("log")
            low, high = ax.get_ylim()
            ax.set_ylim(low / 2, high * 2)
            _ticks(ax.xaxis, (1,) if x == "calls" else (1, 3))
            _ticks(ax.yaxis, (1, 2, 5))
            ax.set_xlabel(x_label)
            ax.set_ylabel(y_label)
        base = Line2D([], [], color=_GREY, marker="o", label="base", **_BASE)
        line_legend(SCREEN, figure, styles, [("base", base)] if lines[0][0] == "base" else [])
        write_figure(figure, [path])
    return True


def _ticks(axis: Axis, digits: Sequence[int]) -> None:
    """Numbers (``100k``) at these digits of every decade, however short the axis is."""
    axis.set_major_locator(FixedLocator([digit * 10.0**power for power in range(9) for digit in digits]))
    axis.set_major_formatter(EngFormatter(sep=""))
    axis.set_minor_locator(NullLocator())
