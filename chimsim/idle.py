"""What an engine can take, and how long it needs for a workflow that has it to itself.

Arithmetic over a profile; only for graphs an engine is simulated.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf

from chimsim.config import EngineSpec
from chimsim.engine import Engine, EngineRequest
from chimsim.kvcache import KVCache
from chimsim.layout import Layout
from chimsim.ticks import exact, exact_not_before
from traces import Run, Stage
from traces.graph import children, is_chain, parents


def fit(spec: EngineSpec, prompt_tokens: int, output_tokens: int) -> int:
    """The output tokens that an engine can give this call: its own number, fewer, or 0 if the prompt is too long."""
    return max(min(output_tokens, longest_sequence(spec) - prompt_tokens), 0)


def longest_sequence(spec: EngineSpec) -> int:
    """The most tokens, of prompt and answer together, that a call may have on the engine."""
    kv_tokens = (spec.num_kv_blocks - 1) * spec.block_tokens
    # The last token's keys and values are never stored.
    return min(spec.max_model_len, kv_tokens + 1)


def oversize_message(workflow_id: str, index: int, stage: Stage, spec: EngineSpec) -> str:
    """What to say of a stage that can never fit on the engine."""
    kv_tokens = (spec.num_kv_blocks - 1) * spec.block_tokens
    needed = stage.prompt_tokens + stage.output_tokens
    if needed > spec.max_model_len:
        limit = f"max_model_len {spec.max_model_len} tokens"
    else:
        limit = f"KV memory for {kv_tokens} tokens"
    return (
        f"workflow {workflow_id}, stage {index} ({stage.name}): {stage.prompt_tokens} prompt + {stage.output_tokens} "
        f"output tokens do not fit engine {spec.name} ({limit}); use --oversize reject or --oversize clip"
    )


def idle_latency_s(spec: EngineSpec, run: Run, first_s: float = 0.0, each_s: float = 0.0) -> float:
    """End-to-end seconds of a workflow's stages alone on an idle engine, tool delays included.

    The predictors take ``first_s`` before the first call and ``each_s`` before every other. What an engine does with
    one request at a time: prefill in chunks of the token budget after what the previous stage left in the prefix
    cache, then one decode step a token. The branches of a graph run side by side.
    """
    if not is_chain(run.stages):
        return _graph_latency_s(spec, run, first_s, each_s)
    block, budget, profile = spec.block_tokens, spec.max_num_batched_tokens, spec.profile
    constant, slope = exact(profile.decode_constant_s(1)), exact(profile.decode_slope_s())
    total_s = exact_not_before(first_s + each_s * (len(run.stages) - 1))
    hits = (_plain_hits(spec, run) if spec.prefix_caching else [0] * len(run.stages)) or _hits(spec, run)
    for index, stage in enumerate(run.stages):
        prompt = stage.prompt_tokens
        output = fit(spec, prompt, stage.output_tokens)
        computed = hits[index] * block
        while computed < prompt:
            chunk = min(prompt - computed, budget)
            total_s += exact(profile.mixed_step_s(0, 0, [(chunk, computed)]))
            computed += chunk
        steps = output - 1
        total_s += steps * (constant + slope * prompt) + slope * (steps * (steps - 1) // 2)
        if index:
            total_s += exact_not_before(stage.delay_s)
    return total_s


def _hits(spec: EngineSpec, run: Run) -> list[int]:
    """How many blocks of each stage's prompt an engine that serves this chain alone has in its prefix cache."""
    layout, block = Layout(0, run), spec.block_tokens
    cache = KVCache(spec.num_kv_blocks - 1, block, caching=spec.prefix_caching)
    found = []
    for index, stage in enumerate(run.stages):
        prompt = stage.prompt_tokens
        tokens = prompt + fit(spec, prompt, stage.output_tokens) - 1
        held = layout.footprint(spec, index, stage)
        hits, _ = cache.lookup(held, prompt)
        cache.admit(held, hits)
        held.blocks = min(-(-tokens // block), cache.num_blocks)
        cache.allocate(held.blocks - hits)
        cache.register(held, prompt // block)
        cache.release(held, tokens)
        found.append(hits)
    return found


def _plain_hits(spec: EngineSpec, run: Run) -> list[int] | None:
    """`_hits` by arithmetic; None where prompts are named by hashes, or where it might not all stay in memory.

    Nearly every workflow is plain, and each is asked for once on every engine it may end on: it takes a tenth of the
    time.
    """
    if len(run.stages) == 1:
        return [0]
    block = spec.block_tokens
    free_blocks = spec.num_kv_blocks - 1
    cached: dict[str, int] = {}  # blocks of shared prefixes
    before = -1, 0  # of the sequence before: blocks of its shared prefix, and of all of it
    found = []
    for stage in run.stages:
        if stage.hash_ids:
            return None
        prompt, prefix = stage.prompt_tokens, stage.shared_prefix
        shared = 0 if prefix is None else prefix.tokens // block
        # The last token is computed anyhow, so that there is something to sample from.
        most = (prompt - 1) // block
        hits = min(most, shared)
        if prefix is not None:
            hits = min(hits, cached.get(prefix.id, 0))
            cached[prefix.id] = max(shared, cached.get(prefix.id, 0))
        if hits == shared == before[0]:
            hits = max(hits, min(most, stage.reused_tokens // block, before[1]))
        tokens = prompt + fit(spec, prompt, stage.output_tokens) - 1
        free_blocks -= -(-tokens // block) - hits
        if free_blocks < 0:
            return None
        before = shared, tokens // block
        found.append(hits)
    return found


def _graph_latency_s(spec: EngineSpec, run: Run, first_s: float, each_s: float) -> float:
    """A simulated engine that serves this workflow alone."""
    engine = Engine(spec)
    layout = Layout(0, run)
    stages, waiting_for = run.stages, children(run.stages)
    left = [len(parents(stages, index)) for index in range(len(stages))]
    begin_s = exact_not_before(first_s)
    each_s = exact_not_before(each_s)

    def after_s(index: int) -> float:
        return each_s + exact_not_before(stages[index].delay_s)

    ready = [(begin_s + (after_s(index) if index else 0.0), index) for index in range(len(stages)) if not left[index]]
    heapify(ready)
    now = 0.0
    while ready or engine.busy:
        now = min(ready[0][0] if ready else inf, engine.end_at if engine.busy else inf)
        if engine.busy and engine.end_at == now:
            for request in engine.finish():
                for child in waiting_for[request.request_id]:
                    left[child] -= 1
                    if not left[child]:
                        heappush(ready, (now + after_s(child), child))
        wanted = False
        while ready and ready[0][0] == now:
            _, index = heappop(ready)
            stage = stages[index]
            output = fit(spec, stage.prompt_tokens, stage.output_tokens)
            held = layout.footprint(spec, index, stage)
            wanted = engine.submit(EngineRequest(index, stage.prompt_tokens, output, held)) or wanted
        if not engine.busy:
            engine.start(now)
        elif wanted:
            engine.cut(now)
    return now
