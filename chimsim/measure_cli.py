"""``chimsim calibrate measure`` and ``fit``: the profile of a running engine.

It parses, calls and prints; `chimsim.live` talks to the engine, `calibration.measured_fit` fits.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from chimsim.calibrate_cli import batch_remark, residual_table
from chimsim.live_cli import InactivityOpt, JsonOpt, KeyOpt, ModelOpt, UrlOpt, drive, progress
from chimsim.record_cli import record_command
from chimsim.results import check_file, write_file

if TYPE_CHECKING:
    from calibration.fit import Residuals
    from calibration.measured_fit import MeasuredFit
    from calibration.raw_measurements import Raw
    from chimsim.live.measure import Report

WIDTH = 80

CallOpt = Annotated[
    float | None, typer.Option(min=1, help="Mean tokens of a call, which says how many KV memory holds (default 2000).")
]


def register(app: typer.Typer) -> None:
    """Add the commands to ``chimsim calibrate``."""
    app.command("measure")(measure_command)
    app.command("fit")(fit_command)
    app.command("record")(record_command)


def measure_command(
    url: UrlOpt,
    model: ModelOpt,
    gpu: Annotated[str, typer.Option(help="What the engine runs on, say 'RTX 4090'.")],
    out: Annotated[Path, typer.Option(help="The profile to write, a TOML file.")],
    raw: Annotated[Path | None, typer.Option(help="Raw measurements (default: beside --out); gone on with.")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the engine (tensor parallel).")] = 1,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="vLLM's setting; default: seen.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="vLLM's setting; default: seen, where a prompt is longer.")
    ] = None,
    num_kv_tokens: Annotated[int | None, typer.Option(min=1, help="KV memory; default: what /metrics says.")] = None,
    block_tokens: Annotated[int | None, typer.Option(min=1, help="vLLM's block size; default: as /metrics.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="vLLM's setting; default: as /v1/models.")] = None,
    longest: Annotated[
        int | None, typer.Option(min=2, help="Longest sequence to measure, in tokens; default: 16,384 or the limit.")
    ] = None,
    mean_call_tokens: CallOpt = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer points and repeats: a first idea.")] = False,
    inactivity_s: InactivityOpt = 120.0,
    api_key: KeyOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Measure a running vLLM engine that serves nobody else, and write its profile.

    \b
    chimsim calibrate measure --url http://localhost:8000 --model Llama-3.1-8B \\
        --gpu "RTX 4090" --out rtx4090-llama8b.toml
    chimsim calibrate measure --url http://localhost:8000 --model Llama-3.1-8B \\
        --gpu "RTX 4090" --out quick.toml --quick --max-num-seqs 256

    Every measurement is on disk at once (--raw). Interrupted, the same command goes on; `chimsim calibrate fit`
    makes the profile from what there is.
    """
    raw = raw if raw is not None else out.with_suffix(".raw.jsonl")
    for path in (out, raw):
        check_file(path)
    from chimsim.live.client import Client
    from chimsim.live.measure import Engine, header_there, measure
    from chimsim.live.survey import Given, survey

    given = Given(gpu, gpus, max_num_seqs, max_num_batched_tokens, num_kv_tokens, block_tokens, max_model_len)

    async def work(report: Report | None) -> None:
        async with Client(url, api_key=api_key, inactivity_s=inactivity_s) as client:
            engine = Engine(client, model)
            header = await survey(engine, given, header_there(raw))
            await measure(engine, header, raw, longest=longest, quick=quick, report=report)

    before = _results(raw)
    with progress() as report:
        drive(work(report), lambda: _kept(raw) if _results(raw) > before else "")
    _finish(raw, out, mean_call_tokens, as_json)


