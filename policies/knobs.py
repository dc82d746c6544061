"""The knobs of a policy: reading them off its dataclass, checking and converting what a user gives.

It knows nothing of any single policy, and refuses what is not of the declared type, or not a number.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import lru_cache
from itertools import pairwise
from math import isnan
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, cast, get_args, get_origin, get_type_hints

from policies.interface import Policy, PolicyError


class Knob(NamedTuple):
    """One knob: ``default`` is `REQUIRED` where there is none, ``doc`` the string literal below the field.

    A knob that may be None, ``float | None = None``, has the type ``float``.
    """

    name: str
    type: type
    default: object
    doc: str


REQUIRED = MISSING
"""The default of a knob that has none."""


def near(name: str, known: Iterable[str]) -> str:
    """A hint at the nearest known name, ``"; did you mean 'x'?"``, or nothing."""
    known = list(known)
    # Case must not hide a neighbour: "Chimera" is meant as "chimera".
    folded = {k.casefold(): k for k in known}
    close = get_close_matches(name.casefold(), folded, n=1)
    return f"; did you mean {folded[close[0]]!r}?" if close else ""


def policy_name(policy: Policy | type) -> str:
    """How messages call a policy: its name in the table, or its class's name if it is a user's own."""
    cls = policy if isinstance(policy, type) else type(policy)
    return cls.__name__.lower() if cls.__module__.startswith("policies.") else cls.__name__


@lru_cache(maxsize=256)
def _described(policy: type) -> tuple[Knob, ...]:
    if not is_dataclass(policy):
        return ()
    types = _types(policy)
    found = []
    for f in fields(policy):
        if f.init:
            default = f.default_factory() if f.default_factory is not MISSING else f.default
            found.append(Knob(f.name, types.get(f.name, type(default)), default, ""))
    return tuple(found)


@lru_cache(maxsize=256)
def _documented(policy: type) -> tuple[Knob, ...]:
    """With their texts, which have to be read from the source: a policy in a run needs none."""
    docs: dict[str, str] = {}
    for cls in reversed(policy.__mro__):
        docs.update(_field_docs(cls))
    return tuple(knob._replace(doc=docs.get(knob.name, "")) for knob in _described(policy))


def _types(policy: type) -> dict[str, type]:
    try:
        hints = get_type_hints(policy)
    except (NameError, TypeError, AttributeError):
        # A user's annotation that cannot be resolved here: the type of the default serves.
        return {}
    plain = {name: _without_none(hint) for name, hint in hints.items()}
    return {name: hint for name, hint in plain.items() if isinstance(hint, type)}


def _without_none(hint: Any) -> Any:
    inner = [each for each in get_args(hint) if each is not NoneType]
    return inner[0] if get_origin(hint) in (Union, UnionType) and len(inner) == 1 else hint


def _field_docs(cls: type) -> dict[str, str]:
    """The string literals that follow the annotated fields of a class."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError):
        return {}
    docs = {}
    statements = body[0].body if body and isinstance(body[0], ast.ClassDef) else []
    for field, doc in pairwise(statements):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(doc, ast.Expr)
            and isinstance(doc.value, ast.Constant)
            and isinstance(doc.value.value, str)
        ):
            docs[field.target.id] = " ".join(doc.value.value.split())
    return docs


def knobs(policy: type, *, texts: bool = True) -> list[Knob]:
    """The knobs of a policy class, in the order of its fields: name, type, default and one line of text."""
    return list(_documented(policy) if texts else _described(policy))


def convert(owner: str, knob: Knob, value: object) -> object:
    """``value`` as the knob's type: numbers may come as text, and an int as a float if it is a whole number.

    None stays None where it is the default.

    Raises:
        PolicyError: not of that type, or NaN.
    """
    if value is None and knob.default is None:
        return None
    wanted = knob.type
    plain = value.strip() if isinstance(value, str) else value
    try:
        if wanted is bool:
            if isinstance(plain, bool):
                return plain
            if isinstance(plain, str):
                return {"true": True, "false": False}[plain.lower()]
            raise ValueError
        if wanted in (int, float):
            if isinstance(plain, bool):
                raise ValueError
            number = float(cast(Any, plain))
            if isnan(number):
                raise ValueError
            if wanted is float:
                return number
            if not isinstance(plain, str) and number != cast(Any, plain):
                return int(cast(Any, plain))
            if number != int(number):
                raise ValueError
            return int(cast(Any, plain))
        if wanted is str and not isinstance(value, str):
            raise ValueError
    except (ValueError, TypeError, KeyError, OverflowError):
        raise PolicyError(
            f"policy {owner}: {knob.name} is {value!r}; it must be {_WORDS.get(wanted, wanted.__name__)}"
        ) from None
    return value


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def settle(policy: Policy) -> None:
    """Convert all knobs of a policy under construction to their declared types, so that its repr is stable.

    Raises:
        PolicyError: one of them is not of its type, or NaN.
    """
    for knob in _described(type(policy)):
        object.__setattr__(policy, knob.name, convert(policy_name(policy), knob, getattr(policy, knob.name)))


def require(policy: Policy, knob: str, ok: bool, rule: str) -> None:
    """Raise a `PolicyError` that names policy, knob, value and rule unless ``ok``."""
    if not ok:
        raise PolicyError(f"policy {policy_name(policy)}: {knob} is {getattr(policy, knob)!r}; it must be {rule}")
