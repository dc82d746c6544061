"""What commands that train and judge models have in common: options, what is left to judge on, and how they print."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from chimsim.errors import ChimsimError
from chimsim.results import ordered_json_bytes

if TYPE_CHECKING:
    from calibration.saved import SavedModel
    from traces import Trace, Workflow

ModelsOpt = Annotated[str | None, typer.Option("--models", help="Models, comma-separated (default: all).")]
SeedOpt = Annotated[int, typer.Option("--seed", help="Of the split and of the training.")]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def listed(text: str) -> list[str]:
    """The entries of a comma list."""
    return [name.strip() for name in text.split(",") if name.strip()]


def names(text: str | None) -> list[str] | None:
    """The entries of an option that may be left out."""
    return None if text is None else listed(text)


def number(value: float, digits: int = 3) -> str:
    """For a table; '-' where there is none."""
    return "-" if value != value else f"{value:.{digits}f}"


def print_json(value: Mapping[str, Any]) -> None:
    """To stdout, NaN as null."""
    typer.echo(ordered_json_bytes(value).decode(), nl=False)


def unseen(trace: Trace, model_dir: Path, trained_on: Collection[str]) -> list[Workflow]:
    """The workflows that a saved model was not trained on. Raises `ChimsimError` where there are none."""
    found = [workflow for workflow in trace.workflows if workflow.workflow_id not in trained_on]
    if not found:
        raise ChimsimError(
            f"{model_dir} has learned from every workflow of trace {trace.name}; nothing is left to judge it on "
            "(train with --test-share, or give another trace)"
        )
    return found


def print_written(out: Path, saved: SavedModel, cost_ms: Mapping[str, float]) -> None:
    """The last lines of a training: what a call costs, and where the model is."""
    typer.echo(
        f"cost a call: batch 1 {cost_ms['batch_1_p50']:.2f} ms (p99 {cost_ms['batch_1_p99']:.2f}), "
        f"batch 32 {cost_ms['batch_32_p50']:.2f} ms (p99 {cost_ms['batch_32_p99']:.2f})"
    )
    typer.echo(f"written: {out} ({saved.size_bytes / 1e6:.1f} MB)")


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """What is being done, on stderr: a line that is overwritten on a terminal, nothing where it is piped."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("reading") as status:
        yield status.update
