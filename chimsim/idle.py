"""What an engine can take, and how long it needs for a workflow that has it to itself.

Arithmetic over a profile; nothing here runs an engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from chimsim.config import EngineSpec
from chimsim.engine import footprint_of
from chimsim.kvcache import Footprint, KVCache
from chimsim.ticks import exact, exact_not_before
from traces import Run, Stage


def fit(spec: EngineSpec, prompt_tokens: int, output_tokens: int) -> int:
    """The output tokens that an engine can give this call: its own number, fewer, or 0 if the prompt is too long."""
    kv_tokens = (spec.num_kv_blocks - 1) * spec.block_tokens
    # The last token's keys and values are never stored.
    room = min(spec.max_model_len - prompt_tokens, kv_tokens + 1 - prompt_tokens)
    return max(min(output_tokens, room), 0)


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


def idle_latency_s(spec: EngineSpec, run: Run, overhead_s: float = 0.0) -> float:
    """End-to-end seconds of a workflow's stages alone on an idle engine, tool delays and ``overhead_s`` included.

    What an engine does with one request at a time: prefill in chunks of the token budget after what the previous
    stage left in the prefix cache, then one decode step a token.
    """
    block, budget, profile = spec.block_tokens, spec.max_num_batched_tokens, spec.profile
    constant, slope = exact(profile.decode_constant_s(1)), exact(profile.decode_slope_s())
    cache = KVCache(spec.num_kv_blocks - 1, block, caching=spec.prefix_caching)
    reused = tuple(stage.reused_tokens for stage in run.stages)
    total_s = exact_not_before(overhead_s)
    for index, stage in enumerate(run.stages):
        prompt = stage.prompt_tokens
        output = fit(spec, prompt, stage.output_tokens)
        held = footprint(spec, 0, index, reused, stage)
        hits, _ = cache.lookup(held, prompt)
        cache.admit(held, hits)
        held.blocks = -(-(prompt + output - 1) // block)
        cache.allocate(held.blocks - hits)
        cache.register(held, prompt // block)
        cache.release(held, prompt + output - 1)
        computed = hits * block
        while computed < prompt:
            chunk = min(prompt - computed, budget)
            total_s += exact(profile.mixed_step_s(0, 0, [(chunk, computed)]))
            computed += chunk
        steps = output - 1
        total_s += steps * (constant + slope * prompt) + slope * (steps * (steps - 1) // 2)
        if index:
            total_s += exact_not_before(stage.delay_s)
    return total_s


def footprint(spec: EngineSpec, owner: object, index: int, reused: Sequence[int], stage: Stage) -> Footprint:
    prefix = stage.shared_prefix
    shared = None if prefix is None else (prefix.id, prefix.tokens)
    return footprint_of(
        owner, index, reused, spec.block_tokens, stage.prompt_tokens, shared, stage.hash_ids, stage.hash_block_tokens
    )
