"""One vLLM engine: continuous batching with chunked prefill, paged KV blocks, preemption and prefix caching.

A state machine that is told the time. `start` begins a step, or a whole stretch of pure decode steps at once (the
batch is constant then, so the end of the stretch has a closed form); `finish` applies it; `cut` ends a stretch at
an earlier step boundary because something arrived. Steps with prefill, and steps in which blocks run out, are taken
one by one. The rules are vLLM V1's; the tests hold this class against an engine that takes every step.

An engine may `fail`, which loses all that is inside, and be slower than its profile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import sqrt

from mypy_extensions import mypyc_attr

from chimsim.config import EngineSpec
from chimsim.histogram import LogHistogram
from chimsim.kvcache import Footprint, KVCache, SharedRun
from chimsim.ticks import exact
from policies.interface import Priority

NOT_STOPPING = -1


class EngineRequest:
    """One request inside an engine. ``produced`` output tokens of ``output_tokens`` exist so far.

    While it decodes, ``offset + steps taken`` is what it has produced.
    """

    __slots__ = (
        "admitted_at", "arrival", "cached_tokens", "check_at", "computed", "decoding", "first_token_at", "footprint",
        "gap_from", "measured", "offset", "order", "output_tokens", "preemptions", "priority", "produced",
        "prompt_tokens", "request_id", "stop_step",
    )  # fmt: skip

    def __init__(
        self,
        request_id: int,
        prompt_tokens: int,
        output_tokens: int,
        footprint: Footprint,
        *,
        measured: bool = True,
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.footprint = footprint
        self.measured = measured
        self.priority: Priority = ()
        self.check_at = 0  # produced tokens at which to report, 0: never
        self.produced = 0
        self.computed = 0  # tokens whose keys and values are in the cache; kept up to date only in prefill
        self.decoding = False
        self.offset = 0
        self.order = 0  # of admission
        self.arrival = 0  # order of submission to the engine
        self.stop_step = NOT_STOPPING
        self.gap_from = -1.0  # when the last token came, if that was not the end of the step before
        self.admitted_at = -1.0
        self.first_token_at = -1.0
        self.cached_tokens = 0
        self.preemptions = 0

    @property
    def rank(self) -> tuple[Priority, int]:
        """Place in a priority queue: lower is served first."""
        return self.priority, self.arrival


def footprint_of(
    owner: object,
    stage: int,
    reused_tokens: Sequence[int],
    block_tokens: int,
    prompt_tokens: int,
    shared_prefix: tuple[str, int] | None = None,
    hash_ids: Sequence[int] = (),
    hash_block_tokens: int = 512,
) -> Footprint:
    """The prefix-cache footprint of a stage: which leading whole blocks other workflows may share.

    Raises ValueError when ``hash_block_tokens`` is not a multiple of ``block_tokens``.
    """
    shared: tuple[SharedRun, ...] = ()
    if hash_ids:
        runs: list[SharedRun] = []
        if hash_block_tokens % block_tokens:
            raise ValueError(
                f"hash blocks of {hash_block_tokens} tokens do not divide into KV blocks of {block_tokens} tokens"
            )
        left = prompt_tokens
        for hash_id in hash_ids:
            blocks = min(left, hash_block_tokens) // block_tokens
            if blocks <= 0:
                break
            runs.append((hash_id, blocks))
            left -= hash_block_tokens
        shared = tuple(runs)
    elif shared_prefix is not None:
        blocks = min(shared_prefix[1], prompt_tokens) // block_tokens
        if blocks:
            shared = ((shared_prefix[0], blocks),)
    return Footprint(owner, stage, reused_tokens, shared)


@mypyc_attr(allow_interpreted_subclasses=True)
class Engine:
    """See the module. ``now`` of consecutive calls never falls; the driver alternates `start` and `finish`."""

    def __init__(self, spec: EngineSpec) -> None:
        profile = spec.profile
        self.spec = spec
        self.name = spec.name
        self.itl = LogHistogram()
        self.busy_s = 0.0
        self.running_s = 0.0  # running requests integrated over time
        self.steps = 0
        self.prefill_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.preemptions = 0
        self.max_running = 0
        self.peak_blocks = 0
        self._priority_order = spec.scheduling == "priority"
        self._slots = spec.max_num_seqs
        self._budget = spec.max_num_batched_tokens
        self._block = spec.block_tokens
        self._mixed_step_s = profile.mixed_step_s
        self._profile = profile
        self.slow_down(1.0)
        self._skewed = profile.skewed
        self._orders = 0
        self._arrivals = 0
        self._step = 0
        self._begin_empty()

    def _begin_empty(self) -> None:
        spec = self.spec
        self.kv = KVCache(spec.num_kv_blocks - 1, spec.block_tokens, caching=spec.prefix_caching)
        self.end_at = -1.0  # end of what is under way, negative when nothing is
        self._waiting: deque[EngineRequest] = deque()
        self._waiting_heap: list[tuple[tuple[Priority, int], EngineRequest]] = []
        self._running: dict[int, EngineRequest] = {}  # in order of admission
        self._prefill: EngineRequest | None = None  # the one in mid-prefill, always the last admitted
        self._stops: list[tuple[int, int, EngineRequest]] = []  # (step, order of admission, request)
        # The decodes together; by (step - computed) mod block, which is constant while one decodes, their number:
        # in every step those with its number mod block need a new block.
        self._decodes = 0
        self._measured = 0
        self._context = 0
        self._takers = [0] * spec.block_tokens
        self._longest: list[tuple[int, int, EngineRequest]] = []  # (step - computed, order), kept if the profile asks
        # What is under way: ``_count`` steps, the first of which takes ``_first_s``; see `start`.
        self._count = 0
        self._first_s = 0.0
        self._slope_s = 0.0
        self._start_at = 0.0
        self._chunks: list[tuple[EngineRequest, int]] = []
        self._skipped: list[EngineRequest] = []  # decodes that get no token in this step
        self._stalled: list[EngineRequest] = []  # decodes that got none in the step before
        self._prepaid_blocks = 0

    @property
    def busy(self) -> bool:
        """Whether a step or stretch is under way."""
        return self.end_at >= 0.0

    @property
    def running(self) -> int:
        """Requests that take part in steps."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests inside the engine that wait for admission."""
        return len(self._waiting) + len(self._waiting_heap)

    @property
    def kv_used_fraction(self) -> float:
        """Referenced blocks over all usable blocks, as of the last step boundary."""
        return 1.0 - self.kv.free / self.kv.num_blocks

    def submit(self, request: EngineRequest) -> bool:
        """Hand a request over. Returns whether a stretch under way should be cut so that it can be admitted."""
        self._arrivals += 1
        request.arrival = self._arrivals
        blocked = not self._priority_order and bool(self._waiting)
        self._enqueue(request, front=False)
        return not blocked and len(self._running) < self._slots

    def remove(self, request: EngineRequest, now: float) -> int:
        """Take a request out at a step boundary; its blocks stay hittable. Returns the output tokens it has."""
        if request.request_id in self._running:
            self._take_out(request, now)
        elif self._priority_order:
            self._waiting_heap = [entry for entry in self._waiting_heap if entry[1] is not request]
            heapify(self._waiting_heap)
        else:
            self._waiting.remove(request)
        return request.produced

    def slow_down(self, factor: float) -> None:
        """Steps that begin from now on take ``factor`` times what the profile says; `cut` what is under way before."""
        profile, sizes = self._profile, range(self.spec.max_num_seqs + 1)
        self._factor = factor
        self._decode_constant_s = [exact(factor * profile.decode_constant_s(n)) for n in sizes]
        self._decode_slopes_s = [exact(factor * profile.decode_slope_s(n)) for n in sizes]

    def fail(self, now: float) -> None:
        """All that is inside is lost, and what the KV memory held; the tokens of whole steps before ``now`` are out.

        ``produced`` of each request is what it had by then. The step under way counts as time that the engine was
        busy, and as nothing else.
        """
        if self.busy:
            count = self._steps_until(now - self._start_at)
            if self._duration_s(count) > now - self._start_at:
                count -= 1
            lost_s = now - self._start_at
            if count:
                self._count = count
                self.end_at = self._start_at + self._duration_s(count)
                lost_s = now - self.end_at
                self.finish()
            else:
                self.prefill_tokens -= sum(tokens for _, tokens in self._chunks)
            self.busy_s += lost_s
            self.running_s += lost_s * len(self._running)
        for request in self._running.values():
            if request.decoding:
                request.produced = request.offset + self._step
        self._begin_empty()

    def start(self, now: float) -> float | None:
        """Begin the next step or stretch at ``now``; returns when it ends, None when there is nothing to do."""
        self._start_at = now
        while True:
            if self._prefill is not None or self._waiting or self._waiting_heap:
                taken = self._start_mixed(now)
            elif self._decodes:
                taken = self._start_decodes(now, 0)
            else:
                return None
            if taken:
                count = self._count
                self.end_at = end_at = now + (count * self._first_s + self._slope_s * (count * (count - 1) // 2))
                if len(self._running) > self.max_running:
                    self.max_running = len(self._running)
                return end_at

    def cut(self, now: float) -> float:
        """End a stretch at the first step boundary that is not before ``now``; returns when that is."""
        count = self._count
        if count > 1 and now < self.end_at:
            target_s = now - self._start_at
            low = self._steps_until(target_s)
            if low < count:
                self._count = low
                self.end_at = self._start_at + self._duration_s(low)
        return self.end_at

    def finish(self) -> list[EngineRequest]:
        """Apply what was under way; returns the requests that are done or due for a check, in admission order."""
        now = self.end_at
        self.end_at = -1.0
        count = self._count
        elapsed_s = now - self._start_at
        self.busy_s += elapsed_s
        self.running_s += elapsed_s * len(self._running)
        self.steps += count
        skipped = self._skipped
        if skipped:
            self._set_aside(skipped)
        kv = self.kv
        decodes = self._decodes
        if decodes:
            # A step with prefill has its blocks from the start.
            need = 0 if self._chunks else self._blocks_for(count) - self._prepaid_blocks
            if need:
                kv.allocate(need)
            if self._measured:
                self.itl.add_progression(self._first_s, self._slope_s, count, self._measured)
            self._context += decodes * count
            self.output_tokens += decodes * count
        self._step = step = self._step + count
        if skipped or self._stalled:
            self._stalled = [request for request in self._stalled if request not in skipped]
            self._count_stalls()
            self._put_back(skipped)
            self._stalled = skipped
            self._skipped = []
        used = kv.num_blocks - kv.free
        if used > self.peak_blocks:
            self.peak_blocks = used
        events: list[EngineRequest] = []
        stops = self._stops
        while stops and stops[0][0] <= step:
            stop_step, order, request = heappop(stops)
            if request.stop_step == stop_step and request.order == order:
                request.produced = request.offset + step
                events.append(request)
        if self._chunks:
            self._finish_chunks(now, events)
        for request in events:
            if request.produced >= request.output_tokens:
                self._take_out(request, now)
        return events

    def _duration_s(self, count: int) -> float:
        return count * self._first_s + self._slope_s * (count * (count - 1) // 2)

    def _steps_until(self, elapsed_s: float) -> int:
        """The smallest number of steps (at least 1) that last at least ``elapsed_s``."""
        half = 0.5 * self._slope_s
        linear = self._first_s - half
        guess = elapsed_s / linear
        if half:
            guess = (sqrt(linear * linear + 4.0 * half * elapsed_s) - linear) / (2.0 * half)
        count = max(int(guess), 1)
        # The root is rounded, the sums are exact: look at the neighbours.
        while self._duration_s(count) < elapsed_s:
            count += 1
        while count > 1 and self._duration_s(count - 1) >= elapsed_s:
            count -= 1
        return count

    def _blocks_for(self, count: int) -> int:
        """Blocks that the decodes take in the next ``count`` steps."""
        block = self._block
        takers = self._takers
        begin = self._step % block
        end = begin + count
        if end <= block:
            return sum(takers[begin:end])
        cycles, end = divmod(end - block, block)
        return sum(takers[begin:]) + cycles * self._decodes + sum(takers[:end])

    def _steps_with(self, blocks: int, limit: int) -> int:
        """How many steps, at most ``limit``, the decodes can take with so many free blocks."""
        block = self._block
        cycles, left = divmod(blocks, self._decodes)
        count = cycles * block
        if count >= limit:
            return limit
        takers = self._takers
        while count < limit:
            left -= takers[(self._step + count) % block]
            if left < 0:
                return count
            count += 1
        return limit

    def _start_decodes(self, now: float, prepaid_blocks: int) -> bool:
        stops = self._stops
        while True:
            stop_step, order, request = stops[0]
            if request.stop_step == stop_step and request.order == order:
                break
            heappop(stops)
        count = stop_step - self._step
        decodes = self._decodes
        free = self.kv.free + prepaid_blocks
        if free < decodes * (count // self._block + 1):
            count = self._steps_with(free, count)
            if not count:
                return self._start_tight(now)
        self._prepaid_blocks = prepaid_blocks
        self._count = count
        slope_s = self._decode_slopes_s[decodes]
        if self._skewed:
            self._first_s = self._decode_step_s(decodes, self._context, self._excess())
        else:
            self._first_s = self._decode_constant_s[decodes] + slope_s * self._context
        self._slope_s = slope_s * decodes
        return True

    def _decode_step_s(self, decodes: int, context: int, excess: int) -> float:
        """A pure decode step; the excess stays what it is while the batch does, so a stretch is linear in its steps."""
        constant_s = self._decode_constant_s[decodes]
        if excess:
            constant_s = exact(self._factor * self._profile.decode_constant_s(decodes, excess))
        return constant_s + self._decode_slopes_s[decodes] * context

    def _excess(self) -> int:
        """Batch size times the longest context of the decodes, minus their total; 0 if no step depends on it."""
        longest = self._longest
        while longest:
            if self._is_current(longest[0]):
                return self._decodes * (self._step - longest[0][0]) - self._context
            heappop(longest)
        return 0

    def _is_current(self, entry: tuple[int, int, EngineRequest]) -> bool:
        behind, order, request = entry
        return request.decoding and request.order == order and self._computed(request) == self._step - behind

    def _start_mixed(self, now: float) -> bool:
        """A step with prefill, if blocks do not run out for those that run; decodes alone if nobody fits."""
        kv = self.kv
        need = self._takers[self._step % self._block]
        budget = self._budget - self._decodes
        prefill = self._prefill
        if prefill is not None:
            chunk = min(prefill.prompt_tokens + prefill.produced - prefill.computed, budget)
            own = -(-(prefill.computed + chunk) // self._block) - prefill.footprint.blocks
            if need + own > kv.free:
                return self._start_tight(now)
        elif need > kv.free:
            return self._start_tight(now)
        if need:
            kv.allocate(need)
        chunks: list[tuple[EngineRequest, int]] = []
        if prefill is not None:
            if own:
                kv.allocate(own)
                prefill.footprint.blocks += own
            budget -= chunk
            self._schedule_chunk(prefill, chunk, chunks)
        self._admit(now, budget, chunks)
        if not chunks:
            return self._start_decodes(now, need)
        self._prepaid_blocks = need
        self._plan_mixed(self._decodes, self._context, self._excess() if self._skewed else 0, chunks)
        return True

    def _plan_mixed(self, decodes: int, context: int, excess: int, chunks: list[tuple[EngineRequest, int]]) -> None:
        self._chunks = chunks
        self._count = 1
        self._slope_s = 0.0
        if chunks:
            sizes = [(tokens, request.computed) for request, tokens in chunks]
            self._first_s = exact(self._factor * self._mixed_step_s(decodes, context, sizes, excess))
        else:
            self._first_s = self._decode_step_s(decodes, context, excess)

    def _schedule_chunk(self, request: EngineRequest, tokens: int, chunks: list[tuple[EngineRequest, int]]) -> None:
        chunks.append((request, tokens))
        self.prefill_tokens += tokens
        if request.computed + tokens >= request.prompt_tokens + request.produced:
            self._prefill = None
            if request.footprint.shared:
                self.kv.register(request.footprint, request.prompt_tokens // self._block)
        else:
            self._prefill = request

    def _admit(self, now: float, budget: int, chunks: list[tuple[EngineRequest, int]]) -> None:
        """Admit waiting requests while slots, token budget and blocks last; the first that does not fit stops it."""
        kv = self.kv
        block = self._block
        running = self._running
        waiting, heap = self._waiting, self._waiting_heap
        while budget > 0 and len(running) < self._slots:
            if waiting:
                request = waiting[0]
            elif heap:
                request = heap[0][1]
            else:
                return
            footprint = request.footprint
            known = request.prompt_tokens + request.produced
            hits, free_hits = kv.lookup(footprint, known)
            if -(-known // block) - hits > kv.free - free_hits:
                return
            if waiting:
                waiting.popleft()
            else:
                heappop(heap)
            kv.admit(footprint, hits)
            request.computed = cached = hits * block
            chunk = known - cached
            if chunk > budget:
                chunk = budget
            new_blocks = -(-(cached + chunk) // block) - hits
            if new_blocks:
                kv.allocate(new_blocks)
                footprint.blocks += new_blocks
            budget -= chunk
            self.cached_tokens += cached
            if request.admitted_at < 0.0:
                request.admitted_at = now
                request.cached_tokens = cached
            self._orders += 1
            request.order = self._orders
            running[request.request_id] = request
            self._schedule_chunk(request, chunk, chunks)

    def _start_tight(self, now: float) -> bool:
        """One step by the plain rules, because the free blocks do not suffice for those that run.

        Whoever cannot get its block has another preempted: the last admitted, or with priorities the worst. Nobody
        is admitted then. Returns False if everybody was put off and the step has to be planned anew.
        """
        kv = self.kv
        block = self._block
        order = list(self._running.values())
        planned: dict[int, tuple[int, int]] = {}  # tokens and new blocks by request id
        budget = self._budget
        preempted = False
        position = 0
        while position < len(order):
            request = order[position]
            if request.decoding:
                computed = self._computed(request)
                tokens = 1
                need = 1 if not computed % block else 0
            else:
                tokens = min(request.prompt_tokens + request.produced - request.computed, budget)
                need = -(-(request.computed + tokens) // block) - request.footprint.blocks
            gave_up = False
            while need > kv.free:
                victim = max(order, key=lambda r: r.rank) if self._priority_order else order[-1]
                place = order.index(victim)
                order.pop(place)
                given = planned.pop(victim.request_id, None)
                if given is not None:
                    budget += given[0]
                    position -= 1
                self._preempt(victim, now, given[1] if given is not None else 0)
                preempted = True
                if victim is request:
                    gave_up = True
                    break
            if gave_up:
                break
            if need:
                kv.allocate(need)
            budget -= tokens
            planned[request.request_id] = (tokens, need)
            position += 1
        chunks: list[tuple[EngineRequest, int]] = []
        prepaid = 0
        decodes = 0
        context = 0
        longest = 0
        self._skipped = []
        for request in order:
            given = planned.get(request.request_id)
            if given is None:
                if request.decoding:
                    self._skipped.append(request)
            elif request.decoding:
                prepaid += given[1]
                decodes += 1
                computed = self._computed(request)
                context += computed
                longest = max(longest, computed)
            else:
                request.footprint.blocks += given[1]
                self._schedule_chunk(request, given[0], chunks)
        if not preempted:
            self._admit(now, budget, chunks)
        if not decodes and not chunks:
            self._skipped = []
            return False
        self._prepaid_blocks = prepaid
        self._plan_mixed(decodes, context, decodes * longest - context if self._skewed else 0, chunks)
        return True

    def _computed(self, request: EngineRequest) -> int:
        """Tokens in the cache of a decoding request: all that is known but the last."""
        return request.prompt_tokens + request.offset + self._step - 1

    def _preempt(self, request: EngineRequest, now: float, new_blocks: int) -> None:
        """Back to waiting, to be recomputed; ``new_blocks`` were taken for the step that it loses."""
        request.preemptions += 1
        self.preemptions += 1
        self._take_out(request, now, new_blocks)
        self._enqueue(request, front=True)

    def _take_out(self, request: EngineRequest, now: float, new_blocks: int = 0) -> None:
        del self._running[request.request_id]
        footprint = request.footprint
        if request.decoding:
            request.produced = produced = request.offset + self._step
            computed = request.prompt_tokens + produced - 1
            self._leave_decodes(request, computed)
            footprint.blocks = -(-computed // self._block) + new_blocks
            request.decoding = False
            if request.gap_from < 0.0:
                request.gap_from = now
        else:
            computed = request.computed
            footprint.blocks += new_blocks
            if self._prefill is request:
                self._prefill = None
        request.stop_step = NOT_STOPPING
        self.kv.release(footprint, computed)
        request.computed = 0

    def _leave_decodes(self, request: EngineRequest, computed: int) -> None:
        self._decodes -= 1
        self._context -= computed
        self._takers[(self._step - computed) % self._block] -= 1
        if request.measured:
            self._measured -= 1

    def _join_decodes(self, request: EngineRequest, computed: int) -> None:
        self._decodes += 1
        self._context += computed
        self._takers[(self._step - computed) % self._block] += 1
        if self._skewed:
            longest = self._longest
            if len(longest) > 4 * self._slots + 64:  # those who left sink in it: keep it as small as the batch
                self._longest = longest = [entry for entry in longest if self._is_current(entry)]
                heapify(longest)
            heappush(longest, (self._step - computed, request.order, request))
        if request.measured:
            self._measured += 1

    def _set_aside(self, skipped: list[EngineRequest]) -> None:
        """Decodes that got no token in this step leave the others' sums while it is applied."""
        for request in skipped:
            self._leave_decodes(request, self._computed(request))
            request.stop_step = NOT_STOPPING
            if request.gap_from < 0.0:
                request.gap_from = self._start_at

    def _put_back(self, skipped: list[EngineRequest]) -> None:
        for request in skipped:
            request.offset -= 1
            self._join_decodes(request, self._computed(request))
            self._plan_stop(request)

    def _count_stalls(self) -> None:
        """The first gap of decodes that sat out the step before is longer than the step that ended it."""
        for request in self._stalled:
            if request.decoding and request.gap_from >= 0.0:
                if request.measured:
                    self.itl.add(self._first_s, -1)
                    self.itl.add(self._start_at + self._first_s - request.gap_from, 1)
                request.gap_from = -1.0

    def _finish_chunks(self, now: float, events: list[EngineRequest]) -> None:
        chunks = self._chunks
        self._chunks = []
        for request, tokens in chunks:
            request.computed += tokens
            if request.computed < request.prompt_tokens + request.produced:
                continue
            self.output_tokens += 1
            request.produced += 1
            if request.first_token_at < 0.0:
                request.first_token_at = now
            elif request.measured:
                self.itl.add(now - request.gap_from, 1)
            request.gap_from = -1.0
            request.decoding = True
            request.offset = request.produced - self._step
            self._join_decodes(request, request.computed)
            if request.produced >= request.output_tokens or request.produced == request.check_at:
                events.append(request)
            else:
                self._plan_stop(request)

    def _plan_stop(self, request: EngineRequest) -> None:
        stop = request.output_tokens
        if request.check_at and request.check_at < stop:
            stop = request.check_at
        request.stop_step = stop - request.offset
        heappush(self._stops, (request.stop_step, request.order, request))

    def _enqueue(self, request: EngineRequest, *, front: bool) -> None:
        if self._priority_order:
            heappush(self._waiting_heap, (request.rank, request))
        elif front:
            self._waiting.appendleft(request)
        else:
            self._waiting.append(request)
