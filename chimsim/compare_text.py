"""A comparison for people: tables in 80 columns, and sentences about what they rest on.

Plain text; it computes nothing new and prints nothing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from chimsim.compare import EQUAL_S, Block, Change, Comparison, Interval, WorkflowChanges
from chimsim.compare_cells import LOAD
from chimsim.report import aligned, number
from chimsim.spec import scalar_text

WIDTH = 80
IN_FULL = 6
"""So many blocks are shown with all metrics; of more, a row a block for a few metrics."""
FEW = ("mean_workflow_latency_s", "solved_rate")
_NAMES = {
    "mean_workflow_latency_s": "mean latency s",
    "p50_workflow_latency_s": "p50 latency s",
    "p99_workflow_latency_s": "p99 latency s",
    "latency_per_token_ms": "per token ms",
    "mean_queue_time_s": "mean queue s",
    "mean_ttft_ms": "mean TTFT ms",
    "mean_tpot_ms": "mean TPOT ms",
    "solved_rate": "solved %",
    "workflow_throughput": "workflows/s",
}
_PERCENT = ("solved_rate",)


def comparison_text(compared: Comparison, asked: bool) -> str:
    """The whole comparison; ``asked`` says that the metrics are the user's choice, to be shown for every block."""
    blocks = compared.blocks
    titles = block_titles(blocks)
    parts = [_head(compared)]
    if len(blocks) <= IN_FULL:
        for block, (place, what) in zip(blocks, titles, strict=True):
            title = "  ".join(filter(None, (place, what)))
            parts.append("\n".join([title, *_metric_table(block.changes), *_workflow_words(block.workflows)]))
    else:
        chosen = [c.metric for c in compared.overall if asked or c.metric in FEW]
        parts += ["\n".join(_block_table(blocks, titles, metric)) for metric in chosen]
        if not asked:
            parts.append(_filled("Other metrics of each block: --metric NAME, --csv FILE or --json."))
    if len(blocks) > 1:
        how = "Over all blocks (of each seed the mean over the blocks, geometric of B / A; interval over the seeds)"
        parts.append("\n".join([_filled(how), *_metric_table(compared.overall), *_workflow_words(compared.workflows)]))
    parts.append("\n".join(_foot(compared)))
    return "\n\n".join(parts)


def block_titles(blocks: Sequence[Block]) -> list[tuple[str, str]]:
    """For each block what is served and on what, and which policy with which settings, by what varies."""
    titles = []
    for block in blocks:
        axes = block.axes
        same_policy = [other.axes for other in blocks if other.axes.get("policy") == axes.get("policy")]
        place = [str(axes[name]) for name in ("combo", "trace") if name in axes]
        if "rps" in axes:
            place.append("recorded arrivals" if axes["rps"] is None else f"{scalar_text(axes['rps'])} rps")
        place += [
            f"{name} {scalar_text(axes[name])}" for name in ("slots", "burstiness")
            if name in axes and len({other.axes[name] for other in blocks}) > 1
        ]  # fmt: skip
        what = [str(axes["policy"])] if "policy" in axes else []
        what += [
            f"{name} {scalar_text(value)}" for name, value in axes.items()
            if name not in LOAD and name != "policy" and len({other[name] for other in same_policy}) > 1
        ]  # fmt: skip
        titles.append((", ".join(place), " ".join(what)))
    return titles


def _head(compared: Comparison) -> str:
    a, b, matched = compared.a, compared.b, compared.matched
    lines = [f"A  {a.name}", f"B  {b.name}"]
    seeds = sorted({len(block.seeds) for block in compared.blocks})
    blocks = len(compared.blocks)
    lines.append(
        f"{_count(len(matched.pairs), 'pair')} of cells: {_count(blocks, 'block')} "
        f"of {' or '.join(map(str, seeds))} {'seed' if seeds == [1] else 'seeds'}"
    )
    if matched.alone_a or matched.alone_b:
        lines.append(f"without a partner: {_count(matched.alone_a, 'cell')} of A, {matched.alone_b} of B")
    if matched.differ:
        pairs = "; ".join(f"{name}: {mine} in A, {theirs} in B" for name, (mine, theirs) in matched.differ.items())
        lines.append(f"differ as a whole: {pairs}")
    if compared.same_cells:
        lines.append("Every pair is one and the same run: all differences are 0.")
    elif _all_equal(compared):
        lines.append("No metric and no workflow differs: all differences are 0.")
    if compared.other_loads:
        lines.append(
            f"Workflows or arrivals are not the same in A and B in {compared.other_loads} of {blocks} blocks: "
            "there the difference is also one of loads."
        )
    return "\n".join(line if i < 2 else _filled(line) for i, line in enumerate(lines))


