"""Figures of a results folder: frontier, queue times, latency distributions, utilisation over time.

They read folders only. The same folder gives the same bytes: fixed fonts and hash salt, no dates, no display.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from chimsim.errors import ChimsimError, near
from chimsim.metrics import mean_and_interval, non_dominated
from chimsim.results import Results, write_file
from chimsim.spec import scalar_text

KINDS = ("frontier", "queue", "cdf", "utilisation")
FORMATS = ("png", "svg", "pdf")
LATENCIES = {
    "mean": ("mean_workflow_latency_s", "mean workflow latency (s)"),
    "p99": ("p99_workflow_latency_s", "p99 workflow latency (s)"),
    "per-token": ("latency_per_token_ms", "latency per output token (ms)"),
}

# Okabe and Ito's colours, which colour-blind readers can tell apart; the markers carry the same information
_STYLES = {
    "fcfs": ("#000000", "o"),
    "sjf": ("#56B4E9", "v"),
    "stjf": ("#0072B2", "^"),
    "mlfq": ("#E69F00", "s"),
    "ltr": ("#009E73", "P"),
    "plas": ("#CC79A7", "X"),
    "atlas": ("#8C564B", ">"),
    "chimera": ("#D55E00", "D"),
}
_SPARE = [
    ("#7F7F7F", "<"),
    ("#B8A800", "p"),
    ("#5B3F8C", "h"),
    ("#4D4D4D", "*"),
    ("#1F9EA8", "d"),
]
_STYLE = {
    "font.family": ["DejaVu Sans"],
    "font.size": 8.0,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.0,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 8.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "grid.linewidth": 0.4,
    "grid.color": "#DDDDDD",
    "axes.axisbelow": True,
    "lines.linewidth": 1.2,
    "lines.markersize": 4.5,
    "svg.hashsalt": "chimsim",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
    "axes.unicode_minus": False,
}
_PANEL = ("trace", "slots", "rps", "burstiness")
_QUIET = ("tau", "seed", "trace", "combo", "cell")


def draw(
    results: Results,
    kinds: Sequence[str] = KINDS,
    *,
    latency: str = "mean",
    formats: Sequence[str] = ("png", "svg"),
) -> list[Path]:
    """Draw the figures into the folder; the files written, in order. A kind that has no data is left out."""
    for kind in kinds:
        if kind not in KINDS:
            raise ChimsimError(f"plot {kind!r} is unknown; choose from {', '.join(KINDS)}{near(kind, KINDS)}")
    for name in formats:
        if name not in FORMATS:
            raise ChimsimError(f"format {name!r} is unknown; choose from {', '.join(FORMATS)}")
    if latency not in LATENCIES:
        raise ChimsimError(f"latency {latency!r} is unknown; choose from {', '.join(LATENCIES)}")
    summary = results.summary
    if summary.empty:
        raise ChimsimError(f"{results.path} has no finished cell to draw")
    written: list[Path] = []
    with paper_style():
        for kind in kinds:
            for stem, figure in _figures(results, summary, kind, latency):
                written += write_figure(figure, [results.path / f"{stem}.{name}" for name in formats])
    return written


def policy_colour(policy: str) -> str:
    """The colour of a policy in all figures; those of users share one."""
    return _STYLES.get(policy, _SPARE[0])[0]


@contextmanager
def paper_style() -> Iterator[None]:
    """Figures made meanwhile look alike, whatever the user's own matplotlib settings are."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(cast(Any, _STYLE))
        yield


def write_figure(figure: Figure, paths: Sequence[Path]) -> list[Path]:
    """Write the figure to each path, in its suffix's format, inside `paper_style`: the same figure, the same bytes."""
    for path in paths:
        write_file(path, _figure_bytes(figure, path.suffix.lstrip(".").lower()))
    return list(paths)


def _figures(results: Results, summary: pd.DataFrame, kind: str, latency: str) -> Iterator[tuple[str, Figure]]:
    suffix = "" if latency == "mean" else f"-{latency}"
    if kind == "frontier":
        if not summary["solved_rate"].notna().any():
            return
        yield f"frontier{suffix}", frontier(summary, latency)
        traces = list(dict.fromkeys(summary["trace"]))
        if len(traces) > 1:
            for trace in traces:
                yield f"frontier-{trace}{suffix}", frontier(summary[summary["trace"] == trace], latency)
    elif kind == "queue":
        yield "queue", queue_bars(summary)
    elif kind == "cdf":
        yield "cdf", latency_cdf(results, summary)
    else:
        yield "utilisation", utilisation(results, summary)


