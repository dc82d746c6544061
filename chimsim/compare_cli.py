"""``chimsim compare``: two results folders, or two policies of one, number by number and workflow by workflow.

It parses and prints; `chimsim.compare` computes, `chimsim.compare_text` puts it in words. It changes no folder.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from chimsim.compare import Block, Change, Comparison, WorkflowChanges, compare_folders, compare_policies
from chimsim.compare_text import comparison_text
from chimsim.errors import ChimsimError
from chimsim.options import note_incomplete
from chimsim.results import Results, check_file, ordered_json_bytes, write_file


def compare_command(
    a: Annotated[str, typer.Argument(metavar="A", help="Results folder; with --in a policy: fcfs, chimera:tau=2")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one; differences are B - A.")],
    folder: Annotated[Path | None, typer.Option("--in", help="Results folder of which A and B are policies.")] = None,
    metric: Annotated[
        list[str] | None, typer.Option(help="Columns of the summary, for every block (comma list, repeatable).")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Also write every metric of every block to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Compare two results folders, or two policies of one, seed by seed and workflow by workflow.

    \b
    chimsim compare results/before results/after
    chimsim compare fcfs chimera:tau=1 --in results/first
    chimsim compare fcfs stjf --in results/first --metric p99_workflow_latency_s,longest_wait_s
    chimsim compare chimera:tau=0,router=trace chimera:tau=0,router=none --in results/x --csv routers.csv

    Cells are paired on every axis but those in which A and B differ as a whole. A seed draws the same workflows and
    arrivals for all policies, so intervals are of paired differences. docs/compare.md says more.
    """
    if csv is not None:
        check_file(csv)
    names = [name.strip() for text in metric or [] for name in text.split(",") if name.strip()]
    if folder is not None:
        compared = compare_policies(_opened(folder), a, b, names)
    else:
        for text in (a, b):
            if not Path(text).exists():
                raise ChimsimError(f"{text}: no such folder; to compare policies of one folder give it with --in DIR")
        compared = compare_folders(_opened(Path(a)), _opened(Path(b)), names)
    if csv is not None:
        write_file(csv, comparison_frame(compared).to_csv(index=False, lineterminator="\n").encode())
    if as_json:
        typer.echo(ordered_json_bytes(comparison_dict(compared)).decode(), nl=False)
        return
    typer.echo(comparison_text(compared, bool(names)))
    if csv is not None:
        typer.echo(f"\nwritten: {csv}")


def _opened(folder: Path) -> Results:
    results = Results(folder)
    note_incomplete(results)
    return results


def comparison_dict(compared: Comparison) -> dict[str, Any]:
    """The comparison for machines: metrics in the summary's units, workflows as counts."""
    matched = compared.matched
    return {
        "a": compared.a.name,
        "b": compared.b.name,
        "pairs": len(matched.pairs),
        "without_partner": {"a": matched.alone_a, "b": matched.alone_b},
        "differ": {name: {"a": mine, "b": theirs} for name, (mine, theirs) in matched.differ.items()},
        "same_runs": compared.same_cells,
        "blocks": [_block_dict(block) for block in compared.blocks],
        "overall": {
            "metrics": [_change_dict(change) for change in compared.overall],
            "workflows": _workflows_dict(compared.workflows),
        },
    }


def _block_dict(block: Block) -> dict[str, Any]:
    return {
        "axes": dict(block.axes),
        "seeds": list(block.seeds),
        "not_steady": dict(zip("ab", block.not_steady, strict=True)),
        "metrics": [_change_dict(change) for change in block.changes],
        "workflows": _workflows_dict(block.workflows),
    }


def _change_dict(change: Change) -> dict[str, Any]:
    difference, ratio = change.difference, change.ratio
    return {
        "metric": change.metric,
        "seeds": change.seeds,
        "a": change.a,
        "b": change.b,
        "difference": difference.value,
        "difference_low": difference.low,
        "difference_high": difference.high,
        "ratio": ratio and ratio.value,
        "ratio_low": ratio and ratio.low,
        "ratio_high": ratio and ratio.high,
        "verdict": change.verdict or None,
    }


def _workflows_dict(flows: WorkflowChanges) -> dict[str, Any]:
    return {**asdict(flows), "equal": flows.equal}


def comparison_frame(compared: Comparison) -> pd.DataFrame:
    """A row a block and metric, then the metrics over all blocks, whose ``block`` says overall."""
    rows = [
        {"block": str(index), **block.axes, **_change_dict(change)}
        for index, block in enumerate(compared.blocks, 1)
        for change in block.changes
    ]
    return pd.DataFrame([*rows, *({"block": "overall", **_change_dict(change)} for change in compared.overall)])
