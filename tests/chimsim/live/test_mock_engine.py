"""The mock engine over HTTP: what vLLM answers it answers, and what it counts adds up."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from chimsim.config import EngineSpec
from chimsim.errors import ChimsimError
from chimsim.live.client import Client, Completion, EngineError
from chimsim.live.metrics import read_metrics
from chimsim.live.mock_engine import MockEngine, serving
from chimsim.live.mock_words import END, VOCABULARY, Tokenizer, answer, block_hashes, words
from tests.chimsim.worlds import engine, slow_profile

T = TypeVar("T")
STEP = slow_profile(0.02)
PROMPT = tuple(range(100, 150))


def spec(slots: int = 4, **settings: Any) -> EngineSpec:
    return engine(slots=slots, step=STEP, **settings)


def served(work: Callable[[Client, MockEngine], Awaitable[T]], **settings: Any) -> T:
    """Run it against a mock engine with steps of a millisecond."""

    async def run() -> T:
        mock = MockEngine(settings.pop("spec", spec()), **{"speed": 20.0, **settings})
        async with serving(mock, "127.0.0.1", 0) as url, Client(url, inactivity_s=10.0) as client:
            return await work(client, mock)

    return asyncio.run(run())


async def post(client: Client, path: str, body: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session:
        kind = {"json": body} if isinstance(body, dict) else {"data": body}
        async with session.post(client.url + path, **kind) as reply:
            return reply.status, json.loads(await reply.read())


async def events(client: Client, path: str, body: dict[str, Any]) -> list[Any]:
    """The stream's events, which must end with [DONE]."""
    async with aiohttp.ClientSession() as session, session.post(client.url + path, json=body) as reply:
        assert reply.content_type == "text/event-stream"
        lines = (await reply.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def counted(client: Client) -> dict[tuple[str, ...], float]:
    text = await client.metrics_text()
    assert text is not None
    return {
        (sample.name.removeprefix("vllm:"), *[v for k, v in sample.labels.items() if k in ("finished_reason", "le")]): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came about")


def test_an_answer_has_exactly_its_tokens_in_fewer_chunks() -> None:
    async def work(client: Client, _: MockEngine) -> None:
        answer = await client.complete(Completion("A", PROMPT, 600, return_token_ids=True))
        assert (answer.prompt_tokens, answer.output_tokens, answer.finish_reason) == (50, 600, "length")
        assert len(answer.token_ids) == 600
        assert answer.text == words(answer.token_ids)
        # 600 ms of steps, a chunk at most every 20 ms besides the first and the last
        assert 3 <= len(answer.progress) <= 32
        assert answer.cached_tokens == 0
        assert answer.queued_s is not None

    served(work)


def test_answers_follow_from_prompt_and_seed_and_go_on_where_they_stopped() -> None:
    async def work(client: Client, _: MockEngine) -> list[tuple[int, ...]]:
        whole = await client.complete(Completion("A", PROMPT, 60, return_token_ids=True))
        first = await client.complete(Completion("A", PROMPT, 20, return_token_ids=True))
        rest = await client.complete(Completion("A", PROMPT + first.token_ids, 40, return_token_ids=True))
        assert first.token_ids + rest.token_ids == whole.token_ids
        # 69 of 70 tokens were computed, and the whole blocks of them are kept
        assert rest.cached_tokens == 64
        return [whole.token_ids]

    assert served(work) == served(work)
    assert served(work, seed=1) != served(work)


@given(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40), st.integers(0, 3), st.integers(1, 600))
def test_a_continued_answer_ends_where_the_whole_one_does(prompt: list[int], seed: int, cut: int) -> None:
    whole, ended = answer(prompt, seed, 4000)
    assert ended == (whole[-1] == END)
    first, over = answer(prompt, seed, cut)
    if over:
        assert first == whole
    else:
        rest, rest_ended = answer([*prompt, *first], seed, 4000 - cut)
        assert ([*first, *rest], rest_ended) == (whole, ended)
    longer, _ = answer(prompt, seed, 4000, min_tokens=len(whole))
    assert longer[: len(whole) - ended] == whole[: len(whole) - ended]
    assert ignoring_is_exact(prompt, seed)


def ignoring_is_exact(prompt: list[int], seed: int) -> bool:
    ids, ended = answer(prompt, seed, 500, ignore_eos=True)
    return len(ids) == 500 and not ended and END not in ids


def test_lengths_have_the_mean_that_is_stated() -> None:
    lengths = [len(answer([number], 0, 10_000)[0]) for number in range(2000)]
    assert sum(lengths) / len(lengths) == pytest.approx(256, rel=0.1)


@given(st.text(max_size=60), st.text(max_size=60))
def test_text_round_trips_and_more_text_leaves_the_tokens_before(text: str, more: str) -> None:
    tokenizer = Tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(END < token < VOCABULARY or token < END for token in ids)
    assert tokenizer.encode(f"{text} x{more}")[: len(ids)] == ids


def test_an_answers_text_has_the_ids_of_the_answer() -> None:
    ids, _ = answer([1, 2, 3], 0, 100, ignore_eos=True)
    assert Tokenizer().encode(words(ids)) == ids
    assert block_hashes([9, *ids], 16)[0] != block_hashes([8, *ids], 16)[0]
    assert block_hashes([9, *ids], 16)[:3] == block_hashes([9, *ids[:50]], 16)
    assert block_hashes(ids[:15], 16) == []


def test_earlier_prompts_and_answers_are_in_the_prefix_cache() -> None:
    async def work(client: Client, _: MockEngine) -> None:
        first = await client.complete(Completion("A", PROMPT, 40, return_token_ids=True))
        again = await client.complete(Completion("A", PROMPT, 1))
        longer = await client.complete(Completion("A", PROMPT + first.token_ids + PROMPT, 1))
        other = await client.complete(Completion("A", (1, *PROMPT), 1))
        found = (first.cached_tokens, again.cached_tokens, longer.cached_tokens, other.cached_tokens)
        assert found == (0, 48, 80, 0)
        now = await counted(client)
        assert (now["prefix_cache_hits_total",], now["prefix_cache_queries_total",]) == (128, 50 + 50 + 140 + 51)

    served(work)


def test_without_prefix_caching_nothing_is_found() -> None:
    async def work(client: Client, _: MockEngine) -> list[int | None]:
        return [(await client.complete(Completion("A", PROMPT, 2))).cached_tokens for _ in range(2)]

    assert served(work, spec=spec(prefix_caching=False)) == [0, 0]


def order_of_service(scheduling: str) -> list[int]:
    """The order in which waiting requests begin, after one that keeps the only slot until its client leaves."""
    began: list[int] = []

    async def work(client: Client, mock: MockEngine) -> None:
        async def ask(number: int, priority: int, tokens: int) -> None:
            prompt = (number, *PROMPT)
            completion = Completion("A", prompt, tokens, priority=priority)
            await client.complete(completion, lambda *_: None if number in began else began.append(number))

        holder = asyncio.create_task(ask(0, 9, 30_000))
        await until(lambda: began == [0])
        asked = []
        for number, priority in enumerate((50, 70, -3, 50, 0), 1):
            asked.append(asyncio.create_task(ask(number, priority, 30)))
            await until(lambda number=number: mock.realtime.engine.waiting == number)  # type: ignore[misc]
        holder.cancel()
        await asyncio.gather(*asked)

    served(work, spec=spec(1, scheduling=scheduling))
    return began


def test_lower_priorities_go_first_and_fcfs_ignores_them() -> None:
    assert order_of_service("priority") == [0, 3, 5, 1, 4, 2]
    assert order_of_service("fcfs") == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot_and_is_not_counted(stream: bool) -> None:
    async def work(client: Client, mock: MockEngine) -> None:
        body = {"prompt": list(PROMPT), "max_tokens": 30_000, "ignore_eos": True, "stream": stream}
        inside = mock.realtime.engine
        for waiting in (0, 1):
            leaver = asyncio.create_task(post(client, "/v1/completions", body))
            await until(lambda waiting=waiting: inside.running == 1 and inside.waiting == waiting)  # type: ignore[misc]
            if not waiting:
                stayer = leaver
        for task in (leaver, stayer):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.sleep(0.05)
        await until(lambda: inside.running == 0 and inside.waiting == 0 and not inside.busy)
        assert inside.kv.free == inside.kv.num_blocks
        now = await counted(client)
        assert (now["request_success_total", "length"], now["e2e_request_latency_seconds_count",]) == (0, 0)
        assert now["kv_cache_usage_perc",] == 0.0

    served(work, spec=spec(1))


def test_counters_add_up() -> None:
    lengths = [(20 + 7 * number, 5 + 3 * number) for number in range(12)]

    async def work(client: Client, mock: MockEngine) -> None:
        asked = [
            Completion("A", tuple(range(1000 * number, 1000 * number + prompt)), output)
            for number, (prompt, output) in enumerate(lengths)
        ]
        await asyncio.gather(*(client.complete(completion) for completion in asked))
        stopped = await client.complete(Completion("A", PROMPT, 20_000, exact=False))
        assert stopped.finish_reason == "stop"
        prompts = sum(prompt for prompt, _ in lengths) + 50
        outputs = sum(output for _, output in lengths) + stopped.output_tokens
        now = await counted(client)
        assert now["prompt_tokens_total",] == now["request_prompt_tokens_sum",] == prompts
        assert now["generation_tokens_total",] == now["request_generation_tokens_sum",] == outputs
        assert (now["request_success_total", "length"], now["request_success_total", "stop"]) == (12, 1)
        for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds", "request_queue_time_seconds"):
            assert now[f"{name}_count",] == 13
        whole, queue, inference, prefill, decode = (
            now[f"{name}_seconds_sum",]
            for name in ("e2e_request_latency", "request_queue_time", "request_inference_time",
                         "request_prefill_time", "request_decode_time")
        )  # fmt: skip
        assert whole == pytest.approx(queue + inference)
        assert inference == pytest.approx(prefill + decode)
        assert now["time_to_first_token_seconds_sum",] == pytest.approx(queue + prefill)
        assert (now["num_requests_running",], now["num_requests_waiting",]) == (0, 0)

    served(work)


def test_our_own_reader_understands_the_metrics() -> None:
    async def work(client: Client, mock: MockEngine) -> None:
        text = await client.metrics_text()
        assert text is not None
        read = read_metrics(text)
        assert (read.block_tokens, read.num_kv_tokens, read.prefix_caching) == (16, 4001 * 16, True)
        assert (read.running, read.waiting, read.preemptions, read.queue_count) == (0, 0, 0, 0)

    served(work)


def test_requests_that_memory_cannot_hold_together_are_preempted_and_finish() -> None:
    async def work(client: Client, mock: MockEngine) -> None:
        asked = [Completion("A", tuple(range(100 * n, 100 * n + 30)), 100) for n in range(3)]
        answers = await asyncio.gather(*(client.complete(completion) for completion in asked))
        assert [answer.output_tokens for answer in answers] == [100] * 3
        assert (await counted(client))["num_preemptions_total",] > 0

    small = spec(kv_blocks=17)
    served(work, spec=EngineSpec(**{**{name: getattr(small, name) for name in small.__slots__}, "max_model_len": 200}))


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "message"),
    [
        ("completions", {"prompt": "x", "model": "B"}, 404, "NotFoundError", "`B` does not exist"),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400, "BadRequestError", "at least 1"),
        ("completions", {"prompt": "x", "max_tokens": 40_000}, 400, "BadRequestError", "max_tokens=40000 cannot"),
        ("completions", {"prompt": [7] * 40_000, "stream": True}, 400, "BadRequestError", "maximum context length"),
        ("completions", {"prompt": [1, VOCABULARY]}, 400, "BadRequestError", "out of vocabulary"),
        ("completions", {"prompt": ""}, 400, "BadRequestError", "empty"),
        ("completions", {"prompt": "x", "n": 2}, 400, "BadRequestError", "n is 2"),
        ("completions", {"prompt": "x", "max_tokens": "7"}, 400, "Bad Request", "a whole number"),
        ("completions", {"prompt": "x", "priority": 0.5}, 400, "Bad Request", "a whole number"),
        ("completions", {"prompt": "x", "priority": 2**63}, 400, "BadRequestError", "64-bit"),
        ("completions", {"prompt": "x", "stream": 1}, 400, "Bad Request", "true or false"),
        ("completions", {"prompt": "x", "stream_options": {"include_usage": True}}, 400, "BadRequestError", "streams"),
        ("completions", {"prompt": "x", "min_tokens": 9, "max_tokens": 8}, 400, "BadRequestError", "min_tokens"),
        ("completions", {"prompt": [1, "x"]}, 400, "Bad Request", "token ids"),
        ("completions", {}, 400, "Bad Request", "prompt is null"),
        ("completions", b"{", 400, "Bad Request", "application/json"),
        ("chat/completions", {"messages": []}, 400, "Bad Request", "at least one message"),
        ("chat/completions", {"messages": [{"content": "x"}]}, 400, "Bad Request", "role"),
        ("chat/completions", {"messages": [{"role": "user", "content": 1}]}, 400, "Bad Request", "content is 1"),
    ],
)
def test_a_bad_request_is_refused_in_vllms_shape(path: str, body: Any, status: int, kind: str, message: str) -> None:
    async def work(client: Client, _: MockEngine) -> None:
        found, answer = await post(client, f"/v1/{path}", body)
        error = answer["error"]
        assert (found, error["type"], error["code"]) == (status, kind, status)
        assert message in error["message"]
        assert set(error) == {"message", "type", "param", "code"}

    served(work)


