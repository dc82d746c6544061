"""What becomes of a sweep when things go wrong, and of the same command afterwards.

    python benchmarks/robustness.py [--kills 20] [--seed 0] [--only killed,...]

makes each fault happen to a sweep of 16 cells and prints a row for it. ``kept``: cells finished when it happened, which
must be there afterwards, whole, and not be run again (``lost``). ``half read``: files that were read although they were
not whole. ``as before``: sweeps that, gone on with, became what the undisturbed one is, byte for byte (but run.json).
Where anything is lost, read or different the exit code is 1. A full disk is a small one mounted, for which one must be
root; it is left out with a note where that may not be. Some minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
CELLS = 16
WAIT_S = 60.0
"""For what must happen at all; it decides over nothing that is printed."""
NOBODY = 65534


@dataclass
class Row:
    """What came of one kind of fault."""

    times: int = 0
    kept: int = 0
    lost: int = 0
    half_read: int = 0
    same: int = 0
    notes: list[str] = field(default_factory=list)


class Sweeps:
    """The sweep that all of it happens to, and what it is when nothing happens."""

    def __init__(self, home: Path) -> None:
        from tests.chimsim.small import small_keys, tree_bytes, write_small

        self.home = home
        self.trace = write_small(home, count=16)
        self.keys = small_keys(self.trace) | {"seeds": 4}
        self.wanted: dict[str, bytes] = {}
        whole = home / "whole"
        self.again(whole)
        self.wanted = tree_bytes(whole)
        assert len(self.cells(whole)) == CELLS
        began = time.monotonic()
        assert self.run(home / "timed") == (0, "")
        self.lasts_s = time.monotonic() - began
        assert tree_bytes(home / "timed") == self.wanted

    def start(self, out: Path, workers: int = 1, **more: Any) -> subprocess.Popen[str]:
        """``chimsim sweep`` in a process group of its own."""
        command = [
            sys.executable, "-m", "chimsim", "sweep", "--trace", self.trace, "--combo", self.keys["combo"], "--policy",
            "fcfs,chimera", "--tau", "0,1,inf", "--rps", "20", "--slots", "4", "--seeds", "4", "--no-plots",
            "--workers", str(workers), "--out", str(out),
        ]  # fmt: skip
        return subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **more,
        )

    def run(self, out: Path, workers: int = 1, **more: Any) -> tuple[int, str]:
        """Its exit code and what it said on stderr."""
        process = self.start(out, workers, **more)
        _, told = process.communicate()
        return process.returncode, told

    def again(self, out: Path) -> str:
        """The same sweep in this process, which is quicker; what it ended with, if with an error."""
        from chimsim.errors import ChimsimError
        from chimsim.spec import spec_from
        from chimsim.sweeps import run_sweep

        try:
            run_sweep(spec_from(self.keys), out)
        except (ChimsimError, OSError) as error:
            return str(error)
        return ""

    def cells(self, out: Path) -> set[str]:
        """The cells that are there under their names."""
        return {path.name for path in (out / "cells").glob("[0-9a-f]*")} if (out / "cells").is_dir() else set()

    def whole_cells(self, out: Path, row: Row) -> set[str]:
        """The finished cells; one that is there and is not as it should be was half written."""
        found = set()
        for name in self.cells(out):
            files = {key: data for key, data in self.wanted.items() if key.startswith(f"cells/{name}/")}
            if files and all(_bytes(out / key) == data for key, data in files.items()):
                found.add(name)
            else:
                row.half_read += 1
        return found

    def goes_on(self, out: Path, row: Row, kept: set[str], *, foreign: bool = False) -> None:
        """The same command again: it runs what is missing and nothing else, and nothing is left over."""
        from tests.chimsim.small import tree_bytes

        stamps = {name: (out / "cells" / name).stat().st_mtime_ns for name in kept}
        ran = len(_runs(out))
        told = self.again(out)
        after = tree_bytes(out)
        if foreign:
            after = {key: data for key, data in after.items() if key in self.wanted}
        row.times += 1
        row.kept += len(kept)
        row.same += not told and after == self.wanted
        row.lost += sum((out / "cells" / name).stat().st_mtime_ns != stamp for name, stamp in stamps.items())
        if told:
            row.notes.append(told)
        elif _runs(out)[ran:] and _runs(out)[-1]["cells_run"] != CELLS - len(kept):
            row.lost += 1


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _runs(out: Path) -> list[dict[str, Any]]:
    with suppress(OSError, ValueError):
        return list(json.loads((out / "run.json").read_bytes())["runs"])
    return []


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError("what was waited for did not happen")
        time.sleep(0.002)


def alone(group: int) -> bool:
    """Whether no process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def said(row: Row, told: str, *words: str) -> None:
    """Note a message that is not one line with these words."""
    lines = [line for line in told.splitlines() if line.strip()]
    if len(lines) != 1 or not all(word in told for word in words):
        row.notes.append(f"said {told.strip()[-300:]!r}")


