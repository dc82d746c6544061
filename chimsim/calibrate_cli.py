"""``chimsim calibrate``: profiles of your own GPU and model. Here: from tables of per-operation timings.

It parses, calls and prints; the fit is in `calibration.from_ops`.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from chimsim.errors import ChimsimError
from chimsim.results import check_file, write_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from calibration.fit import Residuals
    from calibration.profile import EngineProfile
    from calibration.scaling import Architecture

WIDTH = 80
PLOT_FORMATS = (".png", ".svg", ".pdf")

calibrate_app = typer.Typer(
    help="Make the engine profile of a GPU and a model.", no_args_is_help=True, rich_markup_mode=None
)


@calibrate_app.callback()
def _calibrate() -> None:
    """Make the engine profile of a GPU and a model."""


@calibrate_app.command("from-ops")
def from_ops(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with operation tables in or below it.")],
    out: Annotated[Path, typer.Option(help="The profile to write, a TOML file.")],
    model: Annotated[str | None, typer.Option(help="Model; default: what the tables say.")] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU; default: what the tables say.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor parallel degree of the tables to take.")] = None,
    config: Annotated[Path | None, typer.Option(help="The model's config.json, if chimsim does not know it.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the model; else as known.")] = None,
    num_kv_tokens: Annotated[
        int | None, typer.Option(min=1, help="KV memory in tokens, as vLLM prints it; else estimated.")
    ] = None,
    memory_gib: Annotated[float | None, typer.Option(help="Memory of a GPU, to estimate KV memory from.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest sequence; else the model's.")] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="vLLM's max_num_seqs.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="vLLM's max_num_batched_tokens.")] = 2048,
    allreduce_us: Annotated[
        float | None, typer.Option(help="Fixed microseconds of an all-reduce (tensor parallel); else by GPU.")
    ] = None,
    link_gb_per_s: Annotated[
        float | None, typer.Option(help="GB/s that an all-reduce moves between GPUs; else by GPU.")
    ] = None,
    skew: Annotated[
        bool | None,
        typer.Option(
            "--skew/--no-skew", help="Price batches of unequal lengths by skew_fit.csv; default: as meta.yaml says."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw fit against data: .png, .svg or .pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Fit a profile to per-operation timing tables (LLMServingSim's profiler, current format or v0).

    \b
    chimsim calibrate from-ops perf/RTX4090 --out rtx4090-llama8b.toml --plot fit.png
    chimsim calibrate from-ops perf/RTXPRO6000 --model Qwen3-32B --tp 2 \\
        --num-kv-tokens 400000 --max-num-seqs 128 --out pro6000-qwen32b-tp2.toml
    chimsim validate --measured requests.jsonl --profile rtx4090-llama8b.toml \\
        --engine-settings meta.json

    Prints how well the step-time model fits the tables, part by part.
    """
    from calibration.from_ops import Settings, operations_profile
    from calibration.operations import read_tables

    if plot is not None and plot.suffix not in PLOT_FORMATS:
        raise ChimsimError(f"--plot {plot}: expected a file that ends in {', '.join(PLOT_FORMATS)}")
    for name, value in (("--memory-gib", memory_gib), ("--link-gb-per-s", link_gb_per_s)):
        if value is not None and not value > 0:
            raise ChimsimError(f"{name} is {value:g}; expected a number above 0")
    if allreduce_us is not None and not allreduce_us >= 0:
        raise ChimsimError(f"--allreduce-us is {allreduce_us:g}; expected a number of at least 0")
    for path in (out, plot):
        if path is not None:
            check_file(path)
    tables = read_tables(folder, model=model, tp=tp, skew=skew)
    card = _card(tables.model, config, layers, max_model_len)
    settings = Settings(
        gpu=gpu,
        num_kv_tokens=num_kv_tokens,
        memory_bytes=None if memory_gib is None else int(memory_gib * 2**30),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        allreduce_call_s=None if allreduce_us is None else allreduce_us * 1e-6,
        link_bytes_per_s=None if link_gb_per_s is None else link_gb_per_s * 1e9,
    )
    profile, fit = operations_profile(tables, card, settings)
    notes = list(tables.notes)
    if gpu and tables.gpu and _plain(gpu) != _plain(tables.gpu):
        notes.append(f"the tables are of {tables.gpu}; they are taken for {gpu}, as asked")
    write_file(out, profile.to_toml().encode())
    title = f"{profile.model} on {profile.gpus} x {profile.gpu}"
    if plot is not None:
        from calibration.fit_plot import draw_fit

        write_file(plot, draw_fit(fit, title, plot.suffix[1:]))
    written = [str(path) for path in (out, plot) if path is not None]
    if as_json:
        typer.echo(json.dumps(summary(profile, fit.residuals, notes, written), indent=2))
        return
    typer.echo(f"{title}, from {tables.folder}")
    Console(width=WIDTH).print(residual_table([(part.part, part) for part in fit.residuals]))
    for line in _remarks(profile, notes):
        typer.echo(textwrap.fill(line, WIDTH, subsequent_indent="  "))
    typer.echo("written: " + ", ".join(written))


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def _card(model: str, config: Path | None, layers: int | None, max_model_len: int | None) -> Architecture:
    """The model's shapes from its config.json, from what is known of it, or only its layers."""
    from dataclasses import replace

    from calibration.datasheets import CARDS, architecture, read_config
    from calibration.profile import PROFILES
    from calibration.scaling import Architecture

    card = read_config(config, model) if config is not None else architecture(model)
    if card is None:
        if layers is None or max_model_len is None:
            known = ", ".join(sorted((*PROFILES, *(each.model for each in CARDS))))
            raise ChimsimError(
                f"the shapes of {model} are not known; give its --config config.json, or at least --layers and "
                f"--max-model-len, or one of the known names as --model: {known}"
            )
        card = Architecture(model, (), layers, 0, 0, 0, 0, 0.0, 0.0, 0.0, max_model_len, "given")
    return card if layers is None else replace(card, layers=layers)


