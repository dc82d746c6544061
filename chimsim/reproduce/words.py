"""What experiments found, for people: a block of text each, one table of all as Markdown, and rows for machines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

WIDTH = 80
_INDENT = " " * 11


def as_text(found: Mapping[str, Any]) -> str:
    """One experiment in 80 columns; ``found`` is what `Outcome.to_dict` gives."""
    lines = [_heading(found), *textwrap.wrap(found["question"], WIDTH), ""]
    for relation in found["relations"]:
        mark = relation["verdict"].upper() if relation["verdict"] == "fails" else relation["verdict"]
        lines += textwrap.wrap(f"{mark:<11}{relation['says']}", WIDTH, subsequent_indent=_INDENT)
        lines += _indented(f"ours: {relation['ours']}; {_counts(relation)}")
        if relation["paper"]:
            lines += _indented(f"paper: {relation['paper']}")
        if relation["reason"] and relation["verdict"] != "holds":
            lines += _indented(f"why: {relation['reason']}")
    if not found["relations"]:
        lines.append("no relations are stated")
    return "\n".join(lines)


def as_markdown(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """All experiments: a table of the relations each, with the paper's figure beside ours."""
    parts = ["# What the experiments gave\n"]
    for found in outcomes:
        made = found["made"]
        parts.append(f"## {_heading(found)}\n\n{found['question']}\n")
        parts.append(f"```sh\n{made['command']}\n```\n")
        parts.append("| relation | paper | ours | verdict | blocks |\n|---|---|---|---|---|")
        for relation in found["relations"]:
            cells = [
                relation["says"],
                relation["paper"] or "-",
                relation["ours"],
                relation["verdict"],
                _counts(relation),
            ]
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        for relation in found["relations"]:
            if relation["reason"] and relation["verdict"] != "holds":
                parts.append(f"\n{relation['says'][0].upper()}{relation['says'][1:]}: {relation['reason']}.")
        parts.append(
            f"\n{made['wall_s']:.0f} s on {made['machine']}, {made['date']}, chimsim {made['chimsim']}"
            f"{', commit ' + made['commit'][:12] if made['commit'] else ''}.\n"
        )
    return "\n".join(parts)


def blocks_of(outcomes: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Every comparison of every relation as a row."""
    rows = [
        {"experiment": found["name"], "claim": relation["claim"], "relation": relation["verdict"]}
        | {key: value for key, value in block.items() if key != "axes"}
        for found in outcomes
        for relation in found["relations"]
        for block in relation["blocks"]
    ]
    return pd.DataFrame(rows)


def tally(outcomes: Iterable[Mapping[str, Any]]) -> str:
    """How many relations hold, fail, and are undecided."""
    verdicts = [relation["verdict"] for found in outcomes for relation in found["relations"]]
    counts = {name: verdicts.count(name) for name in ("holds", "fails", "undecided")}
    return f"relations: {counts['holds']} hold, {counts['fails']} fail, {counts['undecided']} undecided"


def _heading(found: Mapping[str, Any]) -> str:
    return f"{found['name']}: {found['title']}" + (f" (the paper's {found['figure']})" if found["figure"] else "")


def _counts(relation: Mapping[str, Any]) -> str:
    total = sum(relation[name] for name in ("holds", "fails", "undecided"))
    others = (("fails", "against"), ("undecided", "undecided"))
    parts = [f"{relation[name]} {word}" for name, word in others if relation[name]]
    skipped = f", {relation['skipped']} not asked" if relation["skipped"] else ""
    if not total:
        return f"not asked in these blocks: {relation['skipped']}" if relation["skipped"] else "not among these runs"
    return f"holds in {relation['holds']} of {total}{' (' + ', '.join(parts) + ')' if parts else ''}{skipped}"


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT + "  ")
