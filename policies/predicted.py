"""Reading a prediction: one number of one model, or an error that says what is missing.

It makes no predictions and fills no gaps.
"""

from __future__ import annotations

from math import inf
from typing import Literal

from policies.interface import Policy, PolicyError, RequestView
from policies.knobs import policy_name

Field = Literal["confidence", "stage_tokens", "remaining_tokens", "rank"]

_LOWEST = {"confidence": 0.0, "stage_tokens": 0.0, "remaining_tokens": 0.0, "rank": -1e300}
_HIGHEST = {"confidence": 1.0, "stage_tokens": 1e300, "remaining_tokens": 1e300, "rank": 1e300}


def predicted(policy: Policy, request: RequestView, field: Field, model: str) -> float:
    """``request.prediction.<field>[model]``.

    Raises:
        PolicyError: there is none for this model, or it is not a finite number in range.
    """
    mapping = getattr(request.prediction, field)
    try:
        value: float = mapping[model]
    except KeyError:
        known = ", ".join(sorted(mapping)) or "no model"
        raise PolicyError(
            f"policy {policy_name(policy)} needs the prediction {field!r} for model {model!r}; "
            f"workflow {request.workflow_id!r} has it for {known}"
        ) from None
    if _LOWEST[field] <= value <= _HIGHEST[field]:
        return value
    rule = "between 0 and 1" if field == "confidence" else "a finite number"
    if field.endswith("_tokens") and -inf < value < 0:
        rule = "0 or more"
    raise PolicyError(
        f"policy {policy_name(policy)}: the prediction {field!r} of workflow {request.workflow_id!r} "
        f"for model {model!r} is {value!r}; it must be {rule}"
    )