def residual_table(parts: Sequence[tuple[str, Residuals]], title: str = "part") -> Table:
    """How well each part fits, by name: relative errors over its cells, and the cell that fits worst."""
    table = Table(box=None, pad_edge=False)
    table.add_column(title)
    for name in ("cells", "median", "p95", "bias"):
        table.add_column(name, justify="right")
    table.add_column("worst cell", overflow="fold")
    for name, part in parts:
        worst = part.worst(1)[0]
        figures = (f"{part.median:.1%}", f"{part.p95:.1%}", f"{part.bias:+.1%}")
        table.add_row(name, f"{len(part.cells):,}", *figures, f"{worst.error:+.0%} {worst.label}")
    return table


def _remarks(profile: EngineProfile, notes: Sequence[str]) -> list[str]:
    lines = [f"note: {note}" for note in notes]
    if profile.max_model_len > profile.num_kv_tokens:
        lines.append(
            f"note: max_model_len is {profile.max_model_len:,}, more than KV memory holds: vLLM would not start with "
            "it; give --max-model-len"
        )
    for name in ("num_kv_tokens", "allreduce_base_s"):
        figure = profile.figure(name)
        if name == "num_kv_tokens":
            lines.append(f"KV memory: {profile.num_kv_tokens:,} tokens, {figure.provenance}: {figure.source}")
        elif profile.gpus > 1:
            lines.append(
                f"all-reduce: {profile.allreduce_base_s * 1e3:.2f} ms a step and "
                f"{profile.allreduce_token_s * 1e6:.1f} us a token, {figure.provenance}: {figure.source}"
            )
    ladder = [n for n in (1, 8, 32, 64, 128, 256) if n <= profile.max_num_seqs]
    steps = ", ".join(f"{n}: {profile.decode_s_per_token(n, 1024) * 1e3:.1f}" for n in ladder)
    lines.append(f"decode step in ms with 1,024 tokens of context each, by batch size: {steps}")
    lines.append(batch_remark(profile))
    return lines


def batch_remark(profile: EngineProfile) -> str:
    """The batch size that policies divide by, and the step time at it, which they take without context."""
    batch = profile.max_batch_size
    step_ms = 1e3 * profile.decode_s_per_token(batch)
    return (
        f"what policies reckon with: max_batch_size {batch}, decode step at that batch {step_ms:.1f} ms without "
        f"context, {step_ms / batch:.3f} ms a token"
    )


def summary(
    profile: EngineProfile, residuals: Sequence[Residuals], notes: Sequence[str], written: Sequence[str]
) -> dict[str, Any]:
    """The same for JSON."""
    return {
        "model": profile.model,
        "gpu": profile.gpu,
        "gpus": profile.gpus,
        "digest": profile.digest,
        "num_kv_tokens": profile.num_kv_tokens,
        "residuals": [
            {
                "part": part.part,
                "cells": len(part.cells),
                "median": part.median,
                "p95": part.p95,
                "bias": part.bias,
                "worst": [
                    {"cell": cell.label, "data_s": cell.data_s, "fit_s": cell.fit_s, "error": cell.error}
                    for cell in part.worst()
                ],
            }
            for part in residuals
        ],
        "notes": list(notes),
        "written": list(written),
    }
