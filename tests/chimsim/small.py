"""A small trace and small sweeps for the tests of metrics, results, sweeps, plots and the command line."""

from __future__ import annotations

import hashlib
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from chimsim import cli
from traces import Run, Stage, Trace, Workflow, write_trace

MODELS = ("Qwen2.5-1.5B", "Qwen2.5-7B")


def small_trace(count: int = 40, *, labels: bool = True, models: tuple[str, ...] = MODELS) -> Trace:
    """``count`` workflows of one to three stages with short and a few long outputs."""
    draw = random.Random(7)
    workflows = []
    for number in range(count):
        stages = draw.choice((1, 2, 3))
        scale = draw.choice((20, 60, 300))
        runs = {}
        for rank, model in enumerate(models):
            made = []
            before = 0
            for index in range(stages):
                prompt = before + draw.randrange(50, 200)
                output = max(1, int(scale * draw.uniform(0.5, 1.5)))
                made.append(Stage(f"stage{index}", prompt, output, reused_tokens=before))
                before = prompt + output
            runs[model] = Run(tuple(made), (draw.random() < 0.3 + 0.3 * rank) if labels else None)
        confidence = {model: draw.uniform(0.1, 0.9) for model in models}
        workflows.append(Workflow(f"w{number:03}", "small", runs, arrival_s=0.2 * number, confidence=confidence))
    digest = hashlib.sha256(repr(workflows).encode()).hexdigest()
    return Trace("small", tuple(workflows), digest)


def write_small(folder: Path, **kinds: Any) -> str:
    """The small trace as a file in the folder; its path."""
    path = folder / "small.jsonl"
    write_trace(small_trace(**kinds), path)
    return str(path)


def small_keys(trace: str) -> dict[str, Any]:
    """The keys of a sweep of eight cells with queues."""
    return {
        "trace": trace,
        "combo": "qwen1.5b+7b",
        "policy": ["fcfs", "chimera"],
        "tau": [0, 1, "inf"],
        "rps": 20,
        "slots": 4,
        "seeds": 2,
    }


def tree_bytes(root: Path) -> dict[str, bytes]:
    """Every file below the folder that must be the same bytes for the same spec."""
    skip = {"run.json", ".lock"}
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.name not in skip)
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def run_chimsim(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str, str]:
    """The command line in this process: exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["chimsim", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), out, err
