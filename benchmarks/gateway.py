"""The gateway under load: are calls lost, is the policy's order kept, does memory stay flat, what does a call pay?

    python benchmarks/gateway.py [--quick] [--concurrent 500] [--seconds 60]

Two mock engines, the gateway (policy fcfs) and the client are processes of their own, on this machine. First
``--concurrent`` clients, half of them streaming, send a call whenever their last one is answered, through the gateway
and then directly to the engines; what the gateway records and logs tells when each call came and was sent on. Then
few clients call the gateway and an engine in turn, for answers of one token: that is what the overhead is taken from.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
PROFILE = "qwen1.5b"
SLOTS = 32
SPEED = 2.0
TOKENS = 32
"""Output tokens of a call under load."""
SLACK_MS = 0.2
"""Waits are told in tenths of a millisecond: a smaller difference says nothing of the order."""


@contextmanager
def process(*arguments: str, stderr: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``chimsim`` with the arguments, and the address that it says it serves on; it ends with SIGTERM."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(stderr, "w") as log:
        started = subprocess.Popen(
            [sys.executable, "-m", "chimsim", *arguments],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
    try:
        assert started.stdout is not None
        line = started.stdout.readline()
        if not line:
            raise SystemExit(f"{arguments[0]} did not start: {stderr.read_text()}")
        yield started, line.split()[-1]
    finally:
        started.send_signal(signal.SIGTERM)
        if started.wait(60):
            raise SystemExit(f"{arguments[0]} ended with exit code {started.returncode}: {stderr.read_text()[-2000:]}")


@dataclass
class Counted:
    """What clients counted. ``wrong`` are answers that are not what was asked for, by what they were."""

    sent: int = 0
    whole: int = 0
    wrong: dict[str, int] = field(default_factory=dict)
    latencies_s: list[float] = field(default_factory=list)


async def call(session: aiohttp.ClientSession, url: str, model: str, number: int, tokens: int, stream: bool) -> str:
    """One call; an empty string if its answer is whole, else what is wrong with it."""
    body = {
        "model": model, "prompt": f"Call {number} of many", "max_tokens": tokens, "ignore_eos": True, "stream": stream,
    }  # fmt: skip
    try:
        async with session.post(f"{url}/v1/completions", json=body) as reply:
            data = await reply.read()
            if reply.status != 200:
                return f"status {reply.status}"
    except aiohttp.ClientError as error:
        return type(error).__name__
    if stream:
        return "" if data.endswith(b"data: [DONE]\n\n") and b'"finish_reason": "length"' in data else "half a stream"
    return "" if json.loads(data)["usage"]["completion_tokens"] == tokens else "too few tokens"


async def load(
    urls: list[str], model: str, concurrent: int, seconds: float, gateway: int | None
) -> tuple[Counted, Any]:
    """Clients that call for as long, each as soon as it has its answer; and the memory of the gateway meanwhile."""
    counted, memory = Counted(), []
    until = time.monotonic() + seconds

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        url = urls[number % len(urls)]
        while time.monotonic() < until:
            counted.sent += 1
            begun = time.monotonic()
            wrong = await call(session, url, model, counted.sent, TOKENS, stream=number % 4 < 2)
            counted.latencies_s.append(time.monotonic() - begun)
            counted.whole += not wrong
            if wrong:
                counted.wrong[wrong] = counted.wrong.get(wrong, 0) + 1

    async def watch() -> None:
        while gateway is not None:
            memory.append(resident_mb(gateway))
            await asyncio.sleep(min(10.0, seconds / 3))

    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        watching = asyncio.ensure_future(watch())
        await asyncio.gather(*(client(session, number) for number in range(concurrent)))
        watching.cancel()
    if gateway is not None:
        memory.append(resident_mb(gateway))
    return counted, memory


async def overhead(gateway: str, engine: str, model: str, clients: int, calls: int, stream: bool) -> list[Any]:
    """Milliseconds of calls for one token, directly and through the gateway, in turn."""
    took: tuple[list[float], list[float]] = ([], [])

    async def client(session: aiohttp.ClientSession) -> None:
        for number in range(calls // clients):
            # Who is first changes, so that neither always meets the other's leavings.
            for way in (0, 1) if number % 2 else (1, 0):
                begun = time.perf_counter()
                wrong = await call(session, (engine, gateway)[way], model, number, 1, stream)
                took[way].append(1e3 * (time.perf_counter() - begun))
                assert not wrong, wrong

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    skip = len(took[0]) // 10  # the first calls open connections
    return [np.percentile(each[skip:], (50, 99)) for each in took]


def resident_mb(pid: int) -> float:
    """Memory of the process in MB (1e6 bytes); NaN where there is no /proc."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return float("nan")
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def wait_for_lines(path: Path, lines: int) -> int:
    """How many lines the file has, once it has as many or nothing comes for 2 s."""
    seen, at = -1, 0.0
    while True:
        now = path.read_bytes().count(b"\n")
        if now >= lines or (now == seen and time.monotonic() > at + 2.0):
            return now
        if now != seen:
            seen, at = now, time.monotonic()
        time.sleep(0.1)


