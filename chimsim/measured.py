"""Measured runs, read into one table: chimsim's own records, LLMServingSim's bench files, `vllm bench serve` results.

This is the one place that defines chimsim's own record of a live run (`Record`), written by `write_records` (or a
line at a time, `record_line`) and read back by `read_records`: JSON Lines, one request a line, the keys named as
`Record`'s fields, times in seconds from the run's start on one clock. `read_run` detects the format by content.
Everything else of a run (the engine's settings, its running and waiting counts over time) is `chimsim.run_meta`'s.
It reads and checks; it compares nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from chimsim.errors import ChimsimError, near
from chimsim.results import write_file
from traces.schema import MAX_TOKENS

FORMATS = ("chimsim", "llmservingsim", "vllm-bench")
COMPLETED = "completed"
STATUSES = (COMPLETED, "failed", "aborted")
TIMES = ("ready_at", "admitted_at", "first_token_at", "finished_at")
MOST_S = 1e12
"""No clock of seconds has come so far."""
CLOCK_NOISE_S = 1e-6
"""Stamps of one instant may be this far apart, in the wrong direction too: they are rounded decimal numbers."""


@dataclass(frozen=True, slots=True)
class Record:
    """One request to a live engine as its client saw it; a line of chimsim's own format.

    ``submitted_at``, ``first_token_at`` and ``last_token_at`` are seconds from the run's start, on one clock.
    ``queued_s`` is the time from submission to first admission and ``cached_tokens`` how many prompt tokens the
    engine found in its prefix cache, each None where the engine did not say. A request that is not ``completed``
    (``failed``, ``aborted``) may lack both token stamps.
    """

    request_id: str
    model: str
    engine: str
    submitted_at: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    queued_s: float | None
    first_token_at: float | None
    last_token_at: float | None
    status: str = COMPLETED
    workflow_id: str | None = None
    stage: int | None = None


OPTIONAL = ("workflow_id", "stage")


@dataclass(frozen=True)
class MeasuredRun:
    """A measured run.

    ``requests`` has one row a completed request, in order of arrival: ``request_id``, ``prompt_tokens``,
    ``output_tokens``, ``cached_tokens`` and the instants ``ready_at`` (it could be sent), ``admitted_at`` (first
    scheduled), ``first_token_at``, ``finished_at`` in seconds from the first ``ready_at``; NaN where the run did not
    record it. ``left_out`` counts by reason what is not in it. ``started_at`` is when the first request was ready,
    on the file's own clock. ``ready_from`` says what ``ready_at`` was taken from.
    """

    format: str
    source: str
    requests: pd.DataFrame
    model: str | None
    left_out: Mapping[str, int]
    started_at: float
    ready_from: str


def record_line(record: Record) -> str:
    """The record as one line of a file, without its end. Raises `ChimsimError` for values that are no record."""
    row = asdict(record)
    _check_record(row, f"record {record.request_id!r}")
    return json.dumps({key: value for key, value in row.items() if value is not None or key not in OPTIONAL})


def write_records(path: Path | str, records: Iterable[Record]) -> None:
    """Write a run's records, all or nothing, in the order given."""
    text = "".join(record_line(record) + "\n" for record in records)
    write_file(Path(path), text.encode())


def read_records(path: Path | str) -> list[Record]:
    """The records of a file in chimsim's own format, in file order. Raises `ChimsimError` naming file and line."""
    return _records(_rows(_text(Path(path)), Path(path)))


def read_run(path: Path | str, format: str | None = None) -> MeasuredRun:
    """Read a measured run; the format is seen from the content unless it is given. Raises `ChimsimError`."""
    path = Path(path)
    if format is not None and format not in FORMATS:
        raise ChimsimError(f"format {format!r} is unknown; choose from {', '.join(FORMATS)}{near(format, FORMATS)}")
    text = _text(path)
    result = _whole(text)
    if format == "vllm-bench" or (format is None and result is not None and _looks_like_bench(result)):
        if result is None:
            raise ChimsimError(f"{path}: expected one JSON object of vllm bench serve, found {_seen(text)}")
        return _bench_result(result, path)
    if format is None and result is not None:
        format = _line_format(result, path)
    rows = _rows(text, path)
    if format is None:
        format = _line_format(rows[0][1], path)
    if format == "llmservingsim":
        return _llmservingsim(rows, path)
    return _own(rows, path)


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ChimsimError(f"{path}: no such file of a measured run") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ChimsimError(f"{path}: cannot be read: {error}") from None
    if not text.strip():
        raise ChimsimError(f"{path}: the file is empty; expected the requests of a measured run")
    return text


