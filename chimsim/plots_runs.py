"""Queue times, latency distributions and engines over time, each as a figure and as the table of what is drawn."""

from __future__ import annotations

from math import isnan, nan

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from chimsim.figures_rows import one_tau, panel_rows, panel_tables, series_labels
from chimsim.figures_style import DASHES, PALETTE, SCREEN, Entry, Look, bottom_legend, grid, line_legend, line_styles
from chimsim.metrics import mean_and_interval
from chimsim.results import Results

_SHARE = np.linspace(0, 1, 401)


def queue_bars(summary: pd.DataFrame, look: Look = SCREEN) -> Figure:
    """Mean queue time of a request, a bar a policy (the middle of its taus), with 95 % intervals."""
    data = one_tau(summary.assign(series=series_labels(summary)))
    combos = list(dict.fromkeys(data["combo"]))
    rows = panel_rows(data)
    styles = line_styles(list(data["series"]))
    figure, axes = grid(look, len(rows), len(combos))
    for r, (title, part) in enumerate(rows):
        for c, combo in enumerate(combos):
            ax = axes[r][c]
            bars = _queue_means(part[part["combo"] == combo]).set_index("series")
            for i, (series, (colour, _)) in enumerate(styles.items()):
                if series in bars.index:
                    mean, half = (float(bars.loc[series, name]) for name in ("mean", "half"))  # type: ignore[arg-type]
                    below = min(half, mean)
                    ax.bar(i, mean, yerr=[[below], [half]], width=0.75, color=colour, ecolor="#777777",
                           error_kw={"elinewidth": 0.8})  # fmt: skip
            ax.set_xticks([])
            ax.grid(visible=False, axis="x")
            ax.yaxis.set_major_locator(MaxNLocator(5))
            if r == 0:
                ax.set_title(str(combo))
            if c == 0:
                ax.set_ylabel(f"{title}\nmean queue time (s)" if title else "mean queue time (s)")
    line_legend(look, figure, {label: (colour, "s") for label, (colour, _) in styles.items()}, line="none")
    return figure


def queue_table(summary: pd.DataFrame) -> pd.DataFrame:
    """The bars of `queue_bars`, one a row; the half width of one seed is empty, and bars end at 0."""
    data = one_tau(summary.assign(series=series_labels(summary)))
    table = panel_tables(data, _queue_means)
    table.loc[table["seeds"] < 2, "half"] = nan
    return table.rename(columns={"mean": "mean_queue_time_s", "half": "mean_queue_time_half_width_s"})


