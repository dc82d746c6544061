"""``chimsim profiles``: which profiles there are, and every number of one with where it comes from.

It prints; everything it prints stands in the profile.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from calibration.figures import PROVENANCES
from calibration.profile import PROFILES, EngineProfile, load_profile

WIDTH = 80


def profiles_command(
    name: Annotated[
        str | None,
        typer.Argument(help="A model, an alias or a TOML file: show every number of that profile."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """List the shipped engine profiles, or show one with the provenance of every number."""
    if name is None:
        profiles = list(PROFILES.values())
        text = json.dumps([summary(p) for p in profiles], indent=2) if as_json else table(profiles)
    else:
        profile = load_profile(name)
        text = json.dumps(detail_dict(profile), indent=2) if as_json else detail(profile)
    typer.echo(text)


def summary(profile: EngineProfile) -> dict[str, Any]:
    """One profile in a line's worth of values; ``provenance`` counts its numbers."""
    counts = Counter(row.provenance for row in profile.provenance())
    dense = Counter(row.provenance for row in profile.provenance() if row.field.startswith("dense["))
    return {
        "model": profile.model,
        "aliases": list(profile.aliases),
        "gpu": profile.gpu,
        "gpus": profile.gpus,
        "decode_s_at_1": profile.decode_s_per_token(1),
        "decode_s_at_max_batch_size": profile.decode_s_per_token(profile.max_batch_size),
        "max_batch_size": profile.max_batch_size,
        "num_kv_tokens": profile.num_kv_tokens,
        "max_model_len": profile.max_model_len,
        "dense_provenance": {kind: dense[kind] for kind in PROVENANCES},
        "provenance": {kind: counts[kind] for kind in PROVENANCES},
        "digest": profile.digest,
    }


def table(profiles: Iterable[EngineProfile]) -> str:
    """The list in 80 columns."""
    lines = [
        "                                       decode ms at",
        "model         alias       GPU           batch 1   slots slots KV tokens  table",
    ]
    for profile in profiles:
        row = summary(profile)
        gpu = profile.gpu if profile.gpus == 1 else f"{profile.gpus}x {profile.gpu.removeprefix('RTX ')}"
        kinds = row["dense_provenance"]
        kind = " ".join(f"{count}{kind[0]}" for kind, count in kinds.items() if count)
        alias = (*profile.aliases, "-")[0]
        lines.append(
            f"{profile.model:<13} {alias:<11} {gpu:<12} {row['decode_s_at_1'] * 1e3:>8.1f} "
            f"{row['decode_s_at_max_batch_size'] * 1e3:>7.1f} {profile.max_batch_size:>5} "
            f"{profile.num_kv_tokens:>9,}  {kind}"
        )
    legend = (
        "slots: max_batch_size, sequences that run together. table: how many entries of the step-time "
        "table are measured (m), scaled (s) or assumed (a). `chimsim profiles NAME` shows every number and "
        "its source."
    )
    return "\n".join([*lines, "", *textwrap.wrap(legend, WIDTH)])


def detail(profile: EngineProfile) -> str:
    """One profile, every number with unit, provenance and source, in 80 columns."""
    counts = Counter(row.provenance for row in profile.provenance())
    gpus = f"{profile.gpus} x " if profile.gpus > 1 else ""
    batch = profile.max_batch_size
    step_s = profile.decode_s_per_token(batch)
    lines = [
        f"{profile.model} on {gpus}{profile.gpu}",
        *textwrap.wrap(f"aliases {', '.join(profile.aliases) or 'none'}", WIDTH),
        f"digest {profile.digest[:16]}",
        f"max_batch_size {batch}; decode step at that batch {step_s * 1e3:.1f} ms, "
        f"{step_s * 1e3 / batch:.3f} ms a token",
        ", ".join(f"{counts[kind]} numbers {kind}" for kind in PROVENANCES),
        *textwrap.wrap(profile.notes, WIDTH),
        "",
    ]
    for row in profile.provenance():
        value = f"{row.value:,.0f}" if row.value == int(row.value) else f"{row.value:,.10g}"
        lines.append(f"{row.field:<23} {value:>14} {row.unit:<30} {row.provenance}")
        lines += textwrap.wrap(row.source, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def detail_dict(profile: EngineProfile) -> dict[str, Any]:
    """The same for JSON."""
    return {
        **summary(profile),
        "notes": profile.notes,
        "numbers": [row._asdict() for row in profile.provenance()],
    }
