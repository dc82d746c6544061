"""The live driver without engines and without waiting: a loop whose clock jumps, and ports to simulated engines."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping, Sequence
from math import inf, nan
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from chimsim.config import Cluster, EngineSpec
from chimsim.engine import Engine, EngineRequest
from chimsim.errors import ChimsimError
from chimsim.failures import Spell
from chimsim.layout import Layout
from chimsim.live.driver import Events, LiveReplay, LiveRequest
from chimsim.live.prompts import LengthPrompts
from chimsim.predictors import Predictor
from chimsim.records import RunResult
from chimsim.replay import Order, Queue
from policies.interface import Policy
from traces import Stage

T = TypeVar("T")


class _Jump(selectors.DefaultSelector):
    """Waiting takes no time: the clock is put forward instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("the loop waits for something that never comes")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)
        # Timers closer together than this count as due at once; instants are multiples of 2^-34 s.
        self._clock_resolution = 2.0**-36

    def time(self) -> float:
        return self._jump.now


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class SimulatedPort:
    """A port to a simulated engine, on the loop's time."""

    slices = True

    def __init__(self, events: Events, spec: EngineSpec) -> None:
        self.spec = spec
        self.engine = Engine(spec)
        self._events = events
        self._inside: dict[int, tuple[LiveRequest, EngineRequest]] = {}
        self._known: dict[int, EngineRequest] = {}
        self.stages: dict[int, tuple[Layout, int, Stage]] = {}
        self._due_at = -1.0
        self.down = False

    def fail(self, now: float) -> None:
        """The server dies: all connections break."""
        self.down = True
        self.engine.fail(now)
        inside, self._inside = self._inside, {}
        for request_id in sorted(inside):
            request, inner = inside[request_id]
            request.produced = inner.produced
            self._break(request)

    def _break(self, request: LiveRequest) -> None:
        self._known.pop(request.request_id, None)
        self._events.on_failure(request, ChimsimError(f"engine {self.spec.name} is gone"), ill=True, again=True)

    def start(self, request: LiveRequest, tokens: int, priority: int | None) -> bool:
        if self.down:
            self._break(request)
            return False
        inner = self._known.get(request.request_id)
        if inner is None:
            layout, index, stage = self.stages[request.request_id]
            held = layout.footprint(self.spec, index, stage)
            inner = EngineRequest(request.request_id, request.prompt_tokens, request.output_tokens, held)
            self._known[request.request_id] = inner
        inner.priority = () if priority is None else (float(priority),)
        left = request.output_tokens - request.produced
        inner.check_at = inner.produced + tokens if tokens < left else 0
        self._inside[request.request_id] = (request, inner)
        return self.engine.submit(inner)

    def stop(self, request: LiveRequest) -> None:
        entry = self._inside.pop(request.request_id, None)
        if entry is not None:
            request.produced = self.engine.remove(entry[1], self._events.now())

    def at_boundary(self, now: float, wanted: bool) -> bool:
        engine = self.engine
        if not engine.busy:
            return True
        if not wanted:
            return False
        if engine.cut(now) > now:
            self._plan(engine.end_at)
            return False
        engine.finish()
        return True

    def go_on(self, now: float) -> None:
        end_at = self.engine.start(now)
        if end_at is not None:
            self._plan(end_at)

    def _plan(self, end_at: float) -> None:
        if end_at != self._due_at:
            self._due_at = end_at
            asyncio.get_running_loop().call_at(end_at, self._on_step, end_at)

    def _on_step(self, end_at: float) -> None:
        if self.engine.end_at != end_at:
            return
        self._due_at = -1.0
        for inner in self.engine.finish():
            request = self._inside[inner.request_id][0]
            request.produced = inner.produced
            request.first_token_at, request.admitted_at = inner.first_token_at, inner.admitted_at
            if inner.produced >= inner.output_tokens:
                del self._inside[inner.request_id]
            self._events.on_end(request)
        self._events.on_step(self)  # type: ignore[attr-defined]

    def forget(self, job: int) -> None:
        self.engine.kv.forget(job)

    async def well(self) -> bool:
        return True

    def load(self) -> tuple[int, float]:
        return self.engine.waiting, nan

    def numbers(self) -> Mapping[str, float]:
        return {}


class VirtualReplay(LiveReplay):
    """The live driver, which tells simulated ports what a real engine reads from the prompt.

    With ``outages`` it hears at once that a server is gone or back, where the real one finds out.
    """

    outages: Sequence[Spell] = ()

    def _prepare(self, call: Any) -> None:
        super()._prepare(call)
        job = call.job
        call.state.port.stages[call.request_id] = (job.layout, call.index, call.stage)

    def _begin(self, order: Any, times: Any, warmup: int) -> None:
        super()._begin(order, times, warmup)
        self._turned: list[tuple[bool, str]] = []
        for spell in self.outages:
            self._at(spell.begin_s, self._on_turn, (True, spell.name))
            if spell.end_s < inf:
                self._at(spell.end_s, self._on_turn, (False, spell.name))

    def _on_turn(self, event: Any) -> None:
        self._turned.append(event.value)

    def _engines_ended(self, now: float) -> None:
        super()._engines_ended(now)
        for down, name in sorted(self._turned):
            state = self._by_name[name]
            self._set_health(state, not down)
            if down:
                state.port.fail(now)
            else:
                state.port.down = False
            self._touch(state)
        self._turned.clear()
        super()._engines_ended(now)

    def on_step(self, port: SimulatedPort) -> None:
        """A step is over, whether or not a request is: the engine has to go on."""
        self._touch(self._by_name[port.spec.name])
        self._wake()


def replay_virtually(
    cluster: Cluster,
    policy: Policy,
    predictor: Predictor,
    order: Order,
    times: npt.NDArray[np.float64],
    *,
    queue: Queue = "dispatcher",
    look_ahead: int = 0,
    outages: Sequence[Spell] = (),
) -> RunResult:
    """A run of the live driver on simulated engines, at once."""

    async def run() -> RunResult:
        driver = VirtualReplay(
            cluster, policy, predictor, SimulatedPort, LengthPrompts(0, 10, 100),
            queue=queue, look_ahead=look_ahead, log_decisions=True,
        )  # fmt: skip
        driver.outages = outages
        return await driver.run(order, times, 0)

    return run_virtually(run())