def _queue_means(panel: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for series, group in panel.groupby("series", sort=False, observed=True):
        mean, half = mean_and_interval(group["mean_queue_time_s"])
        if not isnan(mean):
            rows.append((str(series), len(group), mean, half))
    return pd.DataFrame(rows, columns=["series", "seeds", "mean", "half"])


def latency_cdf(results: Results, summary: pd.DataFrame, look: Look = SCREEN) -> Figure:
    """Distribution of workflow latencies, all seeds together, a line per policy (the middle of its taus)."""
    data = one_tau(summary.assign(series=series_labels(summary)))
    combos = list(dict.fromkeys(data["combo"]))
    rows = panel_rows(data)
    styles = line_styles(list(data["series"]))
    figure, axes = grid(look, len(rows), len(combos))
    for r, (title, part) in enumerate(rows):
        for c, combo in enumerate(combos):
            ax = axes[r][c]
            lines = _latency_shares(results, part[part["combo"] == combo])
            for i, (series, (colour, _)) in enumerate(styles.items()):
                mine = lines[lines["series"] == series]
                if len(mine):
                    ax.plot(
                        mine["workflow_latency_s"].to_numpy(),
                        mine["workflows_percent"].to_numpy(),
                        color=colour,
                        linestyle=DASHES[i % len(DASHES)],
                    )
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            ax.xaxis.set_minor_formatter(NullFormatter())
            if r == 0:
                ax.set_title(str(combo))
            if c == 0:
                ax.set_ylabel(f"{title}\nworkflows (%)" if title else "workflows (%)")
            if r == len(rows) - 1:
                ax.set_xlabel("workflow latency (s)")
    line_legend(look, figure, {label: (colour, "") for label, (colour, _) in styles.items()}, dashes=True)
    return figure


def cdf_table(results: Results, summary: pd.DataFrame) -> pd.DataFrame:
    """The lines of `latency_cdf`: the latency within which so many per cent of the workflows ended."""
    data = one_tau(summary.assign(series=series_labels(summary)))
    return panel_tables(data, lambda panel: _latency_shares(results, panel))


def _latency_shares(results: Results, panel: pd.DataFrame) -> pd.DataFrame:
    parts = []
    for series, group in panel.groupby("series", sort=False, observed=True):
        tables = [results.table(str(cell), "workflows") for cell in group["cell"]]
        all_of = pd.concat(tables, ignore_index=True)
        latency = all_of.loc[all_of["measured"].astype(bool), "latency_s"].dropna().to_numpy()
        if len(latency):
            line = {"workflow_latency_s": np.quantile(latency, _SHARE), "workflows_percent": 100 * _SHARE}
            parts.append(pd.DataFrame({"series": str(series), **line}))
    return pd.concat(parts) if parts else pd.DataFrame(columns=["series", "workflow_latency_s", "workflows_percent"])


def utilisation(results: Results, summary: pd.DataFrame, look: Look = SCREEN) -> Figure:
    """Running and waiting requests of each engine over time: first seed, a row a policy, a column a cluster.

    Engines of one model share its colour. An axis ends where fewer than 3 % of the most requests are left, for a
    heavy-tailed last workflow would take most of the width.
    With several traces or rates it shows the first trace at its middle rate; `Results.table` has the rest.
    """
    title, part = _shown_runs(summary)
    combos = list(dict.fromkeys(part["combo"]))
    series = list(dict.fromkeys(part["series"]))
    figure, axes = grid(look, len(series), len(combos), height=1.25)
    names: list[str] = []
    ends = [0.0] * len(combos)
    for r, label in enumerate(series):
        for c, combo in enumerate(combos):
            ax = axes[r][c]
            cell = part[(part["series"] == label) & (part["combo"] == combo)]
            if len(cell):
                timeline = results.table(str(cell["cell"].iloc[0]), "timeline")
                inside = timeline.groupby("time_s")[["running", "waiting"]].sum().sum(axis=1)
                ends[c] = max(ends[c], float(inside.index[inside >= 0.03 * inside.max()].max()))
                for engine, samples in timeline.groupby("engine", observed=True, sort=True):
                    model = str(engine).split("/")[0]
                    if model not in names:
                        names.append(model)
                    colour = PALETTE[names.index(model) % len(PALETTE)]
                    for name, width, line in (("running", 0.9, "-"), ("waiting", 0.8, ":")):
                        ax.plot(
                            samples["time_s"],
                            samples[name],
                            color=colour,
                            linewidth=width,
                            linestyle=line,
                            drawstyle="steps-post",
                        )
            ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))
            if r == 0:
                ax.set_title(str(combo))
            if c == 0:
                ax.set_ylabel(f"{label}\nrequests")
            if r == len(series) - 1:
                ax.set_xlabel("time (s)")
    for column, end in zip(zip(*axes, strict=True), ends, strict=True):
        top = max(ax.get_ylim()[1] for ax in column)
        for ax in column:
            ax.set_ylim(0, top)
            ax.set_xlim(0, max(end, 1.0))
    entries: list[Entry] = [(name, Line2D([], [], color=PALETTE[i % len(PALETTE)])) for i, name in enumerate(names)]
    entries += [
        ("running", Line2D([], [], color="#444444")),
        ("waiting", Line2D([], [], color="#444444", linestyle=":")),
    ]
    if title:
        figure.suptitle(title.replace("\n", ", "), fontsize=look.rc["axes.titlesize"])
    bottom_legend(look, figure, entries)
    return figure


def utilisation_table(results: Results, summary: pd.DataFrame) -> pd.DataFrame:
    """The lines of `utilisation`: requests in and in front of each engine at each sampled instant, to the run's end."""
    _, part = _shown_runs(summary)

    def samples(panel: pd.DataFrame) -> pd.DataFrame:
        parts = []
        for series, group in panel.groupby("series", sort=False, observed=True):
            timeline = results.table(str(group["cell"].iloc[0]), "timeline")
            timeline = timeline[["engine", "time_s", "running", "waiting"]].sort_values("engine", kind="stable")
            parts.append(timeline.assign(series=str(series)))
        named = {"running": "running_requests", "waiting": "waiting_requests"}
        return pd.concat(parts)[["series", "engine", "time_s", "running", "waiting"]].rename(columns=named)

    return panel_tables(part, samples)


def _shown_runs(summary: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """The one trace and rate that `utilisation` shows, in words, and its cells of the first seed."""
    data = one_tau(summary.assign(series=series_labels(summary)))
    data = data[data["seed"] == data["seed"].iloc[0]]
    rows = panel_rows(data)
    first = rows[0][1]["trace"].iloc[0]
    same = [row for row in rows if row[1]["trace"].iloc[0] == first]
    return same[len(same) // 2]
