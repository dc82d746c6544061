"""``chimsim calibrate record``: requests sent to a running engine, recorded for `chimsim validate`.

It parses, calls and prints; `chimsim.live.recording` sends.
"""

from __future__ import annotations

import csv
import io
import json
import textwrap
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from chimsim.errors import ChimsimError
from chimsim.live_cli import InactivityOpt, JsonOpt, KeyOpt, ModelOpt, UrlOpt, drive, progress
from chimsim.results import check_file, ordered_json_bytes, write_file

if TYPE_CHECKING:
    from chimsim.live.metrics import EngineMetrics
    from chimsim.live.recording import Recording
    from chimsim.measured import Record

WIDTH = 80
LATE_S = 0.05
"""A client that sends later than this is too busy to be believed."""


def record_command(
    url: UrlOpt,
    model: ModelOpt,
    out: Annotated[Path, typer.Option(help="The records to write, JSON Lines.")],
    requests: Annotated[int, typer.Option(min=1, help="How many.")] = 200,
    rps: Annotated[float, typer.Option(min=1e-6, help="Requests a second, Poisson.")] = 1.0,
    prompt_tokens: Annotated[str, typer.Option(help="Tokens of a prompt: 128, or uniform in 64-512.")] = "64-512",
    output_tokens: Annotated[str, typer.Option(help="Tokens of an answer, likewise.")] = "32-256",
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths: the same seed sends the same requests.")] = 0,
    like: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Send the requests of this measured run instead.")
    ] = None,
    inactivity_s: InactivityOpt = 600.0,
    api_key: KeyOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Send requests to a running engine and record them, for `chimsim validate`.

    \b
    chimsim calibrate record --url http://localhost:8000 --model Llama-3.1-8B \\
        --requests 200 --rps 4 --prompt-tokens 64-512 --output-tokens 32-256 --out run.jsonl
    chimsim validate --measured run.jsonl --profile rtx4090-llama8b.toml \\
        --engine-settings run.meta.json --timeseries run.load.csv

    Beside the records it writes what the engine says of itself (.meta.json) and its load over time (.load.csv).
    """
    from chimsim.live.client import Client
    from chimsim.live.measure import Engine
    from chimsim.live.recording import lengths, poisson, replay
    from chimsim.live.recording import like as planned_like
    from chimsim.measured import read_run, record_line

    if out.exists():
        raise ChimsimError(f"{out} exists; give another --out, or remove it")
    check_file(out)
    if like is not None:
        planned = planned_like(read_run(like))
    else:
        ranges = lengths(prompt_tokens, "--prompt-tokens"), lengths(output_tokens, "--output-tokens")
        planned = poisson(requests, rps, *ranges, seed)
    longest = max(request.prompt_tokens + request.output_tokens for request in planned)
    meta: dict[str, Any] = {}

    async def work(hear: Callable[[Record], None]) -> Recording:
        async with Client(url, api_key=api_key, inactivity_s=inactivity_s) as client:
            served = await client.served(model)
            if served.max_model_len is not None and longest > served.max_model_len:
                raise ChimsimError(
                    f"the longest request has {longest} tokens, {model} takes {served.max_model_len}; the engine "
                    "would cut it in silence"
                )
            engine = Engine(client, model)
            metrics = await engine.idle()
            await engine.find_tokens()
            meta.update(_meta(model, await client.version(), served.max_model_len, metrics))
            return await replay(engine, planned, hear=hear)

    with progress() as report:
        done = 0

        def hear(record: Record) -> None:
            nonlocal done
            with open(out, "a", encoding="utf-8") as file:
                file.write(record_line(record) + "\n")
            done += 1
            if report is not None:
                report(done, len(planned), f"{done} of {len(planned)} requests")

        run = drive(work(hear), lambda: f"{done} of {len(planned)} requests are in {out}" if done else "")
    files = [out]
    if meta:
        files.append(out.with_suffix(".meta.json"))
        write_file(files[-1], ordered_json_bytes(meta))
    if run.load:
        files.append(out.with_suffix(".load.csv"))
        write_file(files[-1], _load_csv(run).encode())
    figures = summary(run)
    if as_json:
        typer.echo(json.dumps({**figures, "written": [str(path) for path in files]}, indent=2))
    else:
        _print(figures, run, files)


def summary(run: Recording) -> dict[str, Any]:
    """What was recorded, in a few numbers: times in seconds, client lag is how late requests were sent."""
    completed = [record for record in run.records if record.status == "completed"]
    ttft = [r.first_token_at - r.submitted_at for r in completed if r.first_token_at is not None]
    e2e = [r.last_token_at - r.submitted_at for r in completed if r.last_token_at is not None]
    return {
        "completed": len(completed),
        "failed": len(run.records) - len(completed),
        "prompt_tokens": sum(record.prompt_tokens for record in completed),
        "output_tokens": sum(record.output_tokens for record in completed),
        "mean_ttft_s": float(np.mean(ttft)) if ttft else None,
        "mean_e2el_s": float(np.mean(e2e)) if e2e else None,
        "p99_client_lag_s": float(np.percentile(run.lags_s, 99)),
        "most_waiting": max((waiting for _, _, waiting, _ in run.load), default=None),
    }


def _print(figures: Mapping[str, Any], run: Recording, files: list[Path]) -> None:
    mean = ", ".join(
        f"mean {name} {figures[key]:.2f} s"
        for name, key in (("TTFT", "mean_ttft_s"), ("E2E", "mean_e2el_s"))
        if figures[key] is not None
    )
    lines = [
        f"{figures['completed']} requests completed, {figures['failed']} failed; {figures['prompt_tokens']:,} prompt "
        f"and {figures['output_tokens']:,} output tokens; {mean}",
    ]
    if figures["most_waiting"] is not None:
        lines.append(f"at most {figures['most_waiting']:.0f} requests waited in the engine")
    lag_s = figures["p99_client_lag_s"]
    lines.append(f"requests were sent up to {lag_s * 1e3:.0f} ms late (p99)")
    if lag_s > LATE_S:
        lines.append("warning: the client could not keep up; use a less busy machine")
    lines += [f"failed: {reason}" for reason in dict.fromkeys(run.failures)]
    lines.append("written: " + ", ".join(str(path) for path in files))
    for line in lines:
        typer.echo(textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False))


def _meta(model: str, version: str | None, max_model_len: int | None, metrics: EngineMetrics | None) -> dict[str, Any]:
    """The engine's settings under the names that `chimsim validate --engine-settings` reads."""
    said = {
        "model": model,
        "vllm_version": version,
        "started_at": datetime.now().astimezone().isoformat(),
        "max_model_len": max_model_len,
        "num_kv_tokens": metrics.num_kv_tokens if metrics is not None else None,
        "block_size": metrics.block_tokens if metrics is not None else None,
        "enable_prefix_caching": metrics.prefix_caching if metrics is not None else None,
    }
    return {name: value for name, value in said.items() if value is not None}


def _load_csv(run: Recording) -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("time_s", "running", "waiting", "kv_used_fraction"))
    rows.writerows(tuple(f"{value:.6g}" for value in row) for row in run.load if row[0] >= 0)
    return text.getvalue()
