"""A spec's words made into the objects a run needs: traces, clusters, arrivals and predictors, checked here.

It loads and checks; it neither decides what the grid is nor simulates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from chimsim.config import Cluster, combo_cluster, load_cluster
from chimsim.errors import ChimsimError, near
from chimsim.idle import fit, oversize_message
from chimsim.learned import LearnedPredictor, cost_s, manifest_of
from chimsim.predictors import Predictor, ShuffledRouter, build_predictor
from chimsim.spec import ROUTERS, SHUFFLED, Scalar, Spec
from policies import policy_class
from policies.interface import Policy
from traces import Trace, arrivals, load_trace
from traces.columns import columns_of

QRF = "qrf:"
"""Before the folder of a length model, among the length predictors."""
HELD_OUT = "\n"
"""Between a trace's name and the folders of models: what of the trace none of them was trained on."""
PART = "\t"
"""Between those and ``k/n``: the k-th of n parts of these workflows."""


@lru_cache(maxsize=8)
def trace_named(name: str) -> Trace:
    """`traces.load_trace`, remembering the last few: a sweep reads each file once a process.

    Behind `HELD_OUT` may stand folders of saved models, which leaves what they were not trained on, and behind `PART`
    a part of the workflows.
    """
    whole, _, part = name.partition(PART)
    base, *folders = whole.split(HELD_OUT)
    trace = load_trace(base)
    if name == base:
        return trace
    workflows = trace.workflows
    if folders:
        held_out = frozenset.intersection(*(manifest_of(folder).held_out for folder in folders))
        workflows = tuple(workflow for workflow in workflows if workflow.workflow_id in held_out)
        if not workflows:
            raise ChimsimError(
                f"split test: {', '.join(folders)} held no workflow of trace {trace.name} back; train with "
                "--test-share, on this trace"
            )
    if part:
        workflows = tuple(workflow for workflow in workflows if in_part(workflow.workflow_id, part))
        if not workflows:
            raise ChimsimError(f"part {part}: none of the workflows of trace {trace.name} is in it")
    content = "\0".join([trace.digest, *(workflow.workflow_id for workflow in workflows)])
    return Trace(trace.name, workflows, hashlib.sha256(content.encode()).hexdigest())


def name_of(key: str) -> str:
    """The trace that a name for `trace_named` begins with."""
    return key.partition(PART)[0].partition(HELD_OUT)[0]


def in_part(workflow_id: str, part: str) -> bool:
    """Whether a workflow is in ``k/n``; by a hash of its id alone, so that it does not depend on the others."""
    number, _, parts = part.partition("/")
    drawn = int.from_bytes(hashlib.sha256(workflow_id.encode()).digest()[:8], "big")
    return drawn % int(parts) == int(number) - 1


def label_leak(policy: str, feed: Feed) -> str | None:
    """A warning where true lengths choose the model, or None."""
    if feed.lengths is None or feed.learned_lengths is not None or not policy_class(policy).routes_by_length:
        return None
    return (
        f"{policy} chooses the model by lengths that come from the true ones, which tell the answer: failures run "
        "long; give --length-predictor qrf:FOLDER, with --split test"
    )


def training_overlap(feed: Feed, name: str) -> str | None:
    """A warning where a trace holds workflows that a saved model was trained on, or None."""
    for folder in feed.folders:
        ids = columns_of(trace_named(name)).rows.keys()
        seen = len(ids & manifest_of(folder).trained_on)
        if seen:
            return (
                f"{folder} was trained on {seen} of the {len(ids)} workflows it is judged on here: what it predicts "
                "looks better than it is; use --split test"
            )
    return None


@dataclass(frozen=True, slots=True)
class Feed:
    """What the predictor of a cell is; None where the policy does not read that prediction.

    ``router`` is trace, oracle or none, the folder of a saved router, or a number: the average precision of a noisy
    one; with ``shuffled`` each workflow has the confidence of another. ``lengths`` is a Kendall distance, or
    ``qrf:FOLDER`` of a saved length model; ``rank`` a saved rank model's folder, None for the order of the lengths.
    ``quantile`` is what the policy asks a saved length model for, None its own.
    """

    router: str | float | None
    lengths: str | float | None
    rank: str | None
    router_s: float
    predictor_s: float
    quantile: float | None = None
    shuffled: bool = False

    @property
    def learned_router(self) -> str | None:
        """The folder of a saved router."""
        return self.router if isinstance(self.router, str) and self.router not in ROUTERS else None

    @property
    def learned_lengths(self) -> str | None:
        """The folder of a saved length model."""
        return self.lengths.removeprefix(QRF) if isinstance(self.lengths, str) else None

    def asked_by(self, policy: Policy) -> Feed:
        """With the quantile that the policy asks a saved length model for."""
        return replace(self, quantile=policy.quantile if self.learned_lengths is not None else None)

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of all saved models."""
        return tuple(f for f in (self.learned_router, self.learned_lengths, self.rank) if f is not None)

    def to_dict(self) -> dict[str, Any]:
        """For the cell's configuration; saved models by their content."""
        router, lengths = self.learned_router, self.learned_lengths
        return {
            "router": self.router if router is None else manifest_of(router).digest,
            "length_error": self.lengths if lengths is None else manifest_of(lengths).digest,
            "rank": None if self.rank is None else manifest_of(self.rank).digest,
            "router_s": self.router_s,
            "predictor_s": self.predictor_s,
            "quantile": self.quantile,
            **({"shuffled": True} if self.shuffled else {}),
        }

    def axes(self) -> dict[str, Scalar]:
        """The predictor's columns of the summary."""
        noisy = isinstance(self.router, float)
        lengths = self.learned_lengths
        source = (self.learned_router and Path(self.learned_router).name) or self.router
        # Every source has a name of its own: an empty one would be averaged with the others in tables and figures.
        named = None if self.lengths is None else "oracle" if not self.lengths else "noisy"
        return {
            "router": "noisy" if noisy else f"{SHUFFLED}{source}" if self.shuffled else source,
            "router_map": self.router if noisy else None,
            "length_predictor": Path(lengths).name if lengths is not None else named,
            "length_error": None if lengths is not None else self.lengths,
            "rank_predictor": self.rank and Path(self.rank).name,
            "router_s": self.router_s,
            "predictor_s": self.predictor_s,
        }


