"""A live run held against its simulation: how far off each policy is, and whether the policies are ranked alike.

Every live cell names the simulated cell that it corresponds to: same arrivals, lengths, cluster, policy and profiles.
Where answers had lengths of their own (texts), those that were recorded are simulated.
Errors are simulated / live - 1. It runs simulations and compares; it prints and draws nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import kendalltau

from chimsim.errors import ChimsimError
from chimsim.feeds import trace_named
from chimsim.grid import Cell, plan
from chimsim.records import RunResult
from chimsim.results import Results, live_notes
from chimsim.served import as_served
from chimsim.spec import spec_from
from chimsim.sweeps import run_cell

METRICS = {
    "mean_workflow_latency_s": "mean latency s",
    "p50_workflow_latency_s": "p50 latency s",
    "p99_workflow_latency_s": "p99 latency s",
    "mean_queue_time_s": "queue time s",
    "mean_ttft_ms": "TTFT ms",
    "mean_tpot_ms": "TPOT ms",
    "workflow_throughput": "workflows / s",
    "output_throughput": "output tokens / s",
}
RANKED = "mean_workflow_latency_s"
TIE_SHARE = 0.02
"""Without repeats, live latencies closer than this share of the smaller one are not told apart."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a deployment may rest on, in percent: the error of any policy's mean latency, the share of decided pairs
    of policies that are ordered rightly, and what the simulator's pick costs beyond the best."""

    max_error_percent: float = 10.0
    min_agreement_percent: float = 100.0
    max_regret_percent: float = 5.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One policy's point: means over the repeats of the live run, their range, and the simulated values."""

    cell: Cell
    repeats: int
    live: Mapping[str, float]
    low: Mapping[str, float]
    high: Mapping[str, float]
    simulated: Mapping[str, float]
    workflows: tuple[pd.DataFrame, pd.DataFrame]
    """live (first repeat) and simulated"""

    def error_percent(self, metric: str) -> float:
        """Of the simulated value; NaN where one is missing or the live one is 0."""
        live = self.live[metric]
        return 100.0 * (self.simulated[metric] / live - 1.0) if live else nan

    def scatter_percent(self, metric: str = RANKED) -> float:
        """Range of the live repeats over their mean; NaN for a single one."""
        if self.repeats < 2 or not self.live[metric]:
            return nan
        return 100.0 * (self.high[metric] - self.low[metric]) / self.live[metric]


