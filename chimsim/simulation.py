"""The SimPy driver: replays a trace on simulated engines. It owns the clock; what happens is in `chimsim.replay`.

Engines that fail, come back or change their speed do so right after what ended on the engines at that instant, before
any stage is dispatched: an answer that is whole by then is out, and whoever is ready then sees the new state.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil, inf
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pandas as pd
from simpy import Environment
from simpy.events import NORMAL, Event

from chimsim.config import Cluster, EngineSpec
from chimsim.dispatcher import Start
from chimsim.engine import Engine, EngineRequest
from chimsim.errors import ChimsimError
from chimsim.failures import Spell, check_names, on_engines, parse_outage, parse_slowdown
from chimsim.histogram import LogHistogram
from chimsim.predictors import Predictor, build_predictor
from chimsim.records import RunResult
from chimsim.replay import (
    PROBE_S,
    Call,
    Job,
    Order,
    Oversize,
    Queue,
    Replay,
    State,
    default_router,
    engine_priority,
    index_of,
    number_of,
    schedule,
)
from chimsim.ticks import HORIZON_S, exact_not_before
from chimsim.timer import Timer
from policies import load_policy
from policies.interface import Policy, PolicyError
from traces import Trace


def simulate(
    trace: Trace,
    cluster: Cluster,
    policy: Policy | str,
    *,
    rps: float | None = None,
    seed: int = 0,
    predictor: Predictor | None = None,
    arrivals: Sequence[float] | npt.NDArray[np.float64] | None = None,
    workflows: int | None = None,
    warmup: int = 0,
    burstiness: float = 1.0,
    queue: Queue = "dispatcher",
    look_ahead: int = 0,
    oversize: Oversize = "error",
    shuffle: bool = True,
    log_decisions: bool = False,
    engine_class: Callable[[EngineSpec], Engine] = Engine,
    hop_s: float = 0.0,
    fail: Sequence[str] = (),
    slow: Sequence[str] = (),
) -> RunResult:
    """Replay ``workflows`` workflows of the trace (default: each once) until the last one is done.

    They arrive at ``rps`` workflows a second (Poisson; ``burstiness`` as in `traces.arrivals.gamma`), at the given
    ``arrivals`` (instants in seconds), or, with neither, when the trace says. The order of the workflows is drawn
    from ``seed`` unless the trace's own arrivals are used; more than it has are taken in further rounds. The first
    ``warmup`` are left out of the metrics. ``queue`` says where requests wait: in front of the engine, at most
    ``max_batch_size + look_ahead`` of them inside, or all in the engine. A call that can never fit is an ``error``,
    is answered like vLLM's 400 (``reject``: its workflow fails), or has its output shortened (``clip``). ``hop_s`` is
    the round trip between dispatcher and engine: a slot that falls free is filled so much later, and however short that
    is, the step that begins at that instant is missed. ``fail`` and ``slow`` are outages and slow engines, written as
    in `chimsim.failures`.

    ``policy`` is a policy or a name for `policies.load_policy`, ``predictor`` by default the trace's recorded
    confidences (labels where there are none) with true lengths.

    Raises one of the packages' errors (all are ValueErrors) when the input does not fit together.
    """
    if isinstance(policy, str):
        policy = load_policy(policy)
    if predictor is None:
        predictor = build_predictor(trace, router=default_router(trace))
    order, times = schedule(trace, rps, seed, arrivals, workflows, burstiness, shuffle)
    spells = [*(parse_outage(text, "fail") for text in fail), *(parse_slowdown(text, "slow") for text in slow)]
    check_names(spells, [cluster], "fail and slow")
    down = on_engines((spell for spell in spells if spell.down), cluster, "fail")
    slower = on_engines((spell for spell in spells if not spell.down), cluster, "slow")
    with _without_collector():
        # Nothing but the result is there when the collector comes back, and looks at all that is new.
        return _Simulation(
            cluster, policy, predictor, queue, look_ahead, oversize, log_decisions, engine_class, hop_s, down, slower
        ).run(order, times, warmup)


@contextmanager
def _without_collector() -> Iterator[None]:
    """No cyclic garbage collection meanwhile.

    A run makes next to no cycles, while every full collection walks the whole trace: without it a run of 10,000
    calls took a third less CPU time, at the same peak memory.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Engine(State):
    __slots__ = ("down_s", "down_since", "engine", "wanted")

    def __init__(self, index: int, spec: EngineSpec, engine: Engine) -> None:
        super().__init__(index, spec)
        self.engine = engine
        self.down_s = 0.0
        self.down_since = 0.0
        self.wanted = False  # something arrived that a stretch under way should be cut for

    def down_s_until(self, now: float) -> float:
        """Seconds that it was down, the outage that it may be in included."""
        return self.down_s if self.healthy else self.down_s + now - self.down_since


