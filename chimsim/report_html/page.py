"""The page itself: template, styles and scripts put together with the data and Plotly's script.

All text comes through Jinja with escaping on, all data as JSON in which no ``<`` is left, so that names from a user's
trace stay text. A content policy in the page forbids every request.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from chimsim.report import number
from chimsim.results import canonical, json_bytes

_SCRIPTS = ("base.js", "figures.js", "report.js")
_VERDICTS = ("holds", "fails", "undecided")


def page_bytes(data: Mapping[str, Any]) -> bytes:
    """The page as UTF-8. ``data`` is what `chimsim.report_html.data.gather` gives."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = _number
    relations = [_relation(relation) for relation in data["relations"]]
    page = environment.from_string(_own("template.html")).render(
        data=data,
        relations=relations,
        numbers=[{key: row.get(key) for key in ("what", "paper", "ours")} for row in data["numbers"]],
        counts={word: sum(r["verdict"] == word for r in relations) for word in _VERDICTS},
        style=Markup(_own("report.css")),
        plotly=Markup(_plotly()),
        json=Markup(script_json(data)),
        scripts=Markup("\n".join(_own(name) for name in _SCRIPTS)),
    )
    return (page + "\n").encode()


def script_json(data: Mapping[str, Any]) -> str:
    """JSON that can stand inside a script element: no ``<``, so no end tag and no comment."""
    return json_bytes(data, indent=None).decode().replace("<", "\\u003c")


@cache
def _own(name: str) -> str:
    return (files("chimsim.report_html") / name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _relation(relation: Mapping[str, Any]) -> dict[str, Any]:
    """A relation with every key, and where the intervals of its blocks stand on a common scale, in per cent."""
    keys = ("block", "measure", "value", "low", "high", "verdict", "note")
    blocks = [{key: block.get(key) for key in keys} for block in relation.get("blocks") or []]
    even = 1.0 if any(block.get("measure") == "ratio" for block in blocks) else 0.0
    ends = [float(block[key]) for block in blocks for key in ("low", "high") if _is_number(block.get(key))]
    low, high = min([even, *ends]), max([even, *ends])
    span = (high - low) * 1.08 or 1.0
    begin = low - 0.04 * (high - low)
    for block in blocks:
        block["bar"] = None
        if all(_is_number(block.get(key)) for key in ("value", "low", "high")):
            block["bar"] = {key: round(100 * (float(block[key]) - begin) / span, 2) for key in ("value", "low", "high")}
    return {
        **{key: relation.get(key) for key in ("claim", "says", "paper", "ours", "reason")},
        "verdict": relation.get("verdict") or "undecided",
        "skipped": relation.get("skipped") or 0,
        "blocks": blocks,
        "even": round(100 * (even - begin) / span, 2),
        "counts": {word: relation.get(word) for word in _VERDICTS if relation.get(word) is not None},
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value and abs(value) < 1e300


def _number(value: Any) -> str:
    """A number in a few characters, a text as it is, a dash for nothing."""
    if value is None or value == "":
        return "–"
    return number(float(value)) if _is_number(value) else str(canonical(value))