def killed(sweeps: Sweeps, draw: random.Random, kills: int, workers: int) -> Row:
    row = Row()
    for number in range(kills):
        out = sweeps.home / f"killed-{workers}-{number}"
        process = sweeps.start(out, workers)
        # half of the kills hit while cells are written, the others any time from the start on
        if number % 2:
            until(lambda: process.poll() is not None or bool(sweeps.cells(out)))  # noqa: B023
        with suppress(subprocess.TimeoutExpired):
            process.wait(draw.uniform(0, sweeps.lasts_s / (2 if number % 2 else 1)))
        process.kill()
        process.communicate()
        until(lambda: alone(process.pid))  # noqa: B023
        sweeps.goes_on(out, row, sweeps.whole_cells(out, row))
        shutil.rmtree(out)
    return row


def killed_often(sweeps: Sweeps, draw: random.Random) -> Row:
    """One folder, its sweep killed after every cell or two until it is complete."""
    row = Row()
    out = sweeps.home / "often"
    before: set[str] = set()
    rounds = 0
    while len(before) < CELLS - 1:
        process = sweeps.start(out, draw.choice((1, 2)))
        more = len(before) + draw.choice((1, 2))
        until(lambda: process.poll() is not None or len(sweeps.cells(out)) >= more)  # noqa: B023
        process.kill()
        process.communicate()
        until(lambda: alone(process.pid))  # noqa: B023
        kept = sweeps.whole_cells(out, row)
        row.lost += len(before - kept)
        before = kept
        rounds += 1
    sweeps.goes_on(out, row, before)
    row.notes.append(f"killed {rounds} times")
    return row


def worker_killed(sweeps: Sweeps, draw: random.Random) -> Row:
    """The cell is made by another worker, and the sweep goes on to its end."""
    row = Row()
    hits = again = 0
    for number in range(10):
        out = sweeps.home / f"worker-{number}"
        process = sweeps.start(out, 2)
        until(lambda: process.poll() is not None or bool(sweeps.cells(out)))  # noqa: B023
        with suppress(OSError, IndexError):
            os.kill(draw.choice(_workers(process.pid)), signal.SIGKILL)
            hits += len(sweeps.cells(out)) < CELLS
        _, told = process.communicate()
        if process.returncode or told:
            row.notes.append(f"exit code {process.returncode}, {told.strip()[-300:]!r}")
        else:
            again += _runs(out)[-1]["retried"]
        until(lambda: alone(process.pid))  # noqa: B023
        sweeps.goes_on(out, row, sweeps.whole_cells(out, row))
    row.notes.append(
        f"{hits} of {row.times} workers were killed before all cells were finished; {again} cells run again"
    )
    return row


def _workers(parent: int) -> list[int]:
    children = [int(word) for word in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


@contextmanager
def small_disk(path: Path, size: int) -> Iterator[bool]:
    """A file system of that many bytes at the path, where we may mount one."""
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True)
    try:
        yield made.returncode == 0
    finally:
        if made.returncode == 0:
            subprocess.run(["umount", str(path)], check=True)


def disk_full(sweeps: Sweeps, draw: random.Random) -> Row:
    row = Row()
    total = sum(map(len, sweeps.wanted.values()))
    for number in range(5):
        disk = sweeps.home / f"disk-{number}"
        with small_disk(disk, int(total * draw.uniform(0.3, 1.2))) as mounted:
            if not mounted:
                row.notes.append("no file system may be mounted here: left out")
                return row
            code, told = sweeps.run(disk / "out", draw.choice((1, 2)))
            if code != 2:
                row.notes.append(f"exit code {code} on a full disk")
            said(row, told, "no space left on the device")
            kept = sweeps.whole_cells(disk / "out", row)
            subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
            sweeps.goes_on(disk / "out", row, kept)
    return row


def files_limited(sweeps: Sweeps, draw: random.Random) -> Row:
    """The writer fails within a file: a limit on their size, which the largest of a cell's files meet."""
    row = Row()
    tables = [len(data) for name, data in sweeps.wanted.items() if name.endswith("requests.parquet")]
    for number in range(3):
        out = sweeps.home / f"limit-{number}"
        most = draw.choice(tables)
        code, told = sweeps.run(
            out, 1 + number % 2, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))  # noqa: B023
        )  # fmt: skip
        if code != 2:
            row.notes.append(f"exit code {code}")
        said(row, told, "file too large")
        sweeps.goes_on(out, row, sweeps.whole_cells(out, row))
    return row


