"""Collecting against a chat server whose answers are known: lengths, labels, retries, lost engines, the journal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chimsim.config import load_cluster
from chimsim.errors import ChimsimError
from chimsim.live import collect as collecting
from chimsim.live.collect import Failure, Sampling, collect, servers, settings_of, trace_of
from chimsim.live.grading import Grader
from chimsim.live.journal import open_journal
from chimsim.live.questions import Question
from chimsim.live.roles import Roles, load_roles
from tests.chimsim.live.chats import MODEL, Chats, chatting, template
from traces import Trace, load_trace, write_trace

SUM = Question("sum", "math", "sums", "What is 2 + 2, in words?", answer="four")
"""Words are compared without the library for maths, which takes a second to load."""
CODE = Question("code", "code", "code", "Define two().", tests="assert two() == 2")


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "PAUSES_S", (0.01, 0.01))
    monkeypatch.setattr(collecting, "PROBE_S", 0.01)
    monkeypatch.setattr(collecting, "BACK_S", 0.1)


def answers(system: str, user: str) -> str:
    """A team of which the coder is right and QA confirms, the solver is wrong and the verifier right."""
    for name, text in (
        ("solver", "\\boxed{five}"),
        ("verifier", "no: \\boxed{four}"),
        ("programmer", "```python\ndef two():\n    return 2\n```"),
        ("quality", "It is right."),
    ):
        if f"You are the {name}" in system:
            return text
    return "a plan"


def run(
    folder: Path,
    chats: Chats | Sequence[Chats],
    questions: Sequence[Question] = (SUM,),
    *,
    roles: Roles | None = None,
    concurrency: int = 1,
    **sampling: Any,
) -> tuple[Trace, list[Failure]]:
    """One collection into the folder's journal, all chats being engines of one model: the trace, and what failed."""
    roles = roles or load_roles()
    failures: list[Failure] = []
    with ExitStack() as stack:
        several = [chats] if isinstance(chats, Chats) else chats
        urls = [stack.enter_context(chatting(each)) for each in several]
        path = folder / "live.toml"
        path.write_text("".join(f'[[engine]]\nmodel = "{MODEL}"\nurl = "{url}"\n' for url in urls))
        cluster = load_cluster(path)
        drawn = Sampling(**sampling)
        settings = settings_of(questions, roles, cluster, drawn, allow_code=True)
        journal = stack.enter_context(open_journal(folder / "out.journal", settings))

        async def work() -> None:
            async with Grader(maths=False, allow_code=True) as grader, servers(cluster, 5.0) as found:
                await collect(
                    questions, found, roles, drawn, grader, journal, concurrency=concurrency,
                    hear=lambda event: failures.append(event) if isinstance(event, Failure) else None,
                )  # fmt: skip

        asyncio.run(work())
        return trace_of("out", questions, cluster.models, journal), failures


def sums(count: int) -> list[Question]:
    return [replace(SUM, id=f"sum{number}", question=f"What is 2 + 2? ({number})") for number in range(count)]


def test_both_workflows_with_their_lengths_texts_and_labels(tmp_path: Path) -> None:
    chats = Chats(answers)
    trace, failures = run(tmp_path, chats, (SUM, CODE), temperature=0.5, seed=3)
    assert failures == []
    write_trace(trace, tmp_path / "out.jsonl.gz")
    maths, code = load_trace(tmp_path / "out.jsonl.gz").workflows
    assert (maths.workflow_id, maths.workload, maths.prompt) == ("sum", "sums", SUM.question)
    for workflow, names in ((maths, ["planner", "solver", "verifier"]), (code, ["planner", "coder", "qa"])):
        assert workflow.runs[MODEL].solved is True
        assert [stage.name for stage in workflow.runs[MODEL].stages] == names
    roles = load_roles().of["math"]
    said = {"question": SUM.question}
    for stage, role in zip(maths.runs[MODEL].stages, roles, strict=True):
        user = role.fill(said)
        said[role.name] = answers(role.system, user)
        assert stage.output == said[role.name]
        assert stage.output_tokens == len(said[role.name])
        whole = template([{"role": "system", "content": role.system}, {"role": "user", "content": user}])
        before = len(f"<system>{role.system}<user>")
        assert (stage.prompt_tokens, stage.system_tokens, stage.user_tokens) == (
            len(whole),
            before,
            len(whole) - before,
        )
        assert stage.shared_prefix is not None
        assert (stage.shared_prefix.id, stage.shared_prefix.tokens) == (f"math-{role.name}", before)
        assert stage.reused_tokens == 0
    assert "no: \\boxed{four}" not in chats.bodies[1]["messages"][1]["content"]
    assert {(body["temperature"], body["seed"]) for body in chats.bodies} == {(0.5, 3)}
    assert [body["max_tokens"] for body in chats.bodies[:3]] == [role.max_tokens for role in roles]