def test_other_endpoints() -> None:
    async def work(client: Client, mock: MockEngine) -> None:
        assert (await client.served("my-model")).max_model_len == 32_768
        assert "chimsim" in (await client.version() or "")
        assert await client._get("/health") == ""
        for path, status in (("/nothing", 404), ("/v1/completions", 405)):
            with pytest.raises(EngineError, match=str(status)):
                await client._get(path)
        status, tokens = await post(client, "/tokenize", {"prompt": "Once upon a time there was a fox."})
        assert (status, tokens["count"]) == (200, len(tokens["tokens"]))
        assert (await post(client, "/detokenize", {"tokens": tokens["tokens"]}))[1] == {
            "prompt": "Once upon a time there was a fox."
        }
        assert (await post(client, "/detokenize", {"tokens": [-1]}))[0] == 400
        _, chat = await post(client, "/tokenize", {"messages": [{"role": "user", "content": "hello"}]})
        _, answer = await post(client, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]})
        assert chat["count"] == answer["usage"]["prompt_tokens"]

    served(work, served="my-model")


def test_prompt_and_answer_over_the_limit_are_cut_in_silence() -> None:
    async def work(client: Client, mock: MockEngine) -> None:
        body = {"prompt": [5] * 32_700, "max_tokens": 500, "ignore_eos": True, "priority": 3, "stop": ["x"]}
        status, answer = await post(client, "/v1/completions", body)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 68)
        assert answer["choices"][0]["finish_reason"] == "length"

    served(work, speed=200.0)


