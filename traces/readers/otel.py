"""OpenTelemetry's spans of an agent's run, with the gen_ai attributes of its semantic conventions.

Read are OTLP in JSON (the whole file, or an export a line), spans a line, and what the Python SDK's console exporter
prints. A trace id is a workflow. Its calls are the innermost spans with ``gen_ai.usage.input_tokens``: a framework's
span around a client's tells of the same call. Whatever else has spans (agents, tools) gives calls their names and
their branches: of two calls, the branches beneath their nearest common span count, which are the calls themselves
where nothing is between. If one branch ended before the other started, the call in the other waits for it; if they
overlap, the calls are side by side. The delay is from the last end waited for to the start: the tools' time, and the
agent's program's.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traces.files import read_lines
from traces.readers.call import (
    Asked,
    Call,
    Recorded,
    expected,
    grouped,
    json_object,
    moment_ns,
    nanoseconds,
    parents_first,
    text,
    tokens,
)
from traces.schema import TraceError

_KEYS = {
    "traceId": "trace_id",
    "spanId": "span_id",
    "parentSpanId": "parent_id",
    "parent_span_id": "parent_id",
    "startTimeUnixNano": "start",
    "start_time_unix_nano": "start",
    "start_time": "start",
    "endTimeUnixNano": "end",
    "end_time_unix_nano": "end",
    "end_time": "end",
}
_USAGE = {
    "input": ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
    "output": ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
    "cached": ("gen_ai.usage.cache_read.input_tokens",),
}
_DIGITS = 30
"""Of an integer that stands in quotes; Python would not even read one of thousands."""
_CALLS = ("chat", "generate_content", "text_completion")
_NO_CALLS = ("create_agent", "embeddings", "execute_tool", "invoke_agent", "invoke_workflow", "retrieval")


@dataclass(slots=True)
class _Span:
    """``began_ns`` and ``ended_ns`` are of the span with all beneath it."""

    where: str
    span_id: str
    parent_id: str | None
    start_ns: int
    end_ns: int
    name: str
    attributes: Mapping[str, Any]
    beneath: list[_Span] = field(default_factory=list)
    path: tuple[_Span, ...] = ()
    began_ns: int = 0
    ended_ns: int = 0

    @property
    def operation(self) -> str:
        return str(self.attributes.get("gen_ai.operation.name") or "")


def read(path: Path, asked: Asked) -> Iterator[Recorded]:
    """Yield the traces that have calls, in order of their first spans; raises `TraceError`."""
    for spans in grouped(_spans(path, asked), None):
        calls = _calls(_tree(spans, asked), asked)
        if calls:
            trace_id, first = calls[0]
            yield Recorded(first.where, first.start_ns, _stages([span for _, span in calls]), trace_id)


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    """The file's JSON values, whatever white space is between and in them, with the line that each begins in."""
    places: list[str] = []
    begins: list[int] = []
    parts: list[str] = []
    at = 0
    for where, line in read_lines(path):
        places.append(where)
        begins.append(at)
        parts.append(line)
        at += len(line)
    content = "".join(parts)
    decode = json.JSONDecoder().raw_decode
    at = 0
    while at < len(content):
        if content[at].isspace():
            at += 1
            continue
        where = places[bisect_right(begins, at) - 1]
        try:
            value, at = decode(content, at)
        except json.JSONDecodeError as error:
            number = bisect_right(begins, min(error.pos, len(content) - 1)) - 1
            raise TraceError(
                f"{places[number]}: not valid JSON, {error.msg} at column {error.pos - begins[number] + 1}"
            ) from None
        except RecursionError:
            raise TraceError(f"{where}: not valid JSON for a trace, nested too deeply") from None
        except ValueError as error:
            raise TraceError(f"{where}: not valid JSON for a trace, {error}") from None
        yield where, value


def _spans(path: Path, asked: Asked) -> Iterator[tuple[str, tuple[str, _Span]]]:
    for where, value in _values(path):
        for row in value if type(value) is list else [value]:
            fields = json_object(row, where, ("resourceSpans", "or the fields of a span"))
            for span in _flat(fields, where):
                trace_id, made = _span(span, where, asked)
                yield trace_id, (trace_id, made)


def _flat(fields: Mapping[str, Any], where: str) -> Iterator[Mapping[str, Any]]:
    """The spans of an export, or the one that stands alone."""
    if "resourceSpans" not in fields and "resource_spans" not in fields:
        yield fields
        return
    try:
        for resource in fields.get("resourceSpans", fields.get("resource_spans")) or []:
            for scope in resource.get("scopeSpans", resource.get("scope_spans")) or []:
                yield from scope["spans"]
    except (AttributeError, KeyError, TypeError):
        raise TraceError(f"{where}: expected resourceSpans, scopeSpans and spans within each other") from None


def _span(row: object, where: str, asked: Asked) -> tuple[str, _Span]:
    fields = dict(json_object(row, where, ("traceId", "spanId", "startTimeUnixNano", "endTimeUnixNano", "attributes")))
    fields |= json_object(fields.get("context") or {}, where, ("trace_id", "span_id"))
    for theirs, ours in _KEYS.items():
        if theirs in fields:
            fields[ours] = fields[theirs]
    missing = next((name for name in ("trace_id", "span_id", "start", "end") if name not in fields), None)
    if missing:
        raise TraceError(f"{where}: field {missing!r} of a span is missing (found: {', '.join(list(fields)[:12])})")
    span_id = text(fields["span_id"], "span_id", where)
    where = f"{where}: span {span_id}"
    start_ns, end_ns = (_ns(fields[name], name, where, asked) for name in ("start", "end"))
    if end_ns < start_ns:
        expected(where, "end", f"a time not before the start ({fields['start']})", fields["end"])
    span = _Span(
        where=where,
        span_id=span_id,
        parent_id=text(fields["parent_id"], "parent_id", where) if fields.get("parent_id") else None,
        start_ns=start_ns,
        end_ns=end_ns,
        name=str(fields.get("name", "")),
        attributes=_attributes(fields.get("attributes") or {}, where),
    )
    return text(fields["trace_id"], "trace_id", where), span