class _Simulation(Replay):
    def __init__(
        self,
        cluster: Cluster,
        policy: Policy,
        predictor: Predictor,
        queue: Queue,
        look_ahead: int,
        oversize: Oversize,
        log_decisions: bool,
        engine_class: Callable[[EngineSpec], Engine],
        hop_s: float,
        outages: Sequence[Spell],
        slowdowns: Sequence[Spell],
    ) -> None:
        self._engine_class = engine_class
        self._env = Environment()
        self._now = 0.0
        self._due: list[_Engine] = []
        self._hop_s = exact_not_before(hop_s)
        self._on_way: dict[int, object] = {}
        self._spells = [*outages, *slowdowns]
        self._turned: list[tuple[Spell, bool]] = []
        super().__init__(cluster, policy, predictor, queue, look_ahead, oversize, log_decisions, bool(outages))

    def run(self, order: Order, times: npt.NDArray[np.float64], warmup: int) -> RunResult:
        """Everything from the first arrival to the last completion."""
        self._begin(order, times, warmup)
        for spell in self._spells:
            self._at(spell.begin_s, self._on_turn, (spell, True))
            if spell.end_s < inf:
                self._at(spell.end_s, self._on_turn, (spell, False))
        step, peek, settle = self._env.step, self._env.peek, self._settle
        now, instant = 0.0, peek()
        # Spells that come after the last workflow are of no run.
        while instant != inf and not (self._spells and len(self._workflows) == len(order)):
            self._now = now = instant
            if now >= HORIZON_S:
                raise ChimsimError(f"the run is longer than {HORIZON_S / 86400:.2g} days of simulated time")
            while instant == now:
                step()
                instant = peek()
            settle(now)
            instant = peek()
        if self._calls:
            raise RuntimeError(f"{len(self._calls)} requests never finished")
        itl = LogHistogram()
        for state in self._states:
            itl.merge(state.engine.itl)
        return self._result(self._engine_frame(now), itl)

    def _state_of(self, index: int, spec: EngineSpec) -> _Engine:
        return _Engine(index, spec, self._engine_class(spec))

    def _at(self, instant: float, handler: Callable[[Any], None], value: object) -> None:
        env = self._env
        env.schedule(Timer(env, handler, value), NORMAL, instant - self._now)

    def _on_engine(self, event: Event) -> None:
        state: _Engine = event._value
        # Not if the stretch was cut meanwhile.
        if state.engine.end_at == self._now and state not in self._due:
            self._due.append(state)

    def _engines_ended(self, now: float) -> None:
        due = self._due
        if due:
            if len(due) > 1:
                due.sort(key=index_of)
            calls = self._calls
            for state in due:
                self._touch(state)
                for request in state.engine.finish():
                    call = calls[request.request_id]
                    if request.produced >= request.output_tokens:
                        self._complete(now, call)
                    else:
                        self._check(now, call)
            due.clear()
        if self._turned:
            self._take_turns(now)

    def _on_turn(self, event: Event) -> None:
        self._turned.append(cast(tuple[Spell, bool], event.value))

    def _take_turns(self, now: float) -> None:
        """Let spells end and begin, in this order: one may follow another at the same instant."""
        for spell, begins in sorted(self._turned, key=_turn_order):
            state = cast(_Engine, self._by_name[spell.name])
            if not spell.down:
                state.engine.slow_down(spell.factor if begins else 1.0)
                state.wanted = True  # steps of a stretch that begin from now on have the other speed
            elif begins:
                self._go_down(now, state)
            else:
                state.down_s += now - state.down_since
                self._set_health(state, True)
            self._touch(state)
        self._turned.clear()

    def _go_down(self, now: float, state: _Engine) -> None:
        """All calls inside are lost, and those on their way; who waits for the engine is refused in `_fill`."""
        state.down_since = now
        self._set_health(state, False)
        state.engine.fail(now)
        lost = [
            call for call in self._calls.values() if call.state is state and self._dispatcher.inside(call.request_id)
        ]
        for call in sorted(lost, key=number_of):
            self._on_way.pop(call.request_id, None)
            self._send_again(now, call)

    def _fill(self, now: float, state: State) -> bool:
        if state.healthy:
            return super()._fill(now, state)
        # As with a server that is not there: whoever is sent to it fails at once.
        state.touched = False
        while starts := self._dispatcher.fill(now, state.name):
            for start in starts:
                self._send_again(now, self._calls[start.request_id])
        return False

    def _dispatch(self, now: float, call: Call) -> None:
        try:
            super()._dispatch(now, call)
        except PolicyError:
            # Nobody that may serve it is well: as the live driver does, it asks again every second, if with use.
            back_s = min((s.end_s for s in self._spells if s.down and s.begin_s <= now < s.end_s), default=inf)
            if back_s == inf:
                raise
            self._at(now + PROBE_S * ceil((back_s - now) / PROBE_S), self._on_ready, call)

    def _prepare(self, call: Call) -> None:
        job, stage = call.job, call.stage
        assert job.layout is not None
        held = job.layout.footprint(call.state.spec, call.index, stage)
        call.request = EngineRequest(
            call.request_id, stage.prompt_tokens, call.output_tokens, held, measured=job.measured
        )

    def _hand_over(self, state: _Engine, start: Start) -> bool:
        request = cast(EngineRequest, self._calls[start.request_id].request)
        if self._in_engine:
            request.priority = (float(engine_priority(state.spec, start)),)
        request.check_at = request.produced + start.check_after_tokens if start.check_after_tokens else 0
        if not self._hop_s:
            return state.engine.submit(request)
        sent = self._on_way[request.request_id] = object()
        self._at(self._now + self._hop_s, self._on_hop, (state, request, sent))
        return False

    def _on_hop(self, event: Event) -> None:
        state, request, sent = cast(tuple[_Engine, EngineRequest, object], event.value)
        if self._on_way.get(request.request_id) is sent:
            del self._on_way[request.request_id]
            state.wanted = state.engine.submit(request) or state.wanted
            self._touch(state)

    def _withdraw(self, now: float, call: Call) -> int:
        if self._on_way.pop(call.request_id, None) is not None:
            return cast(EngineRequest, call.request).produced
        return cast(_Engine, call.state).engine.remove(call.request, now)

    def _at_boundary(self, now: float, state: _Engine, wanted: bool) -> bool:
        engine = state.engine
        wanted, state.wanted = wanted or state.wanted, False
        if not engine.busy:
            return True
        if not wanted:
            return False
        before = engine.end_at
        end_at = engine.cut(now)
        if end_at > now:
            if end_at != before:
                self._at(end_at, self._on_engine, state)
            return False
        engine.finish()
        return True

    def _go_on(self, now: float, state: _Engine) -> None:
        engine = state.engine
        end_at = engine.start(now)
        if end_at is not None:
            self._at(end_at, self._on_engine, state)
        if now >= state.next_sample_at:
            self._sample(now, state, engine.running, engine.waiting, engine.kv_used_fraction)

    def _forget(self, job: Job) -> None:
        for state in job.engines:
            cast(_Engine, state).engine.kv.forget(job.row)

    def _engine_frame(self, makespan_s: float) -> pd.DataFrame:
        rows = []
        for state in self._states:
            engine = state.engine
            rows.append(
                {
                    "engine": state.name,
                    "model": state.model,
                    "busy_s": engine.busy_s,
                    "steps": engine.steps,
                    "prefill_tokens": engine.prefill_tokens,
                    "cached_tokens": engine.cached_tokens,
                    "output_tokens": engine.output_tokens,
                    "preemptions": engine.preemptions,
                    "yields": state.yields,
                    "requests": state.requests,
                    "max_running": engine.max_running,
                    "mean_running": engine.running_s / makespan_s if makespan_s else 0.0,
                    "mean_waiting": self._dispatcher.total_wait_s(state.name) / makespan_s if makespan_s else 0.0,
                    "peak_kv_tokens": engine.peak_blocks * state.spec.block_tokens,
                    "num_kv_tokens": engine.kv.num_blocks * state.spec.block_tokens,
                    "max_batch_size": state.spec.max_batch_size,
                    "makespan_s": makespan_s,
                    **({"down_s": state.down_s_until(makespan_s)} if self._failing else {}),
                }
            )
        return pd.DataFrame(rows)


def _turn_order(turn: tuple[Spell, bool]) -> tuple[bool, str]:
    spell, begins = turn
    return begins, spell.name
