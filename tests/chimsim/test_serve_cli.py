"""`chimsim serve` as a user runs it: what is wrong is said before anything is served, and SIGTERM drains."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.chimsim.gateway.gateways import CHAT, chat, events_of, text_of, until
from tests.chimsim.gateway.rude_engine import WORDS, RudeEngine, rude
from tests.chimsim.small import run_chimsim
from traces import load_trace

MODEL = "Qwen2.5-7B"
Serve = Callable[..., tuple[int, str, str]]


def write_cluster(folder: Path, url: str) -> Path:
    path = folder / "live.toml"
    path.write_text(f'[[engine]]\nmodel = "{MODEL}"\nmax_batch_size = 1\nurl = "{url}"\n')
    return path


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Serve]:
    """The command in this process: exit code, stdout, stderr. Logging is as before afterwards."""
    loggers = [logging.getLogger(name) for name in ("chimsim.gateway", "uvicorn")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    cluster = write_cluster(tmp_path, "http://127.0.0.1:9")

    def run(*arguments: object) -> tuple[int, str, str]:
        return run_chimsim(monkeypatch, capsys, "serve", "--cluster", cluster, *arguments)

    yield run
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "fcsf"], "policy 'fcsf' is unknown; did you mean 'fcfs'?"),
        (["--policy", "fcfs", "--queue", "dispatch"], "--queue: 'dispatch' is unknown; choose from"),
        (["--policy", "fcfs", "--knob", "tau"], "--knob: 'tau' is not of the form name=value"),
        (["--policy", "chimera", "--knob", "taau=1"], "has no knob 'taau'; did you mean 'tau'?"),
        (["--policy", "sjf"], "reads the predictions stage_tokens: give --length-predictor qrf:FOLDER"),
        (["--policy", "sjf", "--length-predictor", "folder"], "--length-predictor: 'folder'; expected qrf:FOLDER"),
        (["--policy", "sjf", "--length-predictor", "qrf:nowhere"], "nowhere"),
        (["--policy", "fcfs", "--record-text"], "--record-text says what --record keeps"),
        (["--policy", "fcfs", "--record", "no/where.jsonl"], "no/where.jsonl: there is no folder no"),
        (["--policy", "fcfs", "--record", "mine.csv"], "mine.csv: a recorded trace is JSON lines"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_2(serve: Serve, arguments: list[str], words: str) -> None:
    code, out, err = serve(*arguments, "--port", "0")
    assert (code, out) == (2, "")
    assert words in err.splitlines()[-1]
    assert len([line for line in err.splitlines() if line.startswith("chimsim: error: ")]) == 1


def test_a_port_that_is_taken_is_said(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = serve("--policy", "fcfs", "--port", port)
    assert code == 2
    assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in err.splitlines()[-1]


def test_a_cluster_without_urls_is_refused(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "live.toml").write_text(f'[[engine]]\nmodel = "{MODEL}"\n')
    code, _, err = serve("--policy", "fcfs", "--port", "0")
    assert code == 2
    assert "has no url" in err


def test_listening_to_everyone_without_a_key_is_warned_of(serve: Serve) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        _, _, warned = serve("--policy", "fcfs", "--host", "0.0.0.0", "--port", port)
        _, _, keyed = serve("--policy", "fcfs", "--host", "0.0.0.0", "--port", port, "--api-key", "sesame")
    assert "anyone who can reach 0.0.0.0 can use the engines" in warned
    assert "anyone" not in keyed
    assert "sesame" not in keyed


@asynccontextmanager
async def started(folder: Path, url: str, *more: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A real ``chimsim serve`` and its address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "chimsim", "serve", "--cluster", str(write_cluster(folder, url)), "--policy", "fcfs",
        "--port", "0", *more,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, "CHIMSIM_GATEWAY_KEY": "k"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert line.startswith("serving Fcfs(")
        yield process, line.split()[-1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def test_sigterm_lets_calls_finish_and_the_record_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"

    async def run() -> str:
        engine = RudeEngine(MODEL, gate=asyncio.Event())
        async with rude(engine), started(tmp_path, engine.url, "--record", str(path)) as (process, url):
            async with aiohttp.ClientSession(headers={"Authorization": "Bearer k"}) as session:
                body = chat(stream=True, metadata={"workflow_id": "w"})
                reply = await session.post(url + CHAT, json=body)
                first = await reply.content.readuntil(b"\n\n")
                # another waits for the only slot
                waiting = asyncio.ensure_future(session.post(url + CHAT, json=chat()))
                await until_waiting(session, url)
                process.send_signal(signal.SIGTERM)
                await until(lambda: not listens(url))
                assert engine.gate is not None
                engine.gate.set()
                events = events_of(first + await reply.read())
                assert (text_of(events), events[-1]) == ("".join(WORDS), "[DONE]")
                answer = await waiting
                assert answer.status == 200
                assert (await answer.json())["choices"][0]["message"]["content"] == "".join(WORDS)
            assert await process.wait() == 0
            assert process.stderr is not None
            return (await process.stderr.read()).decode()

    err = asyncio.run(run())
    first, second = load_trace(path).workflows
    assert {len(workflow.runs[MODEL].stages) for workflow in (first, second)} == {1}
    assert "w" in (first.workflow_id, second.workflow_id)
    calls = [json.loads(line) for line in err.splitlines()]
    assert [(call["event"], call["status"], call["tries"]) for call in calls] == [("call", 200, 1)] * 2
    assert calls[0]["workflow"] == "w"
    assert calls[1]["waited_ms"] > 0
    assert "Count to four" not in err


def test_what_outlasts_the_drain_is_cut_off_and_the_end_is_clean(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"

    async def run() -> None:
        engine = RudeEngine(MODEL, good=1, fault="silent")
        more = "--record", str(path), "--drain", "0"
        async with rude(engine), started(tmp_path, engine.url, *more) as (process, url):
            async with aiohttp.ClientSession(headers={"Authorization": "Bearer k"}) as session:
                body = chat(metadata={"workflow_id": "w"})
                assert (await session.post(url + CHAT, json=body)).status == 200
                hanging = asyncio.ensure_future(session.post(url + CHAT, json=body))
                await until(lambda: engine.inside == 1)
                process.send_signal(signal.SIGTERM)
                cut = await hanging
                assert cut.status == 503
                assert (await cut.json())["error"]["message"] == "the gateway is shutting down"
            assert await process.wait() == 0
            await until(lambda: engine.left == 1)

    asyncio.run(run())
    (workflow,) = load_trace(path).workflows
    assert len(workflow.runs[MODEL].stages) == 1


def listens(url: str) -> bool:
    host, _, port = url.removeprefix("http://").partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


async def until_waiting(session: aiohttp.ClientSession, url: str) -> None:
    for _ in range(200):
        async with session.get(f"{url}/metrics") as reply:
            if f'chimsim_waiting{{engine="{MODEL}"}} 1.0' in await reply.text():
                return
        await asyncio.sleep(0.01)
    raise AssertionError("no call came to wait")
