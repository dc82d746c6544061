"""``chimsim validate``: a measured run replayed in the simulator, printed as tables, kept as JSON and a figure.

It parses, calls and prints; `chimsim.measured` reads, `chimsim.validation` replays and compares.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from calibration.profile import EngineProfile, load_profile
from chimsim.errors import ChimsimError
from chimsim.live_validation import METRICS, Block, Limits, Verdict, label, to_dict, validate_live, verdict
from chimsim.live_validation_plots import draw_live
from chimsim.measured import FORMATS, MeasuredRun, read_run
from chimsim.report import aligned
from chimsim.results import ordered_json_bytes, write_file
from chimsim.run_meta import EngineFile, Setting, disagreements, read_engine_file, read_timeseries, resolve
from chimsim.validation import compare, replay
from chimsim.validation_plots import draw_validation

WIDTH = 80
LABELS = {"queue_time_s": "queue time s", "ttft_ms": "TTFT ms", "tpot_ms": "TPOT ms", "e2el_ms": "E2E ms"}
TOTALS = {
    "makespan_s": "makespan s",
    "request_throughput": "requests / s",
    "output_throughput": "output tokens / s",
    "total_token_throughput": "all tokens / s",
}
LOADS = {
    "in_system": "in the system",
    "running": "running",
    "waiting": "waiting",
    "kv_used_fraction": "KV memory used %",
}


def validate_command(
    measured: Annotated[Path | None, typer.Option(metavar="FILE", help="Requests of the measured run.")] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="NAME|TOML", help="A shipped profile or a profile file.")
    ] = None,
    live: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Instead: a folder of chimsim live, policy by policy.")
    ] = None,
    engine_settings: Annotated[
        Path | None, typer.Option(metavar="JSON", help="The run's own engine settings (meta.json).")
    ] = None,
    timeseries: Annotated[
        Path | None, typer.Option(metavar="CSV", help="Measured running, waiting and KV use over time.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for validation.json and the figure.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="vLLM's setting; goes before the file's.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="vLLM's setting (token budget).")] = None,
    num_kv_tokens: Annotated[int | None, typer.Option(help="KV memory in tokens, all blocks.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="vLLM's setting (context limit).")] = None,
    block_tokens: Annotated[int | None, typer.Option(help="Tokens of a KV block (vLLM's block_size).")] = None,
    prefix_caching: Annotated[
        bool | None, typer.Option("--prefix-caching/--no-prefix-caching", help="Automatic prefix caching.")
    ] = None,
    format: Annotated[
        str | None, typer.Option(help=f"Format of the requests, if not seen by itself: {', '.join(FORMATS)}")
    ] = None,
    max_error: Annotated[float, typer.Option(min=0, help="--live: allowed error of a mean latency, %.")] = 10.0,
    min_agreement: Annotated[
        float, typer.Option(help="--live: pairs of policies that must be ordered rightly, %.")
    ] = 100.0,
    max_regret: Annotated[float, typer.Option(help="--live: allowed cost of deploying the simulator's pick, %.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Replay a measured vLLM run and compare: throughput, queue time, TTFT, TPOT, E2E, load over time.

    \b
    chimsim validate --measured requests.jsonl --profile rtx4090.toml \\
        --engine-settings meta.json --timeseries timeseries.csv --out results/check
    chimsim validate --measured bench.json --profile qwen7b --max-num-seqs 128 --json
    chimsim validate --live results/live --max-error 10

    With --live the exit code is 0 if the simulator may be relied on and 1 if not.
    Reads chimsim's records of live runs, LLMServingSim's bench files, and results of vllm bench serve with
    --save-detailed. Settings come from the options, else the file, else the profile. docs/validation.md
    has the formulas and formats.
    """
    if out is not None and out.exists() and not out.is_dir():
        raise ChimsimError(f"--out {out}: is a file; expected a folder")
    if live is not None:
        if measured is not None or profile is not None:
            raise ChimsimError("give either --live or --measured with --profile")
        _validate_live(live, Limits(max_error, min_agreement, max_regret), as_json)
        return
    if measured is None or profile is None:
        raise ChimsimError("give --measured and --profile, or --live with a folder of chimsim live")
    run = read_run(measured, format)
    chosen = load_profile(profile)
    file = read_engine_file(engine_settings) if engine_settings is not None else None
    options = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "num_kv_tokens": num_kv_tokens,
        "max_model_len": max_model_len,
        "block_tokens": block_tokens,
        "prefix_caching": prefix_caching,
    }
    spec, settings = resolve(chosen, options, file)
    load = None
    if timeseries is not None:
        load = read_timeseries(timeseries)
        load["time_s"] -= clock_offset_s(run, file)

    simulated = replay(run, spec)
    comparison = compare(run, simulated, load)
    warnings = disagreements(chosen, file, run.model)
    result = {
        "measured": {
            "source": run.source,
            "format": run.format,
            "model": run.model or (file.model if file is not None else None),
            "ready_from": run.ready_from,
        },
        "profile": {"model": chosen.model, "gpu": chosen.gpu, "gpus": chosen.gpus, "digest": chosen.digest},
        "settings": {s.name: {"value": s.value, "source": s.source} for s in settings},
        "warnings": warnings,
        "simulation_s": simulated.simulation_s,
        **comparison.figures,
    }
    written: list[Path] = []
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_file(out / "validation.json", ordered_json_bytes(result))
        written = [out / "validation.json", *draw_validation(comparison, out)]
    for warning in warnings:
        typer.echo(f"chimsim: warning: {warning}", err=True)
    if as_json:
        typer.echo(ordered_json_bytes(result).decode(), nl=False)
        return
    typer.echo(validation_text(run, chosen, settings, comparison.figures, simulated.simulation_s))
    if written:
        typer.echo("\nwritten:\n" + "\n".join(f"  {path}" for path in written))


