"""The live driver: replays a trace on running engines through the same dispatcher and policies as the simulator.

It owns an asyncio loop's clock and what is on its way; what engines are is behind `Port`. An engine that fails has
its requests sent again, elsewhere if it can be, and is left alone until it answers once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
import pandas as pd

from chimsim.config import Cluster, EngineSpec
from chimsim.dispatcher import Start
from chimsim.errors import ChimsimError
from chimsim.histogram import LogHistogram
from chimsim.live.prompts import Prompts
from chimsim.predictors import Predictor
from chimsim.records import RunResult
from chimsim.replay import (
    FAILED,
    PROBE_S,
    RETRIES,
    SAMPLE_S,
    Call,
    Job,
    Order,
    Oversize,
    Queue,
    Replay,
    State,
    engine_priority,
)
from policies.interface import Policy, PolicyError

DOWN_S = 120.0
"""How long a call waits for an engine to come back when no other can serve it."""


@dataclass(slots=True)
class LiveRequest:
    """One call on its way through an engine. ``ids`` are the output tokens so far, where the engine tells them."""

    request_id: int
    prompt: tuple[int, ...] | str
    prompt_tokens: int
    output_tokens: int
    measured: bool
    exact: bool = True
    produced: int = 0
    before: int = 0
    """tokens of earlier slices, which belong to the prompt of the next"""
    ids: list[int] = field(default_factory=list)
    text: str = ""
    cached_tokens: int = 0
    preemptions: int = 0
    admitted_at: float = -1.0
    first_token_at: float = -1.0
    last_token_at: float = -1.0
    over: bool = False
    """the model ended it, whatever is missing of ``output_tokens``"""
    attempts: int = 0
    """how often it was sent again after a failure"""


class Events(Protocol):
    """What a port tells the driver; instants are seconds since the run began."""

    def now(self) -> float: ...

    def on_tokens(self, request: LiveRequest, at: float, tokens: int) -> None:
        """The request has so many output tokens by now."""

    def on_end(self, request: LiveRequest) -> None:
        """The slice is out: ``produced`` tokens of the request are there."""

    def on_failure(self, request: LiveRequest, error: ChimsimError, *, ill: bool, again: bool) -> None:
        """It got no answer. ``ill``: the engine seems to be at fault; ``again``: another try may help."""


class Port(Protocol):
    """An engine as the driver uses it. Nothing here blocks."""

    slices: bool
    """whether requests can be cut into slices and go on where they stopped"""

    def start(self, request: LiveRequest, tokens: int, priority: int | None) -> bool:
        """Send it for so many more output tokens; returns whether the engine should be looked at soon."""

    def stop(self, request: LiveRequest) -> None:
        """Take it back; ``produced`` is right afterwards."""

    def at_boundary(self, now: float, wanted: bool) -> bool:
        """Whether requests can be taken back now; always true of engines that have no step to wait for."""

    def go_on(self, now: float) -> None:
        """All that was to be sent at this instant has been."""

    def forget(self, job: int) -> None:
        """The workflow is over."""

    async def well(self) -> bool:
        """Whether the engine answers."""

    def load(self) -> tuple[int, float]:
        """Requests waiting inside the engine, and the share of its KV memory in use (NaN: not known)."""

    def numbers(self) -> Mapping[str, float]:
        """What the engine counted over the run, for the table of engines; what it does not say is left out."""


class _Engine(State):
    __slots__ = ("port", "running", "served_tokens")

    def __init__(self, index: int, spec: EngineSpec) -> None:
        super().__init__(index, spec)
        self.port: Port
        self.running = 0
        self.served_tokens = 0


@dataclass(frozen=True, slots=True)
class _Due:
    """A handler's argument; SimPy's events look the same."""

    value: Any


@dataclass(slots=True)
class Lag:
    """How late the client was: seconds from an arrival's instant to its dispatch."""

    total_s: float = 0.0
    worst_s: float = 0.0
    arrivals: int = 0


class Load(NamedTuple):
    """Of an engine: requests inside and waiting for it, output tokens that they still need, and those so far."""

    engine: str
    running: int
    waiting: int
    in_flight_tokens: int
    served_tokens: int


