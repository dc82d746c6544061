"""One sweep, whoever runs its cells: in this process, in two, on Ray and on Dask, undisturbed and with a worker killed.

    python benchmarks/parallel.py [--workflows 2000] [--only local,ray] [--out FOLDER]

runs 24 cells with each and prints a row: the seconds from beginning to end (``wall``; with the start of the workers
and, for Ray and Dask, of a cluster of two on this machine), how many cells were run ``again``, and whether all files
but run.json are the bytes of the first row, with the first of their SHA-256. In rows with "one killed" a worker that
is busy with a cell gets a SIGKILL when a quarter of the cells are done. Trace and policy are files of their own, which
are sent to the workers. Backends that are not installed are left out with a note. The exit code is 1 where bytes
differ, or no worker was killed that was to be. One to three minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
CELLS = 24
POLICY = """
import os
from dataclasses import dataclass
from pathlib import Path
from policies.fcfs import Fcfs

@dataclass
class Named(Fcfs):
    def dispatch(self, now, request, cluster):
        if not hasattr(self, "said"):
            self.said = (Path({marks!r}) / str(os.getpid())).write_text("")
        return super().dispatch(now, request, cluster)
"""
"""As fcfs; it leaves the number of the process that it runs in."""


def files_of(out: Path) -> dict[str, bytes]:
    """All that must be the same, by name."""
    paths = [p for p in sorted(out.rglob("*")) if p.is_file() and p.name not in ("run.json", ".lock")]
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


def digest(files: dict[str, bytes]) -> str:
    total = hashlib.sha256()
    for name, data in files.items():
        total.update(name.encode() + b"\0" + hashlib.sha256(data).digest())
    return total.hexdigest()


class Killer:
    """Told of the progress of a sweep; kills a process that runs one of its cells, once."""

    def __init__(self, marks: Path) -> None:
        self._marks = marks
        self.hit = False

    def __call__(self, done: int, total: int, cell: object, forecast: object) -> None:
        if done == total // 4:
            for path in self._marks.iterdir():
                path.unlink()
            threading.Thread(target=self._kill, daemon=True).start()

    def _kill(self) -> None:
        while not self.hit:
            # whoever has begun a cell since
            for path in self._marks.iterdir():
                if int(path.name) != os.getpid():
                    os.kill(int(path.name), signal.SIGKILL)
                    self.hit = True
                    return
            time.sleep(0.002)


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--workflows", type=int, default=2000, help="of a cell")
    asked.add_argument("--only", default="local,ray,dask", help="backends besides one worker, a comma list")
    asked.add_argument("--out", type=Path, help="keep the results folders here")
    options = asked.parse_args()
    if options.workflows < 1:
        asked.error(f"--workflows: expected a positive number, found {options.workflows}")
    if unknown := set(options.only.split(",")) - {"local", "ray", "dask"}:
        asked.error(f"--only: expected local, ray and dask, found {min(unknown)!r}")
    from chimsim.spec import spec_from
    from chimsim.sweeps import run_sweep
    from traces import load_trace, write_trace

    home = Path(tempfile.mkdtemp(prefix="chimsim-parallel-")) if options.out is None else options.out
    home.mkdir(parents=True, exist_ok=True)
    marks = home / "marks"
    shutil.rmtree(marks, ignore_errors=True)
    marks.mkdir()
    write_trace(load_trace("apps"), home / "trace.jsonl.gz")
    (home / "own.py").write_text(POLICY.format(marks=str(marks)))
    keys: dict[str, Any] = {
        "trace": str(home / "trace.jsonl.gz"), "combo": "qwen1.5b+7b", "tau": [1],
        "policy": [f"{home / 'own.py'}:Named", "chimera"],
        "rps": [6, 12], "slots": 32, "seeds": 6, "workflows": options.workflows,
    }  # fmt: skip
    table = Table(title=f"a sweep of {CELLS} cells of {options.workflows} workflows")
    for column in ("who", "cells", "wall s", "again", "files", "same bytes", "SHA-256"):
        table.add_column(column, justify="left" if column in ("who", "SHA-256") else "right", no_wrap=True)
    modules = {"ray": "ray", "dask": "distributed"}
    backends = [name for name in options.only.split(",") if name not in modules or find_spec(modules[name])]
    notes = [f"{name} is not installed: left out" for name in options.only.split(",") if name not in backends]
    rows = [("local", 1, False), *((name, 2, kill) for name in backends for kill in (False, True))]
    wanted: dict[str, bytes] = {}
    bad = False
    for backend, workers, kill in rows:
        name = f"{backend}, {workers} worker{'s' if workers > 1 else ''}{', one killed' if kill else ''}"
        out = home / name.replace(", ", "-").replace(" ", "-")
        shutil.rmtree(out, ignore_errors=True)
        killer = Killer(marks) if kill else None
        began = time.monotonic()
        run_sweep(spec_from(keys | {"backend": backend}), out, workers=workers, progress=killer)
        wall_s = time.monotonic() - began
        files = files_of(out)
        wanted = wanted or files
        same = files == wanted
        run = json.loads((out / "run.json").read_text())["runs"][-1]
        bad |= not same or run["cells_run"] != CELLS or (kill and not run["retried"])
        table.add_row(
            name, str(run["cells_run"]), f"{wall_s:.1f}", str(run["retried"]), str(len(files)), "yes" if same else "NO",
            digest(files)[:16],
        )  # fmt: skip
    Console(width=100).print(table)
    for note in notes:
        print(f"note: {note}")
    if options.out is None:
        shutil.rmtree(home)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
