"""Service level objectives: which summary of a run is good enough, from words like ``p99_latency:60s``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chimsim.errors import ChimsimError, near

_METRICS = {
    "latency": ("workflow_latency_s", 1.0),
    "queue": ("queue_time_s", 1.0),
    "ttft": ("ttft_ms", 1000.0),
    "tpot": ("tpot_ms", 1000.0),
    "itl": ("itl_ms", 1000.0),
    "e2el": ("e2el_ms", 1000.0),
}
"""Names for people: the key of a summary, and its units in a second."""
MIN_SOLVED = "min-solved"
"""What a run misses that solves too little, whatever its load."""
_STATISTICS = ("mean", "p50", "p90", "p99")
_KNOWN = [f"{statistic}_{metric}" for metric in _METRICS for statistic in _STATISTICS]


@dataclass(frozen=True, slots=True)
class Slo:
    """A run is good if its summary has at most ``limit`` under ``key``; ``text`` is how it was asked for."""

    text: str
    key: str
    limit: float
    limit_s: float


@dataclass(frozen=True, slots=True)
class Goal:
    """What a run must keep: every SLO, the least share of workflows solved, a steady backlog, nobody rejected."""

    slos: tuple[Slo, ...]
    min_solved: float | None = None

    def misses(self, summary: Mapping[str, Any]) -> list[str]:
        """What the run does not keep, in a few words each; empty for a good run."""
        found = []
        for slo in self.slos:
            value = summary[slo.key]
            if value is None or value > slo.limit:
                found.append(slo.text)
        if self.min_solved is not None:
            solved = summary["solved_rate"]
            if solved is None:
                raise ChimsimError("--min-solved: the trace has no labels (solved is null), so that nothing is solved")
            if solved < self.min_solved:
                found.append(MIN_SOLVED)
        if summary["rejected_workflows"]:
            found.append("rejected")
        # What is kept only because the trace ends before the backlog is too long would not be kept for good.
        if summary["not_steady"]:
            found.append("not steady")
        return found

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"slo": {slo.key: slo.limit for slo in self.slos}, "min_solved": self.min_solved}


def parse_slo(text: str) -> Slo:
    """From ``p99_latency:60s``, ``mean_ttft:500ms``; latencies are of whole workflows, the others of calls.

    Raises `ChimsimError`.
    """
    name, sign, limit = text.strip().partition(":")
    if not sign:
        raise ChimsimError(f"--slo: {text!r}; expected METRIC:LIMIT, such as p99_latency:60s")
    if name not in _KNOWN:
        raise ChimsimError(
            f"--slo: {name!r} is unknown{near(name, _KNOWN)} (known: {', '.join(_STATISTICS)} of {', '.join(_METRICS)})"
        )
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(ms|s)\s*", limit)
    if match is None or not float(match[1]):
        raise ChimsimError(f"--slo: {text!r}: the limit is {limit!r}; expected a time above 0 such as 60s or 500ms")
    seconds = float(match[1]) * (0.001 if match[2] == "ms" else 1.0)
    statistic, metric = name.split("_")
    key, scale = _METRICS[metric]
    if key.endswith("_ms") and statistic == "p50":
        statistic = "median"
    return Slo(text.strip(), f"{statistic}_{key}", seconds * scale, seconds)