class LiveReplay(Replay):
    """See the module. ``prompts`` makes what is sent; ``on_sample`` hears of every sample of the load (for a table).

    ``max_tokens`` is what an answer may have where the trace's lengths do not bind (texts), default the trace's.
    """

    def __init__(
        self,
        cluster: Cluster,
        policy: Policy,
        predictor: Predictor,
        ports: Callable[[Events, EngineSpec], Port],
        prompts: Prompts,
        *,
        queue: Queue = "dispatcher",
        look_ahead: int = 0,
        oversize: Oversize = "error",
        max_tokens: int | None = None,
        log_decisions: bool = False,
        on_sample: Callable[[LiveReplay], None] | None = None,
    ) -> None:
        super().__init__(cluster, policy, predictor, queue, look_ahead, oversize, log_decisions)
        self.lag = Lag()
        self.failures: list[str] = []
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._on_sample = on_sample
        self._itl = LogHistogram()
        self._ended: list[LiveRequest] = []
        self._failed: list[tuple[LiveRequest, ChimsimError, bool, bool]] = []
        self._settling = False
        self._probes: set[asyncio.Task[None]] = set()
        self._waiting_since: dict[int, float] = {}
        self._loop = asyncio.get_running_loop()
        self._origin = self._loop.time()
        self._over: asyncio.Future[None] = self._loop.create_future()
        for state in self._states:
            state.port = ports(self, state.spec)
        self._preemptive = self._preemptive and all(state.port.slices for state in self._states)

    async def run(self, order: Order, times: npt.NDArray[np.float64], warmup: int) -> RunResult:
        """Everything from the first arrival to the last completion."""
        self._origin = self._loop.time()
        self._begin(order, times, warmup)
        sampling = self._loop.create_task(self._sample_all()) if self._on_sample is not None else None
        try:
            await self._over
        finally:
            for task in (*self._probes, *([sampling] if sampling else [])):
                task.cancel()
            for call in self._calls.values():
                if call.request is not None:
                    call.state.port.stop(call.request)
        makespan_s = self.now()
        result = self._result(self._engine_frame(makespan_s), self._itl)
        _add_shares(result, makespan_s)
        return result

    @property
    def progress(self) -> tuple[int, int]:
        """Workflows that are over, and how many there are."""
        return len(self._workflows), len(self._order)

    def loads(self) -> list[Load]:
        """How busy each engine is."""
        left = dict.fromkeys(self._by_name, 0)
        for call in self._calls.values():
            left[call.state.name] += call.request.output_tokens - call.request.produced
        return [
            Load(s.name, s.running, self._dispatcher.waiting(s.name), left[s.name], s.served_tokens)
            for s in self._states
        ]

    def now(self) -> float:
        return self._loop.time() - self._origin

    def on_tokens(self, request: LiveRequest, at: float, tokens: int) -> None:
        new = tokens - request.produced
        if new <= 0:
            return
        if request.first_token_at < 0.0:
            request.first_token_at = at
            new -= 1
        elif request.measured and request.last_token_at >= 0.0:
            # Several tokens of one chunk: each took its share of the gap.
            self._itl.add((at - request.last_token_at) / new, new)
        request.last_token_at = at
        self._calls[request.request_id].state.served_tokens += tokens - request.produced
        request.produced = tokens

    def on_end(self, request: LiveRequest) -> None:
        self._ended.append(request)
        self._wake()

    def on_failure(self, request: LiveRequest, error: ChimsimError, *, ill: bool, again: bool) -> None:
        self._failed.append((request, error, ill, again))
        self._wake()

    def _at(self, instant: float, handler: Callable[[Any], None], value: object) -> None:
        self._loop.call_at(self._origin + instant, self._fire, handler, value)

    def _fire(self, handler: Callable[[Any], None], value: object) -> None:
        handler(_Due(value))
        self._wake()

    def _wake(self) -> None:
        # Whatever else happens at this instant is in the loop's queue already, before this.
        if not self._settling:
            self._settling = True
            self._loop.call_soon(self._settle_now)

    def _settle_now(self) -> None:
        self._settling = False
        if self._over.done():
            return
        try:
            now = self.now()
            for job in self._arrived:
                late_s = now - job.arrived_at
                self.lag.total_s += late_s
                self.lag.worst_s = max(self.lag.worst_s, late_s)
                self.lag.arrivals += 1
            self._settle(now)
        except Exception as error:
            self._over.set_exception(error)
            return
        if len(self._workflows) == len(self._order):
            self._over.set_result(None)

    def _state_of(self, index: int, spec: EngineSpec) -> _Engine:
        return _Engine(index, spec)

    def _engines_ended(self, now: float) -> None:
        ended, self._ended = self._ended, []
        # Of one engine in the order in which it said so.
        for call in sorted((self._calls[request.request_id] for request in ended), key=_engine_index):
            request = call.request
            self._touch(call.state)
            if request.over or request.produced >= request.output_tokens:
                call.state.running -= 1
                request.output_tokens = request.produced
                self._complete(now, call)
            else:
                self._check(now, call)
        failed, self._failed = self._failed, []
        for request, error, ill, again in failed:
            self._fail(now, self._calls[request.request_id], error, ill, again)

    def _dispatch(self, now: float, call: Call) -> None:
        try:
            super()._dispatch(now, call)
        except PolicyError as error:
            ill = [state.name for state in self._states if not state.healthy]
            since = self._waiting_since.setdefault(call.request_id, now)
            if not ill:
                raise
            if now - since > DOWN_S:
                # What it failed with tells more than that nobody is left.
                why = self.failures[-1] if self.failures else str(error)
                raise ChimsimError(f"engine {', '.join(ill)} did not come back for {DOWN_S:g} s; {why}") from error
            self._at(now + PROBE_S, self._on_ready, call)
        else:
            self._waiting_since.pop(call.request_id, None)

    def _prepare(self, call: Call) -> None:
        job, stage = call.job, call.stage
        assert job.layout is not None
        call.request = LiveRequest(
            call.request_id,
            self._prompts.of(job.row, job.source, call.index, stage, job.layout),
            stage.prompt_tokens,
            call.output_tokens if self._prompts.exact or self._max_tokens is None else self._max_tokens,
            job.measured,
            exact=self._prompts.exact,
            attempts=call.retries,
        )

    def _hand_over(self, state: _Engine, start: Start) -> bool:
        request: LiveRequest = self._calls[start.request_id].request
        if request.admitted_at < 0.0:
            request.admitted_at = self.now()
        left = request.output_tokens - request.produced
        tokens = min(start.check_after_tokens or left, left) if state.port.slices else left
        request.before = request.produced
        state.running += 1
        priority = engine_priority(state.spec, start) if self._in_engine else None
        return state.port.start(request, tokens, priority)

    def _withdraw(self, now: float, call: Call) -> int:
        state: _Engine = call.state
        state.running -= 1
        request: LiveRequest = call.request
        state.port.stop(request)
        return request.produced

    def _at_boundary(self, now: float, state: _Engine, wanted: bool) -> bool:
        return state.port.at_boundary(now, wanted)

    def _go_on(self, now: float, state: _Engine) -> None:
        state.port.go_on(now)
        if now >= state.next_sample_at:
            waiting, used = state.port.load()
            self._sample(now, state, state.running, waiting, used)

    def _forget(self, job: Job) -> None:
        self._prompts.forget(job.row)
        for state in job.engines:
            cast(_Engine, state).port.forget(job.row)

    def _complete(self, now: float, call: Call) -> None:
        request: LiveRequest = call.request
        self._prompts.answered(call.job.row, call.index, request.prompt, request.ids, request.text)
        super()._complete(now, call)

    def _fail(self, now: float, call: Call, error: ChimsimError, ill: bool, again: bool) -> None:
        state: _Engine = call.state
        state.running -= 1
        self._touch(state)
        if ill and state.healthy:
            self._set_health(state, False)
            probe = self._loop.create_task(self._probe(state))
            self._probes.add(probe)
            probe.add_done_callback(self._probes.discard)
        if not again:
            self._abandon(now, call, FAILED)
        elif self._send_again(now, call):
            self.failures.append(f"request {call.request_id}, sent again ({call.retries} of {RETRIES}): {error}")
            return
        self.failures.append(f"request {call.request_id}, given up: {error}")

    async def _probe(self, state: _Engine) -> None:
        """Ask an engine that failed until it answers."""
        while not await state.port.well():
            await asyncio.sleep(PROBE_S)
        self._set_health(state, True)

    async def _sample_all(self) -> None:
        while True:
            if self._on_sample is not None:
                self._on_sample(self)
            await asyncio.sleep(SAMPLE_S)

    def _engine_frame(self, makespan_s: float) -> pd.DataFrame:
        rows = []
        for state in self._states:
            rows.append(
                {
                    "engine": state.name,
                    "model": state.model,
                    "output_tokens": state.served_tokens,
                    "yields": state.yields,
                    "requests": state.requests,
                    "mean_waiting": self._dispatcher.total_wait_s(state.name) / makespan_s if makespan_s else 0.0,
                    "max_batch_size": state.spec.max_batch_size,
                    "makespan_s": makespan_s,
                    **state.port.numbers(),
                }
            )
        return pd.DataFrame(rows)


def _engine_index(call: Call) -> int:
    return int(call.state.index)


def _add_shares(result: RunResult, makespan_s: float) -> None:
    """What the engines' table takes from the requests: an engine is busy while it has one, from send to end."""
    engines, requests = result.engines, result.requests[result.requests["status"] == "completed"]
    sums = requests.groupby("engine", observed=True)[["service_s", "prompt_tokens", "cached_tokens"]].sum()
    sums = sums.reindex(engines["engine"].astype(str)).fillna(0.0).reset_index(drop=True)
    engines["mean_running"] = sums["service_s"] / makespan_s
    engines["prefill_tokens"] = sums["prompt_tokens"] - sums["cached_tokens"]
    engines["cached_tokens"] = sums["cached_tokens"]
    busy = [_covered_s(requests[requests["engine"].astype(str) == str(name)]) for name in engines["engine"]]
    engines["busy_s"] = busy


def _covered_s(requests: pd.DataFrame) -> float:
    """Seconds in which at least one of the requests was between its first send and its end."""
    total = until = 0.0
    for begin, end in requests[["admitted_at", "finished_at"]].sort_values("admitted_at").itertuples(index=False):
        total += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return total
