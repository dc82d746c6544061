"""The client against a server that behaves and one that does not: every failure has a kind and says what happened."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from chimsim.errors import ChimsimError
from chimsim.live.client import Answer, Client, Completion, EngineError
from tests.chimsim.live.stub import Stub, serving

T = TypeVar("T")
PROMPT = tuple(range(10, 30))


def with_client(url: str, work: Callable[[Client], Awaitable[T]], **settings: float) -> T:
    async def run() -> T:
        async with Client(url, **settings) as client:  # type: ignore[arg-type]
            return await work(client)

    return asyncio.run(run())


def ask(url: str, tokens: int = 5, **settings: float) -> Answer:
    return with_client(url, lambda client: client.complete(Completion("tiny", PROMPT, tokens)), **settings)


def test_an_answer_counts_tokens_not_chunks() -> None:
    with serving(Stub(law=lambda *_: 0.0002)) as url:
        answer = ask(url, 60)
    assert (answer.prompt_tokens, answer.output_tokens, answer.finish_reason) == (20, 60, "length")
    assert answer.progress[-1][1] == 60
    times, counts = zip(*answer.progress, strict=True)
    assert list(times) == sorted(times)
    assert list(counts) == sorted(set(counts))
    assert answer.sent_at < answer.first_at <= answer.last_at


def test_what_is_sent_is_exact_and_carries_priority_only_when_asked() -> None:
    stub = Stub()
    with serving(stub) as url:
        ask(url + "/v1/")
        with_client(
            url, lambda c: c.complete(Completion("tiny", PROMPT, 2, exact=False, priority=-3, return_token_ids=True))
        )
    first, second = stub.bodies
    assert first["prompt"] == list(PROMPT)
    assert (first["ignore_eos"], first["min_tokens"], first["max_tokens"]) == (True, 5, 5)
    assert first["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert "priority" not in first
    assert (second["priority"], second["return_token_ids"]) == (-3, True)
    assert "min_tokens" not in second


def test_a_server_without_running_counts_gives_begin_and_end() -> None:
    with serving(Stub(running_counts=False)) as url:
        answer = ask(url, 7)
    assert [count for _, count in answer.progress] == [1, 7]


def test_the_engines_own_queue_time_is_taken_where_it_is_told() -> None:
    with serving(Stub(per_request_metrics=True)) as url:
        assert ask(url).queued_s == pytest.approx(0.0015)


@pytest.mark.parametrize(
    ("trouble", "kind", "message"),
    [
        ("500", "status", "answered 500: EngineCore encountered an issue"),
        ("hang", "timeout", "the server sent nothing for 0.2 s"),
        ("close", "closed", "closed the connection"),
        ("stream-error", "stream", "error in the stream: EngineCore died"),
        ("done", "stream", "ended with no finish_reason after 0 chunks"),
        ("abort", "stream", "ended with finish_reason 'abort'"),
        ("garbage", "garbage", "expected a chunk of a completion, found not JSON"),
        ("html", "garbage", "expected a stream, found text/html: <html>a proxy</html>"),
    ],
)
def test_each_misbehaviour_is_an_error_of_its_kind(trouble: str, kind: str, message: str) -> None:
    with serving(Stub(trouble=trouble)) as url, pytest.raises(EngineError, match=message) as raised:
        ask(url, inactivity_s=0.2)
    assert raised.value.kind == kind
    assert url in str(raised.value)


def test_an_answer_without_usage_is_refused_when_nothing_else_counts() -> None:
    stub = Stub(trouble="no-usage", running_counts=False)
    with serving(stub) as url, pytest.raises(EngineError, match="without usage"):
        ask(url)


def test_no_connection_is_refused() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(EngineError, match="no connection") as raised:
        ask(f"http://127.0.0.1:{port}")
    assert raised.value.kind == "refused"


def test_a_wrong_path_asks_whether_it_is_the_root() -> None:
    with serving(Stub()) as url, pytest.raises(EngineError, match="the root of an OpenAI-compatible server") as raised:
        with_client(f"{url}/openai", lambda client: client.models())
    assert raised.value.status == 404


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", ""])
def test_a_url_without_its_scheme_is_refused(url: str) -> None:
    with pytest.raises(ChimsimError, match="expected http://host:port"):
        Client(url)


def test_another_model_than_named_lists_those_served() -> None:
    with serving(Stub(models=("llama-8b", "qwen-7b"))) as url, pytest.raises(ChimsimError) as raised:
        with_client(url, lambda client: client.served("lama-8b"))
    assert "did you mean 'llama-8b'?" in str(raised.value)
    assert "it serves: llama-8b, qwen-7b" in str(raised.value)


def test_a_key_is_sent_and_a_wrong_one_said() -> None:
    with serving(Stub(key="right")) as url:
        for key, works in (("right", True), ("wrong", False)):

            async def models(key: str = key) -> int:
                async with Client(url, api_key=key) as client:
                    return len(await client.models())

            if works:
                assert asyncio.run(models()) == 1
            else:
                with pytest.raises(EngineError, match="--api-key"):
                    asyncio.run(models())


def test_leaving_a_stream_early_frees_the_engine() -> None:
    stub = Stub()

    async def leave(client: Client) -> None:
        stream = client.stream(Completion("tiny", PROMPT, 400))
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        for _ in range(200):
            if not stub.running:
                return
            await asyncio.sleep(0.01)

    with serving(stub) as url:
        with_client(url, leave)
        assert not stub.running


def test_without_its_packages_the_extra_is_named_and_the_command_line_starts() -> None:
    hide = "import sys; sys.modules['aiohttp'] = sys.modules['prometheus_client'] = None\n"
    program = (
        f"{hide}import chimsim.cli, chimsim.measure_cli\n"
        "try:\n    import chimsim.live\nexcept ValueError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 'pip install "chimsim[live]"' in done.stdout
