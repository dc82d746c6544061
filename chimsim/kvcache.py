"""KV blocks and the automatic prefix cache of one engine, counted in runs of blocks instead of block by block.

What it stands for: every free block sits in one queue, least recently used first; a freed block keeps its content
and can be hit until it is taken from the head of that queue; a request frees its blocks last one first, so what is
resident of a prefix is always a prefix of it. Runs of equal fate are kept as one `_Segment`, which makes the cost
of a request independent of its length. The tests hold this against a block-by-block cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from mypy_extensions import mypyc_attr

SharedRun = tuple[Hashable, int]
"""(content id, whole blocks of it): a stretch of a prompt that requests of any workflow may share.

An id stands for what comes before it, too, as a hash of a prefix does: it never follows different ids.
"""


class Footprint:
    """What one request's sequence looks like to the cache, and what it holds at the moment.

    ``owner`` names the workflow; ``reused_tokens[j]`` is how many leading tokens stage ``j`` has in common with
    stage ``j - 1``. ``shared`` are the prompt's leading runs that other workflows may share, in order.
    """

    __slots__ = ("base", "blocks", "owner", "refs", "registered", "reused_tokens", "shared", "stage")

    def __init__(
        self, owner: Hashable, stage: int, reused_tokens: Sequence[int], shared: tuple[SharedRun, ...] = ()
    ) -> None:
        self.owner = owner
        self.stage = stage
        self.reused_tokens = reused_tokens
        self.shared = shared
        base = 0
        for _, count in shared:
            base += count
        self.base = base
        self.blocks = 0
        self.refs: list[int] | None = None  # of each shared run, how many leading blocks are referenced
        self.registered = False  # whether those are all blocks of all shared runs


class _Segment:
    """Blocks ``low`` to ``high`` (exclusive) of one content, all free, last used at the same time."""

    __slots__ = ("base", "high", "low", "owner", "run", "stage")

    def __init__(
        self,
        low: int,
        high: int,
        run: _Run | None = None,
        owner: Hashable | None = None,
        stage: int = 0,
        base: int = 0,
    ) -> None:
        self.low = low
        self.high = high
        self.run = run
        self.owner = owner
        self.stage = stage
        self.base = base


class _Run:
    """A shared run: ``resident`` leading blocks are cached, of which the first ``held`` are referenced."""

    __slots__ = ("held", "holders", "key", "resident", "segments")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.resident = 0
        self.held = 0
        self.holders: dict[int, int] = {}
        self.segments: list[_Segment] = []  # free ones, deepest blocks first

    def hold(self, blocks: int) -> None:
        holders = self.holders
        holders[blocks] = holders.get(blocks, 0) + 1
        if blocks > self.held:
            self.held = blocks

    def drop(self, blocks: int) -> None:
        holders = self.holders
        left = holders[blocks] - 1
        if left:
            holders[blocks] = left
        else:
            del holders[blocks]
            if blocks == self.held:
                self.held = max(holders) if holders else 0


@mypyc_attr(allow_interpreted_subclasses=True)
class KVCache:
    """``num_blocks`` usable blocks of ``block_tokens`` tokens; with ``caching`` off nothing is ever hit.

    ``free`` counts unreferenced blocks, cached ones included.
    """

    def __init__(self, num_blocks: int, block_tokens: int, *, caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.caching = caching
        self.free = num_blocks
        self._queue: OrderedDict[_Segment, None] = OrderedDict()
        self._queue[_Segment(0, num_blocks)] = None
        self._owned: dict[Hashable, _Segment] = {}
        self._runs: dict[Hashable, _Run] = {}

    def lookup(self, print_: Footprint, known_tokens: int) -> tuple[int, int]:
        """Whole leading blocks of the sequence that are resident, and how many of those are free now.

        The last known token is always computed again, so that there is something to sample from.
        """
        if not self.caching:
            return 0, 0
        hits = 0
        free = 0
        if print_.shared:
            limit = (known_tokens - 1) // self.block_tokens
            for key, count in print_.shared:
                run = self._runs.get(key)
                if run is None:
                    return hits, free
                got = min(run.resident, count, limit - hits)
                hits += got
                if got > run.held:
                    free += got - run.held
                if got < count:
                    return hits, free
        segment = self._owned.get(print_.owner)
        if segment is None or segment.base != print_.base:
            return hits, free
        common = known_tokens - 1
        reused_tokens = print_.reused_tokens
        for stage in range(segment.stage + 1, print_.stage + 1):
            if reused_tokens[stage] < common:
                common = reused_tokens[stage]
        own = common // self.block_tokens - hits
        if own > segment.high:
            own = segment.high
        if own > 0:
            return hits + own, free + own
        return hits, free

    def admit(self, print_: Footprint, hits: int) -> None:
        """Take references on the ``hits`` leading blocks that `lookup` found."""
        left = hits
        if print_.shared:
            refs = []
            for key, count in print_.shared:
                got = min(left, count)
                left -= got
                refs.append(got)
                if got:
                    self._hold(self._runs[key], got)
            print_.refs = refs
        segment = self._owned.pop(print_.owner, None)
        if segment is not None:
            # Deeper blocks belong to a continuation that this sequence left: they are plain free blocks from here.
            segment.owner = None
            if left:
                self.free -= left
                if left == segment.high:
                    del self._queue[segment]
                else:
                    segment.low = left
        print_.blocks = hits

    def allocate(self, blocks: int) -> None:
        """Take ``blocks`` blocks from the head of the free queue, forgetting what they held."""
        self.free -= blocks
        queue = self._queue
        while blocks:
            segment = next(iter(queue))
            run = segment.run
            size = segment.high - segment.low
            if size > blocks:
                segment.high -= blocks
                if run is not None:
                    run.resident = segment.high
                return
            del queue[segment]
            blocks -= size
            if run is not None:
                run.resident = segment.low
                run.segments.pop(0)
                if not run.resident and not run.holders:
                    del self._runs[run.key]
            elif segment.owner is not None:
                del self._owned[segment.owner]

    def register(self, print_: Footprint, full_blocks: int) -> None:
        """The first ``full_blocks`` blocks are computed (or will be in this step): shared ones can be hit now.

        Of a block that is cached already the first copy stays the one that is hit.
        """
        refs = print_.refs
        if refs is None or not self.caching:
            return
        registered = True
        for index, (key, wanted) in enumerate(print_.shared):
            held = refs[index]
            if held == wanted:
                full_blocks -= wanted
                continue
            count = min(wanted, full_blocks)
            full_blocks -= count
            registered = registered and count == wanted
            if held >= count:
                continue
            run = self._runs.get(key)
            if run is None:
                run = self._runs[key] = _Run(key)
            if run.resident == held:
                if held:
                    run.drop(held)
                run.resident = count
                run.hold(count)
                refs[index] = count
            else:
                registered = False
        print_.registered = registered

    def release(self, print_: Footprint, computed_tokens: int) -> None:
        """Give back all blocks; those that ``computed_tokens`` filled stay hittable, the last is evicted first."""
        held = print_.blocks
        if not held:
            return
        print_.blocks = 0
        if not self.caching:
            self._free_plain(held)
            return
        full = computed_tokens // self.block_tokens
        if held > full:
            self._free_plain(held - full)
        else:
            full = held
        shared = print_.shared
        if shared and not print_.registered:
            self.register(print_, full)
        base = print_.base
        if full > base:
            owner = print_.owner
            owned = self._owned
            if owner in owned:
                owned.pop(owner).owner = None
            owned[owner] = segment = _Segment(0, full - base, None, owner, print_.stage, base)
            self._queue[segment] = None
            self.free += full - base
        if shared:
            refs = print_.refs
            assert refs is not None
            # A second copy of a cached block is a plain free block.
            plain = min(full, base) - sum(refs)
            if plain > 0:
                self._free_plain(plain)
            for index in range(len(shared) - 1, -1, -1):
                if refs[index]:
                    self._drop(self._runs[shared[index][0]], refs[index])
            print_.refs = None
            print_.registered = False

    def forget(self, owner: Hashable) -> None:
        """The workflow is over: its blocks stay free blocks in their places, but nobody will hit them."""
        segment = self._owned.pop(owner, None)
        if segment is not None:
            segment.owner = None

    def _free_plain(self, blocks: int) -> None:
        self._queue[_Segment(0, blocks)] = None
        self.free += blocks

    def _hold(self, run: _Run, blocks: int) -> None:
        segments = run.segments
        while segments and segments[-1].low < blocks:
            segment = segments[-1]
            if segment.high <= blocks:
                self.free -= segment.high - segment.low
                del self._queue[segment]
                segments.pop()
            else:
                self.free -= blocks - segment.low
                segment.low = blocks
                break
        run.hold(blocks)

    def _drop(self, run: _Run, blocks: int) -> None:
        before = run.held
        run.drop(blocks)
        if run.held < before:
            segment = _Segment(run.held, before, run)
            run.segments.append(segment)
            self._queue[segment] = None
            self.free += before - run.held
