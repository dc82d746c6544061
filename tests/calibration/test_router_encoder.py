"""Transformer encoders on a tiny ModernBERT with random weights, made here: the real training and loading code."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration.router_encoder import Encoder, EncoderError, FineTuned, need_torch
from calibration.router_model import LearningSet, load_router, save_router, train_router

WORDS = ("sum", "graph", "prime", "tree", "angle", "proof", "list", "limit", "coin", "matrix")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a ModernBERT of two layers and its tokenizer of whole words."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    importlib.import_module("torch").set_num_threads(1)
    tokenizers = pytest.importorskip("tokenizers")
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    vocabulary = {word: i for i, word in enumerate((*special, *WORDS))}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("tiny") / "modernbert"
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
    config = transformers.ModernBertConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, local_attention=16, pad_token_id=0, bos_token_id=2, eos_token_id=3,
        cls_token_id=2, sep_token_id=3, reference_compile=False,
    )  # fmt: skip
    importlib.import_module("torch").manual_seed(0)
    transformers.ModernBertModel(config).save_pretrained(folder)
    return str(folder)


def examples(count: int = 80) -> LearningSet:
    """The first model solves what mentions a prime, the second what mentions a prime or a tree."""
    rng = np.random.default_rng(0)
    prompts = [" ".join(rng.choice(WORDS, 5)) for _ in range(count)]
    labels = np.array([["prime" in text, "prime" in text or "tree" in text] for text in prompts], np.float64)
    return LearningSet(("small", "large"), prompts, labels)


def test_the_loss_falls_and_missing_labels_do_not_count(tiny: str) -> None:
    data = examples(160)
    labels = data.labels.copy()
    labels[::3, 1] = np.nan
    told: list[str] = []
    tuned, held_out = FineTuned.train(
        data.prompts, labels, seed=1, base_model=tiny, epochs=8, learning_rate=5e-3, progress=told.append
    )
    assert tuned.losses[-1] < 0.7 * tuned.losses[0]
    assert len(told) == len(tuned.losses)
    assert len(held_out) == 24
    right = (tuned.logits(data.prompts) > 0) == (data.labels > 0.5)
    assert right.mean() > 0.9


def test_a_saved_router_gives_the_same_probabilities(tiny: str, tmp_path: Path) -> None:
    data = examples()
    router = train_router(data, backend="modernbert", target="difference", seed=2, base_model=tiny)
    training: dict[str, Any] = {"trained_on": ["a"], "held_out": [], "models": list(data.models)}
    save_router(tmp_path / "m", router, training=training, scores={}, cost_ms={"per_call": 1.0}, made_by="test")
    loaded, saved = load_router(tmp_path / "m")
    assert saved.manifest["packages"]["torch"]
    assert (loaded.models, loaded.backend, loaded.target) == (("small", "large"), "modernbert", "difference")
    expected = router.predict_proba(data.prompts[:9])
    assert expected.shape == (9, 2)
    np.testing.assert_array_equal(loaded.predict_proba(data.prompts[:9]), expected)
    again = train_router(data, backend="modernbert", target="difference", seed=2, base_model=tiny)
    np.testing.assert_array_equal(again.predict_proba(data.prompts[:9]), expected)


def test_a_frozen_encoder_beside_the_words(tiny: str, tmp_path: Path) -> None:
    data = examples()
    encoder = Encoder.load(tiny)
    embedded = encoder.embed(data.prompts[:5])
    assert embedded.shape == (5, 32)
    np.testing.assert_allclose(np.linalg.norm(embedded, axis=1), 1, rtol=1e-5)
    # neither order nor company matters
    np.testing.assert_allclose(encoder.embed(data.prompts[:5][::-1])[::-1], embedded, atol=1e-5)
    router = train_router(data, backend="embeddings", base_model=tiny)
    training: dict[str, Any] = {"trained_on": ["a"], "held_out": [], "models": list(data.models)}
    save_router(tmp_path / "m", router, training=training, scores={}, cost_ms={"per_call": 1.0}, made_by="test")
    loaded, _ = load_router(tmp_path / "m")
    np.testing.assert_array_equal(loaded.predict_proba(data.prompts[:9]), router.predict_proba(data.prompts[:9]))


def test_no_such_base_model(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    with pytest.raises(EncoderError, match=r"no such folder, or no config\.json"):
        Encoder.load(str(tmp_path / "absent"))
    with pytest.raises(EncoderError, match="needs a base model"):
        Encoder.load(None)


def test_without_torch_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def refuse(name: str, package: str | None = None) -> Any:
        if name in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(EncoderError, match=r'torch is missing.*pip install "chimsim\[router\]"'):
        need_torch()
    with pytest.raises(EncoderError, match="chimsim"):
        train_router(examples(), backend="modernbert", base_model="anything")