def test_a_common_system_message_makes_the_true_common_prefix_reused(tmp_path: Path) -> None:
    shipped = load_roles()
    alike = Roles(
        {kind: tuple(replace(role, system="Work.") for role in stages) for kind, stages in shipped.of.items()}
    )
    trace, _ = run(tmp_path, Chats(), roles=alike)
    stages = trace.workflows[0].runs[MODEL].stages
    common = f"<system>Work.<user>Problem:\n{SUM.question}\n\n"
    assert [stage.reused_tokens for stage in stages] == [0, len(common), len(f"{common}The ")]
    assert {stage.shared_prefix.id for stage in stages if stage.shared_prefix} == {"math-planner"}


def test_a_server_that_does_not_tokenize_leaves_parts_unknown_and_nothing_reused(tmp_path: Path) -> None:
    trace, _ = run(tmp_path, Chats(tokenizes=False))
    write_trace(trace, tmp_path / "out.jsonl")
    for stage in load_trace(tmp_path / "out.jsonl").workflows[0].runs[MODEL].stages:
        assert (stage.system_tokens, stage.user_tokens, stage.shared_prefix, stage.reused_tokens) == (
            None,
            None,
            None,
            0,
        )


def test_a_busy_engine_is_asked_again_and_a_refused_question_is_left_out(tmp_path: Path) -> None:
    trace, failures = run(tmp_path, Chats(statuses=[503, 500, 200, 200, 200, 400]), sums(3))
    assert [workflow.workflow_id for workflow in trace.workflows] == ["sum0", "sum2"]
    assert [(failure.question, failure.model) for failure in failures] == [("sum1", MODEL)]
    assert "answered 400" in failures[0].reason


def test_the_same_command_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    journal = tmp_path / "out.journal"
    whole, _ = run(tmp_path, Chats(), sums(3))
    data = journal.read_bytes()
    journal.write_bytes(data[:-40])  # as a crash in the middle of writing leaves it
    chats = Chats()
    again, _ = run(tmp_path, chats, sums(3))
    assert again.workflows == whole.workflows
    assert len(chats.bodies) == 3
    assert "(2)" in chats.bodies[0]["messages"][1]["content"]
    assert journal.read_bytes() == data


def test_other_settings_than_the_journals_are_refused_with_what_differs(tmp_path: Path) -> None:
    run(tmp_path, Chats(), sums(1))
    shorter = load_roles().limited(7)
    with pytest.raises(ChimsimError, match=r"max_tokens .* there, .* here; temperature 0.0 there, 1.0 here; repeat"):
        run(tmp_path, Chats(), sums(1), roles=shorter, temperature=1.0)
    with pytest.raises(ChimsimError, match=r"other settings: the questions differ in content; repeat"):
        run(tmp_path, Chats(), sums(2))


def test_a_damaged_journal_is_told_with_its_line_and_a_foreign_file_left_alone(tmp_path: Path) -> None:
    journal = tmp_path / "out.journal"
    run(tmp_path, Chats(), sums(2))
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text(lines[0] + '{"half\n' + lines[2])
    with pytest.raises(ChimsimError, match=r"out.journal:2: not valid JSON"):
        run(tmp_path, Chats(), sums(2))
    journal.write_text("a diary\n")
    with pytest.raises(ChimsimError, match="is it a journal"):
        run(tmp_path, Chats(), sums(2))
    assert journal.read_text() == "a diary\n"


def test_a_second_writer_is_kept_out_and_nothing_done_leaves_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "out.journal"
    with open_journal(path, {"seed": 1}):
        with pytest.raises(ChimsimError, match="another chimsim is writing"), open_journal(path, {"seed": 1}):
            pass
        assert json.loads(path.read_text())["settings"] == {"seed": 1}
    assert not path.exists()


def test_an_engine_that_is_lost_leaves_its_questions_to_the_others(tmp_path: Path) -> None:
    lost = Chats(statuses=[500] * 100, healthy=False)
    trace, failures = run(tmp_path, [lost, Chats()], sums(4))
    assert len(trace.workflows) == 4
    assert failures == []
    assert lost.bodies


def test_without_an_engine_left_it_ends_and_keeps_what_is_finished(tmp_path: Path) -> None:
    lost = Chats(statuses=[200] * 3 + [500] * 100, healthy=False)
    with pytest.raises(ChimsimError, match=rf"no engine of {MODEL} answers any more: .*answered 500"):
        run(tmp_path, lost, sums(2))
    assert len((tmp_path / "out.journal").read_text().splitlines()) == 2
