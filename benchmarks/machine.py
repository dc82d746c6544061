"""What a benchmark ran on and what it ran, for whoever reads its numbers later."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """The machine, the versions of what does most of the work, and the date by the clock."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("simpy", "numpy", "pandas", "pyarrow")},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def version_of(checkout: Path) -> str:
    """The commit of a checkout, with a + where files differ from it; "no commit" where there is none or no Git.

    And whether it is compiled.
    """
    compiled = ", compiled" if any((checkout / "chimsim").glob("engine.*.[sp][oy]*")) else ""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with suppress(OSError, subprocess.CalledProcessError):
        if Path(git("rev-parse", "--show-toplevel")) == checkout:
            return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "") + compiled
    return "no commit" + compiled


def _cpu() -> str:
    with suppress(OSError):  # Linux alone has the file
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown CPU"
