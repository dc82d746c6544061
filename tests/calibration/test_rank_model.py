"""The rank predictor: labels as vllm-ltr has them, order learned, nothing of the future, LightGBM only when asked."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from calibration.rank_model import RankModel, RankSettings, bucket_labels, load_rank, save_rank, train_rank
from calibration.rows import TrainingError, rows, split
from calibration.saved import ModelError, training_record
from calibration.scores import kendall_distance
from tests.calibration.learnable import MODELS, learnable, lengthened

TRACE = learnable(160)
PARTS = split(TRACE, 0.5, 1)
TEST = rows(PARTS.test, MODELS)
TINY = RankSettings(trees=30, components=4)


def test_labels_are_buckets_of_ten_tokens_counted_from_the_longest() -> None:
    tokens = np.array([1, 9, 10, 8_191, 8_192, 30_000])
    assert bucket_labels(tokens).tolist() == [819, 819, 818, 0, 0, 0]


def test_without_lightgbm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with pytest.raises(TrainingError, match=r"install chimsim\[ltr\]"):
        train_rank(PARTS.train, MODELS, TINY)


@pytest.fixture(scope="module")
def model() -> RankModel:
    pytest.importorskip("lightgbm")
    return train_rank(PARTS.train, MODELS, TINY)


def test_it_orders_the_calls_of_unseen_workflows(model: RankModel) -> None:
    for name in MODELS:
        mine = [row for row in TEST if row.model == name]
        true = np.array([row.stage_tokens for row in mine], np.float64)
        assert kendall_distance(true, model.scores([row.known for row in mine])) < 0.3


def test_the_future_is_out_of_reach(model: RankModel) -> None:
    for workflow in PARTS.test[:10]:
        later = lengthened(workflow, 0)
        first = [[row.known for row in rows([each], MODELS) if not row.known.stage] for each in (workflow, later)]
        assert model.predict(first[0]) == model.predict(first[1])


def test_every_model_of_a_call_has_a_rank(model: RankModel) -> None:
    call = replace(TEST[0].known, models=("small", "unheard-of", "large"), prompt=None)
    assert list(model.predict([call])[0]) == ["small", "unheard-of", "large"]
    assert model.predict([]) == []


def test_the_same_seed_gives_the_same_bytes_also_from_a_folder(model: RankModel, tmp_path: Path) -> None:
    known = [row.known for row in TEST]
    assert train_rank(PARTS.train, MODELS, TINY).scores(known).tobytes() == model.scores(known).tobytes()
    record = training_record(TRACE, PARTS, MODELS, 1, 0.5)
    saved = save_rank(tmp_path / "m", model, training=record, scores={}, cost_ms={"per_call": 0.1}, made_by="0")
    assert "lightgbm" in saved.manifest["packages"]
    read = load_rank(tmp_path / "m")
    assert read.scores(known).tobytes() == model.scores(known).tobytes()
    assert read.settings == TINY


def test_a_model_of_another_kind_is_refused(model: RankModel, tmp_path: Path) -> None:
    from calibration.length_model import load_length

    record = training_record(TRACE, PARTS, MODELS, 1, 0.5)
    save_rank(tmp_path / "m", model, training=record, scores={}, cost_ms={"per_call": 0.1}, made_by="0")
    with pytest.raises(ModelError, match="of kind rank; expected one of kind length"):
        load_length(tmp_path / "m")
