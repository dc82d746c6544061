"""`chimsim collect` as a user runs it: against fake engines, resumed, and with everything that can be given wrongly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from chimsim import load_cluster, simulate
from chimsim.live import collect as collecting
from chimsim.live import grading
from chimsim.live.questions import read_questions
from chimsim.live.roles import load_roles
from tests.chimsim.live.chats import MODEL, Chats, chatting
from tests.chimsim.live.served import engines_served
from tests.chimsim.small import run_chimsim
from traces import load_trace

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "questions.jsonl"
Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Main:
    """Run ``chimsim collect`` in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(collecting, "PAUSES_S", (0.01,))

    def run(*arguments: str) -> tuple[int, str, str]:
        return run_chimsim(monkeypatch, capsys, "collect", *arguments)

    return run


def write_cluster(url: str = "http://127.0.0.1:9") -> None:
    Path("live.toml").write_text(f'[[engine]]\nmodel = "{MODEL}"\nurl = "{url}"\n')


def write_questions(*rows: dict[str, object]) -> None:
    Path("q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


SUM: dict[str, object] = {"question": "2 + 2?", "answer": "four", "kind": "math"}


def test_the_example_on_fake_engines_gives_a_trace_that_can_be_simulated(main: Main, tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    with engines_served(tmp_path, ["qwen1.5b", "qwen7b"], speed=200.0) as cluster:
        options = ("--cluster", str(cluster), "--out", "t.jsonl.gz", "--max-tokens", "40")
        code, out, err = main(str(EXAMPLE), *options)
    assert code == 0, err
    assert "programs are not run and get no label" in err
    assert max(map(len, out.splitlines())) <= 80
    trace = load_trace("t.jsonl.gz")
    assert trace.models == ("Qwen2.5-1.5B", "Qwen2.5-7B")
    assert [workflow.workflow_id for workflow in trace.workflows] == [q.id for q in read_questions(EXAMPLE)]
    labels = {workflow.workload: workflow.runs[MODEL].solved for workflow in trace.workflows}
    assert labels == {"math": False, "code": None}  # words without meaning solve nothing
    result = simulate(trace, load_cluster("qwen1.5b+7b"), "stjf", rps=2, seed=0)
    assert len(result.workflows) == 7


def test_the_table_and_the_numbers(main: Main) -> None:
    pytest.importorskip("math_verify")
    write_questions(SUM | {"answer": 4}, SUM | {"answer": 5}, SUM | {"answer": "\\frac{8}{2}"})
    with chatting(Chats(lambda system, user: "\\boxed{4}")) as url:
        write_cluster(url)
        code, out, _ = main("q.jsonl", "--cluster", "live.toml", "--out", "t.jsonl", "--json")
    assert code == 0
    answer = json.loads(out)
    row = answer["models"][0]
    assert (answer["left_out"], row["runs"], row["judged"], row["cut"]) == (0, 3, 3, 0)
    assert row["solved_rate"] == pytest.approx(2 / 3)
    # Wilson's interval of 2 of 3
    assert (row["solved_low"], row["solved_high"]) == (pytest.approx(0.2077, abs=1e-4), pytest.approx(0.9385, abs=1e-4))
    assert row["stages"]["solver"]["output_tokens"] == len("\\boxed{4}")
    # again, with no engine there: all is in the journal
    code, out, _ = main("q.jsonl", "--cluster", "live.toml", "--out", "t.jsonl")
    assert code == 0
    assert "66.7 % 21-94" in " ".join(out.split())
    assert "written: t.jsonl (3 workflows); journal: t.jsonl.journal" in out


def test_a_refused_question_is_told_and_left_out_until_it_is_asked_again(main: Main) -> None:
    pytest.importorskip("math_verify")
    write_questions(SUM, SUM)
    options = ("q.jsonl", "--cluster", "live.toml", "--out", "t.jsonl", "--concurrency", "1")
    with chatting(Chats(statuses=[400])) as url:
        write_cluster(url)
        code, _, err = main(*options)
    assert code == 0
    assert f"failed: q00001 on {MODEL}" in err
    assert "1 questions lack a run of some model and are left out" in err
    assert len(load_trace("t.jsonl").workflows) == 1
    with chatting(Chats()) as url:
        write_cluster(url)
        assert main(*options)[0] == 0
    assert len(load_trace("t.jsonl").workflows) == 2


def test_code_needs_no_library_for_maths_and_has_no_rate_until_it_is_run(
    main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading, "find_spec", lambda name: None)
    write_questions({"question": "Define two().", "kind": "code", "tests": "assert two() == 2"})
    with chatting(Chats(lambda system, user: "```\ndef two(): return 2\n```")) as url:
        write_cluster(url)
        usual = ("q.jsonl", "--cluster", "live.toml", "--out")
        _, unjudged, _ = main(*usual, "t.jsonl")
        _, judged, _ = main(*usual, "u.jsonl", "--allow-code")
    assert unjudged.splitlines()[1].split()[:5] == [MODEL, "1", "0", "-", "-"]
    assert judged.splitlines()[1].split()[:5] == [MODEL, "1", "1", "100.0", "%"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?", "answer": 1, "kind": "maths"}, "q.jsonl:2: kind: expected math or code, found 'maths'"),
        ({"question": "?", "anwser": 1, "kind": "math"}, "q.jsonl:2: unknown field 'anwser'; did you mean 'answer'?"),
        ({"answer": 1, "kind": "math"}, "q.jsonl:2: field 'question' is missing"),
        ({"question": " ", "answer": 1, "kind": "math"}, "q.jsonl:2: question: expected text that is not empty"),
        ({"question": "?", "kind": "math"}, "q.jsonl:2: field 'answer' is missing"),
        ({"question": "?", "answer": "", "kind": "math"}, "q.jsonl:2: answer: expected a number, or text"),
        ({"question": "?", "answer": True, "kind": "math"}, "q.jsonl:2: answer: expected a number, or text"),
        ({"question": "?", "kind": "code"}, "q.jsonl:2: field 'tests' is missing"),
        ({"question": "?", "kind": "code", "tests": "assert ("}, "q.jsonl:2: tests: not valid Python"),
        ({"question": "?", "kind": "code", "tests": []}, "q.jsonl:2: tests: expected Python statements"),
        ({"question": "?", "kind": "code", "tests": [{"input": ""}]}, "q.jsonl:2: tests[0]: expected an object"),
        (
            {"question": "?", "kind": "code", "tests": [{"input": "", "output": 4}]},
            "q.jsonl:2: tests[0].output: expected text, found 4",
        ),
        (
            {"id": "q00001", "question": "?", "answer": 1, "kind": "math"},
            "q.jsonl:2: id: 'q00001' is that of q.jsonl:1",
        ),
    ],
)
def test_a_wrong_question_is_one_line_with_its_place(main: Main, row: dict[str, object], message: str) -> None:
    write_questions(SUM, row)
    write_cluster()
    code, _, err = main("q.jsonl", "--cluster", "live.toml", "--out", "t.jsonl")
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "{{planner}}",
            "{{planer}}",
            "[math.solver]: user has an unknown placeholder {{planer}}; did you mean 'planner'",
        ),
        ("{{planner}}", "the plan", "[math.solver]: user lacks the placeholder {{planner}}"),
        ("[math.solver]", "[math.solvr]", "[math]: unknown stage 'solvr'; did you mean 'solver'?"),
        ("[code.qa]", "[codes.qa]", "unknown kind of question 'codes'; did you mean 'code'?"),
        ("max_tokens = 1024", "max_tokens = 0", "[math.verifier]: max_tokens is 0; expected a whole number above 0"),
        ("You are the solver", "{{question}}", "[math.solver]: system has a placeholder"),
        ("[math.planner]", "[math.planner", "not valid TOML"),
    ],
)
def test_a_wrong_prompts_file_is_one_line_with_its_place(main: Main, old: str, new: str, message: str) -> None:
    write_questions(SUM)
    write_cluster()
    assert main("--write-prompts", "mine.toml")[:2] == (0, "written: mine.toml\n")
    text = Path("mine.toml").read_text()
    assert load_roles(Path("mine.toml")) == load_roles()
    # comments of the file are no part of it
    head, rest = text.split("[math.planner]", 1)
    Path("mine.toml").write_text(head + ("[math.planner]" + rest).replace(old, new, 1))
    code, _, err = main("q.jsonl", "--cluster", "live.toml", "--out", "t.jsonl", "--prompts", "mine.toml")
    assert code == 2
    assert f"mine.toml: {message}" in err
    assert len(err.splitlines()) == 1


