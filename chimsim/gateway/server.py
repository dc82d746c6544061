"""The gateway as a process: everything opened in order, served by uvicorn, drained and closed in order."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path

import uvicorn

from chimsim.config import Cluster
from chimsim.errors import ChimsimError
from chimsim.gateway.core import DEFAULT_LIMITS, Gateway, Limits
from chimsim.gateway.foretell import Foreteller, Models
from chimsim.gateway.record import Recorder
from chimsim.live.client import Client
from chimsim.replay import Queue, view_of
from policies.interface import Policy, Prediction, RequestView


@asynccontextmanager
async def opened(
    cluster: Cluster,
    policy: Policy,
    models: Models,
    *,
    queue: Queue = "dispatcher",
    limits: Limits = DEFAULT_LIMITS,
    inactivity_s: float = 120.0,
    max_batch: int = 32,
    timeout_s: float = 0.002,
    record: Path | None = None,
    record_texts: bool = False,
    record_bytes: int = 1 << 30,
    say: Callable[[str], None] = lambda text: None,
) -> AsyncIterator[Gateway]:
    """A gateway in front of the cluster's engines, which may come later. Raises the packages' errors for bad input."""
    models.check(policy)
    if queue == "engine":
        _check_order(policy, cluster)
    if type(policy).on_progress is not Policy.on_progress or policy.preemptive:
        say(
            f"policy {type(policy).__name__}: calls of clients are not cut in pieces, so that a running one never "
            "gives its slot up; the policy's order holds while they wait"
        )
    async with AsyncExitStack() as stack:
        clients = {}
        for spec, address in cluster.addressed():
            if address.api_key_env and not address.api_key:
                raise ChimsimError(
                    f"cluster {cluster.name}: engine {spec.name} has api_key_env = {address.api_key_env!r}, and "
                    "no such variable is set"
                )
            client = Client(address.url, api_key=address.api_key, inactivity_s=inactivity_s)
            clients[spec.name] = await stack.enter_async_context(client)
        foreteller = await stack.enter_async_context(Foreteller(models, max_batch=max_batch, timeout_s=timeout_s))
        recorder = None
        if record is not None:
            recorder = stack.enter_context(Recorder(record, texts=record_texts, max_bytes=record_bytes))
        gateway = await stack.enter_async_context(
            Gateway(cluster, policy, clients, foreteller, queue=queue, limits=limits, recorder=recorder)
        )
        for line in await gateway.look():
            say(line)
        yield gateway


def _check_order(policy: Policy, cluster: Cluster) -> None:
    """Refuse a policy whose order the engines' own queues cannot take, by what it says of a made-up call."""
    numbers = dict.fromkeys(cluster.models, 1.0)
    view = RequestView(0, "w", "w", 0, "stage", 0.0, 0.0, 1, Prediction(numbers, numbers, numbers, numbers))
    try:
        order = deepcopy(policy).dispatch(0.0, view, tuple(view_of(spec) for spec in cluster.engines)).priority
    except Exception:  # a policy of the user's that this call means nothing to
        return
    name = type(policy).__name__
    if len(order) > 1:
        raise ChimsimError(f"policy {name} orders by {len(order)} numbers, vLLM by one: use --queue dispatcher")
    plain = [spec.name for spec in cluster.engines if spec.scheduling != "priority"]
    if order and plain:
        raise ChimsimError(
            f"engine {plain[0]} runs scheduling fcfs, which would ignore the order of policy {name}: run the server "
            'with --scheduling-policy priority and say scheduling = "priority" in the cluster file, or use --queue '
            "dispatcher"
        )


class Server(uvicorn.Server):
    """Serves an application until SIGINT or SIGTERM; ``ready`` is told the address once it listens."""

    def __init__(self, app: object, host: str, port: int, drain_s: float, ready: Callable[[str], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                host=host,
                port=port,
                log_config=None,
                access_log=False,
                lifespan="off",
                # Longer than clients keep unused connections (OpenAI's 5 s): one closed just then looks like a fault.
                timeout_keep_alive=75,
                timeout_graceful_shutdown=max(1, round(drain_s)),
            )
        )
        self._ready = ready
        self._url = ""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals begin the end, and nothing else: uvicorn would raise them again, before what is open is closed."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        with suppress(NotImplementedError):  # where loops take no signal handlers
            for number in numbers:
                loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            with suppress(NotImplementedError):
                for number in numbers:
                    loop.remove_signal_handler(number)

    async def run_here(self) -> None:
        """Listen and serve to the end. Raises `ChimsimError` for an address that cannot be had."""
        host, port = self.config.host, self.config.port
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listening = socket.create_server(address[:2], family=family, backlog=self.config.backlog)
        except OSError as error:
            known = error.errno is not None and not isinstance(error, socket.gaierror)
            why = os.strerror(error.errno) if known and error.errno is not None else error.strerror
            raise ChimsimError(f"cannot listen on {host}, port {port}: {why or error}") from None
        with listening:
            self._url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
            await self.serve([listening])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, and tells the address."""
        await super().startup(sockets)
        self._ready(self._url)


class JsonLines(logging.Formatter):
    """A log record as one JSON object: time, level, event, and the fields that came with it."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        row = {"time": at, "level": record.levelname.lower(), "event": record.getMessage()}
        row |= getattr(record, "fields", {})
        if record.exc_info:
            row["traceback"] = self.formatException(record.exc_info)
        return json.dumps(row, ensure_ascii=False)
