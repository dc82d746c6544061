"""Files that are wrong, handed to every command that reads files: how many were accepted, refused, and went wrong.

    python benchmarks/fuzz.py [--cases 20000] [--seed 0] [--only cluster.toml,...]

prints a row for each kind of file (``tests/chimsim/fuzz_kinds.py``). A case is drawn from its number: arbitrary bytes,
a damaged file, or a document that is nearly right. Refused is an error of one line and exit code 2; anything else than
that or success is printed with its number and counts as wrong, and so does a case that takes more than a minute or
2 GB. The exit code is 1 if there is any. About 15 ms a case.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random
from types import FrameType

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S, LIMIT_BYTES = 60, 2 << 30


class TooLong(BaseException):
    """Nothing that reads files catches it."""


def stop(signum: int, frame: FrameType | None) -> None:
    raise TooLong(f"more than {LIMIT_S} s")


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--cases", type=int, default=20_000, help="of all kinds together")
    asked.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    asked.add_argument("--only", default="", help="kinds, a comma list")
    options = asked.parse_args()
    sys.path.insert(0, str(ROOT))
    home = Path(tempfile.mkdtemp(prefix="chimsim-fuzz-"))
    os.environ["XDG_CACHE_HOME"] = str(home / "cache")
    from tests.chimsim.fuzz_kinds import kinds
    from tests.chimsim.fuzzed import tried

    known = kinds(home)
    chosen = [name for name in known if not options.only or name in options.only.split(",")]
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + LIMIT_BYTES,) * 2)
    signal.signal(signal.SIGALRM, stop)
    table = Table(title="chimsim and files that are wrong")
    for column in ("file", "cases", "accepted", "refused", "messages", "wrong", "slowest, s"):
        table.add_column(column, justify="left" if column == "file" else "right", no_wrap=True)
    sums = [0, 0, 0, 0]
    began = time.perf_counter()
    for name in chosen:
        cases = options.cases // len(chosen)
        refusals: list[str] = []
        wrong, slowest = 0, 0.0
        for seed in range(options.seed, options.seed + cases):
            folder = home / "case"
            folder.mkdir()
            signal.alarm(LIMIT_S)
            start = time.perf_counter()
            try:
                refusals.append(tried(Random(seed), known[name], folder))
            except (Exception, TooLong):
                wrong += 1
                print(f"{name}, seed {seed}:\n{traceback.format_exc(limit=-4)}", file=sys.stderr)
            finally:
                signal.alarm(0)
            slowest = max(slowest, time.perf_counter() - start)
            shutil.rmtree(folder)
        refused = [message for message in refusals if message]
        counts = (cases, len(refusals) - len(refused), len(refused), wrong)
        sums = [total + count for total, count in zip(sums, counts, strict=True)]
        kinds_of_message = len({"".join(c for c in message if c.isalpha())[-40:] for message in refused})
        table.add_row(name, *map(str, counts[:3]), str(kinds_of_message), str(wrong), f"{slowest:.1f}")
    table.add_row("all", *map(str, sums[:3]), "", str(sums[3]), "", style="bold")
    Console(width=90).print(table)
    print(f"{sums[0]:,} cases in {time.perf_counter() - began:.0f} s: {sums[3]} went wrong")
    shutil.rmtree(home)
    return 1 if sums[3] else 0


if __name__ == "__main__":
    sys.exit(main())