def _validate_live(folder: Path, limits: Limits, as_json: bool) -> None:
    blocks = validate_live(folder)
    judged = verdict(blocks, limits)
    found = to_dict(blocks, judged, limits)
    write_file(folder / "live-validation.json", ordered_json_bytes(found))
    written = [folder / "live-validation.json", *draw_live(blocks, folder)]
    if as_json:
        typer.echo(ordered_json_bytes(found).decode(), nl=False)
    else:
        typer.echo(live_text(blocks, judged))
        typer.echo("\nwritten:\n" + "\n".join(f"  {path}" for path in written))
    if not judged.passed:
        raise typer.Exit(1)


def live_text(blocks: Sequence[Block], judged: Verdict) -> str:
    """The comparison of a live run in 80 columns, with a verdict."""
    parts = []
    for block in blocks:
        rows = [["", "", "live", "simulated", "error %", "live scatter %"]]
        for entry in block.entries:
            for index, (metric, name) in enumerate(METRICS.items()):
                values = (entry.live[metric], entry.simulated[metric])
                error, scatter = entry.error_percent(metric), entry.scatter_percent(metric)
                rows.append(
                    [
                        label(entry) if not index else "", name, *("-" if v != v else _figure(v) for v in values),
                        "-" if error != error else _signed(error), "-" if scatter != scatter else _fixed(scatter),
                    ]
                )  # fmt: skip
        words = [block.title, "", _table(rows, "llrrrr"), ""]
        if block.pairs:
            words.append(
                _wrapped(
                    f"Ranking by mean latency: Kendall tau {block.kendall:.2f}; {block.agreeing} of "
                    f"{block.pairs - block.undecided} decided pairs ordered alike, {block.undecided} undecided. "
                    + ("The live runs cannot tell the policies apart. " if block.pairs == block.undecided else "")
                    + f"The simulator would deploy {block.pick}; the best live was {block.best}; that choice costs "
                    f"{block.regret_percent:.1f} %."
                )
            )
        parts.append("\n".join(words))
    if judged.passed:
        parts.append("PASS: the simulator is within the limits; deploy its pick.")
    else:
        parts.append("\n".join(["FAIL:", *(_wrapped(f"- {reason}") for reason in judged.reasons)]))
    return "\n\n".join(parts)


def clock_offset_s(run: MeasuredRun, file: EngineFile | None) -> float:
    """What to take off a time series' clock, so that its 0 is the first request.

    Our own time series run on the records' clock. Another's begins with the run, which is ``started_at`` of the
    settings where the requests are stamped with a date too, and else the first request.
    """
    if run.format == "chimsim":
        return run.started_at
    began_at = file.started_at if file is not None else None
    return 0.0 if began_at is None or run.started_at < began_at else run.started_at - began_at


