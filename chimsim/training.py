"""Models trained from a trace into folders, judged on the workflows held out: what the commands and experiments share.

It prints nothing; learning and scores are in `calibration`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import chimsim
from chimsim.errors import ChimsimError, near
from traces import Trace

if TYPE_CHECKING:
    from calibration.length_eval import Predictor
    from calibration.saved import SavedModel

Tell = Callable[[str], None]
KINDS = ("length", "rank")
"""Of predictors."""


def _silent(text: str) -> None:
    return None


def trainer_of(kind: str, *, quantile: float = 0.5, **settings: Any) -> Callable[..., Predictor]:
    """A predictor's training, of workflows and models; ``kind`` is one of `KINDS`, ``settings`` are the kind's.

    What is wrong with them is said at once. Raises `ChimsimError`, or one of the packages' errors.
    """
    if kind == "rank":
        from calibration.rank_model import RankSettings, check_lightgbm, train_rank

        if quantile != 0.5:
            raise ChimsimError("a rank predictor has no quantiles; leave out quantile")
        check_lightgbm()
        return lambda workflows, models: train_rank(workflows, models, RankSettings(**settings))
    if kind != "length":
        raise ChimsimError(f"kind {kind!r} is unknown{near(kind, KINDS)} (kinds: {', '.join(KINDS)})")
    from calibration.length_model import LengthSettings, check_quantile, train_length

    check_quantile(quantile)
    return lambda workflows, models: train_length(workflows, models, LengthSettings(quantile=quantile, **settings))


@dataclass(frozen=True, slots=True)
class Trained:
    """A model on disk. ``learned`` and ``judged`` count workflows; ``scores`` is empty where none was held out."""

    saved: SavedModel
    scores: Any
    cost_ms: dict[str, float]
    train_s: float
    learned: int
    judged: int
    reads_text: bool


def predictor_into(
    out: Path,
    trace: Trace,
    models: Sequence[str] | None,
    trainer: Callable[..., Predictor],
    *,
    test_share: float,
    seed: int,
    tell: Tell = _silent,
) -> Trained:
    """Train a length or rank predictor (``trainer`` of workflows and models) and save it.

    Raises one of the packages' errors for a folder that is none of ours, unknown models, or too few workflows.
    """
    from calibration.length_eval import cost_ms, evaluate, judge
    from calibration.length_model import LengthModel, save_length
    from calibration.rank_model import save_rank
    from calibration.rows import check_models, split
    from calibration.saved import check_folder, training_record

    check_folder(out)
    chosen = check_models(trace, models)
    parts = split(trace, test_share, seed)
    tell(f"learning from {len(parts.train)} workflows")
    began = time.perf_counter()
    model = trainer(parts.train, chosen)
    train_s = time.perf_counter() - began
    tell("judging and timing")
    table: list[dict[str, Any]] = []
    if parts.test:
        table = evaluate(judge(model, parts.test, parts.train), [w.workflow_id for w in trace.workflows])
    cost = cost_ms(model, parts.test or parts.train)
    record = training_record(trace, parts, chosen, seed, test_share)
    kept: dict[str, Any] = {"training": record, "scores": {"held_out": table}, "cost_ms": cost}
    if isinstance(model, LengthModel):
        saved = save_length(out, model, made_by=chimsim.__version__, **kept)
    else:
        saved = save_rank(out, model, made_by=chimsim.__version__, **kept)
    return Trained(saved, table, cost, train_s, len(parts.train), len(parts.test), model.reads_text)


def router_into(
    out: Path,
    trace: Trace,
    models: Sequence[str] | None,
    *,
    test_share: float,
    seed: int,
    backend: str = "forest",
    target: str = "solved",
    base_model: str | None = None,
    pair: Sequence[str] | None = None,
    tell: Tell = _silent,
) -> Trained:
    """Train a semantic router and save it. Raises as `predictor_into` does, and for unknown backends and targets."""
    from calibration.router_eval import cost_ms, evaluate
    from calibration.router_model import learning_set, save_router, train_router
    from calibration.rows import check_models, split
    from calibration.saved import check_folder, training_record

    check_folder(out)
    chosen = check_models(trace, models)
    parts = split(trace, test_share, seed)
    data = learning_set(parts.train, chosen)
    began = time.perf_counter()
    router = train_router(data, backend=backend, target=target, seed=seed, base_model=base_model, progress=tell)
    train_s = time.perf_counter() - began
    tell("judging and timing")
    scores: dict[str, Any] = {}
    if parts.test:
        test = learning_set(parts.test, chosen)
        scores = evaluate(test, router.predict_proba(test.prompts), pair)
    cost = cost_ms(router, data.prompts)
    saved = save_router(
        out,
        router,
        training=training_record(trace, parts, chosen, seed, test_share),
        scores=scores,
        cost_ms=cost,
        made_by=chimsim.__version__,
        settings={"train_s": round(train_s, 3), "base_model": base_model},
    )
    return Trained(saved, scores, cost, train_s, len(data.prompts), scores.get("n", 0), True)
