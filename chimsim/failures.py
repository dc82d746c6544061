"""Engines that go down and come back, and engines that are slower than their profile: what is said of them, checked.

``qwen7b@120s-180s`` is an outage, ``qwen7b=1.5x`` or ``qwen7b=1.5x@120s-180s`` a slowdown. Nothing happens here:
`chimsim.simulation` makes it happen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite

from calibration.profile import PROFILES, ProfileError, find_profile
from chimsim.config import Cluster
from chimsim.errors import ChimsimError, near
from chimsim.ticks import HORIZON_S, exact

_UNITS_S = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_TIME = r"\s*\d+(?:\.\d*)?(?:e[+-]?\d+)?\s*[a-z]*\s*"
_SPAN = re.compile(rf"(?P<name>.+)@(?P<begin>{_TIME})-(?P<end>{_TIME})?\s*")
_SLOW = re.compile(r"(?P<name>.+)=\s*(?P<factor>[^@=]+?)\s*x?\s*(?P<span>@.*)?")
_NUMBER = re.compile(r"\s*(?P<number>[\d.]+(?:e[+-]?\d+)?)\s*(?P<unit>[a-z]*)\s*")


@dataclass(frozen=True, slots=True)
class Spell:
    """Of the engine (or model) ``name`` from ``begin_s`` to ``end_s``: its steps take ``factor`` times as long.

    A factor of infinity: it is down. Instants in seconds from the run's start; an ``end_s`` of infinity never comes.
    """

    name: str
    factor: float
    begin_s: float = 0.0
    end_s: float = inf

    @property
    def down(self) -> bool:
        """Whether it is an outage."""
        return self.factor == inf

    def __str__(self) -> str:
        """As it may be given again."""
        span = f"@{_seconds(self.begin_s)}-{_seconds(self.end_s)}"
        if self.down:
            return self.name + span
        return f"{self.name}={self.factor!r}x" + ("" if span == "@0s-" else span)


def parse_outage(text: str, where: str) -> Spell:
    """``NAME@BEGIN-END`` or ``NAME@BEGIN-``. ``where`` names its place in messages. Raises `ChimsimError`."""
    found = _SPAN.fullmatch(text.strip())
    if found is None:
        raise ChimsimError(f"{where}: {text!r} is no outage; expected one such as qwen7b@120s-180s, or qwen7b@120s-")
    begin_s, end_s = _span(found, text, where)
    return Spell(found["name"].strip(), inf, begin_s, end_s)


def parse_slowdown(text: str, where: str) -> Spell:
    """``NAME=FACTORx`` or ``NAME=FACTORx@BEGIN-END``. Raises `ChimsimError`."""
    found = _SLOW.fullmatch(text.strip())
    if found is None:
        raise ChimsimError(f"{where}: {text!r} is no slow engine; expected one such as qwen7b=1.5x")
    name = found["name"].strip()
    try:
        factor = float(found["factor"])
    except ValueError:
        factor = 0.0
    if not (isfinite(factor) and factor >= 1):
        raise ChimsimError(
            f"{where}: {text!r}: steps cannot take {found['factor']!r} times as long; expected a number from 1, as in "
            f"{name}=1.5x"
        )
    if found["span"] is None:
        return Spell(name, factor)
    span = _SPAN.fullmatch(name + found["span"])
    if span is None:
        raise ChimsimError(f"{where}: {text!r}: no such span; expected one such as {name}=1.5x@120s-180s")
    return Spell(name, factor, *_span(span, text, where))


def _span(found: re.Match[str], text: str, where: str) -> tuple[float, float]:
    begin_s = _instant(found["begin"], text, where)
    end_s = _instant(found["end"], text, where) if found["end"] else inf
    if not begin_s < end_s:
        raise ChimsimError(f"{where}: {text!r} ends before it begins; expected an end after {_seconds(begin_s)}")
    return begin_s, end_s


def _instant(written: str, text: str, where: str) -> float:
    """Seconds, as a multiple of a tick."""
    found = _NUMBER.fullmatch(written)
    unit = found["unit"] if found is not None else ""
    if found is None or unit not in _UNITS_S:
        raise ChimsimError(f"{where}: {text!r}: {written.strip()!r} is no time; expected 90, 90s, 1.5m or 1h")
    seconds = float(found["number"]) * _UNITS_S[unit]
    if not seconds < HORIZON_S:
        raise ChimsimError(f"{where}: {text!r}: a run has at most {HORIZON_S:.0f} s")
    return exact(seconds)


def _seconds(instant: float) -> str:
    if instant == inf:
        return ""
    return f"{int(instant) if instant.is_integer() else repr(instant)}s"


def on_engines(spells: Iterable[Spell], cluster: Cluster, where: str) -> tuple[Spell, ...]:
    """The spells of the cluster's engines, one for each engine that is meant, by engine and time.

    A model (or an alias of it) means all of its engines; what is of no engine of this cluster is left out. Raises
    `ChimsimError` for spells of one engine that overlap, and for a cluster of which no engine ever comes back.
    """
    found = [
        Spell(engine, spell.factor, spell.begin_s, spell.end_s)
        for spell in spells
        for engine in engines_of(spell.name, cluster)
    ]
    found.sort(key=lambda spell: (spell.name, spell.begin_s))
    for before, after in pairwise(found):
        if before.name == after.name and after.begin_s < before.end_s:
            raise ChimsimError(f"{where}: {before} and {after} overlap")
    gone = {spell.name for spell in found if spell.down and spell.end_s == inf}
    if gone and len(gone) == len(cluster.engines):
        raise ChimsimError(f"{where}: no engine of {cluster.name} is left, and none comes back: the run cannot end")
    return tuple(found)


def check_names(spells: Iterable[Spell], clusters: Sequence[Cluster], where: str) -> None:
    """Raises `ChimsimError` for a name that is of no engine and of no model in any of the clusters."""
    for spell in spells:
        if not any(engines_of(spell.name, cluster) for cluster in clusters):
            known = [engine.name for cluster in clusters for engine in cluster.engines]
            models = [model for cluster in clusters for model in cluster.models]
            aliases = [alias for model in models if model in PROFILES for alias in PROFILES[model].aliases]
            names = list(dict.fromkeys([*known, *models, *aliases]))
            raise ChimsimError(
                f"{where}: there is no engine {spell.name!r}{near(spell.name, names)} (engines: "
                f"{', '.join(dict.fromkeys(known))})"
            )


def engines_of(name: str, cluster: Cluster) -> list[str]:
    """The engine of that name, or else all engines of the model; ``qwen7b/0`` is the first engine of qwen7b."""
    engines = {engine.name: engine.model for engine in cluster.engines}
    if name in engines:
        return [name]
    word, slash, number = name.rpartition("/")
    numbered = f"{_model(word)}/{number}"
    if slash and numbered in engines:
        return [numbered]
    model = _model(name)
    return [engine for engine in engines if engines[engine] == model]


def _model(name: str) -> str:
    try:
        return find_profile(name).model
    except ProfileError:
        return name
