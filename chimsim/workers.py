"""Run jobs in child processes, one at a time each, and hand back outcomes as they come.

It knows nothing of cells. Unlike a ready-made pool it can say which job a killed worker was busy with, and it
leaves no worker behind: a worker whose parent has gone finds its pipe closed and ends.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

Job = TypeVar("Job")
Outcome = TypeVar("Outcome")


class WorkerDied(Exception):
    """A worker ended in the middle of job ``index``; ``exitcode`` is negative for a signal."""

    def __init__(self, index: int, exitcode: int | None) -> None:
        super().__init__(index, exitcode)
        self.index = index
        self.exitcode = exitcode

    @property
    def cause(self) -> str:
        """In words: the signal or the exit code, with the usual reason for a SIGKILL."""
        if self.exitcode is None or self.exitcode >= 0:
            return f"exit code {self.exitcode}"
        name = signal.Signals(-self.exitcode).name
        return f"{name}, perhaps for lack of memory" if name == "SIGKILL" else name


def run_jobs(
    function: Callable[[Job], Outcome], jobs: Sequence[Job], workers: int
) -> Generator[tuple[int, Outcome], None, None]:
    """Yield (number of the job, what ``function`` returned) in order of completion.

    With one worker everything runs in this process. ``function`` must be importable and catch its own errors.
    Raises `WorkerDied`; whatever ends the iteration, no child process outlives it.
    """
    if workers <= 1 or len(jobs) <= 1:
        for index, job in enumerate(jobs):
            yield index, function(job)
        return
    waiting = deque(range(len(jobs)))
    busy: dict[Connection, tuple[int, SpawnProcess]] = {}
    processes: list[SpawnProcess] = []
    try:
        for _ in range(min(workers, len(jobs))):
            connection, process = _start(function)
            processes.append(process)
            index = waiting.popleft()
            busy[connection] = index, process
            _send(connection, jobs[index])
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                index, process = busy.pop(ready)
                try:
                    outcome: Outcome = ready.recv()
                except (EOFError, ConnectionError):
                    process.join()
                    raise WorkerDied(index, process.exitcode) from None
                if waiting:
                    following = waiting.popleft()
                    busy[ready] = following, process
                    _send(ready, jobs[following])
                else:
                    ready.close()
                yield index, outcome
        for process in processes:
            process.join(timeout=10)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
        for process in processes:
            process.join()


def _start(function: Callable[[Any], Any]) -> tuple[Connection, SpawnProcess]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(function, there), daemon=True)
    # a Ctrl-C is the parent's to handle: a child inherits the blocked signal and prints no traceback
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    there.close()
    return here, process


def _send(connection: Connection, job: object) -> None:
    # a worker that is gone already is noticed where its outcome is awaited
    try:
        connection.send(job)
    except (BrokenPipeError, ConnectionError):
        return


def _serve(function: Callable[[Any], Any], connection: Connection) -> None:
    while True:
        try:
            job = connection.recv()
        except (EOFError, ConnectionError):
            return
        outcome = function(job)
        try:
            connection.send(outcome)
        except (BrokenPipeError, ConnectionError):
            return
