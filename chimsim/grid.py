"""A spec made into cells: every combination that can differ in its result, once, each with a content hash.

Everything that can be wrong with the input is found here, before anything runs. Nothing is simulated here.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import chimsim
from chimsim.config import Cluster, engines_by_combo
from chimsim.errors import ChimsimError, near
from chimsim.failures import check_names, on_engines, parse_outage, parse_slowdown
from chimsim.feeds import (
    HELD_OUT,
    PART,
    QRF,
    Feed,
    auto_router,
    check_arrivals,
    check_feed,
    check_trace,
    feed_for,
    in_engine,
    label_leak,
    make_cluster,
    name_of,
    trace_named,
    training_overlap,
)
from chimsim.results import FORMAT, digest
from chimsim.spec import POLICY_AXES, ROUTERS, SHUFFLED, TRACE, Axis, PolicyEntry, Scalar, Spec, scalar_text
from policies import Policy, load_policy, policy_class
from policies import knobs as knobs_of
from traces import Trace

MAX_CELLS = 50_000
"""Of a grid: more are taken for a slip, and would be planned for minutes."""
LENGTH_FIELDS = frozenset({"stage_tokens", "remaining_tokens", "rank"})


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. ``axes`` are its columns in the summary, ``config`` is all that decides its result."""

    name: str
    axes: Mapping[str, Scalar]
    config: Mapping[str, Any]
    trace: str
    trace_digest: str
    cluster: Cluster
    policy: str
    knobs: Mapping[str, Scalar]
    feed: Feed
    rps: float | None
    burstiness: float
    arrivals: str
    workflows: int | None
    warmup: int
    seed: int
    queue: str
    look_ahead: int
    oversize: str
    goodput: Mapping[str, float]
    fail: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The cell in a few words, for messages and progress."""
        plain = {("length_predictor", "oracle"), ("rank_predictor", "oracle")}
        shown = {k: v for k, v in self.axes.items() if v is not None and k not in _QUIET and (k, v) not in plain}
        named = [f"{v}" if k in ("trace", "combo", "policy") else f"{k} {scalar_text(v)}" for k, v in shown.items()]
        return ", ".join(named)


_SPELLS = {"fail": parse_outage, "slow": parse_slowdown}
_QUIET = ("burstiness", "queue", "look_ahead", "router_s", "predictor_s", "workload")


def cells(spec: Spec) -> list[Cell]:
    """All cells of the grid in the order of the spec's lists, each distinct result once."""
    return plan(spec)[0]


def plan(spec: Spec) -> tuple[list[Cell], dict[str, Any]]:
    """The cells and the manifest that describes them. Raises one of the packages' errors for bad input."""
    # a file may have changed since an earlier sweep of this process
    trace_named.cache_clear()
    policies = {entry.label: policy_class(entry.policy) for entry in spec.policy}
    _check_knobs(spec, policies)
    specs = {}
    for name in spec.trace:
        own = _of_trace(spec, trace_named(name).name)
        if spec.split == "test":
            if not _folders(own):
                raise ChimsimError("split test: no saved model is used; give --router or --length-predictor a folder")
            name = HELD_OUT.join([name, *_folders(own)])
        specs[name if spec.part is None else f"{name}{PART}{spec.part}"] = own
    traces = {name: trace_named(name) for name in specs}
    counts = engines_by_combo(spec.combo, spec.engines) if spec.combo else {}
    clusters = [
        (label, slots, make_cluster(label, is_file, slots, counts.get(label, spec.engines), spec.max_num_seqs))
        for label, is_file in [*((c, False) for c in spec.combo), *((c, True) for c in spec.cluster)]
        for slots in spec.slots
    ]
    for name, parse in _SPELLS.items():
        for texts in [getattr(spec, name), *(entry.overrides.get(name, ()) for entry in spec.policy)]:
            check_names([parse(text, name) for text in texts], [cluster for _, _, cluster in clusters], name)
    for trace in traces.values():
        check_arrivals(_arrival_kind(spec), trace, spec)
        for _, _, cluster in clusters:
            check_trace(trace, cluster, spec)
    size = len(specs) * len(clusters) * _size(spec, policies)
    if size > MAX_CELLS:
        raise ChimsimError(f"the lists multiply to {size:,} cells; expected at most {MAX_CELLS:,}: give fewer values")
    found = [
        cell
        for name, own in specs.items()
        for label, slots, cluster in clusters
        for cell in _cells_of(own, name, traces[name], label, slots, cluster, policies)
    ]
    seen: dict[tuple[Feed, str, tuple[str, ...]], int] = {}
    for cell in found:
        seen.setdefault((cell.feed, cell.trace, cell.cluster.models), cell.seed)
    for (feed, name, models), seed in seen.items():
        check_feed(feed, name, models, seed)
    unique = list({(cell.name, cell.axes["policy"]): cell for cell in found}.values())
    return unique, _manifest(spec, unique, traces, [cluster for _, _, cluster in clusters])


