"""The trace: which workflows arrive and how long every stage truly is on every model.

Frozen values, and the one place that turns a plain dict into them and says what is wrong with it; it does no
I/O (`traces.files` does) and knows nothing of engines or policies. Times are in seconds, lengths in tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import isfinite
from typing import Any, NoReturn

from traces.graph import longest

MAX_TOKENS = 10**9
"""Longer lengths than this are taken for a mistake of the file."""


class TraceError(ValueError):
    """A trace, or something asked of it, is wrong; the message names file, line and field, and the cure."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix (a role's system prompt, say) that calls of all workflows share by its id."""

    id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Stage:
    """One LLM call of a workflow on one model.

    ``after`` are the stages that it waits for, None the one before it (`traces.graph`). ``reused_tokens`` is how many
    leading tokens of the prompt are its prefix parent's prompt and output (`traces.graph.prefix_parent`; always
    resolved: a file may leave it out). ``hash_ids`` name the prompt's leading blocks of
    ``hash_block_tokens`` tokens each by content (the last one may be partial), across workflows.
    """

    name: str
    prompt_tokens: int
    output_tokens: int
    reused_tokens: int = 0
    delay_s: float = 0.0
    system_tokens: int | None = None
    user_tokens: int | None = None
    shared_prefix: SharedPrefix | None = None
    hash_ids: tuple[int, ...] = ()
    hash_block_tokens: int = 512
    prompt: str | None = None
    output: str | None = None
    after: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """A workflow as one model lives it: stages, parents first, and whether the final answer is right (or None)."""

    stages: tuple[Stage, ...]
    solved: bool | None = None


@dataclass(frozen=True, slots=True)
class Workflow:
    """One user query; ``runs`` is by model name (in order of the names). ``meta`` is kept and never read."""

    workflow_id: str
    workload: str
    runs: Mapping[str, Run]
    arrival_s: float | None = None
    prompt: str | None = None
    confidence: Mapping[str, float] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trace:
    """Workflows in file order, a tuple or what is like one. ``digest`` is the SHA-256 of the content in any format."""

    name: str
    workflows: Sequence[Workflow]
    digest: str = ""
    _columns: object = field(default=None, init=False, repr=False, compare=False)
    """kept by `traces.columns.columns_of`"""

    @property
    def models(self) -> tuple[str, ...]:
        """The models that every workflow has a run of, by name."""
        from traces.columns import columns_of

        return columns_of(self).common_models()