def feed_for(axes: Mapping[str, Scalar], auto: str) -> Feed:
    """The predictor of these axes; ``auto`` is the router where none was chosen.

    Overheads that are not set are what the saved models' folders say they cost; nothing without models.
    """
    router = auto if axes["router"] == "auto" else axes["router"]
    lengths = axes["lengths"]
    rank = None if axes["rank_predictor"] in (None, "oracle") else str(axes["rank_predictor"])
    shuffled = isinstance(router, str) and router.startswith(SHUFFLED)
    feed = Feed(
        router=router.removeprefix(SHUFFLED) if isinstance(router, str) else None if router is None else float(router),
        lengths=lengths if lengths is None or isinstance(lengths, str) else float(lengths),
        rank=rank,
        router_s=0.0,
        predictor_s=0.0,
        shuffled=shuffled,
    )
    router_s, predictor_s = axes["router_s"], axes["predictor_s"]
    if router_s is None:
        router_s = cost_s(feed.learned_router) if feed.learned_router is not None else 0.0
    if predictor_s is None:
        predictor_s = sum(cost_s(folder) for folder in (feed.learned_lengths, feed.rank) if folder is not None)
    return replace(feed, router_s=float(router_s), predictor_s=float(predictor_s))


def auto_router(trace: Trace, models: tuple[str, ...]) -> str:
    """``trace`` where every workflow has a recorded confidence for every model, else ``oracle``."""
    columns = columns_of(trace)
    complete = not any(np.isnan(columns.runs(model).confidence).any() for model in models)
    return "trace" if complete else "oracle"


@lru_cache(maxsize=8)
def _predictor(name: str, digest: str, models: tuple[str, ...], feed: Feed, seed: int) -> Predictor:
    trace = trace_named(name)
    if feed.shuffled:
        return ShuffledRouter(trace, _predictor(name, digest, models, replace(feed, shuffled=False), seed), seed)
    noisy = isinstance(feed.router, float)
    taken = feed.router is None or feed.learned_router is not None
    base = build_predictor(
        trace,
        models=models,
        # what a policy does not read may be missing: recorded confidence is only missed when it is looked at
        router="trace" if taken else "noisy" if noisy else str(feed.router),
        router_map=float(feed.router) if isinstance(feed.router, float) else None,
        length_error=feed.lengths if isinstance(feed.lengths, float) else 0.0,
        seed=seed,
        router_s=feed.router_s,
        predictor_s=feed.predictor_s,
    )
    if not feed.folders:
        return base
    return LearnedPredictor(
        trace,
        models,
        base,
        lengths=feed.learned_lengths,
        router=feed.learned_router,
        rank=feed.rank,
        quantile=feed.quantile,
    )


def predictor_for(feed: Feed, name: str, models: tuple[str, ...], seed: int) -> Predictor:
    """The predictor of a cell; equal ones are made once a process (their noise takes long to fit)."""
    drawn = feed.shuffled or isinstance(feed.router, float) or (isinstance(feed.lengths, float) and feed.lengths > 0)
    return _predictor(name, trace_named(name).digest, models, feed, seed if drawn else 0)


def check_feed(feed: Feed, name: str, models: tuple[str, ...], seed: int) -> None:
    """Refuse a router that cannot be had: confidences or labels are missing, or a precision is too low."""
    if feed.folders:
        predictor_for(feed, name, models, seed)
    if feed.router is None or feed.learned_router is not None:
        return
    trace = trace_named(name)
    if isinstance(feed.router, float):
        predictor_for(feed, name, models, seed)
    columns = columns_of(trace)
    recorded = feed.router == "trace"
    known = [columns.runs(model).confidence if recorded else columns.runs(model).solved for model in models]
    missing = _first(np.isnan(np.stack(known)))
    if missing is None:
        return
    row, model = missing[0], models[missing[1]]
    if recorded:
        raise ChimsimError(
            f"router trace: workflow {columns.ids[row]} of {trace.name} has no confidence "
            f"for {model}; use router oracle or none"
        )
    raise ChimsimError(
        f"router {feed.router}: workflow {columns.ids[row]} of trace {trace.name} has no "
        f"label (solved) for {model}; a policy that reads confidence needs them"
    )


