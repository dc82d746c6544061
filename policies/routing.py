"""Placement: which engine a call goes to, for policies that only say in which order an engine serves.

Whatever is remembered of a workflow is dropped when it ends. Unhealthy engines are never chosen, and nothing
here looks at predictions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import nan
from random import Random
from typing import Protocol

from policies.interface import ClusterView, EngineView, Policy, PolicyError, RequestView
from policies.knobs import near, policy_name, require, settle


def healthy(policy: Policy, cluster: ClusterView) -> ClusterView:
    """The engines that may be chosen, in order of their names.

    Raises:
        PolicyError: there is none.
    """
    usable = tuple(engine for engine in cluster if engine.healthy)
    if not usable:
        raise no_engine(policy, cluster)
    return usable


def no_engine(policy: Policy, cluster: ClusterView) -> PolicyError:
    """The error for a cluster without a usable engine."""
    if not cluster:
        return PolicyError(f"policy {policy_name(policy)}: the cluster has no engines")
    names = ", ".join(engine.name for engine in cluster)
    return PolicyError(f"policy {policy_name(policy)}: no engine of the cluster is healthy ({names})")


def least_loaded(engines: ClusterView) -> EngineView:
    """The engine with the fewest calls in flight, running and waiting; ties by name."""
    return min(engines, key=lambda engine: (engine.running + engine.waiting, engine.name))


class Chooser(Protocol):
    """Picks one of at least one healthy engines; sees no workflow, and keeps little memory."""

    def __call__(self, engines: ClusterView) -> EngineView: ...


@dataclass
class RoundRobin:
    """The engine whose name comes next after the last one chosen, over engines (not models) in name order."""

    last: str = ""

    def __call__(self, engines: ClusterView) -> EngineView:
        chosen = next((engine for engine in engines if engine.name > self.last), engines[0])
        self.last = chosen.name
        return chosen


@dataclass
class LeastLoaded:
    """`least_loaded` as a chooser."""

    def __call__(self, engines: ClusterView) -> EngineView:
        return least_loaded(engines)


@dataclass
class Uniform:
    """Any engine with equal chance."""

    rng: Random

    def __call__(self, engines: ClusterView) -> EngineView:
        return engines[self.rng.randrange(len(engines))]


@dataclass
class Split:
    """The slowest model with chance ``share``, else one of the others; of the engines the least loaded."""

    share: float
    rng: Random

    def __call__(self, engines: ClusterView) -> EngineView:
        slowest = max(engines, key=lambda engine: (engine.decode_s_per_token, engine.model)).model
        to_slowest = self.rng.random() < self.share
        wanted = tuple(engine for engine in engines if (engine.model == slowest) == to_slowest)
        return least_loaded(wanted or engines)


class Placement(Protocol):
    """Where a call goes, and what is to be forgotten when its workflow ends."""

    def place(self, request: RequestView, engines: ClusterView) -> EngineView: ...

    def forget(self, workflow_id: str) -> None: ...


@dataclass
class PerCall:
    """Every call is placed by itself."""

    choose: Chooser

    def place(self, request: RequestView, engines: ClusterView) -> EngineView:
        return self.choose(engines)

    def forget(self, workflow_id: str) -> None:
        return None


@dataclass
class Sticky:
    """A workflow stays on its engine; if that is ill, on another of its model; else it is placed anew."""

    choose: Chooser
    assigned: dict[str, tuple[str, str]] = field(default_factory=dict)

    def place(self, request: RequestView, engines: ClusterView) -> EngineView:
        before = self.assigned.get(request.workflow_id)
        if before is not None:
            name, model = before
            for engine in engines:
                if engine.name == name:
                    return engine
            same = tuple(engine for engine in engines if engine.model == model)
            chosen = least_loaded(same) if same else self.choose(engines)
        else:
            chosen = self.choose(engines)
        self.assigned[request.workflow_id] = (chosen.name, chosen.model)
        return chosen

    def forget(self, workflow_id: str) -> None:
        self.assigned.pop(workflow_id, None)


@dataclass
class Single:
    """Only the engines of one model, or one engine, by name; among several, round-robin per workflow."""

    name: str
    inner: Placement

    def place(self, request: RequestView, engines: ClusterView) -> EngineView:
        mine = tuple(engine for engine in engines if self.name in (engine.name, engine.model))
        if not mine:
            known = sorted({engine.name for engine in engines} | {engine.model for engine in engines})
            raise PolicyError(
                f"placement 'single:{self.name}' names no healthy engine or model of the cluster"
                f"{near(self.name, known)} (known: {', '.join(known)})"
            )
        return self.inner.place(request, mine)

    def forget(self, workflow_id: str) -> None:
        self.inner.forget(workflow_id)


PLACEMENTS = (
    "round-robin",
    "least-loaded",
    "random",
    "round-robin-call",
    "least-loaded-call",
    "random-call",
)
"""The placements by name, besides ``single:NAME``: per workflow, then sticky, or with ``-call`` per call."""


def make_placement(name: str, seed: int) -> Placement:
    """The placement of that name, fresh.

    Raises:
        PolicyError: no such placement.
    """
    if name.startswith("single:") and name != "single:":
        return Single(name.removeprefix("single:"), Sticky(RoundRobin()))
    if name.startswith("split:"):
        return Sticky(Split(_share(name), Random(seed)))
    if name not in PLACEMENTS:
        known = (*PLACEMENTS, "single:NAME", "split:SHARE")
        raise PolicyError(f"placement {name!r} is unknown{near(name, known)} (known: {', '.join(known)})")
    choosers: dict[str, Chooser] = {
        "round-robin": RoundRobin(),
        "least-loaded": LeastLoaded(),
        "random": Uniform(Random(seed)),
    }
    choose = choosers[name.removesuffix("-call")]
    return PerCall(choose) if name.endswith("-call") else Sticky(choose)


def _share(name: str) -> float:
    """The share in ``split:0.3``."""
    try:
        share = float(name.removeprefix("split:"))
    except ValueError:
        share = nan
    if not 0 <= share <= 1:
        raise PolicyError(f"placement {name!r} needs a share of the workflows from 0 to 1, such as split:0.3")
    return share


@dataclass
class PlacedPolicy(Policy):
    """What all baselines share: the placement and its memory. They add the order."""

    placement: str = "round-robin"
    """where a call goes: round-robin, least-loaded or random (per workflow, then sticky; with -call per
    call), single:NAME of a model or engine, or split:0.3 to send that share of the workflows, drawn by chance, to the
    slowest model, the rest to the others"""
    seed: int = 0
    """of the placements random and split"""
    _placement: Placement = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        settle(self)
        require(self, "seed", self.seed >= 0, "0 or more")
        try:
            self._placement = make_placement(self.placement, self.seed)
        except PolicyError as error:
            raise PolicyError(f"policy {policy_name(self)}: {error}") from None

    def place(self, request: RequestView, cluster: ClusterView) -> EngineView:
        """The engine for this call.

        Raises:
            PolicyError: the cluster has no healthy engine, or none that the placement may use.
        """
        return self._placement.place(request, healthy(self, cluster))

    def on_complete(
        self,
        now: float,
        request: RequestView,
        output_tokens: int,
        service_s: float,
        reason: str,
        *,
        last: bool,
    ) -> None:
        if last:
            self._placement.forget(request.workflow_id)

    def on_forget(self, now: float, workflow_id: str) -> None:
        self._placement.forget(workflow_id)
