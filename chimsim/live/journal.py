"""The journal of `chimsim collect`: finished runs are on disk at once, and a crash loses at most the last line.

JSON Lines beside the trace: the settings, then a line a run, each a workflow of the trace format with the run of one
model. It knows how to go on with a file and when not to; what is in the runs is not its business.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from chimsim.errors import ChimsimError
from traces.files import parse_json
from traces.schema import TraceError, Workflow, to_dict, workflow_from_dict

FORMAT = 1


class Journal:
    """An open journal. ``runs`` holds, by (workflow id, model), what is finished. Made by `open_journal`."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.runs: dict[tuple[str, str], Workflow] = {}
        self._file = file

    def add(self, workflow: Workflow) -> None:
        """A workflow with the run of one model: it is on disk on return."""
        self._write(to_dict(workflow))
        self._keep(workflow)

    def load(self, settings: Mapping[str, Any]) -> None:
        """Take over what the file holds; raises `ChimsimError` if it was begun with other settings."""
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.splitlines()
        if lines:
            self._check(lines[0], settings if len(lines) > 1 else None)
        if len(lines) < 2:
            # without a run nothing is lost by beginning anew, with any settings
            self._cut(0)
            self._write({"format": FORMAT, "settings": settings})
            return
        for number, line in enumerate(lines[1:], 2):
            where = f"{self.path}:{number}"
            try:
                self._keep(workflow_from_dict(parse_json(line.decode(), where), where))
            except (TraceError, UnicodeDecodeError) as error:
                raise ChimsimError(f"{error}; the journal is damaged: remove it, or this line") from None
        self._cut(len(whole))

    def _check(self, line: bytes, settings: Mapping[str, Any] | None) -> None:
        try:
            header = json.loads(line)
            there, form = header["settings"], header["format"]
        except (ValueError, KeyError, TypeError):
            raise ChimsimError(f"{self.path}:1: expected the settings of a collection; is it a journal?") from None
        if form != FORMAT:
            raise ChimsimError(f"{self.path}: has format {form!r}, this chimsim reads format {FORMAT}")
        here = there if settings is None else json.loads(json.dumps(settings))
        different = [name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]
        if different:
            raise ChimsimError(
                f"{self.path} was begun with other settings: "
                + "; ".join(_difference(name, there.get(name), here.get(name)) for name in different)
                + "; repeat that command to go on, or give another --out"
            )

    def _keep(self, workflow: Workflow) -> None:
        for model in workflow.runs:
            self.runs[workflow.workflow_id, model] = workflow

    def _write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _cut(self, size: int) -> None:
        """Drop what a crash left half-written at the end."""
        self._file.truncate(size)
        self._file.seek(size)


@contextmanager
def open_journal(path: Path, settings: Mapping[str, Any]) -> Iterator[Journal]:
    """The journal at ``path``, nobody else's meanwhile; made if it is not there, and gone again if it got no run.

    Raises `ChimsimError`.
    """
    with open(path, "r+b" if path.exists() else "w+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ChimsimError(f"another chimsim is writing to {path}; wait for it or give another --out") from None
        journal = Journal(path, file)
        journal.load(settings)
        try:
            yield journal
        finally:
            if not journal.runs:
                path.unlink()


def _difference(name: str, there: object, here: object) -> str:
    """Texts and lists of which only the digest is kept differ in content; the rest is short enough to be said."""
    if name.endswith("_sha256"):
        return f"the {name.removesuffix('_sha256')} differ in content"
    return f"{name} {json.dumps(there)} there, {json.dumps(here)} here"
