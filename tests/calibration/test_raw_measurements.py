"""The raw file: what is written comes back, a crash costs one line, another engine's file is told apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from calibration.figures import ProfileError
from calibration.raw_measurements import Measurement, RawWriter, Skipped, read_raw
from tests.calibration.test_measured_fit import HEADER

DECODE = Measurement("2 decodes after 128", 1, "decode", 2, 300.5, 0, 0, 48.0, 1.25)
SKIPPED = Skipped("4 decodes after 8192", 0, "does not fit")


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    path = tmp_path / "raw.jsonl"
    writer = RawWriter(path, HEADER)
    writer.write(DECODE)
    writer.write(SKIPPED)
    return path


def test_what_is_written_comes_back(raw: Path) -> None:
    found = read_raw(raw)
    assert (found.header, found.measurements, found.skipped) == (HEADER, (DECODE,), (SKIPPED,))
    assert found.done == {("2 decodes after 128", 1), ("4 decodes after 8192", 0)}


def test_a_torn_last_line_is_left_out_and_cut_off_before_going_on(raw: Path) -> None:
    with raw.open("a", encoding="utf-8") as file:
        file.write('{"cell": "torn", "rep')
    assert read_raw(raw).measurements == (DECODE,)
    again = replace(DECODE, repeat=2)
    RawWriter(raw, HEADER).write(again)
    assert read_raw(raw).measurements == (DECODE, again)
    assert all(json.loads(line) for line in raw.read_text("utf-8").splitlines())


def test_another_engine_is_told_apart_by_what_matters() -> None:
    assert HEADER.differences(replace(HEADER, date="2027-01-01", url="http://elsewhere", cache_config={})) == []
    other = HEADER.differences(replace(HEADER, version="0.20.0", num_kv_tokens=1))
    assert other == ["version '0.19.0' there, '0.20.0' here", "num_kv_tokens 40000 there, 1 here"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"raw.jsonl:4: not valid JSON"),
        ("[1]", r"raw.jsonl:4: expected an object"),
        ('{"cell": "x"}', "repeat, kind"),
        (json.dumps({"cell": "x", "secnds": 1}), "did you mean 'seconds'"),
        ('{"kind": "skipped", "cell": "x"}', "repeat, reason missing"),
    ],
)
def test_a_wrong_line_is_named(raw: Path, line: str, message: str) -> None:
    with raw.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    with pytest.raises(ProfileError, match=message):
        read_raw(raw)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "decod"}, "kind is 'decod'"),
        ({"seconds": 0.0}, "seconds is 0"),
        ({"seconds": -1.0}, "seconds is -1.0"),
        ({"batch": 1.5}, "batch is 1.5"),
        ({"steps": "many"}, "steps is 'many'"),
    ],
)
def test_a_wrong_value_is_named(raw: Path, change: dict[str, object], message: str) -> None:
    RawWriter(raw, HEADER).write(replace(DECODE, **change))  # type: ignore[arg-type]
    with pytest.raises(ProfileError, match=message):
        read_raw(raw)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "no header"), ('{"a": 1}\n', "no header"), ('{"kind": "header", "format": 99}\n', "format is 99")],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x").write_text(text, encoding="utf-8")
    with pytest.raises(ProfileError, match=message):
        read_raw(tmp_path / "x")


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="chimsim calibrate measure"):
        read_raw(tmp_path / "gone.jsonl")
