"""Stages as a graph: which ones a stage waits for, which wait for it, and whose prompt and output it goes on from.

A stage that says nothing of it waits for the one before, so that plain lists are chains. Parents always stand before
their children. Arithmetic over stages; it checks nothing (`traces.schema` does).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from traces.schema import Stage


def is_chain(stages: Sequence[Stage]) -> bool:
    """Whether every stage waits for the one before it, and for no other."""
    return [stage.after for stage in stages].count(None) == len(stages)


def parents(stages: Sequence[Stage], index: int) -> tuple[int, ...]:
    """The stages that must have finished before this one is ready, in order; none: ready when the workflow arrives."""
    after = stages[index].after
    if after is not None:
        return after
    return (index - 1,) if index else ()


def children(stages: Sequence[Stage]) -> list[list[int]]:
    """For each stage those that wait for it, in order."""
    found: list[list[int]] = [[] for _ in stages]
    for index in range(len(stages)):
        for parent in parents(stages, index):
            found[parent].append(index)
    return found


def ancestors(stages: Sequence[Stage]) -> list[frozenset[int]]:
    """For each stage all that have finished for certain when it is ready."""
    found: list[frozenset[int]] = []
    for index in range(len(stages)):
        mine = parents(stages, index)
        found.append(frozenset(mine).union(*(found[parent] for parent in mine)))
    return found


def prefix_parent(stages: Sequence[Stage], index: int) -> int | None:
    """The parent whose prompt and output a stage's ``reused_tokens`` are of, None for a stage without parents."""
    return longest(stages, parents(stages, index))


def longest(stages: Sequence[Stage], among: Iterable[int]) -> int | None:
    """The stage with the most prompt and output tokens, of equals the first."""
    return max(among, key=lambda index: stages[index].prompt_tokens + stages[index].output_tokens, default=None)


def critical_path(stages: Sequence[Stage]) -> list[int]:
    """The stages of the path with the most output tokens, from a first stage to a last one."""
    longest: list[tuple[int, int]] = []
    for index, stage in enumerate(stages):
        before = max(((longest[parent][0], parent) for parent in parents(stages, index)), default=(0, -1))
        longest.append((before[0] + stage.output_tokens, before[1]))
    at = max(range(len(stages)), key=lambda index: longest[index][0])
    path = []
    while at >= 0:
        path.append(at)
        at = longest[at][1]
    return path[::-1]
