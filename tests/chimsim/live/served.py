"""Fake engines that answer on a port while a test runs, on a loop in a thread of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from chimsim.config import combo_cluster
from chimsim.live.mock_engine import MockEngine, serving


@contextmanager
def engines_served(folder: Path, profiles: Sequence[str], *, slots: int = 4, speed: float = 10.0) -> Iterator[Path]:
    """A cluster file with the engines' addresses, in the folder."""
    specs = [combo_cluster(profile, max_batch_size=slots).engines[0] for profile in profiles]
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    stack = AsyncExitStack()

    async def start() -> list[str]:
        return [await stack.enter_async_context(serving(MockEngine(s, speed=speed), "127.0.0.1", 0)) for s in specs]

    try:
        urls = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
        tables = [
            f'[[engine]]\nmodel = "{spec.model}"\nmax_batch_size = {slots}\nurl = "{url}"\n'
            for spec, url in zip(specs, urls, strict=True)
        ]
        path = folder / "live.toml"
        path.write_text("\n".join(tables))
        yield path
    finally:
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
