"""What the prompts of one workflow's run have in common with each other, and with other workflows'.

In a chain a stage goes on from the one before, so that one stretch of blocks a workflow is all there is to remember
(`chimsim.kvcache`). In a graph several stages may go on from one at once: there every stretch between two branchings
is content of its own, which any of the workflow's stages may hit, as a shared prefix is.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise

from chimsim.config import EngineSpec
from chimsim.engine import footprint_of
from chimsim.kvcache import Footprint, SharedRun
from traces import Run, Stage
from traces.graph import is_chain, prefix_parent

Span = tuple[Hashable, int, int]
"""(content, from block, to block): a stretch of a sequence's blocks. Content of the workflow's own is (owner, stage),
and what other workflows share has the id that the trace gives it."""


class Layout:
    """Of the run of the workflow ``owner``. ``reused_tokens`` is by stage, ``chain`` whether it is no graph."""

    __slots__ = ("_owner", "_shared", "_stages", "chain", "reused_tokens")

    def __init__(self, owner: int, run: Run) -> None:
        self._owner = owner
        self._stages = run.stages
        self.chain = is_chain(run.stages)
        self._shared: dict[int, list[tuple[SharedRun, ...]]] = {}
        self.reused_tokens = [stage.reused_tokens for stage in run.stages]

    def parent(self, index: int) -> int | None:
        """The stage whose prompt and answer this one's prompt begins with."""
        return prefix_parent(self._stages, index) if index < len(self._stages) else None

    def footprint(self, spec: EngineSpec, index: int, stage: Stage) -> Footprint:
        """The stage's, on an engine; ``stage`` may be of another model's run."""
        block = spec.block_tokens
        if index >= len(self._stages):
            # A branch that was on its way when another one changed to a model with fewer stages has nothing to share.
            return Footprint((self._owner, index), index, (0,) * (index + 1))
        if self.chain:
            return _footprint(self._owner, index, self.reused_tokens, block, stage)
        if block not in self._shared:
            self._shared[block] = _shared_runs(self._owner, self._stages, block)
        shared = self._shared[block][index]
        # What it holds beyond that (another model's answer may be longer) nobody goes on from.
        return Footprint((self._owner, index), index, (0,) * (index + 1), shared)


def _footprint(owner: int, index: int, reused_tokens: Sequence[int], block: int, stage: Stage) -> Footprint:
    """Of a stage of a chain, or of one by itself."""
    prefix = stage.shared_prefix
    shared = None if prefix is None else (prefix.id, prefix.tokens)
    return footprint_of(
        owner, index, reused_tokens, block, stage.prompt_tokens, shared, stage.hash_ids, stage.hash_block_tokens
    )


def _shared_runs(owner: int, stages: Sequence[Stage], block: int) -> list[tuple[SharedRun, ...]]:
    """For each stage of a graph its whole blocks, of its prompt and answer, as runs that others may share."""
    paths: list[list[Span]] = []
    for index, stage in enumerate(stages):
        path = _across_workflows(owner, index, stage, block)
        base = sum(high - low for _, low, high in path)
        parent = prefix_parent(stages, index)
        kept = stage.reused_tokens // block
        if parent is not None and kept > base and not stage.hash_ids:
            path, base = _first(paths[parent], kept)
        # The keys and values of the last token are never stored.
        blocks = (stage.prompt_tokens + stage.output_tokens - 1) // block
        if blocks > base:
            path.append(((owner, index), base, blocks))
        paths.append(path)
    cuts: dict[Hashable, set[int]] = {}
    for path in paths:
        for content, low, high in path:
            cuts.setdefault(content, set()).update((low, high))
    return [_cut(path, cuts) for path in paths]


def _across_workflows(owner: int, index: int, stage: Stage, block: int) -> list[Span]:
    """The leading blocks that other workflows may have, too."""
    spans: list[Span] = []
    low = 0
    for content, count in _footprint(owner, index, (), block, stage).shared:
        spans.append((content, low, low + count))
        low += count
    return spans


def _first(path: Sequence[Span], blocks: int) -> tuple[list[Span], int]:
    """The path's first so many blocks, and how many those are."""
    kept = [(content, low, min(high, blocks)) for content, low, high in path if low < blocks]
    return kept, min(blocks, path[-1][2]) if path else 0


def _cut(path: Sequence[Span], cuts: Mapping[Hashable, set[int]]) -> tuple[SharedRun, ...]:
    """The path as runs: content of the workflow's own in pieces that end wherever a stage goes on from it."""
    runs: list[SharedRun] = []
    for content, low, high in path:
        if not isinstance(content, tuple):
            runs.append((content, high - low))
            continue
        edges = sorted(edge for edge in cuts[content] if low <= edge <= high)
        runs += [((content, begin), end - begin) for begin, end in pairwise(edges)]
    return tuple(runs)
