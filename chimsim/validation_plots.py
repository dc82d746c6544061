"""The figure of a validation: measured and simulated times, per-request errors, and load over time, overlaid.

It draws a `Comparison` and computes nothing new. The same comparison gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from chimsim.plots import paper_style, write_figure
from chimsim.validation import Comparison, relative_errors

Floats = npt.NDArray[np.float64]

MEASURED: dict[str, Any] = {"color": "#000000", "linewidth": 1.3}
SIMULATED: dict[str, Any] = {"color": "#D55E00", "linewidth": 1.1, "linestyle": (0, (4, 1.2))}
# name, title, factor to the axis' unit, label of the axis
_TIMES = (
    ("queue_time_s", "queue time", 1.0, "s"),
    ("ttft_ms", "time to first token", 1e-3, "s"),
    ("tpot_ms", "time per output token", 1.0, "ms"),
    ("e2el_ms", "end-to-end latency", 1e-3, "s"),
)
_LOAD = (("running", "running requests", 1.0), ("waiting", "waiting requests", 1.0))
_IN_SYSTEM = (("in_system", "requests in the system", 1.0),)
_KV = (("kv_used_fraction", "KV memory used (%)", 100.0),)
_ERRORS: tuple[tuple[str, str, str, Any], ...] = (
    ("e2el_ms", "end to end", "#0072B2", "-"),
    ("tpot_ms", "TPOT", "#009E73", "--"),
    ("ttft_ms", "TTFT", "#CC79A7", ":"),
)


def draw_validation(comparison: Comparison, folder: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write ``validation.png`` and ``validation.svg`` into the folder; the files written."""
    with paper_style():
        return write_figure(validation_figure(comparison), [folder / f"validation.{name}" for name in formats])


def validation_figure(comparison: Comparison) -> Figure:
    """Distributions of the four times above; load over time and the distribution of each request's error below.

    Without recorded counts of running and waiting requests their panel shows the requests in the system.
    """
    requests, load = comparison.requests, comparison.load
    recorded = bool(load["measured_running"].notna().any())
    panels = (*(_LOAD if recorded else _IN_SYSTEM), *_KV)
    figure = Figure(figsize=(7.4, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    rows = cast(Any, figure.subfigures(2, 1))
    for ax, (name, title, factor, unit) in zip(_axes(rows[0], len(_TIMES)), _TIMES, strict=True):
        measured, simulated = (factor * _values(requests, side, name) for side in ("measured", "simulated"))
        _distribution(ax, measured, **MEASURED)
        _distribution(ax, simulated, **SIMULATED)
        if not np.isfinite(measured).any():
            _note(ax, "measured: not recorded")
        ax.set_title(title)
        ax.set_xlabel(unit)
        ax.set_xlim(left=0)
        if name == _TIMES[0][0]:
            ax.set_ylabel("requests (%)")
    lower = _axes(rows[1], len(panels) + 1)
    for ax, (name, title, factor) in zip(lower, panels, strict=False):
        _over_time(ax, load, name, factor)
        ax.set_title(title)
    _errors(lower[-1], requests)
    handles = [
        Line2D([], [], label="measured", **MEASURED),
        Line2D([], [], label="simulated", **SIMULATED),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, handlelength=2.2)
    return figure


def _axes(part: Any, count: int) -> list[Axes]:
    return list(part.subplots(1, count, squeeze=False)[0])


def _values(table: pd.DataFrame, side: str, name: str) -> Floats:
    return table[f"{side}_{name}"].to_numpy(dtype=np.float64)


def _distribution(ax: Axes, values: Floats, **style: Any) -> None:
    values = np.sort(values[np.isfinite(values)])
    if len(values):
        share = 100 * np.arange(1, len(values) + 1) / len(values)
        ax.plot(np.concatenate([values[:1], values]), np.concatenate([[0.0], share]), drawstyle="steps-post", **style)
    ax.set_ylim(0, 102)
    ax.set_yticks(range(0, 101, 25))
    ax.xaxis.set_major_locator(MaxNLocator(4))


def _over_time(ax: Axes, load: pd.DataFrame, name: str, factor: float) -> None:
    measured, simulated = (factor * _values(load, side, name) for side in ("measured", "simulated"))
    ax.plot(load["time_s"], measured, **MEASURED)
    ax.plot(load["time_s"], simulated, **SIMULATED)
    if not np.isfinite(measured).any():
        _note(ax, "measured: not recorded")
    ax.set_xlabel("time (s)")
    ax.set_xlim(left=0)
    ax.xaxis.set_major_locator(MaxNLocator(4))
    if name == "kv_used_fraction":
        ax.set_ylim(0, 102)
        ax.set_yticks(range(0, 101, 25))
    else:
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))


def _errors(ax: Axes, requests: pd.DataFrame) -> None:
    shown = []
    for name, label, colour, dash in _ERRORS:
        size = np.abs(relative_errors(_values(requests, "measured", name), _values(requests, "simulated", name)))
        if np.isfinite(size).any():
            _distribution(ax, size, color=colour, linestyle=dash)
            shown.append(Line2D([], [], color=colour, linestyle=dash, label=label))
    ax.set_title("error of each request")
    ax.set_xlabel("absolute error (%)")
    ax.set_ylabel("requests (%)")
    # a few requests that hardly queued would press everything else against the axis
    limits = [ax.get_lines()[i].get_xdata() for i in range(len(shown))]
    widest = max((float(np.quantile(np.asarray(x, dtype=np.float64), 0.95)) for x in limits), default=1.0)
    ax.set_xlim(0, max(1.1 * widest, 0.1))
    ax.legend(handles=shown, loc="lower right", frameon=False, handlelength=1.6, fontsize=7)


def _note(ax: Axes, text: str) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    ax.text(0.5, 0.06, text, transform=ax.transAxes, ha="center", fontsize=7, color="#777777", bbox=box)
