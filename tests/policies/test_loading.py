"""Policies by name, from a file and from a module; and what is said when that fails."""

from __future__ import annotations

import pickle
from math import inf
from pathlib import Path

import pytest

from policies import POLICIES, REQUIRED, PolicyError, knobs, load_policy
from policies.chimera import Chimera

MINE = '''
from dataclasses import dataclass
from policies.interface import Dispatch, Policy

@dataclass
class Slowest(Policy):
    """Everything to the slowest engine."""

    above_s: float = 0.0
    """only engines whose step takes longer"""
    limit: int = 3

    def __post_init__(self):
        if self.limit > 9:
            raise RuntimeError("too high")

    def dispatch(self, now, request, cluster):
        return Dispatch(max(cluster, key=lambda e: e.decode_s_per_token).name)

@dataclass
class Needy(Policy):
    slack: float

    def dispatch(self, now, request, cluster):
        return Dispatch(cluster[0].name)

class Bare(Policy):
    def dispatch(self, now, request, cluster):
        return Dispatch(cluster[0].name)

class Stranger:
    def dispatch(self, now, request, cluster):
        return Dispatch(cluster[0].name)

@dataclass
class Idle(Policy):
    pass

number = 3
'''


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def refusal(name: str, **settings: object) -> str:
    with pytest.raises(PolicyError) as caught:
        load_policy(name, **settings)
    return str(caught.value)


@pytest.mark.parametrize("name", POLICIES)
def test_a_table_name_gives_a_fresh_policy(name: str) -> None:
    policy = load_policy(name)
    assert type(policy) is POLICIES[name]
    assert load_policy(name) is not policy


def test_knobs_are_converted_so_that_equal_settings_have_equal_reprs() -> None:
    assert repr(load_policy("chimera", tau=1)) == repr(load_policy("chimera", tau="1.0")) == repr(Chimera(tau=1))
    assert load_policy("chimera", tau="inf", explain="true") == Chimera(tau=inf, explain=True)
    assert load_policy("mlfq", levels=4.0) == load_policy("mlfq", levels="4")
    assert load_policy("sjf", quantile="0.9") == load_policy("sjf", quantile=0.9)
    assert load_policy("sjf", quantile=None) == load_policy("sjf")


def test_an_unknown_policy_is_refused_with_its_neighbour() -> None:
    assert "'chimra' is unknown; did you mean 'chimera'?" in refusal("chimra")
    assert "my_file.py:MyPolicy" in refusal("nothing-like-it")
    assert "did you mean 'fcfs'?" in refusal("FCFS")


def test_an_unknown_knob_is_refused_with_the_knobs_there_are() -> None:
    message = refusal("chimera", taw=1)
    assert "policy chimera has no knob 'taw'; did you mean 'tau'?" in message
    assert "tau=0.5, delta_s=0.05" in message


@pytest.mark.parametrize(
    ("name", "knob", "value", "rule"),
    [
        ("chimera", "tau", -1, "0 or more"),
        ("chimera", "tau", "nan", "a number"),
        ("chimera", "tau", float("nan"), "a number"),
        ("chimera", "tau", None, "a number"),
        ("chimera", "tau", True, "a number"),
        ("chimera", "delta_s", -0.1, "0 or more"),
        ("chimera", "aging_tokens_per_s", inf, "finite"),
        ("chimera", "explain", 1, "true or false"),
        ("stjf", "aging_tokens_per_s", -1, "0 or more"),
        ("stjf", "quantile", 0.0, "between 0 and 1"),
        ("sjf", "quantile", 1, "between 0 and 1"),
        ("chimera", "quantile", 90, "between 0 and 1"),
        ("chimera", "quantile", "median", "a number"),
        ("sjf", "aging_tokens_per_s", inf, "finite"),
        ("mlfq", "levels", 2.5, "a whole number"),
        ("mlfq", "levels", 0, "between 1 and 64"),
        ("mlfq", "levels", inf, "a whole number"),
        ("mlfq", "q0_s", 0, "more than 0"),
        ("mlfq", "ratio", 0.5, "between 1 and 100"),
        ("mlfq", "starvation_s", 0, "more than 0"),
        ("mlfq", "promoted_s", 0, "more than 0"),
        ("mlfq", "prefill_tokens_per_s", -5, "more than 0"),
        ("ltr", "starvation_steps", -1, "0 or more"),
        ("ltr", "promoted_steps", 0, "1 or more"),
        ("fcfs", "seed", -1, "0 or more"),
        ("fcfs", "placement", 7, "text"),
    ],
)
def test_a_bad_value_is_refused_naming_policy_knob_and_rule(name: str, knob: str, value: object, rule: str) -> None:
    message = refusal(name, **{knob: value})
    assert message.startswith(f"policy {name}: {knob} is ")
    assert rule in message


