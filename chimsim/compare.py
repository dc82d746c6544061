"""What changes from A to B: every metric by paired differences over the seeds, every workflow by its own.

A seed draws the same workflows and arrivals for every policy, so that differences within a seed are much less noisy
than the two numbers. Nothing is simulated or printed here; `chimsim.compare_cells` says which cells are paired.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from chimsim.compare_cells import Axes, Matched, Pair, Row, Side, folder_side, match, policy_side
from chimsim.errors import ChimsimError, near
from chimsim.metrics import geometric_interval, mean_and_interval
from chimsim.results import Results

METRICS = (
    "mean_workflow_latency_s", "p50_workflow_latency_s", "p99_workflow_latency_s", "latency_per_token_ms",
    "mean_queue_time_s", "mean_ttft_ms", "mean_tpot_ms", "solved_rate", "workflow_throughput",
    "preemptions", "yields",
)  # fmt: skip
EQUAL_S = 0.001
"""A workflow whose latency changes by less (seconds) is as fast as before."""
_TIMES_AND_RATES = re.compile(r"(_s|_ms|slowdown|throughput|goodput)$")


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and its 95 % Student interval; one seed has none."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Change:
    """One metric in A and in B: means over the seeds that both have, their difference B - A, and the ratio B / A.

    Times and rates are judged by the ratio, whose mean is the geometric one, where all of them are positive; all else
    by the difference. ``verdict`` is lower, higher, noise (the interval has no effect in it), equal, or empty (one
    seed).
    """

    metric: str
    seeds: int
    a: float
    b: float
    difference: Interval
    ratio: Interval | None

    @property
    def verdict(self) -> str:
        if self.difference.low == self.difference.high == 0 or (self.seeds == 1 and self.a == self.b):
            return "equal"
        judged, nothing = (self.difference, 0.0) if self.ratio is None else (self.ratio, 1.0)
        if judged.low is None or judged.high is None:
            return ""
        return "lower" if judged.high < nothing else "higher" if judged.low > nothing else "noise"


@dataclass(frozen=True, slots=True)
class WorkflowChanges:
    """The same workflows in A and in B; shares are of ``completed``, those that ended in both, or of ``labelled``.

    ``same_load`` says whether all of them arrived at the same times and none has no partner.
    """

    workflows: int
    only_in_a: int
    only_in_b: int
    same_load: bool
    completed: int
    faster: int
    slower: int
    median_change_s: float | None
    p90_change_s: float | None
    labelled: int
    solved_by_a: int
    solved_by_b: int
    solved_by_both: int

    @property
    def equal(self) -> int:
        return self.completed - self.faster - self.slower


@dataclass(frozen=True, slots=True)
class Block:
    """All seeds of one trace, combination, rate and so on; ``not_steady`` counts runs whose backlog still grew."""

    axes: Axes
    seeds: tuple[int, ...]
    changes: tuple[Change, ...]
    workflows: WorkflowChanges
    not_steady: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sides, block by block; ``overall`` has the metrics over all blocks (see `over_blocks`)."""

    a: Side
    b: Side
    matched: Matched
    blocks: tuple[Block, ...]
    overall: tuple[Change, ...]
    workflows: WorkflowChanges

    @property
    def same_cells(self) -> bool:
        """Whether A and B are the same runs: cells of one hash have one content."""
        return all(pair.a.cell == pair.b.cell for pair in self.matched.pairs)

    @property
    def other_loads(self) -> int:
        """Blocks whose workflows or arrivals are not the same in A and B."""
        return sum(not block.workflows.same_load for block in self.blocks)


def compare_folders(a: Results, b: Results, metrics: Sequence[str] = ()) -> Comparison:
    """Two results folders, on every axis but those in which they differ as a whole."""
    sides = folder_side(a, str(a.path)), folder_side(b, str(b.path))
    return _compare(*sides, match(*sides, policies=False), metrics)


def compare_policies(results: Results, a: str, b: str, metrics: Sequence[str] = ()) -> Comparison:
    """Two policies of one folder, each ``label`` or ``label:axis=value,axis=value``."""
    folder = folder_side(results, str(results.path))
    sides = policy_side(folder, a), policy_side(folder, b)
    return _compare(*sides, match(*sides, policies=True), metrics)


def _compare(a: Side, b: Side, matched: Matched, metrics: Sequence[str]) -> Comparison:
    names = _metrics(a, b, metrics)
    groups: dict[tuple[Any, ...], list[Pair]] = {}
    for pair in matched.pairs:
        groups.setdefault(tuple(v for k, v in pair.axes.items() if k != "seed"), []).append(pair)
    blocks = []
    values: list[dict[str, dict[int, tuple[float, float]]]] = []
    joined = []
    for pairs in groups.values():
        by_seed = {int(str(pair.axes["seed"])): pair for pair in pairs}
        mine = {name: _values(by_seed, name) for name in names}
        frames = [joined_workflows(a.results.table(p.a.cell, "workflows"), b.results.table(p.b.cell, "workflows"))
                  for p in pairs]  # fmt: skip
        values.append(mine)
        joined.append(pd.concat(frames, ignore_index=True))
        blocks.append(
            Block(
                {k: v for k, v in pairs[0].axes.items() if k != "seed"},
                tuple(by_seed),
                tuple(change for name in names if (change := _change(name, mine[name])) is not None),
                workflow_changes(joined[-1]),
                (_not_steady(p.a for p in pairs), _not_steady(p.b for p in pairs)),
            )
        )
    overall = [over_blocks(name, [of[name] for of in values]) for name in names]
    return Comparison(
        a, b, matched, tuple(blocks), tuple(change for change in overall if change is not None),
        workflow_changes(pd.concat(joined, ignore_index=True)),
    )  # fmt: skip


