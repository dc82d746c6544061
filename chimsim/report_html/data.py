"""What a report shows of a results folder, as plain JSON: points with intervals, where they come from, the verdicts.

A group is what the page shows at once: one trace, slots, rate and burstiness on one combination. `chimsim.report_html
.details` has what is read from the cells' own tables.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd

from chimsim.errors import ChimsimError
from chimsim.figures_rows import one_tau, panel_rows, series_labels
from chimsim.figures_style import DASHES, PALETTE, line_styles
from chimsim.metrics import mean_and_interval, non_dominated
from chimsim.report_html.details import coarser, detail_of
from chimsim.results import MANIFEST, Results, axis_columns, canonical
from chimsim.spec import scalar_text

METRICS = (
    "mean_workflow_latency_s",
    "p99_workflow_latency_s",
    "latency_per_token_ms",
    "solved_rate",
    "mean_queue_time_s",
    "utilisation",
)
"""Of a point: mean and half of its 95 % interval over the seeds each."""
LATENCIES = 3
"""The first so many can be the frontier's latency."""
HALVINGS = 3
"""So often the details may be halved before groups lose them altogether."""
_SYMBOLS = {
    "o": "circle", "v": "triangle-down", "^": "triangle-up", ">": "triangle-right", "<": "triangle-left",
    "s": "square", "P": "cross", "X": "x", "D": "diamond", "p": "pentagon", "h": "hexagon", "*": "star",
    "d": "diamond-tall", "H": "hexagon2",
}  # fmt: skip
_PLOTLY_DASHES = ("solid", "dash", "dot", "dashdot")
_PICKERS = {
    "combo": "Combination", "trace": "Trace", "rps": "Arrivals", "slots": "Slots an engine", "burstiness": "Burstiness",
}  # fmt: skip


def gather(results: Results, room: Callable[[Mapping[str, Any]], int]) -> dict[str, Any]:
    """The report's data. ``room`` is asked, with all but the groups, how many bytes of JSON the groups may take.

    Raises `ChimsimError` if no cell is finished, or if not even the points of one group fit.
    """
    summary = results.summary
    if summary.empty:
        raise ChimsimError(f"{results.path} has no finished cell to report")
    data = summary.assign(series=series_labels(summary))
    styles = line_styles(list(data["series"]))
    names = list(styles)
    rows = [(part, combo) for _, part in panel_rows(data) for combo in dict.fromkeys(part["combo"])]
    pickers = _pickers(data)
    middle = one_tau(data)
    groups = []
    for part, combo in rows:
        mine = part[part["combo"] == combo]
        at = [_place(picker, mine) for picker in pickers]
        groups.append({"at": at, "points": _points(results, mine, names, set(middle.index))})
    rest = {
        **_about(results, summary),
        "metrics": METRICS,
        "series": [
            {
                "name": name,
                "colour": colour,
                "symbol": _SYMBOLS[marker],
                "dash": _PLOTLY_DASHES[index % len(DASHES)],
            }
            for index, (name, (colour, marker)) in enumerate(styles.items())
        ],
        "palette": PALETTE,
        "pickers": [{"name": p["name"], "label": p["label"], "values": p["words"]} for p in pickers],
        "groups": [],
        "left_out": [],
    }
    fitted, left_out = _fit(groups, _details(results, middle, rows, names), room(rest))
    several = [str(name) for name, part in data.groupby("series", sort=False) if part["tau"].nunique() > 1]
    if several:
        left_out.insert(
            0, f"Queue times, distributions, load and slow workflows are only of the middle tau of {_few(several)}."
        )
    return dict(canonical({**rest, "groups": fitted, "left_out": left_out}))


def _details(
    results: Results, middle: pd.DataFrame, rows: Sequence[tuple[pd.DataFrame, Any]], names: Sequence[str]
) -> list[list[dict[str, Any]]]:
    """For each group the details of each line, at its middle tau."""
    found = []
    for part, combo in rows:
        chosen = middle.loc[[index for index in part.index[part["combo"] == combo] if index in middle.index]]
        labels = part.loc[chosen.index, "series"]
        found.append(
            [
                {"series": names.index(str(name)), "tau": _tau_text(mine), **detail_of(results, mine)}
                for name, mine in chosen.groupby(labels, sort=False, observed=True)
            ]
        )
    return found


