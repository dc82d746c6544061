"""ServeGen's rate curves (``chunk-*-trace.csv``): how many calls a client makes in each window, and how unevenly.

They are no trace of calls, so times are drawn from them, always the same ones: gaps of the window's distribution,
stretched to its rate, from the window's begin on, clients apart. What comes out is a rhythm for ``--arrivals``: calls
of one token. Rows: begin of the window in seconds, calls a second and, where there are any, their coefficient of
variation, ``Gamma`` or ``Weibull``, its shape and its scale. The files of several clients may be put together in one.
The distributions of lengths (``chunk-*-dataset.json``) are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import gamma
from pathlib import Path

from traces.files import read_lines
from traces.readers.call import Asked, Call, Recorded, expected, nanoseconds
from traces.readers.table import cells, number

PATTERNS = ("Gamma", "Weibull")
MOST_CALLS = 1_000_000
"""In one window: more are taken for a mistake of the file (a gap of Weibull's of shape 0.01 is next to nothing)."""
_CALL = Call(prompt_tokens=1, output_tokens=1)

Window = tuple[str, float, str, float]
"""Where it stands, calls a second, the distribution of the gaps and its shape."""


def read(path: Path, asked: Asked) -> Iterator[Recorded]:
    """Yield the calls in order of time; raises `TraceError`."""
    import numpy as np

    windows: dict[int, list[Window]] = {}
    for where, line in read_lines(path):
        begin_ns, window = _window(cells(line, where), where, asked)
        windows.setdefault(begin_ns, []).append(window)
    begins = sorted(windows)
    if len(begins) < 2:
        expected(str(path), "windows", "at least two, a row each, for their length", len(begins))
    length_ns = min(later - earlier for earlier, later in pairwise(begins))
    rng = np.random.default_rng(0)
    for begin_ns in begins:
        times: list[tuple[int, str]] = []
        for where, rate, pattern, shape in windows[begin_ns]:
            if not rate:
                continue
            at_s = 0.0
            while True:
                draw = rng.gamma(shape) / shape if pattern == "Gamma" else rng.weibull(shape) / gamma(1 + 1 / shape)
                at_s += float(draw) / rate
                if at_s * 1e9 >= length_ns:
                    break
                times.append((begin_ns + round(at_s * 1e9), where))
                if len(times) > MOST_CALLS:
                    expected(where, "row", f"at most {MOST_CALLS:,} calls in a window of {length_ns / 1e9:g} s", rate)
        for at_ns, where in sorted(times):
            yield Recorded(where, at_ns, (_CALL,))


def _window(row: list[str], where: str, asked: Asked) -> tuple[int, Window]:
    if not 2 <= len(row) <= 6:
        expected(where, "row", "begin, rate, cv, distribution, shape, scale", ",".join(row))
    begin_ns = nanoseconds(number(row[0]), asked.time_unit, "begin", where)
    rate = number(row[1])
    if not isinstance(rate, float) or not 0 <= rate <= 1e6:
        expected(where, "rate", "calls a second, from 0 to 1e6", row[1])
    if not rate:
        return begin_ns, (where, 0.0, "", 1.0)
    if len(row) < 6 or row[3] not in PATTERNS:
        expected(where, "distribution", f"{' or '.join(PATTERNS)}, its shape and its scale", ",".join(row[3:]))
    shape = number(row[4])
    if not isinstance(shape, float) or not 0.01 <= shape <= 1e6:
        expected(where, "shape", "a number from 0.01 to 1e6", row[4])
    return begin_ns, (where, rate, row[3], shape)