def test_several_prompts_are_answered_each_at_its_index() -> None:
    body = {"prompt": ["one two three", "four"], "max_tokens": 30, "ignore_eos": True}

    async def work(client: Client, mock: MockEngine) -> None:
        _, whole = await post(client, "/v1/completions", body)
        assert [choice["index"] for choice in whole["choices"]] == [0, 1]
        assert whole["usage"]["completion_tokens"] == 60
        options = {"include_usage": True}
        chunks = await events(client, "/v1/completions", {**body, "stream": True, "stream_options": options})
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
        for index in (0, 1):
            mine = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == index]
            assert "".join(choice["text"] for choice in mine) == whole["choices"][index]["text"]
            assert [choice["finish_reason"] for choice in mine][-1] == "length"

    served(work)


def test_a_chat_begins_with_its_role() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}], "ignore_eos": True}

    async def work(client: Client, mock: MockEngine) -> None:
        _, whole = await post(client, "/v1/chat/completions", {**body, "max_completion_tokens": 40})
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await events(
            client, "/v1/chat/completions", {**body, "max_tokens": 40, "stream": True, "stream_options": options}
        )
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta["content"] for delta in deltas) == whole["choices"][0]["message"]["content"]
        running = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert (running[0], running[-1]) == (0, 40)
        assert running == sorted(running)

    served(work)


