"""A trace on its way through a cluster: workflows arrive, are predicted stage by stage, dispatched and recorded.

What the simulated and the live driver share. It has neither a clock nor engines: a driver says what ended, when it
is, and does what is asked for. All events of one instant are gathered first and then settled in one order: what ended
on the engines (by name, then in order of admission), each followed by its workflow's next stage; then the stages
that are ready are dispatched, then free slots are filled, then engines go on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from math import inf, nan
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd
from mypy_extensions import mypyc_attr

from calibration.rows import FinishedStage, PredictionInput
from chimsim.config import Cluster, EngineSpec
from chimsim.dispatcher import Dispatcher, Outcome, Start
from chimsim.errors import ChimsimError
from chimsim.histogram import LogHistogram
from chimsim.idle import idle_latency_s, longest_sequence, oversize_message
from chimsim.layout import Layout
from chimsim.predictors import Predictor
from chimsim.records import Columns, RunResult, frame_of
from chimsim.ticks import HORIZON_S, exact_all, exact_not_before
from policies.interface import EngineView, Policy, Prediction, RequestView
from traces import Run, Stage, Trace, Workflow
from traces import arrivals as arriving
from traces.columns import columns_of
from traces.graph import children, parents

Oversize = Literal["error", "reject", "clip"]
Queue = Literal["dispatcher", "engine"]
SAMPLE_S = 1.0
RETRIES = 4
"""How often a call is sent again before its workflow is given up."""
BACKOFF_S = 0.5
"""Before the first retry; doubled every time."""
PROBE_S = 1.0
"""How often a call that no engine can serve, or an engine that failed, is tried again."""
COMPLETED, REJECTED, FAILED = 0, 1, 2
STATUS = ("completed", "rejected", "failed")


def stream(seed: int, name: str) -> np.random.Generator:
    """The random stream of one consumer: drawing more from one never moves another."""
    return np.random.default_rng([seed, *name.encode()])


def default_router(trace: Trace) -> str:
    if all(workflow.confidence for workflow in trace.workflows):
        return "trace"
    columns = columns_of(trace)
    labelled = not any(np.isnan(runs.solved[runs.present]).any() for runs in map(columns.runs, columns.models))
    return "oracle" if labelled else "none"


class Order:
    """Workflows in order of arrival, each with the number of its round through the trace; built when asked for.

    ``picks`` are their numbers in the trace. A list of them would keep every run of a large trace in memory.
    """

    def __init__(self, workflows: Sequence[Workflow], picks: npt.NDArray[np.int64]) -> None:
        self._workflows = workflows
        self._picks = array("q", picks.tobytes())  # gives plain integers, faster than NumPy does

    def __len__(self) -> int:
        return len(self._picks)

    @property
    def comes_again(self) -> bool:
        """Whether any workflow comes more than once."""
        return len(self._picks) > len(self._workflows)

    def __getitem__(self, row: int) -> tuple[Workflow, int]:
        return self._workflows[self._picks[row]], row // len(self._workflows)


def schedule(
    trace: Trace,
    rps: float | None,
    seed: int,
    given: Sequence[float] | npt.NDArray[np.float64] | None,
    workflows: int | None,
    burstiness: float,
    shuffle: bool,
) -> tuple[Order, npt.NDArray[np.float64]]:
    """The workflows in order of arrival, and when they arrive."""
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
        recorded = np.array(arriving.arrival_order(trace), np.int64)
        if count > len(recorded):
            raise ChimsimError(
                f"workflows: {count} asked for, but trace {trace.name!r} has {len(recorded)} recorded arrivals; "
                "give a rate (rps) instead"
            )
        return Order(trace.workflows, recorded[:count]), arriving.recorded(trace)[:count]
    if not times[-1] < HORIZON_S:
        raise ChimsimError(
            f"arrivals: the last workflow comes after {times[-1]:.3g} s; expected at most the {HORIZON_S / 86400:.2g} "
            "days that a run may have (is rps too low?)"
        )
    draw = stream(seed, "workflow order")
    size = len(trace.workflows)
    rounds = [draw.permutation(size) if shuffle else np.arange(size) for _ in range(-(-count // size))]
    return Order(trace.workflows, np.concatenate(rounds)[:count].astype(np.int64)), times


class Job:
    """A workflow in the system."""

    __slots__ = (
        "arrived_at", "begun", "children", "done", "engines", "finished", "in_flight", "layout", "measured", "mixed",
        "model", "output_tokens", "prompt_tokens", "queue_time_s", "row", "run", "source", "status", "workflow_id",
    )  # fmt: skip

    def __init__(self, row: int, source: Workflow, workflow_id: str, arrived_at: float, measured: bool) -> None:
        self.row = row
        self.source = source
        self.workflow_id = workflow_id
        self.arrived_at = arrived_at
        self.measured = measured
        self.run: Run | None = None
        self.layout: Layout | None = None
        self.children: list[list[int]] | None = None  # of a graph's stages; None: a chain
        self.begun = 0  # bit i: stage i is on its way or done
        self.done = 0
        self.in_flight = 0
        self.status = COMPLETED  # what it will have been, as far as is known
        self.model = ""
        self.mixed = False
        self.engines: list[State] = []
        self.finished: tuple[FinishedStage, ...] = ()
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.queue_time_s = 0.0

    def follow(self, run: Run) -> None:
        """Go on as another model's run says, or begin."""
        self.run = run
        self.layout = Layout(self.row, run)
        self.children = None if self.layout.chain else children(run.stages)

    def following(self, index: int) -> list[int]:
        """The stages that are ready now that stage ``index`` is done."""
        assert self.run is not None
        if self.status != COMPLETED:
            return []
        stages = self.run.stages
        if self.children is None:
            return [index + 1] if index + 1 < len(stages) else []
        # Another model's graph may have other stages ready than those behind this one.
        candidates = range(len(stages)) if self.mixed or index >= len(stages) else self.children[index]
        return self.ready_among(candidates)

    def ready_among(self, candidates: Iterable[int]) -> list[int]:
        """Those stages that have not begun, and for which all that they wait for is done."""
        assert self.run is not None
        stages, begun, done = self.run.stages, self.begun, self.done
        return [
            index for index in candidates
            if not begun >> index & 1 and all(done >> parent & 1 for parent in parents(stages, index))
        ]  # fmt: skip


