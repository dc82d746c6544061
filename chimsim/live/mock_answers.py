"""How the mock engine words its answers: OpenAI's JSON with vLLM's additions, whole or in chunks.

It shapes what the engine produced; when is not its business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chimsim.live.mock_request import Asked
from chimsim.live.mock_words import words
from chimsim.live.realtime import Ticket


@dataclass(slots=True)
class Part:
    """One prompt of a request, its answer in full, and how many of the answer's tokens were sent."""

    index: int
    prompt: list[int]
    ids: list[int]
    ticket: Ticket
    sent: int = 0
    begun: bool = False


@dataclass(frozen=True, slots=True)
class Wording:
    """The answers to one request; ``created`` in seconds since the epoch."""

    asked: Asked
    name: str
    model: str
    created: int
    speed: float

    def whole(self, parts: Sequence[Part]) -> dict[str, Any]:
        """The answer in one piece."""
        choices = []
        for part in parts:
            ids = part.ids[: part.ticket.produced]
            text = words(ids)
            content = {"message": {"role": "assistant", "content": text}} if self.asked.chat else {"text": text}
            choice: dict[str, Any] = {
                "index": part.index,
                **content,
                "logprobs": None,
                "finish_reason": part.ticket.reason,
            }
            if self.asked.return_token_ids:
                choice |= {"prompt_token_ids": part.prompt, "token_ids": ids}
            choices.append(choice)
        kind = "chat.completion" if self.asked.chat else "text_completion"
        return {**self._head(kind, choices), "usage": _usage(parts, details=True), **self._metrics(parts)}

    def chunks(self, part: Part) -> list[dict[str, Any]]:
        """The part's new tokens, which count as sent from here; a chat begins with a chunk of the role alone."""
        asked = self.asked
        ids = part.ids[part.sent : part.ticket.produced]
        text = words(ids)
        events = []
        if asked.chat and not part.begun:
            choice = {"index": part.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            events.append(self._chunk(choice, part))
        part.sent += len(ids)
        choice = {
            "index": part.index,
            **({"delta": {"content": text}} if asked.chat else {"text": text}),
            "logprobs": None,
            "finish_reason": part.ticket.reason if part.ticket.over else None,
        }
        if asked.return_token_ids:
            choice["token_ids"] = ids
            if not part.begun:
                choice["prompt_token_ids"] = part.prompt
        part.begun = True
        events.append(self._chunk(choice, part))
        return events

    def usage_chunk(self, parts: Sequence[Part]) -> dict[str, Any]:
        """The last chunk of a stream that asked for it."""
        return {**self._head(self._stream_kind, []), "usage": _usage(parts, details=True), **self._metrics(parts)}

    @property
    def _stream_kind(self) -> str:
        return "chat.completion.chunk" if self.asked.chat else "text_completion"

    def _chunk(self, choice: dict[str, Any], part: Part) -> dict[str, Any]:
        event = self._head(self._stream_kind, [choice])
        if self.asked.continuous_usage:
            event["usage"] = _usage([part], details=False)
        return event

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _metrics(self, parts: Sequence[Part]) -> dict[str, Any]:
        """What vLLM says of a request with --enable-per-request-metrics, in milliseconds on the clock."""
        ticket = parts[0].ticket
        if len(parts) > 1 or ticket.finished_at < 0.0:
            return {}
        request, ms = ticket.request, 1e3 / self.speed
        decode_ms = (ticket.finished_at - request.first_token_at) * ms
        gaps = request.produced - 1
        return {
            "metrics": {
                "time_to_first_token_ms": (request.first_token_at - ticket.arrived_at) * ms,
                "generation_time_ms": decode_ms,
                "queue_time_ms": (request.admitted_at - ticket.arrived_at) * ms,
                "mean_itl_ms": decode_ms / gaps if gaps else None,
                "tokens_per_second": 1e3 * gaps / decode_ms if gaps else None,
            }
        }


def _usage(parts: Sequence[Part], *, details: bool) -> dict[str, Any]:
    """Tokens of the parts so far, as sent; with ``details`` of the whole, and how many the prefix cache had."""
    prompt = sum(len(part.prompt) for part in parts)
    output = sum(part.ticket.produced if details else part.sent for part in parts)
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    if details:
        usage["prompt_tokens_details"] = {"cached_tokens": sum(part.ticket.request.cached_tokens for part in parts)}
    return usage
