"""The port to a running vLLM, or to any other server that speaks OpenAI's completions: one task a request.

It sends what the driver says and tells it what came; which request goes where and when is the driver's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import nan
from statistics import median

from chimsim.live.client import Chunk, Client, Completion, EngineError
from chimsim.live.driver import Events, LiveRequest
from chimsim.live.metrics import EngineMetrics, look

ROUND_TRIPS = 20


@dataclass
class Endpoint:
    """A server that has been looked at: who it is, what it can, and the newest look at its metrics."""

    client: Client
    served_model: str
    version: str | None = None
    max_model_len: int | None = None
    token_ids: bool = True
    """whether it takes prompts as ids and tells those of its answers"""
    token_range: tuple[int, int] = (100, 1000)
    """ids that its vocabulary has, from the first to before the last"""
    metrics: EngineMetrics | None = None
    first: EngineMetrics | None = None
    """the metrics when the run began"""
    told_cached: bool = field(default=False)
    """whether it said how much of a prompt was in its prefix cache"""

    async def round_trip_s(self) -> float:
        """How long the server takes for next to nothing: the median of some requests for its health."""
        clock = asyncio.get_running_loop().time
        taken = []
        for _ in range(ROUND_TRIPS):
            began = clock()
            await self.client.healthy()
            taken.append(clock() - began)
        return median(taken)

    async def look(self) -> None:
        """Read the metrics anew; a server without keeps none, one that does not answer its last ones."""
        with suppress(EngineError):
            self.metrics = await look(self.client)


class ServerPort:
    """See the module; made by the driver, for one engine."""

    def __init__(self, events: Events, endpoint: Endpoint) -> None:
        self.slices = endpoint.token_ids
        self._events = events
        self._endpoint = endpoint
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._sent: dict[int, int] = {}

    def start(self, request: LiveRequest, tokens: int, priority: int | None) -> bool:
        task = asyncio.get_running_loop().create_task(self._serve(request, tokens, priority))
        self._tasks[request.request_id] = task
        self._sent[request.request_id] = tokens
        return False

    def stop(self, request: LiveRequest) -> None:
        task = self._tasks.pop(request.request_id, None)
        if task is None:
            return
        task.cancel()
        if request.produced - request.before >= self._sent[request.request_id] and request.ids:
            # All is there but the end of the stream: the last token is asked for again, so that it has an end.
            request.ids.pop()
            request.produced -= 1

    def at_boundary(self, now: float, wanted: bool) -> bool:
        return True

    def go_on(self, now: float) -> None:
        return None

    def forget(self, job: int) -> None:
        return None

    async def well(self) -> bool:
        return await self._endpoint.client.healthy()

    def load(self) -> tuple[int, float]:
        metrics = self._endpoint.metrics
        if metrics is None:
            return 0, nan
        return int(metrics.waiting or 0), metrics.kv_used_fraction if metrics.kv_used_fraction is not None else nan

    def numbers(self) -> Mapping[str, float]:
        first, last = self._endpoint.first, self._endpoint.metrics
        if first is None or last is None or first.preemptions is None or last.preemptions is None:
            return {}
        return {"preemptions": last.preemptions - first.preemptions}

    async def _serve(self, request: LiveRequest, tokens: int, priority: int | None) -> None:
        endpoint, events = self._endpoint, self._events
        before = request.produced
        prompt = (*request.prompt, *request.ids) if isinstance(request.prompt, tuple) else request.prompt
        completion = Completion(
            endpoint.served_model,
            prompt,
            tokens,
            exact=request.exact,
            priority=priority,
            return_token_ids=endpoint.token_ids,
        )
        heard = 0

        def hear(chunk: Chunk) -> None:
            nonlocal heard
            request.ids += chunk.token_ids
            request.text += chunk.text
            if chunk.output_tokens is not None:
                heard = chunk.output_tokens
            else:
                heard += len(chunk.token_ids)
            if heard:
                events.on_tokens(request, events.now(), before + heard)

        sent_at = events.now()
        try:
            answer = await endpoint.client.complete(completion, on_chunk=hear)
        except EngineError as error:
            self._over(request)
            events.on_failure(request, error, ill=error.ill, again=not error.final)
            return
        self._over(request)
        if before == 0:
            if answer.cached_tokens is not None:
                endpoint.told_cached = True
                request.cached_tokens = answer.cached_tokens
            if answer.queued_s is not None:
                request.admitted_at = sent_at + answer.queued_s
        events.on_tokens(request, events.now(), before + answer.output_tokens)
        # The model's own end, or the end of its context.
        request.over = answer.output_tokens < tokens or answer.finish_reason == "stop"
        events.on_end(request)

    def _over(self, request: LiveRequest) -> None:
        del self._tasks[request.request_id]
