"""Judges answers: a maths answer by comparing it with the right one, a program by running hidden tests on it.

Both happen in child processes that can be killed. The limits of a program guard against accidents (endless loops, full
memories and disks); they are no sandbox, and a malicious program can read and delete what its user can.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from chimsim.errors import ChimsimError
from chimsim.live.questions import Question

HERE = Path(__file__).parent
COMPARE_S = 30.0
"""The longest comparison of two expressions; the library itself gives up after 5 s a step where it can."""
_ANSWER = re.compile(r"^\W*(?:the\s+)?(?:final\s+)?answer\W*?:\W*?(?P<answer>[^\s*_].*?)[\s*_]*$", re.IGNORECASE)
_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
_TEXT = re.compile(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an answer is right (None: not judged), and why, in a few words."""

    solved: bool | None
    why: str


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one run of a program. ``processes`` counts all of the user's: 1 lets it start none. Root has no such limit."""

    cpu_s: int = 10
    wall_s: float = 20.0
    memory_bytes: int = 2**30
    file_bytes: int = 16 * 2**20
    processes: int = 1


def math_answer(text: str) -> str | None:
    """What the last ``\\boxed{...}`` holds, else what follows ``Answer:`` in the last line, else None."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth = 0
        for at in range(start + 6, len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                return text[start + 7 : at].strip() or None
        start = text.rfind("\\boxed{", 0, start)  # the last one is not closed: cut off
    lines = text.strip().splitlines()
    match = _ANSWER.match(lines[-1]) if lines else None
    return match["answer"].strip() if match else None


def code_answer(text: str) -> str | None:
    """The last whole block between lines of three backquotes, None if there is none."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else None


class Grader:
    """Judges answers; use it as an asynchronous context manager. Raises `ChimsimError` if a package is missing.

    Without ``allow_code`` programs are not run and not judged.
    """

    def __init__(self, *, maths: bool, allow_code: bool, limits: Limits | None = None) -> None:
        if maths and find_spec("math_verify") is None:
            raise ChimsimError('maths answers are compared by math-verify: pip install "chimsim[collect]"')
        self._allow_code = allow_code
        self._limits = limits or Limits()
        self._math: asyncio.subprocess.Process | None = None
        self._one_comparison = asyncio.Lock()
        self._cores = asyncio.Semaphore(os.cpu_count() or 1)  # more at once would take each other's wall time

    async def __aenter__(self) -> Grader:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end_math()

    async def grade(self, question: Question, outputs: Sequence[str]) -> Verdict:
        """Judge what the agents said; of those after the planner the last one who gave an answer counts."""
        extract = math_answer if question.kind == "math" else code_answer
        given = next((found for text in reversed(outputs[1:]) if (found := extract(text)) is not None), None)
        if question.kind == "code" and not self._allow_code:
            return Verdict(None, "programs are not run")
        if given is None:
            return Verdict(False, "no answer found" if question.kind == "math" else "no program found")
        if question.kind == "code":
            return await run_tests(given, question, self._limits, self._cores)
        right = math_answer(question.answer) or question.answer
        solved = await self.equal(right, given)
        return Verdict(solved, f"answered {given if len(given) <= 60 else given[:57] + '...'}")

    async def equal(self, right: str, given: str) -> bool:
        """Whether both are the same in mathematics; words are compared as words."""
        words = _words(right)
        if words is not None:
            return words == _words(given)
        async with self._one_comparison:
            process = await self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps([right, given]).encode() + b"\n")
            try:
                return bool(json.loads(await asyncio.wait_for(process.stdout.readline(), COMPARE_S)))
            except (TimeoutError, json.JSONDecodeError):  # too long, or it died: no right answer takes that
                await self._end_math()
                return False

    async def _started(self) -> asyncio.subprocess.Process:
        """The process that compares, loaded; on a busy machine that takes its time, which is not the answer's."""
        if self._math is None:
            self._math = await asyncio.create_subprocess_exec(
                sys.executable, "-P", str(HERE / "math_check.py"),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
            assert self._math.stdout is not None
            if await self._math.stdout.readline() != b"ready\n":
                raise ChimsimError("math-verify cannot be loaded; python -c 'import math_verify' says why")
        return self._math

    async def _end_math(self) -> None:
        if self._math is not None:
            await _kill(self._math)
            self._math = None


async def run_tests(code: str, question: Question, limits: Limits, cores: asyncio.Semaphore) -> Verdict:
    """Run the question's tests on the program, until the first that fails."""
    if isinstance(question.tests, str):
        # Only what runs to its end says so: a program that leaves early has passed nothing.
        mark = secrets.token_hex(16)
        program = f"{code}\n\n{question.tests}\n\n__import__('os').write(1, b'{mark}')\n"
        async with cores:
            how, printed = await _run(program, "", limits)
        if how:
            return Verdict(False, f"tests: {how}")
        return Verdict(True, "tests passed") if mark in printed else Verdict(False, "tests: left before their end")
    for number, pair in enumerate(question.tests, 1):
        async with cores:
            how, printed = await _run(code, pair.input, limits)
        if how or _lines(printed) != _lines(pair.output):
            return Verdict(False, f"test {number} of {len(question.tests)}: {how or 'wrong output'}")
    return Verdict(True, f"{len(question.tests)} tests passed")


async def _run(program: str, given: str, limits: Limits) -> tuple[str, str]:
    """How it failed, empty if it did not, and what it printed (both streams go to files, which have a limit)."""
    with tempfile.TemporaryDirectory(prefix="chimsim-code-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "program.py").write_text(program, encoding="utf-8", errors="replace")
        (folder / "stdin").write_text(given, encoding="utf-8", errors="replace")
        numbers = (limits.cpu_s, limits.memory_bytes, limits.file_bytes, limits.processes)
        with open(folder / "stdin", "rb") as stdin, open(folder / "stdout", "w+b") as stdout:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", str(HERE / "code_run.py"), str(folder / "program.py"), *map(str, numbers),
                stdin=stdin, stdout=stdout, stderr=asyncio.subprocess.DEVNULL, cwd=folder, start_new_session=True,
                env={"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": name, "TMPDIR": name, "OPENBLAS_NUM_THREADS": "1"},
            )  # fmt: skip
            try:
                code = await asyncio.wait_for(process.wait(), limits.wall_s)
                how = "" if code == 0 else _ended(code)
            except TimeoutError:
                how = f"longer than {limits.wall_s:g} s"
            finally:
                await _kill(process)  # also what it started and left behind
            stdout.seek(0)
            return how, stdout.read().decode(errors="replace")


def _ended(code: int) -> str:
    if code > 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


async def _kill(process: asyncio.subprocess.Process) -> None:
    """End the process and its group, and wait for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _lines(text: str) -> list[list[str]]:
    """The words of every line; empty lines at the end do not count."""
    return [line.split() for line in text.rstrip().splitlines()]


def _words(text: str) -> str | None:
    """The text without markup in lower case if it is of words, at least three letters: no product of variables."""
    plain = " ".join(_TEXT.sub(r"\1", text).replace("$", "").strip(" .").lower().split())
    return plain if len(plain) >= 3 and plain.replace(" ", "").isalpha() else None
