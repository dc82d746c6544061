"""Workflows: they end with their last call, when nothing is heard of them, or when they are too many."""

from __future__ import annotations

import pytest

from chimsim.gateway import sessions
from chimsim.gateway.ask import Ask
from chimsim.gateway.sessions import Sessions


def call(workflow_id: str | None, *, last: bool = False) -> Ask:
    return Ask("/v1/completions", {}, "auto", False, workflow_id, "default", "", last, "text", "task")


def test_a_call_that_stands_alone_is_a_workflow_of_its_own() -> None:
    known = Sessions(10.0)
    named = known.enter(0.0, call("call-1"))
    first, second = known.enter(0.0, call(None)), known.enter(0.0, call(None))
    assert len({named.workflow_id, first.workflow_id, second.workflow_id}) == 3
    assert known.leave(1.0, first)
    assert known.leave(1.0, second)
    assert not known.leave(1.0, named)
    assert len(known) == 1


def test_a_workflow_ends_when_its_last_call_is_over_and_no_other_runs() -> None:
    known = Sessions(10.0)
    session = known.enter(0.0, call("w"))
    assert known.enter(1.0, call("w", last=True)) is session
    assert not known.leave(2.0, session)
    assert len(known) == 1
    assert known.leave(3.0, session)
    assert len(known) == 0
    again = known.enter(4.0, call("w"))
    assert again is not session
    assert again.arrived_at == 4.0


def test_silence_is_counted_from_the_last_news_and_running_calls_are_news() -> None:
    known = Sessions(10.0)
    old, busy, young = (known.enter(0.0, call(name)) for name in ("old", "busy", "young"))
    known.leave(1.0, old)
    known.leave(5.0, young)
    assert known.silent(10.9) == []
    assert known.silent(11.0) == [old]
    assert known.silent(14.9) == []
    assert known.silent(100.0) == [young]
    known.leave(100.0, busy)
    assert known.silent(109.0) == []
    assert known.silent(110.0) == [busy]
    assert len(known) == 0


def test_beyond_the_limit_the_most_silent_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    known = Sessions(1000.0)
    made = [known.enter(float(at), call(f"w{at}")) for at in range(4)]
    for session in made[1:]:
        known.leave(5.0, session)
    # w0 is older, but a call of it is on its way
    assert known.silent(6.0) == made[1:3]
    assert known.all() == [made[0], made[3]]
    assert len(known) == 0
