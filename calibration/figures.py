"""The numbers of an engine profile: names, units, allowed values, and the TOML they are kept in.

It knows what a number may be and where it came from, not what an engine does with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, cast, get_args

from traces.files import parse_toml

Provenance = Literal["measured", "scaled", "assumed"]
"""``measured`` on this model and GPU; ``scaled`` by a stated rule from a measurement of another; ``assumed``:
taken as given (a model card, a data sheet, a vLLM default, our own choice). The source says which."""

PROVENANCES: tuple[Provenance, ...] = get_args(Provenance)


class ProfileError(ValueError):
    """A profile that cannot be read or makes no sense; the message names the file, the key, and the cure."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with where it comes from."""

    value: float
    provenance: Provenance
    source: str


MOST = 1e18
"""Of any number of a profile: beyond it sums and products leave the range of floats."""


@dataclass(frozen=True, slots=True)
class Field:
    """What a number of a profile may be: section in the file, unit, whether it is whole or may be 0."""

    section: str
    unit: str
    whole: bool = False
    positive: bool = False
    required: bool = False
    most: float = MOST

    @property
    def wanted(self) -> str:
        most = "" if self.most == MOST else f" and at most {self.most:,}"
        return f"a {'whole ' if self.whole else ''}number {'above 0' if self.positive else 'of at least 0'}{most}"


FIELDS: dict[str, Field] = {
    "layers": Field("architecture", "layers", whole=True, positive=True, required=True),
    "hidden_size": Field("architecture", "values", whole=True),
    "heads": Field("architecture", "heads", whole=True),
    "kv_heads": Field("architecture", "heads", whole=True),
    "head_dim": Field("architecture", "values", whole=True),
    "parameters": Field("architecture", "parameters"),
    "block_parameters": Field("architecture", "parameters"),
    "head_parameters": Field("architecture", "parameters"),
    "max_model_len": Field("architecture", "tokens", whole=True, positive=True, required=True),
    "memory_bytes": Field("memory", "bytes a GPU", whole=True),
    "kv_bytes_per_token": Field("memory", "bytes a token", whole=True),
    "num_kv_tokens": Field("memory", "tokens", whole=True, positive=True, required=True),
    "mean_call_tokens": Field("memory", "tokens a call", positive=True),
    # an engine keeps a table as long as each of these
    "max_num_seqs": Field("engine", "sequences", whole=True, positive=True, most=2**20),
    "max_num_batched_tokens": Field("engine", "tokens a step", whole=True, positive=True, most=2**20),
    "block_tokens": Field("engine", "tokens a block", whole=True, positive=True, most=2**16),
    "host_s": Field("step", "s a step"),
    "sequence_s": Field("step", "s a sequence"),
    "a0": Field("attention", "s a layer"),
    "a1": Field("attention", "s a decode and layer"),
    "a2": Field("attention", "s a context token and layer"),
    "w0": Field("attention", "s a layer"),
    "w1": Field("attention", "s a token pair and layer"),
    "w2": Field("attention", "s a context token and layer"),
    "m0": Field("attention", "s a decode and layer"),
    "m1": Field("attention", "s a context token and layer"),
    "allreduce_base_s": Field("allreduce", "s a step"),
    "allreduce_token_s": Field("allreduce", "s a token"),
}
"""The single numbers of a profile by name. ``dense`` and ``capture_tokens`` (section ``step``) are tables."""

DENSE = Field("step", "s a step", positive=True)
"""The times of the ``dense`` table."""

CURVE_KEYS: dict[str, tuple[str, ...]] = {"step": ("sequences",), "attention": ("decode", "chunk", "mixed")}
"""The keys of the tables of `calibration.curves`, by section. Each has one provenance and source for all of it."""

SECTIONS: tuple[str, ...] = tuple(dict.fromkeys(field.section for field in FIELDS.values()))
_HEAD = ("model", "aliases", "gpu", "gpus", "notes")
_FIGURE = ("value", "provenance", "source")
_POINT = ("tokens", *_FIGURE)
_TOKENS = Field("step", "tokens", whole=True, positive=True)


