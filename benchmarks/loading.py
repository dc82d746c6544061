"""How long a large trace takes to load, and how much memory: all that a run needs before its first event.

Writes a trace of so many workflows once (20,000 workflows like the shipped ``apps``, six models, over and over under
new ids), as sealed Parquet and a tenth of it as JSON Lines, then loads each in a process of its own:

    python benchmarks/loading.py [--workflows 1000000] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import machine
from benchmarks.measure import peak_mb

if TYPE_CHECKING:
    from traces import Workflow

BASE, MODELS = 20_000, ("Qwen2.5-1.5B", "Qwen2.5-7B")
AIM_S = 20.0


class Repeated(Sequence["Workflow"]):
    """The given workflows again and again, each time under other ids; one at a time is in memory."""

    def __init__(self, workflows: Sequence[Workflow], count: int) -> None:
        self._workflows = workflows
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Workflow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Workflow]: ...
    def __getitem__(self, index: int | slice) -> Workflow | Sequence[Workflow]:
        if isinstance(index, slice):
            return [self[each] for each in range(self._count)[index]]
        return replace(self._workflows[index % len(self._workflows)], workflow_id=f"apps-{index:07d}")

    def __iter__(self) -> Iterator[Workflow]:
        return (self[index] for index in range(self._count))


def make(count: int, path: Path) -> dict[str, float]:
    """Write the trace; seconds, the most memory, and the size of the file in MB."""
    from traces import Trace, write_trace
    from traces.parameters import load_parameters
    from traces.synthetic import generate

    began = time.perf_counter()
    base = generate(load_parameters("apps"), workflows=min(count, BASE)).workflows
    path.parent.mkdir(parents=True, exist_ok=True)
    write_trace(Trace(path.stem, Repeated(base, count)), path)
    return {"s": time.perf_counter() - began, "peak_mb": peak_mb(), "mb": path.stat().st_size / 1e6}


def measure(path: Path, tables: bool) -> dict[str, float]:
    """Seconds from importing to the loaded trace, or to the predictor's tables and the first workflow's first run."""
    began = time.perf_counter()
    from chimsim.predictors import build_predictor
    from traces import load_trace

    imported = time.perf_counter()
    trace = load_trace(path)
    loaded = time.perf_counter()
    found = {"import": imported - began, "load": loaded - imported}
    if tables:
        build_predictor(trace, models=MODELS, router="trace")
        made = time.perf_counter()
        assert trace.workflows[len(trace.workflows) // 2].runs[MODELS[0]].stages
        found |= {"tables": made - loaded, "first": time.perf_counter() - made}
    return found | {"all": time.perf_counter() - began, "peak_mb": peak_mb()}


def in_subprocess(*arguments: str) -> dict[str, Any]:
    """This script in a fresh interpreter: peak memory is of the process and never falls."""
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed (see above)")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def show(what: str, count: int, found: dict[str, float]) -> None:
    """A line of the table."""
    parts = "".join(f"{found[name]:>9.2f}" if name in found else f"{'-':>9}" for name in ("import", "load", "tables"))
    print(f"{what:<12}{count:>11,}{parts}{found['all']:>9.2f}{found['peak_mb']:>9,.0f}", flush=True)


def run(count: int, folder: Path) -> None:
    """Make the files, load them and print the table."""
    tenth = max(1, count // 10)
    parquet, lines = folder / f"loading-{count}.parquet", folder / f"loading-{tenth}.jsonl"
    for path, size in ((parquet, count), (lines, tenth)):
        if not path.exists():
            made = in_subprocess("--make", str(path), "--workflows", str(size))
            size_and_cost = f"{made['mb']:,.0f} MB, made in {made['s']:.0f} s, peak {made['peak_mb']:,.0f} MB"
            print(f"{path.name}: {size_and_cost}", flush=True)
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(f"seconds, in a process each; tables: of the predictor, for {' and '.join(MODELS)}")
    print(f"{'file':<12}{'workflows':>11}{'import':>9}{'load':>9}{'tables':>9}{'all s':>9}{'peak MB':>9}")
    show("JSON Lines", tenth, in_subprocess("--measure", str(lines), "--tables"))
    show("Parquet", count, in_subprocess("--measure", str(parquet)))
    found = in_subprocess("--measure", str(parquet), "--tables")
    show("Parquet", count, found)
    print(f"aim: all of it in less than {AIM_S:g} s: {'met' if found['all'] < AIM_S else 'missed'}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how long a large trace takes to load.")
    parser.add_argument("--workflows", type=int, default=1_000_000, help="default: 1000000")
    parser.add_argument("--folder", type=Path, help="where the files are kept; default: a temporary folder")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tables", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.workflows < 10:
        parser.error(f"--workflows: expected at least 10, found {args.workflows}")
    if args.make is not None:
        print(json.dumps(make(args.workflows, args.make)))
    elif args.measure is not None:
        print(json.dumps(measure(args.measure, args.tables)))
    elif args.folder is not None:
        run(args.workflows, args.folder)
    else:
        with tempfile.TemporaryDirectory() as folder:
            run(args.workflows, Path(folder))


if __name__ == "__main__":
    main()
