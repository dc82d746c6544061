"""The question file of `chimsim collect`: what is asked, and what a right answer is, checked line by line.

It reads and checks; `chimsim.live.roles` makes prompts of the questions, `chimsim.live.grading` judges the answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, cast, get_args

from chimsim.errors import ChimsimError, near
from traces.files import check_file, parse_json, read_lines

Kind = Literal["math", "code"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_KEYS = ("question", "answer", "kind", "id", "workload", "tests")
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Pair:
    """What a program is given on stdin, and what it must print."""

    input: str
    output: str


@dataclass(frozen=True, slots=True)
class Question:
    """One question. ``answer`` is the right answer to a math question (of code a remark that nobody reads), ``tests``
    those of a program: statements to run after it, or what it must print for which input."""

    id: str
    kind: Kind
    workload: str
    question: str
    answer: str = ""
    tests: str | tuple[Pair, ...] = ()


def read_questions(path: Path) -> list[Question]:
    """The questions in file order. Raises `ChimsimError` or `TraceError` naming file, line and field."""
    check_file(path)
    questions: list[Question] = []
    places: dict[str, str] = {}
    for where, text in read_lines(path):
        question = _question(parse_json(text, where), where, f"q{len(questions) + 1:05d}")
        if question.id in places:
            raise ChimsimError(f"{where}: id: {question.id!r} is that of {places[question.id]} already")
        places[question.id] = where
        questions.append(question)
    if not questions:
        raise ChimsimError(f"{path}: the file has no questions")
    return questions


def _question(row: object, where: str, default_id: str) -> Question:
    if not isinstance(row, dict):
        _wrong(where, "", "an object", row)
    for key in row:
        if key not in _KEYS:
            hint = near(key, _KEYS) or f"; known: {', '.join(_KEYS)}"
            raise ChimsimError(f"{where}: unknown field {key!r}{hint}")
    for key in ("question", "kind"):
        if key not in row:
            raise ChimsimError(f"{where}: field {key!r} is missing")
    if row["kind"] not in KINDS:
        _wrong(where, "kind", "math or code", row["kind"], near(str(row["kind"]), KINDS))
    kind = cast(Kind, row["kind"])
    needed = "answer" if kind == "math" else "tests"
    if needed not in row:
        raise ChimsimError(f"{where}: field {needed!r} is missing, by which a {kind} question is judged")
    if kind == "math" and "tests" in row:
        raise ChimsimError(f"{where}: tests: a math question is judged by its answer; expected none")
    return Question(
        id=_text(row.get("id", default_id), where, "id"),
        kind=kind,
        workload=_text(row.get("workload", kind), where, "workload"),
        question=_text(row["question"], where, "question"),
        answer=_answer(row["answer"], where) if kind == "math" else "",
        tests=_tests(row["tests"], where) if kind == "code" else (),
    )


def _answer(value: object, where: str) -> str:
    if type(value) in (int, float):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        _wrong(where, "answer", "a number, or text that is not empty", value)
    return value.strip()


def _tests(value: object, where: str) -> str | tuple[Pair, ...]:
    if isinstance(value, str) and value.strip():
        try:
            compile(value, "tests", "exec")
        except (SyntaxError, ValueError) as error:
            raise ChimsimError(f"{where}: tests: not valid Python: {error}") from None
        return value
    if not isinstance(value, list) or not value:
        _wrong(where, "tests", "Python statements as text, or a list of {input, output}", value)
    return tuple(_pair(each, where, f"tests[{number}]") for number, each in enumerate(cast(Sequence[object], value)))


def _pair(value: object, where: str, path: str) -> Pair:
    if not isinstance(value, Mapping) or set(value) != {"input", "output"}:
        _wrong(where, path, "an object with input and output", value)
    for key in ("input", "output"):
        if not isinstance(value[key], str):
            _wrong(where, f"{path}.{key}", "text", value[key])
    return Pair(value["input"], value["output"])


def _text(value: Any, where: str, path: str) -> str:
    if not isinstance(value, str) or not value.strip():
        _wrong(where, path, "text that is not empty", value)
    return value


def _wrong(where: str, path: str, expected: str, found: object, hint: str = "") -> NoReturn:
    shown = repr(found) if len(repr(found)) <= _SHOWN else repr(found)[: _SHOWN - 3] + "..."
    raise ChimsimError(f"{where}: {path + ': ' if path else ''}expected {expected}, found {shown}{hint}")
