"""Runs the simulated engine in real time: its steps end when the loop's clock gets there.

Instants are seconds of the engine's own time since the start, which runs ``speed`` times as fast as the clock. A step
begins where the one before ended, not when the loop woke up, so that lateness never adds up; a stretch is cut when
something arrives, and where streams are due a chunk. It knows nothing of HTTP, text or metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from chimsim.engine import Engine, EngineRequest
from chimsim.ticks import exact

CHUNK_S = 0.02
"""A stream hears of its tokens at most once in so many seconds on the clock, its first and last tokens apart."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request in a `RealtimeEngine`. ``changed`` is set when ``produced`` or ``over`` did.

    ``produced`` counts the output tokens told so far; ``finished_at`` is negative unless it has them all. ``reason`` is
    why it ends then, ``abort`` once it was taken out.
    """

    request: EngineRequest
    changed: asyncio.Event
    streamed: bool
    reason: str
    arrived_at: float
    produced: int = 0
    told_at: float = -inf
    finished_at: float = -1.0
    over: bool = False


def _unheard(_: Ticket) -> None:
    pass


class RealtimeEngine:
    """See the module. Make it inside a running loop; it needs no task of its own.

    ``on_first`` and ``on_finish`` hear of each ticket's first token and of its completion.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        speed: float = 1.0,
        on_first: Callable[[Ticket], None] = _unheard,
        on_finish: Callable[[Ticket], None] = _unheard,
    ) -> None:
        self.engine = engine
        self.speed = speed
        self._on_first = on_first
        self._on_finish = on_finish
        self._loop = asyncio.get_running_loop()
        self._origin = self._loop.time()
        self._latest = 0.0
        self._chunk_s = exact(CHUNK_S * speed)
        self._tickets: dict[int, Ticket] = {}
        self._unspoken: dict[int, Ticket] = {}  # without a token yet
        self._streams: dict[int, Ticket] = {}  # streamed, with a first token
        self._leaving: list[EngineRequest] = []
        self._prefilled = 0
        self._flushed_at = -inf
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = -1.0
        self._beginning = False

    def now(self) -> float:
        """The engine's time; it never falls."""
        self._latest = max(self._latest, exact((self._loop.time() - self._origin) * self.speed))
        return self._latest

    def submit(
        self, request: EngineRequest, changed: asyncio.Event, *, streamed: bool, reason: str = "length"
    ) -> Ticket:
        """Hand a request over; its ticket says how far it is."""
        now = self.now()
        self._advance(now)
        ticket = Ticket(request, changed, streamed, reason, now)
        self._tickets[request.request_id] = self._unspoken[request.request_id] = ticket
        cut = self.engine.submit(request)
        if not self.engine.busy:
            self._begin_soon()
        elif cut:
            self.engine.cut(now)
            self._arm()
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """Take a request out at the next step boundary; nothing happens if it is over."""
        if ticket.over:
            return
        now = self.now()
        self._advance(now)
        if ticket.over:
            return
        request = ticket.request
        for tickets in (self._tickets, self._unspoken, self._streams):
            tickets.pop(request.request_id, None)
        ticket.over = True
        ticket.reason = "abort"
        ticket.changed.set()
        if self.engine.busy:
            self._leaving.append(request)
            self.engine.cut(now)
            self._arm()
        else:
            self.engine.remove(request, now)

    def abort_all(self) -> None:
        """Take everything out."""
        for ticket in list(self._tickets.values()):
            self.abort(ticket)

    def _begin_soon(self) -> None:
        # What arrives in the same turn of the loop goes into the same step.
        if not self._beginning:
            self._beginning = True
            self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._beginning = False
        if not self.engine.busy:
            now = self.now()
            self._start(now, now)
            self._arm()

    def _on_timer(self) -> None:
        self._timer = None
        # The loop may call a hair early.
        self._latest = max(self._latest, self._due_at)
        self._advance(self.now())

    def _arm(self) -> None:
        """Wake when the step or stretch under way ends."""
        end_at = self.engine.end_at
        if self._timer is not None:
            if self._due_at == end_at:
                return
            self._timer.cancel()
            self._timer = None
        if end_at >= 0.0:
            self._due_at = end_at
            self._timer = self._loop.call_at(self._origin + end_at / self.speed, self._on_timer)

    def _advance(self, now: float) -> None:
        """Everything that ended by ``now``."""
        engine = self.engine
        while engine.busy and engine.end_at <= now:
            at = engine.end_at
            finished = engine.finish()
            self._tell(at, finished)
            if self._leaving:
                for request in self._leaving:
                    if request not in finished:
                        engine.remove(request, at)
                self._leaving.clear()
            self._start(at, now)
        self._arm()

    def _start(self, at: float, now: float) -> None:
        if self.engine.start(at) is not None and self._streams:
            # A stretch that is over already when the loop gets here needs no chunks on its way.
            self.engine.cut(max(self._flushed_at + self._chunk_s, now))

    def _tell(self, at: float, finished: list[EngineRequest]) -> None:
        if self.engine.prefill_tokens != self._prefilled:
            self._prefilled = self.engine.prefill_tokens
            for ticket in [each for each in self._unspoken.values() if each.request.first_token_at >= 0.0]:
                del self._unspoken[ticket.request.request_id]
                if ticket.streamed:
                    self._streams[ticket.request.request_id] = ticket
                self._on_first(ticket)
                _tell(ticket, at, 1)
        for request in finished:
            done = self._tickets.pop(request.request_id, None)
            if done is not None:
                self._streams.pop(request.request_id, None)
                done.finished_at = at
                done.over = True
                self._on_finish(done)
                _tell(done, at, request.produced)
        if self._streams and at >= self._flushed_at + self._chunk_s:
            self._flushed_at = at
            steps = self.engine.steps
            for ticket in self._streams.values():
                request = ticket.request
                produced = request.offset + steps if request.decoding else request.produced
                if produced > ticket.produced and at >= ticket.told_at + self._chunk_s:
                    _tell(ticket, at, produced)


def _tell(ticket: Ticket, at: float, produced: int) -> None:
    ticket.produced = produced
    ticket.told_at = at
    ticket.changed.set()
