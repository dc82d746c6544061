"""The gateway over HTTP, as clients see it: whole answers, streams byte for byte, keys, limits, the openai package."""

from __future__ import annotations

import asyncio
import hmac
import json
from typing import Any

import aiohttp
import openai
import pytest

from chimsim.gateway import app
from chimsim.live.mock_engine import MockEngine, serving
from tests.chimsim.gateway.gateways import CHAT, COMPLETIONS, chat, events_of, served, text_of, until
from tests.chimsim.gateway.rude_engine import WORDS, RudeEngine, rude
from tests.chimsim.worlds import engine, slow_profile

WHOLE = "".join(WORDS)


async def post(url: str, body: dict[str, Any]) -> bytes:
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as reply:
        return await reply.read()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_streams_arrive_byte_for_byte_with_usage_only_where_asked_for(
    path: str, options: dict[str, bool] | None
) -> None:
    async def run() -> None:
        good = RudeEngine(words=("αβγ", ' "usage"', "\n\ndata: x", ' "error"', " end"))
        async with rude(good), served([("A", good.url)]) as world:
            body = chat() if path == CHAT else {"model": "A", "prompt": "Hi"}
            body |= {"stream": True, "stream_options": options}
            status, data, headers = await world.post(path, body)
            direct = await post(good.url + path, body | {"model": "A"})
            assert status == 200
            assert data == direct
            assert headers["content-type"] == "text/event-stream"
            assert headers["cache-control"] == "no-cache"
            events = events_of(data)
            assert events[-1] == "[DONE]"
            assert text_of(events) == "".join(good.words)
            asked = bool(options and options["include_usage"])
            assert ["usage" in event for event in events[:-1]] == [False] * 5 + [True] * asked

    asyncio.run(run())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_whole_answers_arrive_byte_for_byte(path: str) -> None:
    async def run() -> None:
        good = RudeEngine()
        async with rude(good), served([("A", good.url)]) as world:
            body = chat(model="A") if path == CHAT else {"model": "A", "prompt": "Hi"}
            status, data, headers = await world.post(path, body)
            assert (status, data) == (200, await post(good.url + path, body))
            assert headers["content-type"] == "application/json"
            assert headers["content-length"] == str(len(data))

    asyncio.run(run())


def test_the_openai_client_in_all_its_ways() -> None:
    async def run() -> None:
        spec = engine("A", "A", slots=2, step=slow_profile(0.02))
        async with serving(MockEngine(spec, speed=20.0), "127.0.0.1", 0) as url, served([("A", url)]) as world:
            async with world.openai() as client:
                messages: Any = [{"role": "user", "content": "What is there to say?"}]
                whole = await client.chat.completions.create(model="auto", messages=messages, max_tokens=40)
                assert whole.usage is not None
                said = whole.choices[0].message.content
                assert said
                stream = await client.chat.completions.create(
                    model="A", messages=messages, max_tokens=40, stream=True, stream_options={"include_usage": True}
                )
                chunks = [chunk async for chunk in stream]
                pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
                assert "".join(pieces) == said
                usage = chunks[-1].usage
                assert usage is not None
                assert usage.completion_tokens == whole.usage.completion_tokens
                completion = await client.completions.create(model="auto", prompt="Say it", max_tokens=40)
                parts = await client.completions.create(model="auto", prompt="Say it", max_tokens=40, stream=True)
                texts = [chunk.choices[0].text async for chunk in parts]
                assert "".join(texts) == completion.choices[0].text
                assert [model.id async for model in client.models.list()] == ["auto", "A"]
                assert (await client.models.retrieve("A")).id == "A"
                raw = await client.chat.completions.with_raw_response.create(
                    model="auto",
                    messages=messages,
                    metadata={"workflow_id": "w"},
                    extra_headers={"X-Chimsim-Last": "1"},
                )
                assert raw.headers["x-chimsim-workflow-id"] == "w"
                with pytest.raises(openai.NotFoundError, match="the model 'B' does not exist"):
                    await client.chat.completions.create(model="B", messages=messages)
                with pytest.raises(openai.BadRequestError, match="max_tokens"):
                    await client.completions.create(model="A", prompt="Say it", max_tokens=-1)
            text = (await world.get("/metrics"))[1]
            assert 'chimsim_answers_total{status="200"} 5.0' in text
            assert 'chimsim_running{engine="A/0"} 0.0' in text

    asyncio.run(run())


def test_the_openai_client_hears_of_a_stream_that_breaks() -> None:
    async def run() -> None:
        bad = RudeEngine(fault="error later")
        async with rude(bad), served([("A", bad.url)]) as world, world.openai() as client:
            messages: Any = [{"role": "user", "content": "Hi"}]
            stream = await client.chat.completions.create(model="A", messages=messages, stream=True)
            with pytest.raises(openai.APIError, match=r"engine A/0: .*it died"):
                assert [chunk.choices[0].delta.content async for chunk in stream] == []

    asyncio.run(run())


