"""What experiments found, in words: verdicts in 80 columns, a table as Markdown, counts."""

from __future__ import annotations

from typing import Any

from chimsim.reproduce.words import as_markdown, as_text, blocks_of, tally


def found(verdict: str = "fails", **changes: Any) -> dict[str, Any]:
    relation = {
        "claim": "a.x < b.x", "says": "A waits less than B", "paper": "a half | less", "ours": "-12 %",
        "verdict": verdict, "holds": 3, "fails": 1, "undecided": 2, "skipped": 4, "reason": "queues are short",
        "blocks": [{"block": "rps 8", "axes": {"rps": 8}, "measure": "ratio", "value": 0.9, "verdict": "holds"}],
    }  # fmt: skip
    return {
        "name": "fig9", "title": "A title", "figure": "Fig. 9", "question": "Is it so? " * 12,
        "relations": [relation | changes],
        "made": {"command": "chimsim reproduce fig9", "wall_s": 12.4, "machine": "a machine, 2 cores",
                 "date": "2026-01-01", "chimsim": "0.1.0", "commit": "0123456789abcdef"},
    }  # fmt: skip


def test_text_says_verdict_counts_paper_and_why() -> None:
    text = as_text(found())
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("fig9: A title (the paper's Fig. 9)\n")
    assert "FAILS      A waits less than B\n" in text
    assert "ours: -12 %; holds in 3 of 6 (1 against, 2 undecided), 4 not asked" in text
    assert "paper: a half | less" in text
    assert "why: queues are short" in text
    assert "why" not in as_text(found("holds"))
    assert "not asked in these blocks: 4" in as_text(found(holds=0, fails=0, undecided=0))


def test_markdown_keeps_its_table_and_says_when_and_on_what() -> None:
    text = as_markdown([found()])
    assert "| A waits less than B | a half \\| less | -12 % | fails | holds in 3 of 6" in text
    assert "A waits less than B: queues are short." in text
    assert "12 s on a machine, 2 cores, 2026-01-01, chimsim 0.1.0, commit 0123456789ab." in text


def test_rows_and_counts() -> None:
    rows = blocks_of([found(), found("holds")])
    assert rows["relation"].tolist() == ["fails", "holds"]
    assert rows.to_dict("records")[0].items() >= {"experiment": "fig9", "block": "rps 8", "value": 0.9}.items()
    assert tally([found(), found("holds"), found("undecided")]) == "relations: 1 hold, 1 fail, 1 undecided"
