"""Transformer encoders for the router: one frozen, for its embeddings, and one fine-tuned with a sigmoid a column.

Needs torch and transformers, the extra ``router``; they are imported when an encoder is made. A GPU is used when
there is one. It knows neither models' names nor calibration.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from calibration.rows import TrainingError

Floats = npt.NDArray[np.float64]

BASE_MODEL = "answerdotai/ModernBERT-large"
"""What the paper fine-tunes."""

MAX_TOKENS = 512
"""Of a prompt; what is longer is cut at the end."""

EPOCHS = 4
BATCH = 16
LEARNING_RATE = 5e-5
_PATIENCE = 2
"""Epochs without a lower loss on the held-out part, after which training stops."""

_HELD_OUT = 0.15


class EncoderError(TrainingError):
    """An encoder that cannot be had; the message says what to install or to name."""


def need_torch() -> tuple[Any, Any]:
    """The modules torch and transformers.

    Raises:
        EncoderError: they are not installed.
    """
    try:
        torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    except ImportError as error:
        raise EncoderError(
            f"a transformer router needs torch and transformers ({error.name or error} is missing): "
            'pip install "chimsim[router]"'
        ) from None
    return torch, transformers


class Encoder:
    """A frozen encoder: the mean of its last layer over a text's tokens, scaled to length 1."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        torch, _ = need_torch()
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = model.to(self._device).eval()
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, base_model: str | None) -> Encoder:
        """From a local folder or a hub's name.

        Raises:
            EncoderError: none is named, or it cannot be loaded.
        """
        if base_model is None:
            raise EncoderError(
                "backend embeddings needs a base model: a sentence encoder's folder or hub name, "
                "such as sentence-transformers/all-MiniLM-L6-v2"
            )
        _, transformers = need_torch()
        return cls(*_loaded(base_model, transformers.AutoModel, {}))

    def embed(self, prompts: Sequence[str], batch: int = 32) -> Floats:
        """One row a prompt, (prompts, dimensions)."""
        torch, _ = need_torch()
        parts = []
        for tokens in _batches(self._tokenizer, prompts, batch, self._device):
            with torch.inference_mode():
                hidden = self._model(**tokens).last_hidden_state.float()
            mask = tokens["attention_mask"].unsqueeze(-1)
            mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
            parts.append(torch.nn.functional.normalize(mean, dim=1).cpu().numpy())
        return np.concatenate(parts).astype(np.float64)

    def state(self) -> dict[str, Any]:
        return _state(self._model, self._tokenizer)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Encoder:
        _, transformers = need_torch()
        return cls(*_revived(state, transformers.AutoModel))


