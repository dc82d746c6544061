"""Engines that fail: what is sent again, where, what is given up, and that nothing is left behind. In virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from chimsim.config import EngineSpec
from chimsim.errors import ChimsimError
from chimsim.live.driver import DOWN_S, Events, LiveRequest
from chimsim.live.prompts import LengthPrompts
from chimsim.records import RunResult
from chimsim.replay import PROBE_S, RETRIES, schedule
from policies import load_policy
from policies.chimera import Chimera
from policies.interface import Policy
from tests.chimsim.live.virtual import SimulatedPort, VirtualReplay, run_virtually
from tests.chimsim.worlds import TrueLengths, cluster, engine, single_stage
from traces import Trace


class FaultyPort(SimulatedPort):
    """Answers with a failure as long as ``fails`` says so; well again after ``ill_for`` probes."""

    def __init__(
        self, events: Events, spec: EngineSpec, fails: Callable[[str, LiveRequest], Any], ill_for: int
    ) -> None:
        super().__init__(events, spec)
        self._fails = fails
        self._ill_for = ill_for

    def start(self, request: LiveRequest, tokens: int, priority: int | None) -> bool:
        failure = self._fails(self.spec.name, request)
        if failure is not None:
            ill, again = failure
            error = ChimsimError(f"engine {self.spec.name} does not want to")
            self._events.on_failure(request, error, ill=ill, again=again)
            return False
        if not request.produced:
            # Sent anew: what the engine knew of it ended with the failure.
            self._known.pop(request.request_id, None)
        return super().start(request, tokens, priority)

    async def well(self) -> bool:
        self._ill_for -= 1
        return self._ill_for < 0


def replay(
    trace: Trace, policy: Policy, fails: Callable[[str, LiveRequest], Any], ill_for: int = 2, engines: int = 2
) -> tuple[RunResult, VirtualReplay]:
    names = ["A/0", "A/1"][:engines]
    spec = cluster(*(engine(name, "A", slots=2) for name in names))

    async def run() -> tuple[RunResult, VirtualReplay]:
        driver = VirtualReplay(
            spec, policy, TrueLengths(trace), lambda events, each: FaultyPort(events, each, fails, ill_for),
            LengthPrompts(0, 10, 100),
        )  # fmt: skip
        order, times = schedule(trace, None, 0, None, None, 1.0, True)
        return await driver.run(order, times, 0), driver

    return run_virtually(run())


def trace_of(calls: int) -> Trace:
    return single_stage([(20, 5 + number) for number in range(calls)], arrivals=[0.01 * n for n in range(calls)])


def nothing_left(driver: VirtualReplay) -> bool:
    dispatcher = driver._dispatcher
    return not dispatcher._requests and not driver._calls and all(state.running == 0 for state in driver._states)


@pytest.mark.parametrize("name", ["fcfs", "stjf", "mlfq", "ltr", "plas", "atlas", "chimera"])
def test_a_call_whose_engine_fails_is_served_by_another(name: str) -> None:
    policy = load_policy(name)
    result, driver = replay(trace_of(8), policy, lambda engine, _: (True, True) if engine == "A/0" else None, 10**6)
    assert result.workflows["status"].tolist() == ["completed"] * 8
    assert set(result.requests["engine"].astype(str)) == {"A/1"}
    assert any("sent again (1 of 4): engine A/0 does not want to" in line for line in driver.failures)
    assert nothing_left(driver)
    if isinstance(policy, Chimera):
        assert policy._activity.tokens("A/0") == policy._activity.tokens("A/1") == 0


def test_an_engine_that_is_well_again_gets_calls_again() -> None:
    failed: set[int] = set()

    def once(engine: str, request: LiveRequest) -> tuple[bool, bool] | None:
        if engine == "A/0" and not failed:
            failed.add(request.request_id)
            return True, True
        return None

    trace = single_stage([(20, 5)] * 8, arrivals=[float(n) for n in range(8)])
    result, driver = replay(trace, load_policy("fcfs"), once, ill_for=2)
    assert result.workflows["status"].tolist() == ["completed"] * 8
    later = result.requests[result.requests["enqueued_at"] > 3 * PROBE_S]
    assert set(later["engine"].astype(str)) == {"A/0", "A/1"}
    assert nothing_left(driver)


def test_what_no_other_try_would_help_fails_its_workflow_only() -> None:
    result, driver = replay(
        trace_of(4), load_policy("chimera"), lambda _, request: (False, False) if request.request_id == 2 else None
    )
    assert result.workflows["status"].tolist() == ["completed", "completed", "failed", "completed"]
    assert result.workflows["latency_s"].isna().tolist() == [False, False, True, False]
    assert driver.failures == ["request 2, given up: engine A/0 does not want to"] or driver.failures == [
        "request 2, given up: engine A/1 does not want to"
    ]
    assert nothing_left(driver)


def test_tries_are_limited() -> None:
    tries = []

    def never(_: str, request: LiveRequest) -> tuple[bool, bool] | None:
        if request.request_id:
            return None
        tries.append(request.attempts)
        return False, True

    result, driver = replay(trace_of(2), load_policy("stjf"), never)
    assert tries == list(range(RETRIES + 1))
    assert result.workflows["status"].tolist() == ["failed", "completed"]
    assert nothing_left(driver)


def test_calls_wait_for_the_only_engine_to_come_back() -> None:
    first = []

    def once(_: str, request: LiveRequest) -> tuple[bool, bool] | None:
        first.append(request.request_id)
        return (True, True) if len(first) == 1 else None

    result, driver = replay(trace_of(3), load_policy("chimera"), once, ill_for=20, engines=1)
    assert result.workflows["status"].tolist() == ["completed"] * 3
    assert float(result.workflows["latency_s"].max()) > 15 * PROBE_S
    assert nothing_left(driver)


def test_an_engine_that_never_comes_back_ends_the_run() -> None:
    with pytest.raises(ChimsimError, match=rf"engine A/0 did not come back for {DOWN_S:g} s; request \d+, "):
        replay(trace_of(3), load_policy("fcfs"), lambda *_: (True, True), ill_for=10**6, engines=1)
