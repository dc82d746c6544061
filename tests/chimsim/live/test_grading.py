"""Grading: what counts as an answer, which answers are the same, and that no program gets past its limits."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from chimsim.errors import ChimsimError
from chimsim.live import grading
from chimsim.live.grading import Grader, Limits, Verdict, code_answer, math_answer
from chimsim.live.questions import Pair, Question

TIGHT = Limits(cpu_s=1, wall_s=15.0, memory_bytes=2**28, file_bytes=2**20)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{3}, or rather \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{7}, and then \\boxed{\\frac{1", "7"),
        ("work\nAnswer: -5", "-5"),
        ("**Final answer:** 42", "42"),
        ("Answer: 3\nbut then it went on", None),
        ("the answer is 5", None),
        ("\\boxed{}", None),
        ("", None),
    ],
)
def test_the_final_answer_is_the_last_box_or_the_last_line(text: str, answer: str | None) -> None:
    assert math_answer(text) == answer


def test_the_last_whole_block_is_the_program() -> None:
    text = "```python\na = 1\n```\nbetter:\n```py\na = 2\n```\nor\n```\na = 3\n"
    assert code_answer(text) == "a = 2\n"
    assert code_answer("use `a = 1`") is None


def test_answers_are_compared_as_mathematics_and_words_as_words() -> None:
    pytest.importorskip("math_verify")
    same = [
        ("1/2", "0.5"), ("\\frac12", "1/2"), ("0.5", "\\dfrac{1}{2}"), ("1000", "1,000"), ("5", "5\\text{ cm}"),
        ("3", "x = 3"), ("2\\sqrt{3}", "\\sqrt{12}"), ("\\{1,2\\}", "\\{2, 1\\}"), ("$4$", "4"),
        ("\\text{Even}", "even"),
    ]  # fmt: skip
    other = [("7", "8"), ("1/3", "0.33"), ("(1,2)", "(2,1)"), ("even", "vnee"), ("5", "}{"), ("[0,1)", "[0,1]")]

    async def wrong() -> list[tuple[str, str]]:
        async with Grader(maths=True, allow_code=False) as grader:
            return [(a, b) for a, b in same + other if await grader.equal(a, b) != ((a, b) in same)]

    assert asyncio.run(wrong()) == []


def test_a_comparison_that_hangs_is_ended_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")

    async def both() -> tuple[bool, bool]:
        async with Grader(maths=True, allow_code=False) as grader:
            assert await grader.equal("1", "1")
            monkeypatch.setattr(grading, "COMPARE_S", 0.1)
            hung = await grader.equal("5", "9^{9^{9^{9^9}}}")
            monkeypatch.setattr(grading, "COMPARE_S", 30.0)
            return hung, await grader.equal("4", "2^2")

    assert asyncio.run(both()) == (False, True)


def test_a_missing_library_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "find_spec", lambda name: None)
    Grader(maths=False, allow_code=True)
    with pytest.raises(ChimsimError, match=r'pip install "chimsim\[collect\]"'):
        Grader(maths=True, allow_code=False)


def judge(
    code: str, tests: str | tuple[Pair, ...], limits: Limits = TIGHT, *, later: Sequence[str] = (), allow: bool = True
) -> Verdict:
    async def run() -> Verdict:
        async with Grader(maths=False, allow_code=allow, limits=limits) as grader:
            question = Question("q", "code", "code", "?", tests=tests)
            return await grader.grade(question, ["a plan", f"```python\n{code}\n```", *later])

    return asyncio.run(run())


def test_programs_that_pass_and_that_fail() -> None:
    add = "def add(a, b):\n    return a + b"
    assert judge(add, "assert add(1, 2) == 3") == Verdict(True, "tests passed")
    assert judge(add, "assert add(1, 2) == 4") == Verdict(False, "tests: exit code 1")
    double = "print(2 * int(input()))"
    assert judge(double, (Pair("2\n", "4"), Pair("3\n", "6 \n\n"))) == Verdict(True, "2 tests passed")
    assert judge(double, (Pair("2\n", "4"), Pair("3\n", "5"))) == Verdict(False, "test 2 of 2: wrong output")


def test_the_last_agent_with_a_program_counts() -> None:
    tests = "assert f() == 2"
    assert judge("def f(): return 2", tests, later=["It is right."]).solved
    assert not judge("def f(): return 2", tests, later=["```\ndef f(): return 3\n```"]).solved


def test_without_leave_no_program_is_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    assert judge(f"open({str(made)!r}, 'w')", "pass", allow=False) == Verdict(None, "programs are not run")
    assert not made.exists()


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("while True: pass", "tests: killed by SIGXCPU"),
        ("hog = bytearray(2**29)", "tests: exit code 1"),
        ("open('large', 'wb').write(b'0' * 2**22)", "tests: exit code 1"),
        ("for _ in range(2**18): print('x' * 100)", "tests: exit code 1"),
        ("import sys; sys.exit(0)", "tests: left before their end"),
        ("import os; os._exit(0)", "tests: left before their end"),
        ("input()", "tests: exit code 1"),
    ],
)
def test_every_limit_ends_the_program(code: str, why: str) -> None:
    assert judge(code, "pass") == Verdict(False, why)


def test_a_program_that_waits_is_ended_by_the_clock() -> None:
    limits = Limits(wall_s=0.3)
    assert judge("import time; time.sleep(600)", "pass", limits) == Verdict(False, "tests: longer than 0.3 s")


def test_what_a_program_leaves_behind_is_ended(tmp_path: Path) -> None:
    # root may start processes whatever the limit says
    note = tmp_path / "pid"
    code = f"import os, time\npid = os.fork()\nif not pid: time.sleep(600)\nopen({str(note)!r}, 'w').write(str(pid))"
    verdict = judge(code, "pass")
    if os.geteuid():
        assert verdict == Verdict(False, "tests: exit code 1")
    else:
        assert verdict.solved
        status = Path(f"/proc/{note.read_text()}/stat")
        for _ in range(100):
            if not status.exists() or ") Z " in status.read_text():
                return
            time.sleep(0.05)  # it has been killed, and the system is ending it
        pytest.fail("the process is still there")


def test_a_program_sees_neither_our_environment_nor_our_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", "secret")
    ours = "['program.py', 'stdin', 'stdout']"
    assert judge("import os", f"assert 'ENGINE_KEY' not in os.environ\nassert sorted(os.listdir()) == {ours}").solved