def _damages(folder: Path, draw: random.Random) -> dict[str, Callable[[], object]]:
    """What may have happened to a cell's folder, by name."""
    victim = folder / draw.choice(
        ("requests.parquet", "summary.json", "config.json", "itl.parquet", "timeline.parquet")
    )
    data = victim.read_bytes()
    at = draw.randrange(len(data))
    sums = folder / "checksums.json"
    return {
        "cut short": lambda: victim.write_bytes(data[:at]),
        "empty": lambda: victim.write_bytes(b""),
        "one bit": lambda: victim.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]),
        "missing": victim.unlink,
        "a folder instead": lambda: (victim.unlink(), victim.mkdir()),
        "sums of another": lambda: sums.write_text(sums.read_text().replace("a", "b")),
        "sums no JSON": lambda: sums.write_bytes(b"\xff{"),
        "sums empty": lambda: sums.write_text("{}"),
        "no folder but a file": lambda: (shutil.rmtree(folder), folder.write_text("x")),
        "no folder but a link": lambda: (shutil.rmtree(folder), folder.symlink_to("nowhere")),
        "emptied": lambda: (shutil.rmtree(folder), folder.mkdir()),
    }


def damaged(sweeps: Sweeps, draw: random.Random) -> Row:
    from chimsim.errors import ChimsimError
    from chimsim.results import TABLES, Results

    row = Row()
    whole = sweeps.home / "whole"
    for name in _damages(next((whole / "cells").iterdir()), draw):
        out = sweeps.home / "damaged"
        shutil.copytree(whole, out, symlinks=True)
        cell = draw.choice(sorted(sweeps.cells(out)))
        _damages(out / "cells" / cell, draw)[name]()
        results = Results(out)
        reads: dict[str, Callable[[str], object]] = {
            "config.json": results.config,
            "summary.json": results.cell_summary,
            **{f"{table}.parquet": partial(results.table, name=table) for table in TABLES},
        }
        for file, read in reads.items():
            try:
                read(cell)
            except ChimsimError:
                continue
            row.half_read += _bytes(out / "cells" / cell / file) != sweeps.wanted[f"cells/{cell}/{file}"]
        sweeps.goes_on(out, row, sweeps.cells(out) - {cell})
        shutil.rmtree(out)
    return row


@contextmanager
def no_root() -> Iterator[None]:
    """As a user whom permissions mean something to."""
    root = not os.geteuid()
    if root:
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
            os.setegid(0)


def unreadable(sweeps: Sweeps, draw: random.Random) -> Row:
    """A cell, all cells, the summary that may not be read or written by the user who runs the sweep."""
    row = Row()
    for name, mode in (("a cell", 0o000), ("a cell", 0o555), ("cells", 0o000), ("cells", 0o555), ("", 0o555)):
        out = sweeps.home / "unreadable"
        shutil.copytree(sweeps.home / "whole", out)
        cell = draw.choice(sorted(sweeps.cells(out)))
        (out / "cells" / cell / "itl.parquet").unlink()
        if not os.geteuid():
            subprocess.run(["chown", "-R", str(NOBODY), str(out)], check=True)
        place = {"a cell": out / "cells" / cell, "cells": out / "cells", "": out}[name]
        place.chmod(mode)
        with no_root():
            told = sweeps.again(out)
        place.chmod(0o755)
        if told:
            said(row, told, "ermission denied")
        kept = sweeps.whole_cells(out, Row())
        row.lost += len(sweeps.cells(sweeps.home / "whole") - kept - {cell})
        sweeps.goes_on(out, row, kept)
        shutil.rmtree(out)
    return row


def foreign(sweeps: Sweeps, draw: random.Random) -> Row:
    """Files of others among ours are neither read nor removed."""
    row = Row()
    whole = sweeps.home / "whole"
    for place in ("notes.txt", "cells/notes.txt", "cells/CELL/notes.txt", "cells/0123456789abcdef0123456789abcdef/x"):
        out = sweeps.home / "foreign"
        shutil.copytree(whole, out)
        cell, other = draw.sample(sorted(sweeps.cells(out)), 2)
        (out / "cells" / other / "summary.json").unlink()
        path = out / place.replace("CELL", cell)
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
        sweeps.goes_on(out, row, sweeps.cells(whole) - {other}, foreign=True)
        row.lost += _bytes(path) != b"mine"
        shutil.rmtree(out)
    return row


def two_at_once(sweeps: Sweeps, draw: random.Random) -> Row:
    row = Row()
    for number in range(3):
        out = sweeps.home / f"two-{number}"
        first = sweeps.start(out, draw.choice((1, 2)))
        until(lambda: first.poll() is not None or bool(sweeps.cells(out)))  # noqa: B023
        os.killpg(first.pid, signal.SIGSTOP)
        code, told = sweeps.run(out)
        said(row, told, f"another chimsim is writing to {out} (process {first.pid})")
        os.killpg(first.pid, signal.SIGCONT)
        first.communicate()
        if (code, first.returncode) != (2, 0):
            row.notes.append(f"exit codes {first.returncode} and {code}")
        sweeps.goes_on(out, row, sweeps.whole_cells(out, row))
    return row


