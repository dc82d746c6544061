"""How figures look, on the screen and in a paper: colours, markers, fonts, sizes, legends, and their bytes.

It knows neither folders nor metrics. The same figure gives the same bytes: fixed fonts and hash salt, no dates.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any, cast

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D

from chimsim.errors import ChimsimError
from chimsim.results import write_file

FORMATS = ("png", "svg", "pdf")

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
    "costaware": ("#7A3E9D", "d"),
}
_SPARE = [
    ("#1F9EA8", "H"),
    ("#B8A800", "p"),
    ("#556B2F", "h"),
    ("#7F7F7F", "<"),
    ("#4D4D4D", "*"),
]
_MARKERS = ("o", "s", "^", "v", "P", "X", "<", ">", "p", "h")
"""Of the further settings of one label."""
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: list[Any] = ["-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.2, 1.5))]
_SCREEN_RC = {
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
    # labels are the user's words, not formulas
    "text.parse_math": False,
}
_PAPER_RC = {
    **_SCREEN_RC,
    "font.size": 7.0,
    "axes.titlesize": 8.0,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7.0,
    "ytick.labelsize": 7.0,
    "legend.fontsize": 7.0,
    "lines.linewidth": 1.0,
    "lines.markersize": 3.5,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.pad": 2.0,
    "ytick.major.pad": 2.0,
}
SINGLE_IN, DOUBLE_IN = 3.5, 7.16
"""Widths of one column and of both of a paper in two columns (IEEE's; ACM's are 3.33 and 7)."""
Entry = tuple[str, Line2D | tuple[Line2D, ...]]
"""A legend's text and its line, or several markers side by side."""
_LEAST_IN = 0.55
"""A panel that is smaller, in inches, shows nothing."""


@dataclass(frozen=True, slots=True)
class Look:
    """One style. Sizes are in inches; ``width_in`` and ``height_in`` None mean by the number of panels."""

    name: str
    rc: Mapping[str, Any]
    formats: tuple[str, ...]
    note_pt: float
    letter_in: float
    width_in: float | None = None
    height_in: float | None = None


SCREEN = Look("screen", _SCREEN_RC, ("png", "svg"), note_pt=6.5, letter_in=0.065)
PAPER = Look("paper", _PAPER_RC, ("pdf", "svg"), note_pt=7.0, letter_in=0.057)
LOOKS = {look.name: look for look in (SCREEN, PAPER)}


def sized(look: Look, width_in: float | None, height_in: float | None) -> Look:
    """The style at a size of one's own. Raises `ChimsimError` for a size that no page has."""
    for name, value in (("width", width_in), ("height", height_in)):
        if value is not None and not 0.5 <= value <= 60:
            raise ChimsimError(f"{name} {value:g} is in inches; expected 0.5 to 60")
    return replace(look, width_in=width_in, height_in=height_in)


def policy_colour(policy: str) -> str:
    """The colour of a policy in all figures; those of users share one."""
    return _STYLES.get(policy, _SPARE[0])[0]


def line_styles(series: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of every line. Shipped policies keep theirs whatever is drawn beside them.

    Several settings of one label (``stjf aging=0``, ``stjf aging=10``) are tints of its colour, each with a marker.
    """
    labels = list(dict.fromkeys(series))
    families: dict[str, list[str]] = {}
    for label in labels:
        families.setdefault(label.split(" ")[0], []).append(label)
    styles: dict[str, tuple[str, str]] = {}
    spare = 0
    for first, members in families.items():
        colour, marker = _STYLES.get(first) or _SPARE[spare % len(_SPARE)]
        if first not in _STYLES:
            # a colour that comes again has another marker
            marker = marker if spare < len(_SPARE) else _MARKERS[spare % len(_MARKERS)]
            spare += 1
        for number, label in enumerate(members):
            tint = 0.6 * number / max(len(members) - 1, 1)
            styles[label] = (_tinted(colour, tint), _MARKERS[number % len(_MARKERS)] if number else marker)
    return {label: styles[label] for label in labels}


def _tinted(colour: str, share: float) -> str:
    """The colour with this share of white in it."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02X}" for part in parts)


