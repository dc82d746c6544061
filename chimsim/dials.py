"""Error dials: truth made as wrong as asked for, by noise that depends on nothing but a seed and a name.

Numbers in, numbers out; it knows neither traces nor predictors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from math import log, pi, tan

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import expit, ndtri

from calibration.scores import average_precision, kendall_distance
from chimsim.errors import ChimsimError

Floats = npt.NDArray[np.float64]


def noise(seed: int, purpose: str, names: Iterable[str]) -> Floats:
    """One standard normal number a name, fixed by (seed, purpose, name) and by nothing else.

    So a workflow has the same noise in every trace, order and subset it appears in.
    """
    head = hashlib.blake2b(f"{seed}\0{purpose}\0".encode(), digest_size=8)
    digests = []
    for name in names:
        one = head.copy()
        one.update(name.encode())
        digests.append(one.digest())
    bits = np.frombuffer(b"".join(digests), "<u8")
    uniform = ((bits >> np.uint64(11)) + 0.5) * 2.0**-53
    return np.asarray(ndtri(uniform), np.float64)


_SOLVED_ON = 20_000
"""Calls on which the size of the noise is solved: a fixed sample of a longer trace, off by 0.003 at most."""

_STEEPEST = 0.4925
"""Beyond this distance (of lognormal lengths under noise of 42 times their spread) the order is random."""


def noisy_lengths(true: Floats, z: Floats, distance: float) -> Floats:
    """``true * exp(sigma * z)``, with sigma such that `kendall_distance` between the two is ``distance``.

    Args:
        true: output tokens of all calls of one model; 0 counts as half a token.
        z: standard normal noise, one a call.
        distance: 0 (the truth) to 0.5. At 0.5, and where no finite sigma reaches it, the order is that of z
            alone, with the mean and spread of the true logarithms.

    Returns:
        Predicted tokens, positive and finite.
    """
    if not distance:
        return true
    logs = np.log(np.maximum(true, 0.5))
    spread = float(logs.std())
    if spread < 1e-9:
        # Equal lengths have no order to get wrong.
        return np.exp(logs)
    part = np.arange(len(true))
    if len(true) > _SOLVED_ON:
        part = np.random.default_rng(0).choice(len(true), _SOLVED_ON, replace=False)
    some, some_z = logs[part], z[part]

    def excess(x: float) -> float:
        return kendall_distance(some, some + spread * tan(pi * x) * some_z) - distance

    # For lognormal lengths the distance is arctan(sigma / spread) / pi: in x it is nearly a straight line.
    if distance == 0.5 or excess(_STEEPEST) < 0:
        return np.exp(float(logs.mean()) + spread * z)
    x = float(brentq(excess, 0.0, _STEEPEST, xtol=1e-5))
    # Finite whatever the noise; lengths beyond are of no use to anyone.
    return np.exp(np.clip(logs + spread * tan(pi * x) * z, -600.0, 600.0))


def noisy_confidence(labels: Floats, z: Floats, target: float) -> Floats:
    """Calibrated confidence whose average precision is ``target``.

    A score s = label + sigma * z is seen, and the confidence is the posterior P(solved | s), given sigma and
    the base rate of the labels: the logit of the base rate plus (2s - 1) / (2 sigma^2), the log likelihood
    ratio of two normal distributions around 1 and 0. It rises with s, so sigma alone sets the precision.

    Args:
        labels: 1 (solved) or 0, of all labelled workflows of a trace for one model, whatever their workload.
        z: standard normal noise, one a workflow.
        target: average precision to reach, between the base rate and 1.

    Raises:
        ChimsimError: below the base rate, or no workflow is solved.
    """
    base = float(labels.mean())
    if not base:
        raise ChimsimError("router map: no labelled workflow is solved, so there is no average precision")
    if target < base:
        raise ChimsimError(
            f"router map {target} is below the base rate {base:.3f}, the average precision of a router that "
            "knows nothing"
        )
    if base == 1:
        return np.ones(len(labels))

    def excess(log_sigma: float) -> float:
        return average_precision(labels, labels + np.exp(log_sigma) * z) - target

    low, high = log(0.02), log(1000.0)
    # Where chance puts even the weakest or strongest signal on the other side, it is the nearest there is.
    if excess(low) <= 0:
        log_sigma = low
    elif excess(high) >= 0:
        log_sigma = high
    else:
        log_sigma = float(brentq(excess, low, high, xtol=1e-4))
    sigma = float(np.exp(log_sigma))
    scores = labels + sigma * z
    return np.asarray(expit(log(base / (1 - base)) + (2 * scores - 1) / (2 * sigma**2)), np.float64)
