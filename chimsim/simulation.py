"""The SimPy driver: replays a trace on simulated engines, feeding the dispatcher stage by stage.

It owns the clock. All events of one instant are gathered first and then settled in one order: what ended on the
engines (by name, then in order of admission), each followed by its workflow's next stage; then the stages that are
ready are dispatched, then free slots are filled, then steps start.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import inf, nan
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import pandas as pd
from simpy import Environment
from simpy.events import Event

from chimsim.config import Cluster, EngineSpec
from chimsim.dispatcher import Dispatcher, Outcome, Start
from chimsim.engine import Engine, EngineRequest, footprint_of
from chimsim.errors import ChimsimError
from chimsim.histogram import LogHistogram
from chimsim.kvcache import Footprint, KVCache
from chimsim.predictors import FinishedStage, PredictionInput, Predictor, build_predictor
from chimsim.records import Columns, RunResult, frame_of
from chimsim.ticks import HORIZON_S, exact, exact_not_before
from policies import load_policy
from policies.interface import EngineView, Policy, Prediction, RequestView
from traces import Run, Stage, Trace, Workflow
from traces import arrivals as arriving

Oversize = Literal["error", "reject", "clip"]
Queue = Literal["dispatcher", "engine"]
SAMPLE_S = 1.0
COMPLETED, REJECTED = 0, 1
STATUS = ("completed", "rejected")


def stream(seed: int, name: str) -> np.random.Generator:
    """The random stream of one consumer: drawing more from one never moves another."""
    return np.random.default_rng([seed, *name.encode()])


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
) -> RunResult:
    """Replay ``workflows`` workflows of the trace (default: each once) until the last one is done.

    They arrive at ``rps`` workflows a second (Poisson; ``burstiness`` as in `traces.arrivals.gamma`), at the given
    ``arrivals`` (instants in seconds), or, with neither, when the trace says. The order of the workflows is drawn
    from ``seed`` unless the trace's own arrivals are used; more than it has are taken in further rounds. The first
    ``warmup`` are left out of the metrics. ``queue`` says where requests wait: in front of the engine, at most
    ``max_batch_size + look_ahead`` of them inside, or all in the engine. A call that can never fit is an ``error``,
    is answered like vLLM's 400 (``reject``: its workflow fails), or has its output shortened (``clip``).

    ``policy`` is a policy or a name for `policies.load_policy`, ``predictor`` by default the trace's recorded
    confidences (labels where there are none) with true lengths.

    Raises one of the packages' errors (all are ValueErrors) when the input does not fit together.
    """
    if isinstance(policy, str):
        policy = load_policy(policy)
    if predictor is None:
        predictor = build_predictor(trace, router=_default_router(trace))
    order, times = _schedule(trace, rps, seed, arrivals, workflows, burstiness, shuffle)
    driver = _Driver(cluster, policy, predictor, queue, look_ahead, oversize, engine_class, log_decisions)
    with _without_collector():
        return driver.run(order, times, warmup)


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


def fit(spec: EngineSpec, prompt_tokens: int, output_tokens: int) -> int:
    """The output tokens that an engine can give this call: its own number, fewer, or 0 if the prompt is too long."""
    kv_tokens = (spec.num_kv_blocks - 1) * spec.block_tokens
    # The last token's keys and values are never stored.
    room = min(spec.max_model_len - prompt_tokens, kv_tokens + 1 - prompt_tokens)
    return max(min(output_tokens, room), 0)


def idle_latency_s(spec: EngineSpec, run: Run, overhead_s: float = 0.0) -> float:
    """End-to-end seconds of a workflow's stages alone on an idle engine, tool delays and ``overhead_s`` included.

    What an engine does with one request at a time: prefill in chunks of the token budget after what the previous
    stage left in the prefix cache, then one decode step a token.
    """
    block, budget, profile = spec.block_tokens, spec.max_num_batched_tokens, spec.profile
    constant, slope = exact(profile.decode_constant_s(1)), exact(profile.decode_slope_s())
    cache = KVCache(spec.num_kv_blocks - 1, block, caching=spec.prefix_caching)
    reused = tuple(stage.reused_tokens for stage in run.stages)
    total_s = exact_not_before(overhead_s)
    for index, stage in enumerate(run.stages):
        prompt = stage.prompt_tokens
        output = fit(spec, prompt, stage.output_tokens)
        footprint = _footprint(spec, 0, index, reused, stage)
        hits, _ = cache.lookup(footprint, prompt)
        cache.admit(footprint, hits)
        footprint.blocks = -(-(prompt + output - 1) // block)
        cache.allocate(footprint.blocks - hits)
        cache.register(footprint, prompt // block)
        cache.release(footprint, prompt + output - 1)
        computed = hits * block
        while computed < prompt:
            chunk = min(prompt - computed, budget)
            total_s += exact(profile.mixed_step_s(0, 0, [(chunk, computed)]))
            computed += chunk
        steps = output - 1
        total_s += steps * (constant + slope * prompt) + slope * (steps * (steps - 1) // 2)
        if index:
            total_s += exact_not_before(stage.delay_s)
    return total_s


def _footprint(spec: EngineSpec, owner: object, index: int, reused: Sequence[int], stage: Stage) -> Footprint:
    prefix = stage.shared_prefix
    shared = None if prefix is None else (prefix.id, prefix.tokens)
    return footprint_of(
        owner, index, reused, spec.block_tokens, stage.prompt_tokens, shared, stage.hash_ids, stage.hash_block_tokens
    )


def _default_router(trace: Trace) -> str:
    if all(workflow.confidence for workflow in trace.workflows):
        return "trace"
    labelled = all(run.solved is not None for workflow in trace.workflows for run in workflow.runs.values())
    return "oracle" if labelled else "none"


def _schedule(
    trace: Trace,
    rps: float | None,
    seed: int,
    given: Sequence[float] | npt.NDArray[np.float64] | None,
    workflows: int | None,
    burstiness: float,
    shuffle: bool,
) -> tuple[list[tuple[Workflow, int]], npt.NDArray[np.float64]]:
    """The workflows in order of arrival, each with the number of its round, and when they arrive."""
    if not trace.workflows:
        raise ChimsimError(f"trace {trace.name!r} has no workflows")
    count = len(trace.workflows) if workflows is None else workflows
    if count < 1:
        raise ChimsimError(f"workflows: expected a positive integer, found {count}")
    if given is not None and rps is not None:
        raise ChimsimError("give either rps or arrivals, not both")
    if given is not None:
        times = np.asarray(given, dtype=np.float64)
        if len(times) < count:
            raise ChimsimError(f"arrivals: {len(times)} instants for {count} workflows")
        times = times[:count]
        if not np.isfinite(times).all() or (times < 0).any() or (np.diff(times) < 0).any():
            raise ChimsimError("arrivals: expected finite instants from 0 on that do not fall")
    elif rps is not None:
        times = arriving.gamma(count, rps, burstiness, stream(seed, "arrivals"))
    else:
        recorded = arriving.by_arrival(trace)
        if count > len(recorded):
            raise ChimsimError(
                f"workflows: {count} asked for, but trace {trace.name!r} has {len(recorded)} recorded arrivals; "
                "give a rate (rps) instead"
            )
        return [(workflow, 0) for workflow in recorded[:count]], arriving.recorded(trace)[:count]
    draw = stream(seed, "workflow order")
    order: list[tuple[Workflow, int]] = []
    for round_ in range(-(-count // len(trace.workflows))):
        picks: Iterable[int] = range(len(trace.workflows))
        if shuffle:
            picks = draw.permutation(len(trace.workflows)).tolist()
        order.extend((trace.workflows[pick], round_) for pick in picks)
    return order[:count], times


class _Job:
    """A workflow in the system."""

    __slots__ = (
        "arrived_at", "engines", "finished", "measured", "mixed", "model", "output_tokens", "prompt_tokens",
        "queue_time_s", "reused", "row", "run", "source", "stage", "workflow_id",
    )  # fmt: skip

    def __init__(self, row: int, source: Workflow, workflow_id: str, arrived_at: float, measured: bool) -> None:
        self.row = row
        self.source = source
        self.workflow_id = workflow_id
        self.arrived_at = arrived_at
        self.measured = measured
        self.stage = 0
        self.run: Run | None = None
        self.model = ""
        self.mixed = False
        self.engines: list[_State] = []
        self.finished: tuple[FinishedStage, ...] = ()
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.queue_time_s = 0.0
        self.reused: tuple[int, ...] = ()


class _Call:
    """One stage of a job on its way: ready, waiting, running."""

    __slots__ = ("enqueued_at", "job", "prediction", "ready_at", "request", "request_id", "stage", "state", "yields")

    def __init__(self, request_id: int, job: _Job, ready_at: float, prediction: Prediction, stage: Stage) -> None:
        self.request_id = request_id
        self.job = job
        self.ready_at = ready_at
        self.prediction = prediction
        self.stage = stage
        self.enqueued_at = ready_at
        self.yields = 0
        self.request: EngineRequest
        self.state: _State


class _State:
    """An engine and what the driver knows of it."""

    __slots__ = ("engine", "index", "model", "name", "next_sample_at", "requests", "spec", "touched", "yields")

    def __init__(self, index: int, spec: EngineSpec, engine: Engine) -> None:
        self.index = index
        self.spec = spec
        self.engine = engine
        self.name = spec.name
        self.model = spec.model
        self.touched = False
        self.next_sample_at = 0.0
        self.requests = 0
        self.yields = 0


REQUEST_COLUMNS = {
    "request_id": "q", "workflow": "q", "workflow_id": "l", "stage": "b", "stage_name": "h", "engine": "h",
    "model": "h", "prompt_tokens": "l", "cached_tokens": "l", "output_tokens": "l", "ready_at": "d",
    "enqueued_at": "d", "admitted_at": "d", "first_token_at": "d", "finished_at": "d", "service_s": "d",
    "preemptions": "l", "yields": "l", "promotions": "l", "longest_wait_s": "d", "status": "b", "measured": "b",
}  # fmt: skip
WORKFLOW_COLUMNS = {
    "workflow": "q", "workflow_id": "l", "source_id": "l", "workload": "h", "arrived_at": "d", "finished_at": "d",
    "latency_s": "d", "stages": "h", "prompt_tokens": "q", "output_tokens": "q", "queue_time_s": "d",
    "idle_latency_s": "d", "slowdown": "d", "solved": "d", "model": "h", "mixed_models": "b", "status": "b",
    "measured": "b",
}  # fmt: skip
TIMELINE_COLUMNS = {"engine": "h", "time_s": "d", "running": "l", "waiting": "l", "kv_used_fraction": "d"}


class _Codes(dict[str, int]):
    """Names by their order of first appearance."""

    def __missing__(self, name: str) -> int:
        code = self[name] = len(self)
        return code


class _Driver:
    def __init__(
        self,
        cluster: Cluster,
        policy: Policy,
        predictor: Predictor,
        queue: Queue,
        look_ahead: int,
        oversize: Oversize,
        engine_class: Callable[[EngineSpec], Engine],
        log_decisions: bool,
    ) -> None:
        in_engine = queue == "engine"
        self._in_engine = in_engine
        specs = sorted(cluster.engines, key=lambda spec: spec.name)
        self._states = [_State(index, spec, engine_class(spec)) for index, spec in enumerate(specs)]
        self._by_name = {state.name: state for state in self._states}
        self._models = cluster.models
        self._model_codes = {model: code for code, model in enumerate(self._models)}
        views = [view_of(spec) for spec in specs]
        self._dispatcher = Dispatcher(policy, views, look_ahead=look_ahead, queue_in_engine=in_engine)
        self._preemptive = policy.preemptive and not in_engine
        self._predictor = predictor
        self._first_overhead_s = exact_not_before(predictor.router_s + predictor.predictor_s)
        self._overhead_s = exact_not_before(predictor.predictor_s)
        self._oversize = oversize
        self._env = Environment()
        self._calls: dict[int, _Call] = {}
        self._arrived: list[_Job] = []
        self._due: list[_State] = []
        self._ready: list[_Call] = []
        self._woken: list[_Job] = []
        self._touched: list[_State] = []
        self._next_id = 0
        self._requests = Columns(REQUEST_COLUMNS)
        self._workflows = Columns(WORKFLOW_COLUMNS)
        self._timeline = Columns(TIMELINE_COLUMNS)
        self._stage_codes = _Codes()
        self._workload_codes = _Codes()
        self._source_codes = _Codes()
        self._workflow_ids: list[str] = []
        self._idle: dict[tuple[int, str, str], float] = {}
        self._log: list[tuple[Any, ...]] | None = [] if log_decisions else None

    def run(self, order: Sequence[tuple[Workflow, int]], times: npt.NDArray[np.float64], warmup: int) -> RunResult:
        """Everything from the first arrival to the last completion."""
        self._order = order
        self._warmup = warmup
        self._times = [exact(float(time)) for time in times]
        self._row = 0
        self._at(self._times[0], self._on_arrival, None)
        env = self._env
        now = 0.0
        while (instant := env.peek()) != inf:
            now = instant
            if now >= HORIZON_S:
                raise ChimsimError(f"the run is longer than {HORIZON_S / 86400:.2g} days of simulated time")
            while env.peek() == now:
                env.step()
            self._settle(now)
        if self._calls:
            raise RuntimeError(f"{len(self._calls)} requests never finished")
        return self._result(now)

    def _at(self, instant: float, handler: Callable[[Any], None], value: object) -> None:
        event = Event(self._env)
        event._ok = True
        event._value = value
        event.callbacks = [handler]
        self._env.schedule(event, delay=instant - self._env.now)

    def _on_arrival(self, event: Event) -> None:
        row = self._row
        source, round_ = self._order[row]
        workflow_id = f"{source.workflow_id}#{round_ + 1}" if round_ else source.workflow_id
        self._arrived.append(_Job(row, source, workflow_id, self._env.now, row >= self._warmup))
        self._workflow_ids.append(workflow_id)
        self._row = row = row + 1
        if row < len(self._order):
            self._at(self._times[row], self._on_arrival, None)

    def _on_engine(self, event: Event) -> None:
        state = cast(_State, event.value)
        if state.engine.end_at == self._env.now and state not in self._due:
            self._due.append(state)

    def _on_ready(self, event: Event) -> None:
        self._ready.append(cast(_Call, event.value))

    def _on_delay_over(self, event: Event) -> None:
        self._woken.append(cast(_Job, event.value))

    def _on_deadline(self, event: Event) -> None:
        self._touch(cast(_State, event.value))

    def _touch(self, state: _State) -> None:
        if not state.touched:
            state.touched = True
            self._touched.append(state)

    def _settle(self, now: float) -> None:
        due = self._due
        if due:
            if len(due) > 1:
                due.sort(key=_index)
            for state in due:
                self._touch(state)
                for request in state.engine.finish():
                    call = self._calls[request.request_id]
                    if request.produced >= request.output_tokens:
                        self._complete(now, call)
                    else:
                        self._check(now, call)
            due.clear()
        for job in self._woken:
            self._stage_ready(now, job)
        self._woken.clear()
        for job in self._arrived:
            self._stage_ready(now, job)
        self._arrived.clear()
        ready = self._ready
        if ready:
            if len(ready) > 1:
                ready.sort(key=_number)
            self._ready = []
            for call in ready:
                self._dispatch(now, call)
        touched = self._touched
        if touched:
            if len(touched) > 1:
                touched.sort(key=_index)
            self._touched = []
            idle = [state for state in touched if self._fill(now, state)]
            for state in idle:
                self._start(now, state)

    def _stage_ready(self, now: float, job: _Job) -> None:
        """The job's next stage can be sent: predict, and dispatch it once the predictors had their time."""
        source = job.source
        run = job.run or source.runs[self._models[0]]
        stage = run.stages[job.stage]
        prediction = self._predictor.predict(
            PredictionInput(
                source.workflow_id, source.workload, job.stage, stage.name, self._models, stage.prompt_tokens,
                stage.system_tokens, stage.user_tokens, stage.prompt or source.prompt, job.finished,
            )
        )  # fmt: skip
        call = _Call(self._next_id, job, now, prediction, stage)
        self._next_id += 1
        overhead_s = self._overhead_s if job.stage else self._first_overhead_s
        if overhead_s:
            self._at(now + overhead_s, self._on_ready, call)
        else:
            self._ready.append(call)

    def _dispatch(self, now: float, call: _Call) -> None:
        job = call.job
        stage = call.stage
        call.enqueued_at = now
        view = RequestView(
            call.request_id, job.workflow_id, job.source.workload, job.stage, stage.name, now, job.arrived_at,
            stage.prompt_tokens, call.prediction,
        )  # fmt: skip
        decision = self._dispatcher.submit(now, view)
        state = call.state = self._by_name[decision.engine]
        if self._log is not None:
            self._log.append((now, call.request_id, decision.engine, decision.priority))
        self._calls[call.request_id] = call
        run = job.source.runs[state.model]
        if job.run is not None:
            job.mixed = job.mixed or state.model != job.model
            if job.stage >= len(run.stages):
                run = job.run  # this model knows no such stage: the call keeps the lengths it was heading for
        job.model = state.model
        if run is not job.run:
            job.run = run
            job.reused = tuple(stage.reused_tokens for stage in run.stages)
            call.stage = stage = run.stages[job.stage]
        if state not in job.engines:
            job.engines.append(state)
        spec = state.spec
        output_tokens = stage.output_tokens
        room = fit(spec, stage.prompt_tokens, output_tokens)
        if room < output_tokens:
            if self._oversize == "error":
                raise ChimsimError(oversize_message(job.workflow_id, job.stage, stage, spec))
            if self._oversize == "reject" or room < 1:
                self._reject(now, call)
                return
            output_tokens = room
        footprint = _footprint(spec, job.row, job.stage, job.reused, stage)
        call.request = EngineRequest(
            call.request_id, stage.prompt_tokens, output_tokens, footprint, measured=job.measured
        )
        self._touch(state)
        self._watch_deadline(call)

    def _watch_deadline(self, call: _Call) -> None:
        """A promotion may take a slot, so that the engine has to be looked at when it falls due."""
        if self._preemptive:
            deadline_at = self._dispatcher.next_deadline(call.request_id)
            if deadline_at < inf:
                self._at(exact_not_before(deadline_at), self._on_deadline, call.state)

    def _check(self, now: float, call: _Call) -> None:
        request = call.request
        again = self._dispatcher.progress(now, call.request_id, request.produced)
        if again is None:
            self._yield(now, call)
        else:
            call.state.engine.check_after(request, again)

    def _yield(self, now: float, call: _Call) -> None:
        produced = call.state.engine.remove(call.request, now)
        self._dispatcher.leave(now, call.request_id, produced)
        call.yields += 1
        call.state.yields += 1
        self._watch_deadline(call)

    def _fill(self, now: float, state: _State) -> bool:
        """Fill the engine's free slots; returns whether a step can start now."""
        state.touched = False
        engine = state.engine
        dispatcher = self._dispatcher
        cut = False
        for start in dispatcher.fill(now, state.name):
            cut = self._hand_over(state, start) or cut
        preempt = self._preemptive and dispatcher.wants_slot(now, state.name)
        if engine.busy:
            if not (cut or preempt):
                return False
            before = engine.end_at
            end_at = engine.cut(now)
            if end_at > now:
                if end_at != before:
                    self._at(end_at, self._on_engine, state)
                return False
            engine.finish()
        while preempt:
            worst = dispatcher.take_back(now, state.name)
            if worst is None:
                break
            self._yield(now, self._calls[worst])
            for start in dispatcher.fill(now, state.name):
                self._hand_over(state, start)
        return True

    def _hand_over(self, state: _State, start: Start) -> bool:
        request = self._calls[start.request_id].request
        if self._in_engine:
            request.priority = self._engine_priority(state, start)
        request.check_at = request.produced + start.check_after_tokens if start.check_after_tokens else 0
        return state.engine.submit(request)

    def _engine_priority(self, state: _State, start: Start) -> tuple[float, ...]:
        """vLLM's priority is one integer."""
        if not start.priority:
            return (0.0,)
        if state.spec.scheduling != "priority":
            raise ChimsimError(
                f"engine {state.name} runs with scheduling fcfs and would ignore the policy's order; with the queue "
                'in the engine use scheduling = "priority"'
            )
        return (float(round(start.priority[0])),)

    def _start(self, now: float, state: _State) -> None:
        engine = state.engine
        end_at = engine.start(now)
        if end_at is not None:
            self._at(end_at, self._on_engine, state)
        if now >= state.next_sample_at:
            state.next_sample_at = now + SAMPLE_S
            waiting = engine.waiting + self._dispatcher.waiting(state.name)
            self._timeline.append((state.index, now, engine.running, waiting, engine.kv_used_fraction))

    def _complete(self, now: float, call: _Call) -> None:
        job = call.job
        request = call.request
        run = job.run
        assert run is not None
        last = job.stage + 1 >= len(run.stages)
        state = call.state
        outcome = self._dispatcher.complete(now, call.request_id, request.output_tokens, last=last)
        del self._calls[call.request_id]
        state.requests += 1
        queue_time_s = request.admitted_at - call.ready_at
        job.queue_time_s += queue_time_s
        job.prompt_tokens += request.prompt_tokens
        job.output_tokens += request.output_tokens
        self._record(call, outcome, request.first_token_at, now, COMPLETED)
        name = call.stage.name
        job.finished = (
            *job.finished,
            FinishedStage(name, state.model, request.prompt_tokens, request.output_tokens),
        )
        job.stage += 1
        if last:
            self._finish(now, job, COMPLETED)
            return
        delay_s = run.stages[job.stage].delay_s
        if delay_s:
            self._at(now + exact_not_before(delay_s), self._on_delay_over, job)
        else:
            self._stage_ready(now, job)

    def _reject(self, now: float, call: _Call) -> None:
        outcome = self._dispatcher.complete(now, call.request_id, 0, "failed", last=True)
        del self._calls[call.request_id]
        call.request = EngineRequest(call.request_id, call.stage.prompt_tokens, 0, footprint_of(0, 0, (), 1, 0))
        call.request.measured = call.job.measured
        call.request.admitted_at = nan
        self._record(call, outcome, nan, nan, REJECTED)
        self._finish(now, call.job, REJECTED)

    def _record(self, call: _Call, outcome: Outcome, first_token_at: float, now: float, status: int) -> None:
        job = call.job
        request = call.request
        state = call.state
        self._requests.append(
            (
                call.request_id, job.row, job.row, job.stage, self._stage_codes[call.stage.name], state.index,
                self._model_codes[state.model], request.prompt_tokens, request.cached_tokens, request.output_tokens,
                call.ready_at, call.enqueued_at, request.admitted_at, first_token_at, now, outcome.service_s,
                request.preemptions, call.yields, outcome.promotions, outcome.longest_wait_s, status, job.measured,
            )
        )  # fmt: skip

    def _finish(self, now: float, job: _Job, status: int) -> None:
        for state in job.engines:
            state.engine.kv.forget(job.row)
        assert job.run is not None
        label = job.run.solved
        solved = nan if label is None else float(label)
        if status == COMPLETED:
            finished_at = now
            latency_s = now - job.arrived_at
            idle_s = self._idle_latency_s(job)
            slowdown = latency_s / idle_s
        else:
            finished_at = latency_s = idle_s = slowdown = nan
            if label is not None:
                solved = 0.0
        self._workflows.append(
            (
                job.row, job.row, self._source_codes[job.source.workflow_id],
                self._workload_codes[job.source.workload], job.arrived_at, finished_at, latency_s, job.stage,
                job.prompt_tokens, job.output_tokens, job.queue_time_s, idle_s, slowdown, solved,
                self._model_codes[job.model], job.mixed, status, job.measured,
            )
        )  # fmt: skip

    def _idle_latency_s(self, job: _Job) -> float:
        """Of the run that the workflow ended with, on the engine of its last call."""
        state = job.engines[-1]
        key = (self._source_codes[job.source.workflow_id], job.model, state.name)
        known = self._idle.get(key)
        if known is None:
            run = job.source.runs[job.model]
            overhead_s = self._first_overhead_s + self._overhead_s * (len(run.stages) - 1)
            known = self._idle[key] = idle_latency_s(state.spec, run, overhead_s=overhead_s)
        return known

    def _result(self, makespan_s: float) -> RunResult:
        engines = [state.name for state in self._states]
        requests = frame_of(
            self._requests,
            {
                "workflow_id": self._workflow_ids,
                "stage_name": list(self._stage_codes),
                "engine": engines,
                "model": self._models,
                "status": STATUS,
            },
            flags=("measured",),
            order="request_id",
        )
        workflows = frame_of(
            self._workflows,
            {
                "workflow_id": self._workflow_ids,
                "source_id": list(self._source_codes),
                "workload": list(self._workload_codes),
                "model": self._models,
                "status": STATUS,
            },
            flags=("mixed_models", "measured"),
            order="workflow",
        )
        itl = LogHistogram()
        for state in self._states:
            itl.merge(state.engine.itl)
        return RunResult(
            requests,
            workflows,
            self._engine_frame(makespan_s),
            frame_of(self._timeline, {"engine": engines}),
            itl,
            self._log or [],
        )

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
                }
            )
        return pd.DataFrame(rows)


def view_of(spec: EngineSpec) -> EngineView:
    """The engine as policies see it before anything runs."""
    return EngineView(spec.name, spec.model, spec.max_batch_size, spec.profile.decode_s_per_token(spec.max_batch_size))


def oversize_message(workflow_id: str, index: int, stage: Stage, spec: EngineSpec) -> str:
    """What to say of a stage that can never fit on the engine."""
    kv_tokens = (spec.num_kv_blocks - 1) * spec.block_tokens
    needed = stage.prompt_tokens + stage.output_tokens
    if needed > spec.max_model_len:
        limit = f"max_model_len {spec.max_model_len} tokens"
    else:
        limit = f"KV memory for {kv_tokens} tokens"
    return (
        f"workflow {workflow_id}, stage {index} ({stage.name}): {stage.prompt_tokens} prompt + {stage.output_tokens} "
        f"output tokens do not fit engine {spec.name} ({limit}); use --oversize reject or --oversize clip"
    )


def _index(state: _State) -> int:
    return state.index


def _number(call: _Call) -> int:
    return call.request_id