def _first(wrong: npt.NDArray[np.bool_]) -> tuple[int, int] | None:
    """The first workflow for which something is wrong, and the first thing; shape (things, workflows)."""
    rows = np.flatnonzero(wrong.any(axis=0))
    return (int(rows[0]), int(wrong[:, rows[0]].argmax())) if len(rows) else None


def make_cluster(
    name: str, is_file: bool, slots: int | None, engines: Mapping[str, int], max_num_seqs: int | None
) -> Cluster:
    """The cluster of a combination or of a file, with the sweep's own slots where it gives them."""
    if is_file:
        path = Path(name)
        if not path.is_file():
            siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
            raise ChimsimError(f"cluster {name}: there is no such file{near(path.name, siblings[:50])}")
        return load_cluster(path, engines=engines, max_batch_size=slots, max_num_seqs=max_num_seqs)
    return combo_cluster(name, engines=engines, max_batch_size=slots, max_num_seqs=max_num_seqs)


def in_engine(cluster: Cluster) -> Cluster:
    """The same engines with vLLM's priority scheduling, without which their own queue ignores a policy.

    Slots are the dispatcher's; an engine that queues itself keeps to as many with ``max_num_seqs``.
    """
    engines = (replace(engine, scheduling="priority", max_num_seqs=engine.max_batch_size) for engine in cluster.engines)
    return replace(cluster, engines=tuple(engines))


def check_trace(trace: Trace, cluster: Cluster, spec: Spec) -> None:
    """Refuse a trace that lacks a run of one of the cluster's models, or whose calls can never fit."""
    models, columns = cluster.models, columns_of(trace)
    missing = _first(~np.stack([columns.runs(model).present for model in models]))
    if missing is not None:
        has = ", ".join(trace.models) or "none"
        raise ChimsimError(
            f"trace {trace.name}: workflow {columns.ids[missing[0]]} has no run of {models[missing[1]]}, which "
            f"{cluster.name} needs (every workflow has: {has})"
        )
    for engine in cluster.engines:
        runs = columns.runs(engine.model)
        # As `fit`: what may be wrong is looked at closely.
        longest = min(engine.max_model_len, (engine.num_kv_blocks - 1) * engine.block_tokens + 1)
        wrong = runs.hash_block_tokens % engine.block_tokens > 0
        if spec.oversize == "error":
            wrong |= runs.prompt_tokens + runs.output_tokens > longest
        for at in np.flatnonzero(wrong).tolist():
            row = int(np.searchsorted(runs.starts, at, "right")) - 1
            index = at - int(runs.starts[row])
            workflow = trace.workflows[row]
            stage = workflow.runs[engine.model].stages[index]
            if stage.hash_ids and stage.hash_block_tokens % engine.block_tokens:
                raise ChimsimError(
                    f"trace {trace.name}: workflow {workflow.workflow_id}, stage {index}: hash_block_tokens is "
                    f"{stage.hash_block_tokens}; expected a multiple of the {engine.block_tokens} tokens of a KV "
                    f"block of engine {engine.name}"
                )
            if fit(engine, stage.prompt_tokens, stage.output_tokens) < stage.output_tokens:
                raise ChimsimError(
                    f"trace {trace.name}: {oversize_message(workflow.workflow_id, index, stage, engine)}"
                )


def check_arrivals(kind: str, trace: Trace, spec: Spec) -> None:
    """Refuse arrivals that cannot be had: none recorded, too few, or nothing to borrow."""
    if kind == "poisson":
        if not spec.rps:
            raise ChimsimError("Poisson arrivals need a rate: give rps, in workflows per second")
        return
    if kind == "recorded":
        if not spec.rps:
            arrivals.recorded(trace)
            count = spec.workflows or 0
            if count > len(trace.workflows):
                raise ChimsimError(
                    f"workflows: {count} asked for, but trace {trace.name} has "
                    f"{len(trace.workflows)} recorded arrivals; give a rate (rps) instead"
                )
        else:
            times_for(kind, trace, spec.workflows, spec.rps[0])
        return
    times_for(kind, trace, spec.workflows, spec.rps[0] if spec.rps else None)


def times_for(kind: str, trace: Trace, workflows: int | None, rps: float | None) -> npt.NDArray[np.float64] | None:
    """The instants to hand to the simulator; None where it makes them (Poisson, or recorded as they are)."""
    if kind == "poisson" or (kind == "recorded" and rps is None):
        return None
    other = trace if kind == "recorded" else trace_named(kind)
    return arrivals.borrowed(other, workflows or len(trace.workflows), rps)
