"""What passes through the gateway, written as a trace: a workflow a line, once it is over.

Lengths are the engines' own counts. What a prompt shares with the call before is estimated from the texts. A line is
written as a whole, and brought to the disk as soon as no other waits; no call waits for the disk.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from chimsim.errors import ChimsimError
from chimsim.gateway.ask import Ask
from chimsim.gateway.relay import Outcome
from chimsim.gateway.sessions import Session
from chimsim.results import check_file
from traces.schema import Run, Stage, Workflow, to_dict

log = logging.getLogger("chimsim.gateway")


class Recorder:
    """Writes to ``path``; a file that is there, and one that grows over ``max_bytes``, is renamed with the time.

    ``texts`` keeps prompts and answers. Use it as a context manager. Raises `ChimsimError` if it cannot be written.
    """

    def __init__(self, path: Path, *, texts: bool = False, max_bytes: int = 1 << 30) -> None:
        if path.suffix.lower() != ".jsonl":
            raise ChimsimError(f"{path}: a recorded trace is JSON lines; expected a name ending in .jsonl")
        check_file(path)
        self._path = path
        self._texts = texts
        self._max_bytes = max_bytes
        self._lines: SimpleQueue[tuple[str, dict[str, Any]] | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write_all, name="recorder", daemon=True)
        self._names: Counter[str] = Counter()
        try:
            _set_aside(path)
            path.touch()
        except OSError as error:
            raise ChimsimError(f"{path}: cannot be written: {error.strerror or error}") from None

    def __enter__(self) -> Recorder:
        self._writer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.put(None)
        self._writer.join()

    def stage(
        self, session: Session, ask: Ask, model: str, name: str, ready_at: float, ended_at: float, done: Outcome
    ) -> None:
        """A call of the workflow was answered."""
        before = session.recorded[-1] if session.recorded else None
        prompt_tokens = max(done.prompt_tokens, 1)
        row: dict[str, Any] = {
            "name": name, "model": model, "prompt_tokens": prompt_tokens, "output_tokens": max(done.output_tokens, 1),
            "ready_at": ready_at, "ended_at": ended_at, "said": ask.text + done.text, "reused": 0, "prompt": None,
            "output": None, "system": None,
        }  # fmt: skip
        if ask.text:
            row["system"] = round(prompt_tokens * ask.system_chars / len(ask.text))
            if before is not None:
                share = _common(before["said"], ask.text) / len(ask.text)
                most = min(before["prompt_tokens"] + before["output_tokens"], prompt_tokens - 1)
                row["reused"] = min(int(prompt_tokens * share), most)
        if self._texts:
            row["prompt"], row["output"] = ask.text, done.text
        if before is not None:
            before["said"] = ""
        session.recorded.append(row)

    def workflow(self, session: Session) -> None:
        """The workflow is over: its line can be written."""
        if session.recorded:
            self._lines.put((session.workflow_id, _line(session, session.task if self._texts else None)))

    def _write_all(self) -> None:
        failed = False
        while (job := self._lines.get()) is not None:
            name, row = job
            try:
                size = self._path.stat().st_size if self._path.exists() else 0
                if size >= self._max_bytes:
                    _set_aside(self._path)
                    self._names.clear()
                    size = 0
                # A name may come again once its workflow was forgotten; in a trace it stands once.
                self._names[name] += 1
                if self._names[name] > 1:
                    row["workflow_id"] = f"{name}#{self._names[name]}"
                line = json.dumps(row, ensure_ascii=False).encode(errors="replace") + b"\n"
                # Lines that come faster than a disk can say it has them are brought to it together.
                _append(self._path, line, sync=self._lines.empty() or size + len(line) >= self._max_bytes)
                failed = False
            except OSError as error:
                if not failed:
                    log.error("recording failed", extra={"fields": {"file": str(self._path), "error": str(error)}})
                failed = True


def _line(session: Session, prompt: str | None) -> dict[str, Any]:
    stages = []
    before: dict[str, Any] | None = None
    for row in session.recorded:
        delay_s = max(row["ready_at"] - before["ended_at"], 0.0) if before is not None else 0.0
        system = row["system"]
        stages.append(
            Stage(
                row["name"], row["prompt_tokens"], row["output_tokens"], row["reused"], round(delay_s, 6), system,
                None if system is None else row["prompt_tokens"] - system, prompt=row["prompt"], output=row["output"],
            )
        )  # fmt: skip
        before = row
    models = [row["model"] for row in session.recorded]
    meta: dict[str, Any] = {"recorded_by": "chimsim serve"}
    if len(set(models)) > 1:
        meta["models"] = models
    return to_dict(
        Workflow(
            session.workflow_id, session.workload, {models[-1]: Run(tuple(stages))}, round(session.arrived_at, 6),
            prompt, meta=meta,
        )
    )  # fmt: skip


def _append(path: Path, line: bytes, *, sync: bool) -> None:
    """Add the line, and bring the file to the disk; what a full disk takes of it only in part is taken out again."""
    with open(path, "ab", buffering=0) as file:
        before = file.tell()
        try:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if sync:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(before)
            raise


def _common(a: str, b: str) -> int:
    """How many characters two texts begin with alike."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _set_aside(path: Path) -> None:
    """Rename a file with something in it to a name that nothing has."""
    if not path.exists() or not path.stat().st_size:
        return
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    number = 0
    while True:
        aside = path.with_name(f"{path.stem}-{stamp}{f'-{number}' if number else ''}{path.suffix}")
        if not aside.exists():
            os.rename(path, aside)
            return
        number += 1
