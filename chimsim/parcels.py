"""What cells need of this machine's files, packed to be sent to another, and what is done with it there.

Cells carry their cluster and its profiles; traces, saved models and policies they only name. A parcel holds those files
as bytes, and with what their bytes are to be made: a worker with other versions refuses. It knows no cluster.
"""

from __future__ import annotations

import fcntl
import hashlib
import pickle
import platform
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any
from uuid import uuid4

import chimsim
from chimsim.feeds import HELD_OUT, PART, QRF, trace_named
from chimsim.grid import Cell, make_policy, source_digest
from traces import SHIPPED

PACKAGES = ("numpy", "pandas", "scipy", "pyarrow", "simpy")
MODEL_PACKAGES = ("scikit-learn", "quantile-forest", "lightgbm", "torch", "transformers")
"""Those that decide besides, where there are saved models; each as far as this machine has it."""


@dataclass(frozen=True)
class Parcel:
    """``files`` by the name in the cells: the file, or all files of a folder, by the path in it.

    ``token`` names it on the nodes, and nobody else can guess it; empty without files. ``versions`` are those of the
    machine that packed.
    """

    token: str
    versions: Mapping[str, str]
    files: Mapping[str, Mapping[str, bytes]]


@dataclass(frozen=True, slots=True)
class Refused:
    """Instead of an outcome: why this worker must not do it."""

    why: str


def pack(cells: Iterable[Cell]) -> Parcel:
    """All that the cells need; raises `OSError` where a file has gone."""
    names: dict[str, None] = {}
    models = False
    for cell in cells:
        with_files(cell, lambda name: names.setdefault(name) or name)
        models = models or bool(cell.feed.folders)
    packages = (*PACKAGES, *MODEL_PACKAGES) if models else PACKAGES
    return Parcel(
        uuid4().hex if names else "", versions(packages), {name: _files(Path(name).expanduser()) for name in names}
    )


def _files(path: Path) -> dict[str, bytes]:
    if path.is_dir():
        return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}
    return {"": path.read_bytes()}


def with_files(cell: Cell, place: Callable[[str], str]) -> Cell:
    """The cell with the names of all local files and folders in it put through ``place``."""

    def placed(trace: str) -> str:
        return trace if trace in SHIPPED else place(trace)

    whole, sign, part = cell.trace.partition(PART)
    base, *folders = whole.split(HELD_OUT)
    feed = cell.feed
    file, _, name = cell.policy.rpartition(":")
    return replace(
        cell,
        trace=HELD_OUT.join([placed(base), *map(place, folders)]) + sign + part,
        arrivals=cell.arrivals if cell.arrivals in ("poisson", "recorded") else placed(cell.arrivals),
        policy=f"{place(file)}:{name}" if file.endswith(".py") else cell.policy,
        feed=replace(
            feed,
            router=feed.router if feed.learned_router is None else place(feed.learned_router),
            lengths=feed.lengths if feed.learned_lengths is None else f"{QRF}{place(feed.learned_lengths)}",
            rank=None if feed.rank is None else place(feed.rank),
        ),
    )


@lru_cache(maxsize=4)
def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """What decides over the bytes that this machine makes, besides the input."""
    found = {
        "chimsim": f"{chimsim.__version__} (source {_source()[:12]})",
        "python": ".".join(platform.python_version_tuple()[:2]),
        "machine": platform.machine(),
    }
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _source() -> str:
    """SHA-256 over all modules of the project."""
    home = Path(chimsim.__file__).resolve().parent.parent
    total = hashlib.sha256()
    for package in ("calibration", "chimsim", "policies", "traces"):
        for path in sorted((home / package).rglob("*.py")):
            total.update(f"{path.relative_to(home).as_posix()}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def do(
    function: Callable[[Cell], Any], sent: bytes, token: str, wanted: Mapping[str, str], fetch: Callable[[], bytes]
) -> Any:
    """On the worker: do the function on the cell that was sent; what comes back is its outcome or `Refused`.

    ``sent`` is the pickled cell, to be opened only where the versions are those ``wanted``. ``fetch`` gets the pickled
    files of the parcel; it is called once on each node.
    """
    here = versions(tuple(name for name in wanted if name not in ("chimsim", "python", "machine")))
    other = [f"{name} {here.get(name, 'not installed')} instead of {wanted[name]}" for name in wanted
             if here.get(name) != wanted[name]]  # fmt: skip
    if other:
        return Refused(
            f"the worker on {socket.gethostname()} would make other bytes: it has {', '.join(other)}; install the "
            "same versions on all nodes"
        )
    places = _unpacked(token, fetch) if token else {}
    cell = with_files(pickle.loads(sent), places.__getitem__)
    if source_digest(make_policy(cell.policy, cell.knobs, cell.seed)) != cell.config["policy_source"]:
        return Refused(f"the worker on {socket.gethostname()} has another policy {cell.policy}; a module of yours must "
                       "be installed, alike, on all nodes, while a file (my_file.py:MyPolicy) is sent")  # fmt: skip
    return function(cell)


_places: dict[str, dict[str, str]] = {}


def _unpacked(token: str, fetch: Callable[[], bytes]) -> dict[str, str]:
    """Where this node has each file of the parcel; put there by the first process that asks."""
    if token in _places:
        return _places[token]
    folder = _folder(token)
    with open(folder.with_suffix(".lock"), "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            temporary = folder.with_suffix(".tmp")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(mode=0o700)
            files: dict[str, dict[str, bytes]] = pickle.loads(fetch())
            for number, (name, parts) in enumerate(files.items()):
                for part, data in parts.items():
                    path = temporary / _place(number, name) / part
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)
            (temporary / "names").write_bytes(pickle.dumps(list(files)))
            temporary.rename(folder)
    names = pickle.loads((folder / "names").read_bytes())
    _places[token] = {name: str(folder / _place(number, name)) for number, name in enumerate(names)}
    return _places[token]


def _place(number: int, name: str) -> Path:
    """Below a folder: apart from others of its name, which is a trace's too."""
    base = Path(name).name
    return Path(str(number)) / (base if base not in ("", "..") else "folder")


def remove(token: str) -> None:
    """On a node, or in each process of it: what was unpacked there."""
    if _places.pop(token, None) is not None:
        trace_named.cache_clear()
    folder = _folder(token)
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_suffix(".lock").unlink(missing_ok=True)


def _folder(token: str) -> Path:
    return Path(tempfile.gettempdir()) / f"chimsim-{token}"
