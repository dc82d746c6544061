"""Reads a request to the mock engine: what is asked for, or the refusal that vLLM would send, in its words' sense.

It checks what vLLM checks of the fields that count here; whatever else a request says is ignored, as vLLM does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chimsim.errors import ChimsimError, near
from chimsim.live.mock_words import VOCABULARY, Tokenizer

COMPLETION_TOKENS = 16
"""``max_tokens`` of a completion that says nothing of it; a chat answer may fill the context."""


class Refusal(ChimsimError):
    """A request that is not served: the HTTP status, and what goes into the answer's ``error``."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def to_dict(self) -> dict[str, Any]:
        """The answer's JSON."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request in order. ``max_tokens`` belongs to each of ``prompts``: it is cut to what the context has left."""

    prompts: tuple[list[int], ...]
    max_tokens: tuple[int, ...]
    min_tokens: int
    ignore_eos: bool
    priority: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    chat: bool


def read_json(body: bytes, content_type: str) -> dict[str, Any]:
    """The request's JSON object. Raises `Refusal`."""
    if content_type != "application/json":
        raise _mistyped(f"Content-Type is {content_type!r}; expected application/json")
    try:
        fields = json.loads(body)
    except ValueError as error:
        raise _mistyped(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise _mistyped(f"the body is {_shown(fields)}; expected an object")
    return fields


def read_request(
    fields: Mapping[str, Any], served: str, max_model_len: int, tokenizer: Tokenizer, *, chat: bool
) -> Asked:
    """What a completion or chat request asks for. Raises `Refusal`."""
    check_model(fields, served)
    stream = _flag(fields, "stream")
    options = _optional(fields, "stream_options", dict, "an object") or {}
    if options and not stream:
        raise _wrong("stream_options are for streams only: stream is not true", "stream_options")
    number = _whole(fields, "n")
    if number is not None and number != 1:
        raise _wrong(f"n is {number}; the mock engine gives one answer a prompt: expected 1", "n")
    most = _whole(fields, "max_completion_tokens") if chat else None
    most = _whole(fields, "max_tokens") if most is None else most
    if most is None and not chat:
        most = COMPLETION_TOKENS
    if most is not None and most < 1:
        raise _wrong(f"max_tokens must be at least 1, got {most}.", "max_tokens")
    if most is not None and most > max_model_len:
        raise _wrong(f"max_tokens={most} cannot be greater than max_model_len={max_model_len}.", "max_tokens")
    least = _whole(fields, "min_tokens") or 0
    if least < 0 or (most is not None and least > most):
        raise _wrong(f"min_tokens is {least}; expected 0 to max_tokens", "min_tokens")
    priority = _whole(fields, "priority") or 0
    if not -(2**63) <= priority < 2**63:
        raise _wrong(f"priority is {priority}; expected a 64-bit integer", "priority")
    prompts = [read_chat(fields, tokenizer)] if chat else _prompts(fields.get("prompt"), tokenizer)
    limits = []
    for prompt in prompts:
        room = max_model_len - len(prompt)
        if room < 1:
            raise _wrong(
                f"This model's maximum context length is {max_model_len} tokens, but the prompt has {len(prompt)}, "
                "which leaves no room for an answer.",
                "input_tokens",
            )
        limits.append(room if most is None else min(most, room))
    include_usage = _flag(options, "include_usage")
    return Asked(
        prompts=tuple(prompts),
        max_tokens=tuple(limits),
        min_tokens=least,
        ignore_eos=_flag(fields, "ignore_eos"),
        priority=priority,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=_flag(options, "continuous_usage_stats") and include_usage,
        return_token_ids=_flag(fields, "return_token_ids"),
        chat=chat,
    )


def check_model(fields: Mapping[str, Any], served: str) -> None:
    """Raises `Refusal` if another model than the one served is named."""
    model = _optional(fields, "model", str, "a name")
    if model is not None and model != served:
        message = f"The model `{model}` does not exist{near(model, [served])}; served: {served}."
        raise Refusal(404, "NotFoundError", message, "model")


def read_chat(fields: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    """The token ids of ``messages`` in our template, which ends where the answer begins. Raises `Refusal`."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _mistyped(f"messages is {_shown(messages)}; expected a list of at least one message", "messages")
    text = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _mistyped(f"messages has {_shown(message)}; expected objects with a role and content", "messages")
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        if not isinstance(content, str | None):
            raise _mistyped(f"content is {_shown(content)}; expected text or a list of parts", "messages")
        text.append(f"<{message['role']}>\n{content or ''}\n")
    return tokenizer.encode("".join(text) + "<assistant>\n")


def _prompts(given: object, tokenizer: Tokenizer) -> list[list[int]]:
    many = isinstance(given, list) and bool(given) and isinstance(given[0], str | list)
    prompts = []
    for prompt in given if many and isinstance(given, list) else [given]:
        if isinstance(prompt, str):
            ids = tokenizer.encode(prompt)
        elif isinstance(prompt, list):
            ids = check_ids(prompt, "prompt")
        else:
            raise _mistyped(f"prompt is {_shown(prompt)}; expected text, token ids, or a list of either", "prompt")
        if not ids:
            raise _wrong("The prompt cannot be empty.", "prompt")
        prompts.append(ids)
    return prompts


def check_ids(ids: object, param: str) -> list[int]:
    """The ids if it is a list of them and all are in the vocabulary. Raises `Refusal`."""
    if not isinstance(ids, list):
        raise _mistyped(f"{param} is {_shown(ids)}; expected a list of token ids", param)
    checked = []
    for token in ids:
        if type(token) is not int:
            raise _mistyped(f"{param} has {_shown(token)}; expected token ids, whole numbers", param)
        if not 0 <= token < VOCABULARY:
            raise _wrong(f"Token id {token} is out of vocabulary; it has {VOCABULARY} ids.", param)
        checked.append(token)
    return checked


def text_of(fields: Mapping[str, Any], name: str) -> str:
    """A field that must be text. Raises `Refusal`."""
    text = fields.get(name)
    if not isinstance(text, str):
        raise _mistyped(f"{name} is {_shown(text)}; expected text", name)
    return text


def _whole(fields: Mapping[str, Any], name: str) -> int | None:
    if isinstance(fields.get(name), bool):
        raise _mistyped(f"{name} is {_shown(fields[name])}; expected a whole number", name)
    number: int | None = _optional(fields, name, int, "a whole number")
    return number


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    return bool(_optional(fields, name, bool, "true or false"))


def _optional(fields: Mapping[str, Any], name: str, kind: type[Any], expected: str) -> Any:
    value = fields.get(name)
    if value is not None and not isinstance(value, kind):
        raise _mistyped(f"{name} is {_shown(value)}; expected {expected}", name)
    return value


def _wrong(message: str, param: str | None = None) -> Refusal:
    return Refusal(400, "BadRequestError", message, param)


def _mistyped(message: str, param: str | None = None) -> Refusal:
    return Refusal(400, "Bad Request", message, param)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