class FineTuned:
    """An encoder trained by binary cross-entropy with one output a column of labels."""

    def __init__(self, model: Any, tokenizer: Any, losses: Sequence[float] = ()) -> None:
        torch, _ = need_torch()
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = model.to(self._device).eval()
        self._tokenizer = tokenizer
        self.losses = tuple(losses)
        """mean training loss of each epoch"""

    @classmethod
    def train(
        cls,
        prompts: Sequence[str],
        labels: Floats,
        *,
        seed: int = 0,
        base_model: str | None = None,
        epochs: int = EPOCHS,
        learning_rate: float = LEARNING_RATE,
        progress: Callable[[str], None] | None = None,
    ) -> tuple[FineTuned, npt.NDArray[np.int64]]:
        """Fine-tune, and stop when the loss on a part held out no longer falls; the best epoch's weights stay.

        Args:
            prompts: texts.
            labels: (prompts, columns) of 0 and 1; NaN is masked out of the loss.
            seed: of the head's first weights, the order, dropout, and the part held out.
            base_model: local folder or hub name; None is `BASE_MODEL`.
            epochs: at most so many.
            learning_rate: highest of AdamW, after a warm-up over a tenth of the steps; then it falls linearly.
            progress: told each epoch's losses.

        Returns:
            The encoder, and the indices of the prompts that were held out.

        Raises:
            EncoderError: no torch, or the base model cannot be loaded.
        """
        torch, transformers = need_torch()
        order = np.random.default_rng(seed).permutation(len(prompts))
        held_out = np.sort(order[: max(1, round(_HELD_OUT * len(prompts)))])
        learn = np.sort(order[len(held_out) :])
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            model, tokenizer = _loaded(
                base_model or BASE_MODEL,
                transformers.AutoModelForSequenceClassification,
                {"num_labels": labels.shape[1], "problem_type": "multi_label_classification"},
            )
            made = cls(model, tokenizer)
            made._fit(prompts, labels, learn, held_out, seed, epochs, learning_rate, progress or (lambda text: None))
        return made, held_out

    def _fit(
        self,
        prompts: Sequence[str],
        labels: Floats,
        learn: npt.NDArray[np.int64],
        held_out: npt.NDArray[np.int64],
        seed: int,
        epochs: int,
        learning_rate: float,
        tell: Callable[[str], None],
    ) -> None:
        torch, transformers = need_torch()
        model = self._model
        steps = epochs * -(-len(learn) // BATCH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
        schedule = transformers.get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
        shuffled = np.random.default_rng([seed, 1])
        losses: list[float] = []
        best, best_weights, since = float("inf"), None, 0
        for epoch in range(epochs):
            model.train()
            order = shuffled.permutation(learn)
            total = 0.0
            for start in range(0, len(order), BATCH):
                rows = order[start : start + BATCH]
                (tokens,) = _batches(self._tokenizer, [prompts[row] for row in rows], BATCH, self._device)
                loss = _masked_loss(model(**tokens).logits, labels[rows], self._device)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                total += float(loss.detach()) * len(rows)
            model.eval()
            losses.append(total / len(order))
            logits = torch.tensor(self.logits([prompts[row] for row in held_out]))
            unseen = float(_masked_loss(logits, labels[held_out], "cpu"))
            tell(f"epoch {epoch + 1} of {epochs}: loss {losses[-1]:.4f}, held out {unseen:.4f}")
            if unseen < best:
                best, since = unseen, 0
                best_weights = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
            else:
                since += 1
                if since >= _PATIENCE:
                    break
        if best_weights is not None:
            model.load_state_dict(best_weights)
        self.losses = tuple(losses)

    def logits(self, prompts: Sequence[str], batch: int = 32) -> Floats:
        """Log odds before calibration, (prompts, columns)."""
        torch, _ = need_torch()
        parts = []
        for tokens in _batches(self._tokenizer, prompts, batch, self._device):
            with torch.inference_mode():
                parts.append(self._model(**tokens).logits.float().cpu().numpy())
        return np.concatenate(parts).astype(np.float64)

    def state(self) -> dict[str, Any]:
        return {**_state(self._model, self._tokenizer), "losses": list(self.losses)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> FineTuned:
        _, transformers = need_torch()
        return cls(*_revived(state, transformers.AutoModelForSequenceClassification), losses=state["losses"])


def _masked_loss(logits: Any, labels: Floats, device: str) -> Any:
    """Mean binary cross-entropy over the labels that are known."""
    torch, _ = need_torch()
    known = ~np.isnan(labels)
    target = torch.tensor(np.where(known, labels, 0.0), dtype=logits.dtype, device=device)
    mask = torch.tensor(known, dtype=logits.dtype, device=device)
    each = torch.nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return (each * mask).sum() / mask.sum().clamp(min=1)


def _batches(tokenizer: Any, prompts: Sequence[str], batch: int, device: str) -> Any:
    for start in range(0, len(prompts), batch):
        texts = list(prompts[start : start + batch])
        tokens = tokenizer(texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        yield {name: tokens[name].to(device) for name in ("input_ids", "attention_mask")}


def _loaded(base_model: str, factory: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    _, transformers = need_torch()
    if os.sep in base_model and base_model.startswith((".", "/", "~")):
        folder = Path(base_model).expanduser()
        if not (folder / "config.json").is_file():
            raise EncoderError(f"base model {base_model}: no such folder, or no config.json in it")
        base_model = str(folder)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(base_model)
        model = factory.from_pretrained(base_model, **options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise EncoderError(
            f"base model {base_model!r} cannot be loaded: {reason} (a hub name needs a network or a cache; "
            "a local folder works without)"
        ) from None
    return model, tokenizer


def _safetensors() -> Any:
    return importlib.import_module("safetensors.torch")


def _state(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Everything of it as plain values: configuration, tokenizer files, and weights in safetensors bytes."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {
            path.name: path.read_bytes()
            for path in sorted(Path(folder).iterdir())
            if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja")
        }
    weights = {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}
    return {"config": model.config.to_dict(), "tokenizer": files, "weights": _safetensors().save(weights)}


def _revived(state: dict[str, Any], factory: Any) -> tuple[Any, Any]:
    _, transformers = need_torch()
    settings = dict(state["config"])
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = factory.from_config(config)
    model.load_state_dict(_safetensors().load(state["weights"]))
    with tempfile.TemporaryDirectory() as folder:
        for name, data in state["tokenizer"].items():
            (Path(folder) / Path(name).name).write_bytes(data)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return model, tokenizer
