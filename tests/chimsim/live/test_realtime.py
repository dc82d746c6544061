"""The engine in real time, on a clock that jumps: its instants are those of the engine told of arrivals alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chimsim.config import EngineSpec, Scheduling
from chimsim.engine import Engine, EngineRequest
from chimsim.kvcache import Footprint
from chimsim.live.realtime import CHUNK_S, RealtimeEngine, Ticket
from tests.chimsim.live.virtual import VirtualLoop, run_virtually
from tests.chimsim.worlds import engine, slow_profile


@dataclass(frozen=True)
class Arrival:
    at: float
    prompt: int
    output: int
    priority: int = 0
    streamed: bool = True


Instants = tuple[float, float, float, int, int]


def made(arrivals: Sequence[Arrival]) -> list[EngineRequest]:
    requests = []
    for number, arrival in enumerate(arrivals):
        shared = (("all", min(arrival.prompt, 64) // 16),) if arrival.prompt >= 16 else ()
        request = EngineRequest(number, arrival.prompt, arrival.output, Footprint(number, 0, (0,), shared))
        request.priority = (float(arrival.priority),)
        requests.append(request)
    return requests


def instants(request: EngineRequest, finished_at: float) -> Instants:
    return request.admitted_at, request.first_token_at, finished_at, request.cached_tokens, request.preemptions


def alone(spec: EngineSpec, arrivals: Sequence[Arrival]) -> list[Instants]:
    """What the engine does when it is told of arrivals and nothing else."""
    core, requests, ended = Engine(spec), made(arrivals), dict[int, Instants]()
    coming = sorted(range(len(arrivals)), key=lambda number: arrivals[number].at)
    while coming or core.busy:
        if core.busy and (not coming or core.end_at <= arrivals[coming[0]].at):
            now = core.end_at
            for request in core.finish():
                ended[request.request_id] = instants(request, now)
            core.start(now)
            continue
        now = arrivals[coming[0]].at
        while coming and arrivals[coming[0]].at == now:
            if core.submit(requests[coming.pop(0)]) and core.busy:
                core.cut(now)
        if not core.busy:
            core.start(now)
    return [ended[number] for number in range(len(arrivals))]


async def in_real_time(
    spec: EngineSpec, arrivals: Sequence[Arrival], speed: float = 1.0, delays: Sequence[tuple[float, float]] = ()
) -> list[Instants]:
    """The same through `RealtimeEngine`; at each of ``delays`` (when, how long) the loop is busy with other things."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    all_done = loop.create_future()
    ended: dict[int, Instants] = {}

    def finish(ticket: Ticket) -> None:
        ended[ticket.request.request_id] = instants(ticket.request, ticket.finished_at)
        if len(ended) == len(arrivals):
            all_done.set_result(None)

    def busy(for_s: float) -> None:
        loop._jump.now += for_s

    real = RealtimeEngine(Engine(spec), speed=speed, on_finish=finish)
    requests = made(arrivals)

    def arrive(at: float) -> None:
        for arrival, request in zip(arrivals, requests, strict=True):
            if arrival.at == at:
                real.submit(request, asyncio.Event(), streamed=arrival.streamed)

    # One timer for all of an instant: the loop keeps no order between timers that are due together.
    for at in {arrival.at for arrival in arrivals}:
        loop.call_at(at / speed, arrive, at)
    for at, for_s in delays:
        loop.call_at(at, busy, for_s)
    await all_done
    assert (real.engine.running, real.engine.waiting, real.engine.kv.free) == (0, 0, real.engine.kv.num_blocks)
    return [ended[number] for number in range(len(arrivals))]


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.integers(0, 400).map(lambda hundredth: hundredth / 128),
        st.integers(1, 300),
        st.integers(1, 120),
        st.integers(-1, 1),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=100)
@given(ARRIVALS, st.integers(1, 5), st.sampled_from([30, 60, 4000]), st.sampled_from(["fcfs", "priority"]))
def test_chunks_change_no_instant(arrivals: list[Arrival], slots: int, kv_blocks: int, scheduling: Scheduling) -> None:
    spec = engine(slots=slots, kv_blocks=kv_blocks, max_num_batched_tokens=128, scheduling=scheduling)
    assert run_virtually(in_real_time(spec, arrivals)) == alone(spec, arrivals)