class Call:
    """One stage of a job on its way: ready, waiting, running."""

    __slots__ = (
        "enqueued_at", "index", "job", "lost_tokens", "output_tokens", "prediction", "ready_at", "request",
        "request_id", "retries", "sent_at", "stage", "state", "yields",
    )  # fmt: skip

    def __init__(
        self, request_id: int, job: Job, index: int, ready_at: float, prediction: Prediction, stage: Stage
    ) -> None:
        self.request_id = request_id
        self.job = job
        self.index = index
        self.ready_at = ready_at
        self.prediction = prediction
        self.stage = stage
        self.sent_at = -1.0  # first dispatched, or tried to be
        self.enqueued_at = ready_at
        self.retries = 0
        self.lost_tokens = 0  # of tries that an engine failed
        self.yields = 0
        self.output_tokens = 0
        self.request: Any = None  # the driver's own, see `Replay._prepare`
        self.state: Any = None


@mypyc_attr(allow_interpreted_subclasses=True)
class State:
    """An engine and what a replay knows of it; drivers add the engine itself."""

    __slots__ = (
        "healthy", "index", "longest_tokens", "model", "model_code", "name", "next_sample_at", "requests", "spec",
        "touched", "yields",
    )  # fmt: skip

    def __init__(self, index: int, spec: EngineSpec) -> None:
        self.index = index
        self.spec = spec
        self.name = spec.name
        self.model = spec.model
        self.model_code = 0  # its number among the cluster's models
        self.longest_tokens = longest_sequence(spec)
        self.healthy = True
        self.touched = False
        self.next_sample_at = 0.0
        self.requests = 0
        self.yields = 0


