"""The synthetic generator's parameter files: TOML to frozen values; unknown and missing keys are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

from traces.files import SHIPPED, check_file, parse_toml
from traces.prompts import Part, Templates
from traces.schema import TraceError, near

LAYOUTS = ("role-first", "history-first")


@dataclass(frozen=True, slots=True)
class Model:
    """``loop_rate``: share of all workflows in which this model falls into a repetition loop."""

    solved_rate: float
    length_factor: float
    loop_rate: float


@dataclass(frozen=True, slots=True)
class Role:
    """An agent. ``median_tokens`` of output times exp(the other terms), see `traces.synthetic`."""

    system_tokens: int
    instruction_tokens: int
    median_tokens: float
    spread: float
    difficulty: float
    unsolved: float


@dataclass(frozen=True, slots=True)
class Pattern:
    """Groups of roles: each group waits for all of the one before, and its roles work side by side.

    A chain has groups of one. The weight is multiplied by exp(``tilt`` * difficulty).
    """

    roles: tuple[tuple[str, ...], ...]
    weight: float
    tilt: float


@dataclass(frozen=True, slots=True)
class Check:
    """After the role ``by``, if it finds fault, the role ``repeats`` works once more."""

    by: str
    repeats: str
    fails_when_solved: float
    fails_when_unsolved: float


@dataclass(frozen=True, slots=True)
class Parameters:
    """Everything the generator needs; the comments in ``traces/data/apps.toml`` say what each number is."""

    workload: str
    seed: int
    workflows: int
    layout: str
    context_tokens: int
    output_cap_tokens: int
    carry_tokens: int
    common_system_tokens: int
    glue_tokens: int
    slope: float
    words_tell: float
    router_noise: float
    workflow_spread: float
    model_spread: float
    loop_tilt: float
    loops_in: str
    models: Mapping[str, Model]
    roles: Mapping[str, Role]
    patterns: tuple[Pattern, ...]
    check: Check
    templates: Templates


def load_parameters(name_or_path: str | Path) -> Parameters:
    """The shipped parameters ``apps`` or ``maths``, or a TOML file, which may only say what differs from its ``base``.

    Raises `TraceError`.
    """
    name = str(name_or_path)
    table = _read(name)
    base = table.pop("base", None)
    if base is not None:
        if base not in SHIPPED:
            raise TraceError(f"{name}: base: expected one of {', '.join(SHIPPED)}, found {base!r}")
        inherited = _read(base)
        for key in ("roles", "models"):
            if isinstance(table.get(key), dict):
                table[key] = inherited[key] | table[key]
        table = inherited | table
    return _Reader(name).parameters(table)


def _read(name: str) -> dict[str, Any]:
    if name in SHIPPED:
        data = (files("traces") / "data" / f"{name}.toml").read_bytes()
    elif "/" not in name and not Path(name).suffix:
        raise TraceError(
            f"parameters {name!r} are unknown{near(name, SHIPPED)} "
            f"(shipped: {', '.join(SHIPPED)}; or the path of a .toml file)"
        )
    else:
        check_file(Path(name))
        data = Path(name).read_bytes()
    try:
        return parse_toml(data.decode())
    except ValueError as error:
        raise TraceError(f"{name}: not valid TOML ({error})") from None


class _Reader:
    """Turns tables into values, with the file's name and the key's path in every message."""

    def __init__(self, file: str) -> None:
        self.file = file

    def parameters(self, table: Any) -> Parameters:
        top = self.table(table, "", Parameters.__dataclass_fields__.keys() - {"templates"} | {"prompt"})
        models = self.named(top["models"], "models")
        roles = self.named(top["roles"], "roles")
        check_table = self.table(top["check"], "check", Check.__dataclass_fields__.keys())
        role_names = tuple(roles)
        patterns = top["patterns"]
        if not isinstance(patterns, list) or not patterns:
            raise self.wrong("patterns", "one or more [[patterns]]", patterns)
        return Parameters(
            workload=self.text(top["workload"], "workload"),
            seed=self.whole(top["seed"], "seed", 0),
            workflows=self.whole(top["workflows"], "workflows", 1),
            layout=self.one_of(top["layout"], "layout", LAYOUTS),
            context_tokens=self.whole(top["context_tokens"], "context_tokens", 1024),
            output_cap_tokens=self.whole(top["output_cap_tokens"], "output_cap_tokens", 1),
            carry_tokens=self.whole(top["carry_tokens"], "carry_tokens", 1),
            common_system_tokens=self.whole(top["common_system_tokens"], "common_system_tokens", 1),
            glue_tokens=self.whole(top["glue_tokens"], "glue_tokens", 0),
            slope=self.number(top["slope"], "slope", 0.0, 20.0),
            words_tell=self.number(top["words_tell"], "words_tell", 0.0, 1.0),
            router_noise=self.number(top["router_noise"], "router_noise", 0.0, 1e6),
            workflow_spread=self.number(top["workflow_spread"], "workflow_spread", 0.0, 5.0),
            model_spread=self.number(top["model_spread"], "model_spread", 0.0, 5.0),
            loop_tilt=self.number(top["loop_tilt"], "loop_tilt", -5.0, 5.0),
            loops_in=self.one_of(top["loops_in"], "loops_in", role_names),
            models={name: self.model(models[name], f"models.{name}") for name in sorted(models)},
            roles={name: self.role(row, f"roles.{name}") for name, row in roles.items()},
            patterns=tuple(self.pattern(row, f"patterns[{i}]", role_names) for i, row in enumerate(patterns)),
            check=Check(
                by=self.one_of(check_table["by"], "check.by", role_names),
                repeats=self.one_of(check_table["repeats"], "check.repeats", role_names),
                **{
                    key: self.number(check_table[key], f"check.{key}", 0.0, 1.0)
                    for key in ("fails_when_solved", "fails_when_unsolved")
                },
            ),
            templates=self.templates(top["prompt"]),
        )

    def model(self, row: Any, path: str) -> Model:
        row = self.table(row, path, Model.__dataclass_fields__.keys())
        return Model(
            solved_rate=self.number(row["solved_rate"], f"{path}.solved_rate", 0.001, 0.999),
            length_factor=self.number(row["length_factor"], f"{path}.length_factor", 0.01, 100.0),
            loop_rate=self.number(row["loop_rate"], f"{path}.loop_rate", 0.0, 0.5),
        )

    def role(self, row: Any, path: str) -> Role:
        row = self.table(row, path, Role.__dataclass_fields__.keys())
        return Role(
            system_tokens=self.whole(row["system_tokens"], f"{path}.system_tokens", 1),
            instruction_tokens=self.whole(row["instruction_tokens"], f"{path}.instruction_tokens", 1),
            median_tokens=self.number(row["median_tokens"], f"{path}.median_tokens", 1.0, 1e5),
            spread=self.number(row["spread"], f"{path}.spread", 0.0, 5.0),
            difficulty=self.number(row["difficulty"], f"{path}.difficulty", -5.0, 5.0),
            unsolved=self.number(row["unsolved"], f"{path}.unsolved", -5.0, 5.0),
        )

    def pattern(self, row: Any, path: str, roles: tuple[str, ...]) -> Pattern:
        row = self.table(row, path, Pattern.__dataclass_fields__.keys())
        entries = row["roles"]
        if not isinstance(entries, list) or not entries:
            raise self.wrong(f"{path}.roles", "a list of roles; a list within it works side by side", entries)
        groups = [entry if isinstance(entry, list) and entry else [entry] for entry in entries]
        return Pattern(
            roles=tuple(tuple(self.one_of(role, f"{path}.roles", roles) for role in group) for group in groups),
            weight=self.number(row["weight"], f"{path}.weight", 1e-9, 1e9),
            tilt=self.number(row["tilt"], f"{path}.tilt", -5.0, 5.0),
        )

    def templates(self, row: Any) -> Templates:
        row = self.table(row, "prompt", {"words", "parts"})
        words = {
            name: self.texts(options, f"prompt.words.{name}")
            for name, options in self.named(row["words"], "prompt.words").items()
        }
        if not isinstance(row["parts"], list) or not row["parts"]:
            raise self.wrong("prompt.parts", "one or more [[prompt.parts]]", row["parts"])
        parts = []
        for index, part in enumerate(row["parts"]):
            path = f"prompt.parts[{index}]"
            levels = ("neutral",) if isinstance(part, dict) and "neutral" in part else ("easy", "middle", "hard")
            part = self.table(part, path, {"sentences", *levels})
            banks = tuple(self.texts(part[level], f"{path}.{level}") for level in levels)
            counts = part["sentences"]
            if not (isinstance(counts, list) and len(counts) == 2 and all(type(c) is int for c in counts)):
                raise self.wrong(f"{path}.sentences", "[least, most]", counts)
            least, most = counts
            if not 0 <= least <= most <= min(len(set(bank)) for bank in banks):
                raise self.wrong(f"{path}.sentences", "[least, most], at most the sentences of a bank", counts)
            for slot in re.findall(r"\{(\w+)\}", " ".join(sum(banks, ()))):
                if slot != "n" and slot not in words:
                    raise self.wrong(path, f"slots among n, {', '.join(words)}", f"{{{slot}}}")
            parts.append(Part(banks, least, most))
        return Templates(tuple(parts), words)

    def table(self, row: Any, path: str, keys: Any) -> dict[str, Any]:
        if not isinstance(row, dict):
            raise self.wrong(path, "a table", row)
        for key in row:
            if key not in keys:
                known = ", ".join(sorted(keys))
                raise TraceError(f"{self.at(path)}unknown key {key!r}{near(key, keys)} (keys: {known})")
        for key in sorted(keys):
            if key not in row:
                raise TraceError(f"{self.at(path)}key {key!r} is missing")
        return row

    def named(self, row: Any, path: str) -> dict[str, Any]:
        if not isinstance(row, dict) or not row:
            raise self.wrong(path, "a table with at least one entry", row)
        return row

    def texts(self, value: Any, path: str) -> tuple[str, ...]:
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise self.wrong(path, "a list of at least one string", value)
        return tuple(value)

    def text(self, value: Any, path: str) -> str:
        if not isinstance(value, str) or not value:
            raise self.wrong(path, "a non-empty string", value)
        return value

    def one_of(self, value: Any, path: str, known: tuple[str, ...]) -> str:
        if value not in known:
            raise self.wrong(path, f"one of {', '.join(known)}", value)
        return str(value)

    def whole(self, value: Any, path: str, least: int) -> int:
        if type(value) is not int or not least <= value <= 10**9:
            raise self.wrong(path, f"a whole number, at least {least}", value)
        return value

    def number(self, value: Any, path: str, least: float, most: float) -> float:
        if type(value) not in (int, float) or not isfinite(value) or not least <= value <= most:
            raise self.wrong(path, f"a number from {least:g} to {most:g}", value)
        return float(value)

    def wrong(self, path: str, expected: str, found: Any) -> TraceError:
        return TraceError(f"{self.at(path)}expected {expected}, found {found!r:.60}")

    def at(self, path: str) -> str:
        return f"{self.file}: {path}: " if path else f"{self.file}: "
