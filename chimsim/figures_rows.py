"""What a figure's lines, rows and columns are: names by what varies, panels, and the one tau that bars show.

Data frames only; nothing is drawn here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from chimsim.errors import ChimsimError, near
from chimsim.results import axis_columns, own_axes
from chimsim.spec import POLICY_AXES, scalar_text

CHOICES = ("trace", "combo", "rps", "policy")
"""Axes of which a figure may show only some values."""
_PANEL = ("trace", "slots", "rps", "burstiness")
_QUIET = ("tau", "seed", "trace", "combo", "cell")
_SHORT = {"length_predictor": "len", "rank_predictor": "rank"}
"""Axes whose own names would leave no room for their values in a label."""


def choose(summary: pd.DataFrame, only: Mapping[str, Sequence[str]]) -> pd.DataFrame:
    """The rows of the values that ``only`` has for some of `CHOICES`, written as the command line writes them.

    Raises `ChimsimError` for a value that is not there, or if no row has them all.
    """
    chosen = summary
    for axis, wanted in only.items():
        texts = summary[axis].map(_text)
        for value in wanted:
            if plain_text(value) not in set(texts):
                there = list(dict.fromkeys(texts))
                known = ", ".join(there)
                raise ChimsimError(f"{axis} {value!r} is not in this folder; choose from {known}{near(value, there)}")
        chosen = chosen[texts[chosen.index].isin([plain_text(value) for value in wanted])]
    if chosen.empty:
        words = "; ".join(f"{axis} {','.join(values)}" for axis, values in only.items())
        raise ChimsimError(f"no cell of this folder has all of {words}")
    return chosen


def _text(value: Any) -> str:
    return "recorded" if value is None or value != value else scalar_text(value)


def plain_text(text: str) -> str:
    """A value as the command line writes it, without what does not matter: 12.0 is 12."""
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


def series_labels(summary: pd.DataFrame) -> pd.Series:
    """What each row's line is called: the policy, and whatever else varies inside a panel, but not tau."""
    labels = summary["policy"].astype(str)
    for name in axis_columns(summary):
        if name in _QUIET or name in _PANEL or name == "policy":
            continue
        for policy, rows in summary.groupby("policy", observed=True, sort=False):
            # that lengths are noisy is said by their error already
            said = name == "length_predictor" and rows["length_error"].nunique() > 1
            if rows[name].nunique(dropna=True) > 1 and not said:
                mine = (summary["policy"] == policy) & summary[name].notna()
                short = _SHORT.get(name, name)
                labels[mine] = labels[mine] + [f" {short}={scalar_text(value)}" for value in summary.loc[mine, name]]
    return labels


def knob_lines(summary: pd.DataFrame) -> pd.DataFrame:
    """The summary with each row's line (``series``) and its place on it: ``knob``, the number in ``tau``.

    The knob is tau, or where a policy ran with several values of one other number, and of nothing else, that number.
    """
    data = summary.assign(knob="tau")
    for _, rows in summary.groupby("policy", observed=True, sort=False):
        knobs = [name for name in own_axes(rows) if name not in POLICY_AXES]
        if len(knobs) == 1 and pd.api.types.is_numeric_dtype(rows[knobs[0]]) and knobs != ["tau"]:
            data.loc[rows.index, "knob"] = knobs[0]
            data.loc[rows.index, "tau"] = rows[knobs[0]].astype(float)
            data.loc[rows.index, knobs[0]] = np.nan
    return data.assign(series=series_labels(data))


def panel_rows(data: pd.DataFrame, always: Sequence[str] = ()) -> list[tuple[str, pd.DataFrame]]:
    """The rows of a figure: each combination of trace, slots, rate and burstiness, titled by those that vary.

    Those named in ``always`` are part of the title even if they do not vary.
    """
    names = [name for name in _PANEL if name in data]
    rows = []
    for key, part in data.groupby(names, sort=False, dropna=False, observed=True):
        values = key if isinstance(key, tuple) else (key,)
        shown = [
            _panel_word(name, value)
            for name, value in zip(names, values, strict=True)
            if name in always or data[name].nunique(dropna=False) > 1
        ]
        rows.append((", ".join(shown), part))
    return rows


def panel_tables(data: pd.DataFrame, table: Callable[[pd.DataFrame], pd.DataFrame]) -> pd.DataFrame:
    """The table of every panel under one another, after columns that say which panel it is."""
    parts = []
    for _, part in panel_rows(data):
        for combo in dict.fromkeys(data["combo"]):
            panel = part[part["combo"] == combo]
            if len(panel):
                rows = table(panel)
                names = [name for name in (*_PANEL, "combo") if name in panel]
                for at, name in enumerate(names):
                    rows.insert(at, name, [panel[name].iloc[0]] * len(rows))
                parts.append(rows)
    return pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)


def one_tau(data: pd.DataFrame) -> pd.DataFrame:
    """Of a policy with several taus only the middle one (the lower of two), said in its name."""
    if "tau" not in data:
        return data
    parts = []
    for _, part in data.groupby("series", sort=False, observed=True):
        taus = sorted(part["tau"].dropna().unique())
        if len(taus) > 1:
            tau = taus[(len(taus) - 1) // 2]
            part = part[part["tau"] == tau]
            part = part.assign(series=[f"{name} (tau {tau:g})" for name in part["series"]])
        parts.append(part)
    chosen = pd.concat(parts)
    return chosen.loc[[index for index in data.index if index in chosen.index]]


def _panel_word(name: str, value: Any) -> str:
    missing = value is None or value != value
    if name == "trace":
        return str(value)
    if name == "rps":
        return "recorded arrivals" if missing else f"{scalar_text(value)} rps"
    if name == "slots":
        return "profile's slots" if missing else f"{scalar_text(value)} slots"
    return f"{name} {scalar_text(value)}"
