"""Every policy, with every placement and with its knobs at their ends, keeps the contract."""

from __future__ import annotations

from math import inf

import pytest

from policies import POLICIES, check_policy, knobs, load_policy
from policies.routing import PLACEMENTS

VARIANTS: list[tuple[str, dict[str, object]]] = [
    *((name, {}) for name in POLICIES),
    *(("fcfs", {"placement": placement, "seed": 3}) for placement in PLACEMENTS),
    ("stjf", {"placement": "single:small"}),
    ("plas", {"placement": "single:large"}),
    ("plas", {"placement": "random-call"}),
    ("mlfq", {"placement": "least-loaded-call", "skip_join": True}),
    ("mlfq", {"levels": 1, "starvation_s": inf}),
    ("ltr", {"starvation_steps": 0}),
    ("sjf", {"aging_tokens_per_s": 5.0}),
    ("stjf", {"aging_tokens_per_s": 5.0}),
    ("chimera", {"tau": inf, "delta_s": 0.0}),
    ("chimera", {"tau": 0.0}),
    ("chimera", {"delta_s": inf}),
    ("chimera", {"quantile": 0.9}),
    ("chimera", {"aging_tokens_per_s": 0.0, "explain": True}),
    ("costaware", {"worth_s": 0.0, "explain": True}),
    ("costaware", {"worth_s": inf, "quantile": 0.9}),
    ("fcfs", {"placement": "split:0.3", "seed": 3}),
]


@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=lambda value: str(value))
def test_the_policy_keeps_the_contract(name: str, settings: dict[str, object]) -> None:
    check_policy(lambda: load_policy(name, **settings))


@pytest.mark.parametrize("name", POLICIES)
def test_every_knob_says_what_it_is(name: str) -> None:
    described = knobs(POLICIES[name])
    assert [knob.name for knob in described if not knob.doc] == []
    assert all(knob.default is None or isinstance(knob.default, knob.type) for knob in described)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_has_a_first_line_of_its_own(name: str) -> None:
    first = (POLICIES[name].__doc__ or "").splitlines()[0]
    assert first.endswith(".")
    assert "Policy(" not in first