@dataclass(frozen=True, slots=True)
class Block:
    """Policies under the same trace, rate and seed, which is where a ranking means something."""

    title: str
    entries: tuple[Entry, ...]
    kendall: float
    """tau between the live and the simulated order of mean latency; NaN for one policy"""
    pairs: int
    undecided: int
    agreeing: int
    regret_percent: float
    pick: str
    best: str

    @property
    def agreement_percent(self) -> float:
        """Of the decided pairs; NaN where none is."""
        decided = self.pairs - self.undecided
        return 100.0 * self.agreeing / decided if decided else nan


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the simulator may be relied on, with the reasons where not."""

    passed: bool
    reasons: tuple[str, ...]


def validate_live(folder: Path) -> list[Block]:
    """Simulate what a live folder holds and compare. Raises `ChimsimError` for a folder that is not one."""
    results = Results(folder)
    if not results.manifest.get("live"):
        raise ChimsimError(f"{folder} holds simulations; expected the folder of a chimsim live run")
    if not results.cells:
        raise ChimsimError(f"{folder} has no finished cell yet")
    spec = spec_from({}, results.manifest["spec"], source=f"{folder}/manifest.json")
    planned = {cell.name: cell for cell in plan(spec)[0]}
    live: dict[str, list[str]] = {}
    for name in results.cells:
        config = results.config(name)["live"]
        if config["simulated"] not in planned:
            raise ChimsimError(
                f"{folder}: its trace, cluster file, profiles, policies or chimsim have changed since the live run, so "
                "that the same run cannot be simulated; expected them as they were"
            )
        live.setdefault(config["simulated"], []).append(name)
    hops_s = _hops_s(folder)
    entries = [_entry(planned[name], names, results, hops_s) for name, names in live.items()]
    blocks: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        axes = entry.cell.axes
        blocks.setdefault((axes["trace"], axes["rps"], axes["seed"]), []).append(entry)
    return [_block(key, found) for key, found in blocks.items()]


def _entry(cell: Cell, names: Sequence[str], results: Results, hops_s: Mapping[str, float]) -> Entry:
    hop_s = float(np.mean([hops_s.get(name, 0.0) for name in names]))
    if results.config(names[0])["live"]["workload"] == "lengths":
        result, summary = run_cell(cell, hop_s=hop_s)
        simulated = [summary]
    else:
        # Answers had lengths of their own, in every repeat others.
        made = [_as_served(cell, name, results, hop_s) for name in names]
        result, simulated = made[0][0], [summary for _, summary in made]
    summaries = [results.cell_summary(name) for name in names]
    values = {metric: np.array([_number(found[metric]) for found in summaries]) for metric in METRICS}
    return Entry(
        cell,
        len(names),
        {metric: float(found.mean()) for metric, found in values.items()},
        {metric: float(found.min()) for metric, found in values.items()},
        {metric: float(found.max()) for metric, found in values.items()},
        {metric: float(np.mean([_number(found[metric]) for found in simulated])) for metric in METRICS},
        (results.table(names[0], "workflows"), result.workflows),
    )


def _hops_s(folder: Path) -> dict[str, float]:
    """The round trip between client and engines that was measured before each cell; a run without knows of none."""
    return {name: float(noted.get("round_trip_s", 0.0)) for name, noted in live_notes(folder).items()}


def _as_served(cell: Cell, name: str, results: Results, hop_s: float) -> tuple[RunResult, dict[str, Any]]:
    """The cell, with the lengths that the engines served; what was foretold of them stays."""
    trace = as_served(trace_named(cell.trace), results.table(name, "requests"), results.table(name, "workflows"))
    recorded = replace(cell, rps=None, arrivals="recorded", workflows=None, oversize="clip")
    return run_cell(recorded, hop_s=hop_s, trace=trace)


def _number(value: Any) -> float:
    return nan if value is None else float(value)


def label(entry: Entry) -> str:
    """The policy with the knobs that tell it from others."""
    axes = entry.cell.axes
    tau = axes.get("tau")
    return str(axes["policy"]) if tau is None else f"{axes['policy']} (tau {tau:g})"


def _block(key: tuple[Any, ...], entries: list[Entry]) -> Block:
    trace, rps, seed = key
    live = [entry.live[RANKED] for entry in entries]
    simulated = [entry.simulated[RANKED] for entry in entries]
    undecided = agreeing = pairs = 0
    for a, b in itertools.combinations(entries, 2):
        pairs += 1
        if _undecided(a, b):
            undecided += 1
        elif (a.live[RANKED] < b.live[RANKED]) == (a.simulated[RANKED] < b.simulated[RANKED]):
            agreeing += 1
    pick, best = entries[int(np.argmin(simulated))], entries[int(np.argmin(live))]
    regret = 0.0 if pick is best or _undecided(pick, best) else 100.0 * (pick.live[RANKED] / best.live[RANKED] - 1.0)
    tau = float(kendalltau(live, simulated).statistic) if len(entries) > 1 else nan
    rate = "" if rps is None else f", {rps:g} rps"
    title = f"{trace}{rate}, seed {seed}"
    return Block(title, tuple(entries), tau, pairs, undecided, agreeing, regret, label(pick), label(best))


def _undecided(a: Entry, b: Entry) -> bool:
    """Whether the live side itself cannot tell the two apart: repeats overlap, or, without, they are too close."""
    if a.repeats > 1 and b.repeats > 1:
        return a.low[RANKED] <= b.high[RANKED] and b.low[RANKED] <= a.high[RANKED]
    small, large = sorted((a.live[RANKED], b.live[RANKED]))
    return large <= small * (1.0 + TIE_SHARE)


def verdict(blocks: Sequence[Block], limits: Limits) -> Verdict:
    """Pass or fail against the limits; undecided pairs fail nothing."""
    reasons = []
    for block in blocks:
        for entry in block.entries:
            error = entry.error_percent(RANKED)
            if not abs(error) <= limits.max_error_percent:
                reasons.append(
                    f"{block.title}: mean latency of {label(entry)} is {error:+.1f} % off, more than "
                    f"{limits.max_error_percent:g} %"
                )
        if block.agreement_percent < limits.min_agreement_percent:
            reasons.append(
                f"{block.title}: {block.agreeing} of {block.pairs - block.undecided} decided pairs of policies are "
                f"ordered rightly, fewer than {limits.min_agreement_percent:g} %"
            )
        if block.regret_percent > limits.max_regret_percent:
            reasons.append(
                f"{block.title}: the simulator would deploy {block.pick}, which is {block.regret_percent:.1f} % slower "
                f"than {block.best}, more than {limits.max_regret_percent:g} %"
            )
    return Verdict(not reasons, tuple(reasons))


def to_dict(blocks: Sequence[Block], judged: Verdict, limits: Limits) -> dict[str, Any]:
    """Ready for JSON."""
    return {
        "passed": judged.passed,
        "reasons": list(judged.reasons),
        "limits": {name: getattr(limits, name) for name in Limits.__dataclass_fields__},
        "blocks": [
            {
                "title": block.title,
                "kendall_tau": _plain(block.kendall),
                "pairs": block.pairs,
                "undecided": block.undecided,
                "agreeing": block.agreeing,
                "regret_percent": block.regret_percent,
                "simulators_pick": block.pick,
                "live_best": block.best,
                "policies": [
                    {
                        "policy": label(entry),
                        "repeats": entry.repeats,
                        "scatter_percent": _plain(entry.scatter_percent()),
                        "metrics": {
                            metric: {
                                "live": _plain(entry.live[metric]),
                                "simulated": _plain(entry.simulated[metric]),
                                "error_percent": _plain(entry.error_percent(metric)),
                            }
                            for metric in METRICS
                        },
                    }
                    for entry in block.entries
                ],
            }
            for block in blocks
        ],
    }


def _plain(value: float) -> float | None:
    return value if np.isfinite(value) else None
