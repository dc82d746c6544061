"""An experiment's file: a sweep, the question it answers, and what should hold. Read and checked, nothing is run.

The file is a sweep's spec with further tables, so that `chimsim sweep` takes it, too: ``[experiment]`` (title, figure,
question, paper, needs, kind, figures), ``[prepare]`` (models to train), ``[quick]`` and ``[choose]`` (what differs in
a short run, and in the runs that settings are chosen by), and ``[[relation]]`` (claim, says, paper, reason, where,
when, metric).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chimsim
from chimsim.errors import ChimsimError, near
from chimsim.reproduce.claims import Claim, parse_claim
from chimsim.reproduce.relations import Relation
from chimsim.spec import EXPERIMENT_TABLES, read_document

KINDS = ("sweep", "lengths", "ranking", "router")
"""What is run: a sweep, or a look at a trace's lengths, length predictors' order, routers' confidence."""
SUFFIX = ".toml"


@dataclass(frozen=True, slots=True)
class Experiment:
    """One file. ``keys`` are those of the sweep (or of another kind), ``quick`` and ``choose`` override them."""

    name: str
    path: Path
    title: str
    question: str
    figure: str = ""
    paper: str = ""
    kind: str = "sweep"
    needs: str = ""
    """What must be given as ``--data``, in words; empty where nothing."""
    figures: tuple[str, ...] = ("frontier", "queue")
    keys: Mapping[str, Any] = field(default_factory=dict)
    prepare: Mapping[str, Any] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)
    choose: Mapping[str, Any] = field(default_factory=dict)
    relations: tuple[Relation, ...] = ()

    def asked(self, quick: bool) -> dict[str, Any]:
        """The keys of a run, quick or not."""
        return {**self.keys, **(self.quick if quick else {})}

    @property
    def call(self) -> str:
        """What `chimsim reproduce` calls it: its name if it is one of `experiment_files`, else its path."""
        return self.name if self.path.resolve() in experiment_files() else str(self.path)


def find_experiment(name: str) -> Path:
    """The file of an experiment: a path, or the name of a shipped one. Raises `ChimsimError`."""
    if name.endswith(SUFFIX):
        if not Path(name).is_file():
            raise ChimsimError(f"experiment {name}: no such file")
        return Path(name)
    known = {path.stem: path for path in experiment_files()}
    if name not in known:
        raise ChimsimError(
            f"experiment {name!r} is unknown{near(name, known)} (there are {', '.join(known) or 'none'}, "
            "all, or a file of yours)"
        )
    return known[name]


def experiment_files() -> list[Path]:
    """Those that are shipped: the paper's figures, its tables, then ours."""
    home = Path(chimsim.__file__).resolve().parent
    for folder in (home / "reproduce" / "specs", home.parent / "experiments"):
        files = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: (_rank(path.stem), path.stem))
        if files:
            return files
    return []


def _rank(name: str) -> int:
    return next((i for i, start in enumerate(("fig", "oracles", "table")) if name.startswith(start)), 3)


def read_experiment(path: Path) -> Experiment:
    """The experiment of a file. Raises `ChimsimError` that names the file and the key."""
    document = read_document(path)
    about = _table(document, "experiment", path, _ABOUT)
    for key in ("title", "question"):
        if key not in about:
            raise ChimsimError(f"{path}: experiment: {key} is missing")
    kind = about.get("kind", "sweep")
    if kind not in KINDS:
        raise ChimsimError(f"{path}: experiment: kind {kind!r} is unknown{near(kind, KINDS)} ({', '.join(KINDS)})")
    relations = document.get("relation", [])
    if not isinstance(relations, list):
        raise ChimsimError(f"{path}: relation: expected tables, each headed [[relation]]")
    return Experiment(
        name=path.stem,
        path=path,
        **{key: value for key, value in about.items() if key != "figures"},
        figures=tuple(about.get("figures", ("frontier", "queue"))),
        keys=_keys(document),
        prepare=_table(document, "prepare", path, _PREPARE),
        quick=_table(document, "quick", path),
        choose=_table(document, "choose", path),
        relations=tuple(_relation(table, f"{path}: relation {n}") for n, table in enumerate(relations, start=1)),
    )


def _keys(document: Mapping[str, Any]) -> dict[str, Any]:
    """The sweep's own, its traces as a list."""
    keys = {key: value for key, value in document.items() if key not in EXPERIMENT_TABLES}
    if isinstance(keys.get("trace"), str):
        keys["trace"] = [name.strip() for name in keys["trace"].split(",")]
    return keys


_ABOUT: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("title", "question", "figure", "paper", "kind", "needs"), lambda value: isinstance(value, str)),
    "figures": lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
}
_PREPARE: dict[str, Callable[[Any], bool]] = {
    "models": lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    "predictor": lambda value: isinstance(value, bool),
    "router": lambda value: isinstance(value, bool),
    "test_share": lambda value: isinstance(value, float) and 0 < value < 1,
    "seed": lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
}
_RELATION: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("claim", "says", "paper", "reason", "when", "metric"), lambda value: isinstance(value, str)),
    "where": lambda value: isinstance(value, dict),
}


def _table(
    document: Mapping[str, Any], name: str, path: Path, known: Mapping[str, Callable[[Any], bool]] | None = None
) -> dict[str, Any]:
    table = document.get(name, {})
    if not isinstance(table, dict):
        raise ChimsimError(f"{path}: {name}: expected a table, headed [{name}]")
    if known is not None:
        _check(table, known, f"{path}: {name}")
    return table


def _check(table: Mapping[str, Any], known: Mapping[str, Callable[[Any], bool]], where: str) -> None:
    for key, value in table.items():
        if key not in known:
            raise ChimsimError(f"{where}: unknown key {key!r}{near(key, known)}")
        if not known[key](value):
            raise ChimsimError(f"{where}: {key}: {value!r} is not allowed here")


def _relation(table: Any, where: str) -> Relation:
    if not isinstance(table, dict):
        raise ChimsimError(f"{where}: expected a table")
    _check(table, _RELATION, where)
    for key in ("claim", "says"):
        if key not in table:
            raise ChimsimError(f"{where}: {key} is missing")
    claim = parse_claim(table["claim"], where)
    if "metric" in table:
        if claim.kind != "dominates":
            raise ChimsimError(f"{where}: metric is for 'dominates'; here the claim names its own")
        claim = Claim(claim.text, claim.kind, claim.left, table["metric"], claim.right)
    asked = {name: value if isinstance(value, list) else [value] for name, value in table.get("where", {}).items()}
    when = parse_claim(table["when"], f"{where}: when") if "when" in table else None
    if when is not None and when.kind not in ("<", ">"):
        raise ChimsimError(f"{where}: when: {when.text!r} is no comparison by < or >")
    return Relation(claim, table["says"], table.get("paper", ""), table.get("reason", ""), asked, when)