class Happening(Protocol):
    """What a handler is called with; SimPy's events are such."""

    @property
    def value(self) -> Any: ...


REQUEST_COLUMNS = {
    "request_id": "i", "workflow": "i", "workflow_id": "i", "stage": "h", "stage_name": "h", "engine": "h",
    "model": "h", "prompt_tokens": "i", "cached_tokens": "i", "output_tokens": "i", "ready_at": "d",
    "enqueued_at": "d", "admitted_at": "d", "first_token_at": "d", "finished_at": "d", "service_s": "d",
    "preemptions": "i", "yields": "i", "promotions": "i", "longest_wait_s": "d", "status": "b", "measured": "b",
}  # fmt: skip
RETRY_COLUMNS = {"retries": "b", "lost_tokens": "q", "lost_s": "d"}
"""More columns of the requests, where engines may fail."""
WORKFLOW_COLUMNS = {
    "workflow": "i", "workflow_id": "i", "source_id": "i", "workload": "h", "arrived_at": "d", "finished_at": "d",
    "latency_s": "d", "stages": "h", "prompt_tokens": "q", "output_tokens": "q", "queue_time_s": "d",
    "idle_latency_s": "d", "slowdown": "d", "solved": "d", "model": "h", "mixed_models": "b", "status": "b",
    "measured": "b",
}  # fmt: skip
TIMELINE_COLUMNS = {"engine": "h", "time_s": "d", "running": "i", "waiting": "i", "kv_used_fraction": "d"}


class _Codes(dict[str, int]):
    """Names by their order of first appearance."""

    def __missing__(self, name: str) -> int:
        code = self[name] = len(self)
        return code


