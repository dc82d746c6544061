"""A real vLLM: exact lengths, shared prefixes, priority order, and what a run says when its engine dies.

Runs where vLLM is: CHIMSIM_VLLM_PYTHON is the Python of its environment, or `vllm` is a command. The model is a
Llama of two layers with random weights, on the CPU. Counts and order are checked, never times.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from chimsim.errors import ChimsimError
from chimsim.grid import plan
from chimsim.live.driver import LiveReplay
from chimsim.live.experiment import LiveCell, live_cells, run_live
from chimsim.live_validation import Limits, to_dict, validate_live, verdict
from chimsim.results import Results
from chimsim.spec import spec_from
from tests.chimsim.worlds import slow_profile
from traces import Run, Stage, Trace, Workflow, write_trace

SLOTS = 4
BLOCK_TOKENS = 32
STEP_S = 0.005
SAME_S = 0.05
"""Instants closer than this are not told apart."""
ON_ITS_WAY_S = 0.2
"""A request takes no longer from the client to the engine's queue."""


def vllm_command() -> Path | None:
    """The `vllm` command, None where there is none."""
    if python := os.environ.get("CHIMSIM_VLLM_PYTHON"):
        return Path(python).with_name("vllm")
    found = shutil.which("vllm")
    return Path(found) if found else None


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        vllm_command() is None, reason="needs vLLM: set CHIMSIM_VLLM_PYTHON to the Python of its environment"
    ),
]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The script of the examples, which knows how to make a model and to start its engine."""
    path = Path(__file__).parents[3] / "examples" / "live_on_a_laptop.py"
    spec = importlib.util.spec_from_file_location("live_on_a_laptop", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["live_on_a_laptop"] = module
    spec.loader.exec_module(module)
    return module


@dataclasses.dataclass(frozen=True)
class Served:
    """A model made for the tests, the command that serves it, and its address."""

    model: Any
    command: list[str]

    def cluster(self, folder: Path, **more: str) -> Path:
        """A cluster file of this engine; its profile is made up."""
        profile = dataclasses.replace(slow_profile(STEP_S, "tiny"), num_kv_tokens=100_000, block_tokens=BLOCK_TOKENS)
        (folder / "tiny.toml").write_text(profile.to_toml())
        entries = {
            "model": "tiny", "profile": "tiny.toml", "max_batch_size": SLOTS, "max_model_len": 1024,
            "scheduling": "priority", "url": self.model.url, **more,
        }  # fmt: skip
        path = folder / "cluster.toml"
        path.write_text("\n".join(["[[engine]]", *(f"{key} = {json.dumps(value)}" for key, value in entries.items())]))
        return path


@pytest.fixture(scope="module")
def served(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Served:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    model = example.Model("tiny", layers=2, heads=2, stands_for="", port=port)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    example.write_model(folder, model)
    command = vllm_command()
    assert command is not None
    return Served(model, [*example.serve(command, folder, model), "--scheduling-policy=priority"])


@pytest.fixture(scope="module")
def engine(example: ModuleType, served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The engine, running."""
    with example.running({served.model: served.command}, tmp_path_factory.mktemp("logs")):
        yield served


def workflow(number: int, *stages: Stage) -> Workflow:
    return Workflow(f"w{number:02}", "tiny", {"tiny": Run(stages, None)}, confidence={"tiny": 0.5})


def live(
    folder: Path, cluster: Path, workflows: list[Workflow], policy: str, rps: float, **more: Any
) -> tuple[Results, dict[str, Any]]:
    """A replay, and what live.json says of its cells."""
    trace = folder / "trace.jsonl"
    write_trace(Trace("tiny", tuple(workflows)), trace)
    queue = more.pop("queue", "dispatcher")
    keys = {"trace": str(trace), "cluster": str(cluster), "policy": policy, "rps": rps, "queue": queue}
    cells, manifest = plan(spec_from(keys))
    results = run_live(live_cells(cells, 1, "lengths", None), manifest, folder / "out", **more)
    return results, json.loads((folder / "out" / "live.json").read_text())["cells"]