_SHORT = {"length_predictor": "len", "rank_predictor": "rank"}
"""Axes whose own names would leave no room for their values in a label."""


def series_labels(summary: pd.DataFrame) -> pd.Series:
    """What each row's line is called: the policy, and whatever else varies inside a panel, but not tau."""
    labels = summary["policy"].astype(str)
    for name in _axis_columns(summary):
        if name in _QUIET or name in _PANEL or name == "policy":
            continue
        for policy, rows in summary.groupby("policy", observed=True, sort=False):
            if rows[name].nunique(dropna=True) > 1:
                mine = (summary["policy"] == policy) & summary[name].notna()
                short = _SHORT.get(name, name)
                labels[mine] = labels[mine] + [f" {short}={scalar_text(value)}" for value in summary.loc[mine, name]]
    return labels


def frontier(summary: pd.DataFrame, latency: str = "mean") -> Figure:
    """Latency against solved rate: a column a combination, a row a trace and rate, a line a policy over tau.

    Bars are 95 % intervals over the seeds; a ring marks a point that no other of its panel beats, a hollow marker one
    whose backlog still grew at the last arrival (overloaded, or too short a run).
    """
    column, label = LATENCIES[latency]
    data = summary.assign(series=series_labels(summary))
    combos = list(dict.fromkeys(data["combo"]))
    rows = panel_rows(data)
    styles = _styles(data)
    figure, axes = _grid(len(rows), len(combos))
    spans: dict[str, list[pd.DataFrame]] = {}
    for r, (title, part) in enumerate(rows):
        for c, combo in enumerate(combos):
            ax = axes[r][c]
            panel = part[part["combo"] == combo]
            points = _points(panel, column)
            _draw_frontier(ax, points, styles)
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
    ring = Line2D([], [], marker="o", color="none", markeredgecolor="#444444", markersize=9, label="not dominated")
    hollow = Line2D([], [], marker="s", color="#444444", markerfacecolor="white", linestyle="none", label="not steady")
    _legend(figure, styles, [ring, hollow])
    return figure


def _points(panel: pd.DataFrame, column: str) -> pd.DataFrame:
    """One row a series and tau: mean and interval over the seeds of latency (x) and solved per cent (y)."""
    rows = []
    keyed = panel.assign(tau=panel["tau"].fillna(-1.0)) if "tau" in panel else panel.assign(tau=-1.0)
    for (series, tau), group in keyed.groupby(["series", "tau"], sort=False, observed=True):
        x, dx = mean_and_interval(group[column])
        y, dy = mean_and_interval(100 * group["solved_rate"])
        if x == x and y == y:
            steady = "not_steady" not in group or not group["not_steady"].astype(bool).any()
            rows.append((str(series), float(str(tau)), x, dx, y, dy, steady))
    points = pd.DataFrame(rows, columns=["series", "tau", "x", "dx", "y", "dy", "steady"])
    points["best"] = non_dominated(list(zip(points["x"], points["y"], strict=True)))
    return points


def _draw_frontier(ax: Axes, points: pd.DataFrame, styles: dict[str, tuple[str, str]]) -> None:
    for series, (colour, marker) in styles.items():
        mine = points[points["series"] == series].sort_values("tau", kind="stable")
        if mine.empty:
            continue
        ax.errorbar(
            mine["x"], mine["y"], xerr=mine["dx"], yerr=mine["dy"], color=colour, marker=marker,
            elinewidth=0.6, capsize=0, zorder=3, markeredgecolor="white", markeredgewidth=0.4,
        )  # fmt: skip
        growing = mine[~mine["steady"].astype(bool)]
        ax.plot(growing["x"], growing["y"], marker, color=colour, markerfacecolor="white", zorder=3.5)
        if len(mine) > 1:
            for row in (0, len(mine) - 1):
                tau = float(mine["tau"].iloc[row])
                ax.annotate(
                    f"tau {tau:g}", (mine["x"].iloc[row], mine["y"].iloc[row]),
                    xytext=(5, -9), textcoords="offset points", fontsize=6.5, color=colour, zorder=5,
                )  # fmt: skip
    best = points[points["best"].astype(bool)]
    ax.plot(best["x"], best["y"], "o", markersize=9, markerfacecolor="none", markeredgecolor="#444444",
            markeredgewidth=0.9, zorder=4)  # fmt: skip
    if points.empty:
        return
    x = points["x"].to_numpy()
    if x.min() > 0 and x.max() > 10 * x.min():
        ax.set_xscale("log")
        ax.set_xlim(x.min() / 1.5, x.max() * 1.8)
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.xaxis.set_minor_formatter(NullFormatter())
    else:
        low, high = _limits(points, "x")
        ax.set_xlim(max(low, 0.0), high)
        ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.yaxis.set_major_locator(MaxNLocator(5))


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


