"""The figure of a validated live run: each policy's latency live and simulated, and every workflow's.

It draws what `chimsim.live_validation` found and computes nothing new.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from chimsim.live_validation import RANKED, Block, label
from chimsim.plots import paper_style, write_figure
from chimsim.validation_plots import MEASURED, SIMULATED


def draw_live(blocks: Sequence[Block], folder: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write ``live-validation.png`` and ``.svg`` into the folder; the files written."""
    with paper_style():
        return write_figure(live_figure(blocks), [folder / f"live-validation.{name}" for name in formats])


def live_figure(blocks: Sequence[Block]) -> Figure:
    """A row a block: mean latency of each policy with the range of the live repeats; latency CDFs of the policies."""
    most = max(len(block.entries) for block in blocks)
    figure = Figure(figsize=(1.6 * (most + 1) + 0.6, 1.9 * len(blocks) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = cast(Any, figure.subplots(len(blocks), most + 1, squeeze=False))
    for row, block in zip(axes, blocks, strict=True):
        places = np.arange(len(block.entries))
        ax = row[0]
        live = np.array([entry.live[RANKED] for entry in block.entries])
        low = live - [entry.low[RANKED] for entry in block.entries]
        high = [entry.high[RANKED] for entry in block.entries] - live
        ax.errorbar(places - 0.1, live, yerr=[low, high], fmt="o", color=MEASURED["color"], markersize=4, label="live")
        simulated = [entry.simulated[RANKED] for entry in block.entries]
        ax.plot(places + 0.1, simulated, "D", color=SIMULATED["color"], markersize=4, label="simulated")
        ax.set_xticks(places, [label(entry) for entry in block.entries], rotation=30, ha="right")
        ax.margins(y=0.1)
        ax.set_ylim(bottom=0)
        ax.set_xlim(-0.5, len(block.entries) - 0.5)
        ax.set_ylabel("mean latency (s)")
        ax.set_title(block.title)
        for ax, entry in zip(row[1:], block.entries, strict=False):
            for workflows, style in zip(entry.workflows, (MEASURED, SIMULATED), strict=True):
                values = np.sort(workflows["latency_s"].dropna().to_numpy(dtype=float))
                ax.plot(values, 100.0 * np.arange(1, len(values) + 1) / len(values), **style)
            ax.set_title(label(entry))
            ax.set_xlabel("workflow latency (s)")
            ax.set_ylim(0, 101)
            ax.set_xlim(left=0)
        row[1].set_ylabel("workflows (%)")
        for ax in row[1 + len(block.entries) :]:
            ax.set_axis_off()
    axes[0][0].legend(loc="best", fontsize=6.5)
    return figure
