"""The figure of a router's evaluation: reliability of each model's confidence, and the routing curve.

It draws scores of `calibration.router_eval` and computes nothing new. The same scores give the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from chimsim.errors import ChimsimError
from chimsim.plots import FORMATS, paper_style, write_figure

_LINES = (
    ("#0072B2", "o"), ("#D55E00", "D"), ("#009E73", "P"), ("#CC79A7", "X"), ("#E69F00", "s"), ("#56B4E9", "v"),
)  # fmt: skip
_FEW = 10
"""Bins with fewer workflows than this are not drawn: their rate is chance."""


def check_format(path: Path) -> None:
    """Raises `ChimsimError` where the suffix is not of a format that figures are written in."""
    kind = path.suffix.lstrip(".").lower()
    if kind not in FORMATS:
        raise ChimsimError(f"{path}: expected a figure ending in {', '.join('.' + name for name in FORMATS)}")


def draw_router(scores: Sequence[tuple[str, Mapping[str, Any]]], path: Path) -> None:
    """Write the figure: reliability of the first router's models, and the routing curves of all.

    Args:
        scores: name and scores of each router, of `calibration.router_eval.evaluate`.
        path: .png, .svg or .pdf.
    """
    check_format(path)
    with paper_style():
        write_figure(router_figure(scores), [path])


def router_figure(scores: Sequence[tuple[str, Mapping[str, Any]]]) -> Figure:
    """The figure by itself; with one model there is no routing curve."""
    routed = [(name, each) for name, each in scores if "curve" in each]
    figure = Figure(figsize=(6.8 if routed else 3.6, 3.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if routed else 1, squeeze=False)[0]
    name, first = scores[0]
    _draw_reliability(axes[0], first)
    axes[0].set_title("reliability" if len(scores) == 1 else f"reliability, {name}")
    if routed:
        _draw_curves(axes[1], routed)
    return figure


def _draw_reliability(ax: Axes, scores: Mapping[str, Any]) -> None:
    ax.plot([0, 100], [0, 100], color="#999999", linewidth=0.8, linestyle=(0, (4, 2)))
    for i, (model, each) in enumerate(scores["models"].items()):
        colour, marker = _LINES[i % len(_LINES)]
        points = np.array([(q, y) for q, y, count in each["reliability"] if count >= _FEW]).reshape(-1, 2)
        ax.plot(
            100 * points[:, 0], 100 * points[:, 1], color=colour, marker=marker, markeredgecolor="white",
            markeredgewidth=0.4, label=f"{model} (ECE {each['ece']:.3f})",
        )  # fmt: skip
    ax.set_xlim(0, 100)
    ax.set_ylim(0, 100)
    ax.set_xlabel("confidence (%)")
    ax.set_ylabel("solved (%)")
    ax.legend(frameon=False, loc="upper left", fontsize=6.5, handlelength=1.4)


def _draw_curves(ax: Axes, routed: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    small, large = routed[0][1]["pair"]
    table = np.array(routed[0][1]["curve"]) * 100
    ax.plot(table[:, 0], table[:, 1], color="#999999", linewidth=0.9, linestyle=(0, (4, 2)), label="random mixing")
    for i, (name, each) in enumerate(routed):
        curve = np.array(each["curve"]) * 100
        label = f"{name if len(routed) > 1 else 'router'} ({each['curve_area']:.3f})"
        ax.plot(curve[:, 0], curve[:, 2], color=_LINES[i % len(_LINES)][0], label=label)
    ax.plot(table[:, 0], table[:, 3], color="#444444", linewidth=0.9, linestyle=(0, (1.5, 1.2)), label="oracle")
    ax.set_xlim(0, 100)
    ax.set_title("routing")
    ax.set_xlabel(f"calls to {large} instead of {small} (%)")
    ax.set_ylabel("solved (%)")
    ax.legend(frameon=False, loc="best", fontsize=6.5, handlelength=1.6)
