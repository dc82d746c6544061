"""What is sent for a stage: token ids that share exactly what the trace says is shared, or the trace's own texts.

Pure content: nothing is sent here, and the ids of one run mean nothing to another, so that an engine's prefix cache
serves only what the trace says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from chimsim.errors import ChimsimError
from chimsim.layout import Layout
from traces import Stage, Workflow


class Prompts(Protocol):
    """Makes the prompts of a run, stage by stage."""

    exact: bool
    """whether answers must have the trace's lengths"""

    def of(self, row: int, source: Workflow, index: int, stage: Stage, layout: Layout) -> tuple[int, ...] | str:
        """The prompt of stage ``index`` of the workflow in that row, of ``stage.prompt_tokens`` tokens if ids."""

    def answered(self, row: int, index: int, prompt: tuple[int, ...] | str, ids: Sequence[int], text: str) -> None:
        """How the stage was answered, for the prompts of later ones."""

    def forget(self, row: int) -> None:
        """The workflow is over."""


class LengthPrompts:
    """Token ids in ``[low, high)`` of the trace's lengths.

    A prompt begins with the ``reused_tokens`` first tokens of the stage it goes on from and its answer, or with the
    prefix or the hashed blocks that it shares with others; the rest is drawn from ``salt`` (a run's own), workflow
    and stage.
    """

    exact = True

    def __init__(self, salt: int, low: int, high: int) -> None:
        self._salt = salt
        self._low = low
        self._high = high
        self._contexts: dict[int, dict[int, tuple[int, ...]]] = {}

    def of(self, row: int, source: Workflow, index: int, stage: Stage, layout: Layout) -> tuple[int, ...]:
        length = stage.prompt_tokens
        begin: tuple[int, ...] = ()
        if stage.hash_ids:
            for hash_id in stage.hash_ids:
                begin += self._ids(stage.hash_block_tokens, "block", hash_id)
        elif (parent := layout.parent(index)) is not None and layout.reused_tokens[index]:
            begin = self._contexts.get(row, {}).get(parent, ())[: layout.reused_tokens[index]]
        elif stage.shared_prefix is not None:
            begin = self._ids(stage.shared_prefix.tokens, "prefix", stage.shared_prefix.id)
        begin = begin[:length]
        return begin + self._ids(length - len(begin), "own", row, index)

    def answered(self, row: int, index: int, prompt: tuple[int, ...] | str, ids: Sequence[int], text: str) -> None:
        self._contexts.setdefault(row, {})[index] = (*prompt, *ids) if isinstance(prompt, tuple) else ()

    def forget(self, row: int) -> None:
        self._contexts.pop(row, None)

    def _ids(self, count: int, *names: int | str) -> tuple[int, ...]:
        key = [self._salt, *"/".join(map(str, names)).encode()]
        return tuple(np.random.default_rng(key).integers(self._low, self._high, count).tolist())


class TextPrompts:
    """The trace's own texts: a stage's, or the workflow's followed by the answers so far. Answers end when they end."""

    exact = False

    def __init__(self) -> None:
        self._contexts: dict[int, dict[int, str]] = {}

    def of(self, row: int, source: Workflow, index: int, stage: Stage, layout: Layout) -> str:
        if stage.prompt is not None:
            return stage.prompt
        if source.prompt is None:
            raise ChimsimError(
                f"workflow {source.workflow_id} has no prompt to send; take a trace with texts, or the workload lengths"
            )
        parent = layout.parent(index)
        context = None if parent is None else self._contexts.get(row, {}).get(parent)
        return f"{source.prompt if context is None else context}\n\n{stage.name}:\n"

    def answered(self, row: int, index: int, prompt: tuple[int, ...] | str, ids: Sequence[int], text: str) -> None:
        self._contexts.setdefault(row, {})[index] = f"{prompt}{text}"

    def forget(self, row: int) -> None:
        self._contexts.pop(row, None)