def queue_bars(summary: pd.DataFrame) -> Figure:
    """Mean queue time of a request, a bar a policy (the middle of its taus), with 95 % intervals."""
    data = _one_tau(summary.assign(series=series_labels(summary)))
    combos = list(dict.fromkeys(data["combo"]))
    rows = panel_rows(data)
    styles = _styles(data)
    figure, axes = _grid(len(rows), len(combos))
    for r, (title, part) in enumerate(rows):
        for c, combo in enumerate(combos):
            ax = axes[r][c]
            panel = part[part["combo"] == combo]
            for i, (series, (colour, _)) in enumerate(styles.items()):
                mean, half = mean_and_interval(panel.loc[panel["series"] == series, "mean_queue_time_s"])
                if mean == mean:
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
    _legend(figure, {label: (colour, "s") for label, (colour, _) in styles.items()}, [], line="none")
    return figure


def latency_cdf(results: Results, summary: pd.DataFrame) -> Figure:
    """Distribution of workflow latencies, all seeds together, a line per policy (the middle of its taus)."""
    data = _one_tau(summary.assign(series=series_labels(summary)))
    combos = list(dict.fromkeys(data["combo"]))
    rows = panel_rows(data)
    styles = _styles(data)
    figure, axes = _grid(len(rows), len(combos))
    share = np.linspace(0, 1, 401)
    for r, (title, part) in enumerate(rows):
        for c, combo in enumerate(combos):
            ax = axes[r][c]
            panel = part[part["combo"] == combo]
            for i, (series, (colour, _)) in enumerate(styles.items()):
                frames = [
                    results.table(str(cell), "workflows") for cell in panel.loc[panel["series"] == series, "cell"]
                ]
                if not frames:
                    continue
                all_of = pd.concat(frames, ignore_index=True)
                latency = all_of.loc[all_of["measured"].astype(bool), "latency_s"].dropna().to_numpy()
                if len(latency):
                    ax.plot(
                        np.quantile(latency, share),
                        100 * share,
                        color=colour,
                        linestyle=_DASHES[i % len(_DASHES)],
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
    _legend(figure, {label: (colour, "") for label, (colour, _) in styles.items()}, [], dashes=True)
    return figure


_DASHES: list[Any] = ["-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.2, 1.5))]


def utilisation(results: Results, summary: pd.DataFrame) -> Figure:
    """Running and waiting requests of each engine over time: first seed, a row a policy, a column a cluster.

    Engines of one model share its colour. An axis ends where fewer than 3 % of the most requests are left, for a
    heavy-tailed last workflow would take most of the width.
    With several traces or rates it shows the first trace at its middle rate; `Results.table` has the rest.
    """
    data = _one_tau(summary.assign(series=series_labels(summary)))
    data = data[data["seed"] == data["seed"].iloc[0]]
    rows = panel_rows(data)
    title, part = rows[0]
    same = [row for row in rows if row[1]["trace"].iloc[0] == part["trace"].iloc[0]]
    title, part = same[len(same) // 2]
    combos = list(dict.fromkeys(part["combo"]))
    series = list(dict.fromkeys(part["series"]))
    figure, axes = _grid(len(series), len(combos), height=1.25)
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
                    colour = _PALETTE[names.index(model) % len(_PALETTE)]
                    ax.plot(
                        samples["time_s"],
                        samples["running"],
                        color=colour,
                        linewidth=0.9,
                        drawstyle="steps-post",
                    )
                    ax.plot(
                        samples["time_s"],
                        samples["waiting"],
                        color=colour,
                        linewidth=0.8,
                        linestyle=":",
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
    handles = [Line2D([], [], color=_PALETTE[i % len(_PALETTE)], label=name) for i, name in enumerate(names)]
    handles += [
        Line2D([], [], color="#444444", label="running"),
        Line2D([], [], color="#444444", linestyle=":", label="waiting"),
    ]
    if title:
        figure.suptitle(title.replace("\n", ", "), fontsize=8.5)
    _bottom_legend(figure, handles)
    return figure


_PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def _axis_columns(summary: pd.DataFrame) -> list[str]:
    columns = [str(name) for name in summary.columns]
    return columns[: columns.index("cell")]


def panel_rows(data: pd.DataFrame, always: Sequence[str] = ()) -> list[tuple[str, pd.DataFrame]]:
    """The rows of a figure: each combination of trace, slots, rate and burstiness, titled by those that vary.

    Those named in ``always`` are part of the title even if they do not vary.
    """
    names = [name for name in _PANEL if name in data]
    rows = []
    for key, part in data.groupby(names, sort=False, dropna=False, observed=True):
        values = key if isinstance(key, tuple) else (key,)
        shown = [
            _panel_word(name, value)
            for name, value in zip(names, values, strict=True)
            if name in always or data[name].nunique(dropna=False) > 1
        ]
        rows.append((", ".join(shown), part))
    return rows


def _panel_word(name: str, value: Any) -> str:
    missing = value is None or value != value
    if name == "trace":
        return str(value)
    if name == "rps":
        return "recorded arrivals" if missing else f"{scalar_text(value)} rps"
    if name == "slots":
        return "profile's slots" if missing else f"{scalar_text(value)} slots"
    return f"{name} {scalar_text(value)}"


def _styles(data: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Colour and marker of every line, the same whatever subset is drawn for the shipped policies."""
    styles: dict[str, tuple[str, str]] = {}
    spare = 0
    for series in dict.fromkeys(str(name) for name in data["series"]):
        policy = series.split(" (")[0]
        if policy in _STYLES:
            styles[series] = _STYLES[policy]
        else:
            styles[series] = _SPARE[spare % len(_SPARE)]
            spare += 1
    return styles


def _one_tau(data: pd.DataFrame) -> pd.DataFrame:
    """Of a policy with several taus only the middle one (the lower of two), said in its name."""
    if "tau" not in data:
        return data
    parts = []
    for _, part in data.groupby("series", sort=False, observed=True):
        taus = sorted(part["tau"].dropna().unique())
        if len(taus) > 1:
            tau = taus[(len(taus) - 1) // 2]
            part = part[part["tau"] == tau]
            part = part.assign(series=[f"{name} (tau {tau:g})" for name in part["series"]])
        parts.append(part)
    chosen = pd.concat(parts)
    return chosen.loc[[index for index in data.index if index in chosen.index]]


def _grid(rows: int, columns: int, height: float = 1.75) -> tuple[Figure, list[list[Axes]]]:
    width = 3.6 if columns == 1 else min(2.5 * columns, 1.9 * columns + 1.0)
    figure = Figure(figsize=(max(4.2, width), (2.4 if rows == 1 else height * rows) + 0.7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, [list(row) for row in axes]


def _legend(
    figure: Figure,
    styles: dict[str, tuple[str, str]],
    extra: Sequence[Line2D],
    *,
    line: Any = "-",
    dashes: bool = False,
) -> None:
    handles = [
        Line2D(
            [], [], color=colour, marker=marker or None, label=label, markeredgecolor="white",
            markeredgewidth=0.4, linestyle=_DASHES[i % len(_DASHES)] if dashes else line,
        )
        for i, (label, (colour, marker)) in enumerate(styles.items())
    ]  # fmt: skip
    _bottom_legend(figure, [*handles, *extra])


def _bottom_legend(figure: Figure, handles: Sequence[Line2D]) -> None:
    longest = max(len(str(handle.get_label())) for handle in handles)
    # about 0.065 in a letter at 8 pt, plus the handle
    columns = max(1, min(len(handles), int(figure.get_figwidth() / (0.065 * longest + 0.45))))
    columns = ceil(len(handles) / ceil(len(handles) / columns))
    figure.legend(handles=list(handles), loc="outside lower center", ncols=columns, frameon=False,
                  handlelength=1.8, columnspacing=1.2)  # fmt: skip


def _figure_bytes(figure: Figure, kind: str) -> bytes:
    sink = io.BytesIO()
    metadata: dict[str, Any] = {
        "png": {"Software": None},
        "svg": {"Date": None, "Creator": None},
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    }[kind]
    figure.savefig(sink, format=kind, dpi=200, metadata=metadata)
    return sink.getvalue()
