"""Run the cells of a grid, in this process or in several, into a results folder that can always be resumed.

A cell's bytes depend on its configuration only: not on the number of workers, their order or what ran before.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import chimsim
from calibration.saved import ModelError
from chimsim.engine import Engine
from chimsim.errors import ChimsimError
from chimsim.feeds import predictor_for, times_for, trace_named
from chimsim.grid import Cell, cells, make_policy, plan
from chimsim.metrics import summarise
from chimsim.records import RunResult
from chimsim.replay import Oversize, Queue
from chimsim.results import (
    Results,
    cell_is_whole,
    clean,
    folder_lock,
    json_bytes,
    open_folder,
    read_manifest,
    write_cell,
    write_file,
    write_summary,
)
from chimsim.simulation import simulate
from chimsim.spec import Spec, read_spec, spec_from
from chimsim.watch import Watch
from chimsim.workers import WorkerDied, run_jobs
from policies import PolicyError
from traces import Trace, TraceError

__all__ = ["Cell", "Interrupted", "Progress", "Spec", "cells", "run_cell", "run_sweep", "sweep"]

Progress = Callable[[int, int, Cell | None], None]
"""Told (cells done, cells in all, the cell just finished), first with those that were there already."""


class Interrupted(Exception):
    """A Ctrl-C in the middle of a sweep; the message says what is kept."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How a cell ended: fine, with an error of its own, or with one that stops the sweep."""

    error: str = ""
    stops: bool = False


def sweep(
    spec: str | Path | None = None,
    *,
    out: str | Path | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    **keys: Any,
) -> Results:
    """Run a sweep: ``sweep(trace="apps", combo="qwen1.5b+7b", policy=["fcfs", "stjf"], rps=8).summary``.

    ``spec`` names a TOML file, ``keys`` are its keys and override it. Without ``out`` the folder is a
    temporary one that lives as long as the results. With more than one worker a script needs the usual
    ``if __name__ == "__main__":``. Raises `ChimsimError` or one of the other packages' errors for bad input.
    """
    resolved = spec_from(keys, read_spec(spec) if spec is not None else None, source=str(spec) if spec else "")
    count = workers or resolved.workers
    if out is not None:
        return run_sweep(resolved, Path(out), workers=count, progress=progress)
    root = Path(tempfile.mkdtemp(prefix="chimsim-"))
    try:
        run_sweep(resolved, root, workers=count, progress=progress)
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    return Results(root, temporary=True)


def run_sweep(
    spec: Spec,
    out: Path,
    *,
    workers: int = 1,
    progress: Progress | None = None,
    command: Sequence[str] = (),
    planned: tuple[list[Cell], dict[str, Any]] | None = None,
) -> Results:
    """Run all cells that the folder does not hold yet, then write the summary.

    Raises `ChimsimError` for bad input, cells that failed, a worker that was killed, or a full disk, and
    `Interrupted` after Ctrl-C; in each case the finished cells stay and the same call goes on with the rest.
    """
    found, manifest = planned or plan(spec)
    started, began = time.time(), time.perf_counter()
    with folder_lock(out):
        try:
            open_folder(out, manifest)
            # two labels may stand for one and the same run
            distinct = list({cell.name: cell for cell in found}.values())
            missing = [cell for cell in distinct if not cell_is_whole(out, cell.name)]
            errors = _run_missing(out, missing, len(distinct), workers, progress)
            if errors:
                kept = len(distinct) - len(errors)
                more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
                raise ChimsimError(
                    f"{len(errors)} of {len(distinct)} cells failed, {kept} are kept in {out}; {errors[0]}{more}"
                )
            write_summary(out, read_manifest(out)["cells"])
            _note_run(out, command, workers, started, time.perf_counter() - began, len(missing), len(distinct))
        except OSError as error:
            raise ChimsimError(_system_error(error, out)) from error
    return Results(out)


def _run_missing(out: Path, missing: Sequence[Cell], total: int, workers: int, progress: Progress | None) -> list[str]:
    """Run the cells; the errors of those that failed, in the order of the grid."""
    report = progress or (lambda done, total, cell: None)
    done = total - len(missing)
    report(done, total, None)
    errors: dict[int, str] = {}
    jobs = [(out, cell) for cell in missing]
    outcomes = run_jobs(_do, jobs, workers)
    try:
        for index, outcome in outcomes:
            if outcome.stops:
                raise ChimsimError(f"{outcome.error}; {_kept(done, total, out)}")
            if outcome.error:
                errors[index] = f"cell ({missing[index].title}): {outcome.error}"
            else:
                done += 1
                report(done, total, missing[index])
    except WorkerDied as died:
        raise ChimsimError(
            f"a worker was killed ({died.cause}) in cell ({missing[died.index].title}); {_kept(done, total, out)}"
        ) from None
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {_kept(done, total, out)}") from None
    finally:
        outcomes.close()
        clean(out)
    return [errors[index] for index in sorted(errors)]


def _kept(done: int, total: int, out: Path) -> str:
    return f"{done} of {total} cells are finished and kept in {out}; the same command goes on with the rest"


def _do(job: tuple[Path, Cell]) -> _Outcome:
    out, cell = job
    try:
        result, summary = run_cell(cell)
        write_cell(out, cell.name, cell.config, result, summary)
    except OSError as error:
        return _Outcome(_system_error(error, out), stops=True)
    except MemoryError:
        return _Outcome("out of memory")
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        if os.environ.get("CHIMSIM_DEBUG"):
            raise
        known = isinstance(error, ChimsimError | TraceError | PolicyError | ModelError)
        return _Outcome(str(error) if known else f"{type(error).__name__}: {error}")
    return _Outcome()


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
    out: Path, command: Sequence[str], workers: int, started: float, wall_s: float, ran: int, total: int
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
        "workers": workers,
        "cells_run": ran,
        "cells": total,
        "commit": commit(),
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