@mypyc_attr(allow_interpreted_subclasses=True)
class Replay(ABC):
    """See the module. A driver subclasses it and gives it time and engines."""

    def __init__(
        self,
        cluster: Cluster,
        policy: Policy,
        predictor: Predictor,
        queue: Queue,
        look_ahead: int,
        oversize: Oversize,
        log_decisions: bool,
        failing: bool = False,
    ) -> None:
        self._in_engine = queue == "engine"
        specs = sorted(cluster.engines, key=lambda spec: spec.name)
        self._states = [self._state_of(index, spec) for index, spec in enumerate(specs)]
        self._by_name = {state.name: state for state in self._states}
        self._models = cluster.models
        self._model_codes = {model: code for code, model in enumerate(self._models)}
        for state in self._states:
            state.model_code = self._model_codes[state.model]
        views = [view_of(spec) for spec in specs]
        self._dispatcher = Dispatcher(policy, views, look_ahead=look_ahead, queue_in_engine=self._in_engine)
        self._preemptive = policy.preemptive and not self._in_engine
        self._predictor = predictor
        self._reads_prompts = getattr(predictor, "reads_prompts", True)
        self._first_overhead_s = exact_not_before(predictor.router_s + predictor.predictor_s)
        self._overhead_s = exact_not_before(predictor.predictor_s)
        self._oversize = oversize
        self._calls: dict[int, Call] = {}
        self._arrived: list[Job] = []
        self._ready: list[Call] = []
        self._woken: list[tuple[Job, int]] = []
        self._touched: list[Any] = []
        self._next_id = 0
        self._failing = failing
        self._requests = Columns(REQUEST_COLUMNS | RETRY_COLUMNS if failing else REQUEST_COLUMNS)
        self._workflows = Columns(WORKFLOW_COLUMNS)
        self._timeline = Columns(TIMELINE_COLUMNS)
        self._stage_codes = _Codes()
        self._workload_codes = _Codes()
        self._source_codes = _Codes()
        self._workflow_ids: list[str] = []
        self._idle: dict[tuple[int, str, str], float] = {}
        self._log: list[tuple[Any, ...]] | None = [] if log_decisions else None

    @abstractmethod
    def _state_of(self, index: int, spec: EngineSpec) -> Any:
        """The driver's `State` of an engine."""

    @abstractmethod
    def _at(self, instant: float, handler: Callable[[Any], None], value: object) -> None:
        """Call the handler with a `Happening` at that instant, and settle after it."""

    @abstractmethod
    def _engines_ended(self, now: float) -> None:
        """Tell `_complete` and `_check` of the calls that ended or are due on the engines, and touch those."""

    @abstractmethod
    def _prepare(self, call: Call) -> None:
        """Make ``call.request`` for ``call.output_tokens``.

        It says ``prompt_tokens``, ``output_tokens``, ``produced``, ``cached_tokens``, ``preemptions``, ``admitted_at``
        and ``first_token_at``.
        """

    @abstractmethod
    def _hand_over(self, state: Any, start: Start) -> bool:
        """Let the engine have a request; returns whether it should be looked at before its step or stretch ends."""

    @abstractmethod
    def _withdraw(self, now: float, call: Call) -> int:
        """Take a running request out of its engine; returns the output tokens that it has."""

    @abstractmethod
    def _at_boundary(self, now: float, state: Any, wanted: bool) -> bool:
        """Whether requests can be taken out and steps begin now; ``wanted``: be there as soon as it can be."""

    @abstractmethod
    def _go_on(self, now: float, state: Any) -> None:
        """Let an engine that is at a boundary take its next step."""

    @abstractmethod
    def _forget(self, job: Job) -> None:
        """The workflow is over: what engines keep of it can go."""

    def _begin(self, order: Order, times: npt.NDArray[np.float64], warmup: int) -> None:
        """Plan the first arrival."""
        self._order = order
        self._warmup = warmup
        self._times = array("d", exact_all(times).tobytes())
        self._row = 0
        self._at(self._times[0], self._on_arrival, None)

    def _on_arrival(self, event: Happening) -> None:
        times, arrived_at = self._times, self._times[self._row]
        # All of one instant at once: a driver may settle between two timers.
        while self._row < len(self._order) and times[self._row] == arrived_at:
            row = self._row
            source, round_ = self._order[row]
            workflow_id = f"{source.workflow_id}#{round_ + 1}" if round_ else source.workflow_id
            self._arrived.append(Job(row, source, workflow_id, arrived_at, row >= self._warmup))
            self._workflow_ids.append(workflow_id)
            self._row = row + 1
        if self._row < len(self._order):
            self._at(times[self._row], self._on_arrival, None)

    def _on_ready(self, event: Happening) -> None:
        self._ready.append(event.value)

    def _on_delay_over(self, event: Happening) -> None:
        self._woken.append(event.value)

    def _on_deadline(self, event: Happening) -> None:
        self._touch(event.value)

    def _touch(self, state: Any) -> None:
        if not state.touched:
            state.touched = True
            self._touched.append(state)

    def _settle(self, now: float) -> None:
        self._engines_ended(now)
        woken = self._woken
        if woken:
            if len(woken) > 1:
                woken.sort(key=_place)
            for job, index in woken:
                self._stage_ready(now, job, index)
            woken.clear()
        for job in self._arrived:
            self._begin_stage(now, job, 0)
        self._arrived.clear()
        # Again where a graph begins with several stages: the others follow the first, which chooses the model.
        while ready := self._ready:
            if len(ready) > 1:
                ready.sort(key=number_of)
            self._ready = []
            for call in ready:
                self._dispatch(now, call)
        touched = self._touched
        if touched:
            if len(touched) > 1:
                touched.sort(key=index_of)
            self._touched = []
            idle = [state for state in touched if self._fill(now, state)]
            for state in idle:
                self._go_on(now, state)

    def _begin_stage(self, now: float, job: Job, index: int) -> None:
        """All that the stage waits for is done: it is ready now, or after its delay."""
        job.begun |= 1 << index
        job.in_flight += 1
        delay_s = job.run.stages[index].delay_s if job.run is not None else 0.0
        if delay_s:
            self._at(now + exact_not_before(delay_s), self._on_delay_over, (job, index))
        else:
            self._stage_ready(now, job, index)

    def _stage_ready(self, now: float, job: Job, index: int) -> None:
        """A stage can be sent: predict, and dispatch it once the predictors had their time."""
        source = job.source
        run = job.run or source.runs[self._models[0]]
        if job.status != COMPLETED or index >= len(run.stages):
            # While it waited the workflow failed, or went on as another model's graph, which has no such stage.
            self._skip(now, job, index)
            return
        stage = run.stages[index]
        prompt = (stage.prompt or source.prompt) if self._reads_prompts else None
        prediction = self._predictor.predict(
            PredictionInput(
                source.workflow_id, source.workload, index, stage.name, self._models, stage.prompt_tokens,
                stage.system_tokens, stage.user_tokens, prompt, job.finished,
            )
        )  # fmt: skip
        call = Call(self._next_id, job, index, now, prediction, stage)
        self._next_id += 1
        overhead_s = self._overhead_s if job.run is not None else self._first_overhead_s
        if overhead_s:
            self._at(now + overhead_s, self._on_ready, call)
        else:
            self._ready.append(call)

    def _dispatch(self, now: float, call: Call) -> None:
        job = call.job
        stage = call.stage
        call.enqueued_at = now
        if call.sent_at < 0.0:
            call.sent_at = now
        view = RequestView(
            call.request_id, job.workflow_id, job.source.workload, call.index, stage.name, now, job.arrived_at,
            stage.prompt_tokens, call.prediction, self._waited_for(job, call.index),
        )  # fmt: skip
        decision = self._dispatcher.submit(now, view, self._among(call))
        state = call.state = self._by_name[decision.engine]
        if self._log is not None:
            self._log.append((now, call.request_id, decision.engine, decision.priority))
        self._calls[call.request_id] = call
        run = job.source.runs[state.model]
        first = job.run is None
        if job.run is not None:
            job.mixed = job.mixed or state.model != job.model
            if call.index >= len(run.stages):
                run = job.run  # this model knows no such stage: the call keeps the lengths it was heading for
        job.model = state.model
        if run is not job.run:
            job.follow(run)
            call.stage = stage = run.stages[call.index]
            if first and job.children is not None:
                for index in job.ready_among(range(len(run.stages))):
                    self._begin_stage(now, job, index)
        if state not in job.engines:
            job.engines.append(state)
        output_tokens = stage.output_tokens
        room = state.longest_tokens - stage.prompt_tokens
        if room < output_tokens:
            if self._oversize == "error":
                raise ChimsimError(oversize_message(job.workflow_id, call.index, stage, state.spec))
            if self._oversize == "reject" or room < 1:
                self._abandon(now, call, REJECTED)
                return
            output_tokens = room
        call.output_tokens = output_tokens
        self._prepare(call)
        self._touch(state)
        self._watch_deadline(call)

    def _watch_deadline(self, call: Call) -> None:
        """A promotion may take a slot, so that the engine has to be looked at when it falls due."""
        if self._preemptive:
            deadline_at = self._dispatcher.next_deadline(call.request_id)
            if deadline_at < inf:
                self._at(exact_not_before(deadline_at), self._on_deadline, call.state)

    def _check(self, now: float, call: Call) -> None:
        """A slice of ``check_after_tokens`` is out: the request leaves its engine, and comes back at once if it may.

        vLLM takes no new order for a request that runs, so that a slice is a request of its own there, which finds
        what it computed so far in the prefix cache: whole blocks.
        """
        again = self._dispatcher.progress(now, call.request_id, call.request.produced)
        if again is None:
            self._yield(now, call)
        else:
            self._withdraw(now, call)
            self._hand_over(call.state, Start(call.request_id, again, ()))

    def _yield(self, now: float, call: Call) -> None:
        produced = self._withdraw(now, call)
        self._dispatcher.leave(now, call.request_id, produced)
        call.yields += 1
        call.state.yields += 1
        self._watch_deadline(call)

    def _fill(self, now: float, state: Any) -> bool:
        """Fill the engine's free slots, and take slots back for better requests; returns whether it can go on now."""
        state.touched = False
        dispatcher = self._dispatcher
        wanted = False
        for start in dispatcher.fill(now, state.name):
            wanted = self._hand_over(state, start) or wanted
        preempt = self._preemptive and dispatcher.wants_slot(now, state.name)
        if not self._at_boundary(now, state, wanted or preempt):
            return False
        while preempt:
            worst = dispatcher.take_back(now, state.name)
            if worst is None:
                break
            self._yield(now, self._calls[worst])
            for start in dispatcher.fill(now, state.name):
                self._hand_over(state, start)
        return True

    def _sample(self, now: float, state: State, running: int, waiting: int, kv_used_fraction: float) -> None:
        state.next_sample_at = now + SAMPLE_S
        waiting += self._dispatcher.waiting(state.name)
        self._timeline.append(state.index, now, running, waiting, kv_used_fraction)

    def _complete(self, now: float, call: Call) -> None:
        job = call.job
        request = call.request
        job.done |= 1 << call.index
        job.in_flight -= 1
        following = job.following(call.index)
        last = not following and not job.in_flight
        state = call.state
        outcome = self._dispatcher.complete(now, call.request_id, request.output_tokens, last=last)
        del self._calls[call.request_id]
        state.requests += 1
        queue_time_s = request.admitted_at - call.ready_at
        job.queue_time_s += queue_time_s
        job.prompt_tokens += request.prompt_tokens
        job.output_tokens += request.output_tokens
        self._record(call, outcome, request.first_token_at, now, COMPLETED)
        job.finished = (
            *job.finished,
            FinishedStage(call.index, call.stage.name, state.model, request.prompt_tokens, request.output_tokens),
        )
        if last:
            self._finish(now, job)
            return
        for index in following:
            self._begin_stage(now, job, index)

    def _set_health(self, state: State, healthy: bool) -> None:
        state.healthy = healthy
        self._dispatcher.set_health(state.name, healthy)

    def _send_again(self, now: float, call: Call) -> bool:
        """An engine failed the call, whatever it had is lost: it is dispatched anew, after a pause.

        False where it has been tried often enough: then it is given up.
        """
        call.lost_tokens += call.request.produced
        if call.retries >= RETRIES:
            self._abandon(now, call, FAILED)
            return False
        call.retries += 1
        self._dispatcher.complete(now, call.request_id, call.request.produced, "failed", last=False)
        del self._calls[call.request_id]
        self._at(now + BACKOFF_S * 2.0 ** (call.retries - 1), self._on_ready, call)
        return True

    def _abandon(self, now: float, call: Call, status: int) -> None:
        """The call gets no answer: its workflow ends there, once what else of it is on its way is over."""
        job = call.job
        job.in_flight -= 1
        job.status = status
        last = not job.in_flight
        outcome = self._dispatcher.complete(now, call.request_id, 0, "failed", last=last)
        del self._calls[call.request_id]
        call.output_tokens = 0
        self._prepare(call)
        call.request.admitted_at = nan
        self._record(call, outcome, nan, nan, status)
        if last:
            self._finish(now, job)

    def _skip(self, now: float, job: Job, index: int) -> None:
        """A stage that is not to be: of a workflow that has failed meanwhile, or of a graph left behind."""
        job.in_flight -= 1
        job.done |= 1 << index
        following = job.following(index)
        for each in following:
            self._begin_stage(now, job, each)
        if not following and not job.in_flight:
            self._dispatcher.forget(now, job.workflow_id)
            self._finish(now, job)

    def _among(self, call: Call) -> frozenset[str] | None:
        """The engines that the policy may send the call to; None: all.

        After a failure another engine of the model, if one is well: an engine may fail calls and seem healthy.
        """
        if not call.retries:
            return None
        same = (s.name for s in self._states if s.healthy and s is not call.state and s.model == call.state.model)
        return frozenset(same) or None

    def _waited_for(self, job: Job, index: int) -> tuple[int, ...]:
        """The stages that the policy is told this one goes on from."""
        if job.children is None:
            return (index - 1,) if index else ()
        assert job.run is not None
        return parents(job.run.stages, index) if index < len(job.run.stages) else ()

    def _record(self, call: Call, outcome: Outcome, first_token_at: float, now: float, status: int) -> None:
        job = call.job
        request = call.request
        state = call.state
        retries = (call.retries, call.lost_tokens, call.enqueued_at - call.sent_at) if self._failing else ()
        self._requests.append(
            call.request_id, job.row, job.row, call.index, self._stage_codes[call.stage.name], state.index,
            state.model_code, request.prompt_tokens, request.cached_tokens, request.output_tokens,
            call.ready_at, call.enqueued_at, request.admitted_at, first_token_at, now, outcome.service_s,
            request.preemptions, call.yields, outcome.promotions, outcome.longest_wait_s, status, job.measured,
            *retries,
        )  # fmt: skip

    def _finish(self, now: float, job: Job) -> None:
        self._forget(job)
        assert job.run is not None
        label = job.run.solved
        solved = nan if label is None else float(label)
        if job.status == COMPLETED:
            finished_at = now
            latency_s = now - job.arrived_at
            idle_s = self._idle_latency_s(job)
            slowdown = latency_s / idle_s
        else:
            finished_at = latency_s = idle_s = slowdown = nan
            if label is not None:
                solved = 0.0
        self._workflows.append(
            job.row, job.row, self._source_codes[job.source.workflow_id],
            self._workload_codes[job.source.workload], job.arrived_at, finished_at, latency_s, len(job.finished),
            job.prompt_tokens, job.output_tokens, job.queue_time_s, idle_s, slowdown, solved,
            self._model_codes[job.model], job.mixed, job.status, job.measured,
        )  # fmt: skip

    def _idle_latency_s(self, job: Job) -> float:
        """Of the run that the workflow ended with, on the engine of its last call."""
        state = job.engines[-1]
        key = (self._source_codes[job.source.workflow_id], job.model, state.name)
        known = self._idle.get(key)
        if known is None:
            run = job.source.runs[job.model]
            known = idle_latency_s(state.spec, run, self._first_overhead_s, self._overhead_s)
            if self._order.comes_again:
                self._idle[key] = known
        return known

    def _result(self, engine_frame: pd.DataFrame, itl: LogHistogram) -> RunResult:
        """Everything that was recorded."""
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
        return RunResult(
            requests,
            workflows,
            engine_frame,
            frame_of(self._timeline, {"engine": engines}),
            itl,
            self._log or [],
        )


def engine_priority(spec: EngineSpec, start: Start) -> int:
    """The policy's order as vLLM takes it: one integer. Raises `ChimsimError` where the engine would ignore it."""
    if not start.priority:
        return 0
    if spec.scheduling != "priority":
        raise ChimsimError(
            f"engine {spec.name} runs with scheduling fcfs and would ignore the policy's order; with the queue in the "
            'engine use scheduling = "priority"'
        )
    return round(start.priority[0])


def view_of(spec: EngineSpec) -> EngineView:
    """The engine as policies see it before anything runs."""
    return EngineView(spec.name, spec.model, spec.max_batch_size, spec.profile.decode_s_per_token(spec.max_batch_size))


def index_of(state: State) -> int:
    return state.index


def number_of(call: Call) -> int:
    return call.request_id


def _place(woken: tuple[Job, int]) -> tuple[int, int]:
    return woken[0].row, woken[1]