def _all_equal(compared: Comparison) -> bool:
    changes = [change for block in compared.blocks for change in block.changes]
    flows = compared.workflows
    same_solved = flows.solved_by_a == flows.solved_by_b == 0
    return all(change.verdict == "equal" for change in changes) and flows.equal == flows.completed and same_solved


def _metric_table(changes: Sequence[Change]) -> list[str]:
    return aligned([_HEADER, *([_label(change.metric), *_numbers(change)] for change in changes)], _SIDES)


def _block_table(blocks: Sequence[Block], titles: Sequence[tuple[str, str]], metric: str) -> list[str]:
    """A row a block; where policies or settings vary too, under a line for what is served."""
    by_place = len({what for _, what in titles}) > 1
    rows = []
    heads: list[str] = []
    for block, (place, what) in zip(blocks, titles, strict=True):
        for change in block.changes:
            if change.metric == metric:
                heads.append(place)
                rows.append([f"  {what}" if by_place else place, *_numbers(change)])
    lines = aligned([[_label(metric), *_HEADER[1:]], *rows], _SIDES)
    shown = [lines[0]]
    for line, head, before in zip(lines[1:], heads, ["", *heads], strict=False):
        shown += [head, line] if by_place and head != before else [line]
    return shown


_HEADER = ["", "A", "B", "B - A", "B / A", "95 %", ""]
_SIDES = "lrrrrll"


def _numbers(change: Change) -> list[str]:
    scale = _scale(change.metric)
    means = (_short(scale * value) for value in (change.a, change.b, change.difference.value))
    return [*means, "" if change.ratio is None else _short(change.ratio.value), _interval(change), change.verdict]


def _interval(change: Change) -> str:
    scale = 1.0 if change.ratio else _scale(change.metric)
    judged: Interval = change.ratio or change.difference
    if judged.low is None or judged.high is None:
        return ""
    return f"{_short(scale * judged.low)}..{_short(scale * judged.high)}"


def _workflow_words(flows: WorkflowChanges) -> list[str]:
    words = f"{_count(flows.workflows, 'workflow')} in both"
    if flows.only_in_a or flows.only_in_b:
        words += f" ({flows.only_in_a} only in A, {flows.only_in_b} only in B)"
    if flows.completed and flows.median_change_s is not None and flows.p90_change_s is not None:
        shares = [_percent(count, flows.completed) for count in (flows.faster, flows.slower, flows.equal)]
        words += (
            f": {shares[0]} faster in B, {shares[1]} slower, {shares[2]} equal; "
            f"change: median {_signed(flows.median_change_s)} s, p90 {_signed(flows.p90_change_s)} s"
        )
    if flows.labelled:
        shares = [_percent(n, flows.labelled) for n in (flows.solved_by_a, flows.solved_by_b, flows.solved_by_both)]
        words += f". Solved: {shares[0]} only in A, {shares[1]} only in B, {shares[2]} in both"
    return _filled(f"{words}.").splitlines()


def _foot(compared: Comparison) -> list[str]:
    lines = []
    counts = [sum(block.not_steady[side] for block in compared.blocks) for side in (0, 1)]
    if any(counts):
        lines.append(
            f"Not steady: in {counts[0]} runs of A and {counts[1]} of B the backlog still grew at the last arrival; "
            "their latencies depend on the length of the run."
        )
    if all(len(block.seeds) == 1 for block in compared.blocks):
        lines.append("One seed: no interval, so nothing tells a difference from noise.")
    else:
        judged = sum(change.verdict in ("lower", "higher", "noise") for b in compared.blocks for change in b.changes)
        by_chance = f" Of the {judged} intervals of blocks about {judged / 20:.0f} lie there by chance alone."
        lines.append(
            "95 %: paired Student interval over the seeds, of B / A (geometric mean) where it stands, else of B - A. "
            "lower, higher: the interval lies on one side; noise: no difference beyond noise."
            + (by_chance if judged >= 20 else "")
        )
    lines.append(f"A workflow is equal if its latency changes by at most {1000 * EQUAL_S:g} ms.")
    return [piece for line in lines for piece in _filled(line).splitlines()]


def _label(metric: str) -> str:
    name = _NAMES.get(metric, metric)
    return name if len(name) <= 24 else f"{name[:14]}..{name[-8:]}"


def _scale(metric: str) -> float:
    return 100.0 if metric in _PERCENT else 1.0


def _short(value: float) -> str:
    """Three digits; of small numbers two that count."""
    return f"{value:.2g}" if 0 < abs(value) < 0.1 else number(value)


def _signed(value: float) -> str:
    return f"+{_short(value)}" if value > 0 else _short(value)


def _percent(count: int, of: int) -> str:
    return f"{100 * count / of:.1f} %"


def _count(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH)
