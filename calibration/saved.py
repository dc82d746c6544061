"""Saved models: a folder with a manifest, the ids of the workflows it learned from, and the model itself.

It keeps and checks; it does not know what a model does. Unpickling runs code, so only a folder that the user names
is ever loaded, and only once its checksums and package versions have been checked: that guards against damage and
misunderstanding, not against a folder made by someone else to do harm.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from calibration.rows import Split
from traces.schema import Trace

FORMAT = 1
"""Of the folder; a folder of another format is refused."""

KINDS = ("length", "rank", "router")
MANIFEST, WORKFLOWS, MODEL = "manifest.json", "workflows.json", "model.joblib"

PACKAGES = ("scikit-learn", "quantile-forest", "numpy")
"""Written into every manifest where installed; `save_model` adds those the model needs besides."""

PICKLED_BY = ("scikit-learn", "quantile-forest")
"""Packages whose objects are in the model: another major or minor version than the one that saved is refused."""

MAX_COST_MS = 1e9
"""Of a call: more is taken for damage."""

_EXTRAS = {"lightgbm": "ltr", "torch": "router", "transformers": "router"}


class ModelError(ValueError):
    """A model's folder that cannot be written or read; the message names the folder, what is wrong, and the cure."""


@dataclass(frozen=True)
class SavedModel:
    """A model read back. ``objects`` are as they were saved, and None where only the manifest was read."""

    folder: Path
    kind: str
    manifest: Mapping[str, Any]
    objects: Any
    digest: str
    """SHA-256 over the manifest, which holds the checksums of all other files: for the hash of what depends on it"""

    @property
    def size_bytes(self) -> int:
        """Of all its files but the manifest."""
        return sum(each["bytes"] for each in self.manifest["files"].values())

    @cached_property
    def trained_on(self) -> frozenset[str]:
        """Ids of the workflows it learned from."""
        return frozenset(self._workflows["trained_on"])

    @cached_property
    def held_out(self) -> frozenset[str]:
        """Ids of the workflows of the same trace that it has not seen."""
        return frozenset(self._workflows["held_out"])

    @cached_property
    def _workflows(self) -> Mapping[str, Sequence[str]]:
        rows: Mapping[str, Sequence[str]] = json.loads(_checked(self.folder, WORKFLOWS, self.manifest["files"]))
        return rows


def training_record(trace: Trace, split: Split, models: Sequence[str], seed: int, test_share: float) -> dict[str, Any]:
    """What a manifest says about where a model comes from; `save_model` moves the ids to a file of their own."""
    return {
        "trace": trace.name,
        "trace_digest": trace.digest,
        "models": list(models),
        "seed": seed,
        "test_share": test_share,
        "trained_on": sorted(workflow.workflow_id for workflow in split.train),
        "held_out": sorted(workflow.workflow_id for workflow in split.test),
    }


def save_model(
    folder: str | Path,
    kind: str,
    *,
    training: Mapping[str, Any],
    settings: Mapping[str, Any],
    scores: Mapping[str, Any],
    cost_ms: Mapping[str, float],
    objects: Any,
    made_by: str,
    packages: Sequence[str] = (),
) -> SavedModel:
    """Write a model as a folder that appears whole or not at all; an older model in its place is replaced.

    Args:
        folder: where; it must not exist, be empty, or hold a saved model.
        kind: one of `KINDS`.
        training: `training_record`.
        settings: how it was made, as `load_model`'s caller needs to use it.
        scores: on the workflows held out (nan becomes null).
        cost_ms: measured milliseconds; ``per_call`` is required: what a simulation charges a call by default.
        objects: of joblib, best plain dicts of arrays and scikit-learn estimators.
        made_by: version of the program that saves.
        packages: distributions that the model needs besides `PACKAGES`.

    Raises:
        ModelError: the folder holds something else.
    """
    import joblib

    folder = Path(folder)
    if kind not in KINDS:
        raise ModelError(f"{folder}: kind {kind!r} is unknown (kinds: {', '.join(KINDS)})")
    check_folder(folder)
    buffer = io.BytesIO()
    joblib.dump(objects, buffer, compress=("zlib", 3))
    ids = {name: list(training[name]) for name in ("trained_on", "held_out")}
    files = {MODEL: buffer.getvalue(), WORKFLOWS: _json(ids)}
    manifest = {
        "format": FORMAT,
        "kind": kind,
        "made_by": f"chimsim {made_by}",
        "training": {name: value for name, value in training.items() if name not in ids}
        | {
            "workflows": len(ids["trained_on"]),
            "workflows_held_out": len(ids["held_out"]),
            "workflows_sha256": _sha256("\n".join(ids["trained_on"]).encode()),
        },
        "settings": settings,
        "scores": scores,
        "cost_ms": cost_ms,
        "packages": _versions((*PACKAGES, *packages)) | {"python": platform.python_version()},
        "files": {name: {"sha256": _sha256(data), "bytes": len(data)} for name, data in files.items()},
    }
    files[MANIFEST] = _json(_without_nan(manifest))
    _write_folder(folder, files)
    return SavedModel(folder, kind, json.loads(files[MANIFEST]), objects, _sha256(files[MANIFEST]))