def fit_command(
    raw: Annotated[Path, typer.Argument(metavar="RAW", help="Raw measurements of `chimsim calibrate measure`.")],
    out: Annotated[Path, typer.Option(help="The profile to write, a TOML file.")],
    mean_call_tokens: CallOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Fit a profile to raw measurements, of an interrupted `measure` too.

    Example: chimsim calibrate fit rtx4090-llama8b.raw.jsonl --out rtx4090-llama8b.toml
    """
    check_file(out)
    _finish(raw, out, mean_call_tokens, as_json)


def _results(raw: Path) -> int:
    """Lines of a raw file after its header."""
    return max(raw.read_bytes().count(b"\n") - 1, 0) if raw.exists() else 0


def _kept(raw: Path) -> str:
    """What stays of an interrupted measuring."""
    return (
        f"{_results(raw)} results are kept in {raw}: the same command goes on with them, and "
        f"`chimsim calibrate fit {raw} --out ...` makes a profile of them once every kind of cell is there"
    )


def _finish(raw_path: Path, out: Path, mean_call_tokens: float | None, as_json: bool) -> None:
    """Fit, write the profile, print."""
    from calibration.measured_fit import fit_raw
    from calibration.raw_measurements import read_raw

    raw = read_raw(raw_path)
    fit = fit_raw(raw, mean_call_tokens=mean_call_tokens)
    write_file(out, fit.profile.to_toml().encode())
    if as_json:
        typer.echo(json.dumps({**fit_dict(raw, fit), "written": [str(out)]}, indent=2))
        return
    header = raw.header
    typer.echo(f"{header.model} on {header.gpus} x {header.gpu}, vLLM {header.version}, measured {header.date}\n")
    parts = [(f"{part.part}, fitted", part) for part in fit.in_sample]
    parts += [(f"{part.part}, held out", part) for part in fit.held_out]
    Console(width=WIDTH).print(residual_table(parts, "error of the fit"))
    for line in remarks(raw, fit):
        typer.echo(textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False))
    typer.echo(f"written: {out} (raw measurements: {raw_path})")


def remarks(raw: Raw, fit: MeasuredFit) -> list[str]:
    """What else there is to know, a paragraph a string."""
    profile, header = fit.profile, raw.header
    lines = []
    for reason, count in Counter(each.reason for each in raw.skipped).items():
        lines.append(f"left out: {count} cells, {reason}")
    if fit.scatter:
        scatter = ", ".join(f"{kind} {share:.0%}" for kind, share in fit.scatter.items())
        lines.append(f"repeats differ (slowest - fastest, median over cells): {scatter}; the median repeat counts")
    for name in ("num_kv_tokens", "max_num_seqs", "max_num_batched_tokens"):
        lines.append(f"{name}: {getattr(profile, name):,}, {header.settings_from.get(name, 'not stated')}")
    if fit.request_s is not None:
        lines.append(
            f"a request costs {fit.request_s * 1e3:.1f} ms around the engine (HTTP and such): not in the profile"
        )
    batch = profile.max_batch_size
    context = profile.mean_call_tokens / 2
    at_batch, at_one = (1e3 * profile.decode_s_per_token(n, context) for n in (batch, 1))
    memory = int(profile.num_kv_tokens // profile.mean_call_tokens)
    why = "max_num_seqs" if batch == profile.max_num_seqs else "KV memory"
    lines.append(
        f"max_batch_size: {batch} ({why} decides; KV memory holds {memory} calls of "
        f"{profile.mean_call_tokens:,.0f} tokens)"
    )
    lines.append(
        f"decode_ms_per_token at that batch: {at_batch:.1f}, so {at_batch / batch:.3f} ms for each token in flight. "
        f"Not {at_one:.1f}, the step at batch 1: over {batch} it would be {at_one / batch:.3f}, "
        f"{at_batch / at_one:.1f} times too optimistic. (Contexts of {context:,.0f} tokens.)"
    )
    lines.append(batch_remark(profile))
    return lines


def fit_dict(raw: Raw, fit: MeasuredFit) -> dict[str, Any]:
    """The same for JSON."""
    profile = fit.profile
    batch, context = profile.max_batch_size, profile.mean_call_tokens / 2
    return {
        "model": profile.model,
        "gpu": profile.gpu,
        "gpus": profile.gpus,
        "version": raw.header.version,
        "digest": profile.digest,
        "measurements": len(raw.measurements),
        "skipped": [{"cell": s.cell, "repeat": s.repeat, "reason": s.reason} for s in raw.skipped],
        "settings": {
            name: {"value": getattr(raw.header, name), "from": how} for name, how in raw.header.settings_from.items()
        },
        "scatter": dict(fit.scatter),
        "in_sample": [_part(part) for part in fit.in_sample],
        "held_out": [_part(part) for part in fit.held_out],
        "request_s": fit.request_s,
        "max_batch_size": batch,
        "context_tokens": context,
        "decode_ms_per_token": 1e3 * profile.decode_s_per_token(batch, context),
        "decode_ms_per_token_at_batch_1": 1e3 * profile.decode_s_per_token(1, context),
    }


def _part(part: Residuals) -> dict[str, Any]:
    worst = [{"cell": c.label, "data_s": c.data_s, "fit_s": c.fit_s, "error": c.error} for c in part.worst()]
    return {
        "part": part.part,
        "cells": len(part.cells),
        "median": part.median,
        "p95": part.p95,
        "bias": part.bias,
        "worst": worst,
    }
