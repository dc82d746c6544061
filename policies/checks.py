"""The contract of a policy as one test: `check_policy` puts any policy, yours too, through it.

It plays a small script of arrivals, checks, failures and ends against made-up engines. It judges whether
decisions are allowed and repeatable, not whether they are good.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, is_dataclass, replace
from math import isfinite
from random import Random
from typing import Any

from policies.interface import (
    ClusterView,
    Dispatch,
    EngineView,
    Policy,
    PolicyError,
    Prediction,
    Priority,
    Progress,
    RequestView,
)

ENGINES: ClusterView = (
    EngineView("large/0", "large", max_batch_size=2, decode_s_per_token=0.04),
    EngineView("large/1", "large", max_batch_size=2, decode_s_per_token=0.04),
    EngineView("small", "small", max_batch_size=3, decode_s_per_token=0.01),
)
"""The cluster of the script: two engines of the model ``large``, one of ``small``."""

_MODELS = ("large", "small")
_FIELDS = ("confidence", "stage_tokens", "remaining_tokens", "rank")


def check_policy(make_policy: Callable[[], Policy]) -> None:
    """Check that a policy keeps the contract.

    It is a dataclass with a stable repr; it names a healthy engine of the view, with finite priorities of one
    length; it does not change what it is shown and looks only at the predictions that ``reads`` names; two of
    a kind, and a pickled copy taken in mid-run, decide alike; nothing is left of a workflow that has ended;
    one engine is no special case; and a cluster without a healthy engine is a `PolicyError`.

    Args:
        make_policy: gives a fresh policy at each call, always with the same knobs.

    Raises:
        AssertionError: what is broken.
    """
    _check_repr(make_policy)
    log = Script(make_policy()).play()
    _must(Script(make_policy()).play() == log, "two policies with the same knobs decide differently")
    _check_pickled(make_policy, log)
    _check_forgets(make_policy)
    _check_one_engine(make_policy)
    _check_no_engine(make_policy)


def _must(ok: bool, broken: str) -> None:
    if not ok:
        raise AssertionError(broken)


def _check_repr(make_policy: Callable[[], Policy]) -> None:
    policy = make_policy()
    _must(is_dataclass(policy), f"{type(policy).__name__} is not a dataclass; its fields are its knobs")
    text = repr(policy)
    _must(
        text == repr(make_policy()) and " at 0x" not in text,
        f"the repr is not stable, so it cannot stand in a manifest: {text}",
    )


def _check_pickled(make_policy: Callable[[], Policy], log: list[Any]) -> None:
    try:
        copied = Script(make_policy(), pickle_at=60).play()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise AssertionError(f"the policy cannot be pickled: {error}") from error
    _must(copied == log, "a pickled copy taken in mid-run decides differently from the original")


def _check_forgets(make_policy: Callable[[], Policy]) -> None:
    policy = make_policy()
    script = Script(policy, prefix="a")
    script.play()
    before = remembered(policy)
    Script(policy, prefix="b", first_id=script.next_id).play()
    after = remembered(policy)
    _must(
        after <= before,
        f"the policy remembers {after - before} more things after other workflows have come and all ended: "
        "drop what belongs to a workflow in on_complete(last=True) and on_forget",
    )


def _check_one_engine(make_policy: Callable[[], Policy]) -> None:
    refused: list[str] = []
    # A knob may name a model, so either of the two will do.
    for engine in (ENGINES[0], ENGINES[-1]):
        try:
            Script(make_policy(), engines=(engine,)).play()
            return
        except PolicyError as error:
            refused.append(str(error))
    raise AssertionError(f"the policy refuses a cluster of one engine: {refused[0]}")


def _check_no_engine(make_policy: Callable[[], Policy]) -> None:
    sick = tuple(replace(engine, healthy=False) for engine in ENGINES)
    empty: ClusterView = ()
    for cluster, what in ((empty, "an empty cluster"), (sick, "a cluster without a healthy engine")):
        policy = make_policy()
        try:
            decision = policy.dispatch(0.0, _request(policy, Random(0), 0, "w", 0), cluster)
        except PolicyError:
            continue
        except Exception as error:
            raise AssertionError(f"{what} must raise PolicyError, not {type(error).__name__}: {error}") from error
        raise AssertionError(f"{what} must raise PolicyError, not give {decision}")


def remembered(value: object, seen: set[int] | None = None) -> int:
    """How many things an object holds in its containers and attributes, all the way down."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, Mapping):
        return sum(1 + remembered(item, seen) for pair in value.items() for item in pair)
    if isinstance(value, (str, bytes, int, float)) or value is None:
        return 0
    if hasattr(value, "__iter__") and hasattr(value, "__len__"):
        return sum(1 + remembered(item, seen) for item in value)
    slots = [n for cls in type(value).__mro__ for n in getattr(cls, "__slots__", ())]
    held = [getattr(value, name, None) for name in slots if name != "__dict__"]
    held += list(getattr(value, "__dict__", {}).values())
    return sum(remembered(item, seen) for item in held)


