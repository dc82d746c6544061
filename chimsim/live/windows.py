"""From token counts over time to step times: the stretch in which a whole batch decodes, and nothing else does.

A chunk may carry several tokens, so tokens are counted between chunks, never per chunk. Pure functions on answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from chimsim.live.client import Answer

Progress = Sequence[tuple[float, int]]


class Window(NamedTuple):
    """``steps`` engine steps took ``seconds``; the batch had ``context_tokens`` tokens together on average."""

    steps: float
    seconds: float
    context_tokens: float


def decode_window(answers: Sequence[Answer]) -> Window | None:
    """The steps in which all of ``answers`` were decoding: after the last has begun, before the first ends.

    None where there is no such stretch. A progress of two points, from a server that keeps no running count, is
    taken as even.
    """
    begin, end = max(a.first_at for a in answers), min(a.last_at for a in answers)
    return _window(answers, [_inside(a.progress, begin, end) for a in answers])


def mixed_window(answers: Sequence[Answer], begin: float, end: float) -> Window | None:
    """The steps from the last chunk before ``begin`` to the first one after ``end``.

    None where a sequence has no such chunk, or the server keeps no running count.
    """
    if any(len(answer.progress) <= 2 for answer in answers):
        return None
    return _window(answers, [_around(a.progress, begin, end) for a in answers])


def _window(answers: Sequence[Answer], spans: Sequence[Progress | None]) -> Window | None:
    tokens, seconds, context = 0.0, 0.0, 0.0
    for answer, span in zip(answers, spans, strict=True):
        if span is None:
            return None
        (start_at, start), (end_at, end) = span
        tokens += end - start
        seconds += end_at - start_at
        context += answer.prompt_tokens + 0.5 * (start + end)
    steps = tokens / len(answers)
    return Window(steps, steps * seconds / tokens, context) if tokens > 0 and seconds > 0 else None


def _inside(progress: Progress, begin: float, end: float) -> Progress | None:
    """The first and last point inside the stretch; between two far-apart points the count is interpolated."""
    if end <= begin:
        return None
    if len(progress) == 2:
        (first_at, first), (last_at, last) = progress
        rate = (last - first) / (last_at - first_at)
        return [(at, round(first + rate * (at - first_at))) for at in (begin, end)]
    points = [point for point in progress if begin <= point[0] <= end]
    return [points[0], points[-1]] if len(points) > 1 else None


def _around(progress: Progress, begin: float, end: float) -> Progress | None:
    before = [point for point in progress if point[0] <= begin]
    after = [point for point in progress if point[0] >= end]
    return [before[-1], after[0]] if before and after else None