def test_keys_are_compared_in_constant_time_and_wanted_under_v1_only(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    true_compare = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return true_compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", compare)

    async def run() -> None:
        good = RudeEngine()
        async with rude(good), served([("A", good.url)], api_key="sesame") as world:
            for given in ({}, {"Authorization": "sesame"}, {"Authorization": "Bearer sesam"}, {"Authorization": "é"}):
                status, data, _ = await world.post(CHAT, chat(), given)
                assert status == 401
                assert json.loads(data)["error"]["type"] == "invalid_api_key"
            assert (await world.get("/v1/models"))[0] == 401
            assert [(await world.get(path))[0] for path in ("/health", "/metrics", "/version")] == [200] * 3
            assert (await world.post(CHAT, chat(), {"Authorization": "Bearer sesame"}))[0] == 200
            async with world.openai("sesame") as client:
                assert [model.id async for model in client.models.list()] == ["auto", "A"]
            async with world.openai("wrong") as client:
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list()
        assert good.keys == [None]  # the client's key is none of the engine's

    asyncio.run(run())
    assert all(right == b"Bearer sesame" for _, right in compared)


def test_bodies_have_a_limit_however_they_come() -> None:
    async def run() -> None:
        good = RudeEngine()
        async with rude(good), served([("A", good.url)], max_body_bytes=2000) as world:

            async def pieces() -> Any:
                for _ in range(10):
                    yield b"x" * 500

            assert (await world.post(CHAT, chat(user="x" * 1500)))[0] == 200
            status, data, _ = await world.post(CHAT, chat(user="x" * 2000))
            assert status == 413
            assert json.loads(data)["error"]["message"] == "the body has more than 2,000 bytes"
            async with world.session.post(world.url + CHAT, data=pieces()) as reply:
                assert reply.status == 413
        assert len(good.bodies) == 1

    asyncio.run(run())


@pytest.mark.parametrize("body", [b"", b"{", b"[]", chat(stream="yes"), {"model": "A"}, chat(messages=[[[]]])])
def test_wrong_bodies_reach_no_engine(body: object) -> None:
    async def run() -> None:
        good = RudeEngine()
        async with rude(good), served([("A", good.url)]) as world:
            status, data, headers = await world.post(CHAT, body)
            assert (status, headers["content-type"]) == (400, "application/json")
            assert json.loads(data)["error"]["type"] == "invalid_request_error"
        assert good.bodies == []

    asyncio.run(run())


def test_other_paths_and_methods_are_refused_in_openais_shape() -> None:
    async def run() -> None:
        good = RudeEngine()
        async with rude(good), served([("A", good.url)]) as world:
            status, data, _ = await world.post("/v1/embeddings", {})
            assert status == 404
            message = json.loads(data)["error"]["message"]
            assert message.startswith("POST /v1/embeddings: not served (served: /v1/chat/completions, ")
            assert (await world.get(CHAT))[0] == 405
            assert json.loads((await world.get("/version"))[1])["version"]

    asyncio.run(run())


def test_a_client_that_reads_nothing_does_not_keep_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "STALLED_S", 0.1)

    async def run() -> None:
        good = RudeEngine(words=("x" * 1_000_000,) * 30)
        async with rude(good), served([("A", good.url)], slots=1) as world:
            body = json.dumps(chat(stream=True)).encode()
            host, _, port = world.url.removeprefix("http://").partition(":")
            _, writer = await asyncio.open_connection(host, int(port), limit=1000)
            writer.write(
                b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body
            )
            await until(lambda: good.inside == 1)
            await until(lambda: world.gateway.in_flight == 0)
            await until(lambda: good.left == 1)
            writer.transport.abort()
            good.words = WORDS
            assert (await world.post(CHAT, chat()))[0] == 200

    asyncio.run(run())


def test_many_at_once_get_their_own_answers() -> None:
    async def run() -> None:
        spec = engine("A", "A", slots=8, step=slow_profile(0.02))
        async with serving(MockEngine(spec, speed=50.0), "127.0.0.1", 0) as url, served([("A", url)]) as world:
            bodies = [{"model": "A", "prompt": f"{n}", "max_tokens": 5 + n % 7, "stream": n % 2 > 0} for n in range(60)]
            through = await asyncio.gather(*(world.post(COMPLETIONS, body) for body in bodies))
            for body, (status, data, _) in zip(bodies, through, strict=True):
                assert status == 200
                direct = json.loads(await post(url + COMPLETIONS, body | {"stream": False}))["choices"][0]["text"]
                text = text_of(events_of(data)) if body["stream"] else json.loads(data)["choices"][0]["text"]
                assert text == direct

    asyncio.run(run())