class _Undeclared(Mapping[str, float]):
    """A prediction that the policy has not said it reads."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self) -> AssertionError:
        return AssertionError(f"the policy looks at prediction.{self._name}, which its reads does not name")

    def __getitem__(self, model: str) -> float:
        raise self._refuse()

    def __iter__(self) -> Iterator[str]:
        raise self._refuse()

    def __len__(self) -> int:
        raise self._refuse()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Undeclared)

    __hash__ = None  # type: ignore[assignment]


def _request(policy: Policy, rng: Random, request_id: int, workflow_id: str, stage: int) -> RequestView:
    numbers = {
        "confidence": {model: round(rng.random(), 3) for model in _MODELS},
        "stage_tokens": {model: float(rng.randint(1, 400)) for model in _MODELS},
        "remaining_tokens": {model: float(rng.randint(400, 4000)) for model in _MODELS},
        "rank": {model: rng.gauss(0, 1) for model in _MODELS},
    }
    shown = {name: numbers[name] if name in policy.reads else _Undeclared(name) for name in _FIELDS}
    return RequestView(
        request_id=request_id,
        workflow_id=workflow_id,
        workload=rng.choice(("apps", "maths")),
        stage=stage,
        stage_name=("planner", "coder", "verifier")[stage],
        arrived_at=float(request_id),
        workflow_arrived_at=float(request_id - stage),
        prompt_tokens=rng.randint(1, 3000),
        prediction=Prediction(**shown),
        after=(stage - 1,) if stage else (),
    )


@dataclass
class _Flight:
    """A dispatched call; ``stages`` is how many its workflow has in all."""

    request: RequestView
    stages: int
    engine: str
    check_after_tokens: int
    output_tokens: int = 0
    service_s: float = 0.0


@dataclass
class Script:
    """Plays one fixed story of workflows of 1 to 3 stages at a policy, and checks every answer.

    ``pickle_at`` is the event before which the policy is replaced by a pickled copy of itself.
    """

    policy: Policy
    engines: ClusterView = ENGINES
    prefix: str = "w"
    first_id: int = 0
    workflows: int = 40
    pickle_at: int | None = None
    next_id: int = field(init=False)
    _rng: Random = field(init=False, default_factory=lambda: Random(20))
    _flights: list[_Flight] = field(init=False, default_factory=list)
    _log: list[Any] = field(init=False, default_factory=list)
    _width: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.next_id = self.first_id

    def play(self) -> list[Any]:
        """All decisions, in order."""
        arrived = event = 0
        while arrived < self.workflows or self._flights:
            now = 0.25 * event
            if event == self.pickle_at:
                self.policy = pickle.loads(pickle.dumps(self.policy))
            if arrived < self.workflows and (not self._flights or self._rng.random() < 0.4):
                self._submit(now, event, f"{self.prefix}{arrived}", 0, self._rng.randint(1, 3))
                arrived += 1
            else:
                self._happen(now, event, self._rng.choice(self._flights))
            event += 1
        return self._log

    def _happen(self, now: float, event: int, flight: _Flight) -> None:
        """One call goes on, ends, fails and is tried again, or its workflow is given up."""
        request, dice = flight.request, self._rng.random()
        flight.output_tokens += self._rng.randint(1, 90)
        flight.service_s += 0.5
        if flight.check_after_tokens and dice < 0.6:
            answer = self.policy.on_progress(now, request, flight.output_tokens, flight.service_s)
            _must(isinstance(answer, Progress), f"on_progress gave {answer!r}, not a Progress")
            self._check_priority(answer.priority)
            _count("check_after_tokens", answer.check_after_tokens)
            self._log.append((request.request_id, answer))
            flight.check_after_tokens = answer.check_after_tokens
            return
        self._flights.remove(flight)
        workflow, stage = request.workflow_id, request.stage
        if 0.6 <= dice < 0.65:
            self._complete(now, flight, "failed", last=False)
            self._submit(now, event, workflow, stage, flight.stages)
        elif 0.65 <= dice < 0.7:
            self._complete(now, flight, "aborted", last=True)
        elif 0.7 <= dice < 0.75:
            self._complete(now, flight, "aborted", last=False)
            self.policy.on_forget(now, workflow)
        else:
            last = stage + 1 == flight.stages
            self._complete(now, flight, "stop", last=last)
            if not last:
                self._submit(now, event, workflow, stage + 1, flight.stages)

    def _complete(self, now: float, flight: _Flight, reason: str, *, last: bool) -> None:
        tokens, service_s = flight.output_tokens, flight.service_s
        self.policy.on_complete(now, flight.request, tokens, service_s, reason, last=last)

    def _submit(self, now: float, event: int, workflow_id: str, stage: int, stages: int) -> None:
        request = _request(self.policy, self._rng, self.next_id, workflow_id, stage)
        self.next_id += 1
        cluster = self._cluster(event)
        shown = deepcopy((request, cluster))
        decision = self.policy.dispatch(now, request, cluster)
        _must((request, cluster) == shown, "dispatch changes the request or the cluster that it is shown")
        self._check(decision, cluster)
        self._log.append((request.request_id, replace(decision, reason="")))
        self._flights.append(_Flight(request, stages, decision.engine, decision.check_after_tokens))

    def _cluster(self, event: int) -> ClusterView:
        views = []
        for engine in self.engines:
            count = sum(flight.engine == engine.name for flight in self._flights)
            running = min(count, engine.max_batch_size)
            # One engine is ill for a while, if there is another.
            ill = engine.name == "large/0" and len(self.engines) > 1 and 30 <= event < 70
            views.append(replace(engine, running=running, waiting=count - running, healthy=not ill))
        return tuple(views)

    def _check(self, decision: Dispatch, cluster: ClusterView) -> None:
        _must(isinstance(decision, Dispatch), f"dispatch gave {decision!r}, not a Dispatch")
        health = {engine.name: engine.healthy for engine in cluster}
        _must(
            decision.engine in health,
            f"engine {decision.engine!r} is not in the view (engines: {', '.join(health)})",
        )
        _must(health[decision.engine], f"engine {decision.engine!r} is not healthy, and others are")
        self._check_priority(decision.priority)
        _must(decision.max_wait_s > 0, f"max_wait_s is {decision.max_wait_s!r}; it must be more than 0")
        _count("promoted_tokens", decision.promoted_tokens)
        _count("check_after_tokens", decision.check_after_tokens)

    def _check_priority(self, priority: Priority) -> None:
        _must(isinstance(priority, tuple), f"priority {priority!r} is not a tuple")
        _must(all(isfinite(number) for number in priority), f"priority {priority} is not finite")
        if self._width is None:
            self._width = len(priority)
        _must(
            len(priority) == self._width,
            f"priority {priority} has {len(priority)} numbers, an earlier one {self._width}",
        )


def _count(name: str, tokens: int) -> None:
    ok = isinstance(tokens, int) and tokens >= 0
    _must(ok, f"{name} is {tokens!r}; it must be a whole number, 0 or more")
