"""`chimsim profiles`: the list and one profile, as text in 80 columns and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calibration.figures import FIELDS
from calibration.profile import PROFILES, ProfileError
from chimsim.profiles_cli import detail, profiles_command, table


def test_the_list_has_every_profile_in_80_columns() -> None:
    lines = table(PROFILES.values()).splitlines()
    assert max(map(len, lines)) <= 80
    for model in PROFILES:
        assert sum(line.startswith(f"{model} ") for line in lines) == 1
    large = next(line for line in lines if line.startswith("Qwen2.5-7B"))
    assert large.split() == ["Qwen2.5-7B", "qwen7b", "RTX", "A6000", "21.9", "53.1", "256", "517,152", "5m", "3s"]


@pytest.mark.parametrize("model", PROFILES)
def test_a_profile_shows_every_number_with_its_source_in_80_columns(model: str) -> None:
    text = detail(PROFILES[model])
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    for row in PROFILES[model].provenance():
        assert f"{row.field} " in words
        assert row.source in words


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    profiles_command(as_json=True)
    listed = json.loads(capsys.readouterr().out)
    assert [row["model"] for row in listed] == list(PROFILES)
    profiles_command("qwen7b", as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["decode_s_at_max_batch_size"] == 0.0531
    assert {row["field"] for row in shown["numbers"]} >= set(FIELDS)


def test_a_file_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(PROFILES["Qwen2.5-7B"].to_toml().replace('"Qwen2.5-7B"', '"Mine-7B"'), encoding="utf-8")
    profiles_command(str(path))
    assert capsys.readouterr().out.startswith("Mine-7B on RTX A6000\n")
    with pytest.raises(ProfileError, match="did you mean 'qwen7b'"):
        profiles_command("qwn7b")