def _ns(value: object, name: str, where: str, asked: Asked) -> int:
    if isinstance(value, str) and not (value.isdecimal() and len(value) <= _DIGITS):
        return moment_ns(value, name, where, "2024-05-10T00:00:00.009930Z")
    return nanoseconds(int(value) if isinstance(value, str) else value, asked.time_unit, name, where)


def _attributes(row: object, where: str) -> dict[str, Any]:
    """OTLP's list of keys and typed values, or a plain object, as one."""
    if type(row) is dict:
        return row
    try:
        return {item["key"]: _plain(item["value"]) for item in row}  # type: ignore[attr-defined]
    except (AttributeError, KeyError, TypeError):
        expected(where, "attributes", "an object, or a list of keys and values", row)


def _plain(value: Mapping[str, Any]) -> Any:
    kind: str
    plain: Any
    kind, plain = next(iter(value.items()), ("", None))
    digits = str(plain).removeprefix("-")
    whole = kind in ("intValue", "int_value") and digits.isdecimal() and len(digits) <= _DIGITS
    return int(plain) if whole else plain


def _tree(spans: Sequence[tuple[str, _Span]], asked: Asked) -> list[tuple[str, _Span]]:
    """The spans of a trace, each with its path from the root and with what is beneath it."""
    by_id: dict[str, _Span] = {}
    for _, span in spans:
        other = by_id.setdefault(span.span_id, span)
        if other is not span:
            raise TraceError(f"{span.where}: expected an id of its own, and not that of {other.where}")
    for span in by_id.values():
        if span.parent_id is not None and span.parent_id not in by_id:
            asked.notes["spans whose parent is not in the file (they count as begins of their traces)"] += 1
            span.parent_id = None
    links = {span.span_id: [span.parent_id] if span.parent_id else [] for span in by_id.values()}
    order = parents_first(list(by_id), links, {name: span.where for name, span in by_id.items()})
    for name in order:
        span = by_id[name]
        span.began_ns, span.ended_ns = span.start_ns, span.end_ns
        parent = by_id[span.parent_id] if span.parent_id else None
        span.path = (*parent.path, span) if parent else (span,)
        if parent:
            parent.beneath.append(span)
    for name in reversed(order):
        span = by_id[name]
        for child in span.beneath:
            span.began_ns = min(span.began_ns, child.began_ns)
            span.ended_ns = max(span.ended_ns, child.ended_ns)
    return list(spans)


def _calls(spans: Sequence[tuple[str, _Span]], asked: Asked) -> list[tuple[str, _Span]]:
    """The innermost spans that count tokens, in order of their starts."""
    around: set[str] = set()
    for _, span in spans:
        if _counts(span):
            around.update(outer.span_id for outer in span.path[:-1])
    calls = [item for item in spans if _counts(item[1]) and item[1].span_id not in around]
    without = sum(
        1 for _, span in spans if span.operation in _CALLS and not _counts(span) and span.span_id not in around
    )
    if without:
        asked.notes["calls without token counts, left out"] += without
    return sorted(calls, key=lambda item: (item[1].start_ns, item[1].end_ns))


def _counts(span: _Span) -> bool:
    return span.operation not in _NO_CALLS and _usage(span, "input") is not None


def _usage(span: _Span, what: str) -> Any:
    return next((span.attributes[key] for key in _USAGE[what] if span.attributes.get(key) is not None), None)


def _stages(spans: Sequence[_Span]) -> tuple[Call, ...]:
    earlier = [[before for before in range(index) if _ended(spans[before], span)] for index, span in enumerate(spans)]
    calls = []
    for index, span in enumerate(spans):
        implied = {before for parent in earlier[index] for before in earlier[parent]}
        after = tuple(before for before in earlier[index] if before not in implied)
        ready_ns = max((spans[parent].end_ns for parent in after), default=spans[0].start_ns)
        cached = _usage(span, "cached")
        calls.append(
            Call(
                prompt_tokens=tokens(_usage(span, "input"), _USAGE["input"][0], span.where, 1),
                output_tokens=tokens(_usage(span, "output") or 0, _USAGE["output"][0], span.where, 0),
                name=_name(span),
                after=after,
                delay_ns=max(span.start_ns - ready_ns, 0),
                reused_tokens=tokens(cached or 0, _USAGE["cached"][0], span.where, 0),
                model=_model(span),
            )
        )
    return tuple(calls)


def _model(span: _Span) -> str | None:
    """The model that answered, or else the one that was asked for."""
    for key in ("gen_ai.response.model", "gen_ai.request.model"):
        if span.attributes.get(key):
            return text(span.attributes[key], key, span.where)
    return None


def _ended(one: _Span, other: _Span) -> bool:
    """Whether the branch of the one had ended when that of the other started."""
    for mine, theirs in zip(one.path, other.path, strict=False):
        if mine is not theirs:
            return mine.ended_ns <= theirs.began_ns
    return False


def _name(span: _Span) -> str:
    """The agent that called, or what was called for."""
    for around in reversed(span.path):
        if around.attributes.get("gen_ai.agent.name"):
            return str(around.attributes["gen_ai.agent.name"])
    return span.operation or span.name or "call"
