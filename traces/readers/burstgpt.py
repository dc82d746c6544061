"""BurstGPT: CSV of calls to ChatGPT and GPT-4; since its release 2.0 with ``Session ID`` and ``Elapsed time``.

Times are in seconds. Calls with one session id are the turns of a conversation: a turn's delay is the time from the
end of the one before (its time and its elapsed seconds) to its own. A failed call has no response tokens. Whether a
turn's prompt repeats the conversation is not in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from traces.readers.call import Asked, Call, Recorded, expected, grouped, nanoseconds, tokens
from traces.readers.table import integer, number, rows

COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
SESSION = ("Session ID", "Elapsed time")

Turn = tuple[str, int, int, Call, str | None]
"""Where it stands, its start and its end in nanoseconds, the call, its session."""


def read(path: Path, asked: Asked) -> Iterator[Recorded]:
    """Yield the conversations in order of their first calls; raises `TraceError`."""
    for turns in grouped(_turns(path, asked), asked.limit):
        where, session_id = turns[0][0], turns[0][4]
        calls = [turns[0][3]]
        for (_, start_ns, end_ns, *_), (place, next_ns, _, call, _) in pairwise(turns):
            if next_ns < start_ns:
                expected(
                    place, "Timestamp", f"a turn not before the one before it ({start_ns / 1e9:g} s)", next_ns / 1e9
                )
            calls.append(replace(call, delay_ns=max(next_ns - end_ns, 0)))
        yield Recorded(where, turns[0][1], tuple(calls), session_id)


def _turns(path: Path, asked: Asked) -> Iterator[tuple[str | None, Turn]]:
    for where, row in rows(path, COLUMNS, SESSION):
        start_ns = nanoseconds(number(row["Timestamp"]), asked.time_unit, "Timestamp", where)
        elapsed = row.get("Elapsed time")
        lasted_ns = nanoseconds(number(elapsed), asked.time_unit, "Elapsed time", where) if elapsed else 0
        call = Call(
            prompt_tokens=tokens(integer(row["Request tokens"]), "Request tokens", where, 1),
            output_tokens=tokens(integer(row["Response tokens"]), "Response tokens", where, 0),
            model=row["Model"] or None,
        )
        session_id = row.get("Session ID") or None
        yield session_id, (where, start_ns, start_ns + lasted_ns, call, session_id)