def check_number(value: object, field: Field) -> str:
    """What is wrong with ``value`` as this field, or an empty string."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"is {value!r}; expected {field.wanted}"
    if not 0 <= value <= field.most or (field.positive and value == 0):
        return f"is {value!r}; expected {field.wanted}"
    if field.whole and value != int(value):
        return f"is {value!r}; expected {field.wanted}"
    return ""


def near(name: str, known: Iterable[str], aliases: Iterable[str] = ()) -> str:
    """``"; did you mean 'x'?"`` for an unknown name, or the known names, no aliases, if none is near."""
    names = sorted(set(known))
    by_lower = {each.lower(): each for each in (*names, *aliases)}
    close = get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else f"; known: {', '.join(names)}"


def read_figures(text: str, where: str) -> dict[str, Any]:
    """A profile's TOML as keyword arguments of `EngineProfile`, the tables of `CURVE_KEYS` still as mappings.

    ``where`` names the file in messages. ``origins`` holds (name, provenance, source) of every number of the
    file, ``dense[8]`` standing for the table's entry at 8 tokens.

    Raises `ProfileError` for a syntax error (with its line), unknown or missing keys (with near names), and
    numbers that are not allowed.
    """
    try:
        tree = parse_toml(text)
    except ValueError as error:
        raise ProfileError(f"{where}: not valid TOML: {error}") from None
    _only(tree, (*_HEAD, *SECTIONS), where, "key")
    fields: dict[str, Any] = _read_head(tree, where)
    origins: list[tuple[str, Provenance, str]] = []
    for section in SECTIONS:
        content = _table(tree.get(section, {}), where, f"[{section}]")
        names = [name for name, field in FIELDS.items() if field.section == section]
        tables = ("dense", "capture_tokens") if section == "step" else ()
        curves = CURVE_KEYS.get(section, ())
        _only(content, (*names, *tables, *curves), where, f"key in [{section}]")
        for name in names:
            if name in content:
                figure = _figure(content[name], FIELDS[name], where, f"{section}.{name}")
                fields[name] = int(figure.value) if FIELDS[name].whole else figure.value
                origins.append((name, figure.provenance, figure.source))
            elif FIELDS[name].required:
                raise ProfileError(f"{where}: {section}.{name} is missing; expected a number")
        for name in curves:
            if name in content:
                table = dict(_table(content[name], where, f"{section}.{name}"))
                origins.append((name, *_origin(table, where, f"{section}.{name}")))
                fields[name] = {key: value for key, value in table.items() if key not in ("provenance", "source")}
    step = tree.get("step", {})
    if "dense" not in step:
        raise ProfileError(f"{where}: step.dense is missing; expected a list of {{tokens, value, provenance, source}}")
    fields["dense"] = _dense(step["dense"], where, origins)
    if "capture_tokens" in step:
        fields["capture_tokens"] = _captures(step["capture_tokens"], where, origins)
    fields["origins"] = tuple(origins)
    return fields


def _read_head(tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    head: dict[str, Any] = {}
    for name in ("model", "gpu"):
        if not isinstance(tree.get(name), str) or not tree[name].strip():
            raise ProfileError(f"{where}: {name} is {tree.get(name)!r}; expected a name in quotes")
        head[name] = tree[name]
    aliases = tree.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) and alias.strip() for alias in aliases):
        raise ProfileError(f"{where}: aliases is {aliases!r}; expected a list of names")
    head["aliases"] = tuple(aliases)
    gpus = tree.get("gpus", 1)
    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1:
        raise ProfileError(f"{where}: gpus is {gpus!r}; expected a whole number above 0")
    head["gpus"] = gpus
    notes = tree.get("notes", "")
    if not isinstance(notes, str):
        raise ProfileError(f"{where}: notes is {notes!r}; expected text")
    head["notes"] = notes.strip()
    return head


def _only(table: Mapping[str, Any], known: Iterable[str], where: str, kind: str) -> None:
    known = tuple(known)
    for key in table:
        if key not in known:
            raise ProfileError(f"{where}: unknown {kind}: {key!r}{near(key, known)}")


def _table(value: object, where: str, key: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ProfileError(f"{where}: {key} is {value!r}; expected a table")
    return cast("Mapping[str, Any]", value)


def _origin(table: Mapping[str, Any], where: str, key: str) -> tuple[Provenance, str]:
    provenance, source = table.get("provenance"), table.get("source")
    if provenance not in PROVENANCES:
        raise ProfileError(f"{where}: {key}.provenance is {provenance!r}; expected one of {', '.join(PROVENANCES)}")
    if not isinstance(source, str) or not source.strip():
        raise ProfileError(f"{where}: {key}.source is {source!r}; expected a text: where is the number from?")
    return cast("Provenance", provenance), source


def _figure(value: object, field: Field, where: str, key: str) -> Figure:
    table = _table(value, where, key)
    _only(table, _FIGURE, where, f"key in {key}")
    wrong = check_number(table.get("value"), field)
    if wrong:
        raise ProfileError(f"{where}: {key}.value {wrong}")
    return Figure(float(table["value"]), *_origin(table, where, key))


def _dense(value: object, where: str, origins: list[tuple[str, Provenance, str]]) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, list) or not value:
        raise ProfileError(f"{where}: step.dense is {value!r}; expected a list of at least one entry")
    points: list[tuple[int, float]] = []
    for number, entry in enumerate(value, start=1):
        key = f"step.dense entry {number}"
        table = _table(entry, where, key)
        _only(table, _POINT, where, f"key in {key}")
        for name, field in (("tokens", _TOKENS), ("value", DENSE)):
            wrong = check_number(table.get(name), field)
            if wrong:
                raise ProfileError(f"{where}: {key}: {name} {wrong}")
        tokens = int(table["tokens"])
        if points and tokens <= points[-1][0]:
            raise ProfileError(f"{where}: {key}: tokens is {tokens} after {points[-1][0]}; expected a rising list")
        points.append((tokens, float(table["value"])))
        origins.append((f"dense[{tokens}]", *_origin(table, where, key)))
    return tuple(points)


def _captures(value: object, where: str, origins: list[tuple[str, Provenance, str]]) -> tuple[int, ...]:
    table = _table(value, where, "step.capture_tokens")
    _only(table, _FIGURE, where, "key in step.capture_tokens")
    sizes = table.get("value")
    whole = isinstance(sizes, list) and all(type(size) is int and size > 0 for size in sizes)
    if not isinstance(sizes, list) or not whole or not sizes or sorted(set(sizes)) != sizes:
        raise ProfileError(
            f"{where}: step.capture_tokens.value is {sizes!r}; expected a rising list of numbers above 0"
        )
    origins.append(("capture_tokens", *_origin(table, where, "step.capture_tokens")))
    return tuple(sizes)


def write_figures(
    head: Mapping[str, Any],
    figures: Mapping[str, Figure],
    captures: tuple[tuple[int, ...], Figure] | None = None,
    tables: Mapping[str, tuple[Any, Figure]] | None = None,
) -> str:
    """The TOML of a profile, as `read_figures` reads it; ``figures`` are keyed as in ``origins``.

    ``tables`` are the curves by key, each an object with ``columns()``.
    """
    lines = [f"{name} = {_toml(head[name])}" for name in _HEAD if head[name] not in ("", ())]
    for section in SECTIONS:
        body = [
            f"{name} = {_inline(figure, FIELDS[name].whole)}"
            for name, figure in figures.items()
            if name in FIELDS and FIELDS[name].section == section
        ]
        if section == "step":
            if captures:
                sizes, figure = captures
                body.append(
                    f"capture_tokens = {{ value = {_toml(sizes)}, provenance = {_toml(figure.provenance)}, "
                    f"source = {_toml(figure.source)} }}"
                )
            body.append("dense = [")
            for name, figure in figures.items():
                if name.startswith("dense["):
                    tokens = int(name[6:-1])
                    body.append(f"    {{ tokens = {tokens}, {_inline(figure, False)[2:]},")
            body.append("]")
        for name in CURVE_KEYS.get(section, ()):
            if tables and name in tables:
                table, figure = tables[name]
                columns = ", ".join(f"{column} = {_toml(value)}" for column, value in table.columns().items())
                origin = f"provenance = {_toml(figure.provenance)}, source = {_toml(figure.source)}"
                body.append(f"{name} = {{ {columns}, {origin} }}")
        if body:
            lines += ["", f"[{section}]", *body]
    return "\n".join(lines) + "\n"


def _inline(figure: Figure, whole: bool) -> str:
    value = int(figure.value) if whole else figure.value
    origin = f"provenance = {_toml(figure.provenance)}, source = {_toml(figure.source)}"
    return f"{{ value = {_toml(value)}, {origin} }}"


def _toml(value: object) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    if isinstance(value, tuple | list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, float) and value >= 1e6 and float(f"{value:.6g}") == value:
        return f"{value:.6g}"  # parameters: 7.615e+09 rather than 7615000000.0
    return repr(value)
