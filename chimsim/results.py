"""The results folder: what a sweep writes, how it is kept whole, and how it is read back.

Files appear under a temporary name in their own folder and are renamed when they are on disk, so a file or
a cell is there completely or not at all. The same run gives the same bytes: no dates, no library metadata.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import weakref
from collections.abc import Iterator, Mapping, Sequence
from math import isinf, isnan
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from chimsim.errors import ChimsimError
from chimsim.records import RunResult

FORMAT = 3
"""Counts up when the meaning of a cell's files changes, so that cells of two formats never mix."""

TABLES = ("requests", "workflows", "engines", "timeline", "itl")
CHECKSUMS = "checksums.json"
LOCK = ".lock"
MANIFEST = "manifest.json"
_HASH = re.compile("[0-9a-f]{32}")
_AXES = {"trace": str, "combo": str, "policy": str, "seed": int}
"""Of every cell, and of what type they are; the others may be missing, or empty for some policies."""


class Results:
    """A results folder to read: ``summary`` has one row a cell, the other tables are read on demand.

    A ``temporary`` folder is removed together with this object.
    """

    def __init__(self, path: Path, *, temporary: bool = False) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        if temporary:
            weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)

    @property
    def cells(self) -> list[str]:
        """The hashes of the finished cells, in the order of the grid."""
        return [h for h in self._planned() if (self.path / "cells" / h / "summary.json").is_file()]

    @property
    def planned(self) -> int:
        """How many cells the sweep has."""
        return len(self._planned())

    @property
    def complete(self) -> bool:
        """Whether every cell of the sweep is there."""
        return len(self.cells) == self.planned

    @property
    def summary(self) -> pd.DataFrame:
        """One row a finished cell: the axes of the grid, then the metrics of docs/metrics.md."""
        rows = []
        for entry in self.manifest["cells"]:
            if (self.path / "cells" / entry["hash"] / "summary.json").is_file():
                rows.append(_axes_row(entry) | self.cell_summary(entry["hash"]))
        return summary_frame(rows)

    def config(self, cell: str) -> dict[str, Any]:
        """The resolved configuration of one cell."""
        config: dict[str, Any] = json.loads(read_cell_file(self.path, cell, "config.json"))
        return config

    def cell_summary(self, cell: str) -> dict[str, Any]:
        """The metrics of one cell."""
        summary: dict[str, Any] = json.loads(read_cell_file(self.path, cell, "summary.json"))
        return summary

    def table(self, cell: str, name: str) -> pd.DataFrame:
        """One table of a cell: requests, workflows, engines, timeline or itl."""
        return pd.read_parquet(io.BytesIO(read_cell_file(self.path, cell, f"{name}.parquet")))

    def _planned(self) -> list[str]:
        return list(dict.fromkeys(entry["hash"] for entry in self.manifest["cells"]))


def summary_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows as a table whose columns have one type each: numbers where all are, else text."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns: dict[str, pd.Series] = {}
    for name in names:
        values = [_number(row.get(name)) for row in rows]
        if all(isinstance(v, bool) for v in values):
            columns[name] = pd.Series(values, dtype=bool)
        elif all(isinstance(v, int) and not isinstance(v, bool) for v in values):
            columns[name] = pd.Series(values, dtype="int64")
        elif all(v is None or (isinstance(v, int | float) and not isinstance(v, bool)) for v in values):
            columns[name] = pd.Series([float("nan") if v is None else float(v) for v in values], dtype="float64")
        else:
            columns[name] = pd.Series([None if v is None else str(v) for v in values], dtype="str")
    return pd.DataFrame(columns)


def axis_columns(summary: pd.DataFrame) -> list[str]:
    """The columns of a summary that are axes of its grid: those before ``cell``."""
    columns = [str(name) for name in summary.columns]
    return columns[: columns.index("cell")]


PANEL_AXES = ("combo", "trace", "slots", "rps", "burstiness")
"""The axes of a summary that say what is served, and on what; the others are of a policy, or the seed."""


def own_axes(rows: pd.DataFrame) -> list[str]:
    """The axes of a policy in which these rows of a summary vary."""
    kept = [name for name in axis_columns(rows) if name not in (*PANEL_AXES, "seed", "policy")]
    return [name for name in kept if rows[name].nunique(dropna=False) > 1]


