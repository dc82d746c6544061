"""What the commands that talk to running engines have in common: options, the progress bar, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.progress import TaskProgressColumn

from chimsim.errors import ChimsimError
from chimsim.progress import progress_bar
from chimsim.sweeps import Interrupted

if TYPE_CHECKING:
    from chimsim.live.measure import Report

Result = TypeVar("Result")

UrlOpt = Annotated[str, typer.Option(help="The server, http://host:port.")]
ModelOpt = Annotated[str, typer.Option(help="The model's name, as the server serves it.")]
KeyOpt = Annotated[
    str | None, typer.Option(envvar="CHIMSIM_API_KEY", show_envvar=True, help="Bearer token, if the server wants one.")
]
InactivityOpt = Annotated[float, typer.Option(min=0.1, help="Seconds without a byte after which the server hangs.")]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def drive(work: Coroutine[Any, Any, Result], kept: Callable[[], str]) -> Result:
    """Run to the end. What stops it early is said together with what ``kept`` says then: what stays, how to go on."""
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        raise Interrupted("; ".join(filter(None, ("interrupted", kept())))) from None
    except ChimsimError as error:
        raise ChimsimError("; ".join(filter(None, (str(error), kept())))) from None


def progress() -> AbstractContextManager[Report | None]:
    """A bar with the time left, on stderr if that is a terminal."""
    return progress_bar(TaskProgressColumn(), begin="asking the engine")
