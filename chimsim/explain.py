"""Where a workflow's time went, stage by stage, and what its policy knew when it decided.

Everything is read from a watched run, nothing is estimated: pieces of time follow one another without a gap, on exact
instants, so that those of the critical path add up to the workflow's latency to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from chimsim.errors import ChimsimError, near
from chimsim.records import RunResult
from chimsim.watch import Decision, Spell, Watch

PARTS = {
    "tool": "between stages: tools, users, think time",
    "predictor": "router and length predictors",
    "waiting": "ready, but not yet in an engine's batch",
    "prefill": "in the batch until the first token",
    "decode": "in the batch, the other tokens",
    "again": "out of the batch after a preemption or a yield",
    "recompute": "back in the batch, until the next token",
}
"""What a piece of time was spent on."""


class Piece(NamedTuple):
    """A stretch of time of one stage, in seconds from the start of the run; ``part`` is one of `PARTS`."""

    part: str
    stage: int
    begin_at: float
    end_at: float


@dataclass(frozen=True, slots=True)
class StageStory:
    """One call. ``call`` is its row of the requests, ``pieces`` lead from its beginning to its end.

    ``waited_for`` is the stage at whose end it began (None: it waits for no other), ``spare_s`` how much later it
    could have ended without making another stage, or the workflow's end, later.
    """

    stage: int
    name: str
    call: Mapping[str, Any]
    pieces: tuple[Piece, ...]
    decision: Decision
    waited_for: int | None
    spare_s: float
    spells: tuple[Spell, ...]


@dataclass(frozen=True, slots=True)
class Story:
    """A workflow. ``path`` are the pieces that follow one another from its arrival to its end; empty if rejected."""

    workflow: Mapping[str, Any]
    stages: tuple[StageStory, ...]
    path: tuple[Piece, ...]

    @property
    def critical(self) -> list[int]:
        """The stages of the critical path, in order."""
        return list(dict.fromkeys(piece.stage for piece in self.path))

    @property
    def parts_s(self) -> dict[str, float]:
        """Seconds of each part along the critical path; they add up to the latency."""
        return sum_parts(self.path)


def sum_parts(pieces: Iterable[Piece]) -> dict[str, float]:
    """Seconds of each part, all of `PARTS`."""
    sums = dict.fromkeys(PARTS, 0.0)
    for piece in pieces:
        sums[piece.part] += piece.end_at - piece.begin_at
    return sums


def tell(result: RunResult, watch: Watch, workflow_id: str) -> Story:
    """The story of one workflow. Raises `ChimsimError` if there is none of that id."""
    workflow = workflow_row(result.workflows, workflow_id)
    return _story(workflow, rows_of(result.requests[result.requests["workflow"] == workflow["workflow"]]), watch)


def stories(result: RunResult, watch: Watch) -> Iterator[Story]:
    """The stories of all workflows, in order of arrival."""
    calls: dict[int, list[dict[str, Any]]] = {}
    for call in rows_of(result.requests):
        calls.setdefault(call["workflow"], []).append(call)
    for workflow in rows_of(result.workflows):
        yield _story(workflow, calls[workflow["workflow"]], watch)


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """A table as rows by column name, with plain Python values."""
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]


def _story(workflow: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], watch: Watch) -> Story:
    by_stage = {call["stage"]: call for call in sorted(calls, key=lambda call: int(call["stage"]))}
    released = {stage: released_by(call, calls, watch) for stage, call in by_stage.items()}
    pieces: dict[int, tuple[Piece, ...]] = {}
    for stage, call in by_stage.items():
        begun_at = _begun_at(stage, released[stage], by_stage)
        delay = [Piece("tool", stage, begun_at, call["ready_at"])] if begun_at < call["ready_at"] else []
        pieces[stage] = (*delay, *pieces_of(call, watch.spells.get(call["request_id"], ())))
    stages = [
        StageStory(
            stage,
            str(call["stage_name"]),
            call,
            pieces[stage],
            watch.decisions[call["request_id"]],
            released[stage],
            _spare_s(call, calls, watch, workflow["finished_at"]),
            tuple(watch.spells.get(call["request_id"], ())),
        )
        for stage, call in by_stage.items()
    ]
    return Story(workflow, tuple(stages), tuple(critical_path(workflow, by_stage, pieces, released)))


def workflow_row(workflows: pd.DataFrame, workflow_id: str) -> dict[str, Any]:
    """A workflow's row. Raises `ChimsimError` with near ids if there is none."""
    ids = workflows["workflow_id"].astype(str)
    found = workflows[ids == workflow_id]
    if found.empty:
        raise ChimsimError(
            f"workflow {workflow_id!r} is not in this run, whose {len(workflows)} workflows are "
            f"{ids.iloc[0]!r} to {ids.iloc[-1]!r} in order of arrival{near(workflow_id, ids)}"
        )
    return rows_of(found)[0]


