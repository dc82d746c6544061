"""How long cells will take: an estimate that orders them, and the time that is left, corrected by what was measured.

Estimates decide in which order cells begin and what is shown meanwhile, never a result.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from math import floor, log2

from chimsim.feeds import trace_named
from chimsim.grid import Cell

CALL_S = 60e-6
"""Seconds a simulated call, fcfs with KV cache and records, not compiled: measured, 20,000 calls of the trace apps on
two engines of 64 slots at 6 workflows a second, on a core of a 2-core cloud machine (benchmarks/README.md)."""
FACTORS = {"mlfq": 4.0, "ltr": 2.0}
"""How much longer a call takes with some policies: measured in the same runs, ltr earlier at higher rates too (1.2 to
3.2); the others of the package take 1.0 to 1.5. Policies of users are assumed to take 1."""
SAMPLE = 1000
"""Workflows of a trace of which the stages are counted."""
AGAIN_S = 1.0
"""How often the schedule is made anew, at most."""


def seconds(cell: Cell) -> float:
    """What a cell is expected to take one process."""
    workflows, stages = _size(cell.trace, cell.trace_digest, cell.cluster.models[0])
    return (cell.workflows or workflows) * stages * CALL_S * FACTORS.get(cell.policy, 1.0)


@lru_cache(maxsize=64)
def _size(name: str, digest: str, model: str) -> tuple[int, float]:
    """Workflows of a trace, and stages a workflow; by its content, since a file may change between two sweeps."""
    workflows = trace_named(name).workflows
    found = [len(workflow.runs[model].stages) for workflow in islice(workflows, SAMPLE)]
    return len(workflows), sum(found) / len(found)


def longest_first(cells: Sequence[Cell]) -> list[Cell]:
    """The cells in the order to begin them, so that none of the long ones is left for the end.

    Those that take about as long (within 1.4 times) keep their order: neighbours of a grid share what a process keeps
    of traces and predictors.
    """
    return sorted(cells, key=lambda cell: -floor(2 * log2(seconds(cell))))


class Forecast:
    """What is left of work that is done by several at once, in the order given.

    ``clock`` gives seconds from any beginning.
    """

    def __init__(
        self, expected_s: Mapping[str, float], kinds: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``expected_s`` and ``kinds`` by name: how long each part is expected to take, and of which policy it is."""
        self.workers = 1
        self._expected_s = dict(expected_s)
        self._kinds = kinds
        self._clock = clock
        self._begun: dict[str, float] = {}
        self._measured: dict[str, tuple[float, float]] = {}
        self._all_s = self._left_s = sum(expected_s.values())
        self._end_at: float | None = None
        self._made_at = 0.0

    @property
    def share(self) -> float:
        """Of the expected work what is done, 0 to 1."""
        return 1.0 - self._left_s / self._all_s if self._expected_s else 1.0

    def finished(self, name: str, took_s: float) -> None:
        """A part has ended now, and kept its worker busy for so long; the next one begins."""
        now = self._clock()
        if self._end_at is None:
            # until now nobody knew when work had begun, after whatever it takes to start workers
            self._begun = dict.fromkeys(islice(self._expected_s, self.workers), now - took_s)
        expected_s = self._expected_s.pop(name)
        self._left_s -= expected_s
        self._begun.pop(name, None)
        done_s, instead_of_s = self._measured.get(self._kinds[name], (0.0, 0.0))
        self._measured[self._kinds[name]] = done_s + took_s, instead_of_s + expected_s
        following = next((each for each in self._expected_s if each not in self._begun), None)
        if following is not None and len(self._begun) < self.workers:
            self._begun[following] = now
        if self._end_at is None or now - self._made_at >= AGAIN_S or not self._expected_s:
            self._end_at, self._made_at = now + self._schedule(now), now

    def left_s(self) -> float | None:
        """Seconds until all is done; None before anything is."""
        return None if self._end_at is None else max(0.0, self._end_at - self._clock())

    def _schedule(self, now: float) -> float:
        """Seconds until the last one ends, if each begins as soon as somebody is free."""
        whole = [sum(column) for column in zip(*self._measured.values(), strict=True)]
        ratios = {kind: took_s / instead_of_s for kind, (took_s, instead_of_s) in self._measured.items()}
        free: list[float] = []
        waiting: list[float] = []
        for name, expected_s in self._expected_s.items():
            takes_s = expected_s * ratios.get(self._kinds[name], whole[0] / whole[1])
            if name in self._begun:
                free.append(max(0.0, self._begun[name] + takes_s - now))
            else:
                waiting.append(takes_s)
        free += [0.0] * (self.workers - len(free))
        heapq.heapify(free)
        for takes_s in waiting:
            heapq.heapreplace(free, free[0] + takes_s)
        return max(free)
