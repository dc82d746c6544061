"""``chimsim serve``: the gateway from the command line.

It parses, checks and starts; what it serves is in `chimsim.gateway`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from chimsim.config import load_cluster
from chimsim.errors import ChimsimError, near
from chimsim.feeds import QRF
from chimsim.options import note
from chimsim.replay import Queue
from chimsim.spec import parse_scalar
from policies import load_policy

if TYPE_CHECKING:
    from chimsim.config import Cluster
    from chimsim.gateway.core import Limits
    from chimsim.gateway.foretell import Models
    from policies.interface import Policy

_LOCAL = ("127.0.0.1", "::1", "localhost")


def serve_command(
    cluster: Annotated[Path, typer.Option(help="Cluster TOML whose engines have a url.")],
    policy: Annotated[str, typer.Option(help="fcfs, chimera, ... or my_file.py:MyPolicy")],
    knob: Annotated[list[str] | None, typer.Option(help="A knob of the policy: name=value (repeatable).")] = None,
    router: Annotated[str | None, typer.Option(help="Folder of a router, for policies that read confidence.")] = None,
    length_predictor: Annotated[str | None, typer.Option(help="qrf:FOLDER, for policies that read lengths.")] = None,
    rank_predictor: Annotated[str | None, typer.Option(help="Folder of a rank model, for ltr.")] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Calls predicted at once at most.")] = 32,
    batch_timeout_ms: Annotated[float, typer.Option(min=0, help="How long a call waits for others to join.")] = 2.0,
    queue: Annotated[str, typer.Option(help="Where calls wait: dispatcher or engine.")] = "dispatcher",
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8080,
    api_key: Annotated[
        str, typer.Option(envvar="CHIMSIM_GATEWAY_KEY", show_envvar=True, help="Bearer token that clients must send.")
    ] = "",
    max_queued: Annotated[int, typer.Option(min=1, help="Calls that may wait; more get 503.")] = 10_000,
    max_wait: Annotated[float, typer.Option(min=0.1, help="Seconds that a call may wait for its turn.")] = 300.0,
    inactivity: Annotated[
        float, typer.Option(min=0.1, help="Seconds without a byte after which a stream hangs.")
    ] = 120,
    max_answer: Annotated[float, typer.Option(min=0.1, help="Seconds for an answer that is not streamed.")] = 600.0,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="Longest request.")] = 32.0,
    ttl: Annotated[float, typer.Option(min=0.1, help="Seconds without news after which a workflow is over.")] = 600.0,
    drain: Annotated[float, typer.Option(min=0, help="Seconds that calls get to finish at SIGTERM.")] = 60.0,
    record: Annotated[Path | None, typer.Option(help="Write what passes as a trace: my-trace.jsonl")] = None,
    record_text: Annotated[bool, typer.Option("--record-text", help="With prompts and answers.")] = False,
    record_max_mb: Annotated[float, typer.Option(min=0.001, help="Begin a new file beyond this size.")] = 1024.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Log warnings and errors, not every call.")] = False,
) -> None:
    """Serve a policy as a gateway: OpenAI's API in front of running engines.

    \b
    chimsim serve --cluster live.toml --policy fcfs --port 8080
    chimsim serve --cluster live.toml --policy chimera --knob tau=1 \\
        --router models/router --length-predictor qrf:models/lengths
    chimsim serve --cluster live.toml --policy fcfs --record my-trace.jsonl --record-text

    Clients ask for model "auto" (the policy chooses) or a model by its name, and say which workflow a call belongs to
    with the header X-Chimsim-Workflow-Id. docs/gateway.md has headers, limits and metrics. A line on stdout says
    when it serves; logs are JSON lines on stderr; SIGTERM drains.
    """
    from chimsim.gateway.core import Limits
    from chimsim.gateway.foretell import Models

    if queue not in get_args(Queue):
        raise ChimsimError(
            f"--queue: {queue!r} is unknown; choose from {', '.join(get_args(Queue))}{near(queue, get_args(Queue))}"
        )
    if length_predictor is not None and not length_predictor.startswith(QRF):
        raise ChimsimError(f"--length-predictor: {length_predictor!r}; expected {QRF}FOLDER")
    if record_text and record is None:
        raise ChimsimError("--record-text says what --record keeps; give --record FILE")
    engines = load_cluster(cluster)
    chosen = load_policy(policy, **_knobs(knob or []))
    models = Models(
        engines.models, router, length_predictor and length_predictor.removeprefix(QRF), rank_predictor,
        chosen.quantile,
    )  # fmt: skip
    limits = Limits(max_queued, max_wait, max_answer, ttl)
    if host not in _LOCAL and not api_key:
        note(f"warning: anyone who can reach {host} can use the engines: set CHIMSIM_GATEWAY_KEY")
    _log_to_stderr(logging.WARNING if quiet else logging.INFO)
    asyncio.run(
        _serve(
            engines, chosen, models, limits, queue=cast("Queue", queue), inactivity_s=inactivity, max_batch=max_batch,
            timeout_s=batch_timeout_ms / 1e3, record=record, record_text=record_text,
            record_bytes=round(record_max_mb * (1 << 20)), host=host, port=port, api_key=api_key,
            max_body_bytes=round(max_body_mb * (1 << 20)), drain_s=drain,
        )
    )  # fmt: skip


async def _serve(
    cluster: Cluster, policy: Policy, models: Models, limits: Limits, *, queue: Queue, inactivity_s: float,
    max_batch: int, timeout_s: float, record: Path | None, record_text: bool, record_bytes: int, host: str, port: int,
    api_key: str, max_body_bytes: int, drain_s: float,
) -> None:  # fmt: skip
    from chimsim.gateway.app import application
    from chimsim.gateway.server import Server, opened

    async with opened(
        cluster, policy, models, queue=queue, limits=limits, inactivity_s=inactivity_s, max_batch=max_batch,
        timeout_s=timeout_s, record=record, record_texts=record_text, record_bytes=record_bytes, say=note,
    ) as gateway:  # fmt: skip
        app = application(gateway, api_key=api_key, max_body_bytes=max_body_bytes)
        # What is loaded by now stays: a full collection that walks all of it would hold up every stream.
        gc.collect()
        gc.freeze()
        await Server(app, host, port, drain_s, lambda url: typer.echo(f"serving {policy} on {url}")).run_here()


def _knobs(given: list[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name.strip():
            raise ChimsimError(f"--knob: {text!r} is not of the form name=value")
        found[name.strip()] = parse_scalar(value)
    return found


def _log_to_stderr(level: int) -> None:
    from chimsim.gateway.server import JsonLines

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("chimsim.gateway", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level if name == "chimsim.gateway" else logging.WARNING)
