"""Scheduling policies: which engine an LLM call goes to, and in which order an engine serves its calls.

`POLICIES` is the table, `load_policy` makes one by name or from a user's own file; it imports nothing of the
simulator, so the same objects decide for real engines.
"""

from __future__ import annotations

from policies.atlas import Atlas
from policies.checks import check_policy
from policies.chimera import Chimera
from policies.costaware import Costaware
from policies.fcfs import Fcfs
from policies.interface import Policy, PolicyError
from policies.knobs import REQUIRED, Knob, convert, knobs, near
from policies.loading import load_class
from policies.ltr import Ltr
from policies.mlfq import Mlfq
from policies.plas import Plas
from policies.sjf import Sjf
from policies.stjf import Stjf

POLICIES: dict[str, type[Policy]] = {
    "fcfs": Fcfs,
    "sjf": Sjf,
    "stjf": Stjf,
    "mlfq": Mlfq,
    "ltr": Ltr,
    "plas": Plas,
    "atlas": Atlas,
    "chimera": Chimera,
    "costaware": Costaware,
}

__all__ = [
    "POLICIES",
    "REQUIRED",
    "Knob",
    "Policy",
    "PolicyError",
    "check_policy",
    "knobs",
    "load_policy",
    "policy_class",
]


def policy_class(name: str) -> type[Policy]:
    """The policy class for a name of `POLICIES`, ``my_file.py:MyPolicy`` or ``my_module:MyPolicy``.

    Raises:
        PolicyError: there is none; the message has near names.
    """
    if name in POLICIES:
        return POLICIES[name]
    if ":" in name.strip(":"):
        return load_class(name)
    if name.endswith(".py"):
        raise PolicyError(f"policy {name!r} does not say which class: {name}:MyPolicy")
    raise PolicyError(
        f"policy {name!r} is unknown{near(name, POLICIES)} "
        f"(known: {', '.join(POLICIES)}, or my_file.py:MyPolicy, or my_module:MyPolicy)"
    )


def load_policy(name: str, **settings: object) -> Policy:
    """A fresh policy by name, with its knobs set; the rest have their defaults.

    Text is converted to the knob's type (``tau="inf"``).

    Raises:
        PolicyError: no such policy or knob, or a value that is not allowed.
    """
    cls = policy_class(name)
    known = {knob.name: knob for knob in knobs(cls, texts=False)}
    values = {}
    for knob, value in settings.items():
        if knob not in known:
            listed = ", ".join(k.name if k.default is REQUIRED else f"{k.name}={k.default!r}" for k in known.values())
            raise PolicyError(f"policy {name} has no knob {knob!r}{near(knob, known)} (its knobs: {listed or 'none'})")
        values[knob] = convert(name, known[knob], value)
    lacking = [k.name for k in known.values() if k.default is REQUIRED and k.name not in values]
    if lacking:
        raise PolicyError(f"policy {name} needs a value for {', '.join(lacking)}")
    try:
        return cls(**values)
    except PolicyError:
        raise
    except Exception as error:
        # A user's own __post_init__ may refuse a value in its own way.
        raise PolicyError(f"policy {name} with {values}: {type(error).__name__}: {error}") from error