def trace_changed(sweeps: Sweeps, draw: random.Random) -> Row:
    """The trace is another one when the sweep is gone on with, and, in the last case, while it runs."""
    from chimsim.errors import ChimsimError
    from chimsim.feeds import trace_named
    from chimsim.grid import plan
    from chimsim.spec import spec_from
    from chimsim.sweeps import run_sweep
    from tests.chimsim.small import tree_bytes

    row = Row()
    trace = Path(sweeps.trace)
    content = trace.read_bytes()
    other = content.replace(b'"output_tokens":', b'"output_tokens":1', 1)
    for number in range(3):
        out = sweeps.home / f"trace-{number}"
        process = sweeps.start(out)
        until(lambda: process.poll() is not None or bool(sweeps.cells(out)))  # noqa: B023
        process.kill()
        process.communicate()
        before = tree_bytes(out)
        trace.write_bytes(other)
        told = sweeps.again(out)
        said(row, told, "holds another sweep (traces differ in content")
        if tree_bytes(out) != before:
            row.notes.append("the folder was changed")
        trace.write_bytes(content)
        sweeps.goes_on(out, row, sweeps.whole_cells(out, row))
    out = sweeps.home / "trace-meanwhile"
    spec = spec_from(sweeps.keys)
    planned = plan(spec)
    trace_named.cache_clear()
    trace.write_bytes(other)
    try:
        run_sweep(spec, out, planned=planned)
        row.notes.append("a change in mid-sweep was not seen")
    except ChimsimError as error:
        said(row, str(error), "changed while the sweep was running")
    trace.write_bytes(content)
    trace_named.cache_clear()
    sweeps.goes_on(out, row, sweeps.whole_cells(out, row))
    return row


def clock_jumps(sweeps: Sweeps, draw: random.Random) -> Row:
    """The time of day jumps by up to ten years at every look, and files get stamps of it."""
    from chimsim.spec import spec_from
    from chimsim.sweeps import run_sweep
    from tests.chimsim.small import tree_bytes

    row = Row()
    real = time.time
    for number in range(3):
        out = sweeps.home / f"clock-{number}"
        time.time = lambda: real() + draw.uniform(-3e8, 3e8)
        try:
            run_sweep(spec_from(sweeps.keys), out)
        finally:
            time.time = real
        if tree_bytes(out) != sweeps.wanted:
            row.notes.append("other bytes")
        if _runs(out)[0]["wall_s"] < 0:
            row.notes.append(f"run.json: the sweep took {_runs(out)[0]['wall_s']:.0f} s")
        for path in out.rglob("*"):
            stamp = real() + draw.uniform(-3e8, 3e8)
            os.utime(path, (stamp, stamp))
        sweeps.goes_on(out, row, sweeps.whole_cells(out, row))
    return row


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--kills", type=int, default=20, help="with one worker, and again with two")
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--only", default="", help="the words a fault's name begins with, a comma list")
    options = asked.parse_args()
    faults: dict[str, Callable[[Sweeps, random.Random], Row]] = {
        "kill -9, 1 worker": lambda sweeps, draw: killed(sweeps, draw, options.kills, 1),
        "kill -9, 2 workers": lambda sweeps, draw: killed(sweeps, draw, options.kills, 2),
        "kill -9 again and again": killed_often,
        "a worker killed": worker_killed,
        "disk full": disk_full,
        "files limited in size": files_limited,
        "damaged cells": damaged,
        "no permission": unreadable,
        "foreign files": foreign,
        "two sweeps at once": two_at_once,
        "trace changed": trace_changed,
        "clock jumps": clock_jumps,
    }
    home = Path(tempfile.mkdtemp(prefix="chimsim-robustness-"))
    home.chmod(0o755)
    table = Table(title=f"a sweep of {CELLS} cells")
    for column in ("fault", "times", "kept", "lost", "half read", "as before"):
        table.add_column(column, justify="left" if column == "fault" else "right", no_wrap=True)
    sweeps = Sweeps(home)
    began = time.monotonic()
    bad = False
    notes = []
    for name, fault in faults.items():
        if options.only and not name.startswith(tuple(options.only.split(","))):
            continue
        row = fault(sweeps, random.Random(f"{name} {options.seed}"))
        bad |= bool(row.lost or row.half_read or row.same != row.times)
        notes += [f"{name}: {note}" for note in row.notes]
        table.add_row(name, *map(str, (row.times, row.kept, row.lost, row.half_read, row.same)))
    Console(width=90).print(table)
    for note in notes:
        print(f"note: {note}")
    print(f"{time.monotonic() - began:.0f} s")
    shutil.rmtree(home)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
