"""Writing traces in formats of other tools: Mooncake's rows, and Dynamo's agentic Mooncake (version 2).

They know lengths, times, what waits for what, and which leading blocks prompts share. Ids of blocks are made from the
trace's own structure (shared prefixes, what a stage goes on from, ids that it has already), in whole blocks; they
name prompts only, so that what a prompt repeats of an earlier *answer* is shared with its siblings, not with that
answer's call.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from traces.files import replace_file, write_lines
from traces.graph import is_chain, parents, prefix_parent
from traces.schema import Run, Stage, Trace, TraceError, Workflow, near

WRITERS = ("mooncake", "agentic_mooncake")


@dataclass(frozen=True, slots=True)
class Exported:
    """How many rows were written, and what the format could not say of the trace."""

    rows: int
    notes: tuple[str, ...]


def export_trace(
    trace: Trace, path: str | Path, format: str, model: str, block_tokens: int = 512, arrivals_s: Sequence[float] = ()
) -> Exported:
    """Write the runs of one ``model`` as JSON Lines (gzip if the name ends in .gz), whole or not at all.

    ``arrivals_s`` (one a workflow, in the trace's order) are used instead of the trace's own arrivals. Mooncake takes
    chains only: their stages become the turns of a session. Raises `TraceError`.
    """
    path = Path(path)
    if format not in WRITERS:
        raise TraceError(f"format {format!r} is unknown{near(format, WRITERS)} (formats: {', '.join(WRITERS)})")
    if block_tokens < 1:
        raise TraceError(f"block tokens: expected a positive integer, found {block_tokens}")
    blocks = _Blocks(block_tokens)
    rows: list[dict[str, Any]] = []
    if format == "agentic_mooncake":
        source = {"format": "chimsim", "digest": trace.digest}
        header = {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": block_tokens}
        rows.append(header | {"hash_id_scope": "local", "source": source})
    for number, workflow in enumerate(trace.workflows):
        where = f"trace {trace.name}: workflow {workflow.workflow_id}"
        run = workflow.runs.get(model)
        if run is None:
            raise TraceError(f"{where} has no run of {model!r}{near(model, workflow.runs)}")
        arrival_s = arrivals_s[number] if len(arrivals_s) else workflow.arrival_s
        if arrival_s is None:
            raise TraceError(f"trace {trace.name} has no arrival times, which {format} asks for: give a rate")
        ids = blocks.of(number, run, where)
        if format == "mooncake":
            rows += _turns(workflow, run, arrival_s, ids, where)
        else:
            rows += _agentic(workflow, run, model, arrival_s, ids)
    replace_file(path, lambda temporary: write_lines(rows, temporary, compress=path.suffix == ".gz"))
    calls = len(rows) - (format == "agentic_mooncake")
    return Exported(calls, tuple(_unsaid(trace, model, format, blocks)))


class _Blocks:
    """Names the blocks of prompts, equal ones alike, in order of appearance."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.reused_tokens = 0
        self.said_tokens = 0
        self._ids: dict[Hashable, int] = {}

    def of(self, owner: int, run: Run, where: str) -> list[list[int]]:
        """For each stage of a workflow's run the ids of its prompt's blocks."""
        size = self.block_tokens
        contents: list[list[Hashable]] = []
        prompts: list[list[int]] = []
        for index, stage in enumerate(run.stages):
            if stage.hash_ids and stage.hash_block_tokens != size:
                raise TraceError(
                    f"{where}, stage {index}: has hash_ids of {stage.hash_block_tokens} tokens, which say nothing of "
                    f"blocks of {size}: export it with blocks of {stage.hash_block_tokens} tokens"
                )
            parent = prefix_parent(run.stages, index)
            content = self._begin(stage, () if parent is None else contents[parent])
            whole = (stage.prompt_tokens + stage.output_tokens) // size
            content += [("own", owner, index, block) for block in range(len(content), whole)]
            contents.append(content)
            named = content[: stage.prompt_tokens // size]
            if len(named) * size < stage.prompt_tokens:
                named.append(("hash", stage.hash_ids[-1]) if stage.hash_ids else ("tail", owner, index))
            prompts.append([self._ids.setdefault(key, len(self._ids)) for key in named])
            if parent is not None:
                self.reused_tokens += stage.reused_tokens
                alike = takewhile(lambda pair: pair[0] == pair[1], zip(named, contents[parent], strict=False))
                in_prompt = min(sum(1 for _ in alike), run.stages[parent].prompt_tokens // size)
                self.said_tokens += min(in_prompt * size, stage.reused_tokens)
        return prompts

    def _begin(self, stage: Stage, before: Sequence[Hashable]) -> list[Hashable]:
        """The leading whole blocks whose content is known from elsewhere."""
        size = self.block_tokens
        if stage.hash_ids:
            return [("hash", name) for name in stage.hash_ids[: stage.prompt_tokens // size]]
        prefix = stage.shared_prefix
        common: list[Hashable] = (
            [] if prefix is None else [("prefix", prefix.id, i) for i in range(prefix.tokens // size)]
        )
        reused = list(before[: stage.reused_tokens // size])
        return reused if len(reused) > len(common) else common


def _turns(
    workflow: Workflow, run: Run, arrival_s: float, ids: Sequence[list[int]], where: str
) -> Iterator[dict[str, Any]]:
    if not is_chain(run.stages):
        raise TraceError(f"{where} is a graph, and mooncake knows only turns: export it as agentic_mooncake")
    for index, stage in enumerate(run.stages):
        row: dict[str, Any] = {} if len(run.stages) == 1 else {"session_id": workflow.workflow_id}
        if index:
            row["delay"] = _ms(stage.delay_s)
        else:
            row["timestamp"] = _ms(arrival_s + stage.delay_s)
        yield row | _lengths(stage, ids[index])


def _agentic(
    workflow: Workflow, run: Run, model: str, arrival_s: float, ids: Sequence[list[int]]
) -> Iterator[dict[str, Any]]:
    """Sessions are for routers: a stage goes on with that of the stage it continues, if no other one does."""
    sessions: list[str] = []
    for index, stage in enumerate(run.stages):
        name = f"{workflow.workflow_id}/{index}"
        before = prefix_parent(run.stages, index)
        continues = before is not None and stage.reused_tokens > 0 and sessions[before] not in sessions[before + 1 :]
        sessions.append(sessions[before] if continues and before is not None else name)
        edges = [
            {
                "request_id": f"{workflow.workflow_id}/{parent}",
                "trigger": "completion",
                "delay_ms": _ms(stage.delay_s),
                "relation": ("sequence" if continues else "spawn") if parent == before else "join",
            }
            for parent in parents(run.stages, index)
        ]
        row: dict[str, Any] = {
            "request_id": name,
            "play_id": workflow.workflow_id,
            "session_id": sessions[index],
            "model": model,
        }
        row |= _lengths(stage, ids[index]) | {"not_before_ms": 0.0 if edges else _ms(arrival_s + stage.delay_s)}
        yield row | ({"dependencies": edges} if edges else {})


def _lengths(stage: Stage, ids: list[int]) -> dict[str, Any]:
    return {"input_length": stage.prompt_tokens, "output_length": stage.output_tokens, "hash_ids": ids}


def _ms(seconds: float) -> float:
    """Milliseconds, to the nanosecond."""
    return round(seconds * 1e9) / 1e6


def _unsaid(trace: Trace, model: str, format: str, blocks: _Blocks) -> Iterator[str]:
    """What of the trace is not in the file."""
    runs = [workflow.runs[model] for workflow in trace.workflows]
    stages = [stage for run in runs for stage in run.stages]
    others = sorted({name for workflow in trace.workflows for name in workflow.runs} - {model})
    lost = {
        "the labels": any(run.solved is not None for run in runs),
        f"the runs of {', '.join(others)}": bool(others),
        "the names of stages": any(stage.name != "call" for stage in stages),
        "the workloads": any(workflow.workload != format for workflow in trace.workflows),
        "texts": any(w.prompt for w in trace.workflows) or any(stage.prompt or stage.output for stage in stages),
        "a router's confidence": any(workflow.confidence for workflow in trace.workflows),
        "meta": any(workflow.meta for workflow in trace.workflows),
    }
    if any(lost.values()):
        yield f"{format} does not say {', '.join(what for what, there in lost.items() if there)}"
    if blocks.said_tokens < blocks.reused_tokens:
        yield (
            f"what a stage repeats is said in whole blocks of {blocks.block_tokens} tokens of earlier prompts, not of "
            f"answers: {blocks.said_tokens / blocks.reused_tokens:.0%} of {blocks.reused_tokens:,} reused tokens"
        )
