"""``chimsim report``: a results folder as one HTML file that opens from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chimsim.options import note, note_incomplete
from chimsim.results import Results


def report_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Results folder of a sweep or an experiment.")],
    out: Annotated[Path | None, typer.Option(help="The file to write. Default: DIR/report.html")] = None,
) -> None:
    """Write a report of a results folder: one HTML file, no network needed.

    \b
    chimsim report results/first
    chimsim report results/fig5 --out fig5.html
    """
    from chimsim.report_html import write_report

    results = Results(folder)
    note_incomplete(results)
    path = out if out is not None else folder / "report.html"
    size, left_out = write_report(results, path)
    for line in left_out:
        note(f"note: {line}")
    typer.echo(f"{path}  {size / 1e6:.1f} MB")
