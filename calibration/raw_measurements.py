"""The raw file of a live measurement: which engine, and one line for every stretch of time that was measured.

JSON Lines: a header first, then measurements and skipped cells in the order they came. It defines, writes and reads
the lines; it measures and fits nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from calibration.figures import ProfileError, near

FORMAT = 1
MOST, MOST_S = 10_000_000, 1e12
"""Of whole numbers and of other ones: more is taken for damage."""
LEAST_S = 1e-9
"""No clock sees less."""
MeasuredKind = Literal["decode", "prefill", "mixed"]
KINDS = ("decode", "prefill", "mixed")


@dataclass(frozen=True, slots=True)
class Header:
    """The engine that was measured. ``settings_from`` says of its settings where they came from."""

    model: str
    gpu: str
    version: str
    url: str
    date: str
    max_num_seqs: int
    max_num_batched_tokens: int
    num_kv_tokens: int
    block_tokens: int
    max_model_len: int
    gpus: int
    settings_from: Mapping[str, str]
    cache_config: Mapping[str, str]

    def differences(self, other: Header) -> list[str]:
        """What is not the same engine, in words; date, URL and origin of the settings do not count."""
        same = ("date", "url", "settings_from", "cache_config")
        names = [field.name for field in fields(self) if field.name not in same]
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in names)
        return [f"{name} {mine!r} there, {its!r} here" for name, mine, its in pairs if mine != its]


@dataclass(frozen=True, slots=True)
class Measurement:
    """A stretch of ``seconds`` on the client's clock.

    ``steps`` engine steps (counted in tokens of each decoding sequence) of ``batch`` decodes that had
    ``context_tokens`` tokens of context together, on average over the stretch. In it ``prefills`` prompts of
    ``prompt_tokens`` each went through prefill, one after the other. A prefill alone has neither batch nor steps,
    and includes what client and server add around the engine; ``engine_s`` is the engine's own figure, without that.
    ``cell`` names the point of the plan, ``repeat`` tells its repeats apart.
    """

    cell: str
    repeat: int
    kind: MeasuredKind
    batch: int
    context_tokens: float
    prompt_tokens: int
    prefills: int
    steps: float
    seconds: float
    engine_s: float | None = None


@dataclass(frozen=True, slots=True)
class Skipped:
    """A cell that was left out, and why."""

    cell: str
    repeat: int
    reason: str


Entry = TypeVar("Entry", Header, Measurement, Skipped)


@dataclass(frozen=True)
class Raw:
    """A raw file's content."""

    header: Header
    measurements: tuple[Measurement, ...]
    skipped: tuple[Skipped, ...]

    @property
    def done(self) -> set[tuple[str, int]]:
        """Cells, with their repeat, that need no further measuring."""
        cells = {(each.cell, each.repeat) for each in self.measurements}
        return cells | {(each.cell, each.repeat) for each in self.skipped}


class RawWriter:
    """Appends lines to a raw file, each on disk before `write` returns, so that a crash loses at most the last."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        if not path.exists() or not path.stat().st_size:
            self._append({"kind": "header", "format": FORMAT, **asdict(header)})
        else:
            _cut_torn_line(path)

    def write(self, entry: Measurement | Skipped) -> None:
        """Append one measurement or one skipped cell."""
        self._append({**({"kind": "skipped"} if isinstance(entry, Skipped) else {}), **asdict(entry)})

    def _append(self, row: Mapping[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_raw(path: Path | str) -> Raw:
    """Read a raw file. A last line without an end, torn by a crash, is left out.

    Raises `ProfileError` naming file and line for anything that is not as `RawWriter` writes it.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ProfileError(f"{path}: no such raw file; make one with: chimsim calibrate measure") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: cannot be read: {error}") from None
    *lines, _torn = text.split("\n")
    rows = [(f"{path}:{number}", _row(line, f"{path}:{number}")) for number, line in enumerate(lines, 1) if line]
    if not rows or rows[0][1].get("kind") != "header":
        raise ProfileError(f"{path}: the first line is no header; expected a file of chimsim calibrate measure")
    if rows[0][1].get("format") != FORMAT:
        raise ProfileError(f"{path}: format is {rows[0][1].get('format')!r}; this chimsim reads {FORMAT}")
    head = {key: value for key, value in rows[0][1].items() if key not in ("kind", "format")}
    header = _typed(_made(Header, head, rows[0][0]), rows[0][0])
    measurements: list[Measurement] = []
    skipped: list[Skipped] = []
    for where, row in rows[1:]:
        if row.get("kind") == "skipped":
            skipped.append(_typed(_made(Skipped, {k: v for k, v in row.items() if k != "kind"}, where), where))
        else:
            measurements.append(_checked(_made(Measurement, row, where), where))
    return Raw(header, tuple(measurements), tuple(skipped))


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is no text that could be written again
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{where}: not valid JSON ({error}); expected one measurement a line") from None
    if not isinstance(row, dict):
        raise ProfileError(f"{where}: expected an object, found {line[:40]}")
    return row


def _made(kind: type[Entry], row: Mapping[str, Any], where: str) -> Entry:
    known = [field.name for field in fields(kind)]
    for key in row:
        if key not in known:
            raise ProfileError(f"{where}: unknown key {key!r}{near(key, known)}")
    try:
        return kind(**row)
    except TypeError:
        missing = ", ".join(key for key in known if key not in row)
        raise ProfileError(f"{where}: {missing} missing") from None


_TYPES: dict[str, tuple[type, str]] = {
    "str": (str, "text"), "int": (int, "a whole number"), "Mapping[str, str]": (dict, "an object of texts"),
}  # fmt: skip


def _typed(entry: Entry, where: str) -> Entry:
    """The entry, if its values are of the types of its fields."""
    for field in fields(entry):
        value = getattr(entry, field.name)
        kind, wanted = _TYPES[str(field.type)]
        texts = value.values() if type(value) is dict else ()
        if type(value) is not kind or not all(type(text) is str for text in texts):
            raise ProfileError(f"{where}: {field.name} is {value!r:.60}; expected {wanted}")
    return entry


def _checked(measurement: Measurement, where: str) -> Measurement:
    _typed(Skipped(measurement.cell, measurement.repeat, ""), where)
    if measurement.kind not in KINDS:
        raise ProfileError(f"{where}: kind is {measurement.kind!r}; expected one of {', '.join(KINDS)}")
    for name in ("seconds", "steps", "context_tokens", "engine_s"):
        value = getattr(measurement, name)
        absent = name == "engine_s" and value is None
        if not absent and (type(value) not in (int, float) or not 0 <= value <= MOST_S):
            raise ProfileError(f"{where}: {name} is {value!r:.60}; expected a number of at least 0")
    for name in ("batch", "prompt_tokens", "prefills"):
        value = getattr(measurement, name)
        if type(value) is not int or not 0 <= value <= MOST:
            raise ProfileError(f"{where}: {name} is {value!r:.60}; expected a whole number of at least 0")
    needed = ("batch", "steps") if measurement.kind == "decode" else ("prompt_tokens", "prefills")
    for name in ("seconds", "engine_s", *needed):
        value = getattr(measurement, name)
        if value is not None and value < LEAST_S:
            raise ProfileError(f"{where}: {name} is {value:g}; expected a number above 0")
    return measurement


def _cut_torn_line(path: Path) -> None:
    """Drop a last line that a crash left without its end."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        with open(path, "r+b") as file:
            file.truncate(whole)
