"""The figures of studies that simulate nothing: lengths of a trace, how well they are ordered, what routers know.

They draw what `chimsim.reproduce.studies` found, and write the numbers beside it. The same rows give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from chimsim.metrics import mean_and_interval
from chimsim.plots import paper_style, write_figure
from chimsim.reproduce.studies import workflow_tokens
from traces import load_trace

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def draw_study(kind: str, summary: pd.DataFrame, keys: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw a study's figure into its folder, as .png and .svg; the files written."""
    with paper_style():
        return write_figure(_FIGURES[kind](summary, keys), [folder / f"{kind}.png", folder / f"{kind}.svg"])


def _lengths(summary: pd.DataFrame, keys: Mapping[str, Any]) -> Figure:
    """A panel a trace: the share of workflows with at most so many output tokens, a line a model."""
    figure, axes = _panels(len(keys["trace"]))
    for ax, name in zip(axes, keys["trace"], strict=True):
        trace = load_trace(name)
        for index, model in enumerate(keys.get("models") or trace.models):
            tokens = np.sort(workflow_tokens(trace, model))
            share = 100 * np.arange(1, len(tokens) + 1) / len(tokens)
            ax.plot(tokens, share, color=_COLOURS[index % len(_COLOURS)], label=model)
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_xlabel("output tokens of a workflow")
        ax.set_title(trace.name)
    axes[0].set_ylabel("workflows (%)")
    _legend(figure, axes[0])
    return figure


def _bars(metric: str, label: str) -> Callable[[pd.DataFrame, Mapping[str, Any]], Figure]:
    def draw(summary: pd.DataFrame, keys: Mapping[str, Any]) -> Figure:
        """A panel a trace: groups of bars a model, a bar a method, 95 % intervals over the folds."""
        traces = list(dict.fromkeys(summary["trace"]))
        methods = list(dict.fromkeys(summary["policy"]))
        figure, axes = _panels(len(traces))
        for ax, trace in zip(axes, traces, strict=True):
            rows = summary[summary["trace"] == trace]
            groups = list(dict.fromkeys(rows["combo"]))
            for index, method in enumerate(methods):
                found = [
                    mean_and_interval(rows.loc[(rows["combo"] == g) & (rows["policy"] == method), metric])
                    for g in groups
                ]
                means, halves = zip(*found, strict=True)
                places = np.arange(len(groups)) + (index - (len(methods) - 1) / 2) * 0.8 / len(methods)
                ax.bar(places, means, 0.8 / len(methods), yerr=halves, color=_COLOURS[index], label=method,
                       error_kw={"elinewidth": 0.8, "ecolor": "#777777"})  # fmt: skip
            ax.set_xticks(range(len(groups)), groups, rotation=20, ha="right")
            ax.grid(visible=False, axis="x")
            ax.set_title(trace)
        axes[0].set_ylabel(label)
        _legend(figure, axes[0])
        return figure

    return draw


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(max(4.2, 3.2 * count), 2.8), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _legend(figure: Figure, ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3), frameon=False)


_FIGURES: dict[str, Callable[[pd.DataFrame, Mapping[str, Any]], Figure]] = {
    "lengths": _lengths,
    "ranking": _bars("kendall_distance", "Kendall-tau distance"),
    "router": _bars("map", "mean average precision"),
}
