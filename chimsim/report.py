"""Tables for people: a sweep's summary in 80 columns, one run in full, and what a reader must be warned of.

Plain text from data frames; it reads no files and prints nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from chimsim.figures_rows import panel_rows, series_labels
from chimsim.metrics import mean_and_interval, non_dominated

FEW_QUEUED = 0.01
"""Where no policy lets this share of the requests wait in a real queue, queue orders do not matter."""


def summary_table(summary: pd.DataFrame) -> str:
    """The summary, a block a trace, combination and rate, a row a policy and tau, averaged over the seeds."""
    lines: list[str] = []
    data = summary.assign(series=series_labels(summary))
    marks: set[str] = set()
    several = data["seed"].nunique() > 1
    for title, part in panel_rows(data, always=("trace", "rps")):
        for combo, panel in part.groupby("combo", sort=False, observed=True):
            rows = _panel(panel, several)
            lines += ["", f"{combo}  {title}"] if lines else [f"{combo}  {title}"]
            lines += aligned([_header(several), *(row for row, _ in rows)])
            marks |= {mark for _, found in rows for mark in found}
    notes = {
        "*": "* no other row of its block is both faster and better",
        "!": "! not steady: backlog still grew at the last arrival (overload, or a short run)",
        "r": "r workflows were rejected: they count as unsolved and have no latency",
    }
    seeds = f"mean ± half width of the 95 % interval over {data['seed'].nunique()} seeds" if several else ""
    foot = [text for mark, text in notes.items() if mark in marks] + ([seeds] if seeds else [])
    return "\n".join([*lines, "", *foot]) if foot else "\n".join(lines)


def _header(several: bool) -> list[str]:
    gap = [""] if several else []
    return ["", "policy", "tau", "mean s", *gap, "p99 s", "queue s", "solved %", *gap]


def _panel(panel: pd.DataFrame, several: bool) -> list[tuple[list[str], set[str]]]:
    keyed = panel.assign(tau_key=panel["tau"].fillna(-1.0))
    rows = []
    points = []
    for (series, tau), group in keyed.groupby(["series", "tau_key"], sort=False, observed=True):
        latency, latency_half = mean_and_interval(group["mean_workflow_latency_s"])
        solved, solved_half = mean_and_interval(100 * group["solved_rate"])
        p99, _ = mean_and_interval(group["p99_workflow_latency_s"])
        queue, _ = mean_and_interval(group["mean_queue_time_s"])
        points.append((latency, solved))
        flags = {"!"} if group["not_steady"].astype(bool).any() else set()
        flags |= {"r"} if (group["rejected_workflows"] > 0).any() else set()
        rows.append(
            (
                flags,
                [
                    _shortened(str(series)),
                    "" if float(str(tau)) < 0 else f"{float(str(tau)):g}",
                    number(latency),
                    *([f"±{number(latency_half)}"] if several else []),
                    number(p99),
                    number(queue),
                    number(solved, digits=1),
                    *([f"±{number(solved_half, digits=1)}"] if several else []),
                ],
            )
        )
    shown = []
    for (flags, cells), best in zip(rows, non_dominated(points), strict=True):
        marks = flags | ({"*"} if best else set())
        shown.append((["".join(mark for mark in "*!r" if mark in marks), *cells], marks))
    return shown


def warnings(summary: pd.DataFrame) -> list[str]:
    """Where a sweep cannot answer what it asks: queues that never fill, arrivals that outrun the cluster."""
    data = summary.assign(series=series_labels(summary))
    found: list[str] = []
    flat: list[str] = []
    panels = 0
    for title, part in panel_rows(data, always=("trace", "rps")):
        for combo, panel in part.groupby("combo", sort=False, observed=True):
            if panel["series"].nunique() < 2:
                continue
            panels += 1
            if not (panel["queues_filled"].fillna(0) >= FEW_QUEUED).any():
                flat.append(f"{combo} {title}")
    if flat:
        where = "; ".join(flat[:2]) + ("; ..." if len(flat) > 2 else "")
        found.append(
            f"queues never fill in {len(flat)} of {panels} blocks ({where}): queue orders cannot be told "
            "apart there; raise --rps or lower --slots"
        )
    return found


def run_tables(requests: pd.DataFrame, engine_rows: pd.DataFrame, summary: Mapping[str, Any], title: str) -> str:
    """One run in full: its metrics, its engines, its stages."""
    blocks = [
        title,
        "\n".join(aligned([[k, _value(v)] for k, v in summary.items() if "[" not in k], "l")),
    ]
    engines = [["engine", "busy %", "slots %", "load %", "requests", "out tokens", "preempted", "yielded"]]
    for row in engine_rows.to_dict("records"):
        name = str(row["engine"])
        shares = [summary.get(f"{key}[{name}]") for key in ("busy_share", "slots_share", "offered_load")]
        engines.append(
            [
                name,
                *("-" if share is None else number(100 * float(share), digits=1) for share in shares),
                *(str(int(row[key])) for key in ("requests", "output_tokens", "preemptions", "yields")),
            ]
        )
    blocks.append("\n".join(aligned(engines, "l")))
    done = requests[requests["measured"] & (requests["status"] == "completed")]
    done = done.assign(
        queue_s=done["admitted_at"] - done["ready_at"],
        ttft_s=done["first_token_at"] - done["ready_at"],
        e2e_s=done["finished_at"] - done["ready_at"],
    )
    stages = [["stage", "model", "requests", "prompt", "output", "queue s", "ttft s", "e2e s"]]
    for (stage, model), part in done.groupby(["stage_name", "model"], sort=True, observed=True):
        means = (part[c].mean() for c in ("prompt_tokens", "output_tokens", "queue_s", "ttft_s", "e2e_s"))
        stages.append([str(stage), str(model), str(len(part)), *(number(float(mean)) for mean in means)])
    blocks.append("\n".join(aligned(stages)))
    return "\n\n".join(blocks)


def _shortened(label: str, width: int = 24) -> str:
    """A long label without the names of its values, and if need be by its beginning and its end."""
    if len(label) > width:
        label = re.sub(r"\b\w+=", "", label)
    if len(label) <= width:
        return label
    return f"{label[: width // 2 - 1]}..{label[1 - width // 2 :]}"


def number(value: float, digits: int | None = None) -> str:
    """A number in a few characters: three digits, or a fixed count of decimals; '-' if there is none."""
    if value != value:
        return "-"
    if digits is not None:
        return f"{value:.{digits}f}"
    size = abs(value)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def _value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def aligned(rows: Sequence[Sequence[str]], sides: str = "ll") -> list[str]:
    """Columns set under each other, flush left or right as ``sides`` has an l or r for them; right beyond its end."""
    columns = len(rows[0])
    widths = [max(len(row[i]) for row in rows) for i in range(columns)]
    flush = [str.ljust if side == "l" else str.rjust for side in sides.ljust(columns, "r")[:columns]]
    return ["  ".join(set_(c, w) for set_, c, w in zip(flush, row, widths, strict=True)).rstrip() for row in rows]
