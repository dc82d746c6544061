"""Run the cells of a grid, in this process, in several or on a cluster, into a folder that can always be resumed.

A cell's bytes depend on its configuration only: not on who made it, in which order or what ran before.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import chimsim
from calibration.saved import ModelError
from chimsim.engine import Engine
from chimsim.errors import ChimsimError
from chimsim.feeds import predictor_for, times_for, trace_named
from chimsim.forecast import Forecast, longest_first, seconds
from chimsim.grid import Cell, cells, make_policy, plan
from chimsim.metrics import summarise
from chimsim.records import RunResult
from chimsim.replay import Oversize, Queue
from chimsim.results import (
    Results,
    cell_files,
    cell_is_whole,
    clean,
    folder_lock,
    json_bytes,
    open_folder,
    read_manifest,
    write_cell_files,
    write_file,
    write_summary,
)
from chimsim.simulation import simulate
from chimsim.spec import Spec, read_spec, spec_from
from chimsim.watch import Watch
from chimsim.workers import Account, WorkerDied, Workers, run_jobs
from policies import PolicyError
from traces import Trace, TraceError

__all__ = ["Cell", "Interrupted", "Progress", "Spec", "cells", "run_cell", "run_sweep", "sweep"]

Progress = Callable[[int, int, Cell | None, Forecast], None]
"""Told (cells done, in all, the cell just finished, what is left), first with those that were there already."""


class Interrupted(Exception):
    """A Ctrl-C in the middle of a sweep; the message says what is kept."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How a cell ended: fine, with an error of its own, or with one that stops the sweep.

    ``files`` are those that are still to be written; ``took_s`` is for how long it kept its worker busy.
    """

    error: str = ""
    stops: bool = False
    took_s: float = 0.0
    files: Mapping[str, bytes] = field(default_factory=dict)


def sweep(
    spec: str | Path | None = None,
    *,
    out: str | Path | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    **keys: Any,
) -> Results:
    """Run a sweep: ``sweep(trace="apps", combo="qwen1.5b+7b", policy=["fcfs", "stjf"], rps=8).summary``.

    ``spec`` names a TOML file, ``keys`` are its keys and override it, ``backend`` and ``address`` too. Without ``out``
    the folder is a temporary one that lives as long as the results. Unless ``workers`` is 1 a script needs the usual
    ``if __name__ == "__main__":``. Raises `ChimsimError` or one of the other packages' errors for bad input.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # A worker imports the script that it is started from, and finds this call in it: the parent says what is wrong.
        sys.exit(1)
    if spec is not None and not isinstance(spec, str | Path):
        raise ChimsimError(f"spec: expected the path of a TOML file, found {spec!r}; its keys are given by name")
    resolved = spec_from(keys, read_spec(spec) if spec is not None else None, source=str(spec) if spec else "")
    if out is not None:
        return run_sweep(resolved, Path(out), workers=workers, progress=progress)
    root = Path(tempfile.mkdtemp(prefix="chimsim-"))
    try:
        run_sweep(resolved, root, workers=workers, progress=progress)
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    return Results(root, temporary=True)


def run_sweep(
    spec: Spec,
    out: Path,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    command: Sequence[str] = (),
    planned: tuple[list[Cell], dict[str, Any]] | None = None,
) -> Results:
    """Run all cells that the folder does not hold yet, then write the summary.

    ``workers`` takes the place of the spec's. Raises `ChimsimError` for bad input, cells that failed, a cell that was
    given up because its workers were killed, or a full disk, and `Interrupted` after Ctrl-C; in each case the finished
    cells stay and the same call goes on with the rest.
    """
    found, manifest = planned or plan(spec)
    asked = Workers(workers or spec.workers, spec.backend, spec.address)
    account = Account()
    started, began = time.time(), time.perf_counter()
    with folder_lock(out):
        try:
            open_folder(out, manifest)
            # two labels may stand for one and the same run
            distinct = list({cell.name: cell for cell in found}.values())
            missing = [cell for cell in distinct if not cell_is_whole(out, cell.name)]
            errors = _run_missing(out, distinct, missing, asked, account, progress)
            if errors:
                kept = len(distinct) - len(errors)
                more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
                raise ChimsimError(
                    f"{len(errors)} of {len(distinct)} cells failed, {kept} are kept in {out}; {errors[0]}{more}"
                )
            write_summary(out, read_manifest(out)["cells"])
            wall_s = time.perf_counter() - began
            _note_run(out, command, asked, account, started, wall_s, len(missing), len(distinct))
        except OSError as error:
            raise ChimsimError(_system_error(error, out)) from error
    return Results(out)


