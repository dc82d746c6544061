"""The cache counted in runs of blocks against one that has every block as an object."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chimsim.engine import footprint_of
from chimsim.kvcache import Footprint, KVCache, SharedRun
from chimsim.simulation import simulate
from tests.chimsim.reference import Block, BlockCache, block_names
from tests.chimsim.worlds import cluster, engine, workflow
from traces import Stage, Trace

BLOCK = 4
NUM_BLOCKS = 14
OWNERS = 4
SHARED: list[tuple[SharedRun, ...]] = [
    (),
    (("x", 1),),
    (("x", 3),),
    (("y", 2),),
    (("x", 3), ("x0", 2)),
    (("x", 3), ("x1", 1)),
    (("x", 3), ("x0", 2), ("x00", 2)),
]
"""Content ids stand for all that comes before them, too: one never follows different ones."""


@dataclass
class Sequence:
    """One workflow: its present stage, and what that holds in both caches."""

    owner: int
    stage: int = 0
    reused_tokens: tuple[int, ...] = (0,)
    shared: tuple[SharedRun, ...] = ()
    prompt: int = 1
    produced: int = 0
    footprint: Footprint = field(default_factory=lambda: Footprint(0, 0, ()))
    blocks: list[Block] = field(default_factory=list)
    computed: int = 0
    started: bool = False

    @property
    def known(self) -> int:
        return self.prompt + self.produced

    def next_stage(self, shared: tuple[SharedRun, ...], more: int, reuse: int) -> None:
        """A prompt that ends with ``more`` tokens of its own and has a part of all before it in common with that."""
        before = self.known if self.produced else 0
        least = max(sum(count for _, count in shared) * BLOCK, before if reuse else 0, 1)
        self.shared = shared
        self.prompt = max(least + more, 1)
        self.stage += 1
        self.reused_tokens += (min(before * reuse // 3, self.prompt),)
        self.produced = 0


class Caches:
    """Both caches, used as an engine does: nobody is admitted in mid-prefill, blocks are never overdrawn."""

    def __init__(self, caching: bool) -> None:
        self.fast = KVCache(NUM_BLOCKS, BLOCK, caching=caching)
        self.slow = BlockCache(NUM_BLOCKS, BLOCK, caching)
        self.sequences = [Sequence(owner) for owner in range(OWNERS)]
        self.owners = OWNERS
        self.prefilling: Sequence | None = None

    def lookup(self, footprint: Footprint, known: int) -> list[Block]:
        """What both find, which is the same."""
        hits = self.slow.hits(block_names(footprint, known, BLOCK)[: (known - 1) // BLOCK])
        assert self.fast.lookup(footprint, known) == (len(hits), sum(1 for block in hits if not block.uses))
        return hits

    def take(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for so many more tokens, if there are as many."""
        need = -(-(sequence.computed + tokens) // BLOCK) - len(sequence.blocks)
        if need > self.fast.free:
            return False
        if need > 0:
            self.fast.allocate(need)
            sequence.footprint.blocks += need
            sequence.blocks += [self.slow.take() for _ in range(need)]
        return True

    def admit(self, sequence: Sequence, chunk: int) -> None:
        footprint = Footprint(sequence.owner, sequence.stage, sequence.reused_tokens, sequence.shared)
        hits = self.lookup(footprint, sequence.known)
        free_hits = sum(1 for block in hits if not block.uses)
        if self.prefilling or -(-sequence.known // BLOCK) - len(hits) > self.fast.free - free_hits:
            return
        self.fast.admit(footprint, len(hits))
        for block in hits:
            self.slow.use(block)
        sequence.footprint = footprint
        sequence.blocks = list(hits)
        sequence.computed = len(hits) * BLOCK
        sequence.started = True
        self.prefill(sequence, chunk)

    def prefill(self, sequence: Sequence, chunk: int) -> None:
        self.prefilling = sequence
        chunk = min(chunk, sequence.known - sequence.computed)
        if not self.take(sequence, chunk):
            return
        if sequence.computed + chunk == sequence.known:
            self.prefilling = None
            self.fast.register(sequence.footprint, sequence.prompt // BLOCK)
            shared = sequence.blocks[: sequence.footprint.base]
            self.slow.call_all(shared, block_names(sequence.footprint, sequence.known, BLOCK))
        sequence.computed += chunk

    def decode(self, sequence: Sequence, tokens: int) -> None:
        if sequence is not self.prefilling and self.take(sequence, tokens):
            sequence.produced += tokens
            sequence.computed += tokens

    def release(self, sequence: Sequence) -> None:
        names = block_names(sequence.footprint, sequence.known, BLOCK)
        self.fast.release(sequence.footprint, sequence.computed)
        self.slow.call_all(sequence.blocks[: sequence.computed // BLOCK], names)
        self.slow.give_back(sequence.blocks)
        sequence.blocks = []
        sequence.started = False
        if self.prefilling is sequence:
            self.prefilling = None

    def forget(self, sequence: Sequence) -> None:
        self.fast.forget(sequence.owner)
        self.sequences[self.sequences.index(sequence)] = Sequence(self.owners)
        self.owners += 1

    def check(self) -> None:
        used = {id(block) for sequence in self.sequences for block in sequence.blocks}
        assert self.fast.free == self.slow.free == NUM_BLOCKS - len(used)
        assert all(s.footprint.blocks == len(s.blocks) for s in self.sequences if s.started)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, OWNERS - 1), st.integers(0, 9), st.sampled_from(SHARED), st.integers(0, 15)),
        min_size=20,
        max_size=150,
    ),
    st.sampled_from([True, True, True, False]),
)
def test_hits_and_free_blocks_are_those_of_the_cache_of_blocks(
    moves: list[tuple[int, int, tuple[SharedRun, ...], int]], caching: bool
) -> None:
    caches = Caches(caching)
    for owner, kind, shared, number in moves:
        sequence = caches.sequences[owner]
        if not sequence.started:
            if kind == 9:
                caches.forget(sequence)
            else:
                if kind >= 2:  # else the same stage again: it was preempted, or has yielded
                    sequence.next_stage(shared, number, kind % 4)
                caches.admit(sequence, number if kind == 8 else 100)
        elif sequence is caches.prefilling and kind < 7:
            caches.prefill(sequence, number)
        elif kind < 4:
            caches.decode(sequence, number)
        else:
            if kind == 4:  # preempted in a step for which it had got its block
                caches.take(sequence, 1)
            caches.release(sequence)
        caches.check()
    for shared in SHARED:
        caches.lookup(Footprint("stranger", 0, (0,), shared), 40)


def cached(cache: KVCache, footprint: Footprint, tokens: int) -> None:
    """A call of so many tokens comes and goes."""
    hits, _ = cache.lookup(footprint, tokens)
    cache.admit(footprint, hits)
    footprint.blocks = -(-tokens // BLOCK)
    cache.allocate(footprint.blocks - hits)
    cache.register(footprint, tokens // BLOCK)
    cache.release(footprint, tokens)


def test_the_least_recently_used_content_is_evicted_first_and_its_end_before_its_beginning() -> None:
    cache = KVCache(10, BLOCK)
    for owner in ("a", "b"):
        cached(cache, Footprint(owner, 0, [0]), 4 * BLOCK)
    cache.allocate(2)  # never used
    cache.allocate(3)
    again = [cache.lookup(Footprint(owner, 0, [0]), 4 * BLOCK + 1) for owner in ("a", "b")]
    assert again == [(1, 1), (4, 4)]
    cached(cache, Footprint("a", 0, [0]), BLOCK + 1)  # used just now; its second block is taken from b
    cache.allocate(2)
    again = [cache.lookup(Footprint(owner, 0, [0]), 4 * BLOCK + 1) for owner in ("a", "b")]
    assert again == [(1, 1), (1, 1)]


def test_the_last_known_token_is_computed_again() -> None:
    cache = KVCache(10, BLOCK)
    cached(cache, Footprint("a", 0, [0]), 3 * BLOCK)
    assert [cache.lookup(Footprint("a", 0, [0]), tokens)[0] for tokens in (1, BLOCK, BLOCK + 1, 3 * BLOCK)] == [
        0, 0, 1, 2,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("reused", "hits"), [([0, 30], 5), ([0, 11], 2), ([0, 3], 0), ([0, 30, 13], 3), ([0, 9, 30], 2)]
)
def test_a_later_stage_hits_what_every_stage_since_has_kept(reused: list[int], hits: int) -> None:
    cache = KVCache(20, BLOCK)
    cached(cache, Footprint("a", 0, [0]), 5 * BLOCK + 2)
    assert cache.lookup(Footprint("a", len(reused) - 1, reused), 40) == (hits, hits)
    assert cache.lookup(Footprint("b", len(reused) - 1, reused), 40) == (0, 0)


def test_a_shared_run_is_there_once_however_many_use_it() -> None:
    cache = KVCache(10, BLOCK)
    first, second = (Footprint(owner, 0, [0], (("x", 3),)) for owner in ("a", "b"))
    cache.admit(first, 0)
    cache.allocate(4)
    first.blocks = 4
    assert cache.lookup(second, 4 * BLOCK) == (0, 0)  # not computed yet
    cache.register(first, 4)
    assert cache.lookup(second, 4 * BLOCK) == (3, 0)  # of which none is free
    cache.admit(second, 3)
    assert cache.free == 6
    cache.release(first, 4 * BLOCK)
    assert cache.free == 7  # its own block; the shared ones are in use
    cache.release(second, 3 * BLOCK)
    assert cache.free == 10
    assert cache.lookup(Footprint("c", 0, [0], (("x", 3), ("x0", 1))), 4 * BLOCK) == (3, 3)


def test_without_caching_nothing_is_hit() -> None:
    cache = KVCache(10, BLOCK, caching=False)
    for _ in range(2):
        cached(cache, Footprint("a", 0, [0], (("x", 2),)), 4 * BLOCK)
        assert cache.lookup(Footprint("a", 0, [0], (("x", 2),)), 4 * BLOCK + 1) == (0, 0)
        assert cache.free == 10


@pytest.mark.parametrize(
    ("prompt", "prefix", "ids", "shared"),
    [
        (100, None, (), ()),
        (100, ("x", 40), (), (("x", 2),)),  # whole blocks only
        (100, ("x", 15), (), ()),
        (128, None, (7, 8), ((7, 4), (8, 4))),
        (100, None, (7, 8), ((7, 4), (8, 2))),  # the last one is partial
        (79, None, (7, 8), ((7, 4),)),
        (200, None, (7, 8), ((7, 4), (8, 4))),
        (100, ("x", 40), (7,), ((7, 4),)),  # hashes know better
    ],
)
def test_which_leading_blocks_of_a_prompt_others_may_share(
    prompt: int, prefix: tuple[str, int] | None, ids: tuple[int, ...], shared: tuple[SharedRun, ...]
) -> None:
    footprint = footprint_of("a", 0, [0], 16, prompt, prefix, ids, 64)
    assert footprint.shared == shared
    assert footprint.base == sum(count for _, count in shared)


def test_hash_blocks_are_whole_kv_blocks() -> None:
    with pytest.raises(ValueError, match="hash blocks of 500 tokens do not divide into KV blocks of 16 tokens"):
        footprint_of("a", 0, [0], 16, 1000, None, (1, 2), 500)


@pytest.mark.parametrize(
    ("ids", "prompt", "cached"),
    [
        ((1, 2, 3), 1536, 1520),  # all is there, but the last token is computed again
        ((1, 2, 3), 1400, 1392),
        ((1, 2, 4), 1536, 1024),
        ((1, 2, 3, 4), 2048, 1536),
        ((5, 6), 1024, 0),
    ],
)
def test_a_prompt_hits_the_leading_hash_blocks_of_another_workflows(
    ids: tuple[int, ...], prompt: int, cached: int
) -> None:
    stages = [Stage("s", 1536, 3, hash_ids=(1, 2, 3)), Stage("s", prompt, 3, hash_ids=ids)]
    rows = [workflow(f"w{number}", [stage], arrival_s=float(number)) for number, stage in enumerate(stages)]
    result = simulate(Trace("test", tuple(rows)), cluster(engine()), "fcfs")
    assert result.requests["cached_tokens"].tolist() == [0, cached]
