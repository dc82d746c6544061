"""``chimsim mock-engine``: a fake vLLM to rehearse with.

It parses, builds the engine's settings and serves; what is served is in `chimsim.live.mock_engine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from chimsim.config import Scheduling
    from chimsim.live.mock_engine import MockEngine

Positive = Annotated[int | None, typer.Option(min=1, help="vLLM's setting of that name; default: the profile's.")]


def mock_engine_command(
    profile: Annotated[str, typer.Option(help="The engine to imitate: a model, an alias or a profile's TOML file.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8000,
    model: Annotated[str | None, typer.Option(help="The name to serve it under; default: the profile's model.")] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    speed: Annotated[float, typer.Option(help="How many times faster than the real engine.")] = 1.0,
    max_num_seqs: Positive = None,
    max_num_batched_tokens: Positive = None,
    num_kv_tokens: Annotated[int | None, typer.Option(min=1, help="KV memory; default: the profile's.")] = None,
    max_model_len: Positive = None,
    scheduling: Annotated[str, typer.Option(help="fcfs (ignores priority, as vLLM does) or priority.")] = "fcfs",
    prefix_caching: Annotated[bool, typer.Option("--prefix-caching/--no-prefix-caching", help="Keep prefixes.")] = True,
    fail_rate: Annotated[
        float, typer.Option(help="Share of completions that fail: 500, an error in the stream, a lost connection.")
    ] = 0.0,
    hang_rate: Annotated[float, typer.Option(help="Share of completions that are never answered.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of answers, failures and hangs.")] = 0,
) -> None:
    """Serve a fake vLLM: its HTTP interface, with the step times of a profile in real time. No GPU needed.

    \b
    chimsim mock-engine --profile qwen7b --port 8001
    chimsim mock-engine --profile my-gpu.toml --port 8002 --speed 10 --scheduling priority
    chimsim mock-engine --profile qwen7b --port 0 --fail-rate 0.01 --hang-rate 0.01

    Answers are words without meaning, the same for the same prompt and seed, and end after 256 tokens on average
    unless the request says ignore_eos. Times, batches, queues, preemptions and prefix-cache hits are what the
    simulator would have. A line on stdout says when it serves; Ctrl-C or SIGTERM ends it.
    """
    from calibration.profile import load_profile
    from chimsim.config import EngineSpec
    from chimsim.live.mock_engine import MockEngine

    known = load_profile(profile)
    seqs = known.max_num_seqs if max_num_seqs is None else max_num_seqs
    kv_tokens = known.num_kv_tokens if num_kv_tokens is None else num_kv_tokens
    spec = EngineSpec(
        name=model or known.model,
        model=known.model,
        profile=known,
        max_num_seqs=seqs,
        max_num_batched_tokens=max_num_batched_tokens or known.max_num_batched_tokens,
        num_kv_blocks=kv_tokens // known.block_tokens,
        max_batch_size=seqs,
        max_model_len=max_model_len or known.max_model_len,
        block_tokens=known.block_tokens,
        scheduling=cast("Scheduling", scheduling),  # checked by the spec
        prefix_caching=prefix_caching,
    )
    mock = MockEngine(spec, served=model, speed=speed, seed=seed, fail_rate=fail_rate, hang_rate=hang_rate)
    with contextlib.suppress(KeyboardInterrupt):  # where the loop takes no signal handlers
        asyncio.run(_serve(mock, host, port))


async def _serve(mock: MockEngine, host: str, port: int) -> None:
    from chimsim.live.mock_engine import serving

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with serving(mock, host, port) as url:
        # What is loaded by now stays: a full collection that walks all of it would hold up the steps.
        gc.collect()
        gc.freeze()
        typer.echo(f"serving {mock.served} on {url}")
        await stop.wait()
