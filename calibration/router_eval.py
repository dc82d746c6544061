"""How good a router is: ranking and calibration of each model, and what routing between two models gains.

Probabilities and labels in, numbers out; `cross_validated` is the one place that also trains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np
import numpy.typing as npt

from calibration.router_model import LearningSet, Router, learning_set, train_router
from calibration.rows import Split, TrainingError
from calibration.scores import average_precision, brier_score, expected_calibration_error, gap_auc
from traces.schema import near

Floats = npt.NDArray[np.float64]

BINS = 10


@dataclass(frozen=True)
class Curve:
    """Solved rate against the share of calls that go to the larger of two models, both in 0 to 1.

    ``router`` sends those first whose confidence gains most, ``oracle`` those that only the larger solves (and
    last those that only the smaller does); mixing at random is the straight line between the ends.
    """

    share: Floats
    router: Floats
    oracle: Floats

    @property
    def random(self) -> Floats:
        return np.asarray(self.router[0] + self.share * (self.router[-1] - self.router[0]), np.float64)

    @property
    def area(self) -> float:
        """What the router's curve has above random mixing, as a share of what the oracle's has: 0 is chance, 1 all."""
        most = np.trapezoid(self.oracle - self.random, self.share)
        return float(np.trapezoid(self.router - self.random, self.share) / most) if most > 0 else nan

    def at(self, share: float) -> tuple[float, float, float]:
        """Solved rate of random mixing, the router and the oracle when this share goes to the larger model."""
        lines = (self.random, self.router, self.oracle)
        random, router, oracle = (float(np.interp(share, self.share, line)) for line in lines)
        return random, router, oracle


def routing_curve(small_solved: Floats, large_solved: Floats, gain: Floats) -> Curve:
    """The curve over workflows, labels 0 or 1, in order of ``gain``, highest first; ties are mixed at random."""
    if not len(gain):
        return Curve(np.array([0.0, 1.0]), np.full(2, nan), np.full(2, nan))
    difference = large_solved - small_solved
    share = np.linspace(0, 1, len(gain) + 1)
    base = float(small_solved.mean())
    return Curve(share, base + _gained(difference, gain), base + _gained(difference, difference))


def _gained(difference: Floats, gain: Floats) -> Floats:
    order = np.argsort(-gain, kind="stable")
    total = np.concatenate([[0.0], np.cumsum(difference[order])]) / len(gain)
    # between the ends of a group of equal gains the order is chance, on average a straight line
    ends = np.flatnonzero(np.concatenate([[True], np.diff(gain[order]) != 0, [True]]))
    return np.interp(np.arange(len(total)), ends, total[ends])


def check_pair(data: LearningSet, pair: Sequence[str] | None) -> tuple[str, str] | None:
    """The smaller and the larger model to route between: those given, or of lowest and highest solved rate.

    None if there are no two models with labels.

    Raises:
        TrainingError: not two different models of the router.
    """
    if pair is None:
        known = [(column[~np.isnan(column)], model) for column, model in zip(data.labels.T, data.models, strict=True)]
        rates = [(float(column.mean()), model) for column, model in known if len(column)]
        if len(rates) < 2:
            return None
        low = min(rates, key=lambda each: each[0])
        return low[1], max((each for each in rates if each is not low), key=lambda each: each[0])[1]
    if len(pair) != 2 or pair[0] == pair[1]:
        raise TrainingError(f"pair: expected two models SMALL,LARGE, found {', '.join(pair) or 'none'}")
    for model in pair:
        if model not in data.models:
            raise TrainingError(
                f"pair: {model!r} is not among the router's models{near(model, data.models)} "
                f"(they are {', '.join(data.models)})"
            )
    return pair[0], pair[1]


def evaluate(data: LearningSet, probabilities: Floats, pair: Sequence[str] | None = None) -> dict[str, Any]:
    """Scores of ``probabilities`` (prompts, models) against the labels; NaN rows, which were not judged, are left out.

    Returns:
        ``models``: per model n, solved_rate, ap, ece, brier, base_brier (of the solved rate as a constant) and
        reliability, a list of (mean probability, solved rate, count) per bin; ``map`` and ``base_rate``, ``ece``
        and ``brier``, means over the models; and of the ``pair``: gap_auc, curve_area, only_large, only_small.
    """
    judged = ~np.isnan(probabilities).any(axis=1)
    labels, guessed = data.labels[judged], probabilities[judged]
    models: dict[str, dict[str, Any]] = {}
    for k, model in enumerate(data.models):
        known = ~np.isnan(labels[:, k])
        y, q = labels[known, k], guessed[known, k]
        rate = float(y.mean()) if len(y) else nan
        models[model] = {
            "n": len(y),
            "solved_rate": rate,
            "ap": average_precision(y, q),
            "ece": expected_calibration_error(y, q, BINS),
            "brier": brier_score(y, q),
            "base_brier": rate * (1 - rate),
            "reliability": _reliability(y, q),
        }
    scores: dict[str, Any] = {
        "n": int(judged.sum()),
        "models": models,
        "map": _mean(models, "ap"),
        "base_rate": _mean(models, "solved_rate"),
        "ece": _mean(models, "ece"),
        "brier": _mean(models, "brier"),
    }
    chosen = check_pair(data, pair)
    if chosen is not None:
        small, large = (data.models.index(model) for model in chosen)
        both = ~np.isnan(labels[:, [small, large]]).any(axis=1)
        y_small, y_large = labels[both, small], labels[both, large]
        q_small, q_large = guessed[both, small], guessed[both, large]
        curve = routing_curve(y_small, y_large, q_large - q_small)
        scores |= {
            "pair": list(chosen),
            "only_large": float(((y_large > 0.5) & (y_small < 0.5)).mean()) if both.any() else nan,
            "only_small": float(((y_large < 0.5) & (y_small > 0.5)).mean()) if both.any() else nan,
            "gap_auc": gap_auc(y_small, y_large, q_small, q_large),
            "curve_area": curve.area,
            "curve": [(share, *curve.at(share)) for share in np.linspace(0, 1, 21).round(2).tolist()],
        }
    return scores


def _mean(models: dict[str, dict[str, Any]], name: str) -> float:
    return float(np.mean([each[name] for each in models.values()]))


def _reliability(labels: Floats, probabilities: Floats) -> list[tuple[float, float, int]]:
    which = np.minimum((probabilities * BINS).astype(np.int64), BINS - 1)
    return [
        (float(probabilities[which == b].mean()), float(labels[which == b].mean()), int((which == b).sum()))
        for b in range(BINS)
        if (which == b).any()
    ]


def cross_validated(
    splits: Sequence[Split],
    models: Sequence[str],
    *,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> tuple[LearningSet, Floats]:
    """Every split's held-out workflows with their labels, and the probabilities of a router that has not seen them.

    Args:
        splits: whose test parts do not overlap.
        models: to learn.
        progress: told which split and what of it is being done.
        options: of `train_router`.
    """
    prompts: list[str] = []
    labels, probabilities = [], []
    for number, each in enumerate(splits):
        tell = None
        if progress is not None:
            head = f"{each.name} ({number + 1} of {len(splits)}): "

            def tell(text: str, head: str = head, to: Callable[[str], None] = progress) -> None:
                to(head + text)

        router = train_router(learning_set(each.train, models), progress=tell, **options)
        test = learning_set(each.test, models)
        prompts += test.prompts
        labels.append(test.labels)
        probabilities.append(router.predict_proba(test.prompts))
    return LearningSet(tuple(models), prompts, np.concatenate(labels)), np.concatenate(probabilities)


def cost_ms(router: Router, prompts: Sequence[str], calls: int = 200) -> dict[str, float]:
    """Wall-clock milliseconds a call, predicted alone and in batches of 32: p50 and p99 over about ``calls`` calls.

    ``per_call`` is the median a call in batches of 32, which is how a router runs off the critical path.
    """
    cost: dict[str, float] = {}
    for batch in (1, 32):
        texts = [prompts[i % len(prompts)] for i in range(calls + batch)]
        router.predict_proba(texts[:batch])
        taken = []
        for start in range(0, calls, batch):
            began = time.perf_counter()
            router.predict_proba(texts[start : start + batch])
            taken.append((time.perf_counter() - began) * 1e3 / batch)
        cost[f"batch_{batch}_p50"], cost[f"batch_{batch}_p99"] = (float(v) for v in np.percentile(taken, (50, 99)))
    return {"per_call": cost["batch_32_p50"], **cost}