def warnings_of(cells: Iterable[Cell]) -> list[str]:
    """What is allowed but seldom meant, once each."""
    cells = list(cells)
    found = [warning for cell in cells for warning in cell.cluster.warnings]
    found += [text for feed, name in {(c.feed, c.trace): None for c in cells} if (text := training_overlap(feed, name))]
    found += [text for cell in cells if (text := label_leak(cell.policy, cell.feed))]
    return list(dict.fromkeys(found))


def _cells_of(
    spec: Spec,
    name: str,
    trace: Trace,
    label: str,
    slots: int | None,
    cluster: Cluster,
    policies: Mapping[str, type[Policy]],
) -> Iterator[Cell]:
    auto = auto_router(trace, cluster.models)
    for rps, burstiness in itertools.product(spec.rps or (None,), spec.burstiness):
        poisson = _arrival_kind(spec) == "poisson"
        for entry in spec.policy:
            cls = policies[entry.label]
            for knobs in _products(_knob_axes(spec, entry, cls)):
                for axes in _products(_reading_axes(spec, entry, cls)):
                    for seed in spec.seeds:
                        feed = feed_for(axes, auto)
                        yield _cell(
                            spec, name, trace, label, slots, cluster, entry, knobs, axes, feed, rps,
                            burstiness if poisson else 1.0, seed,
                        )  # fmt: skip


def _cell(
    spec: Spec,
    name: str,
    trace: Trace,
    label: str,
    slots: int | None,
    cluster: Cluster,
    entry: PolicyEntry,
    knobs: dict[str, Scalar],
    axes: dict[str, Scalar],
    feed: Feed,
    rps: float | None,
    burstiness: float,
    seed: int,
) -> Cell:
    policy = make_policy(entry.policy, knobs, seed)
    feed = feed.asked_by(policy)
    queue, look_ahead = str(axes["queue"]), int(axes["look_ahead"] or 0)
    if queue == "engine":
        if policy.preemptive:
            raise ChimsimError(
                f"policy {entry.label} takes slots back, which an engine's own queue cannot; use --queue dispatcher"
            )
        # Everything is handed over at once, so that there is nothing to look ahead to.
        cluster, look_ahead = in_engine(cluster), 0
    arrivals = _arrival_kind(spec)
    said = {name: tuple(map(str, entry.overrides.get(name, getattr(spec, name)))) for name in _SPELLS}
    spells = {
        name: tuple(map(str, on_engines([parse(text, name) for text in said[name]], cluster, name)))
        for name, parse in _SPELLS.items()
    }
    config: dict[str, Any] = {
        "format": FORMAT,
        "chimsim": chimsim.__version__,
        "trace": trace.name,
        "trace_digest": trace.digest,
        "cluster": cluster.to_dict(),
        "policy": repr(policy),
        "policy_source": source_digest(policy),
        "predictor": feed.to_dict(),
        "rps": rps,
        "burstiness": burstiness,
        "arrivals": arrivals,
        "workflows": spec.workflows,
        "warmup": spec.warmup,
        "seed": seed,
        "queue": queue,
        "look_ahead": look_ahead,
        "oversize": spec.oversize,
        "goodput": dict(spec.goodput),
    }
    if arrivals not in ("poisson", "recorded"):
        config["arrivals_digest"] = trace_named(arrivals).digest
    config |= {name: list(texts) for name, texts in spells.items() if texts}
    shown: dict[str, Scalar] = {
        "trace": name_of(name) if len({Path(t).name for t in spec.trace}) < len(spec.trace) else trace.name,
        "combo": label,
        "slots": slots,
        "rps": rps,
        "burstiness": burstiness,
        "policy": entry.label,
        "tau": knobs.get("tau"),
        "delta_s": knobs.get("delta_s"),
        **{name: knobs.get(name) for name in _knob_names(spec)},
        **feed.axes(),
        "rank_predictor": (feed.rank and Path(feed.rank).name) or axes["rank_predictor"],
        # Costs that come with a saved model are no axis of their own.
        **{name: axes[name] for name in ("router_s", "predictor_s") if axes[name] is None and feed.folders},
        "queue": queue,
        "look_ahead": look_ahead,
        **{name: ",".join(texts) or None for name, texts in said.items() if _is_said(spec, name)},
        "seed": seed,
    }
    return Cell(
        name=digest(config)[:32],
        axes=shown,
        config=config,
        trace=name,
        trace_digest=trace.digest,
        cluster=cluster,
        policy=entry.policy,
        knobs=knobs,
        feed=feed,
        rps=rps,
        burstiness=burstiness,
        arrivals=arrivals,
        workflows=spec.workflows,
        warmup=spec.warmup,
        seed=seed,
        queue=queue,
        look_ahead=look_ahead,
        oversize=spec.oversize,
        goodput=spec.goodput,
        fail=spells["fail"],
        slow=spells["slow"],
    )


