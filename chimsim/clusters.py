"""Cells on a cluster: plain tasks of Ray, or of Dask, a cell each.

Files of cells are sent once (`chimsim.parcels`), by Ray to each node and by Dask to each worker process; outcomes come
back as bytes, so that nodes need share no file system. Tries after a worker's death are counted in `chimsim.workers`:
Ray is told to make none of its own; a Dask cluster that was there before makes those that its scheduler is set to.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from joblib import cpu_count

from chimsim.errors import ChimsimError
from chimsim.grid import Cell
from chimsim.parcels import Parcel, Refused, do, pack, remove
from chimsim.workers import Account, Crew, Died, Workers, no_interrupts

TIMEOUT_S = 10.0
"""To find an address, and to tidy up at the end."""
_MODULES = {"ray": "ray", "dask": "distributed"}
_EXAMPLES = {"ray": "auto, 10.0.0.1:6379 or ray://10.0.0.1:10001", "dask": "tcp://10.0.0.1:8786"}

Function = Callable[[Cell], Any]


def crew_on(function: Function, cells: Sequence[Cell], workers: Workers, account: Account) -> Crew:
    """The workers of the cluster, or of one that is started on this machine. Raises `ChimsimError`."""
    backend = workers.backend
    module = _MODULES[backend]
    if find_spec(module) is None:
        raise ChimsimError(f"--backend {backend} needs {module}; install it: pip install 'chimsim[{backend}]'")
    given = "--address"
    if backend == "ray" and workers.address in (None, "auto") and os.environ.get("RAY_ADDRESS"):
        workers, given = replace(workers, address=os.environ["RAY_ADDRESS"]), "RAY_ADDRESS"
    if backend == "ray" and workers.address == "auto":
        workers = replace(workers, address=_last_started(given))
    if workers.address not in (None, "local"):
        _check(workers.address, backend, given)
    try:
        parcel = pack(cells)
    except OSError as error:
        raise ChimsimError(f"{error.filename}: {(error.strerror or str(error)).lower()}") from None
    with contextlib.ExitStack() as opened:
        crew = (RayTasks if backend == "ray" else DaskTasks)(function, parcel, workers, account, opened)
        crew.opened = opened.pop_all()
    return crew


def _last_started(given: str) -> str:
    """The cluster that was last started on this machine."""
    note = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray" / "ray_current_cluster"
    with contextlib.suppress(OSError):
        return note.read_text(encoding="utf-8").strip()
    raise ChimsimError(f"{given} auto: no Ray cluster was started on this machine (ray start --head)")


def _check(address: str, backend: str, given: str) -> None:
    """Refuse an address at which nobody listens; the libraries would try for minutes."""
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or port is None or parts.scheme not in (("", "ray") if backend == "ray" else ("", "tcp", "tls")):
        raise ChimsimError(f"{given}: {address!r} is none of {backend}; expected {_EXAMPLES[backend]}")
    try:
        socket.create_connection((host, port), TIMEOUT_S).close()
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ChimsimError(f"{given} {address}: no {backend} cluster can be reached there ({why})") from None


def _answer(outcome: Any) -> Any:
    if isinstance(outcome, Refused):
        raise ChimsimError(outcome.why)
    return outcome


def _wrong(error: Exception) -> ChimsimError:
    """What a worker did not catch: its code is missing or another, or it is out of order."""
    last = (str(error).strip().splitlines() or [""])[-1][:300]
    return ChimsimError(f"a worker fails ({type(error).__name__}: {last}); is the same chimsim installed on all nodes?")


def _nobody(name: str, address: str | None, error: Exception) -> ChimsimError:
    return ChimsimError(f"no {name} cluster at {address or 'this machine'}: {' '.join(str(error).split())[:300]}")


class RayTasks:
    """A task a cell, twice as many as there are cores: finished ones wait for us, not nodes for work."""

    opened: contextlib.ExitStack

    def __init__(
        self, function: Function, parcel: Parcel, workers: Workers, account: Account, opened: contextlib.ExitStack
    ) -> None:
        # Ray reports the use of clusters that it starts to its makers, if it is not told otherwise
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._ray: Any = import_module("ray")
        self._limit = workers.count
        self._refs: dict[Any, int] = {}
        self._token = parcel.token
        # what Ray says of workers that were killed goes to stdout, which is for results
        opened.enter_context(contextlib.redirect_stdout(sys.stderr))
        if not self._ray.is_initialized():
            self._join(workers, opened)
        self._nodes = [node["NodeID"] for node in self._ray.nodes() if node["Alive"] and parcel.token]
        # a reference in a list stays one, so that only who needs the files gets them
        stored = [self._ray.put(pickle.dumps(parcel.files))]
        self._rest = (function, parcel.token, parcel.versions, stored)
        self._task = self._ray.remote(max_retries=0, num_cpus=1)(_on_ray)
        account.workers = self._cores()
        account.nodes = sum(node["Alive"] for node in self._ray.nodes())

    def _join(self, workers: Workers, opened: contextlib.ExitStack) -> None:
        address = workers.address or "local"
        own: dict[str, Any] = {}
        if address == "local":
            own = {"num_cpus": workers.count or cpu_count(), "include_dashboard": False}
        opened.callback(self._ray.shutdown)
        try:
            with no_interrupts(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL, **own)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError, self._ray.exceptions.RayError) as error:
            raise _nobody("Ray", address, error) from None

    def _cores(self) -> int:
        """They may come and go."""
        cores = max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        return min(self._limit or cores, cores)

    def room(self) -> int:
        return self._limit or 2 * self._cores()

    def submit(self, index: int, job: Cell) -> None:
        self._refs[self._task.remote(pickle.dumps(job), *self._rest)] = index

    def next(self) -> tuple[int, Any]:
        errors = self._ray.exceptions
        (ref,), _ = self._ray.wait(list(self._refs), num_returns=1)
        index = self._refs.pop(ref)
        try:
            return index, _answer(self._ray.get(ref))
        except errors.OutOfMemoryError:
            return index, Died("ended by Ray for lack of memory")
        except (errors.WorkerCrashedError, errors.NodeDiedError, errors.ObjectLostError) as error:
            return index, Died(f"{type(error).__name__}, perhaps for lack of memory")
        except errors.RayError as error:
            raise _wrong(error) from None

    def close(self) -> None:
        ray = self._ray
        with self.opened, contextlib.suppress(ray.exceptions.RayError, ConnectionError, RuntimeError):
            for ref in self._refs:
                ray.cancel(ref, force=True)
            tidy = ray.remote(max_retries=0, num_cpus=0)(remove)
            on = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
            gone = [tidy.options(scheduling_strategy=on(node, soft=False)).remote(self._token) for node in self._nodes]
            if gone:
                ray.wait(gone, num_returns=len(gone), timeout=TIMEOUT_S)


def _on_ray(sent: bytes, function: Function, token: str, wanted: Mapping[str, str], stored: list[Any]) -> Any:
    ray: Any = import_module("ray")
    return do(function, sent, token, wanted, lambda: ray.get(stored[0]))


class DaskTasks:
    """A task a cell, as many as there are threads: with more, several would be lost with one worker."""

    opened: contextlib.ExitStack

    def __init__(
        self, function: Function, parcel: Parcel, workers: Workers, account: Account, opened: contextlib.ExitStack
    ) -> None:
        distributed: Any = import_module("distributed")
        self._killed = distributed.KilledWorker
        self._limit = workers.count
        self._token = parcel.token
        self._indices: dict[Any, int] = {}
        place: Any = workers.address
        try:
            with no_interrupts():
                if place is None:
                    # the tries after a death are ours
                    with import_module("dask").config.set({"distributed.scheduler.allowed-failures": 0}):
                        place = distributed.LocalCluster(
                            n_workers=workers.count or cpu_count(), threads_per_worker=1, processes=True,
                            dashboard_address=None, silence_logs=logging.CRITICAL,
                        )  # fmt: skip
                    opened.enter_context(place)
                self._client = distributed.Client(place, timeout=TIMEOUT_S, set_as_default=False)
            opened.enter_context(self._client)
            self._client.wait_for_workers(1, timeout=TIMEOUT_S)
        except (OSError, RuntimeError, ValueError) as error:
            raise _nobody("Dask", workers.address, error) from None
        self._done = distributed.as_completed(loop=self._client.loop)
        # a result of a task, unlike data that is handed out, is made anew when those who have it die
        self._stored = self._submitted(bytes, pickle.dumps(parcel.files))
        self._rest = (function, parcel.token, parcel.versions, self._stored)
        account.workers = self._threads()
        account.nodes = len({urlsplit(address).hostname for address in self._client.nthreads()})

    def _submitted(self, *task: Any) -> Any:
        with warnings.catch_warnings():
            # of the size of the files
            warnings.simplefilter("ignore", UserWarning)
            return self._client.submit(*task, pure=False)

    def _threads(self) -> int:
        """They may come and go."""
        threads: int = max(1, sum(self._client.nthreads().values()))
        return min(self._limit or threads, threads)

    def room(self) -> int:
        return self._threads()

    def submit(self, index: int, job: Cell) -> None:
        future = self._submitted(_on_dask, pickle.dumps(job), *self._rest)
        self._indices[future] = index
        self._done.add(future)

    def next(self) -> tuple[int, Any]:
        future = next(self._done)
        index = self._indices.pop(future)
        try:
            outcome = future.result()
        except self._killed:
            return index, Died("KilledWorker, perhaps for lack of memory")
        except Exception as error:
            raise _wrong(error) from None
        return index, _answer(outcome)

    def close(self) -> None:
        with self.opened, contextlib.suppress(OSError, RuntimeError):
            self._client.cancel([*self._indices, self._stored])
            if self._token:
                self._client.run(remove, self._token)


def _on_dask(sent: bytes, function: Function, token: str, wanted: Mapping[str, str], stored: bytes) -> Any:
    return do(function, sent, token, wanted, partial(bytes, stored))