def order(record: Path, log: Path) -> tuple[int, int, float]:
    """Calls that had to wait, and those of them sent on before one that came to their engine earlier; the worst in ms.

    When calls came is in the recorded trace, how long they waited in the log. With fcfs, of two calls of an engine the
    one that came first is sent first.
    """
    came = {row["workflow_id"]: 1e3 * row["arrival_s"] for row in map(json.loads, record.read_text().splitlines())}
    engines: dict[str, list[tuple[float, float, float]]] = {}
    for row in map(json.loads, log.read_text().splitlines()):
        if row["event"] == "call" and row["workflow"] in came:
            at = came[row["workflow"]]
            engines.setdefault(row["engine"], []).append((at, at + row["waited_ms"], row["waited_ms"]))
    waited, early, worst = 0, 0, 0.0
    for calls in engines.values():
        newest = 0.0
        for _, sent, wait in sorted(calls):
            waited += wait > 1.0
            early += sent < newest - SLACK_MS
            worst = max(worst, newest - sent)
            newest = max(newest, sent)
    return waited, early, worst


def run(concurrent: int, seconds: float, calls: int, folder: Path) -> None:
    from calibration.profile import find_profile

    model = find_profile(PROFILE).model
    console = Console(width=110)
    with ExitStack() as stack:
        # As many at once as the gateway lets in: called directly, the engines queue the rest themselves.
        mock = ("mock-engine", "--profile", PROFILE, "--port", "0", "--speed", str(SPEED), "--max-num-seqs", str(SLOTS))
        engines = [stack.enter_context(process(*mock, stderr=folder / f"engine{n}.log"))[1] for n in range(2)]
        tables = [
            f'[[engine]]\nmodel = "{model}"\nmax_num_seqs = {SLOTS}\nmax_batch_size = {SLOTS}\nurl = "{url}"\n'
            for url in engines
        ]
        cluster, log, record = folder / "live.toml", folder / "gateway.log", folder / "trace.jsonl"
        cluster.write_text("\n".join(tables))
        arguments = ("serve", "--cluster", str(cluster), "--policy", "fcfs", "--port", "0", "--record", str(record))
        served, gateway = stack.enter_context(process(*arguments, stderr=log))
        started_mb = resident_mb(served.pid)
        through, memory = asyncio.run(load([gateway], model, concurrent, seconds, served.pid))
        recorded = wait_for_lines(record, through.whole)
        waited, early, worst = order(record, log)
        direct, _ = asyncio.run(load(engines, model, concurrent, seconds, None))

        table = Table(title=f"{concurrent} clients, {seconds:g} s, 2 engines of {SLOTS} slots")
        for column in ("", "sent", "answered", "lost", "calls/s", "p50 s", "p99 s"):
            table.add_column(column, justify="left" if not column else "right")
        for name, counted in (("gateway", through), ("direct", direct)):
            p50, p99 = np.percentile(counted.latencies_s, (50, 99))
            table.add_row(
                name, f"{counted.sent:,}", f"{counted.whole:,}", f"{counted.sent - counted.whole:,}",
                f"{counted.whole / seconds:.0f}", f"{p50:.2f}", f"{p99:.2f}",
            )  # fmt: skip
        console.print(table)
        for counted in (through, direct):
            if counted.wrong:
                console.print(f"what was wrong: {counted.wrong}")
        console.print(f"recorded: {recorded:,} workflows of a call each")
        console.print(
            f"order: {waited:,} calls waited; {early:,} were sent on more than {SLACK_MS:g} ms before one that came to "
            f"their engine earlier (the worst {worst:.1f} ms)"
        )
        console.print(
            f"gateway's memory, MB: {started_mb:.0f} at the start, then {', '.join(f'{mb:.0f}' for mb in memory)}"
        )
        table = Table(title="answers of one token, ms: directly, through the gateway, and the difference")
        for column in ("clients", "answer", "p50 direct", "gateway", "overhead", "p99 direct", "gateway", "overhead"):
            table.add_column(column, justify="left" if column == "answer" else "right")
        for clients in (1, 8):
            for stream in (False, True):
                straight, led = asyncio.run(overhead(gateway, engines[0], model, clients, calls, stream))
                numbers = [n for at in (0, 1) for n in (straight[at], led[at], led[at] - straight[at])]
                table.add_row(str(clients), "stream" if stream else "whole", *(f"{number:.2f}" for number in numbers))
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrent", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--quick", action="store_true", help="5 seconds, and fewer calls for the overhead")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        seconds = 5.0 if options.quick else options.seconds
        run(options.concurrent, seconds, 400 if options.quick else 1600, Path(folder))


if __name__ == "__main__":
    main()
