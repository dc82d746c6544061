"""The bar of long work: how much is done, the time it took and the time that is left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Update = Callable[[float, float, str], None]
"""Told (done, in all, what is under way)."""


@contextlib.contextmanager
def progress_bar(*counts: ProgressColumn, begin: str = "") -> Iterator[Update | None]:
    """A bar on stderr if that is a terminal, else None; ``counts`` say how much is done."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    columns = (BarColumn(bar_width=24), *counts, *times, TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(begin, total=None)

        def update(done: float, total: float, text: str) -> None:
            bar.update(task, total=total, completed=done, description=text)

        yield update
