"""Requests read and refused: every field that the gateway looks at, in every shape that it may come in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimsim.gateway.ask import WORKFLOW_HEADERS, Ask, Refusal, read_ask
from tests.chimsim.gateway.gateways import CHAT, COMPLETIONS, chat


def ask(body: Any, headers: dict[str, str] | None = None, path: str = CHAT) -> Ask:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_ask(path, data, headers or {})


def test_a_chat_is_told_from_its_system_prompt_and_its_task() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "42", "tool_call_id": "t"},
    ]
    read = ask({"model": "A", "messages": messages, "stream": True, "stream_options": {"include_usage": True}})
    assert read.text == "Be brief.\nBe kind.\nWhat is\n\n42\n"
    assert read.task == "What is\n\n42\n"
    assert read.system_chars == len("Be brief.\nBe kind.\n")
    assert (read.model, read.stream, read.wants_usage, read.workflow_id) == ("A", True, True, None)
    assert (read.workload, read.stage_name, read.last) == ("default", "", False)


@pytest.mark.parametrize(
    ("prompt", "text", "ids"), [("Hi", "Hi", 0), (["Hi"], "Hi", 0), ([5, 6, 7], "", 3), ([[5, 6]], "", 2), ("", "", 0)]
)
def test_prompts_of_completions(prompt: object, text: str, ids: int) -> None:
    read = ask({"prompt": prompt}, path=COMPLETIONS)
    assert (read.text, read.task, read.prompt_ids, read.model, read.stream) == (text, text, ids, "auto", False)


@pytest.mark.parametrize("header", WORKFLOW_HEADERS)
def test_each_header_names_the_workflow_before_metadata_does(header: str) -> None:
    assert ask(chat(metadata={"workflow_id": "m"}), {header: "w"}).workflow_id == "w"


def test_the_first_header_counts_and_an_empty_one_does_not() -> None:
    headers = dict(zip(WORKFLOW_HEADERS, "abcd", strict=True))
    assert ask(chat(), headers).workflow_id == "a"
    assert ask(chat(), headers | {WORKFLOW_HEADERS[0]: ""}).workflow_id == "b"


def test_hints_from_headers_and_metadata() -> None:
    metadata = {"workflow_id": "w", "stage": "plan", "workload": "maths", "last": "true"}
    read = ask(chat(metadata=metadata))
    assert (read.workflow_id, read.stage_name, read.workload, read.last) == ("w", "plan", "maths", True)
    headers = {"x-chimsim-stage": "code", "x-chimsim-workload": "apps", "x-chimsim-last": "0"}
    read = ask(chat(metadata=metadata), headers)
    assert (read.stage_name, read.workload, read.last) == ("code", "apps", False)
    assert ask(chat(metadata={"last": True})).last


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"", None, "the body is not JSON"),
        (b"{", None, "the body is not JSON"),
        (b"\xff\xfe{", None, "the body is not JSON"),
        (b"[" * 100_000, None, "the body is not JSON"),
        (b"[" * 500 + b"]" * 500, None, "expected an object"),
        (b"[]", None, r"the body is \[\]; expected an object"),
        (b'"x"', None, "expected an object"),
        ({}, "messages", "messages is null; expected a list of at least one"),
        (chat(messages=[]), "messages", r"messages is \[\]"),
        (chat(messages="Hi"), "messages", 'messages is "Hi"'),
        (chat(messages=[{"role": "user", "content": "x"}, "Hi"]), "messages[1]", 'messages.1. is "Hi"'),
        (chat(messages=[{"content": "Hi"}]), "messages[0]", "expected an object with a role"),
        (chat(messages=[[["nested"]]]), "messages[0]", "expected an object with a role"),
        (chat(messages=[{"role": "user", "content": "\ud800"}]), "messages", "half of a surrogate pair"),
        (chat(model=7), "model", "model is 7; expected a name, or 'auto'"),
        (chat(model=""), "model", "expected a name"),
        (chat(stream="yes"), "stream", 'stream is "yes"; expected true or false'),
        (chat(stream=1), "stream", "stream is 1"),
        (chat(stream_options=[]), "stream_options", "expected an object"),
        (chat(metadata="w"), "metadata", "expected an object"),
        (chat(metadata={"workflow_id": 7}), "metadata.workflow_id", "workflow_id is 7; expected a string"),
        (chat(metadata={"workflow_id": "x" * 201}), "metadata.workflow_id", "201 characters"),
        (chat(metadata={"workflow_id": "a\r\nset-cookie: b"}), "metadata.workflow_id", "printable"),
        (chat(metadata={"stage": 7}), "metadata.stage", "stage is 7"),
        (chat(metadata={"last": "maybe"}), "metadata.last", 'last is "maybe"; expected true or false'),
    ],
)
def test_what_is_wrong_is_said_and_where(body: Any, param: str | None, words: str) -> None:
    with pytest.raises(Refusal, match=words) as caught:
        ask(body)
    assert (caught.value.status, caught.value.param) == (400, param)
    error = json.loads(caught.value.to_json())["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"] == str(caught.value)
    assert len(error["message"]) < 250


@pytest.mark.parametrize("prompt", [None, 7, [], ["a", "b"], [[1], [2]], [1, "a"], [True], {"a": 1}])
def test_prompts_that_are_none_or_several(prompt: object) -> None:
    with pytest.raises(Refusal, match=r"expected (one|a string or a list of token ids)"):
        ask({"prompt": prompt}, path=COMPLETIONS)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    body=st.fixed_dictionaries(
        {},
        optional={name: JSON for name in ("model", "messages", "prompt", "stream", "stream_options", "metadata")}
        | {"messages": st.lists(st.fixed_dictionaries({"role": JSON, "content": JSON}), max_size=2)},
    ),
    path=st.sampled_from([CHAT, COMPLETIONS]),
    headers=st.dictionaries(st.sampled_from([*WORKFLOW_HEADERS, "x-chimsim-stage", "x-chimsim-last"]), st.text()),
)
def test_whatever_comes_is_read_or_refused(body: dict[str, Any], path: str, headers: dict[str, str]) -> None:
    try:
        read = ask(body, headers, path)
    except Refusal:
        return
    assert read.text.endswith(read.task)
    assert (read.workflow_id or "").isprintable()


def test_a_body_that_is_not_json_is_refused_whatever_it_is() -> None:
    with pytest.raises(Refusal, match="is not JSON"):
        ask(b'{"model": ' + b"9" * 5000 + b"}")
