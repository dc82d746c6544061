"""The running engines of a cluster: started where the file says how, looked at once, and watched while a run lasts.

What it started it stops, and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from chimsim.config import Address, Cluster, EngineSpec
from chimsim.errors import ChimsimError
from chimsim.live.client import Client, Completion, EngineError
from chimsim.live.measure import Engine
from chimsim.live.port import Endpoint
from chimsim.replay import SAMPLE_S

START_S = 600.0
"""How long a started engine may take until it answers."""
STOP_S = 8.0
"""After SIGTERM; then it is killed."""


@asynccontextmanager
async def endpoints(
    cluster: Cluster,
    *,
    launch: bool = False,
    logs: Path | None = None,
    inactivity_s: float = 120.0,
    say: Callable[[str], None] = lambda text: None,
) -> AsyncIterator[dict[str, Endpoint]]:
    """All engines of the cluster by name, answering. Raises `ChimsimError` or `EngineError` for one that does not.

    What started engines print goes to files in ``logs``.
    """
    engines = cluster.addressed()
    async with AsyncExitStack() as stack:
        found: dict[str, Endpoint] = {}
        started: dict[str, asyncio.subprocess.Process] = {}
        for spec, address in engines if launch else ():
            if not address.launch:
                raise ChimsimError(f"cluster {cluster.name}: engine {spec.name} has no launch = ... to start it with")
            async with Client(address.url, inactivity_s=inactivity_s, connect_s=2.0) as client:
                if await client.healthy():
                    raise ChimsimError(
                        f"engine {spec.name}: something answers at {address.url} already; stop it, or leave "
                        "--launch out"
                    )
            started[spec.name] = await stack.enter_async_context(_process(spec, address, logs))
        for spec, address in engines:
            client = await stack.enter_async_context(
                Client(address.url, api_key=address.api_key, inactivity_s=inactivity_s)
            )
            if spec.name in started:
                say(f"waiting for {spec.name} at {address.url}")
                await _until_well(spec, client, started[spec.name], _log_of(spec, logs))
            found[spec.name] = await _look(spec, address, client)
        watching = asyncio.get_running_loop().create_task(_watch(list(found.values())))
        try:
            yield found
        finally:
            watching.cancel()


async def _look(spec: EngineSpec, address: Address, client: Client) -> Endpoint:
    served = await client.served(address.served_model)
    endpoint = Endpoint(client, address.served_model, await client.version(), served.max_model_len)
    probe = Engine(client, address.served_model)
    try:
        await probe.find_tokens()
        endpoint.token_range = probe.tokens
        low = probe.tokens[0]
        answer = await client.complete(Completion(address.served_model, (low,) * 4, 2, return_token_ids=True))
        endpoint.token_ids = len(answer.token_ids) == 2
    except EngineError as error:
        if error.kind != "status":
            raise
        endpoint.token_ids = False
    await endpoint.look()
    endpoint.first = endpoint.metrics
    if served.max_model_len is not None and served.max_model_len < spec.max_model_len:
        raise ChimsimError(
            f"engine {spec.name}: {address.url} serves a context of {served.max_model_len:,} tokens, the cluster says "
            f"{spec.max_model_len:,}; expected max_model_len = {served.max_model_len} in its table"
        )
    return endpoint


async def _watch(found: list[Endpoint]) -> None:
    while True:
        await asyncio.sleep(SAMPLE_S)
        await asyncio.gather(*(endpoint.look() for endpoint in found))


def _log_of(spec: EngineSpec, logs: Path | None) -> Path:
    return Path(os.devnull) if logs is None else logs / f"engine-{spec.name.replace('/', '-')}.log"


async def _until_well(spec: EngineSpec, client: Client, process: asyncio.subprocess.Process, log: Path) -> None:
    loop = asyncio.get_running_loop()
    until = loop.time() + START_S
    while not await client.healthy():
        if process.returncode is not None:
            raise ChimsimError(
                f"engine {spec.name}: its launch command ended with code {process.returncode}; "
                f"{log} has what it printed"
            )
        if loop.time() > until:
            raise ChimsimError(f"engine {spec.name}: did not answer {client.url}/health within {START_S:g} s")
        await asyncio.sleep(0.5)


def command_of(spec: EngineSpec, address: Address) -> list[str]:
    """The words of the command that starts the engine. Raises `ChimsimError` for one that cannot be made of it."""
    port = address.url.rsplit(":", 1)[-1].rstrip("/")
    try:
        words = shlex.split(address.launch.format(port=port, model=spec.model, served_model=address.served_model))
    except (ValueError, LookupError, AttributeError) as error:
        raise ChimsimError(
            f"engine {spec.name}: launch is {address.launch!r}; expected a command in which {{port}}, {{model}} and "
            f"{{served_model}} are all that stands in braces ({type(error).__name__}: {error})"
        ) from None
    if not words or "\0" in address.launch:
        raise ChimsimError(f"engine {spec.name}: launch is {address.launch!r}; expected a command")
    return words


@asynccontextmanager
async def _process(spec: EngineSpec, address: Address, logs: Path | None) -> AsyncIterator[asyncio.subprocess.Process]:
    """The engine's process, in a group of its own, so that what it starts ends with it."""
    words = command_of(spec, address)
    # A program installed beside this Python is found without its environment being activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    try:
        with open(_log_of(spec, logs), "ab") as printed:
            process = await asyncio.create_subprocess_exec(
                *words, stdout=printed, stderr=printed, start_new_session=True, env={**os.environ, "PATH": path}
            )
    except OSError as error:
        raise ChimsimError(f"engine {spec.name}: cannot start {words[0]!r}: {error.strerror or error}") from None
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.returncode is None:
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    break
                try:
                    await asyncio.wait_for(process.wait(), STOP_S)
                except TimeoutError:
                    continue