def validation_text(
    run: MeasuredRun,
    profile: EngineProfile,
    settings: Sequence[Setting],
    figures: Mapping[str, Any],
    simulation_s: float,
) -> str:
    """Everything but the curves in 80 columns."""
    gpus = f"{profile.gpus} x " if profile.gpus > 1 else ""
    head = (
        f"{figures['requests']} requests of {run.source} ({run.format}) replayed on {profile.model}, "
        f"{gpus}{profile.gpu}, simulated in {simulation_s:.2f} s. Arrivals are {run.ready_from}."
    )
    blocks = [_wrapped(head)]
    if figures["left_out"]:
        counts = ", ".join(f"{count} {reason}" for reason, count in figures["left_out"].items())
        blocks.append(_wrapped(f"Left out of both sides: {counts}."))
    rows = [["setting", "value", "from"]]
    for setting in settings:
        value = setting.value
        rows.append([setting.name, f"{value:,}" if type(value) is int else "on" if value else "off", setting.source])
    blocks.append(_table(rows, "lrl"))
    rows = [["", "", "measured", "simulated", "error %"]]
    for name, pair in figures["totals"].items():
        rows.append([TOTALS[name], "", *_cells(pair)])
    for name, statistics in figures["metrics"].items():
        for index, (statistic, pair) in enumerate(statistics.items()):
            rows.append([LABELS[name] if not index else "", statistic, *_cells(pair)])
    blocks.append(_table(rows, "llrrr"))
    blocks += [_wrapped(f"{LABELS[name].rsplit(' ', 1)[0]}: absent, {why}.") for name, why in figures["absent"].items()]
    blocks.append(_per_request_table(figures["per_request"]))
    blocks.append(_load_table(figures["load"]))
    preemptions = figures["preemptions"]
    blocks.append(
        _wrapped(
            f"Preemptions: {preemptions['simulated']} simulated, of {preemptions['simulated_requests']} requests; "
            "the run does not record them."
        )
    )
    cached = figures["cached_tokens"]
    if cached["measured"] is not None:
        blocks.append(f"Prompt tokens from the prefix cache: {cached['measured']:,} measured, "
                      f"{cached['simulated']:,} simulated.")  # fmt: skip
    rows = [["furthest off", "at s", "prompt", "output", "E2E s", "simulated", "error %"]]
    for row in figures["worst"]:
        times = (row["ready_at"], row["measured_e2el_ms"] / 1000, row["simulated_e2el_ms"] / 1000)
        at, measured, simulated = (_fixed(value) for value in times)
        rows.append(
            [
                textwrap.shorten(row["request_id"], 24, placeholder="..."), at, str(row["prompt_tokens"]),
                str(row["output_tokens"]), measured, simulated, _signed(row["error_percent"]),
            ]
        )  # fmt: skip
    blocks.append(_table(rows, "lrrrrrr"))
    return "\n\n".join(block for block in blocks if block)


def _per_request_table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [["error of each request %", "signed", "absolute", "p50", "p90", "p99", "worst"]]
    for name, found in figures.items():
        if "mean_error_percent" in found:
            names = ("mean_absolute_percent", *(f"p{q}_absolute_percent" for q in (50, 90, 99)), "max_absolute_percent")
            cells = [_fixed(found[key]) for key in names]
            rows.append([LABELS[name].split()[0], _signed(found["mean_error_percent"]), *cells])
    text = _table(rows, "lrrrrrr") if len(rows) > 1 else ""
    queue = figures.get("queue_time_s")
    if queue is not None:
        mean, p99 = _figure(queue["mean_absolute_difference"]), _figure(queue["p99_absolute_difference"])
        text += f"\nqueue time: {mean} s off on average, {p99} s at p99"
    return text.strip("\n")


def _load_table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [["mean over time", "measured", "simulated", "mean |difference|"]]
    for name, found in figures.items():
        scale = 100.0 if name == "kv_used_fraction" else 1.0
        keys = ("mean_measured", "mean_simulated", "mean_absolute_difference")
        rows.append([LOADS[name], *("-" if found[key] is None else _fixed(scale * found[key]) for key in keys)])
    return _table(rows, "lrrr")


def _cells(pair: Mapping[str, float | None]) -> list[str]:
    error = pair["error_percent"]
    values = (pair[side] for side in ("measured", "simulated"))
    return [*("-" if v is None else _figure(v) for v in values), "-" if error is None else _signed(error)]


def _signed(value: float) -> str:
    text = f"{value:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text


def _figure(value: float) -> str:
    """Four digits, no more than are worth comparing."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}"


def _fixed(value: float) -> str:
    return f"{value:.1f}"


def _wrapped(text: str) -> str:
    """In lines; a number keeps its percent sign beside it."""
    lines = textwrap.fill(text.replace(" %", "\u00a0%"), WIDTH, break_on_hyphens=False, break_long_words=False)
    return lines.replace("\u00a0", " ")


def _table(rows: Sequence[Sequence[str]], sides: str) -> str:
    return "\n".join(aligned(rows, sides))
