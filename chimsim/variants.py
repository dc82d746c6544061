"""A cell with something changed: another rate, other engines, knobs, slots or seed. Its name follows its content.

For commands that look for a cell instead of running a grid; what they vary is the user's choice no more, so the
checks of `chimsim.grid` have been passed by the cell that they start from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from chimsim.config import numbered
from chimsim.grid import Cell, make_policy
from chimsim.results import digest
from chimsim.spec import Scalar

LEAST_WORKFLOWS = 300
"""Of a run, where nobody says: a p99 is made of three of them."""


def _changed(cell: Cell, config: Mapping[str, object], **fields: object) -> Cell:
    whole = {**cell.config, **config}
    return replace(cell, config=whole, name=digest(whole)[:32], **fields)  # type: ignore[arg-type]


def at_rate(cell: Cell, rps: float, span_s: float) -> Cell:
    """At another rate, with workflows for so many seconds of arrivals."""
    workflows = max(cell.workflows or LEAST_WORKFLOWS, ceil(rps * span_s))
    return _changed(cell, {"rps": rps, "workflows": workflows}, rps=rps, workflows=workflows)


def with_engines(cell: Cell, counts: Mapping[str, int]) -> Cell:
    """With so many engines of each model, each like the model's first."""
    first = {spec.model: spec for spec in reversed(cell.cluster.engines)}
    specs = [replace(first[m], name=name) for m, count in counts.items() for name in numbered(m, count)]
    cluster = replace(cell.cluster, engines=tuple(specs))
    return _changed(cell, {"cluster": cluster.to_dict()}, cluster=cluster)


def with_slots(cell: Cell, slots: int) -> Cell:
    """With so many slots of every engine, as far as its ``max_num_seqs`` goes."""
    engines = tuple(
        replace(spec, max_batch_size=min(slots, spec.max_num_seqs)) for spec in cell.cluster.engines
    )  # fmt: skip
    cluster = replace(cell.cluster, engines=engines)
    return _changed(cell, {"cluster": cluster.to_dict()}, cluster=cluster)


def with_knobs(cell: Cell, knobs: Mapping[str, Scalar]) -> Cell:
    """With these knobs of its policy besides those that it has. Raises `policies.PolicyError`."""
    merged = {**cell.knobs, **knobs}
    policy = make_policy(cell.policy, merged, cell.seed)
    feed = cell.feed.asked_by(policy)
    return _changed(cell, {"policy": repr(policy), "predictor": feed.to_dict()}, knobs=merged, feed=feed)


def with_seed(cell: Cell, seed: int) -> Cell:
    """With another seed."""
    policy = make_policy(cell.policy, cell.knobs, seed)
    axes = {**cell.axes, "seed": seed}
    return _changed(cell, {"policy": repr(policy), "seed": seed}, seed=seed, axes=axes)
