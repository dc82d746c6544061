"""What a client asks for: the body of a completion or chat request and its headers, read and checked.

Pure: bytes and headers in, an `Ask` or a `Refusal` out. What the engine is to make of the other fields is its business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

AUTO = "auto"
"""The model's name with which a client leaves the choice to the policy."""

WORKFLOW_HEADERS = (
    "x-chimsim-workflow-id", "x-dynamo-session-id", "x-session-id", "x-llm-d-inference-fairness-id",
)  # fmt: skip
"""Headers that name the workflow, the first that is there counts; the others are what neighbouring tools use."""

_HINTS = {
    "stage": "x-chimsim-stage",
    "workload": "x-chimsim-workload",
    "last": "x-chimsim-last",
}
_MAX_TOKENS = ("max_completion_tokens", "max_tokens")
_MAX_NAME = 200
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")


class Refusal(Exception):
    """A request that gets an error for an answer; ``kind`` is OpenAI's error type, ``param`` the field at fault.

    ``body`` is the engine's own error, passed on as it came.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        *,
        retry_after_s: int | None = None,
        body: bytes = b"",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.retry_after_s = retry_after_s
        self.body = body

    @property
    def headers(self) -> dict[str, str]:
        """Those of the answer besides its content type."""
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}

    def to_json(self) -> bytes:
        """The answer's body, in the shape that OpenAI's clients read."""
        if self.body:
            return self.body
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return json.dumps({"error": error}).encode()


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request.

    ``body`` goes to the engine but for its model, stream options and priority. ``workflow_id`` is None for a call that
    stands alone. ``text`` is the whole prompt (empty for token ids), ``task`` what the user wrote in it, and
    ``prompt_ids`` how many token ids it has instead of text. Its answer has ``max_tokens`` at most (None: nobody said).
    """

    path: str
    body: Mapping[str, Any]
    model: str
    stream: bool
    workflow_id: str | None
    workload: str
    stage_name: str
    last: bool
    text: str = field(repr=False)
    task: str = field(repr=False)
    system_chars: int = 0
    prompt_ids: int = 0
    max_tokens: int | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether the client asked for the usage at the end of a stream."""
        options = self.body.get("stream_options")
        return isinstance(options, dict) and options.get("include_usage") is True


def read_ask(path: str, data: bytes, headers: Mapping[str, str]) -> Ask:
    """The request at ``/v1/completions`` or ``/v1/chat/completions``; header names in lower case.

    Raises `Refusal`.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refusal(400, f"the body is {_shown(body)}; expected an object")
    model = body.get("model", AUTO)
    if not isinstance(model, str) or not model:
        raise Refusal(400, f"model is {_shown(model)}; expected a name, or {AUTO!r}", param="model")
    stream = body.get("stream", False)
    if type(stream) is not bool and stream is not None:
        raise Refusal(400, f"stream is {_shown(stream)}; expected true or false", param="stream")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise Refusal(400, f"stream_options is {_shown(options)}; expected an object", param="stream_options")
    metadata = body.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise Refusal(400, f"metadata is {_shown(metadata)}; expected an object", param="metadata")
    hints = metadata or {}
    chat = path.endswith("/chat/completions")
    system, user, ids = _messages(body) if chat else _prompt(body)
    try:
        (system + user).encode()
    except UnicodeEncodeError:
        where = "messages" if chat else "prompt"
        raise Refusal(400, f"{where} has half of a surrogate pair, which is no character", param=where) from None
    return Ask(
        path=path,
        body=body,
        model=model,
        stream=bool(stream),
        workflow_id=_workflow_id(headers, hints),
        workload=_name("workload", headers, hints) or "default",
        stage_name=_name("stage", headers, hints),
        last=_last(headers, hints),
        text=system + user,
        task=user,
        system_chars=len(system),
        prompt_ids=ids,
        max_tokens=next((m for name in _MAX_TOKENS if type(m := body.get(name)) is int and m > 0), None),
    )


def _workflow_id(headers: Mapping[str, str], hints: Mapping[str, Any]) -> str | None:
    for name in WORKFLOW_HEADERS:
        if headers.get(name):
            return _short(headers[name], name)
    given = hints.get("workflow_id")
    if given is None:
        return None
    if not isinstance(given, str) or not given:
        raise Refusal(400, f"metadata.workflow_id is {_shown(given)}; expected a string", param="metadata.workflow_id")
    return _short(given, "metadata.workflow_id")


def _name(hint: str, headers: Mapping[str, str], hints: Mapping[str, Any]) -> str:
    given = headers.get(_HINTS[hint]) or hints.get(hint) or ""
    if not isinstance(given, str):
        raise Refusal(400, f"metadata.{hint} is {_shown(given)}; expected a string", param=f"metadata.{hint}")
    return _short(given, hint)


def _last(headers: Mapping[str, str], hints: Mapping[str, Any]) -> bool:
    given = headers.get(_HINTS["last"], hints.get("last", False))
    word = str(given).lower()
    if word not in _TRUE + _FALSE:
        raise Refusal(400, f"last is {_shown(given)}; expected true or false", param="metadata.last")
    return word in _TRUE


def _short(text: str, where: str) -> str:
    if not text.isprintable():  # it comes back in a header, and goes into logs
        raise Refusal(400, f"{where} is {_shown(text)}; expected printable characters", param=where)
    if len(text) > _MAX_NAME:
        raise Refusal(400, f"{where} has {len(text)} characters; expected at most {_MAX_NAME}", param=where)
    return text


def _messages(body: Mapping[str, Any]) -> tuple[str, str, int]:
    """The system's and everyone else's text of a chat."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refusal(400, f"messages is {_shown(messages)}; expected a list of at least one", param="messages")
    system: list[str] = []
    user: list[str] = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            where = f"messages[{number}]"
            raise Refusal(400, f"{where} is {_shown(message)}; expected an object with a role", param=where)
        text = _content(message.get("content"))
        (system if message["role"] in ("system", "developer") else user).append(f"{text}\n")
    return "".join(system), "".join(user), 0


def _content(content: object) -> str:
    """The text of a message: pictures and the like have none."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    return ""


def _prompt(body: Mapping[str, Any]) -> tuple[str, str, int]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return "", prompt, 0
    if isinstance(prompt, list) and prompt:
        if all(type(each) is int for each in prompt):
            return "", "", len(prompt)
        if len(prompt) == 1 and isinstance(prompt[0], str):
            return "", prompt[0], 0
        if len(prompt) == 1 and isinstance(prompt[0], list):
            return "", "", len(prompt[0])
        raise Refusal(400, "prompt has several prompts; expected one: send a request for each", param="prompt")
    raise Refusal(400, f"prompt is {_shown(prompt)}; expected a string or a list of token ids", param="prompt")


def _shown(value: object) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:
        text = "nested too deeply"
    return text if len(text) <= 60 else text[:57] + "..."