def test_failures_and_hangs_come_at_their_rates() -> None:
    async def work(client: Client, mock: MockEngine) -> dict[str, int]:
        kinds: dict[str, int] = {}
        for number in range(40):
            try:
                await client.complete(Completion("A", (number, *PROMPT), 2))
                kind = "answered"
            except EngineError as error:
                kind = error.kind
            kinds[kind] = kinds.get(kind, 0) + 1
        inside = mock.realtime.engine
        await until(lambda: not inside.busy and not inside.running)
        return kinds

    kinds = served(work, fail_rate=0.5)
    assert set(kinds) == {"answered", "status", "stream", "closed"}
    assert sum(kinds.values()) == 40
    assert 10 <= kinds["answered"] <= 30

    async def hang(client: Client, _: MockEngine) -> None:
        async with Client(client.url, inactivity_s=0.1) as impatient:
            with pytest.raises(EngineError, match="sent nothing"):
                await impatient.complete(Completion("A", PROMPT, 2))

    served(hang, hang_rate=1.0)


def test_stopping_ends_answers_with_abort() -> None:
    async def work() -> str:
        mock = MockEngine(spec(), speed=20.0)
        async with serving(mock, "127.0.0.1", 0) as url, Client(url) as client:
            asked = asyncio.create_task(client.complete(Completion("A", PROMPT, 30_000)))
            await until(lambda: mock.realtime.engine.running == 1)
            stopping = asyncio.create_task(_stop(mock, asked))
            with pytest.raises(EngineError) as raised:
                await asked
            await stopping
        return str(raised.value)

    async def _stop(mock: MockEngine, asked: asyncio.Task[Any]) -> None:
        await asyncio.sleep(0.05)
        mock.realtime.abort_all()

    assert "finish_reason 'abort'" in asyncio.run(work())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speed": 0.0}, "--speed"),
        ({"fail_rate": 0.7, "hang_rate": 0.7}, "--hang-rate"),
        ({"spec": spec(kv_blocks=100)}, "max_model_len is 32,768 tokens and KV memory holds 1,600"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ChimsimError, match=message):
        MockEngine(**{"spec": spec(), **settings})


def test_a_port_in_use_is_said() -> None:
    async def work(client: Client, _: MockEngine) -> None:
        port = int(client.url.rsplit(":", 1)[1])
        with pytest.raises(ChimsimError, match=f"cannot listen on 127.0.0.1, port {port}"):
            async with serving(MockEngine(spec()), "127.0.0.1", port):
                pass

    served(work)


def test_the_command_serves_until_it_is_told_to_stop() -> None:
    command = [
        sys.executable,
        "-m",
        "chimsim",
        "mock-engine",
        "--profile",
        "qwen1.5b",
        "--port",
        "0",
        "--model",
        "tiny",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        try:
            assert line.startswith("serving tiny on http://127.0.0.1:")
            url = line.split(" on ")[1].strip()

            async def ask() -> int:
                async with Client(url) as client:
                    hanging = asyncio.create_task(client.complete(Completion("tiny", PROMPT, 30_000)))
                    tokens = (await client.complete(Completion("tiny", PROMPT, 3))).output_tokens
                    process.send_signal(signal.SIGTERM)
                    with pytest.raises(EngineError, match="abort"):
                        await hanging
                    return tokens

            assert asyncio.run(ask()) == 3
            assert process.wait(10.0) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()
