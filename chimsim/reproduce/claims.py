"""The words of a claim: ``stjf.mean_queue_time_s < sjf.mean_queue_time_s``, parsed. Nothing is judged here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from chimsim.errors import ChimsimError
from chimsim.spec import Scalar, parse_scalar

LATENCY = "mean_workflow_latency_s"
"""What `dominates` compares where a relation names no other metric."""


@dataclass(frozen=True, slots=True)
class Side:
    """The rows of one label (``*``: each by itself), kept to those with these values."""

    label: str
    where: Mapping[str, Scalar]


@dataclass(frozen=True, slots=True)
class Claim:
    """``left.metric < right.metric``, ``left dominates right`` or ``left.metric rises with axis``, as in ``text``."""

    text: str
    kind: Literal["<", ">", "dominates", "rises", "falls"]
    left: Side
    metric: str = LATENCY
    right: Side | None = None
    right_metric: str = ""
    number: float | None = None
    axis: str = ""


_SIDE = r"[^\s<>\[\]]+(?:\[[^\]]*\])?"
_DOMINATES = re.compile(rf"^(?P<left>{_SIDE})\s+dominates\s+(?P<right>{_SIDE})$")
_TREND = re.compile(r"^(?P<left>.+)\s+(?P<kind>rises|falls)\s+with\s+(?P<axis>\w+)$")
_COMPARE = re.compile(r"^(?P<left>[^<>]+?)\s*(?P<kind>[<>])\s*(?P<right>[^<>]+)$")
_TERM = re.compile(rf"^(?P<side>{_SIDE}|\*)\.(?P<metric>\w+(?:\[[^\]]*\])?)$")


def parse_claim(text: str, where: str) -> Claim:
    """The claim that a text makes; ``where`` names its place in messages. Raises `ChimsimError`."""
    words = " ".join(text.split())
    if found := _DOMINATES.match(words):
        return Claim(words, "dominates", _side(found["left"], where), right=_side(found["right"], where))
    if found := _TREND.match(words):
        side, metric = _term(found["left"], words, where)
        return Claim(words, "rises" if found["kind"] == "rises" else "falls", side, metric, axis=found["axis"])
    if found := _COMPARE.match(words):
        side, metric = _term(found["left"], words, where)
        kind: Literal["<", ">"] = "<" if found["kind"] == "<" else ">"
        try:
            return Claim(words, kind, side, metric, number=float(found["right"]))
        except ValueError:
            right, right_metric = _term(found["right"], words, where)
            return Claim(words, kind, side, metric, right, right_metric)
    raise ChimsimError(
        f"{where}: {text!r} is no claim; expected 'stjf.mean_queue_time_s < sjf.mean_queue_time_s', "
        "'chimera dominates fcfs' or 'chimera.solved_rate rises with tau'"
    )


def _term(text: str, claim: str, where: str) -> tuple[Side, str]:
    found = _TERM.match(text.strip())
    if found is None:
        raise ChimsimError(f"{where}: {text!r} in {claim!r} is not of the form policy.metric")
    return _side(found["side"], where), found["metric"]


def _side(text: str, where: str) -> Side:
    label, _, rest = text.partition("[")
    values: dict[str, Scalar] = {}
    for pair in rest.rstrip("]").split(",") if rest else []:
        name, sign, value = pair.partition("=")
        if not sign or not name.strip():
            raise ChimsimError(f"{where}: {pair!r} in {text!r} is not of the form axis=value")
        values[name.strip()] = parse_scalar(value)
    return Side(label, values)
