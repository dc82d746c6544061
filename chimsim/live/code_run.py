"""Runs a program under limits: ``code_run.py PROGRAM CPU_S MEMORY_BYTES FILE_BYTES PROCESSES``.

The limits are set here, in the child, before a line of the program is read. Run by its path, by an interpreter in
isolated mode; it imports nothing of the project.
"""

from __future__ import annotations

import resource
import runpy
import sys

OPEN_FILES = 64


def main() -> None:
    """Set the limits for good, then run the program as ``__main__``."""
    program, *numbers = sys.argv[1:]
    cpu_s, memory_bytes, file_bytes, processes = map(int, numbers)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))  # the first by SIGXCPU, which tells itself
    for what, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))
    sys.argv = [program]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
