"""Small traces for tests, as plain rows of the file format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

MODELS = ("Qwen2.5-1.5B", "Qwen2.5-7B")


def stage(**fields: Any) -> dict[str, Any]:
    return {"name": "coder", "prompt_tokens": 100, "output_tokens": 20} | fields


def row(workflow_id: str = "w-0", stages: list[dict[str, Any]] | None = None, **fields: Any) -> dict[str, Any]:
    runs = {model: {"solved": True, "stages": stages or [stage()]} for model in MODELS}
    return {"workflow_id": workflow_id, "workload": "apps", "runs": runs} | fields


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in rows))
    return path


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
tokens = st.integers(1, 40_000)
prefixes = st.sampled_from(["planner", "coder"])


@st.composite
def stage_rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Valid stages of one run, with every optional field now and then."""
    stages: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(tokens)
        made: dict[str, Any] = {"name": draw(names), "prompt_tokens": prompt, "output_tokens": draw(tokens)}
        if draw(st.booleans()):
            made["shared_prefix"] = {"id": draw(prefixes), "tokens": min(prompt, 7)}
        if draw(st.booleans()):
            made["after"] = sorted(draw(st.sets(st.sampled_from(range(len(stages)))))) if stages else []
        waits = made.get("after", range(len(stages))[-1:])
        if draw(st.booleans()) and waits:
            before = max((stages[i] for i in waits), key=lambda s: s["prompt_tokens"] + s["output_tokens"])
            most = min(before["prompt_tokens"] + before["output_tokens"], prompt)
            alike = before.get("shared_prefix") == made.get("shared_prefix")
            made["reused_tokens"] = draw(st.integers(0, most)) if alike else 0
        if draw(st.booleans()):
            made["system_tokens"] = draw(st.integers(0, prompt))
            made["user_tokens"] = prompt - made["system_tokens"]
        if draw(st.booleans()):
            made["hash_block_tokens"] = block = draw(st.sampled_from([16, 512]))
            count = -(-prompt // block)
            made["hash_ids"] = [draw(st.integers(0, 2**64 - 1))] * count
        if draw(st.booleans()):
            made |= {"delay_s": draw(st.floats(0, 1e6)), "prompt": draw(texts), "output": draw(texts)}
        stages.append(made)
    return stages


@st.composite
def trace_rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Valid lines of one trace."""
    ids = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    timed = draw(st.booleans())
    rows = []
    for workflow_id in ids:
        models = draw(st.lists(names, min_size=1, max_size=3, unique=True))
        made: dict[str, Any] = {"workflow_id": workflow_id, "workload": draw(names), "runs": {}}
        for model in models:
            solved = draw(st.sampled_from([True, False, None]))
            made["runs"][model] = {"solved": solved, "stages": draw(stage_rows())}
        if timed:
            made["arrival_s"] = draw(st.floats(0, 1e6))
        if draw(st.booleans()):
            made["prompt"] = draw(texts)
            made["confidence"] = {model: draw(st.floats(0, 1)) for model in models}
            made["meta"] = {"difficulty": draw(st.integers()), "tags": [draw(texts)]}
        rows.append(made)
    return rows
