"""Saved models: whole or not at all, checked before anything is unpickled, and clear about what is wrong."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import joblib
import pytest

from calibration import saved
from calibration.rows import split
from calibration.saved import ModelError, load_model, read_manifest, save_model, training_record
from tests.calibration.learnable import MODELS, learnable

TRACE = learnable()
OBJECTS = {"weights": [1.0, 2.0]}


def save(folder: Path, kind: str = "length", **changes: Any) -> saved.SavedModel:
    given: dict[str, Any] = {
        "training": training_record(TRACE, split(TRACE, 0.25, 4), MODELS, 4, 0.25),
        "settings": {"trees": 3},
        "scores": {"distance": 0.2, "lost": float("nan")},
        "cost_ms": {"per_call": 0.25},
        "objects": OBJECTS,
        "made_by": "1.2.3",
    }
    return save_model(folder, kind, **given | changes)


def rewrite(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class Bomb:
    """Unpickling it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.mark),))


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    made = save(tmp_path / "deep" / "model")
    read = load_model(tmp_path / "deep" / "model", "length")
    assert read.objects == OBJECTS
    assert read.digest == made.digest
    manifest = read.manifest
    assert (manifest["format"], manifest["kind"], manifest["made_by"]) == (1, "length", "chimsim 1.2.3")
    assert manifest["cost_ms"] == {"per_call": 0.25}
    assert manifest["scores"] == {"distance": 0.2, "lost": None}
    assert manifest["training"]["trace_digest"] == TRACE.digest
    assert {"scikit-learn", "quantile-forest", "numpy", "python"} <= set(manifest["packages"])
    part = split(TRACE, 0.25, 4)
    assert read.trained_on == {workflow.workflow_id for workflow in part.train}
    assert read.held_out == {workflow.workflow_id for workflow in part.test}
    assert sorted(entry.name for entry in (tmp_path / "deep").iterdir()) == ["model"]


def test_the_digest_changes_with_model_and_cost(tmp_path: Path) -> None:
    digests = {
        save(tmp_path / "a").digest,
        save(tmp_path / "b").digest,
        save(tmp_path / "c", objects={"weights": [1.0, 2.5]}).digest,
        save(tmp_path / "d", cost_ms={"per_call": 0.3}).digest,
    }
    assert len(digests) == 3


def test_an_older_model_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    save(tmp_path / "model")
    save(tmp_path / "model", objects="new")
    assert load_model(tmp_path / "model", "length").objects == "new"
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match="is no saved model"):
        save(tmp_path / "model")
    assert (tmp_path / "model" / "notes.txt").read_text() == "mine"
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ModelError, match="is no saved model"):
        save(tmp_path / "file")


def test_a_save_that_fails_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "model")
    real, calls = os.rename, []

    def failing(source: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError("no")
        real(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="no"):
        save(tmp_path / "model", objects="new")
    assert load_model(tmp_path / "model", "length").objects == OBJECTS
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_is_no_model_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no such folder"):
        load_model(tmp_path / "none", "length")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelError, match="is a file"):
        load_model(tmp_path / "file", "length")
    save(tmp_path / "model")
    (tmp_path / "model" / "model.joblib").unlink()
    with pytest.raises(ModelError, match=r"not a saved model: model\.joblib is missing"):
        load_model(tmp_path / "model", "length")


def test_another_kind_or_format_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "model", "router")
    with pytest.raises(ModelError, match="of kind router; expected one of kind length"):
        load_model(tmp_path / "model", "length")
    rewrite(tmp_path / "model", format=99)
    with pytest.raises(ModelError, match="format 99 is not 1"):
        load_model(tmp_path / "model", "router")
    with pytest.raises(ModelError, match="kind 'tail' is unknown"):
        save(tmp_path / "other", "tail")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', "\x00\x01"])
def test_a_damaged_manifest_is_one_error(tmp_path: Path, text: str) -> None:
    save(tmp_path / "model")
    (tmp_path / "model" / "manifest.json").write_text(text)
    with pytest.raises(ModelError, match=r"manifest\.json is damaged"):
        read_manifest(tmp_path / "model")


@pytest.mark.parametrize("name", ["model.joblib", "workflows.json"])
def test_a_damaged_file_is_refused(tmp_path: Path, name: str) -> None:
    save(tmp_path / "model")
    path = tmp_path / "model" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ModelError, match=f"{name} is damaged"):
        load_model(tmp_path / "model", "length")


def test_nothing_is_unpickled_before_the_checks(tmp_path: Path) -> None:
    save(tmp_path / "model")
    mark = tmp_path / "mark"
    joblib.dump(Bomb(mark), tmp_path / "model" / "model.joblib")
    for kind in ("length", "rank"):
        with pytest.raises(ModelError):
            load_model(tmp_path / "model", kind)
    read_manifest(tmp_path / "model")
    assert not mark.exists()
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists()


@pytest.mark.parametrize(("package", "version"), [("scikit-learn", "0.17.1"), ("quantile-forest", "0.9.0")])
def test_a_model_of_another_line_of_a_package_is_refused(tmp_path: Path, package: str, version: str) -> None:
    save(tmp_path / "model")
    packages = read_manifest(tmp_path / "model").manifest["packages"]
    rewrite(tmp_path / "model", packages={**packages, package: version})
    with pytest.raises(ModelError, match=f"made with {package} {version}, but .* is installed"):
        load_model(tmp_path / "model", "length")
    patched = ".".join((*packages[package].split(".")[:2], "99"))
    rewrite(tmp_path / "model", packages={**packages, package: patched})
    assert load_model(tmp_path / "model", "length").objects == OBJECTS


def test_a_package_that_is_not_installed_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "model")
    packages = read_manifest(tmp_path / "model").manifest["packages"]
    rewrite(tmp_path / "model", packages={**packages, "lightgbm": "4.5.0"})
    real = saved._versions
    monkeypatch.setattr(saved, "_versions", lambda names: {k: v for k, v in real(names).items() if k != "lightgbm"})
    with pytest.raises(ModelError, match=r"lightgbm 4\.5\.0, which is not installed; install chimsim\[ltr\]"):
        load_model(tmp_path / "model", "length")