def canonical(value: Any) -> Any:
    """The value as plain JSON: NaN becomes null, infinities the text ``inf``, tuples lists, keys text."""
    if isinstance(value, float):
        if isnan(value):
            return None
        if isinf(value):
            return "inf" if value > 0 else "-inf"
        return value
    if isinstance(value, Mapping):
        return {str(key): canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return [canonical(item) for item in items]
    return value


def json_bytes(value: Any, *, indent: int | None = 2) -> bytes:
    """JSON with sorted keys and shortest round-trip floats: equal values give equal bytes."""
    separators = None if indent else (",", ":")
    text = json.dumps(canonical(value), sort_keys=True, indent=indent, separators=separators, allow_nan=False)
    return (text + "\n").encode()


def digest(value: Any) -> str:
    """SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(json_bytes(value, indent=None)).hexdigest()


def parquet_bytes(frame: pd.DataFrame) -> bytes:
    """The frame as Parquet, without the notes on library versions that pandas would add."""
    table = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def check_file(path: Path) -> None:
    """Raises `ChimsimError` where no file of that name can be written: to be told before long work, not after it."""
    if path.is_dir():
        raise ChimsimError(f"{path}: is a folder; expected the name of a file")
    if not path.absolute().parent.is_dir():
        raise ChimsimError(f"{path}: there is no folder {path.parent}")


def write_file(path: Path, data: bytes) -> None:
    """Replace the file as a whole: its new content is on disk before it takes the name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _write_bytes(temporary, data)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            # The user knows the file by its own name.
            error.filename, error.filename2 = str(path), None
        raise
    _sync_folder(path.parent)


def write_cell(root: Path, name: str, config: Mapping[str, Any], result: RunResult, summary: Mapping[str, Any]) -> None:
    """Write one finished cell as a folder that appears with all its files or not at all."""
    write_cell_files(root, name, cell_files(config, result, summary))


def cell_files(config: Mapping[str, Any], result: RunResult, summary: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of a finished cell, by name."""
    files = {"config.json": json_bytes(config), "summary.json": ordered_json_bytes(summary)}
    for table in TABLES:
        frame = result.itl.to_frame() if table == "itl" else getattr(result, table)
        files[f"{table}.parquet"] = parquet_bytes(frame)
    sums = {file: hashlib.sha256(data).hexdigest() for file, data in files.items()}
    files[CHECKSUMS] = json_bytes(sums)
    return files


def write_cell_files(root: Path, name: str, files: Mapping[str, bytes]) -> None:
    """Write what `cell_files` made, here or on another machine, as `write_cell` does."""
    cells = root / "cells"
    cells.mkdir(exist_ok=True)
    temporary = cells / f".{name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        for file, data in files.items():
            _write_bytes(temporary / file, data)
        _sync_folder(temporary)
        target = cells / name
        if os.path.lexists(target) and not cell_is_whole(root, name):
            _remove(target)
        try:
            os.rename(temporary, target)
        except OSError as error:
            # another process finished the same cell first: its bytes are the same
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _sync_folder(cells)


def ordered_json_bytes(value: Mapping[str, Any]) -> bytes:
    """JSON in the mapping's own order, for a file whose order helps the reader (and is fixed by the code)."""
    return (json.dumps(canonical(value), indent=2, allow_nan=False) + "\n").encode()


def cell_is_whole(root: Path, name: str) -> bool:
    """Whether the cell is there and every file still has the content it was written with."""
    folder = root / "cells" / name
    try:
        sums = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        files = {"config.json", "summary.json", *(f"{table}.parquet" for table in TABLES)}
        if not isinstance(sums, dict) or set(sums) != files:
            return False
        return all(hashlib.sha256((folder / file).read_bytes()).hexdigest() == sums[file] for file in sums)
    except (OSError, ValueError):
        return False


def read_cell_file(root: Path, name: str, file: str) -> bytes:
    """A file of a cell, as it was written. Raises `ChimsimError` if it cannot be read or has changed since."""
    path = root / "cells" / name / file
    try:
        data = path.read_bytes()
        sums = json.loads((path.parent / CHECKSUMS).read_bytes())
        found = "" if sums[file] == hashlib.sha256(data).hexdigest() else "has changed since it was written"
    except OSError as error:
        found = f"cannot be read ({(error.strerror or str(error)).lower()})"
    except (ValueError, LookupError, TypeError):
        found = f"cannot be checked, since {CHECKSUMS} beside it is damaged"
    if found:
        raise ChimsimError(f"{path} {found}; the command that made the folder makes damaged cells anew")
    return data


def clean(root: Path) -> None:
    """Remove what a killed sweep left under temporary names. Call it under the lock only."""
    for folder in (root, root / "cells"):
        for path in sorted(folder.glob(".*.tmp")):
            with contextlib.suppress(OSError):
                _remove(path)


def read_manifest(root: Path) -> dict[str, Any]:
    """The folder's manifest; a folder that has none, or a broken one, is a clear error."""
    path = root / MANIFEST
    if not root.is_dir():
        what = "it is a file" if root.exists() else "no such directory"
        raise ChimsimError(f"{root} is not a results folder: {what}")
    if not path.is_file():
        raise ChimsimError(f"{root} is not a results folder: it has no manifest.json")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        form, spec, entries = manifest["format"], manifest["spec"], manifest["cells"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ChimsimError(f"{path} is not the manifest of a sweep ({type(error).__name__}: {error})") from error
    if form != FORMAT:
        raise ChimsimError(f"{path} has format {form!r:.60}, this chimsim reads format {FORMAT}")
    if type(spec) is not dict or type(entries) is not list:
        raise ChimsimError(f"{path} is not the manifest of a sweep (spec must be an object, cells a list)")
    for number, entry in enumerate(entries):
        wrong = _wrong_entry(entry, entries[0])
        if wrong:
            raise ChimsimError(f"{path} is damaged: cells[{number}] {wrong}")
    return dict(manifest)


def _wrong_entry(entry: Any, first: Any) -> str:
    """What is wrong with a cell of a manifest, or nothing: all have a hash and the same axes of single values."""
    if type(entry) is not dict or type(entry.get("hash")) is not str or not _HASH.fullmatch(entry["hash"]):
        return "has no hash"
    axes = entry.get("axes")
    if type(axes) is not dict or axes.keys() != first["axes"].keys():
        return "has not the axes of the first"
    for name, kind in _AXES.items():
        if type(axes.get(name)) is not kind:
            return f"has no {name}"
    for name, value in axes.items():
        numeric = type(value) in (int, float) and abs(value) < 2**63
        if not (value is None or type(value) is bool or numeric or (type(value) is str and _is_text(value))):
            return f"has {value!r:.60} as {name}"
    return ""


def _is_text(value: str) -> bool:
    """Whether it can be written down: half a surrogate pair cannot."""
    return value.isascii() or value.encode(errors="replace").decode() == value


def open_folder(root: Path, manifest: Mapping[str, Any]) -> None:
    """Make the folder ready for this sweep, or say what it holds instead. Call it under the lock."""
    if (root / MANIFEST).exists():
        there = read_manifest(root)
        here = json.loads(json_bytes(manifest))
        if {c["hash"] for c in there["cells"]} != {c["hash"] for c in here["cells"]}:
            raise ChimsimError(
                f"{root} holds another sweep ({_differences(there, here)}); "
                "give another --out, or repeat that sweep's options to go on with it"
            )
    else:
        write_file(root / MANIFEST, json_bytes(manifest))
    (root / "cells").mkdir(exist_ok=True)
    clean(root)


@contextlib.contextmanager
def folder_lock(root: Path, what: str = "sweep", mark: str = MANIFEST) -> Iterator[None]:
    """Hold the folder against a second command; the system frees the lock however the process dies.

    A folder that exists must be empty or hold ``mark``, by which the command knows ``what`` is its own.
    """
    if root.exists() and not root.is_dir():
        raise ChimsimError(f"{root} is a file; --out needs a folder")
    if root.is_dir() and not (root / mark).exists():
        foreign = sorted(p.name for p in root.iterdir() if p.name != LOCK and not p.name.endswith(".tmp"))
        if foreign:
            names = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
            raise ChimsimError(f"{root} is not empty and holds no {what} (found {names}); give another --out")
    root.mkdir(parents=True, exist_ok=True)
    with open(root / LOCK, "a+", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            owner = handle.read().strip() or "unknown"
            raise ChimsimError(
                f"another chimsim is writing to {root} (process {owner}); wait for it or give another --out"
            ) from None
        handle.truncate(0)
        handle.write(f"{os.getpid()}\n")
        handle.flush()
        yield


def live_notes(root: Path) -> dict[str, Any]:
    """What a live run noted of each cell beside its results; nothing where nothing can be read."""
    try:
        return dict(json.loads((root / "live.json").read_bytes())["cells"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write_summary(root: Path, entries: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Gather the cells' summaries, in the order of the grid, into summary.parquet and summary.csv."""
    rows = []
    for entry in entries:
        rows.append(_axes_row(entry) | json.loads(read_cell_file(root, entry["hash"], "summary.json")))
    frame = summary_frame(rows)
    write_file(root / "summary.parquet", parquet_bytes(frame))
    write_file(root / "summary.csv", frame.to_csv(index=False, lineterminator="\n").encode())
    return frame


def _axes_row(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {**entry["axes"], "cell": entry["hash"]}


def _number(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf") else value


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Which parts of two manifests differ, shortest useful words first."""
    found = []
    for key in sorted(there["spec"].keys() | here["spec"].keys()):
        old, new = there["spec"].get(key), here["spec"].get(key)
        if old != new:
            found.append(f"{key}: {_short(old)} there, {_short(new)} here")
    for part in ("traces", "clusters", "policies", "chimsim"):
        if there.get(part) != here.get(part):
            found.append(f"{part} differ in content" if not found else f"{part} differ")
    return "; ".join(found[:4]) + ("; ..." if len(found) > 4 else "") if found else "its cells differ"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _remove(path: Path) -> None:
    """Whatever stands there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write_bytes(path: Path, data: bytes) -> None:
    with open(path, "wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
