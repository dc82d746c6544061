"""A workflow's story for people: sentences and tables in 80 columns.

It prints what `chimsim.explain` found out, and computes nothing new.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from chimsim.explain import PARTS, StageStory, Story, sum_parts
from chimsim.report import number

WIDTH = 80
Ahead = Mapping[int, tuple[int, int]]
"""`chimsim.explain.went_first` by stage."""

_LEGEND = (
    "q confidence, L time until the predicted tokens in flight on a model are through, y predicted output tokens left; "
    "a lower priority goes first"
)
_SHORT = {"predictor": "pred", "recompute": "redo"}
_IN_WORDS = {
    "tool": "delays between stages",
    "predictor": "predictor time",
    "waiting": "waiting for a place in a batch",
    "prefill": "prefill",
    "decode": "decoding",
    "again": "waiting again after preemptions and yields",
    "recompute": "recomputing after them",
}


def print_slowest(rows: Sequence[Mapping[str, Any]]) -> None:
    """A table of workflows, a row of `chimsim.explain_cli.slowest_rows` each."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("workflow", overflow="fold")
    for head in ("latency s", "x alone", "queue s", "stages", "tokens"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("model", overflow="fold")
    table.add_column("solved")
    for row in rows:
        table.add_row(
            str(row["workflow_id"]),
            *(number(row[key]) for key in ("latency_s", "slowdown", "queue_time_s")),
            str(row["stages"]),
            str(row["output_tokens"]),
            str(row["model"]),
            "-" if isnan(row["solved"]) else "yes" if row["solved"] else "no",
        )
    Console(width=WIDTH).print(table)


def print_story(story: Story, ahead: Ahead, title: str, policy: str) -> None:
    """All of it: words, parts, stages, decisions; ``title`` says which run it is of, ``policy`` with which knobs."""
    console = Console(width=WIDTH, highlight=False)
    for text in (f"{story.workflow['workflow_id']}  ({title})", *words(story, ahead)):
        typer.echo(textwrap.fill(text, WIDTH))
    typer.echo()
    if story.path:
        console.print(_parts_table(story))
        typer.echo()
    console.print(_stages_table(story))
    places: dict[str, list[str]] = {}
    for stage in story.stages:
        places.setdefault(str(stage.call["engine"]), []).append(str(stage.stage))
    where = "; ".join(
        f"{'all' if len(places) == 1 else ', '.join(stages)} on {engine}" for engine, stages in places.items()
    )
    note = f"seconds; from and to count from the workflow's arrival; * on the critical path; {where}"
    typer.echo(textwrap.fill(note, WIDTH))
    typer.echo("\n" + textwrap.fill(f"why, by {policy}:", WIDTH, subsequent_indent="    "))
    if any(stage.decision.latency_ms for stage in story.stages):
        typer.echo(textwrap.fill(_LEGEND, WIDTH))
    for stage in story.stages:
        for line in why(stage, story.workflow["arrived_at"], ahead):
            typer.echo(textwrap.fill(line, WIDTH, subsequent_indent="    "))


def words(story: Story, ahead: Ahead) -> list[str]:
    """The story in sentences."""
    workflow = story.workflow
    if not story.path:
        refused = [stage.stage for stage in story.stages if isnan(stage.call["finished_at"])]
        return [f"rejected: stage {', '.join(map(str, refused))} can never fit its engine; there is no latency"]
    latency_s = workflow["latency_s"]
    parts = sorted(story.parts_s.items(), key=lambda part: -part[1])
    most, second = parts[0], parts[1]
    text = (
        f"{number(latency_s)} s from arrival to the last token, {number(workflow['slowdown'])} times as long as alone "
        f"on an idle engine. Of it {_share(most, latency_s)}"
        + (f", {_share(second, latency_s)}." if second[1] else ".")
    )
    found = [text]
    by_stage = {stage.stage: stage for stage in story.stages}
    path = [by_stage[stage] for stage in story.critical]
    if len(path) < len(story.stages):
        steps = " > ".join(f"{stage.stage} {stage.name}" for stage in path)
        found.append(f"Critical path: {steps}.")
        found += [_join_words(stage, by_stage) for stage in path if len(stage.decision.after) > 1]
    longest = max(path, key=lambda stage: sum_parts(stage.pieces)["waiting"])
    waited_s = sum_parts(longest.pieces)["waiting"]
    if waited_s:
        found.append(
            f"The longest wait: {longest.stage} {longest.name}, {number(waited_s)} s. {_queue_words(longest, ahead)}"
        )
    return found


def _join_words(stage: StageStory, by_stage: Mapping[int, StageStory]) -> str:
    """For whom a stage waited that goes on from several, and how long the others had been done."""
    begun_at = stage.pieces[0].begin_at
    name = {number: f"{number} {other.name}" for number, other in by_stage.items()}
    sooner = [
        f"{name[other]} by {number(begun_at - by_stage[other].call['finished_at'])} s"
        for other in stage.decision.after
        if other in by_stage and other != stage.waited_for
    ]
    last = name.get(-1 if stage.waited_for is None else stage.waited_for, "its workflow")
    return f"{name[stage.stage]} waited for {last}; done sooner: {', '.join(sooner) or 'none'}."


def _share(part: tuple[str, float], latency_s: float) -> str:
    return f"{number(part[1])} s ({100 * part[1] / latency_s:.0f} %) {_IN_WORDS[part[0]]}"


def _queue_words(stage: StageStory, ahead: Ahead) -> str:
    first, later = ahead[stage.stage]
    if not first:
        return "Nobody was admitted before it meanwhile."
    whose = f"{later} of them sent there after it" if later else "all sent there before it"
    return f"Meanwhile {stage.call['engine']} admitted {first}, {whose}."


def _parts_table(story: Story) -> Table:
    latency_s = story.workflow["latency_s"]
    table = Table(box=None, pad_edge=False)
    table.add_column("along the path")
    table.add_column("s", justify="right")
    table.add_column("%", justify="right")
    table.add_column("")
    for part, seconds in story.parts_s.items():
        if seconds:
            table.add_row(part, f"{seconds:.3f}", f"{100 * seconds / latency_s:.1f}", PARTS[part])
    table.add_row("latency", f"{latency_s:.3f}", "100.0", "")
    return table


def _stages_table(story: Story) -> Table:
    sums = {stage.stage: sum_parts(stage.pieces) for stage in story.stages}
    parts = [part for part in PARTS if any(each[part] for each in sums.values())]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("stage", overflow="fold")
    graph = any(stage.spare_s > 0 for stage in story.stages)
    for head in ("from", *(_SHORT.get(part, part) for part in parts), "to", *(["spare"] if graph else [])):
        table.add_column(head, justify="right", no_wrap=True)
    arrived_at = story.workflow["arrived_at"]
    for stage in story.stages:
        mark = "*" if stage.stage in story.critical else " "
        table.add_row(
            f"{mark}{stage.stage} {stage.name}",
            f"{stage.pieces[0].begin_at - arrived_at:.2f}",
            *(f"{sums[stage.stage][part]:.2f}" if sums[stage.stage][part] else "" for part in parts),
            "-" if isnan(stage.call["finished_at"]) else f"{stage.call['finished_at'] - arrived_at:.2f}",
            *([f"{stage.spare_s:.2f}" if stage.spare_s > 0 else ""] if graph else []),
        )
    return table


def why(stage: StageStory, arrived_at: float, ahead: Ahead) -> list[str]:
    """What was known when the stage was dispatched, and what came of it."""
    decision = stage.decision
    running, waiting = decision.load[decision.engine]
    lines = [f"{stage.stage} {stage.name}, {decision.at - arrived_at:.2f} s after the arrival: {decision.reason}"]
    if not decision.reason:
        known = "; ".join(
            f"{field} {', '.join(f'{model} {number(value)}' for model, value in sorted(values.items()))}"
            for field, values in decision.known.items()
        )
        lines[0] += f"{decision.engine}, no reason given" + (f"; foretold: {known}" if known else "")
    priority = (
        f"priority {', '.join(f'{key:.1f}' for key in decision.priority)}" if decision.priority else "no priority"
    )
    lines.append(f"  {priority}; {running} running and {waiting} waiting there. {_queue_words(stage, ahead)}")
    if stage.call["preemptions"] or stage.call["yields"]:
        lines.append(f"  {stage.call['preemptions']} preemptions and {stage.call['yields']} yields on its way")
    return lines