def pieces_of(call: Mapping[str, Any], spells: Sequence[Spell]) -> list[Piece]:
    """A call's time from ready to finished, in order and without gaps; of a rejected one until it was refused."""
    found: list[Piece] = []

    def add(part: str, begin_at: float, end_at: float) -> None:
        if end_at > begin_at:
            found.append(Piece(part, call["stage"], begin_at, end_at))

    at = sent_at(call)
    add("predictor", call["ready_at"], at)
    for spell in spells:
        add("waiting" if spell is spells[0] else "again", at, spell.begin_at)
        first = spell.begin_at < call["first_token_at"]
        token_at = spell.end_at if isnan(spell.token_at) else spell.token_at
        add("prefill" if first else "recompute", spell.begin_at, token_at)
        add("decode", token_at, spell.end_at)
        at = spell.end_at
    return found


def sent_at(call: Mapping[str, Any]) -> float:
    """When it was first dispatched; tries that an engine failed count as waiting."""
    return float(call["enqueued_at"] - call.get("lost_s", 0.0))


def released_by(call: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], watch: Watch) -> int | None:
    """The stage whose end made this one ready (after its delay): of those it waits for the last one to finish.

    None for a stage that waits for no other. A workflow that went on as another model's graph keeps no record of who
    waited for whom: there it is whatever finished last before.
    """
    after = watch.decisions[call["request_id"]].after
    if not after:
        return None
    over = {other["stage"]: other["finished_at"] for other in calls if other["finished_at"] <= call["ready_at"]}
    among = after if all(stage in over for stage in after) else list(over)
    return max(among, key=lambda stage: over[stage], default=None)


def critical_path(
    workflow: Mapping[str, Any],
    by_stage: Mapping[int, Mapping[str, Any]],
    pieces: Mapping[int, Sequence[Piece]],
    released: Mapping[int, int | None],
) -> list[Piece]:
    """The pieces from the workflow's arrival to its end: back from the last stage, each to whom it waited for."""
    if isnan(workflow["finished_at"]):
        return []
    stage: int | None = max(by_stage, key=lambda each: by_stage[each]["finished_at"])
    path: list[Piece] = []
    while stage is not None:
        path[:0] = pieces[stage]
        first, stage = stage, released[stage]
    if first:
        path[:0] = [piece for piece in pieces[0] if piece.end_at <= sent_at(by_stage[0])]
    if path[-1].end_at < workflow["finished_at"]:
        # A stage was waited for that its graph, changed meanwhile, no longer had.
        path.append(Piece("tool", path[-1].stage, path[-1].end_at, workflow["finished_at"]))
    return path


def _begun_at(stage: int, before: int | None, by_stage: Mapping[int, Mapping[str, Any]]) -> float:
    """When all that a stage waits for was done: then its delay begins."""
    if before is not None:
        return float(by_stage[before]["finished_at"])
    # Other first stages of a graph begin when the very first is sent, for that chooses the model.
    return sent_at(by_stage[0]) if stage else float(by_stage[0]["ready_at"])


def _spare_s(
    call: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], watch: Watch, workflow_finished_at: float
) -> float:
    """Until the last of what the next stage waits for, or the workflow, was done."""
    finished: dict[int, float] = {other["stage"]: other["finished_at"] for other in calls}
    own_at = finished[call["stage"]]
    ends = [
        max(finished[stage] for stage in after if stage in finished)
        for other in calls
        if call["stage"] in (after := watch.decisions[other["request_id"]].after)
    ]
    return min(ends, default=workflow_finished_at) - own_at


def went_first(call: Mapping[str, Any], requests: pd.DataFrame) -> tuple[int, int]:
    """How many calls its engine admitted for the first time while it waited, and how many of them came after it."""
    if isnan(call["admitted_at"]):
        return 0, 0
    same = requests[requests["engine"] == call["engine"]]
    admitted = same["admitted_at"].to_numpy()
    enqueued = same["enqueued_at"].to_numpy()
    first = (admitted >= call["enqueued_at"]) & (admitted < call["admitted_at"])
    return int(np.count_nonzero(first)), int(np.count_nonzero(first & (enqueued > call["enqueued_at"])))
