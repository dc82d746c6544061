"""Figures of a results folder: frontier, queue times, latency distributions, utilisation over time.

They read folders only. The same folder gives the same bytes, on the screen and in a paper.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from chimsim.errors import ChimsimError, near
from chimsim.figures_rows import CHOICES, choose, panel_rows, plain_text, series_labels
from chimsim.figures_style import (
    FORMATS,
    LOOKS,
    Look,
    check_room,
    paper_style,
    policy_colour,
    sized,
    write_figure,
)
from chimsim.plots_frontier import LATENCIES, frontier, frontier_table
from chimsim.plots_runs import cdf_table, latency_cdf, queue_bars, queue_table, utilisation, utilisation_table
from chimsim.results import Results, write_file

__all__ = [
    "FORMATS", "KINDS", "LATENCIES", "STYLES", "draw", "frontier", "latency_cdf", "panel_rows", "paper_style",
    "policy_colour", "queue_bars", "series_labels", "utilisation", "write_figure",
]  # fmt: skip

KINDS = ("frontier", "queue", "cdf", "utilisation")
STYLES = tuple(LOOKS)


@dataclass(frozen=True, slots=True)
class _Drawing:
    """A figure that can be made, and the table of the numbers in it."""

    stem: str
    figure: Callable[[], Figure]
    table: Callable[[], pd.DataFrame]


def draw(
    results: Results,
    kinds: Sequence[str] = KINDS,
    *,
    latency: str = "mean",
    formats: Sequence[str] = (),
    style: str = "screen",
    width_in: float | None = None,
    height_in: float | None = None,
    csv: bool = False,
    only: Mapping[str, Sequence[str]] | None = None,
) -> list[Path]:
    """Draw the figures of a folder; the files written, in order. A kind that has no data is left out.

    Of style ``screen`` they are beside the results, of style ``paper`` in the folder ``paper`` there, each with the
    numbers drawn as CSV (on the screen with ``csv``). ``only`` keeps some values of trace, combo, rps or policy, which
    then are part of the files' names. Formats are those of the style unless given; sizes are in inches.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise ChimsimError(f"plot {kind!r} is unknown; choose from {', '.join(KINDS)}{near(kind, KINDS)}")
    for name in formats:
        if name not in FORMATS:
            raise ChimsimError(f"format {name!r} is unknown; choose from {', '.join(FORMATS)}")
    if latency not in LATENCIES:
        raise ChimsimError(f"latency {latency!r} is unknown; choose from {', '.join(LATENCIES)}")
    if style not in LOOKS:
        raise ChimsimError(f"style {style!r} is unknown; choose from {', '.join(LOOKS)}{near(style, LOOKS)}")
    look = sized(LOOKS[style], width_in, height_in)
    summary = results.summary
    if summary.empty:
        raise ChimsimError(f"{results.path} has no finished cell to draw")
    chosen = {axis: only[axis] for axis in CHOICES if only and only.get(axis)}
    summary = choose(summary, chosen)
    paper = style == "paper"
    folder = results.path / "paper" if paper else results.path
    written: list[Path] = []
    with paper_style(look):
        for kind in kinds:
            for drawing in _drawings(results, summary, kind, latency, look, chosen):
                figure = drawing.figure()
                if paper or width_in or height_in:
                    check_room(figure, drawing.stem)
                folder.mkdir(exist_ok=True)
                paths = [folder / f"{drawing.stem}.{name}" for name in formats or look.formats]
                written += write_figure(figure, paths)
                if paper or csv:
                    path = folder / f"{drawing.stem}.csv"
                    write_file(path, drawing.table().to_csv(index=False, lineterminator="\n").encode())
                    written.append(path)
    return written


def _name(choice: tuple[str, Sequence[str]]) -> str:
    """What a choice adds to the names of files."""
    axis, values = choice
    words = "+".join(re.sub(r"[^\w.+-]", "_", plain_text(value)) for value in values)
    return f"-{words}rps" if axis == "rps" else f"-{words}"


def _drawings(
    results: Results,
    summary: pd.DataFrame,
    kind: str,
    latency: str,
    look: Look,
    chosen: Mapping[str, Sequence[str]],
) -> Iterator[_Drawing]:
    choice = "".join(map(_name, chosen.items()))
    if kind == "frontier":
        if not summary["solved_rate"].notna().any():
            return
        suffix = "" if latency == "mean" else f"-{latency}"
        traces = list(dict.fromkeys(summary["trace"]))
        parts = [(choice, summary)]
        if len(traces) > 1:
            rest = "".join(_name(item) for item in chosen.items() if item[0] != "trace")
            parts += [(f"-{trace}{rest}", summary[summary["trace"] == trace]) for trace in traces]
        for name, part in parts:
            yield _Drawing(
                f"frontier{name}{suffix}",
                lambda part=part: frontier(part, latency, look),  # type: ignore[misc]
                lambda part=part: frontier_table(part, latency),  # type: ignore[misc]
            )
    elif kind == "queue":
        yield _Drawing(f"queue{choice}", lambda: queue_bars(summary, look), lambda: queue_table(summary))
    elif kind == "cdf":
        yield _Drawing(f"cdf{choice}", lambda: latency_cdf(results, summary, look), lambda: cdf_table(results, summary))
    else:
        yield _Drawing(
            f"utilisation{choice}",
            lambda: utilisation(results, summary, look),
            lambda: utilisation_table(results, summary),
        )
