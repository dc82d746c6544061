"""The picture of a workflow: a bar a stage over time, coloured by what the time was spent on.

It draws a `Story` and computes nothing new. The same story gives the same bytes.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from chimsim.errors import ChimsimError
from chimsim.explain import PARTS, Story
from chimsim.plots import FORMATS, paper_style, write_figure

# Okabe and Ito's; what is lost is hatched, so that print without colours tells it too.
_COLOURS = {
    "tool": "#BBBBBB",
    "predictor": "#CC79A7",
    "waiting": "#E69F00",
    "prefill": "#56B4E9",
    "decode": "#0072B2",
    "again": "#D55E00",
    "recompute": "#F0E442",
}
_HATCHES = {"waiting": "////", "again": "xxxx"}


def picture_format(path: Path) -> str:
    """The format that a file's name asks for. Raises `ChimsimError` if it is none of ours."""
    name = path.suffix.lstrip(".").lower()
    if name not in FORMATS:
        raise ChimsimError(f"{path}: expected a name that ends in {', '.join(f'.{known}' for known in FORMATS)}")
    return name


def draw_story(story: Story, path: Path) -> None:
    """Write the picture to a file, in its suffix's format."""
    with paper_style():
        write_figure(story_figure(story), [path])


def story_figure(story: Story) -> Figure:
    """Stages from top to bottom, time from the workflow's arrival; arrows lead along the critical path."""
    arrived_at = story.workflow["arrived_at"]
    figure = Figure(figsize=(7.2, 1.3 + 0.32 * len(story.stages)), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.add_subplot()
    rows = {stage.stage: row for row, stage in enumerate(story.stages)}
    drawn = [piece for stage in story.stages for piece in stage.pieces]
    for piece in drawn:
        ax.barh(
            rows[piece.stage],
            piece.end_at - piece.begin_at,
            left=piece.begin_at - arrived_at,
            height=0.62,
            color=_COLOURS[piece.part],
            hatch=_HATCHES.get(piece.part),
            edgecolor="white",
            linewidth=0.0,
        )
    by_stage = {stage.stage: stage for stage in story.stages}
    for stage in story.stages:
        if stage.waited_for is not None:
            critical = stage.stage in story.critical and stage.waited_for in story.critical
            at = by_stage[stage.waited_for].call["finished_at"] - arrived_at
            ax.annotate(
                "",
                xy=(at, rows[stage.stage]),
                xytext=(at, rows[stage.waited_for]),
                arrowprops={
                    "arrowstyle": "->",
                    "linewidth": 1.2 if critical else 0.6,
                    "color": "black" if critical else "#777777",
                },
            )
    ax.set_yticks(
        list(rows.values()), [f"{stage.stage} {stage.name}\n{stage.call['engine']}" for stage in story.stages]
    )
    for label, stage in zip(ax.get_yticklabels(), story.stages, strict=True):
        label.set_fontweight("bold" if stage.stage in story.critical else "normal")
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    ax.set_xlim(left=0)
    ax.set_xlabel("seconds after the workflow's arrival; bold: the critical path")
    latency_s = story.workflow["latency_s"]
    title = f"{story.workflow['workflow_id']}: {latency_s:.2f} s" if story.path else "rejected"
    ax.set_title(title)
    used = [part for part in PARTS if any(piece.part == part for piece in drawn)]
    handles = [Patch(facecolor=_COLOURS[p], hatch=_HATCHES.get(p), edgecolor="white", label=p) for p in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(used), frameon=False)
    return figure
