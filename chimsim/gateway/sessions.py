"""Workflows as the gateway knows them: calls that name the same one, until it ends or nothing is heard of it.

Bookkeeping only: instants are passed in, nothing here reads a clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from calibration.rows import FinishedStage
from chimsim.gateway.ask import Ask

MAX_SESSIONS = 100_000
"""Beyond it the workflow that has been silent for longest is forgotten."""


@dataclass(slots=True, eq=False)
class Session:
    """A workflow: ``running`` calls are on their way, ``finished`` are answered; ``ends``: no other will come.

    ``told``: the policy knows that it has ended. ``confidence`` is the router's, None until it is known.
    """

    workflow_id: str
    workload: str
    arrived_at: float
    named: bool
    seen_at: float = 0.0
    stage: int = 0
    running: int = 0
    ends: bool = False
    told: bool = False
    task: str = ""
    confidence: Mapping[str, float] | None = None
    finished: tuple[FinishedStage, ...] = ()
    recorded: list[dict[str, Any]] = field(default_factory=list)
    """its stages for the recorder, which makes them"""


class Sessions:
    """The workflows in the system, the one that was silent for longest first."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._alone = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def enter(self, now: float, ask: Ask) -> Session:
        """The call's workflow, with the call among its running ones; one that stands alone gets its own."""
        name = ask.workflow_id
        if name is None:
            self._alone += 1
            name = f"call-{self._alone}"
            while name in self._sessions:
                self._alone += 1
                name = f"call-{self._alone}"
        session = self._sessions.get(name)
        if session is None:
            session = Session(name, ask.workload, now, named=ask.workflow_id is not None, task=ask.task)
            self._sessions[name] = session
        session.running += 1
        session.seen_at = now
        session.ends = session.ends or ask.last or not session.named
        self._sessions.move_to_end(name)
        return session

    def leave(self, now: float, session: Session) -> bool:
        """A call is over; returns whether its workflow is, which is forgotten then."""
        session.running -= 1
        session.seen_at = now
        if session.running or not session.ends:
            if session.workflow_id in self._sessions:
                self._sessions.move_to_end(session.workflow_id)
            return False
        self._sessions.pop(session.workflow_id, None)
        return True

    def silent(self, now: float) -> list[Session]:
        """Workflows without news for ``ttl_s``, and those that are too many; they are forgotten."""
        gone = []
        for session in list(self._sessions.values()):
            if now - session.seen_at < self.ttl_s and len(self._sessions) <= MAX_SESSIONS:
                break
            if not session.running:
                del self._sessions[session.workflow_id]
                gone.append(session)
        return gone

    def all(self) -> list[Session]:
        """Every workflow, for the end of the gateway; they are forgotten."""
        sessions = list(self._sessions.values())
        self._sessions.clear()
        return sessions