def _metrics(a: Side, b: Side, wanted: Sequence[str]) -> list[str]:
    known = [name for name, value in a.rows[0].metrics.items()
             if name in b.rows[0].metrics and isinstance(value, int | float)]  # fmt: skip
    for name in wanted:
        if name not in known:
            hint = near(name, known) or "; docs/metrics.md has all"
            raise ChimsimError(f"metric {name!r} is not in both summaries{hint}")
    return list(dict.fromkeys(wanted)) or [name for name in METRICS if name in known]


def _not_steady(rows: Iterable[Row]) -> int:
    return sum(bool(row.metrics.get("not_steady")) for row in rows)


def _values(pairs: Mapping[int, Pair], name: str) -> dict[int, tuple[float, float]]:
    """The metric in A and in B by seed, where both have it."""
    both = {seed: (float(pair.a.metrics[name]), float(pair.b.metrics[name])) for seed, pair in pairs.items()}
    return {seed: (a, b) for seed, (a, b) in both.items() if a == a and b == b}


def _ratios(name: str, values: Mapping[int, tuple[float, float]]) -> bool:
    return bool(_TIMES_AND_RATES.search(name)) and all(a > 0 and b > 0 for a, b in values.values())


def _change(name: str, values: Mapping[int, tuple[float, float]]) -> Change | None:
    if not values:
        return None
    first, second = (np.array(side, dtype=np.float64) for side in zip(*values.values(), strict=True))
    ratios = _geometric(second / first) if _ratios(name, values) else None
    return Change(name, len(values), float(first.mean()), float(second.mean()), _arithmetic(second - first), ratios)


def over_blocks(name: str, blocks: Sequence[Mapping[int, tuple[float, float]]]) -> Change | None:
    """One metric over all blocks, which weigh the same.

    For each seed the mean over the blocks of log(B / A), or of B - A, then the interval over the seeds; so that what
    the blocks of a seed have in common (workflows, arrivals) does not count as many observations. Only seeds that every
    block has. ``a`` and ``b`` are means over blocks and seeds.
    """
    seeds = [seed for seed in blocks[0] if all(seed in of for of in blocks)]
    if not seeds:
        return None
    table = np.array([[of[seed] for of in blocks] for seed in seeds], dtype=np.float64)
    differences = (table[:, :, 1] - table[:, :, 0]).mean(axis=1)
    ratios = None
    if all(_ratios(name, of) for of in blocks):
        ratios = _geometric(np.exp(np.log(table[:, :, 1] / table[:, :, 0]).mean(axis=1)))
    a, b = table.mean(axis=(0, 1))
    return Change(name, len(seeds), float(a), float(b), _arithmetic(differences), ratios)


def _arithmetic(differences: npt.NDArray[np.float64]) -> Interval:
    mean, half = mean_and_interval(differences)
    return Interval(mean, mean - half, mean + half) if len(differences) > 1 else Interval(mean, None, None)


def _geometric(ratios: npt.NDArray[np.float64]) -> Interval:
    mean, low, high = geometric_interval(ratios)
    return Interval(mean, low, high) if len(ratios) > 1 else Interval(mean, None, None)


def joined_workflows(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """The measured workflows of two runs side by side, by ``workflow_id``; those of one run only have no other half."""
    columns = ["workflow_id", "arrived_at", "latency_s", "solved", "status"]
    texts = {"workflow_id": str, "status": str}
    mine, theirs = (table.loc[table["measured"].astype(bool), columns].astype(texts) for table in (a, b))
    return mine.merge(theirs, on="workflow_id", how="outer", suffixes=("_a", "_b"), validate="1:1")


def workflow_changes(joined: pd.DataFrame) -> WorkflowChanges:
    """Count what changed for the workflows of `joined_workflows`, of one run or of several."""
    in_a, in_b = joined["status_a"].notna(), joined["status_b"].notna()
    both = joined[in_a & in_b]
    done = both[(both["status_a"] == "completed") & (both["status_b"] == "completed")]
    change = (done["latency_s_b"] - done["latency_s_a"]).to_numpy(dtype=np.float64)
    labelled = both[both["solved_a"].notna() & both["solved_b"].notna()]
    by_a, by_b = labelled["solved_a"] > 0, labelled["solved_b"] > 0
    gaps = (both["arrived_at_b"] - both["arrived_at_a"]).abs()
    return WorkflowChanges(
        workflows=len(both),
        only_in_a=int((~in_b).sum()),
        only_in_b=int((~in_a).sum()),
        same_load=len(both) == len(joined) and bool((gaps < 1e-6).all()),
        completed=len(done),
        faster=int((change < -EQUAL_S).sum()),
        slower=int((change > EQUAL_S).sum()),
        median_change_s=float(np.quantile(change, 0.5)) if len(change) else None,
        p90_change_s=float(np.quantile(change, 0.9)) if len(change) else None,
        labelled=len(labelled),
        solved_by_a=int((by_a & ~by_b).sum()),
        solved_by_b=int((by_b & ~by_a).sum()),
        solved_by_both=int((by_a & by_b).sum()),
    )