@contextmanager
def paper_style(look: Look = SCREEN) -> Iterator[None]:
    """Figures made meanwhile look alike, whatever the user's own matplotlib settings are."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(cast(Any, look.rc))
        yield


def write_figure(figure: Figure, paths: Sequence[Path]) -> list[Path]:
    """Write the figure to each path, in its suffix's format, inside `paper_style`: the same figure, the same bytes."""
    for path in paths:
        write_file(path, _figure_bytes(figure, path.suffix.lstrip(".").lower()))
    return list(paths)


def check_room(figure: Figure, name: str) -> None:
    """Raises `ChimsimError` if the figure's size leaves its panels, or its words, no room."""
    width, height = figure.get_size_inches()
    with warnings.catch_warnings():
        # what matplotlib says where nothing is left is said here
        warnings.simplefilter("ignore", UserWarning)
        figure.draw_without_rendering()
    panels = [ax.get_window_extent() for ax in figure.axes]
    least = _LEAST_IN * figure.dpi
    words = figure.get_tightbbox()
    labels = [ax.yaxis.label.get_window_extent() for ax in figure.axes if ax.get_ylabel()]
    over = any(first.overlaps(second) for first, second in pairwise(labels))
    outside = words.x0 < -0.01 or words.y0 < -0.01 or words.x1 > width + 0.01 or words.y1 > height + 0.01
    if outside or over or any(panel.width < least or panel.height < least for panel in panels):
        raise ChimsimError(
            f"{name}: {len(panels)} panels and their labels do not fit in {width:g} x {height:g} inches; "
            "draw fewer (--trace, --combo, --rps, --policy) or give more --width or --height"
        )


def grid(look: Look, rows: int, columns: int, height: float = 1.75) -> tuple[Figure, list[list[Axes]]]:
    """A figure of panels; ``height`` is a row's in inches where there are several (on the screen)."""
    if look.name == "paper":
        width = SINGLE_IN if columns == 1 else DOUBLE_IN
        tall = (1.9 if rows == 1 else 0.8 * height * rows) + 0.4
    else:
        width = 3.6 if columns == 1 else min(2.5 * columns, 1.9 * columns + 1.0)
        width, tall = max(4.2, width), (2.4 if rows == 1 else height * rows) + 0.7
    figure = Figure(figsize=(look.width_in or width, look.height_in or tall), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, [list(row) for row in axes]


def line_legend(
    look: Look,
    figure: Figure,
    styles: Mapping[str, tuple[str, str]],
    extra: Sequence[Entry] = (),
    *,
    line: Any = "-",
    dashes: bool = False,
) -> None:
    """The legend of lines by their colours and markers, then ``extra`` entries."""
    handles = [
        Line2D(
            [], [], color=colour, marker=marker or None, label=label, markeredgecolor="white",
            markeredgewidth=0.4, linestyle=DASHES[i % len(DASHES)] if dashes else line,
        )
        for i, (label, (colour, marker)) in enumerate(styles.items())
    ]  # fmt: skip
    bottom_legend(look, figure, [*((str(handle.get_label()), handle) for handle in handles), *extra])


def bottom_legend(look: Look, figure: Figure, entries: Sequence[Entry]) -> None:
    """A legend below the panels, in as many columns as the figure's width has room for."""
    labels = [label for label, _ in entries]
    # a letter is about so wide, and the handle 0.45 in
    columns = max(1, min(len(labels), int(figure.get_figwidth() / (look.letter_in * max(map(len, labels)) + 0.45))))
    rows = ceil(len(labels) / columns)
    columns = ceil(len(labels) / rows)
    if look.height_in is None and rows > 3:
        # the panels would otherwise be what gives way
        figure.set_figheight(figure.get_figheight() + 0.17 * (rows - 3))
    # matplotlib takes tuples as handles, its types do not know
    handles = cast(Any, [handle for _, handle in entries])
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False,
                  handlelength=1.8, columnspacing=1.2,
                  handler_map={tuple: HandlerTuple(ndivide=None, pad=0.3)})  # fmt: skip


def _figure_bytes(figure: Figure, kind: str) -> bytes:
    sink = io.BytesIO()
    metadata: dict[str, Any] = {
        "png": {"Software": None},
        "svg": {"Date": None, "Creator": None},
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    }[kind]
    figure.savefig(sink, format=kind, dpi=200, metadata=metadata)
    return sink.getvalue()