def test_lengths_are_exact_prefixes_are_shared_and_the_run_can_be_validated(engine: Served, tmp_path: Path) -> None:
    workflows = []
    for number in range(8):
        first = Stage("plan", 70 + number, 24)
        reused = first.prompt_tokens + first.output_tokens
        workflows.append(workflow(number, first, Stage("solve", reused + 40, 30 + number, reused_tokens=reused)))
    results, notes = live(tmp_path, engine.cluster(tmp_path), workflows, "fcfs,mlfq", rps=40)
    assert results.complete
    by_id = {each.workflow_id: each.runs["tiny"].stages for each in workflows}
    for name in results.cells:
        assert notes[name]["failures"] == []
        requests = results.table(name, "requests")
        assert requests["status"].tolist() == ["completed"] * 16
        columns = ("workflow_id", "stage", "prompt_tokens", "output_tokens", "cached_tokens")
        for each, index, prompt, output, cached in zip(*(requests[c].tolist() for c in columns), strict=True):
            stage = by_id[each][index]
            assert (prompt, output) == (stage.prompt_tokens, stage.output_tokens)
            # Of the last output token vLLM has no keys and values yet, and it keeps whole blocks.
            assert cached == max(stage.reused_tokens - 1, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    yields = results.summary.set_index("policy")["yields"]
    assert yields["fcfs"] == 0
    assert yields["mlfq"] > 0
    blocks = validate_live(tmp_path / "out")
    found = to_dict(blocks, verdict(blocks, Limits()), Limits())
    assert [entry["policy"] for entry in found["blocks"][0]["policies"]] == ["fcfs", "mlfq"]
    assert found["passed"] is (not found["reasons"])


def test_a_saturated_engine_serves_the_lower_priority_value_first(engine: Served, tmp_path: Path) -> None:
    workflows = [workflow(number, Stage("solve", 20, 200 + (37 * number) % 16 * 5)) for number in range(16)]
    results, _ = live(tmp_path, engine.cluster(tmp_path), workflows, "sjf", rps=2000, queue="engine")
    requests = results.table(results.cells[0], "requests")
    columns = ("output_tokens", "enqueued_at", "admitted_at", "first_token_at")
    calls = list(zip(*(requests[column].tolist() for column in columns), strict=True))
    # Whoever was there well before another one was admitted, and is shorter, was admitted first. Two may be admitted in
    # one step, and their first tokens come in either order.
    pairs = [(a, b) for a in calls for b in calls if a[0] < b[0] and a[1] < b[2] - ON_ITS_WAY_S]
    assert len(pairs) >= 20
    assert all(a[3] < b[3] + SAME_S for a, b in pairs)
    # It is not the order in which they came.
    assert any(a[1] > b[1] for a, b in pairs)


def test_an_engine_that_is_killed_ends_the_run_with_a_clear_error(
    example: ModuleType, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        model = dataclasses.replace(served.model, port=free.getsockname()[1])
    environment = example.engine_environment()
    for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("chimsim.live.driver.DOWN_S", 2.0)
    pid_file = tmp_path / "pid"
    serve = shlex.join([word.replace(str(served.model.port), str(model.port)) for word in served.command])
    launch = f"sh -c {shlex.quote(f'echo $$ > {pid_file}; exec {serve}')}"
    cluster = Served(model, []).cluster(tmp_path, launch=launch)
    killed: list[int] = []

    def kill_the_core(cell: LiveCell, replay: LiveReplay) -> None:
        if replay.progress[0] and not killed:
            pid = int(pid_file.read_text())
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
                killed.append(int(child))

    workflows = [workflow(number, Stage("solve", 60, 60)) for number in range(60)]
    said: list[str] = []
    with pytest.raises(ChimsimError, match=r"engine tiny did not come back for 2 s"):
        live(tmp_path, cluster, workflows, "fcfs", rps=6, launch=True, say=said.append, watch=kill_the_core)
    assert killed
    assert said[0] == f"waiting for tiny at {model.url}"
    assert not Path(f"/proc/{int(pid_file.read_text())}").exists()