def test_a_policy_from_a_file(mine: Path) -> None:
    policy = load_policy(f"{mine}:Slowest", above_s="0.5")
    assert repr(policy) == "Slowest(above_s=0.5, limit=3)"
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert type(load_policy(f"{mine}:Slowest")) is type(policy)
    first, second = knobs(type(policy))
    assert first == ("above_s", float, 0.0, "only engines whose step takes longer")
    assert second == ("limit", int, 3, "")


def test_a_file_that_has_changed_is_loaded_anew(mine: Path) -> None:
    before = load_policy(f"{mine}:Slowest")
    mine.write_text(MINE.replace("limit: int = 3", "limit: int = 4"))
    assert repr(load_policy(f"{mine}:Slowest")) == "Slowest(above_s=0.0, limit=4)"
    assert pickle.loads(pickle.dumps(before)) == before


def test_a_policy_from_a_module_of_the_current_folder(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine.rename(mine.with_name("my_scheduling_module.py"))
    monkeypatch.chdir(mine.parent)
    assert repr(load_policy("my_scheduling_module:Slowest")) == "Slowest(above_s=0.0, limit=3)"


def test_a_knob_without_a_default_must_be_given(mine: Path) -> None:
    assert knobs(type(load_policy(f"{mine}:Needy", slack=2)))[0].default is REQUIRED
    assert "needs a value for slack" in refusal(f"{mine}:Needy")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Slowst", "has no class 'Slowst'; did you mean 'Slowest'? (it has: Slowest, Needy"),
        ("Bare", "is not a dataclass"),
        ("Stranger", "derive the class from policies.interface.Policy"),
        ("Idle", "has no dispatch(now, request, cluster)"),
        ("number", "is not a class but int"),
    ],
)
def test_a_class_that_is_no_policy_is_refused(mine: Path, name: str, said: str) -> None:
    assert said in refusal(f"{mine}:{name}")


def test_the_users_own_refusal_of_a_value_is_passed_on(mine: Path) -> None:
    assert "RuntimeError: too high" in refusal(f"{mine}:Slowest", limit=10)


def test_what_cannot_be_loaded_says_where_it_broke(tmp_path: Path) -> None:
    assert "no such file" in refusal(f"{tmp_path}/none.py:Mine")
    assert "none.py:MyPolicy" in refusal(f"{tmp_path}/none.py")
    assert "is a directory" in refusal(f"{_folder(tmp_path)}:Mine")
    broken = tmp_path / "broken.py"
    broken.write_text("x = 1\ny = x +\n")
    assert "broken.py fails to load, line 2: SyntaxError" in refusal(f"{broken}:Mine")
    broken.write_text("x = 1\n\nz = undefined_name\n")
    assert "broken.py fails to load, line 3: NameError" in refusal(f"{broken}:Mine")
    assert "there is no module 'no_such_module'" in refusal("no_such_module.deep:Mine")


def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder.py"
    folder.mkdir()
    return folder
