"""Every fault of an engine, and what the client sees of it: the whole answer, or an error that says what happened."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from chimsim.gateway import core, upstreams
from chimsim.replay import RETRIES
from tests.chimsim.gateway.fault_matrix import Cell, Seen, cells, observe_all
from tests.chimsim.gateway.rude_engine import WORDS

TRIES = 1 + RETRIES
LATER = ("closes later", "error later")
"""Faults after something of a stream went out: nothing else can answer it then."""
TAKEN = ("slow", "restarts")
"""What needs no second engine."""
TOLD = ("400", "404")
"""What another engine would say too."""


@pytest.fixture(scope="module")
def matrix() -> Iterator[dict[Cell, Seen]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "BACKOFF_S", 0.005)
        patch.setattr(upstreams, "PROBE_S", 0.02)
        yield asyncio.run(observe_all(inactivity_s=0.5, wait_s=2.0))


@pytest.mark.parametrize("cell", cells(), ids=lambda c: f"{c[0]}, {'stream' if c[1] else 'whole'}, {1 + c[2]} engines")
def test_what_a_client_sees_of_a_fault(matrix: dict[Cell, Seen], cell: Cell) -> None:
    fault, stream, second = cell
    seen = matrix[cell]
    if fault in LATER and stream:
        assert (seen.status, seen.end, seen.text, seen.tries) == (200, "broken", WORDS[0], 1)
        assert "engine A/0: " in seen.message
    elif fault in TOLD:
        assert (seen.status, seen.end, seen.tries) == (int(fault), "error", 1)
        assert seen.message == f"the engine says {fault}"
        assert all(seen.healthy)
    elif fault == "401":
        # the gateway's own key: no client could do anything about it
        assert (seen.status, seen.end, seen.tries) == (502, "error", 1)
        assert "the server wants another --api-key" in seen.message
    elif fault in TAKEN or second:
        assert (seen.status, seen.end) == (200, "whole")
        assert seen.tries <= 2 or fault == "restarts"
    elif fault == "refuses":
        assert (seen.status, seen.end, seen.retry_after) == (503, "error", "1")
        assert seen.message == "no engine answers (A/0); waited 2 s"
        assert seen.healthy == (False,)
    else:
        busy = fault in ("429", "503")
        assert (seen.status, seen.end, seen.tries) == (int(fault) if busy else 502, "error", TRIES)
        assert seen.retry_after == "1"
        assert seen.message.startswith("engine A/0: ")
        if busy:
            assert all(seen.healthy)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("silent", "the server sent nothing for 0.5 s"),
        ("abort", "the engine ended the answer with 'abort'"),
        ("html", "text/html"),
        ("500", "answered 500: the engine says 500"),
        ("closes first", "the server closed the connection in mid-answer"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_errors_say_what_happened(matrix: dict[Cell, Seen], fault: str, words: str, stream: bool) -> None:
    message = matrix[fault, stream, False].message
    assert words in message or (fault == "html" and "expected a completion, found b'<html>" in message)


def test_errors_inside_streams_are_told_in_their_own_words(matrix: dict[Cell, Seen]) -> None:
    assert "error in the stream: it died" in matrix["error first", True, False].message
    assert "error in the stream: it died" in matrix["error later", True, True].message
    assert "the stream ended with nothing in it" in matrix["done only", True, False].message


def test_nothing_is_lost(matrix: dict[Cell, Seen]) -> None:
    assert [cell for cell, seen in matrix.items() if seen.end == "lost"] == []
