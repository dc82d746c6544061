"""Results of ``vllm bench serve --save-result --save-detailed``: an object of lists, a place a call.

Read are ``input_lens``, ``output_lens``, ``start_times`` (seconds), ``errors`` and ``model_id``. Calls that failed are
left out. What the calls share is not in it, and neither is which of them belong together.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from traces.files import parse_json, read_lines
from traces.readers.call import Asked, Call, Recorded, expected, json_object, nanoseconds, tokens
from traces.schema import TraceError

_LISTS = ("start_times", "input_lens", "output_lens")


def read(path: Path, asked: Asked) -> Iterator[Recorded]:
    """Yield the calls in the file's order; raises `TraceError`."""
    result = json_object(parse_json("".join(line for _, line in read_lines(path)), str(path)), str(path), _LISTS)
    for name in _LISTS:
        if name not in result:
            raise TraceError(
                f"{path}: {name} is missing; expected a result of vllm bench serve with --save-detailed "
                "(start_times since January 2026, vLLM pull request 32667)"
            )
        if type(result[name]) is not list or len(result[name]) != len(result[_LISTS[0]]):
            expected(str(path), name, "a list of as many values as start_times has, one a call", result[name])
    starts, prompts, outputs = (result[name] for name in _LISTS)
    errors = result.get("errors") or [""] * len(starts)
    if type(errors) is not list or len(errors) != len(starts):
        expected(str(path), "errors", f"a list of {len(starts)} values, one a call", errors)
    model = result.get("model_id")
    for index, start in enumerate(starts):
        where = f"{path}: call {index}"
        if errors[index]:
            asked.notes["failed calls, left out"] += 1
            continue
        call = Call(
            prompt_tokens=tokens(prompts[index], "input_lens", where, 1),
            output_tokens=tokens(outputs[index], "output_lens", where, 0),
            model=model if isinstance(model, str) else None,
        )
        yield Recorded(where, nanoseconds(start, asked.time_unit, "start_times", where), (call,))
