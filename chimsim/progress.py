"""The bar of long work: how much is done, the time it took and the time that is left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from math import ceil
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress_bar import ProgressBar
from rich.table import Column
from rich.text import Text


class Left(Protocol):
    """What knows more of the work than how many parts are done."""

    @property
    def share(self) -> float:
        """Of the work that is done, 0 to 1."""

    def left_s(self) -> float | None:
        """Seconds until all is; None if nobody knows yet."""


class Update(Protocol):
    """Told (done, in all, what is under way), and who knows what is left, if anybody does."""

    def __call__(self, done: float, total: float, text: str, left: Left | None = None, /) -> None: ...


class _Bar(BarColumn):
    def render(self, task: Task) -> ProgressBar:
        bar = super().render(task)
        if (left := task.fields.get("left")) is not None:
            bar.total, bar.completed = 1.0, left.share
        return bar


class _Remaining(TimeRemainingColumn):
    def render(self, task: Task) -> Text:
        if (left := task.fields.get("left")) is None:
            return super().render(task)
        seconds = left.left_s()
        text = "-:--:--" if seconds is None else str(timedelta(seconds=ceil(seconds)))
        return Text(text, style="progress.remaining")


@contextlib.contextmanager
def progress_bar(*counts: ProgressColumn, begin: str = "") -> Iterator[Update | None]:
    """A bar on stderr if that is a terminal, else None; ``counts`` say how much is done."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    times = (TimeElapsedColumn(), TextColumn("so far,"), _Remaining(), TextColumn("left"))
    # where a line is too narrow it is the text that is cut
    text_column = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    columns = (_Bar(bar_width=24), *counts, *times, text_column)
    with Progress(*columns, console=console, transient=True, expand=True) as bar:
        task = bar.add_task(begin, total=None)

        def update(done: float, total: float, text: str, left: Left | None = None, /) -> None:
            bar.update(task, total=total, completed=done, description=text, left=left)

        yield update