def test_wrong_options_are_told_before_anything_is_asked(main: Main) -> None:
    pytest.importorskip("math_verify")
    write_questions(SUM)
    write_cluster()

    def error(*arguments: str) -> str:
        code, _, err = main(*arguments)
        assert code == 2
        return err

    usual = ("q.jsonl", "--cluster", "live.toml")
    assert "QUESTIONS is missing" in error()
    assert "--out is missing" in error(*usual)
    assert "expected a trace file ending in" in error(*usual, "--out", "t.csv")
    assert "there is no folder" in error(*usual, "--out", "no/t.jsonl")
    assert "nope.jsonl: there is no such file" in error("nope.jsonl", "--cluster", "live.toml", "--out", "t.jsonl")
    assert "no connection" in error(*usual, "--out", "t.jsonl")
    assert not Path("t.jsonl.journal").exists()
    Path("t.jsonl").write_text("mine")
    assert "t.jsonl exists and has no journal" in error(*usual, "--out", "t.jsonl")
    Path("bare.toml").write_text(f'[[engine]]\nmodel = "{MODEL}"\n')
    assert f"engine {MODEL} has no url" in error("q.jsonl", "--cluster", "bare.toml", "--out", "u.jsonl")
    with chatting(Chats(max_model_len=1000)) as url:
        write_cluster(url)
        told = error(*usual, "--out", "u.jsonl")
    assert "a context of 1,000 tokens, and the answers of a math workflow may have 3,584; give a smaller" in told
