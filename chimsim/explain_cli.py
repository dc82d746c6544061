"""``chimsim explain``: one workflow of a results folder, in words, numbers and a picture.

The cell is simulated again, watched, and must give the records that the folder holds. It changes no folder.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from chimsim.errors import ChimsimError, near
from chimsim.explain import Story, rows_of, sum_parts, tell, went_first, workflow_row
from chimsim.explain_text import Ahead, print_slowest, print_story
from chimsim.grid import Cell, plan
from chimsim.records import RunResult
from chimsim.results import Results, canonical, check_file, ordered_json_bytes
from chimsim.spec import read_spec, scalar_text, spec_from
from chimsim.sweeps import run_cell
from chimsim.watch import Watch

SLOWEST = 5
_FIRST = "policy tau rps slots combo trace seed"


def explain_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Results folder of a run or sweep, or a cell in it.")],
    workflow: Annotated[str | None, typer.Argument(metavar="WORKFLOW_ID", help="Default: list the slowest.")] = None,
    cell: Annotated[
        str | None, typer.Option("--cell", help="Which of several: a hash's beginning, or policy=fcfs,rps=8")
    ] = None,
    slowest: Annotated[int | None, typer.Option(min=1, help=f"List so many of the slowest ({SLOWEST}).")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw it: a file .png, .svg or .pdf")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, with every piece of time.")] = False,
) -> None:
    """Tell where a workflow's time went, and why the policy sent it where it did.

    \b
    chimsim run --trace apps --combo qwen1.5b+7b --policy chimera --rps 8 --out results/x
    chimsim explain results/x --slowest 3
    chimsim explain results/x apps-000017 --plot apps-000017.png
    chimsim explain results/sweep apps-000017 --cell policy=chimera,tau=1,seed=0
    """
    from chimsim.explain_plot import draw_story, picture_format

    if plot is not None:
        picture_format(plot)
        check_file(plot)
    if workflow is None and plot is not None:
        raise ChimsimError("--plot draws one workflow: give its id, or leave --plot away to list the slowest")
    if workflow is not None and slowest is not None:
        raise ChimsimError("give a workflow's id or --slowest, not both")
    folder, chosen = _place(run, cell)
    results = Results(folder)
    name = find_cell(results, chosen)
    if workflow is None:
        rows = slowest_rows(results.table(name, "workflows"), slowest or SLOWEST)
        if as_json:
            typer.echo(ordered_json_bytes({"cell": name, "slowest": rows}).decode(), nl=False)
            return
        print_slowest(rows)
        if rows:
            typer.echo(f"\nchimsim explain {run} {rows[0]['workflow_id']}" + (f" --cell {cell}" if cell else ""))
        return
    workflow_row(results.table(name, "workflows"), workflow)
    planned, result, watch = simulate_again(results, name)
    story = tell(result, watch, workflow)
    ahead = {stage.stage: went_first(stage.call, result.requests) for stage in story.stages}
    if as_json:
        typer.echo(
            ordered_json_bytes({"cell": name, "config": planned.config, **story_dict(story, ahead)}).decode(), nl=False
        )
    else:
        print_story(story, ahead, planned.title, planned.config["policy"].replace(", explain=False", ""))
    if plot is not None:
        draw_story(story, plot)
        typer.echo(f"written: {plot}", err=as_json)


def _place(run: Path, cell: str | None) -> tuple[Path, str | None]:
    """The results folder, and which cell; RUN may be a cell's own folder."""
    if run.parent.name == "cells" and (run / "config.json").is_file():
        if cell is not None:
            raise ChimsimError(f"{run} is one cell: leave --cell away, or name the results folder")
        return run.parent.parent, run.name
    return run, cell


