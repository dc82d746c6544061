"""A server that behaves like vLLM, with an engine that follows a known step-time law, and that can misbehave.

It runs in a thread with a loop of its own, so that the command line can be tested against it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from aiohttp import web

Law = Callable[[int, int, Sequence[tuple[int, int]]], float]


def quick_law(decodes: int, context: int, chunks: Sequence[tuple[int, int]]) -> float:
    """Milliseconds, so that tests are fast, yet longer than what a loop adds."""
    return 0.002 + 2e-4 * decodes + 1e-5 * sum(tokens for tokens, _ in chunks)


@dataclass
class Job:
    """A request inside the engine."""

    prompt: int
    wanted: int
    tokens: asyncio.Queue[int]
    done: int = 0
    computed: int = 0
    scheduled_at: float = -1.0


@dataclass
class Stub:
    """What the server is and does wrong.

    ``trouble`` comes with each completion from the one numbered ``trouble_from`` on: ``500``, ``hang``, ``close``
    (in mid-stream), ``stream-error``, ``done`` (nothing but its end), ``abort``, ``garbage``, ``html``, ``no-usage``.
    """

    models: tuple[str, ...] = ("tiny",)
    law: Law = quick_law
    max_num_seqs: int = 4
    budget: int = 256
    num_blocks: int = 400
    block: int = 16
    max_model_len: int = 512
    vocabulary: int = 50_000
    metrics: str = "new"
    running_counts: bool = True
    per_request_metrics: bool = False
    trouble: str = ""
    trouble_from: int = 0
    prefix_hits: int = 0
    hits_a_request: int = 0
    preemptions_a_request: int = 0
    others_running: int = 0
    say_max_model_len: bool = True
    key: str = ""
    completions: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    prefill_sum_s: float = 0.0
    prefill_count: int = 0
    preemptions: int = 0
    steps: list[tuple[int, int, tuple[tuple[int, int], ...]]] = field(default_factory=list)
    waiting: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)

    async def engine(self) -> None:
        """Steps for as long as it is there: decodes first, then chunks of prefill while budget and slots last."""
        clock = asyncio.get_running_loop().time
        while True:
            while self.waiting and len(self.running) < self.max_num_seqs:
                job = self.waiting.pop(0)
                job.scheduled_at = clock()
                self.running.append(job)
            decodes = [job for job in self.running if job.computed >= job.prompt]
            room, chunks = self.budget - len(decodes), []
            for job in self.running:
                tokens = min(room, job.prompt - job.computed)
                if tokens > 0:
                    chunks.append((job, tokens, job.computed))
                    room -= tokens
            if not decodes and not chunks:
                await asyncio.sleep(0.001)
                continue
            context = sum(job.prompt + job.done for job in decodes)
            step = (len(decodes), context, tuple((tokens, before) for _, tokens, before in chunks))
            self.steps.append(step)
            await asyncio.sleep(self.law(*step))
            for job, tokens, _ in chunks:
                job.computed += tokens
                if job.computed >= job.prompt:
                    self.prefill_sum_s += clock() - job.scheduled_at
                    self.prefill_count += 1
                    decodes.append(job)
            for job in decodes:
                job.done += 1
                job.tokens.put_nowait(job.done)
                if job.done >= job.wanted and job in self.running:
                    self.running.remove(job)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.completions += 1
        trouble = self.trouble if self.completions > self.trouble_from else ""
        if trouble == "500":
            return _error(500, "EngineCore encountered an issue")
        if trouble == "html":
            return web.Response(text="<html>a proxy</html>", content_type="text/html")
        if trouble == "hang":
            while request.transport is not None:  # until the client has had enough
                await asyncio.sleep(0.01)
        if body["model"] not in self.models:
            return _error(404, f"The model `{body['model']}` does not exist.")
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        prompt = len(body["prompt"])
        bad = [token for token in body["prompt"] if token >= self.vocabulary]
        if bad or trouble == "stream-error":
            message = f"Token id {bad[0]} is out of vocabulary" if bad else "EngineCore died"
            return await _end(reply, {"error": {"message": message, "code": 400 if bad else 500}})
        if trouble in ("done", "garbage"):
            return await _end(reply, "not JSON" if trouble == "garbage" else None)
        wanted = min(body["max_tokens"], self.max_model_len - prompt)
        job = Job(prompt, wanted, asyncio.Queue())
        self.waiting.append(job)
        self.prefix_hits += self.hits_a_request
        self.preemptions += self.preemptions_a_request
        try:
            while True:
                done = await job.tokens.get()
                while not job.tokens.empty():
                    done = job.tokens.get_nowait()  # several tokens in one chunk, as a busy server does it
                if trouble == "close" and request.transport is not None:
                    request.transport.close()
                    return reply
                reason = "abort" if trouble == "abort" else "length" if done >= wanted else None
                chunk: dict[str, Any] = {"choices": [{"text": "", "finish_reason": reason}]}
                if self.running_counts:
                    chunk["usage"] = {"prompt_tokens": prompt, "completion_tokens": done}
                await _send(reply, chunk)
                if reason is not None:
                    break
            last: dict[str, Any] = {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": done}}
            if self.per_request_metrics:
                last["metrics"] = {"queue_time_ms": 1.5}
            return await _end(reply, None if trouble == "no-usage" else last)
        finally:
            for jobs in (self.waiting, self.running):
                if job in jobs:
                    jobs.remove(job)

    async def metrics_text(self, _: web.Request) -> web.Response:
        if not self.metrics:
            return web.json_response({"detail": "Not Found"}, status=404)
        if self.metrics == "foreign":
            return web.Response(text="python_info 1.0\n")
        old = self.metrics == "old"
        used = sum(ceil((job.computed + job.done) / self.block) for job in self.running) / self.num_blocks
        label = '{engine="0",model_name="tiny"}'
        prefix = "vllm:gpu_" if old else "vllm:"
        cache = f'block_size="{self.block}",num_gpu_blocks="{self.num_blocks}",enable_prefix_caching="True"'
        lines = [
            f"vllm:num_requests_running{label} {len(self.running) + self.others_running}",
            f"vllm:num_requests_waiting{label} {len(self.waiting)}",
            f"{'vllm:gpu_cache_usage_perc' if old else 'vllm:kv_cache_usage_perc'}{label} {used}",
            f"vllm:num_preemptions_total{label} {self.preemptions}",
            f"vllm:num_preemptions_created{label} 1.7e9",
            f"{prefix}prefix_cache_hits_total{label} {self.prefix_hits}",
            f"vllm:cache_config_info{{{cache}}} 1.0",
        ]
        if not old:
            lines += [
                f"vllm:request_prefill_time_seconds_sum{label} {self.prefill_sum_s}",
                f"vllm:request_prefill_time_seconds_count{label} {self.prefill_count}",
            ]
        return web.Response(text="\n".join(lines) + "\n")

    async def list_models(self, request: web.Request) -> web.Response:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return _error(401, "Unauthorized")
        said = {"max_model_len": self.max_model_len} if self.say_max_model_len else {}
        return web.json_response({"data": [{"id": name, **said} for name in self.models]})

    def application(self) -> web.Application:
        app = web.Application()

        async def version(_: web.Request) -> web.Response:
            return web.json_response({"version": "0.32.0"})

        app.router.add_get("/version", version)
        app.router.add_get("/v1/models", self.list_models)
        app.router.add_get("/metrics", self.metrics_text)
        app.router.add_post("/v1/completions", self.complete)
        return app


@contextlib.contextmanager
def serving(stub: Stub) -> Iterator[str]:
    """The stub on a free port of this machine; its URL."""
    ready, urls, loop = threading.Event(), [], asyncio.new_event_loop()

    async def serve() -> None:
        runner = web.AppRunner(stub.application(), shutdown_timeout=0.5)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        engine = asyncio.create_task(stub.engine())
        ready.set()
        try:
            await stop.wait()
        finally:
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)
            await runner.cleanup()

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(10.0)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10.0)
        loop.close()


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "x", "code": status}}, status=status)


async def _send(reply: web.StreamResponse, event: Any) -> None:
    text = event if isinstance(event, str) else json.dumps(event)
    await reply.write(f"data: {text}\n\n".encode())


async def _end(reply: web.StreamResponse, event: Any) -> web.StreamResponse:
    if event is not None:
        await _send(reply, event)
    await _send(reply, "[DONE]")
    return reply
