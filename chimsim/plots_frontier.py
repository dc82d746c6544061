"""The frontier: latency against solved rate, as a figure and as the table of its points."""

from __future__ import annotations

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from chimsim.figures_rows import knob_lines, panel_rows, panel_tables
from chimsim.figures_style import SCREEN, Entry, Look, grid, line_legend, line_styles
from chimsim.metrics import mean_and_interval, non_dominated

LATENCIES = {
    "mean": ("mean_workflow_latency_s", "mean workflow latency (s)"),
    "p99": ("p99_workflow_latency_s", "p99 workflow latency (s)"),
    "per-token": ("latency_per_token_ms", "latency per output token (ms)"),
}
_GREY = "#444444"


def frontier(summary: pd.DataFrame, latency: str = "mean", look: Look = SCREEN) -> Figure:
    """Latency against solved rate: a column a combination, a row a trace and rate, a line a policy over its knob.

    Bars are 95 % intervals over the seeds; a ring marks a point that no other of its panel beats, a hollow marker one
    whose backlog still grew at the last arrival (overloaded, or too short a run).
    """
    column, label = LATENCIES[latency]
    data = knob_lines(summary)
    combos = list(dict.fromkeys(data["combo"]))
    rows = panel_rows(data)
    styles = line_styles(list(data["series"]))
    figure, axes = grid(look, len(rows), len(combos))
    spans: dict[str, list[pd.DataFrame]] = {}
    for r, (title, part) in enumerate(rows):
        for c, combo in enumerate(combos):
            ax = axes[r][c]
            points = _points(part[part["combo"] == combo], column)
            _draw_points(ax, points, styles, look)
            if r == 0:
                ax.set_title(str(combo))
            if c == 0:
                ax.set_ylabel(f"{title}\nsolved (%)" if title else "solved (%)")
            if r == len(rows) - 1:
                ax.set_xlabel(label)
            spans.setdefault(title, []).append(points)
    for r, (title, _) in enumerate(rows):
        low, high = _limits(pd.concat(spans[title]), "y")
        for c in range(len(combos)):
            axes[r][c].set_ylim(max(low, -2.0), min(high, 102.0))
    ring = Line2D([], [], marker="o", color="none", markeredgecolor=_GREY, markersize=_ring_pt())
    extra: list[Entry] = [("not dominated", ring)]
    drawn = pd.concat([points for found in spans.values() for points in found])
    if not drawn["steady"].all():
        # in the lines' own markers, for one alone would look like a policy's
        shapes = dict.fromkeys(styles[str(series)][1] for series in drawn.loc[~drawn["steady"], "series"])
        hollow = tuple(
            Line2D([], [], marker=marker, color=_GREY, markerfacecolor="white", linestyle="none")
            for marker in list(shapes)[:3]
        )
        extra.append(("hollow: not steady", hollow))
    line_legend(look, figure, styles, extra)
    return figure


def frontier_table(summary: pd.DataFrame, latency: str = "mean") -> pd.DataFrame:
    """The points of `frontier`, one a row, with the half widths of their bars; of one seed there are none."""
    column, _ = LATENCIES[latency]
    stem, _, unit = column.rpartition("_")
    named = {
        "x": column,
        "dx": f"{stem}_half_width_{unit}",
        "y": "solved_percent",
        "dy": "solved_half_width_percent",
        "best": "not_dominated",
    }
    data = knob_lines(summary)
    table = panel_tables(data, lambda panel: _points(panel, column)).rename(columns=named)
    table.loc[table["tau"] < 0, ["knob", "tau"]] = np.nan
    table = table.rename(columns={"tau": "knob_value"})
    table.loc[table["seeds"] < 2, [named["dx"], named["dy"]]] = np.nan
    return table


def _points(panel: pd.DataFrame, column: str) -> pd.DataFrame:
    """One row a series and tau: mean and interval over the seeds of latency (x) and solved per cent (y)."""
    rows = []
    keyed = panel.assign(tau=panel["tau"].fillna(-1.0))
    for (series, tau), group in keyed.groupby(["series", "tau"], sort=False, observed=True):
        x, dx = mean_and_interval(group[column])
        y, dy = mean_and_interval(100 * group["solved_rate"])
        if x == x and y == y:
            steady = "not_steady" not in group or not group["not_steady"].astype(bool).any()
            knob = str(group["knob"].iloc[0])
            rows.append((str(series), knob, float(str(tau)), len(group), x, dx, y, dy, steady))
    points = pd.DataFrame(rows, columns=["series", "knob", "tau", "seeds", "x", "dx", "y", "dy", "steady"])
    points["best"] = non_dominated(list(zip(points["x"], points["y"], strict=True)))
    return points.astype({"steady": bool, "best": bool})


def _draw_points(ax: Axes, points: pd.DataFrame, styles: dict[str, tuple[str, str]], look: Look) -> None:
    for series, (colour, marker) in styles.items():
        mine = points[points["series"] == series].sort_values("tau", kind="stable")
        if mine.empty:
            continue
        ax.errorbar(
            mine["x"], mine["y"], xerr=mine["dx"], yerr=mine["dy"], color=colour, marker=marker,
            elinewidth=0.6, capsize=0, zorder=3, markeredgecolor="white", markeredgewidth=0.4,
        )  # fmt: skip
        growing = mine[~mine["steady"]]
        ax.plot(growing["x"], growing["y"], marker, color=colour, markerfacecolor="white", zorder=3.5)
        if len(mine) > 1:
            for row in (0, len(mine) - 1):
                tau = float(mine["tau"].iloc[row])
                ax.annotate(
                    f"{mine['knob'].iloc[row]} {tau:g}", (mine["x"].iloc[row], mine["y"].iloc[row]),
                    xytext=(5, -9), textcoords="offset points", fontsize=look.note_pt, color=colour, zorder=5,
                )  # fmt: skip
    best = points[points["best"]]
    ax.plot(best["x"], best["y"], "o", markersize=_ring_pt(), markerfacecolor="none", markeredgecolor=_GREY,
            markeredgewidth=0.9, zorder=4)  # fmt: skip
    if points.empty:
        return
    x = points["x"].to_numpy()
    if x.min() > 0 and x.max() > 10 * x.min():
        ax.set_xscale("log")
        ax.set_xlim(x.min() / 1.5, x.max() * 1.8)
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.xaxis.set_minor_formatter(NullFormatter())
    else:
        low, high = _limits(points, "x")
        ax.set_xlim(max(low, 0.0), high)
        ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.yaxis.set_major_locator(MaxNLocator(5))


def _ring_pt() -> float:
    return 2 * float(matplotlib.rcParams["lines.markersize"])


def _limits(points: pd.DataFrame, axis: str) -> tuple[float, float]:
    """Room for the points and for their bars, but for bars no more than half of what the points span.

    With two seeds an interval is 12.7 standard errors wide and would press the points into one spot.
    """
    values, halves = points[axis].to_numpy(), points[f"d{axis}"].to_numpy()
    if not len(values):
        return 0.0, 100.0
    span = max(float(values.max() - values.min()), 0.2 * float(abs(values).max()), 1e-9)
    halves = np.minimum(halves, 0.5 * span)
    pad = 0.08 * span
    return float((values - halves).min()) - pad, float((values + halves).max()) + pad
