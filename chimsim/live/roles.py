"""The agents of `chimsim collect`: which stages a workflow has, and what each of them is told.

A system message of the role's own comes first and never changes; question and earlier answers stand in the user's.
The texts are in ``roles.toml``, or in a file of the user's that looks like it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from chimsim.errors import ChimsimError, near
from chimsim.live.questions import KINDS, Kind
from traces.files import parse_toml

STAGES: dict[Kind, tuple[str, ...]] = {"math": ("planner", "solver", "verifier"), "code": ("planner", "coder", "qa")}
_KEYS = ("system", "user", "max_tokens")
_PLACE = re.compile(r"\{\{(.*?)\}\}")


@dataclass(frozen=True, slots=True)
class Role:
    """A stage: its system message, the user's with places to fill, and the longest answer in tokens."""

    name: str
    system: str
    user: str
    max_tokens: int

    def fill(self, known: Mapping[str, str]) -> str:
        """The user message; ``known`` is the question and the earlier answers by name."""
        return _PLACE.sub(lambda match: known[match[1].strip()], self.user)


@dataclass(frozen=True, slots=True)
class Roles:
    """The stages of each kind of question, in order."""

    of: Mapping[Kind, tuple[Role, ...]]

    def limited(self, max_tokens: int | None) -> Roles:
        """The same with another limit for every answer."""
        if max_tokens is None:
            return self
        return Roles({kind: tuple(replace(r, max_tokens=max_tokens) for r in roles) for kind, roles in self.of.items()})

    def texts(self) -> dict[str, Any]:
        """What is said, without the limits; ready for JSON."""
        return {kind: [(role.name, role.system, role.user) for role in roles] for kind, roles in self.of.items()}


def shipped_text() -> str:
    """The shipped prompts file."""
    return files("chimsim.live").joinpath("roles.toml").read_text(encoding="utf-8")


def load_roles(path: Path | None = None) -> Roles:
    """The shipped prompts, or those of a file. Raises `ChimsimError` naming file, stage and what is wrong."""
    where = "roles.toml" if path is None else str(path)
    try:
        tree = parse_toml(shipped_text() if path is None else path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ChimsimError(f"{where}: no such prompts file (--write-prompts makes one to edit)") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ChimsimError(f"{where}: cannot be read: {error}") from None
    except ValueError as error:
        raise ChimsimError(f"{where}: not valid TOML: {error}") from None
    _same_names(tree, KINDS, where, "kind of question")
    roles: dict[Kind, tuple[Role, ...]] = {}
    for kind in KINDS:
        _same_names(tree[kind], STAGES[kind], f"{where}: [{kind}]", "stage")
        earlier = ["question"]
        found = []
        for name in STAGES[kind]:
            found.append(_role(name, tree[kind][name], f"{where}: [{kind}.{name}]", earlier))
            earlier.append(name)
        roles[kind] = tuple(found)
    return Roles(roles)


def _same_names(table: object, names: tuple[str, ...], where: str, what: str) -> None:
    if not isinstance(table, dict):
        raise ChimsimError(f"{where}: expected a table, found {table!r}")
    for name in table:
        if name not in names:
            hint = near(name, names) or f"; known: {', '.join(names)}"
            raise ChimsimError(f"{where}: unknown {what} {name!r}{hint}")
    for name in names:
        if name not in table:
            raise ChimsimError(f"{where}: {what} {name!r} is missing")


def _role(name: str, table: object, where: str, earlier: list[str]) -> Role:
    _same_names(table, _KEYS, where, "key")
    assert isinstance(table, dict)
    for key in ("system", "user"):
        if not isinstance(table[key], str) or not table[key].strip():
            raise ChimsimError(f"{where}: {key} is {table[key]!r}; expected text")
    if type(table["max_tokens"]) is not int or table["max_tokens"] < 1:
        raise ChimsimError(f"{where}: max_tokens is {table['max_tokens']!r}; expected a whole number above 0")
    if _PLACE.search(table["system"]):
        raise ChimsimError(f"{where}: system has a placeholder; it must be the same for every question")
    places = [place.strip() for place in _PLACE.findall(table["user"])]
    for place in places:
        if place not in earlier:
            hint = near(place, earlier) or f"; known here: {', '.join(earlier)}"
            raise ChimsimError(f"{where}: user has an unknown placeholder {{{{{place}}}}}{hint}")
    for needed in dict.fromkeys(("question", earlier[-1])):
        if needed not in places:
            raise ChimsimError(f"{where}: user lacks the placeholder {{{{{needed}}}}}")
    return Role(name, table["system"].strip(), table["user"].strip(), table["max_tokens"])
