"""The `chimsim trace` commands, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chimsim.trace_cli import trace_app
from tests.traces.builders import row, write_lines
from traces import TraceError, read_trace

MOONCAKE = (
    '{"timestamp": 0, "input_length": 600, "output_length": 52, "hash_ids": [0, 1]}\n'
    '{"timestamp": 500, "input_length": 512, "output_length": 0, "hash_ids": [0]}\n'
)


def run(*words: object) -> tuple[str, str]:
    result = CliRunner().invoke(trace_app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


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
    assert said == f"{out}: 2 workflows, models A, B\n"
    assert "mooncake does not say which calls belong to one conversation" in noted
    assert "1 calls without output got one token" in noted
    assert read_trace(out).models == ("A", "B")


def test_import_refuses_an_unknown_output_format_before_reading(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"expected a trace file ending in \.jsonl"):
        run("import", tmp_path / "none", "--format", "azure", "--model", "A", "-o", tmp_path / "x.csv")


def test_generate_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        run("generate", "--params", "maths", "--workflows", 20, "--seed", 3, "-o", tmp_path / name)
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    with pytest.raises(TraceError, match="layout 'history' is unknown; did you mean 'history-first'"):
        run("generate", "--layout", "history", "-o", tmp_path / "c.jsonl")


@pytest.mark.parametrize("command", ["describe", "validate", "import", "generate"])
def test_help_shows_an_example(command: str) -> None:
    assert f"Example: chimsim trace {command}" in run(command, "--help")[0]