def _is_said(spec: Spec, name: str) -> bool:
    return bool(getattr(spec, name)) or any(entry.overrides.get(name) for entry in spec.policy)


def make_policy(name: str, knobs: Mapping[str, Scalar], seed: int) -> Policy:
    """A fresh policy; where it has a knob ``seed`` that nobody set, it gets the run's."""
    given = dict(knobs)
    if "seed" not in given and any(knob.name == "seed" for knob in knobs_of(policy_class(name))):
        given["seed"] = seed
    return load_policy(name, **given)


def source_digest(policy: Policy) -> str:
    """SHA-256 over the files of the policy's class and its bases, so that an edited policy runs anew."""
    paths = set()
    for cls in type(policy).__mro__:
        if cls.__module__ in ("builtins", "typing", "abc"):
            continue
        try:
            found = inspect.getsourcefile(cls)
        except TypeError:
            found = None
        if found is not None and Path(found).is_file():
            paths.add(Path(found))
    sums = sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in paths)
    return hashlib.sha256("".join(sums).encode()).hexdigest()


def _check_knobs(spec: Spec, policies: Mapping[str, type[Policy]]) -> None:
    known = {knob.name for policy in policies.values() for knob in knobs_of(policy)}
    for name in spec.knobs:
        if name not in known:
            whose = ", ".join(sorted({entry.policy for entry in spec.policy}))
            raise ChimsimError(f"knob {name!r}: none of the policies {whose} has it{near(name, known)}")


def _size(spec: Spec, policies: Mapping[str, type[Policy]]) -> int:
    """How many cells the spec has, at most, for each trace and cluster."""
    of_policies = 0
    for entry in spec.policy:
        axes = [*_knob_axes(spec, entry, policies[entry.label]).values()]
        axes += _reading_axes(spec, entry, policies[entry.label]).values()
        of_policies += prod(map(len, axes))
    return of_policies * len(spec.rps or (None,)) * len(spec.burstiness) * len(spec.seeds)


def _knob_names(spec: Spec) -> list[str]:
    own = [name for entry in spec.policy for name in entry.overrides if name not in POLICY_AXES]
    return [name for name in dict.fromkeys([*spec.knobs, *own]) if name not in ("tau", "delta_s", "seed")]


