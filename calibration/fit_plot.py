"""Draws a fit beside the data it was made from: a panel a part of the step-time model, and the errors of all."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from calibration.fit import Fit, Residuals

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_POINTS = 4000


def draw_fit(fit: Fit, title: str, format: str) -> bytes:
    """Fitted against measured times, and how the relative errors are distributed, as png, svg or pdf."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    times, errors = figure.subplots(1, 2)
    for index, residuals in enumerate(fit.residuals):
        color = f"C{index}"
        _times(times, residuals, color)
        _errors(errors, residuals, color)
    low, high = times.get_xlim()
    times.plot((low, high), (low, high), color="black", linewidth=0.8, label="fit = data")
    times.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="fitted, ms", title="Each cell of the tables")
    errors.set(
        xscale="log", xlim=(1e-4, 2.0), ylim=(0.0, 1.0), xlabel="relative error, without sign", ylabel="share of cells"
    )
    errors.set_title("Errors, cumulated")
    errors.axvline(0.05, color="black", linewidth=0.5, linestyle=":")
    for axes in (times, errors):
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)
    figure.suptitle(title)
    target = BytesIO()
    figure.savefig(target, format=format, dpi=130)
    return target.getvalue()


def _times(axes: Axes, residuals: Residuals, color: str) -> None:
    cells = residuals.cells[:: max(1, len(residuals.cells) // MOST_POINTS)]
    data_ms = [cell.data_s * 1e3 for cell in cells]
    axes.scatter(
        data_ms,
        [cell.fit_s * 1e3 for cell in cells],
        s=4,
        alpha=0.5,
        color=color,
        label=residuals.part,
        rasterized=True,
    )


def _errors(axes: Axes, residuals: Residuals, color: str) -> None:
    errors = np.sort(np.abs([cell.error for cell in residuals.cells]))
    label = f"{residuals.part}: median {residuals.median:.1%}, p95 {residuals.p95:.1%}"
    axes.plot(np.maximum(errors, 1e-4), np.arange(1, len(errors) + 1) / len(errors), color=color, label=label)