def near(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` if one of the known names is close, else nothing."""
    by_lower = {known_name.lower(): known_name for known_name in sorted(set(known))}
    matches = get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[matches[0]]!r}?" if matches else ""


def workflow_from_dict(row: object, where: str) -> Workflow:
    """Check one line of a trace and turn it into a `Workflow`.

    ``where`` ("my.jsonl:17") begins the message of the `TraceError` that anything wrong raises; the path of
    the field, what is expected and what was found follow.
    """
    try:
        return _workflow(row)
    except _Wrong as wrong:
        field_path = f"{wrong.path}: " if wrong.path else ""
        raise TraceError(f"{where}: {field_path}{wrong.text}") from None


def to_dict(workflow: Workflow) -> dict[str, Any]:
    """The workflow as a line of a trace file: fields that have their default value are left out."""
    row: dict[str, Any] = {"workflow_id": workflow.workflow_id, "workload": workflow.workload}
    if workflow.arrival_s is not None:
        row["arrival_s"] = workflow.arrival_s
    if workflow.prompt is not None:
        row["prompt"] = workflow.prompt
    row["runs"] = {model: _run_to_dict(workflow.runs[model]) for model in sorted(workflow.runs)}
    if workflow.confidence:
        row["confidence"] = {model: workflow.confidence[model] for model in sorted(workflow.confidence)}
    if workflow.meta:
        row["meta"] = dict(workflow.meta)
    return row


def check_together(workflows: Sequence[Workflow], places: Sequence[str]) -> None:
    """What only the whole trace shows: ids are unique, and ``arrival_s`` is on all workflows or on none.

    ``places`` says where each workflow was found ("my.jsonl:17"), for the message of the `TraceError`.
    """
    first_place: dict[str, str] = {}
    timed = workflows[0].arrival_s is not None if workflows else False
    for workflow, place in zip(workflows, places, strict=True):
        other = first_place.setdefault(workflow.workflow_id, place)
        if other is not place:
            raise TraceError(
                f"{place}: workflow_id: expected an id of its own, found {workflow.workflow_id!r}, "
                f"which {other} has already"
            )
        if (workflow.arrival_s is not None) is not timed:
            with_it, without = (place, places[0]) if not timed else (places[0], place)
            raise TraceError(
                f"{place}: arrival_s: expected on all workflows or on none, found it at {with_it} and not at {without}"
            )


class _Wrong(Exception):
    """What is wrong with a value; the path is completed from the inside out while it travels up."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(text)
        self.path = path
        self.text = text

    def inside(self, outer: str) -> _Wrong:
        self.path = outer if not self.path else f"{outer}.{self.path}"
        return self


def _workflow(row: object) -> Workflow:
    _object(row, "", _WORKFLOW_KEYS, ("workflow_id", "workload", "runs"))
    assert isinstance(row, dict)
    runs_row = row["runs"]
    if type(runs_row) is not dict or not runs_row:
        _expected("runs", "an object of at least one model's run", runs_row)
    runs: dict[str, Run] = {}
    for model in sorted(runs_row):
        _text(model, "runs", "a model name")
        try:
            runs[model] = _run(runs_row[model])
        except _Wrong as wrong:
            raise wrong.inside(f"runs.{model}") from None
    arrival_s = row.get("arrival_s")
    return Workflow(
        workflow_id=_text(row["workflow_id"], "workflow_id"),
        workload=_text(row["workload"], "workload"),
        runs=runs,
        arrival_s=None if arrival_s is None else _seconds(arrival_s, "arrival_s"),
        prompt=_optional_text(row.get("prompt"), "prompt"),
        confidence=_confidence(row.get("confidence"), runs),
        meta=_meta(row.get("meta")),
    )


def _run(row: object) -> Run:
    _object(row, "", _RUN_KEYS, ("stages",))
    assert isinstance(row, dict)
    solved = row.get("solved")
    if solved is not None and type(solved) is not bool:
        _expected("solved", "true, false or null", solved)
    rows = row["stages"]
    if type(rows) is not list or not rows:
        _expected("stages", "a list of at least one stage", rows)
    stages: list[Stage] = []
    for index, stage_row in enumerate(rows):
        try:
            stages.append(_stage(stage_row, index, stages))
        except _Wrong as wrong:
            raise wrong.inside(f"stages[{index}]") from None
    return Run(tuple(stages), solved)


def _stage(row: object, index: int, earlier: Sequence[Stage]) -> Stage:
    _object(row, "", _STAGE_KEYS, ("name", "prompt_tokens", "output_tokens"))
    assert isinstance(row, dict)
    get = row.get
    after = None if "after" not in row else _after(row["after"], index)
    previous = _prefix_parent(earlier, after)
    prompt_tokens = _count(row["prompt_tokens"], "prompt_tokens", 1)
    output_tokens = _count(row["output_tokens"], "output_tokens", 1)
    shared_prefix = None
    if get("shared_prefix") is not None:
        shared_prefix = _shared_prefix(row["shared_prefix"], prompt_tokens)
    reused = get("reused_tokens")
    default = _default_reuse(previous, prompt_tokens, shared_prefix)
    if reused is None:
        reused = default
    else:
        _check_reuse(_count(reused, "reused_tokens", 0), previous, prompt_tokens, shared_prefix)
    system, user = get("system_tokens"), get("user_tokens")
    for key, part in (("system_tokens", system), ("user_tokens", user)):
        if part is not None and _count(part, key, 0) > prompt_tokens:
            _expected(key, f"at most prompt_tokens ({prompt_tokens})", part)
    if system is not None and user is not None and system + user > prompt_tokens:
        _expected("user_tokens", f"with system_tokens ({system}) at most prompt_tokens ({prompt_tokens})", user)
    block = 512 if get("hash_block_tokens") is None else _count(row["hash_block_tokens"], "hash_block_tokens", 1)
    delay = get("delay_s")
    return Stage(
        name=_text(row["name"], "name"),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        reused_tokens=reused,
        delay_s=0.0 if delay is None else _seconds(delay, "delay_s"),
        system_tokens=system,
        user_tokens=user,
        shared_prefix=shared_prefix,
        hash_ids=() if get("hash_ids") is None else _hash_ids(row["hash_ids"], prompt_tokens, block),
        hash_block_tokens=block,
        prompt=_optional_text(get("prompt"), "prompt"),
        output=_optional_text(get("output"), "output"),
        after=after,
    )


def _prefix_parent(earlier: Sequence[Stage], after: tuple[int, ...] | None) -> Stage | None:
    """The stage that the one after the ``earlier`` ones goes on from."""
    parent = longest(earlier, after if after is not None else range(len(earlier))[-1:])
    return None if parent is None else earlier[parent]


def _default_reuse(previous: Stage | None, prompt_tokens: int, shared_prefix: SharedPrefix | None) -> int:
    """All of the stage that it goes on from that fits; nothing where the prompts begin differently."""
    if previous is None or previous.shared_prefix != shared_prefix:
        return 0
    return min(previous.prompt_tokens + previous.output_tokens, prompt_tokens - 1)


def _check_reuse(reused: int, previous: Stage | None, prompt_tokens: int, shared_prefix: SharedPrefix | None) -> None:
    if not reused:
        return
    if previous is None:
        _expected("reused_tokens", "0 in a stage that has nothing before it", reused)
    most = min(previous.prompt_tokens + previous.output_tokens, prompt_tokens)
    if reused > most:
        _expected(
            "reused_tokens",
            f"at most {most}, the smaller of the prompt and output it goes on from "
            f"({previous.prompt_tokens + previous.output_tokens}) and prompt_tokens ({prompt_tokens})",
            reused,
        )
    if previous.shared_prefix != shared_prefix:
        _expected(
            "reused_tokens",
            "0, since the shared_prefix is not that of the stage it goes on from: prompts that begin "
            "differently have no leading tokens in common",
            reused,
        )


def _after(after: object, index: int) -> tuple[int, ...] | None:
    """The parents in order; None where it is the stage before, which goes without saying."""
    if type(after) is not list or any(type(parent) is not int or parent < 0 for parent in after):
        _expected("after", "a list of the numbers of earlier stages", after)
    late = [parent for parent in after if parent >= index]
    if late:
        _expected("after", f"numbers below {index} (stages stand after those they wait for, in no circle)", after)
    if len(set(after)) < len(after):
        _expected("after", "each stage once", after)
    parents = tuple(sorted(after))
    return None if parents == tuple(range(index))[-1:] else parents


def _shared_prefix(row: object, prompt_tokens: int) -> SharedPrefix:
    _object(row, "shared_prefix", _PREFIX_KEYS, ("id", "tokens"))
    assert isinstance(row, dict)
    tokens = _count(row["tokens"], "shared_prefix.tokens", 1)
    if tokens > prompt_tokens:
        _expected("shared_prefix.tokens", f"at most prompt_tokens ({prompt_tokens})", tokens)
    return SharedPrefix(_text(row["id"], "shared_prefix.id"), tokens)


def _hash_ids(ids: object, prompt_tokens: int, block_tokens: int) -> tuple[int, ...]:
    if type(ids) is not list:
        _expected("hash_ids", "a list of integers", ids)
    if not ids:
        return ()
    for index, value in enumerate(ids):
        if type(value) is not int or not 0 <= value < 2**64:
            _expected(f"hash_ids[{index}]", "an integer from 0 to 2^64 - 1", value)
    blocks = -(-prompt_tokens // block_tokens)
    if len(ids) != blocks:
        raise _Wrong(
            "hash_ids",
            f"expected {blocks} ids (prompt_tokens {prompt_tokens} in blocks of {block_tokens}), found {len(ids)}",
        )
    return tuple(ids)


def _confidence(row: object, runs: Mapping[str, Run]) -> dict[str, float]:
    if row is None:
        return {}
    if type(row) is not dict:
        _expected("confidence", "an object of numbers by model", row)
    for model in row:
        if model not in runs:
            raise _Wrong("confidence", f"expected models that have a run, found {model!r}{near(model, runs)}")
    result = {}
    for model in sorted(row):
        value = row[model]
        if type(value) not in _NUMBERS or not 0 <= value <= 1:
            _expected(f"confidence.{model}", "a number from 0 to 1", value)
        result[model] = float(value)
    return result


def _meta(row: object) -> dict[str, Any]:
    if row is None:
        return {}
    if type(row) is not dict:
        _expected("meta", "an object", row)
    try:
        json.dumps(row, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError):
        _expected("meta", "plain JSON without NaN and infinity", row)
    return row


def _object(row: object, path: str, known: frozenset[str], required: Sequence[str]) -> None:
    if type(row) is not dict:
        _expected(path, "an object", row)
    if not known.issuperset(row):
        unknown = min(str(key) for key in row if key not in known)
        raise _Wrong(path, f"unknown field {unknown!r}{near(unknown, known)} (fields: {', '.join(sorted(known))})")
    for key in required:
        if key not in row:
            raise _Wrong(path, f"field {key!r} is missing")


def _count(value: object, path: str, least: int) -> int:
    if type(value) is not int or not least <= value <= MAX_TOKENS:
        _expected(path, "a positive integer" if least else "a non-negative integer", value)
    return value


def _seconds(value: object, path: str) -> float:
    if (type(value) is not int and type(value) is not float) or value < 0 or value > 1e12 or not isfinite(value):
        _expected(path, "a finite number of seconds, at least 0", value)
    return float(value)


def _text(value: object, path: str, what: str = "a non-empty string") -> str:
    if type(value) is not str or not value:
        _expected(path, what, value)
    return _encodable(value, path)


def _optional_text(value: object, path: str) -> str | None:
    if value is None:
        return None
    if type(value) is not str:
        _expected(path, "a string or null", value)
    return _encodable(value, path)


def _encodable(text: str, path: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _Wrong(path, f"expected text, found half a surrogate pair at character {error.start}") from None
    return text


def _expected(path: str, expected: str, found: object) -> NoReturn:
    try:
        shown = json.dumps(found)
    except (ValueError, TypeError, RecursionError):
        shown = repr(found)
    limit = "" if type(found) is not int or found <= MAX_TOKENS else f" up to {MAX_TOKENS}"
    raise _Wrong(path, f"expected {expected}{limit}, found {shown if len(shown) <= 60 else shown[:57] + '...'}")


def _run_to_dict(run: Run) -> dict[str, Any]:
    stages = [
        _stage_to_dict(stage, _prefix_parent(run.stages[:index], stage.after)) for index, stage in enumerate(run.stages)
    ]
    return {"solved": run.solved, "stages": stages}


def _stage_to_dict(stage: Stage, previous: Stage | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": stage.name,
        "prompt_tokens": stage.prompt_tokens,
        "output_tokens": stage.output_tokens,
    }
    if stage.after is not None:
        row["after"] = list(stage.after)
    if stage.reused_tokens != _default_reuse(previous, stage.prompt_tokens, stage.shared_prefix):
        row["reused_tokens"] = stage.reused_tokens
    if stage.delay_s:
        row["delay_s"] = stage.delay_s
    if stage.system_tokens is not None:
        row["system_tokens"] = stage.system_tokens
    if stage.user_tokens is not None:
        row["user_tokens"] = stage.user_tokens
    if stage.shared_prefix is not None:
        row["shared_prefix"] = {"id": stage.shared_prefix.id, "tokens": stage.shared_prefix.tokens}
    if stage.hash_ids:
        row["hash_ids"] = list(stage.hash_ids)
    if stage.hash_block_tokens != 512:
        row["hash_block_tokens"] = stage.hash_block_tokens
    if stage.prompt is not None:
        row["prompt"] = stage.prompt
    if stage.output is not None:
        row["output"] = stage.output
    return row


_NUMBERS = frozenset((int, float))
_WORKFLOW_KEYS = frozenset(Workflow.__dataclass_fields__)
_RUN_KEYS = frozenset(Run.__dataclass_fields__)
_STAGE_KEYS = frozenset(Stage.__dataclass_fields__)
_PREFIX_KEYS = frozenset(SharedPrefix.__dataclass_fields__)