def check_folder(folder: str | Path) -> None:
    """Raises `ModelError` where `save_model` would: to be told before the training rather than after it."""
    folder = Path(folder)
    if folder.exists() and not _is_ours(folder):
        raise ModelError(f"{folder}: is there already and is no saved model; give a new folder")


def load_model(folder: str | Path, kind: str) -> SavedModel:
    """Read a saved model back: everything is checked before anything is unpickled.

    Raises:
        ModelError: no folder, no saved model, another kind or format, a damaged file, or packages of other versions.
    """
    import joblib

    saved = read_manifest(folder)
    _check_kind(saved, kind)
    data = _checked(saved.folder, MODEL, saved.manifest["files"])
    _checked(saved.folder, WORKFLOWS, saved.manifest["files"])
    _check_packages(saved)
    try:
        objects = joblib.load(io.BytesIO(data))
    except Exception as error:  # whatever unpickling trips over: a class that has moved, say
        raise ModelError(f"{saved.folder}: {MODEL} cannot be read ({error}); train the model again") from None
    return SavedModel(saved.folder, saved.kind, saved.manifest, objects, saved.digest)


def read_manifest(folder: str | Path) -> SavedModel:
    """The saved model without its objects: nothing is unpickled, and packages may be of any version.

    Raises:
        ModelError: no folder, no saved model, or one of another format.
    """
    folder = Path(folder)
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "there is no such folder"
        raise ModelError(f"{folder}: {found}; expected the folder of a saved model")
    missing = [name for name in (MANIFEST, WORKFLOWS, MODEL) if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{folder}: not a saved model: {', '.join(missing)} is missing")
    data = (folder / MANIFEST).read_bytes()
    try:
        manifest = json.loads(data)
        form = manifest["format"]
        whole = all(type(manifest[name]) is dict for name in ("training", "settings", "scores", "cost_ms", "packages"))
        files = [manifest["files"][name] for name in (WORKFLOWS, MODEL)]
        texts = [manifest["kind"], *manifest["packages"].values(), *(each["sha256"] for each in files)]
        cost_ms = manifest["cost_ms"]["per_call"]
        if (
            not whole
            or not all(type(each) is str for each in texts)
            or not all(type(each["bytes"]) is int for each in files)
            or type(cost_ms) not in (int, float)
            or not 0 <= cost_ms <= MAX_COST_MS
        ):
            raise TypeError
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ModelError(f"{folder}: {MANIFEST} is damaged or not of a saved model; train the model again") from None
    if form != FORMAT:
        raise ModelError(f"{folder}: format {form!r} is not {FORMAT}, which this version reads; train the model again")
    return SavedModel(folder, manifest["kind"], manifest, None, _sha256(data))


def _check_kind(saved: SavedModel, kind: str) -> None:
    if saved.kind != kind:
        raise ModelError(f"{saved.folder}: a saved model of kind {saved.kind}; expected one of kind {kind}")


def _check_packages(saved: SavedModel) -> None:
    made_with = saved.manifest["packages"]
    here = _versions(name for name in made_with if name != "python")
    for name, version in made_with.items():
        if name != "python" and name not in here:
            extra = f"; install chimsim[{_EXTRAS[name]}]" if name in _EXTRAS else ""
            raise ModelError(f"{saved.folder}: made with {name} {version}, which is not installed{extra}")
        if name in PICKLED_BY and _line(version) != _line(here[name]):
            raise ModelError(
                f"{saved.folder}: made with {name} {version}, but {here[name]} is installed, which may read it "
                f"wrongly; train the model again, or install {name} {_line(version)}"
            )


def _line(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _versions(names: Any) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _checked(folder: Path, name: str, files: Mapping[str, Mapping[str, Any]]) -> bytes:
    try:
        data = (folder / name).read_bytes()
    except FileNotFoundError:
        raise ModelError(f"{folder}: not a saved model: {name} is missing") from None
    if _sha256(data) != files[name]["sha256"]:
        raise ModelError(f"{folder}: {name} is damaged (its checksum differs); train the model again")
    return data


def _is_ours(folder: Path) -> bool:
    """Empty, or nothing but the files of a saved model (a damaged one may be replaced)."""
    if not folder.is_dir() or folder.is_symlink():
        return False
    names = {entry.name for entry in folder.iterdir()}
    return not names or (MANIFEST in names and names <= {MANIFEST, WORKFLOWS, MODEL})


def _write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    try:
        temporary.mkdir()
        for name, data in files.items():
            with open(temporary / name, "wb") as handle:
                handle.write(data)
                handle.flush()
                os.fsync(handle.fileno())
        # a folder cannot be renamed over one that holds files
        if folder.exists():
            os.rename(folder, old)
        try:
            os.rename(temporary, folder)
        except BaseException:
            if old.exists():
                os.rename(old, folder)
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode()


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and value != value else value
