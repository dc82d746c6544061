"""The reference engine: every step taken, every block an object, the rules written as plainly as possible.

It has the interface of `chimsim.engine.Engine`, so that a whole simulation can run on it and must give the same
instants. It is quadratic and slow on purpose.
"""

from __future__ import annotations

from collections.abc import Hashable

import pytest

import chimsim
from chimsim.config import EngineSpec
from chimsim.engine import EngineRequest
from chimsim.histogram import LogHistogram
from chimsim.kvcache import Footprint
from chimsim.ticks import exact


class Block:
    """16 tokens of keys and values: how many requests use it, and under which name it can be hit."""

    def __init__(self) -> None:
        self.uses = 0
        self.name: Hashable | None = None


class BlockCache:
    """Free blocks in one list, the least recently used first; named ones can be hit until they are taken."""

    def __init__(self, num_blocks: int, block_tokens: int, caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.caching = caching
        self.free_list = [Block() for _ in range(num_blocks)]
        self.named: dict[Hashable, Block] = {}

    @property
    def free(self) -> int:
        return len(self.free_list)

    def forget(self, owner: Hashable) -> None:
        """Nothing to do: a workflow that is over asks for nothing any more."""

    def hits(self, names: list[Hashable]) -> list[Block]:
        found = []
        for name in names:
            if name not in self.named:
                break
            found.append(self.named[name])
        return found if self.caching else []

    def use(self, block: Block) -> None:
        if not block.uses:
            self.free_list.remove(block)
        block.uses += 1

    def take(self) -> Block:
        block = self.free_list.pop(0)
        if block.name is not None:
            del self.named[block.name]
            block.name = None
        block.uses = 1
        return block

    def call_all(self, blocks: list[Block], names: list[Hashable]) -> None:
        """Name filled blocks, as many as there are names for."""
        if self.caching:
            for block, name in zip(blocks, names, strict=False):
                self.call(block, name)

    def call(self, block: Block, name: Hashable) -> None:
        """Name a filled block. Of a shared one the first copy counts, of a workflow's own the newest."""
        if block.name == name:
            return
        other = self.named.get(name)
        if other is not None:
            if name[0] == "shared":  # type: ignore[index]
                return
            other.name = None
        block.name = name
        self.named[name] = block

    def give_back(self, blocks: list[Block]) -> None:
        for block in reversed(blocks):
            block.uses -= 1
            if not block.uses:
                self.free_list.append(block)


def block_names(footprint: Footprint, known_tokens: int, block_tokens: int) -> list[Hashable]:
    """The names of the whole blocks of what is known: shared ones first, then the workflow's own.

    A block of the workflow's own is named after the stage that wrote it first: it is this stage's unless every
    stage since then kept all of its tokens.
    """
    shared: list[Hashable] = [("shared", key, index) for key, count in footprint.shared for index in range(count)]
    names = list(shared)
    for index in range(len(shared), known_tokens // block_tokens):
        origin = footprint.stage
        while origin > 0 and footprint.reused_tokens[origin] >= (index + 1) * block_tokens:
            origin -= 1
        names.append(("own", footprint.owner, origin, len(shared), index))
    return names


class Job:
    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.computed = 0
        self.blocks: list[Block] = []
        self.scheduled = 0
        self.last_token_at = -1.0

    @property
    def known(self) -> int:
        return self.request.prompt_tokens + self.request.produced


takes_any_engine = pytest.mark.skipif(chimsim.compiled(), reason="compiled code takes no engine but its own")


class ReferenceEngine:
    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.factor = 1.0
        self.start_at = -1.0
        self.itl = LogHistogram()
        self.busy_s = self.running_s = 0.0
        self.steps = self.prefill_tokens = self.cached_tokens = self.output_tokens = 0
        self.preemptions = self.max_running = self.peak_blocks = 0
        self.arrivals = 0
        self.begin_empty()

    def begin_empty(self) -> None:
        self.kv = BlockCache(self.spec.num_kv_blocks - 1, self.spec.block_tokens, self.spec.prefix_caching)
        self.end_at = -1.0
        self.waiting_jobs: list[Job] = []
        self.running_jobs: list[Job] = []
        self.jobs: dict[int, Job] = {}

    def slow_down(self, factor: float) -> None:
        self.factor = factor

    def fail(self, now: float) -> None:
        """The step under way comes to nothing; tokens of steps before it are in ``produced`` already."""
        if self.busy:
            self.busy_s += now - self.start_at
            self.running_s += (now - self.start_at) * len(self.running_jobs)
        self.begin_empty()

    @property
    def busy(self) -> bool:
        return self.end_at >= 0

    @property
    def running(self) -> int:
        return len(self.running_jobs)

    @property
    def waiting(self) -> int:
        return len(self.waiting_jobs)

    @property
    def kv_used_fraction(self) -> float:
        return 1.0 - self.kv.free / self.kv.num_blocks

    def names(self, job: Job) -> list[Hashable]:
        return block_names(job.request.footprint, job.known, self.spec.block_tokens)

    def submit(self, request: EngineRequest) -> bool:
        self.arrivals += 1
        request.arrival = self.arrivals
        job = Job(request)
        job.last_token_at = request.gap_from
        self.jobs[request.request_id] = job
        self.enqueue(job, front=False)
        return True

    def enqueue(self, job: Job, *, front: bool) -> None:
        if front:
            self.waiting_jobs.insert(0, job)
        else:
            self.waiting_jobs.append(job)
        if self.spec.scheduling == "priority":
            self.waiting_jobs.sort(key=lambda j: j.request.rank)

    def remove(self, request: EngineRequest, now: float) -> int:
        job = self.jobs.pop(request.request_id)
        if job in self.running_jobs:
            self.running_jobs.remove(job)
            self.free(job)
        else:
            self.waiting_jobs.remove(job)
        request.decoding = False
        request.gap_from = job.last_token_at
        return request.produced

    def free(self, job: Job) -> None:
        self.name_blocks(job, job.computed)
        self.kv.give_back(job.blocks)
        job.blocks = []
        job.computed = 0

    def name_blocks(self, job: Job, tokens: int) -> None:
        self.kv.call_all(job.blocks[: tokens // self.spec.block_tokens], self.names(job))

    def cut(self, now: float) -> float:
        return self.end_at

    def start(self, now: float) -> float | None:
        if not self.waiting_jobs and not self.running_jobs:
            return None
        self.start_at = now
        while not self.schedule(now):
            pass
        decodes = [j for j in self.running_jobs if j.scheduled and j.request.decoding]
        chunks = [(j.scheduled, j.computed) for j in self.running_jobs if j.scheduled and not j.request.decoding]
        n = len(decodes)
        context = sum(j.computed for j in decodes)
        excess = n * max((j.computed for j in decodes), default=0) - context
        profile, factor = self.spec.profile, self.factor
        if chunks:
            duration_s = exact(factor * profile.mixed_step_s(n, context, chunks, excess))
        else:
            constant_s, slope_s = profile.decode_constant_s(n, excess), profile.decode_slope_s(n)
            duration_s = exact(factor * constant_s) + exact(factor * slope_s) * context
        self.end_at = now + duration_s
        self.max_running = max(self.max_running, len(self.running_jobs))
        return self.end_at

    def schedule(self, now: float) -> bool:
        block_tokens = self.spec.block_tokens
        budget = self.spec.max_num_batched_tokens
        preempted = False
        for job in self.running_jobs:
            job.scheduled = 0
        position = 0
        while position < len(self.running_jobs):
            job = self.running_jobs[position]
            tokens = min(job.known - job.computed, budget)
            need = -(-(job.computed + tokens) // block_tokens) - len(job.blocks)
            gave_up = False
            while need > self.kv.free:
                if self.spec.scheduling == "priority":
                    victim = max(self.running_jobs, key=lambda j: j.request.rank)
                else:
                    victim = self.running_jobs[-1]
                if victim.scheduled:
                    budget += victim.scheduled
                    position -= 1
                self.preempt(victim)
                preempted = True
                if victim is job:
                    gave_up = True
                    break
            if gave_up:
                break
            job.blocks += [self.kv.take() for _ in range(need)]
            job.scheduled = tokens
            budget -= tokens
            if not job.request.decoding and job.computed + tokens == job.known:
                self.share_prompt(job)
            position += 1
        if not preempted:
            self.admit(now, budget)
        return any(job.scheduled for job in self.running_jobs)

    def share_prompt(self, job: Job) -> None:
        """In the step that ends its prefill others may hit the prompt's shared blocks."""
        shared = sum(count for _, count in job.request.footprint.shared)
        self.name_blocks(job, min(shared * self.spec.block_tokens, job.request.prompt_tokens))

    def preempt(self, victim: Job) -> None:
        self.running_jobs.remove(victim)
        self.free(victim)
        victim.scheduled = 0
        victim.request.decoding = False
        victim.request.preemptions += 1
        self.preemptions += 1
        self.enqueue(victim, front=True)

    def admit(self, now: float, budget: int) -> None:
        block_tokens = self.spec.block_tokens
        while self.waiting_jobs and budget > 0 and len(self.running_jobs) < self.spec.max_num_seqs:
            job = self.waiting_jobs[0]
            request = job.request
            hits = self.kv.hits(self.names(job)[: (job.known - 1) // block_tokens])
            free_hits = sum(1 for block in hits if not block.uses)
            if -(-job.known // block_tokens) - len(hits) > self.kv.free - free_hits:
                return
            self.waiting_jobs.pop(0)
            for block in hits:
                self.kv.use(block)
            job.blocks = hits
            job.computed = len(hits) * block_tokens
            tokens = min(job.known - job.computed, budget)
            need = -(-(job.computed + tokens) // block_tokens) - len(hits)
            job.blocks = hits + [self.kv.take() for _ in range(need)]
            job.scheduled = tokens
            budget -= tokens
            self.cached_tokens += job.computed
            if request.admitted_at < 0:
                request.admitted_at = now
                request.cached_tokens = job.computed
            self.running_jobs.append(job)
            if job.computed + tokens == job.known:
                self.share_prompt(job)

    def finish(self) -> list[EngineRequest]:
        now, self.end_at = self.end_at, -1.0
        self.busy_s += now - self.start_at
        self.running_s += (now - self.start_at) * len(self.running_jobs)
        self.steps += 1
        self.peak_blocks = max(self.peak_blocks, self.kv.num_blocks - self.kv.free)
        events = []
        for job in list(self.running_jobs):
            if not job.scheduled:
                continue
            request = job.request
            if not request.decoding:
                self.prefill_tokens += job.scheduled
            job.computed += job.scheduled
            if job.computed < job.known:
                continue
            request.decoding = True
            request.produced += 1
            self.output_tokens += 1
            if request.first_token_at < 0:
                request.first_token_at = now
            elif request.measured:
                self.itl.add(now - job.last_token_at, 1)
            job.last_token_at = now
            if request.produced >= request.output_tokens or request.produced == request.check_at:
                events.append(request)
        for request in events:
            if request.produced >= request.output_tokens:
                job = self.jobs.pop(request.request_id)
                self.running_jobs.remove(job)
                self.free(job)
        return events
