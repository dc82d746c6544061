"""The arrows between the packages, read from the source: who may import whom, and what policies must not touch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("policies", "traces", "calibration", "chimsim")
MAY_IMPORT = {
    "policies": {"policies"},
    "traces": {"traces"},
    "calibration": {"calibration", "traces", "policies"},
    "chimsim": {"chimsim", "calibration", "traces", "policies"},
}
OURS = {*PACKAGES, "tests", "experiments", "benchmarks", "examples"}
CLOCKS = {"time", "datetime"}
SEEDED = {"Random"}
"""What policies may take from ``random``: its functions share one hidden state between all who call them."""


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str, str]]:
    """Line, module and name ("" for the whole module) of every import, also of those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            # a relative import cannot leave its package
            module = package if node.level else node.module or ""
            for alias in node.names:
                yield node.lineno, module, alias.name


def forbidden_imports(text: str, package: str) -> list[str]:
    """The imports against the arrows, as ``line: module``."""
    refused = OURS - MAY_IMPORT[package]
    found = imports(ast.parse(text), package)
    return [f"{line}: {module}" for line, module, _ in found if module.split(".")[0] in refused]


def impurities(text: str) -> list[str]:
    """Imports of a clock, and of ``random`` other than its seeded class, as ``line: module.name``."""
    bad = []
    for line, module, name in imports(ast.parse(text), "policies"):
        top = module.split(".")[0]
        if top in CLOCKS or (top == "random" and name not in SEEDED):
            bad.append(f"{line}: {module}.{name}".rstrip("."))
    return bad


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_its_arrows_allow(package: str) -> None:
    files = sources(package)
    assert files
    found = {path.relative_to(ROOT).as_posix(): forbidden_imports(path.read_text("utf-8"), package) for path in files}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_policies_have_neither_a_clock_nor_unseeded_randomness() -> None:
    found = {path.relative_to(ROOT).as_posix(): impurities(path.read_text("utf-8")) for path in sources("policies")}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("policies", "import chimsim"),
        ("policies", "from traces.schema import Trace"),
        ("traces", "def f():\n    from policies import Fcfs"),
        ("calibration", "import chimsim.engine as engine"),
        ("chimsim", "from tests.chimsim import worlds"),
    ],
)
def test_an_import_against_the_arrows_is_seen(package: str, line: str) -> None:
    assert len(forbidden_imports(line, package)) == 1


@pytest.mark.parametrize(
    "line",
    ["import time", "from datetime import datetime", "import random", "from random import choice", "import time as t"],
)
def test_an_impure_import_is_seen(line: str) -> None:
    assert len(impurities(line)) == 1


def test_seeded_randomness_is_allowed() -> None:
    assert impurities("from random import Random") == []
    assert forbidden_imports("from policies.interface import Policy\nfrom . import knobs", "policies") == []
