"""The contract test notices: one deliberately bad policy for each of its rules."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from math import nan
from typing import Any, ClassVar, cast

import pytest

from policies import Policy, PolicyError, check_policy
from policies.fcfs import Fcfs
from policies.interface import ClusterView, Dispatch, Priority, Progress, RequestView
from policies.predicted import predicted
from policies.routing import healthy


@dataclass
class LongestFirst(Policy):
    """The longest call first, always on the first engine: bad for everyone, yet it keeps the contract."""

    reads: ClassVar[frozenset[str]] = frozenset({"stage_tokens"})

    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        engine = healthy(self, cluster)[0]
        return Dispatch(engine.name, (-predicted(self, request, "stage_tokens", engine.model),))


@dataclass
class Elsewhere(Fcfs):
    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        self.place(request, cluster)
        return Dispatch("atlantis")


@dataclass
class IllEngine(Fcfs):
    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        self.place(request, cluster)
        return Dispatch(cluster[0].name)


@dataclass
class Meddler(Fcfs):
    reads: ClassVar[frozenset[str]] = frozenset({"rank"})

    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        cast(dict[str, float], request.prediction.rank)["large"] = 0.0
        return super().dispatch(now, request, cluster)


@dataclass
class Gambler(Fcfs):
    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        return Dispatch(self.place(request, cluster).name, (random.random(),))


@dataclass
class Peeker(Fcfs):
    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        engine = self.place(request, cluster)
        return Dispatch(engine.name, (request.prediction.rank[engine.model],))


@dataclass
class Hoarder(Fcfs):
    _seen: list[str] = field(default_factory=list, init=False, repr=False)

    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        self._seen.append(request.workflow_id)
        return super().dispatch(now, request, cluster)


@dataclass
class DeafToForget(Fcfs):
    def on_forget(self, now: float, workflow_id: str) -> None:
        return None


@dataclass
class Unpicklable(Fcfs):
    _key: Callable[[float], float] = field(default=lambda x: x, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._key = lambda x: x + 1


@dataclass
class Amnesiac(Fcfs):
    _calls: int = field(default=0, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_calls": 0}

    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        self._calls += 1
        return Dispatch(self.place(request, cluster).name, (float(self._calls),))


@dataclass
class NeedsTwo(Fcfs):
    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        if len(cluster) == 1:
            raise PolicyError("two engines, please")
        return super().dispatch(now, request, cluster)


@dataclass
class IndexErrorOnEmpty(Policy):
    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        return Dispatch([engine for engine in cluster if engine.healthy][0].name)  # noqa: RUF015


@dataclass
class NotANumber(Fcfs):
    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        return Dispatch(self.place(request, cluster).name, (nan,))


@dataclass
class Ragged(Fcfs):
    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        key: Priority = (1.0,) * (request.request_id % 2)
        return Dispatch(self.place(request, cluster).name, key)


@dataclass
class RaggedProgress(Fcfs):
    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        return Dispatch(self.place(request, cluster).name, (0.0,), check_after_tokens=5)

    def on_progress(self, now: float, request: RequestView, output_tokens: int, service_s: float) -> Progress:
        return Progress((0.0, 1.0), 5)


@dataclass
class NegativeCheck(Fcfs):
    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        return Dispatch(self.place(request, cluster).name, check_after_tokens=-1)


@dataclass
class NoPatience(Fcfs):
    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        return Dispatch(self.place(request, cluster).name, max_wait_s=nan)


@dataclass(repr=False)
class AddressInRepr(Fcfs):
    __repr__ = object.__repr__


class Undecorated(Policy):
    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        return Dispatch(cluster[0].name)


BAD: list[tuple[Callable[[], Policy], str]] = [
    (Elsewhere, "'atlantis' is not in the view"),
    (IllEngine, "not healthy"),
    (Meddler, "changes the request"),
    (Gambler, "decide differently"),
    (Peeker, "looks at prediction.rank"),
    (Hoarder, "remembers"),
    (DeafToForget, "remembers"),
    (Unpicklable, "cannot be pickled"),
    (Amnesiac, "pickled copy"),
    (NeedsTwo, "two engines, please"),
    (IndexErrorOnEmpty, "an empty cluster must raise PolicyError, not IndexError"),
    (NotANumber, "not finite"),
    (Ragged, "numbers, an earlier one"),
    (RaggedProgress, "numbers, an earlier one"),
    (NegativeCheck, "check_after_tokens is -1"),
    (NoPatience, "max_wait_s is nan"),
    (AddressInRepr, "repr is not stable"),
    (Undecorated, "not a dataclass"),
]


@pytest.mark.parametrize(("make", "broken"), BAD, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_rule_is_named(make: Callable[[], Policy], broken: str) -> None:
    with pytest.raises(AssertionError, match=broken):
        check_policy(make)


def test_a_bad_decision_is_no_breach_of_contract() -> None:
    check_policy(LongestFirst)
