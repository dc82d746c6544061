"""The command `chimsim frontier`: what each line of a results folder covers, which points hold, and how surely."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer

from chimsim.errors import ChimsimError
from chimsim.figures_rows import panel_rows
from chimsim.frontier import Frontier, Point, frontier_of, reference_point
from chimsim.metrics import mean_and_interval
from chimsim.options import note_incomplete
from chimsim.plots import LATENCIES
from chimsim.report import aligned, number
from chimsim.results import Results, ordered_json_bytes, own_axes, write_file
from chimsim.spec import POLICY_AXES

STEPS = 60
"""Latencies at which a band is given."""


@dataclass(frozen=True, slots=True)
class _Block:
    """One panel: its lines by name, and the point that their hypervolumes are measured from."""

    title: str
    lines: dict[str, Frontier]
    reference: Point


def frontier_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Results folder of a sweep.")],
    latency: Annotated[str, typer.Option(help=f"Latency: {', '.join(LATENCIES)}")] = "mean",
    reference: Annotated[
        str | None, typer.Option(help="LATENCY,SOLVED that hypervolumes are measured from, say 60,0.2.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Also every line's band over the seeds, as CSV.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say which points are not dominated, in how many seeds, and what each policy's points cover.

    \b
    chimsim frontier results/first
    chimsim frontier results/first --latency p99 --reference 120,0.2
    chimsim frontier results/first --csv bands.csv

    Hypervolume: the area that a policy's points dominate as seen from the reference (latency times solved rate). Unless
    given, the reference lies beyond the slowest and the worst run of a block by a tenth of what its runs span.
    Intervals are 95 % over the seeds.
    """
    if latency not in LATENCIES:
        raise ChimsimError(f"latency {latency!r} is unknown; choose from {', '.join(LATENCIES)}")
    results = Results(folder)
    summary = results.summary
    if summary.empty or not summary["solved_rate"].notna().any():
        raise ChimsimError(f"{folder} has no finished run with solved labels: no frontier")
    note_incomplete(results)
    blocks = list(_blocks(summary, LATENCIES[latency][0], _point(reference)))
    if csv is not None:
        write_file(csv, _bands(blocks).to_csv(index=False, lineterminator="\n").encode())
    if as_json:
        typer.echo(
            ordered_json_bytes({"latency": LATENCIES[latency][0], "blocks": _as_dicts(blocks)}).decode(), nl=False
        )
        return
    unit = LATENCIES[latency][1]
    typer.echo("\n\n".join(_text(block, unit) for block in blocks))
    if csv is not None:
        typer.echo(f"\nwritten: {csv}")


def _point(text: str | None) -> Point | None:
    if text is None:
        return None
    try:
        latency, solved = (float(part) for part in text.split(","))
    except ValueError:
        raise ChimsimError(f"--reference: {text!r} is not of the form LATENCY,SOLVED, such as 60,0.2") from None
    if not (0 < latency < inf and 0 <= solved <= 1):
        raise ChimsimError(f"--reference: {text}: expected a latency above 0 and a solved rate between 0 and 1")
    return latency, solved


def _blocks(summary: pd.DataFrame, metric: str, reference: Point | None) -> Iterator[_Block]:
    for title, part in panel_rows(summary, always=("trace", "rps")):
        for combo, panel in part.groupby("combo", sort=False, observed=True):
            lines = _lines(panel, metric)
            if lines:
                runs = panel[[metric, "solved_rate"]].dropna().itertuples(index=False, name=None)
                yield _Block(f"{combo}  {title}", lines, reference or reference_point(list(runs)))


def _lines(panel: pd.DataFrame, metric: str) -> dict[str, Frontier]:
    """A line a policy and predictor, over all knobs that the policy ran with."""
    lines = {}
    for policy, rows in panel.groupby("policy", sort=False, observed=True):
        predictors = [name for name in own_axes(rows) if name in POLICY_AXES]
        parts = rows.groupby(predictors, sort=False, dropna=False, observed=True) if predictors else [((), rows)]
        for values, mine in parts:
            line = frontier_of(mine, own_axes(mine), metric)
            if line is not None:
                named = [f"{name}={value}" for name, value in zip(predictors, values, strict=True)]
                lines[" ".join([str(policy), *named])] = line
    return lines


def _rows(block: _Block) -> Iterator[dict[str, Any]]:
    """Every setting of every line."""
    lines = list(block.lines.values())
    for name, line in block.lines.items():
        for row, (best, share) in enumerate(line.on_frontier(lines)):
            latency, latency_half = mean_and_interval(line.latency_s[row])
            solved, solved_half = mean_and_interval(line.solved[row])
            yield {
                "policy": name,
                "setting": line.settings[row],
                "latency": latency,
                "latency_half_width": latency_half,
                "solved_rate": solved,
                "solved_half_width": solved_half,
                "not_dominated": best,
                "share_of_seeds": share,
            }


def _text(block: _Block, unit: str) -> str:
    """The points that stand on the frontier, of the means or of a seed, and what each line covers."""
    scale = unit[unit.index("(") + 1 : -1]
    table = [["", "policy", "setting", scale, "", "solved %", "", "seeds"]]
    for row in _rows(block):
        if row["not_dominated"] or row["share_of_seeds"] > 0:
            table.append(
                [
                    "*" if row["not_dominated"] else "",
                    row["policy"],
                    row["setting"],
                    number(row["latency"]),
                    f"±{number(row['latency_half_width'])}",
                    number(100 * row["solved_rate"], 1),
                    f"±{number(100 * row['solved_half_width'], 1)}",
                    f"{row['share_of_seeds']:.0%}",
                ]
            )
    reference = f"{number(block.reference[0])} {scale}, {100 * block.reference[1]:.1f} %"
    volumes = [["hypervolume", f"{scale} x solved", "", f"from {reference}"]]
    for name, line in block.lines.items():
        mean, half = mean_and_interval(line.hypervolumes(block.reference))
        volumes.append([name, f"{mean:.3g}", f"±{half:.2g}", ""])
    return "\n".join([block.title, *aligned(table, "lll"), *aligned(volumes, "lrrl")])


def _as_dicts(blocks: list[_Block]) -> list[dict[str, Any]]:
    return [
        {
            "block": block.title,
            "reference": list(block.reference),
            "points": list(_rows(block)),
            "hypervolume": {
                name: dict(
                    zip(("mean", "half_width"), mean_and_interval(line.hypervolumes(block.reference)), strict=True)
                )
                for name, line in block.lines.items()
            },
        }
        for block in blocks
    ]


def _bands(blocks: list[_Block]) -> pd.DataFrame:
    """What each line attains at rising latencies: mean and interval over the seeds."""
    rows = []
    for block in blocks:
        fastest = min(line.latency_s.min() for line in block.lines.values())
        latencies = np.linspace(fastest, block.reference[0], STEPS)
        for name, line in block.lines.items():
            for latency, mean, low, high in zip(latencies, *line.band(latencies), strict=True):
                if mean == mean:
                    rows.append({"block": block.title, "policy": name, "latency": latency, "solved_rate": mean,
                                 "low": low, "high": high})  # fmt: skip
    return pd.DataFrame(rows)