@pytest.mark.parametrize("speed", [0.5, 8.0])
def test_speed_changes_the_clock_only(speed: float) -> None:
    spec = engine(slots=3)
    arrivals = [Arrival(number / 8, 100 + 10 * number, 40 + number) for number in range(10)]
    assert run_virtually(in_real_time(spec, arrivals, speed)) == alone(spec, arrivals)


def test_a_loop_that_is_late_loses_nothing() -> None:
    spec = engine(slots=3)
    arrivals = [Arrival(number / 8, 100, 60) for number in range(10)]
    # after the last arrival, which would otherwise come late itself
    late = run_virtually(in_real_time(spec, arrivals, delays=[(1.5, 0.4), (2.5, 0.013), (3.0, 1.1)]))
    assert late == alone(spec, arrivals)


async def told(spec: EngineSpec, tickets: int, output: int, speed: float) -> list[list[tuple[float, int]]]:
    """Of each stream when it heard of how many tokens, on the clock."""
    loop = asyncio.get_running_loop()
    real = RealtimeEngine(Engine(spec), speed=speed)

    async def listen(number: int) -> list[tuple[float, int]]:
        await asyncio.sleep(number * 0.003)
        request = EngineRequest(number, 20, output, Footprint(number, 0, (0,)))
        changed = asyncio.Event()
        ticket = real.submit(request, changed, streamed=True)
        heard = []
        while not ticket.over:
            await changed.wait()
            changed.clear()
            heard.append((loop.time(), ticket.produced))
        return heard

    return list(await asyncio.gather(*(listen(number) for number in range(tickets))))


@pytest.mark.parametrize(("step_s", "speed"), [(0.001, 1.0), (0.008, 1.0), (0.008, 4.0), (0.05, 1.0)])
def test_a_stream_hears_no_more_often_than_it_may_and_no_less_often_than_it_should(step_s: float, speed: float) -> None:
    spec = engine(slots=4, step=slow_profile(step_s))
    for heard in run_virtually(told(spec, 3, 200, speed)):
        times, counts = zip(*heard, strict=True)
        assert (counts[0], counts[-1]) == (1, 200)
        assert list(counts) == sorted(set(counts))
        gaps = [later - earlier for earlier, later in pairwise(times)]
        tolerance = 1e-9
        assert all(gap >= CHUNK_S - tolerance for gap in gaps[:-1])
        # the second chunk may have to wait for the others' turn
        longest = max(CHUNK_S + step_s / speed, step_s / speed)
        assert all(gap <= longest + tolerance for gap in gaps[1:])
        assert gaps[0] <= 2 * longest + tolerance


async def aborted(spec: EngineSpec) -> tuple[list[int], RealtimeEngine, list[Ticket]]:
    order: list[int] = []
    real = RealtimeEngine(Engine(spec), on_finish=lambda ticket: order.append(ticket.request.request_id))
    tickets = [real.submit(request, asyncio.Event(), streamed=True) for request in made([Arrival(0, 40, 100)] * 4)]
    await asyncio.sleep(0.5)
    real.abort(tickets[0])  # runs
    real.abort(tickets[2])  # waits
    real.abort(tickets[0])
    await asyncio.sleep(0.1)
    assert real.engine.running == 2
    assert real.engine.waiting == 0
    await asyncio.sleep(30.0)
    return order, real, tickets


def test_what_is_taken_out_makes_room_and_is_not_counted() -> None:
    order, real, tickets = run_virtually(aborted(engine(slots=2)))
    assert order == [1, 3]
    assert [ticket.reason for ticket in tickets] == ["abort", "length", "abort", "length"]
    assert all(ticket.over and ticket.changed.is_set() for ticket in tickets)
    assert (real.engine.running, real.engine.waiting, real.engine.kv.free) == (0, 0, real.engine.kv.num_blocks)


async def taken_out_at_once(spec: EngineSpec) -> RealtimeEngine:
    real = RealtimeEngine(Engine(spec))
    tickets = [real.submit(request, asyncio.Event(), streamed=False) for request in made([Arrival(0, 40, 100)] * 3)]
    real.abort(tickets[0])  # before its first step
    await asyncio.sleep(1.0)
    real.abort_all()
    await asyncio.sleep(1.0)
    return real


def test_before_the_first_step_and_all_together() -> None:
    real = run_virtually(taken_out_at_once(engine(slots=2)))
    assert (real.engine.running, real.engine.waiting, real.engine.busy) == (0, 0, False)