def _whole(text: str) -> dict[str, Any] | None:
    """The file as one JSON object, if it is one."""
    try:
        value = _json(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _json(text: str) -> Any:
    """`json.loads`; half a surrogate pair, which could not be written again, is a `ValueError`, too."""
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _seen(text: str) -> str:
    first = text.strip().splitlines()[0]
    return repr(first[:40] + "..." if len(first) > 40 else first)


Row = tuple[str, dict[str, Any]]
"""Where it stands (file:line) and its content."""


def _rows(text: str, path: Path) -> list[Row]:
    rows: list[Row] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = _json(line)
        except (ValueError, RecursionError) as error:
            raise ChimsimError(f"{where}: not valid JSON ({error}); expected one request a line") from None
        if not isinstance(row, dict):
            raise ChimsimError(f"{where}: expected an object, found {_short(row)}")
        rows.append((where, row))
    return rows


def _looks_like_bench(result: Mapping[str, Any]) -> bool:
    return "request_throughput" in result or "input_lens" in result or "ttfts" in result


def _line_format(row: Mapping[str, Any], path: Path) -> str:
    if "input_toks" in row:
        return "llmservingsim"
    if "submitted_at" in row:
        return "chimsim"
    if _looks_like_bench(row):
        raise ChimsimError(f"{path}: several results of vllm bench serve in one file (--append-result); expected one")
    keys = ", ".join(sorted(row)[:6]) or "no key"
    raise ChimsimError(
        f"{path}: no format known has lines of {keys}; expected submitted_at (chimsim's records), input_toks "
        "(LLMServingSim's bench) or input_lens (vllm bench serve --save-detailed)"
    )


def _own(rows: Sequence[Row], path: Path) -> MeasuredRun:
    records = _records(rows)
    for name in ("engine", "model"):
        values = sorted({getattr(record, name) for record in records})
        if len(values) > 1:
            raise ChimsimError(f"{path}: requests to {len(values)} {name}s ({', '.join(values)}); expected one a file")
    left_out: dict[str, int] = {}
    table = []
    for record in records:
        if record.status != COMPLETED:
            left_out[record.status] = left_out.get(record.status, 0) + 1
            continue
        queued_s = record.queued_s
        table.append(
            (
                record.request_id,
                record.prompt_tokens,
                record.output_tokens,
                record.cached_tokens,
                record.submitted_at,
                None if queued_s is None else record.submitted_at + queued_s,
                record.first_token_at,
                record.last_token_at,
            )
        )
    return _run("chimsim", path, table, records[0].model, left_out, "submitted_at")


def _records(rows: Sequence[Row]) -> list[Record]:
    records = []
    seen: dict[str, str] = {}
    for where, row in rows:
        _check_record(row, where)
        other = seen.setdefault(row["request_id"], where)
        if other != where:
            raise ChimsimError(f"{where}: request_id {row['request_id']!r} is also at {other}; expected each once")
        records.append(Record(**row))
    return records


def _check_record(row: Mapping[str, Any], where: str) -> None:
    known = [field.name for field in fields(Record)]
    for key in row:
        if key not in known:
            raise ChimsimError(f"{where}: unknown key {key!r}{near(key, known) or '; known: ' + ', '.join(known)}")
    for key in known:
        if key not in row and key not in (*OPTIONAL, "status"):
            raise ChimsimError(f"{where}: {key} is missing")
    status = row.get("status", COMPLETED)
    if status not in STATUSES:
        raise ChimsimError(f"{where}: status is {_short(status)}; expected {', '.join(STATUSES)}")
    for key in ("request_id", "model", "engine"):
        if not isinstance(row[key], str) or not row[key]:
            raise ChimsimError(f"{where}: {key} is {_short(row[key])}; expected a name in quotes")
    _number(row["submitted_at"], "submitted_at", where)
    _count(row["prompt_tokens"], "prompt_tokens", where, 1)
    _count(row["output_tokens"], "output_tokens", where, 1 if status == COMPLETED else 0)
    if row["cached_tokens"] is not None:
        _count(row["cached_tokens"], "cached_tokens", where, 0, row["prompt_tokens"])
    for key in ("queued_s", "first_token_at", "last_token_at"):
        if row[key] is not None:
            _number(row[key], key, where)
    if status == COMPLETED and row["last_token_at"] is None:
        raise ChimsimError(f"{where}: last_token_at is null; a completed request has one")
    admitted_at = None if row["queued_s"] is None else row["submitted_at"] + row["queued_s"]
    stamps = {
        "submitted_at": row["submitted_at"],
        "submitted_at + queued_s": admitted_at,
        "first_token_at": row["first_token_at"],
        "last_token_at": row["last_token_at"],
    }
    _in_order(stamps, where)


def _llmservingsim(rows: Sequence[Row], path: Path) -> MeasuredRun:
    """The arrival is the client's, moved to the engine's clock by the smallest gap between the two of any request.

    The engine stamps a request as queued when it next looks at its inbox, at the end of a step, so the queued
    stamp alone would leave a part of the wait out.
    """
    needed = ("input_toks", "output_toks", "queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
    left_out: dict[str, int] = {}
    kept = []
    for where, row in rows:
        for key in needed:
            if key not in row:
                raise ChimsimError(f"{where}: {key} is missing; expected a line of LLMServingSim's bench")
        _count(row["input_toks"], "input_toks", where, 1)
        _count(row["output_toks"], "output_toks", where, 0)
        if row["last_token_ts"] is None or row["queued_ts"] is None or not row["output_toks"]:
            left_out["failed"] = left_out.get("failed", 0) + 1
            continue
        stamps = {key: row[key] for key in needed[2:]}
        for key, value in stamps.items():
            if value is not None:
                _number(value, key, where)
        _in_order(stamps, where)
        kept.append((where, row))
    clients = [row.get("arrival_time") for _, row in kept]
    by_client = bool(kept) and None not in clients
    gap_s = 0.0
    if by_client:
        arrivals = [_number(value, "arrival_time", where) for value, (where, _) in zip(clients, kept, strict=True)]
        gap_s = min(row["queued_ts"] - arrival for arrival, (_, row) in zip(arrivals, kept, strict=True))
    table = [
        (
            str(row.get("request_id", number)),
            row["input_toks"],
            row["output_toks"],
            None,
            row["arrival_time"] + gap_s if by_client else row["queued_ts"],
            row["scheduled_ts"],
            row["first_token_ts"],
            row["last_token_ts"],
        )
        for number, (_, row) in enumerate(kept)
    ]
    ready_from = "arrival_time, on the engine's clock" if by_client else "queued_ts"
    run = _run("llmservingsim", path, table, None, left_out, ready_from)
    if not by_client:
        return run
    return MeasuredRun(**{**vars(run), "started_at": run.started_at - gap_s})


BENCH_LISTS = ("input_lens", "output_lens", "ttfts", "itls")


def _bench_result(result: Mapping[str, Any], path: Path) -> MeasuredRun:
    missing = [key for key in BENCH_LISTS if key not in result]
    if missing:
        raise ChimsimError(
            f"{path}: {missing[0]} is missing; expected a result of vllm bench serve saved with --save-result "
            "and --save-detailed"
        )
    if "start_times" not in result:
        raise ChimsimError(
            f"{path}: start_times is missing: this version of vllm bench serve did not save when requests were sent, "
            "so the run cannot be replayed; record it with a newer one (vLLM pull request 32667, January 2026)"
        )
    if not isinstance(result["start_times"], list):
        raise ChimsimError(f"{path}: start_times is {_short(result['start_times'])}; expected a list of seconds")
    names = [*BENCH_LISTS, *(key for key in ("errors", "latencies") if key in result)]
    for key in names:
        if not isinstance(result[key], list) or len(result[key]) != len(result["start_times"]):
            raise ChimsimError(
                f"{path}: {key} is {_short(result[key])}; expected a list of {len(result['start_times'])} values, "
                "one a request as in start_times"
            )
    left_out: dict[str, int] = {}
    table = []
    for index, start in enumerate(result["start_times"]):
        where = f"{path}: request {index}"
        if (result["errors"][index] if "errors" in result else "") or not result["output_lens"][index]:
            left_out["failed"] = left_out.get("failed", 0) + 1
            continue
        _number(start, "start_times", where)
        prompt = _count(result["input_lens"][index], "input_lens", where, 1)
        output = _count(result["output_lens"][index], "output_lens", where, 1)
        ttft_s = _number(result["ttfts"][index], "ttfts", where, 0.0)
        gaps = result["itls"][index]
        if not isinstance(gaps, list):
            raise ChimsimError(f"{where}: itls is {_short(gaps)}; expected a list of seconds")
        latency_s = result["latencies"][index] if "latencies" in result else None
        if latency_s is None:
            latency_s = ttft_s + sum(_number(gap, "itls", where, 0.0) for gap in gaps)
        _number(latency_s, "latencies", where, 0.0)
        first = start + ttft_s if ttft_s else None
        table.append((str(index), prompt, output, None, start, None, first, start + latency_s))
    model = result.get("model_id")
    return _run("vllm-bench", path, table, model if isinstance(model, str) else None, left_out, "start_times")


def _run(
    format: str,
    path: Path,
    table: Sequence[tuple[Any, ...]],
    model: str | None,
    left_out: Mapping[str, int],
    ready_from: str,
) -> MeasuredRun:
    ids = [row[0] for row in table]
    if len(set(ids)) < len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise ChimsimError(f"{path}: request_id {twice!r} stands there twice; expected each once")
    if not table:
        failed = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "it has none"
        raise ChimsimError(f"{path}: no completed request to compare with ({failed})")
    names = ("request_id", "prompt_tokens", "output_tokens", "cached_tokens", *TIMES)
    frame = pd.DataFrame(dict(zip(names, zip(*table, strict=True), strict=True)))
    frame[["cached_tokens", *TIMES]] = frame[["cached_tokens", *TIMES]].astype(np.float64)
    frame = frame.sort_values("ready_at", kind="stable", ignore_index=True)
    started_at = float(frame["ready_at"].iloc[0])
    frame[list(TIMES)] = frame[list(TIMES)] - started_at
    return MeasuredRun(format, str(path), frame, model, dict(left_out), started_at, ready_from)


def _in_order(stamps: Mapping[str, float | None], where: str) -> None:
    before: tuple[str, float] | None = None
    for name, value in stamps.items():
        if value is None:
            continue
        if before is not None and value < before[1] - CLOCK_NOISE_S:
            raise ChimsimError(f"{where}: {name} ({value:g}) is before {before[0]} ({before[1]:g})")
        before = (name, value)


def _number(value: Any, what: str, where: str, low: float | None = None) -> float:
    if type(value) not in (int, float) or not -MOST_S <= value <= MOST_S or (low is not None and value < low):
        expected = "a finite number of seconds" + ("" if low is None else f", at least {low:g}")
        raise ChimsimError(f"{where}: {what} is {_short(value)}; expected {expected}")
    return float(value)


def _count(value: Any, what: str, where: str, low: int, high: int = MAX_TOKENS) -> int:
    if type(value) is not int or not low <= value <= high:
        limits = f"from {low} to {high}" if high != MAX_TOKENS else f"of at least {low}"
        raise ChimsimError(f"{where}: {what} is {_short(value)}; expected a whole number {limits}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
