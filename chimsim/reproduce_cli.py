"""The command `chimsim reproduce`: experiments by name, one or all, with verdicts, figures and a report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import MofNCompleteColumn, TextColumn

from chimsim.errors import ChimsimError
from chimsim.forecast import Forecast
from chimsim.grid import Cell
from chimsim.options import WORKERS_HELP, note
from chimsim.plots import draw
from chimsim.progress import progress_bar
from chimsim.reproduce.experiment import Experiment, experiment_files, find_experiment, read_experiment
from chimsim.results import ordered_json_bytes, write_file
from chimsim.sweeps import Progress

ALL = "all"


def reproduce_command(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help="Experiments, files of yours, or all.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short run: fewer workflows, seeds and points.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of all (default: results/reproduce, or reproduce-quick there)."),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with the traces that some experiments need.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help=WORKERS_HELP)] = None,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html beside the results.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="The verdicts as JSON.")] = False,
) -> None:
    """Run experiments and judge what should hold against what came out.

    \b
    chimsim reproduce                            # which there are
    chimsim reproduce fig5 --quick               # a two-minute look
    chimsim reproduce fig3 fig5
    chimsim reproduce all --data my-traces       # those that need data, too
    chimsim reproduce my-experiment.toml

    A run that was stopped is gone on with. Exit code 0 whatever the verdicts are.
    """
    if not names:
        _list()
        return
    files = experiment_files() if ALL in names else [find_experiment(name) for name in names]
    experiments = [read_experiment(path) for path in files]
    out = out or Path("results/reproduce-quick" if quick else "results/reproduce")
    found = []
    with _progress() as (tell, progress):
        for experiment in experiments:
            if ALL in names and (lack := _lack(experiment, data)):
                note(f"note: left out: {lack}")
                continue
            found.append(_one(experiment, out, quick, workers, data, report, tell, progress))
            if not as_json:
                typer.echo(found[-1][0] + "\n")
    _write_all(out)
    if as_json:
        typer.echo(ordered_json_bytes({"experiments": [outcome for _, outcome in found]}).decode(), nl=False)
        return
    from chimsim.reproduce.words import tally

    typer.echo(tally(outcome for _, outcome in found))
    typer.echo(f"written: {out}/summary.md, {out}/blocks.csv, and a folder each")


def _one(
    experiment: Experiment,
    out: Path,
    quick: bool,
    workers: int | None,
    data: Path | None,
    report: bool,
    tell: Callable[[str], None],
    progress: Progress,
) -> tuple[str, dict[str, object]]:
    """Run one experiment, draw and report it; its text and its record."""
    from chimsim.reproduce.figures import draw_study
    from chimsim.reproduce.running import results_of, run_experiment
    from chimsim.reproduce.words import as_text

    outcome = run_experiment(
        experiment,
        out,
        quick=quick,
        workers=workers,
        data=data,
        tell=tell,
        progress=progress,
        warn=lambda text: note(f"warning: {text}"),
    )
    tell(f"{experiment.name}: figures")
    results = results_of(outcome)
    if results is None:
        files = draw_study(experiment.kind, outcome.summary, experiment.asked(quick), outcome.folder)
    else:
        files = draw(results, experiment.figures)
        if report:
            from chimsim.report_html import write_report

            path = outcome.folder / "report.html"
            write_report(results, path)
            files.append(path)
    shown = outcome.to_dict()
    return f"{as_text(shown)}\nwritten: {', '.join(str(path) for path in files)}", shown


def _write_all(out: Path) -> None:
    """The tables of every experiment that the folder has."""
    from chimsim.reproduce.running import outcomes_in
    from chimsim.reproduce.words import as_markdown, blocks_of

    outcomes = outcomes_in(out)
    if outcomes:
        write_file(out / "summary.md", as_markdown(outcomes).encode())
        write_file(out / "blocks.csv", blocks_of(outcomes).to_csv(index=False, lineterminator="\n").encode())


def _lack(experiment: Experiment, data: Path | None) -> str:
    """Why an experiment cannot be run for want of data, or nothing."""
    from chimsim.reproduce.running import data_files

    try:
        if experiment.needs:
            data_files(experiment, data)
    except ChimsimError as error:
        return str(error)
    return ""


def _list() -> None:
    for path in experiment_files():
        experiment = read_experiment(path)
        of = f" ({experiment.figure})" if experiment.figure else ""
        typer.echo(f"{experiment.name:<14}{experiment.title}{of}{' [needs data]' if experiment.needs else ''}")


@contextlib.contextmanager
def _progress() -> Iterator[tuple[Callable[[str], None], Progress]]:
    """A bar on stderr if that is a terminal: what is being done, and how many cells of it."""
    with progress_bar(MofNCompleteColumn(), TextColumn("cells")) as update:
        doing = ""

        def tell(text: str) -> None:
            nonlocal doing
            doing = text
            if update is not None:
                update(0, 1, text)

        def progress(done: int, total: int, cell: Cell | None, forecast: Forecast) -> None:
            if update is not None:
                update(done, total, f"{doing}: {cell.title}" if cell is not None else doing, forecast)

        yield tell, progress