def _knob_axes(spec: Spec, entry: PolicyEntry, policy: type[Policy]) -> dict[str, Axis]:
    """The knobs that this policy has, each with its values: its own table's before the sweep's."""
    names = {knob.name for knob in knobs_of(policy)}
    shared = {name: values for name, values in spec.knobs.items() if name in names}
    own = {name: values for name, values in entry.overrides.items() if name not in POLICY_AXES}
    return shared | own


def _reading_axes(spec: Spec, entry: PolicyEntry, policy: type[Policy]) -> dict[str, Axis]:
    """The predictor's axes, kept to what the policy reads, and how its queue is served."""
    own = entry.overrides

    def axis(name: str) -> Axis:
        return tuple(own.get(name, getattr(spec, name)))

    def either(plain: str, dial: str) -> Axis:
        """The values of two keys for one thing; a policy's own table decides by itself."""
        if dial in own and plain not in own:
            return axis(dial)
        if plain in own and dial not in own:
            return axis(plain)
        return (*axis(plain), *axis(dial))

    confidence = "confidence" in policy.reads
    lengths = bool(policy.reads & LENGTH_FIELDS)
    return {
        "router": (either("router", "router_map") or ("auto",)) if confidence else (None,),
        "lengths": (either("length_predictor", "length_error") or (0.0,)) if lengths else (None,),
        "rank_predictor": (axis("rank_predictor") or ("oracle",)) if "rank" in policy.reads else (None,),
        "router_s": (axis("router_s") or (None,)) if confidence else (0.0,),
        "predictor_s": (axis("predictor_s") or (None,)) if lengths else (0.0,),
        "queue": axis("queue"),
        "look_ahead": axis("look_ahead"),
    }


def _of_trace(spec: Spec, trace: str) -> Spec:
    """The spec for one of its traces: its name in the folders of saved models."""

    def named(axis: Axis) -> Axis:
        return tuple(value.replace(TRACE, trace) if isinstance(value, str) else value for value in axis)

    policies = [replace(e, overrides={n: named(axis) for n, axis in e.overrides.items()}) for e in spec.policy]
    models = {name: named(getattr(spec, name)) for name in ("router", "length_predictor", "rank_predictor")}
    return replace(spec, policy=tuple(policies), **models)  # type: ignore[arg-type]


def _folders(spec: Spec) -> list[str]:
    """The folders of all saved models that the spec names."""
    found: list[str] = []
    for entry in spec.policy:
        values = {name: entry.overrides.get(name, getattr(spec, name)) for name in POLICY_AXES}
        sources = [v.removeprefix(SHUFFLED) for v in values["router"] if isinstance(v, str)]
        found += [source for source in sources if source not in ROUTERS]
        found += [str(v).removeprefix(QRF) for v in values["length_predictor"] if isinstance(v, str)]
        found += [str(v) for v in values["rank_predictor"] if v != "oracle"]
    return list(dict.fromkeys(found))


def _products(axes: Mapping[str, Iterable[Scalar]]) -> Iterator[dict[str, Scalar]]:
    names = list(axes)
    for values in itertools.product(*axes.values()):
        yield dict(zip(names, values, strict=True))


def _arrival_kind(spec: Spec) -> str:
    return spec.arrivals or ("poisson" if spec.rps else "recorded")


def _manifest(
    spec: Spec, found: Sequence[Cell], traces: Mapping[str, Trace], clusters: Sequence[Cluster]
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "chimsim": chimsim.__version__,
        "spec": spec.to_dict(),
        "seeds": list(spec.seeds),
        "traces": {name_of(n): {"sha256": t.digest, "workflows": len(t.workflows)} for n, t in sorted(traces.items())},
        "clusters": {digest(c.to_dict())[:16]: c.to_dict() for c in clusters},
        "policies": {
            entry.label: sorted({c.config["policy"] for c in found if c.axes["policy"] == entry.label})
            for entry in spec.policy
        },
        "sources": {
            entry.label: sorted({c.config["policy_source"] for c in found if c.axes["policy"] == entry.label})
            for entry in spec.policy
        },
        "predictors": sorted({digest(c.config["predictor"]): c.config["predictor"] for c in found}.items()),
        "cells": [{"hash": c.name, "axes": dict(c.axes)} for c in found],
    }
