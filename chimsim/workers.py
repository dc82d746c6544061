"""Run jobs somewhere and hand back outcomes as they come: in this process, in others of this machine, on a cluster.

It knows nothing of cells. A job whose worker was killed is tried again, after all others: `run_jobs`. Who does the jobs
is a `Crew`: `Alone` and `Processes` here, those on clusters in `chimsim.clusters`.

`Processes` is a pool of our own and not joblib's (loky), from which we take the number of usable cores. What loky 3.5
(in joblib 1.6) lost when it was tried: when its parent is killed, workers live on and go on with jobs that are queued;
when one worker is killed, the jobs of all others end with it, and it is not told whose it was. Here a worker whose
parent has gone finds its pipe closed and ends, and a worker that is killed costs its own job alone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol, TypeVar

from joblib import cpu_count

from chimsim.errors import ChimsimError

Job = TypeVar("Job")
Outcome = TypeVar("Outcome")

BACKENDS = ("local", "ray", "dask")
RETRIES = 2
"""Of a job whose worker was killed: whatever killed three workers will kill the next."""
SHORT_S = 4.0
"""Work of so many seconds is done in this process where nobody says how many: others need 1.5 s to begin."""


@dataclass(frozen=True, slots=True)
class Workers:
    """Who is to do the jobs: ``count`` at once, by default one on each core of this machine or of the cluster."""

    count: int | None = None
    backend: str = "local"
    address: str | None = None


@dataclass(slots=True)
class Account:
    """What came of it: how many did the jobs at once, on how many machines, and how often one was done again."""

    workers: int = 1
    nodes: int = 1
    retried: int = 0


@dataclass(frozen=True, slots=True)
class Died:
    """Instead of an outcome: the worker was killed, or ended by itself, which is no accident (``final``)."""

    cause: str
    final: bool = False


class WorkerDied(ChimsimError):
    """Job ``index`` was given up: its worker ended in the middle of it, ``times`` times."""

    def __init__(self, index: int, died: Died, times: int) -> None:
        often = "" if times == 1 else f" {times} times"
        what = f"a worker was killed{often} ({died.cause})"
        if died.final:
            what = (
                f"a worker ended by itself ({died.cause}; a script that calls sweep() has to do it below "
                'if __name__ == "__main__":)'
            )
        super().__init__(what)
        self.index = index


class Crew(Protocol):
    """Those who do the jobs. A job is known by its number."""

    def room(self) -> int:
        """How many jobs it may have at once, now."""

    def submit(self, index: int, job: Any) -> None:
        """Take a job on."""

    def next(self) -> tuple[int, Any]:
        """Wait for a job to end: its number, and its outcome or `Died`."""

    def close(self) -> None:
        """Leave nothing behind, whatever is still under way."""


def run_jobs(
    function: Callable[[Job], Outcome],
    jobs: Sequence[Job],
    workers: Workers,
    *,
    work_s: float = inf,
    account: Account | None = None,
) -> Generator[tuple[int, Outcome], None, None]:
    """Yield (number of the job, what ``function`` returned) in order of completion; they begin in their own order.

    ``function`` must be importable and catch its own errors. Work that is expected to take one process only ``work_s``
    is done in this one where nobody says how many are to. On a cluster jobs must be cells. Raises `WorkerDied` when all
    others are done, on a cluster other `ChimsimError` too; whatever ends the iteration, no child process outlives it.
    """
    account = account or Account()
    waiting = deque(range(len(jobs)))
    if not waiting:
        return
    died = [0] * len(jobs)
    under_way: set[int] = set()
    given_up: WorkerDied | None = None
    with contextlib.closing(_crew(function, jobs, workers, work_s, account)) as crew:

        def fill() -> None:
            while waiting and len(under_way) < crew.room():
                index = waiting.popleft()
                under_way.add(index)
                crew.submit(index, jobs[index])

        fill()
        while under_way:
            index, outcome = crew.next()
            under_way.remove(index)
            if isinstance(outcome, Died):
                died[index] += 1
                if outcome.final:
                    raise WorkerDied(index, outcome, died[index])
                if died[index] > RETRIES:
                    given_up = given_up or WorkerDied(index, outcome, died[index])
                else:
                    account.retried += 1
                    # last, since it may have needed the memory that others had
                    waiting.append(index)
            fill()
            if not isinstance(outcome, Died):
                yield index, outcome
    if given_up is not None:
        raise given_up


def _crew(
    function: Callable[[Any], Any], jobs: Sequence[Any], workers: Workers, work_s: float, account: Account
) -> Crew:
    if workers.backend != "local":
        # neither is needed by most, and both take long to import
        from chimsim.clusters import crew_on

        return crew_on(function, jobs, workers, account)
    count = min(workers.count or (cpu_count() if work_s > SHORT_S else 1), len(jobs))
    account.workers = count
    return Alone(function) if count <= 1 else Processes(function, count)


class Alone:
    """This process."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self._jobs: list[tuple[int, Any]] = []

    def room(self) -> int:
        return 1

    def submit(self, index: int, job: Any) -> None:
        self._jobs.append((index, job))

    def next(self) -> tuple[int, Any]:
        index, job = self._jobs.pop()
        return index, self._function(job)

    def close(self) -> None:
        pass


class Processes:
    """Child processes of this one, started as they are needed, each with one job at a time."""

    def __init__(self, function: Callable[[Any], Any], count: int) -> None:
        self._function = function
        self._count = count
        self._idle: list[tuple[Connection, SpawnProcess]] = []
        self._busy: dict[Connection, tuple[int, SpawnProcess]] = {}

    def room(self) -> int:
        return self._count

    def submit(self, index: int, job: Any) -> None:
        connection, process = self._idle.pop() if self._idle else _start(self._function)
        self._busy[connection] = index, process
        _send(connection, job)

    def next(self) -> tuple[int, Any]:
        ready = wait(list(self._busy))[0]
        assert isinstance(ready, Connection)
        index, process = self._busy[ready]
        try:
            outcome = ready.recv()
        except (EOFError, ConnectionError):
            outcome = _ended(process)
            ready.close()
        else:
            self._idle.append((ready, process))
        del self._busy[ready]
        return index, outcome

    def close(self) -> None:
        for _, process in self._busy.values():
            process.terminate()
        for connection, _ in self._idle:
            connection.close()
        for process in [each for _, each in (*self._busy.values(), *self._idle)]:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()


def _ended(process: SpawnProcess) -> Died:
    """In words: the signal or the exit code, with the usual reason for a SIGKILL."""
    process.join()
    code = process.exitcode
    if code is None or code >= 0:
        return Died(f"exit code {code}", final=True)
    name = signal.Signals(-code).name
    return Died(f"{name}, perhaps for lack of memory" if name == "SIGKILL" else name)


def _start(function: Callable[[Any], Any]) -> tuple[Connection, SpawnProcess]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(function, there), daemon=True)
    with no_interrupts():
        process.start()
    there.close()
    return here, process


@contextlib.contextmanager
def no_interrupts() -> Iterator[None]:
    """A Ctrl-C is the parent's to handle: children that start meanwhile inherit the blocked signal, and say nothing."""
    # starting a child starts this one first, which lets the signal through again
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _send(connection: Connection, job: object) -> None:
    # a worker that is gone already is noticed where its outcome is awaited
    with contextlib.suppress(BrokenPipeError, ConnectionError):
        connection.send(job)


def _serve(function: Callable[[Any], Any], connection: Connection) -> None:
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            job = connection.recv()
            connection.send(function(job))