def _fit(
    groups: Sequence[dict[str, Any]], details: list[list[dict[str, Any]]], budget: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """The groups with as many details as there is room for, and in words what there was none for."""
    sizes = _sizes([{**group, "details": None} for group in groups])
    kept = int(np.searchsorted(np.cumsum(sizes), budget, side="right"))
    if kept == 0:
        raise ChimsimError(f"the points of one workload take {sizes[0]:,} bytes, and a report has room for {budget:,}")
    room = budget - sum(sizes[:kept])
    left_out = []
    if kept < len(groups):
        left_out.append(f"{len(groups) - kept} of {len(groups)} workloads did not fit into the file.")
    details = details[:kept]
    halved = 0
    while (used := _sizes(details)) and sum(used) > room and halved < HALVINGS:
        details = [[coarser(one) for one in group] for group in details]
        halved += 1
    if halved:
        part = ("half", "a quarter", "an eighth")[halved - 1]
        left_out.append(f"Distributions and load over time have {part} of their samples, for the file's size.")
    full = int(np.searchsorted(np.cumsum(used), room, side="right"))
    if full < kept:
        left_out.append(f"Only the first {full} of {kept} workloads have distributions, load and slow workflows.")
    return [
        {**group, "details": detail if index < full else []}
        for index, (group, detail) in enumerate(zip(groups[:kept], details, strict=True))
    ], left_out


def _sizes(values: Sequence[Any]) -> list[int]:
    """Bytes of each as JSON in the page, where a ``<`` takes six, and of the comma after it."""
    texts = [json.dumps(value, separators=(",", ":")) for value in values]
    return [len(text) + 5 * text.count("<") + 1 for text in texts]


def _pickers(data: pd.DataFrame) -> list[dict[str, Any]]:
    """What to choose a group by: its axes, those of one value only if it says something."""
    found = []
    for name, label in _PICKERS.items():
        if name not in data or (name not in ("combo", "trace", "rps") and data[name].nunique(dropna=False) < 2):
            continue
        values = list(dict.fromkeys(_key(value) for value in data[name]))
        words = [title for title, _ in panel_rows(data[[name]], always=(name,))] if name != "combo" else values
        found.append({"name": name, "label": label, "values": values, "words": words})
    return found


def _place(picker: Mapping[str, Any], mine: pd.DataFrame) -> int:
    return int(picker["values"].index(_key(mine[picker["name"]].iloc[0])))


def _key(value: Any) -> Any:
    """NaN is not equal to itself; None is."""
    return None if value != value else value


def _points(results: Results, panel: pd.DataFrame, names: Sequence[str], middle: set[Any]) -> list[dict[str, Any]]:
    """One entry a line and tau, lines in their order, taus upwards."""
    keyed = panel.assign(key=panel["tau"].fillna(-1.0))
    found: list[dict[str, Any]] = []
    for (series, _), mine in keyed.groupby(["series", "key"], sort=True, observed=True):
        stats = [mean_and_interval(mine[name]) if name in mine else (float("nan"), 0.0) for name in METRICS]
        found.append(
            {
                "series": names.index(str(series)),
                "tau": _tau_text(mine),
                "middle": mine.index[0] in middle,
                "seeds": [int(seed) for seed in mine["seed"]],
                "stats": [[_short(mean), _short(half)] for mean, half in stats],
                "steady": not mine["not_steady"].astype(bool).any(),
                "rejected": int(mine["rejected_workflows"].sum()),
                "config": _config(mine.iloc[0]),
                "policy": _knobs(str(results.config(str(mine["cell"].iloc[0])).get("policy", ""))),
            }
        )
    found.sort(key=lambda point: point["series"])
    solved = METRICS.index("solved_rate")
    best = [
        non_dominated([(point["stats"][latency][0], point["stats"][solved][0]) for point in found])
        for latency in range(LATENCIES)
    ]
    return [{**point, "best": [flags[index] for flags in best]} for index, point in enumerate(found)]


def _config(row: pd.Series) -> dict[str, str]:
    """The row's axes as text, those without a value left out."""
    plain = {name: _key(row[name]) for name in axis_columns(row.to_frame().T) if name != "seed"}
    return {
        name: scalar_text(float(value) if isinstance(value, np.number) else value)
        for name, value in plain.items()
        if value is not None
    }


def _knobs(policy: str) -> str:
    """A policy as its cell has it, without what differs from seed to seed or decides nothing."""
    return re.sub(r", (explain=False|seed=\d+)(?=[,)])", "", policy)


def _tau_text(mine: pd.DataFrame) -> str | None:
    tau = _key(mine["tau"].iloc[0])
    return None if tau is None else f"{float(tau):g}"


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _about(results: Results, summary: pd.DataFrame) -> dict[str, Any]:
    """Title, question and verdicts, the command, and where everything came from."""
    manifest = results.manifest
    experiment = _json_file(results, "experiment.json")
    runs = _json_file(results, "run.json").get("runs") or [{}]
    last = runs[-1]
    command = experiment.get("command") or last.get("command") or ""
    started = last.get("started_at")
    return {
        "title": experiment.get("title") or _title(summary),
        "figure": experiment.get("figure"),
        "paper": experiment.get("paper"),
        "question": experiment.get("question") or _question(summary),
        "relations": experiment.get("relations") or [],
        "numbers": experiment.get("numbers") or [],
        "cells": {"finished": len(results.cells), "planned": results.planned},
        "seeds": int(summary["seed"].nunique()),
        "command": command if isinstance(command, str) else shlex.join(str(word) for word in command),
        "provenance": {
            "chimsim": manifest.get("chimsim"),
            "commit": last.get("commit"),
            "manifest_sha256": hashlib.sha256((results.path / MANIFEST).read_bytes()).hexdigest(),
            "traces": manifest.get("traces") or {},
            "profiles": _profiles(manifest),
            "policies": manifest.get("policies") or {},
            "policy_sources_sha256": manifest.get("sources"),
            "spec": manifest["spec"],
            "live": bool(manifest.get("live")),
            "run": {
                "started_at": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds") if started else None,
                **{key: last.get(key) for key in ("wall_s", "workers", "platform", "versions")},
            },
            "made": experiment.get("made"),
        },
    }


def _profiles(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Digest of each engine profile by model."""
    clusters = (manifest.get("clusters") or {}).values()
    profiles = [engine.get("profile") or {} for cluster in clusters for engine in cluster.get("engines", [])]
    return {str(profile["model"]): profile.get("digest") for profile in profiles if "model" in profile}


def _json_file(results: Results, name: str) -> dict[str, Any]:
    """A file beside the manifest; one that is not there is empty, one that is broken is an error."""
    path = results.path / name
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ChimsimError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ChimsimError(f"{path}: expected an object, found {type(found).__name__}")
    return found


def _title(summary: pd.DataFrame) -> str:
    return f"{_list(summary['policy'], 'policies')} on {_list(summary['trace'], 'traces')}"


def _question(summary: pd.DataFrame) -> str:
    rates = [f"{rate:g}" for rate in dict.fromkeys(summary["rps"].dropna())] if "rps" in summary else []
    at = f" at {_joined(rates)} workflows a second" if rates else ""
    combos = list(dict.fromkeys(summary["combo"].astype(str)))
    return f"How long do workflows take, and how many are solved, on {_joined(combos)}{at}?"


def _list(column: pd.Series, what: str) -> str:
    values = list(dict.fromkeys(column.astype(str)))
    return _joined(values) if len(values) <= 4 else f"{len(values)} {what}"


def _joined(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _few(words: Sequence[str]) -> str:
    return ", ".join(words[:4]) + (f" and {len(words) - 4} more" if len(words) > 4 else "")
