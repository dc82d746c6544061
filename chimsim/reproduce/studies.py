"""Looks at a trace that simulate nothing: its lengths, how well predictors order them, what routers know.

Each gives a summary as a sweep does: a row a trace, model, method (``policy``) and part of the trace (``seed``), the
axes up to the column ``cell``, then metrics, so that the same claims can be made about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from chimsim.errors import ChimsimError, near
from chimsim.results import summary_frame
from traces import Trace, load_trace

PARTS = 8
"""Parts of a trace that are left out in turn, to see how far its moments scatter."""
BACKENDS = ("tfidf", "forest")
AXES = ("trace", "combo", "policy", "seed")
Row = dict[str, Any]


def study(kind: str, keys: Mapping[str, Any], tell: Callable[[str], None] = lambda text: None) -> pd.DataFrame:
    """The summary of a kind (lengths, ranking, router) for the keys of its file.

    ``trace`` is a list of traces, ``models`` the models (all), ``folds`` the parts that learners are judged on in
    turn, ``workflows`` how many of each trace. Raises one of the packages' errors.
    """
    known = ("trace", "models", "folds", "workflows")
    for key in keys:
        if key not in known:
            raise ChimsimError(f"{kind}: unknown key {key!r}{near(key, known)} (there are {', '.join(known)})")
    rows: list[Row] = []
    for name in keys.get("trace", []):
        trace = load_trace(name)
        first = trace.workflows[: keys.get("workflows")]
        part = Trace(trace.name, first, trace.digest)
        rows += _STUDIES[kind](part, keys.get("models"), int(keys.get("folds", 5)), tell)
    if not rows:
        raise ChimsimError(f"{kind}: no trace is named")
    ordered = [{axis: row[axis] for axis in AXES} | {"cell": ""} | row for row in rows]
    return summary_frame(ordered)


def workflow_tokens(trace: Trace, model: str) -> list[int]:
    """Output tokens of each workflow's run on the model, over all its stages."""
    runs = [workflow.runs[model] for workflow in trace.workflows if model in workflow.runs]
    return [sum(stage.output_tokens for stage in run.stages) for run in runs]


def _lengths(trace: Trace, models: list[str] | None, folds: int, tell: Callable[[str], None]) -> Iterator[Row]:
    for model in models or trace.models:
        tokens = np.array(workflow_tokens(trace, model), np.float64)
        for number in range(PARTS):
            yield {"trace": trace.name, "combo": "", "policy": model, "seed": number} | {
                f"{name}_output_tokens": _pseudo_value(tokens, number, moment) for name, moment in _MOMENTS.items()
            }


_MOMENTS: dict[str, Callable[[Any], Any]] = {"mean": np.mean, "std": np.std, "p50": np.median}


def _pseudo_value(values: Any, number: int, moment: Callable[[Any], Any]) -> float:
    """The jackknife's (Tukey, 1958): their mean is the moment of all values, their scatter gives its interval."""
    rest = values[np.arange(len(values)) % PARTS != number]
    return float(PARTS * moment(values) - (PARTS - 1) * moment(rest))


def _ranking(trace: Trace, models: list[str] | None, folds: int, tell: Callable[[str], None]) -> Iterator[Row]:
    from calibration.length_eval import evaluate, judge
    from calibration.length_model import train_length
    from calibration.rows import check_models
    from calibration.rows import folds as parts_of

    chosen = check_models(trace, models)
    order = [workflow.workflow_id for workflow in trace.workflows]
    for number, part in enumerate(parts_of(trace, folds)):
        tell(f"{trace.name}: lengths, {part.name}")
        model = train_length(part.train, chosen)
        for scores in evaluate(judge(model, part.test, part.train), order):
            for method in ("fcfs", "prompt", "predicted"):
                yield {
                    "trace": trace.name,
                    "combo": scores["model"],
                    "policy": "forest" if method == "predicted" else method,
                    "seed": number,
                    "kendall_distance": scores["kendall"]["workflow"][method],
                }


def _router(trace: Trace, models: list[str] | None, folds: int, tell: Callable[[str], None]) -> Iterator[Row]:
    from calibration.router_eval import evaluate
    from calibration.router_model import learning_set, train_router
    from calibration.rows import check_models
    from calibration.rows import folds as parts_of

    chosen = check_models(trace, models)
    for number, part in enumerate(parts_of(trace, folds)):
        test = learning_set(part.test, chosen)
        for backend in BACKENDS:
            tell(f"{trace.name}: {backend} router, {part.name}")
            made = train_router(learning_set(part.train, chosen), backend=backend)
            scores = evaluate(test, made.predict_proba(test.prompts))
            row = {"trace": trace.name, "combo": "", "seed": number}
            yield {**row, "policy": backend, "map": scores["map"], "gap_auc": scores.get("gap_auc")}
        yield {**row, "policy": "constant", "map": scores["base_rate"], "gap_auc": 0.5}


_STUDIES: dict[str, Callable[[Trace, list[str] | None, int, Callable[[str], None]], Iterator[Row]]] = {
    "lengths": _lengths,
    "ranking": _ranking,
    "router": _router,
}