def _run_missing(
    out: Path,
    cells: Sequence[Cell],
    missing: Sequence[Cell],
    workers: Workers,
    account: Account,
    progress: Progress | None,
) -> list[str]:
    """Run the missing ones, long ones first; the errors of those that failed, in the order of the grid."""
    report = progress or (lambda done, total, cell, forecast: None)
    total = len(cells)
    done = total - len(missing)
    ordered = longest_first(missing)
    expected_s = {cell.name: seconds(cell) for cell in ordered}
    forecast = Forecast(expected_s, {cell.name: str(cell.axes["policy"]) for cell in ordered})
    report(done, total, None, forecast)
    errors: dict[str, str] = {}
    outcomes = _outcomes(out, ordered, workers, sum(expected_s.values()), account)
    try:
        for index, outcome in outcomes:
            cell = ordered[index]
            if outcome.files:
                outcome = _written(out, cell, outcome)
            if outcome.stops:
                raise ChimsimError(f"{outcome.error}; {_kept(done, total, out)}")
            forecast.workers = account.workers
            forecast.finished(cell.name, outcome.took_s)
            if outcome.error:
                errors[cell.name] = f"cell ({cell.title}): {outcome.error}"
            else:
                done += 1
                report(done, total, cell, forecast)
    except WorkerDied as died:
        raise ChimsimError(f"{died} in cell ({ordered[died.index].title}); {_kept(done, total, out)}") from None
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {_kept(done, total, out)}") from None
    finally:
        outcomes.close()
        clean(out)
    return [errors[cell.name] for cell in missing if cell.name in errors]


def _outcomes(
    out: Path, cells: Sequence[Cell], workers: Workers, work_s: float, account: Account
) -> Generator[tuple[int, _Outcome], None, None]:
    if workers.backend == "local":
        jobs = [(out, cell) for cell in cells]
        return run_jobs(_make_here, jobs, workers, work_s=work_s, account=account)
    return run_jobs(_make, cells, workers, account=account)


def _kept(done: int, total: int, out: Path) -> str:
    return f"{done} of {total} cells are finished and kept in {out}; the same command goes on with the rest"


def _make_here(job: tuple[Path, Cell]) -> _Outcome:
    out, cell = job
    outcome = _make(cell)
    return _written(out, cell, outcome) if outcome.files else outcome


def _written(out: Path, cell: Cell, outcome: _Outcome) -> _Outcome:
    try:
        write_cell_files(out, cell.name, outcome.files)
    except OSError as error:
        return _Outcome(_system_error(error, out), stops=True)
    return replace(outcome, files={})


def _make(cell: Cell) -> _Outcome:
    began = time.perf_counter()
    try:
        result, summary = run_cell(cell)
        files = cell_files(cell.config, result, summary)
    except OSError as error:
        return _Outcome(_system_error(error, Path()), stops=True)
    except MemoryError:
        return _Outcome("out of memory")
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        if os.environ.get("CHIMSIM_DEBUG"):
            raise
        known = isinstance(error, ChimsimError | TraceError | PolicyError | ModelError)
        return _Outcome(str(error) if known else f"{type(error).__name__}: {error}")
    return _Outcome(took_s=time.perf_counter() - began, files=files)


def run_cell(
    cell: Cell, watch: Watch | None = None, hop_s: float = 0.0, trace: Trace | None = None
) -> tuple[RunResult, dict[str, Any]]:
    """Simulate one cell, watched if asked for; its records and its summary.

    ``hop_s`` is as in `simulate`. ``trace`` takes the place of the cell's own, of which predictors speak all the same.
    """
    if trace is None:
        trace = trace_named(cell.trace)
        if trace.digest != cell.trace_digest:
            raise ChimsimError(f"trace {cell.trace} changed while the sweep was running")
    arrivals = times_for(cell.arrivals, trace, cell.workflows, cell.rps)
    policy = make_policy(cell.policy, cell.knobs, cell.seed)
    result = simulate(
        trace,
        cell.cluster,
        policy if watch is None else watch.policy(policy),
        rps=cell.rps if arrivals is None else None,
        seed=cell.seed,
        predictor=predictor_for(cell.feed, cell.trace, cell.cluster.models, cell.seed),
        arrivals=arrivals,
        workflows=cell.workflows,
        warmup=cell.warmup,
        burstiness=cell.burstiness,
        queue=cast(Queue, cell.queue),
        look_ahead=cell.look_ahead,
        oversize=cast(Oversize, cell.oversize),
        engine_class=Engine if watch is None else watch.engine,
        hop_s=hop_s,
        fail=cell.fail,
        slow=cell.slow,
    )
    return result, dict(summarise(result, goodput=cell.goodput))


def _system_error(error: OSError, out: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left on the device of {out}: free some"
    return f"{error.filename or out}: {(error.strerror or str(error)).lower()}"


def _note_run(
    out: Path,
    command: Sequence[str],
    asked: Workers,
    account: Account,
    started: float,
    wall_s: float,
    ran: int,
    total: int,
) -> None:
    """Append to run.json what may differ between equal sweeps: when, how long, with what."""
    path = out / "run.json"
    try:
        runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    except (OSError, ValueError, KeyError, TypeError):
        runs = []
    versions = {name: metadata.version(name) for name in ("numpy", "pandas", "scipy", "pyarrow", "matplotlib", "simpy")}
    entry = {
        "command": list(command),
        "started_at": started,
        "wall_s": wall_s,
        "backend": asked.backend,
        "workers": account.workers,
        "nodes": account.nodes,
        "retried": account.retried,
        "cells_run": ran,
        "cells": total,
        "commit": commit(),
        "compiled": chimsim.compiled(),
        "versions": {"chimsim": chimsim.__version__, "python": platform.python_version(), **versions},
        "platform": sys.platform,
    }
    write_file(path, json_bytes({"runs": [*runs, entry]}))


def commit() -> str | None:
    """The commit of the checkout that this package runs from, ``-dirty`` if changed; None outside of one."""
    root = Path(chimsim.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("-dirty" if changed.stdout else "")