def find_cell(results: Results, wanted: str | None) -> str:
    """The hash of the one finished cell that is meant. Raises `ChimsimError` if it is none, or several."""
    finished = set(results.cells)
    cells: dict[str, dict[str, Any]] = {
        e["hash"]: e["axes"] for e in results.manifest["cells"] if e["hash"] in finished
    }
    if not cells:
        raise ChimsimError(f"{results.path} has no finished cell to explain")
    if wanted is None:
        found = list(cells)
    elif "=" in wanted:
        pairs = [text.partition("=")[::2] for text in wanted.split(",")]
        axes = {axis for each in cells.values() for axis in each}
        for axis, _ in pairs:
            if axis not in axes:
                raise ChimsimError(f"--cell {wanted}: {axis!r} is no axis of this sweep{near(axis, axes)}")
        found = [name for name, each in cells.items() if all(_same(each.get(axis), text) for axis, text in pairs)]
    else:
        found = [name for name in cells if name.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    several = [cells[name] for name in found or cells]
    varying = {axis: dict.fromkeys(scalar_text(each.get(axis)) for each in several) for axis in several[0]}
    order = sorted((a for a in varying if len(varying[a]) > 1), key=lambda a: (_FIRST.find(a) < 0, _FIRST.find(a), a))
    shown = "; ".join(f"{axis} {', '.join(varying[axis])}" for axis in order[:4])
    if not found:
        there = f" ({shown})" if shown else ""
        raise ChimsimError(f"--cell {wanted}: none of the {len(cells)} finished cells of {results.path}{there}")
    example = []
    left = several
    for axis in order:
        same = [each for each in left if each.get(axis) == several[0].get(axis)]
        if len(same) < len(left):
            example.append(f"{axis}={scalar_text(several[0].get(axis))}")
            left = same
    raise ChimsimError(
        f"{len(found)} cells of {results.path} are meant ({shown}): choose, say --cell {','.join(example)}"
    )


def _same(value: Any, text: str) -> bool:
    try:
        return float(value) == float(text)
    except (TypeError, ValueError):
        return scalar_text(value) == text


def slowest_rows(workflows: pd.DataFrame, count: int) -> list[dict[str, Any]]:
    """The completed workflows of the longest latencies, longest first."""
    done = workflows[workflows["status"].astype(str) == "completed"]
    top = done.sort_values(["latency_s", "workflow"], ascending=[False, True]).head(count)
    columns = ["workflow_id", "latency_s", "slowdown", "queue_time_s", "stages", "output_tokens", "model", "solved"]
    return rows_of(top[columns])


def simulate_again(results: Results, name: str) -> tuple[Cell, RunResult, Watch]:
    """The cell, run again and watched. Raises `ChimsimError` where that does not give the records that are there."""
    if results.manifest.get("live"):
        raise ChimsimError(f"{results.path} is of a live run, which cannot be run again; explain takes simulated ones")
    axes = next(entry["axes"] for entry in results.manifest["cells"] if entry["hash"] == name)
    manifest = results.path / "manifest.json"
    spec = spec_from({}, read_spec(manifest), source=str(manifest))
    planned = next((cell for cell in plan(spec)[0] if cell.name == name or canonical(cell.axes) == axes), None)
    if planned is None:
        raise ChimsimError(f"{manifest}: this chimsim plans other cells than those in the folder; run the sweep again")
    watch = Watch()
    result, _ = run_cell(planned, watch)
    for table in ("requests", "workflows"):
        difference = first_difference(results.table(name, table), getattr(result, table))
        if difference:
            there, here = results.config(name), canonical(planned.config)
            changed = ", ".join(key for key in here if here[key] != there.get(key)) or "chimsim's code, or the file"
            raise ChimsimError(
                f"{results.path}/cells/{name}: run again, it does not give the {table} stored there ({difference}); "
                f"what has changed: {changed}. Run it into a new folder"
            )
    return planned, result, watch


def first_difference(stored: pd.DataFrame, again: pd.DataFrame) -> str:
    """Where two tables part, in words; nothing if they are equal."""
    if len(stored) != len(again) or list(stored) != list(again):
        return f"{len(stored)} rows of {len(stored.columns)} columns there, {len(again)} of {len(again.columns)} here"
    for column in stored:
        there, here = (_plain(frame[column]) for frame in (stored, again))
        differ = (there != here) & ~(there.isna() & here.isna())
        if differ.any():
            row = int(differ.to_numpy().argmax())
            return f"row {row}, {column}: {there.iloc[row]} there, {here.iloc[row]} here"
    return ""


def _plain(values: pd.Series) -> pd.Series:
    return values.astype("str") if isinstance(values.dtype, pd.CategoricalDtype) or values.dtype == object else values


def story_dict(story: Story, ahead: Ahead) -> dict[str, Any]:
    """The story for machines; instants in seconds from the run's start, pieces as [part, stage, begin, end]."""
    return {
        "workflow": story.workflow,
        "parts_s": story.parts_s,
        "critical_path": story.critical,
        "path": story.path,
        "stages": [
            {
                "stage": stage.stage,
                "name": stage.name,
                "waited_for": stage.waited_for,
                "critical": stage.stage in story.critical,
                "spare_s": stage.spare_s,
                "went_first": ahead[stage.stage][0],
                "came_later": ahead[stage.stage][1],
                "parts_s": sum_parts(stage.pieces),
                "pieces": stage.pieces,
                "decision": asdict(stage.decision),
                "request": stage.call,
            }
            for stage in story.stages
        ],
    }
