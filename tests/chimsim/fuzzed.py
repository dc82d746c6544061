"""One case of fuzzing: a file that is wrong in some way is handed to what reads it.

A bad file must be refused with a clear error, which the command line tells in one line with exit code 2. `tried` knows
nothing of the files; `tests.chimsim.fuzz_kinds` has them.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import typer

from calibration.figures import ProfileError
from chimsim import cli
from chimsim.errors import ChimsimError
from tests.mutations import Dump, wrong_file
from traces import TraceError

_COMMANDS = typer.main.get_command(cli.app)
"""Made once: for one command a process it would be made anew each time, which takes longer than most cases."""
LONGEST = 1000
"""Characters of a message; what a file says is cut short in it."""


@dataclass(frozen=True, slots=True, repr=False)
class Kind:
    """A kind of file: its name, valid documents, how they are written, and what reads it."""

    file: str
    valid: Sequence[Any]
    dump: Dump
    read: Callable[[Random, Path, Path], None]
    """given the chance, the file and a folder for what comes of it; it raises what `tried` catches"""


class Refused(Exception):
    """The command ended as it should for a bad file; the message is what it said."""


def tried(draw: Random, kind: Kind, folder: Path) -> str:
    """One case in an empty folder: the message it was refused with, or nothing if it was accepted.

    Anything else that happens is an error of ours and comes out as the exception that it is.
    """
    path = folder / kind.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(wrong_file(draw, kind.valid, kind.dump))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kind.read(draw, path, folder)
    except (Refused, ChimsimError, TraceError, ProfileError) as refusal:
        return str(refusal)
    return ""


def command(*arguments: object) -> None:
    """Run ``chimsim`` in this process; exit code 2 with one line is `Refused`, another than 0 an AssertionError."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
    code: object = 0
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        patch.object(sys, "argv", ["chimsim", *map(str, arguments)]),
        patch.object(cli, "app", _COMMANDS),
    ):
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code
    err.flush()
    told = err.buffer.getvalue().decode()
    errors = [line for line in told.splitlines() if line.startswith("chimsim: error: ")]
    assert code in (0, 2), f"exit code {code}"
    assert len(errors) == (code == 2), told
    if errors:
        assert len(errors[0]) <= LONGEST, f"{len(errors[0])} characters: {errors[0][:300]}"
        raise Refused(errors[0].removeprefix("chimsim: error: "))
