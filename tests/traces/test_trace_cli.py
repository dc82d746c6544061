"""The `chimsim trace` commands, through the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chimsim.trace_cli import trace_app
from tests.traces.builders import row, write_lines
from traces import TraceError, read_trace, workflow_from_dict

MOONCAKE = (
    '{"timestamp": 0, "input_length": 600, "output_length": 52, "hash_ids": [0, 1]}\n'
    '{"timestamp": 500, "input_length": 512, "output_length": 0, "hash_ids": [0]}\n'
)


def run(*words: object) -> tuple[str, str]:
    """What a command prints, and what it says besides, wherever the lines of that break."""
    result = CliRunner().invoke(trace_app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stderr.splitlines()), default=0) <= 80
    return result.stdout, " ".join(result.stderr.split())


def test_describe_fits_eighty_columns() -> None:
    table, _ = run("describe", "apps")
    assert max(map(len, table.splitlines())) <= 80
    assert "apps: 2400 workflows of apps; no arrival times" in table
    (line,) = [line for line in table.splitlines() if line.startswith("Qwen2.5-14B")]
    assert line.split()[1] == "2400"


def test_describe_as_json_is_measured(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [row("a", arrival_s=1), row("b", arrival_s=3)])
    found = json.loads(run("describe", path, "--json")[0])
    assert found["workflows"] == 2
    assert found["arrivals_per_s"] == 0.5
    assert [model["model"] for model in found["models"]] == ["Qwen2.5-1.5B", "Qwen2.5-7B"]
    assert found["models"][0] == found["models"][1] | {"model": "Qwen2.5-1.5B"}
    assert (found["models"][0]["solved_rate"], found["models"][0]["output_mean"]) == (1.0, 20.0)


def test_validate(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [row("a"), row("b")])
    assert run("validate", path)[0] == (
        "ok: 2 workflows, 4 calls, without arrival times, models Qwen2.5-1.5B, Qwen2.5-7B\n"
    )
    write_lines(path, [row("a"), row("a")])
    with pytest.raises(TraceError, match=r"a\.jsonl:2: workflow_id"):
        run("validate", path)


def test_import_says_what_the_format_lacks(tmp_path: Path) -> None:
    source, out = tmp_path / "calls.jsonl", tmp_path / "out.parquet"
    source.write_text(MOONCAKE)
    said, noted = run("import", source, "--format", "mooncake", "--model", "A, B", "-o", out)
    assert said == f"{out}: 2 workflows, 2 calls, models A, B\n"
    assert "mooncake does not say names of calls, texts and, without session_id, conversations" in noted
    assert "1 calls without output got one token" in noted
    assert read_trace(out).models == ("A", "B")


def test_import_refuses_an_unknown_output_format_before_reading(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"expected a trace file ending in \.jsonl"):
        run("import", tmp_path / "none", "--format", "azure", "--model", "A", "-o", tmp_path / "x.csv")


def test_import_of_a_file_in_another_unit(tmp_path: Path) -> None:
    source, out = tmp_path / "calls.jsonl", tmp_path / "out.jsonl"
    source.write_text(MOONCAKE.replace('"timestamp": 500', '"timestamp": 0.5'))
    command = ("import", source, "--format", "mooncake", "--model", "A", "-o", out)
    assert "0.0005 s apart on average; if they are in another unit, say so: --time-unit s" in run(*command)[1]
    assert "apart" not in run(*command, "--time-unit", "s")[1]
    assert [workflow.arrival_s for workflow in read_trace(out).workflows] == [0.0, 0.5]


def test_export_says_what_the_format_lacks_and_reads_back(tmp_path: Path) -> None:
    out, again = tmp_path / "out.jsonl", tmp_path / "again.jsonl"
    source = write_lines(tmp_path / "a.jsonl", [row("a"), row("b")])
    said, noted = run("export", source, "--format", "agentic_mooncake", "--model", "Qwen2.5-7B", "--rps", 2, "-o", out)
    assert said == f"{out}: 2 workflows, 2 calls, blocks of 512 tokens\n"
    assert "agentic_mooncake does not say the labels, the runs of Qwen2.5-1.5B" in noted
    run("import", out, "--format", "agentic_mooncake", "-o", again)
    assert read_trace(again).models == ("Qwen2.5-7B",)
    assert [workflow.workflow_id for workflow in read_trace(again).workflows] == ["a", "b"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "Qwen2.5-7B"], "has no arrival times, which mooncake asks for: give a rate with --rps"),
        (["--rps", 1], "has runs of Qwen2.5-1.5B, Qwen2.5-7B: choose one with --model"),
        (["--rps", 1, "--model", "Qwen2.5-8B"], "has no run of 'Qwen2.5-8B'; did you mean 'Qwen2.5-7B'"),
        (["--rps", 1, "--model", "Qwen2.5-7B", "--seed", -1], "seed: expected an integer, at least 0, found -1"),
        (["-o", "x.csv"], r"x\.csv: expected a file ending in \.jsonl"),
    ],
)
def test_export_refuses(tmp_path: Path, words: list[object], message: str) -> None:
    source = write_lines(tmp_path / "a.jsonl", [row("a")])
    with pytest.raises(TraceError, match=message):
        run("export", source, "--format", "mooncake", "-o", tmp_path / "o.jsonl", *words)


def test_generate_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        run("generate", "--params", "maths", "--workflows", 20, "--seed", 3, "-o", tmp_path / name)
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    with pytest.raises(TraceError, match="layout 'history' is unknown; did you mean 'history-first'"):
        run("generate", "--layout", "history", "-o", tmp_path / "c.jsonl")


@pytest.mark.parametrize("command", ["describe", "validate", "import", "export", "generate"])
def test_help_shows_an_example(command: str) -> None:
    assert f"Example: chimsim trace {command}" in run(command, "--help")[0]


def test_the_examples_of_the_readme_are_traces() -> None:
    readme = (Path(__file__).parents[2] / "traces" / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"```json\n(.*?)```", readme, re.DOTALL)
    assert [len(workflow_from_dict(json.loads(example), "README").runs) for example in examples] == [2, 1]


def test_a_trace_is_the_same_in_every_format(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [row("a", arrival_s=1), row("b", arrival_s=3)])
    paths = [tmp_path / f"b{suffix}" for suffix in (".parquet", ".jsonl.gz", ".jsonl")]
    said = [run("convert", before, "-o", path)[0] for before, path in zip([source, *paths], paths, strict=False)]
    assert read_trace(paths[-1]).workflows == read_trace(source).workflows
    assert {text.split(": ")[1] for text in said} == {f"2 workflows, sha256 {read_trace(source).digest}\n"}


@pytest.mark.parametrize(
    "command", [("convert",), ("scale", "--lengths", 0.5), ("export", "--format", "mooncake", "--rps", 1)]
)
def test_what_is_made_of_a_file_does_not_take_its_place(tmp_path: Path, command: tuple[object, ...]) -> None:
    path = tmp_path / "trace.jsonl"
    write_lines(path, [row()])
    before = path.read_bytes()
    name, *rest = command
    with pytest.raises(TraceError, match="is the file that is read"):
        CliRunner().invoke(trace_app, [str(name), str(path), *map(str, rest), "-o", str(path)], catch_exceptions=False)
    assert path.read_bytes() == before
