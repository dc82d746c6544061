"""SimPy's event that calls a handler at an instant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simpy import Environment
from simpy.events import Event


class Timer(Event):
    """As SimPy's own `Timeout`, with its only handler there from the start; scheduling it is the caller's.

    Three are made for every call that is simulated. A module of its own, because a compiled class (`hatch_build.py`)
    cannot have a base that is not.
    """

    def __init__(self, env: Environment, handler: Callable[[Any], None], value: object) -> None:
        self.env = env
        self.callbacks = [handler]
        self._value = value
        self._ok = True
