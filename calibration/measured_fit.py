"""An engine profile from the raw measurements of a live engine, and how well it predicts cells it was not fitted to.

The unknowns are those of the scalar step-time model (`EngineProfile`) for all layers together: an engine does not tell
its layers apart. Every measurement is a sum of steps, so it is linear in them; the squares of relative errors are
minimised, with outliers weighed down, under the condition that no time is negative and ``dense`` never falls.

Not told apart: the host's time and what each sequence costs outside attention. They are in ``dense`` and ``a1``. What a
chunk pays for the context before it, apart from the pairs, is taken to be what a decode pays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import numpy as np
import numpy.typing as npt

from calibration.engine_profile import EngineProfile
from calibration.figures import ProfileError, Provenance
from calibration.fit import Cell, Residuals
from calibration.raw_measurements import KINDS, Header, Measurement, Raw

Floats = npt.NDArray[np.float64]
Step = tuple[float, int, float, tuple[tuple[int, int], ...]]
"""So many steps of: decodes, their context tokens together, prefill chunks (tokens, tokens before them)."""

TERMS = ("a1", "a2", "w0", "w1", "m0", "m1")
HELD_OUT = 3
"""Every so many-th cell of each kind is kept out of the fit whose errors are reported."""
KNOT_FACTOR = 4
LINEAR_FROM = 512
"""Beyond the largest batch ``dense`` has an entry at each such multiple of tokens, up to so many; from there on GPUs
are bound by compute, and what bends upwards is left to attention."""
ROUNDS = 8
TERMS_BY_KIND = {"decode": ("a1", "a2"), "prefill": ("w0", "w1"), "mixed": ("m0", "m1")}
SETTINGS = ("max_num_seqs", "max_num_batched_tokens", "num_kv_tokens", "block_tokens", "max_model_len")
CACHE_KEYS = ("cache_dtype", "enable_prefix_caching", "gpu_memory_utilization", "sliding_window")
"""Labels of vLLM's cache_config_info that belong to a number's source."""
USUAL_CALL_TOKENS = 2000
PARTS = {"decode": "decode steps", "prefill": "prefill", "mixed": "prefill among decodes"}


@dataclass(frozen=True)
class MeasuredFit:
    """``profile`` is fitted to all cells. ``in_sample`` and ``held_out`` are errors of another fit, to two thirds of
    them; ``request_s`` is what a request costs around the engine, None where the engine's own times made it moot.
    """

    profile: EngineProfile
    in_sample: tuple[Residuals, ...]
    held_out: tuple[Residuals, ...]
    request_s: float | None
    scatter: Mapping[str, float]


def fit_raw(raw: Raw, *, mean_call_tokens: float | None = None) -> MeasuredFit:
    """The profile of a raw file. Raises `ProfileError` when it has no decode or no prefill measurement."""
    cells = typical(raw.measurements)
    for kind in ("decode", "prefill"):
        if not any(cell.kind == kind for cell in cells):
            raise ProfileError(
                f"the raw measurements have no {kind} cell (of {len(raw.measurements)} measurements, "
                f"{len(raw.skipped)} cells left out); measure some more"
            )
    budget = raw.header.max_num_batched_tokens
    kept, held = _split(cells)
    part = _Model(kept, budget).fitted(kept)
    whole = _Model(cells, budget)
    profile = _profile(raw.header, whole.fitted(cells), cells, mean_call_tokens)
    return MeasuredFit(
        profile,
        part.residuals(kept),
        part.residuals(held),
        whole.request_s if any(cell.kind == "prefill" and cell.engine_s is None for cell in cells) else None,
        _scatter(raw.measurements),
    )


def typical(measurements: Sequence[Measurement]) -> list[Measurement]:
    """One measurement a cell: the repeat with the median time a step (of two in the middle the faster).

    The median, not the minimum: a run pays for the engine's hiccups too. Not the mean: one stall is no hiccup.
    """
    by_cell: dict[str, list[Measurement]] = {}
    for each in measurements:
        by_cell.setdefault(each.cell, []).append(each)
    chosen = []
    for group in by_cell.values():
        middle = median_low(_pace(each) for each in group)
        chosen.append(next(each for each in group if _pace(each) == middle))
    return sorted(
        chosen, key=lambda each: (KINDS.index(each.kind), each.batch, each.context_tokens, each.prompt_tokens)
    )


def steps_of(measurement: Measurement, budget: int) -> list[Step]:
    """The steps that a measurement is made of; ``budget`` is vLLM's max_num_batched_tokens."""
    batch, context = measurement.batch, measurement.context_tokens
    room = max(budget - batch, 1)
    chunks = [
        (min(room, measurement.prompt_tokens - before), before) for before in range(0, measurement.prompt_tokens, room)
    ]
    steps: list[Step] = [(float(measurement.prefills), batch, context, (chunk,)) for chunk in chunks]
    alone = measurement.steps - measurement.prefills * len(chunks)
    return [*steps, (max(alone, 0.0), batch, context, ())] if batch else steps


class _Model:
    """The unknowns for a set of cells: entries of ``dense`` as increments, the terms, and a request's own time."""

    def __init__(self, cells: Sequence[Measurement], budget: int) -> None:
        self.budget = budget
        batches = sorted({cell.batch for cell in cells if cell.kind == "decode"})
        longest = max(
            sum(tokens for tokens, _ in chunks) + batch
            for cell in cells
            for _, batch, _, chunks in steps_of(cell, budget)
        )
        self.knots = [*batches]
        for knot in (*(batches[-1] * KNOT_FACTOR**i for i in range(1, 5)), LINEAR_FROM, longest):
            if self.knots[-1] < knot <= min(longest, LINEAR_FROM) or knot == longest > self.knots[-1]:
                self.knots.append(knot)
        self.values: Floats = np.zeros(len(self.knots) + len(TERMS) + 1)

    @property
    def request_s(self) -> float:
        return float(self.values[-1])

    def fitted(self, cells: Sequence[Measurement]) -> _Model:
        from scipy.optimize import nnls

        matrix = np.array([self._row(cell) for cell in cells])
        if matrix[:, -1].any() and not any(cell.kind == "mixed" for cell in cells):
            matrix[:, len(self.knots) + TERMS.index("w0")] = 0.0  # not told apart from a request's own time
        relative = matrix / np.array([_seconds(cell) for cell in cells])[:, None]
        scale = np.abs(relative).max(axis=0)
        scale[scale == 0.0] = 1.0
        weight = np.ones(len(cells))
        for _ in range(ROUNDS):
            values, _norm = nnls(relative / scale * weight[:, None], weight)
            errors = np.abs(relative / scale @ values - 1.0)
            # Huber's weights at 1.345 standard deviations
            deviation = max(float(np.median(errors)) / 0.6745, 1e-9)
            weight = np.sqrt(np.minimum(1.0, 1.345 * deviation / np.maximum(errors, 1e-12)))
        self.values = np.asarray(values / scale, dtype=np.float64)
        return self

    def residuals(self, cells: Sequence[Measurement]) -> tuple[Residuals, ...]:
        found = []
        for kind in KINDS:
            of_kind = [cell for cell in cells if cell.kind == kind]
            if of_kind:
                fits = [float(self._row(cell) @ self.values) for cell in of_kind]
                shown = (Cell(cell.cell, _seconds(cell), fit) for cell, fit in zip(of_kind, fits, strict=True))
                found.append(Residuals(PARTS[kind], tuple(shown)))
        return tuple(found)

    def numbers(self) -> dict[str, Any]:
        dense = np.cumsum(self.values[: len(self.knots)])
        terms = dict(zip(TERMS, self.values[len(self.knots) : -1], strict=True))
        return {
            "dense": tuple((knot, _short(value)) for knot, value in zip(self.knots, dense, strict=True)),
            **{name: _short(value) for name, value in terms.items()},
            "w2": _short(terms["a2"]),
        }

    def _row(self, cell: Measurement) -> Floats:
        row = np.zeros(len(self.values))
        dense, terms = row[: len(self.knots)], row[len(self.knots) : -1]
        for count, batch, context, chunks in steps_of(cell, self.budget):
            dense += count * self._ramps(batch + sum(tokens for tokens, _ in chunks))
            if not chunks:
                terms[:2] += count * batch, count * context
            else:
                pairs = sum(tokens * (before + 0.5 * tokens) for tokens, before in chunks)
                before = sum(before for _, before in chunks)
                # w2 is a2: chunks after much context are all as long as the budget, which tells w2 from w1 by nothing
                terms[1:] += count * before, count, count * pairs, count * batch, count * context
        if cell.kind == "prefill" and cell.engine_s is None:
            row[-1] = 1.0
        return row

    def _ramps(self, tokens: int) -> Floats:
        """What each increment of ``dense`` counts for at so many tokens."""
        left, right = np.array(self.knots[:-1], dtype=float), np.array(self.knots[1:], dtype=float)
        ramps = np.clip((tokens - left) / (right - left), 0.0, 1.0)
        if len(ramps) and tokens > self.knots[-1]:
            ramps[-1] = (tokens - left[-1]) / (right[-1] - left[-1])
        return np.concatenate([[1.0], ramps])


def _split(cells: Sequence[Measurement]) -> tuple[list[Measurement], list[Measurement]]:
    """Cells to fit and cells held out: of each kind every third, first and last not among them."""
    kept: list[Measurement] = []
    held: list[Measurement] = []
    for kind in KINDS:
        of_kind = [cell for cell in cells if cell.kind == kind]
        for index, cell in enumerate(of_kind):
            out = index % HELD_OUT == 1 and index != len(of_kind) - 1
            (held if out else kept).append(cell)
    return kept, held


def _profile(
    header: Header, fitted: _Model, cells: Sequence[Measurement], mean_call_tokens: float | None
) -> EngineProfile:
    numbers = fitted.numbers()
    about = f"{header.gpu}, vLLM {header.version}, {header.date}"
    shown = [f"{key} {header.cache_config[key]}" for key in CACHE_KEYS if key in header.cache_config]
    measured = "; ".join((f"measured on {about}", *shown))
    counts = {kind: sum(cell.kind == kind for cell in cells) for kind in KINDS}
    batches = {cell.batch for cell in cells if cell.kind == "decode"}
    origins: list[tuple[str, Provenance, str]] = [
        ("layers", "assumed", "an engine does not tell its layers apart: attention is that of all of them"),
        ("mean_call_tokens", "assumed", "our default" if mean_call_tokens is None else "as given"),
    ]
    for tokens, _ in numbers["dense"]:
        kind = "decode" if tokens in batches else "prefill"
        origins.append((f"dense[{tokens}]", "measured", f"{measured}; {kind} ladder, {counts[kind]} cells"))
    for kind, names in TERMS_BY_KIND.items():
        if counts[kind]:
            origins += [(name, "measured", f"{measured}; {counts[kind]} {kind} cells") for name in names]
    origins.append(("w2", "assumed", "as a2: a chunk reads its context once, as a decode does"))
    origins += [(name, "assumed", "0: inside dense and a1") for name in ("host_s", "sequence_s", "a0")]
    origins += [(name, "assumed", "0: inside dense") for name in ("allreduce_base_s", "allreduce_token_s")]
    if not counts["mixed"]:
        numbers |= {"m0": numbers["a1"], "m1": numbers["a2"]}
        origins += [(name, "assumed", "as in pure decode steps: no mixed step was measured") for name in ("m0", "m1")]
    for name in SETTINGS:
        how = header.settings_from.get(name, "not stated")
        provenance: Provenance = "measured" if how.startswith(("reported", "seen")) else "assumed"
        origins.append((name, provenance, f"{how}; {about}"))
    usual = float(min(USUAL_CALL_TOKENS, header.max_model_len, header.num_kv_tokens))
    return EngineProfile(
        model=header.model,
        gpu=header.gpu,
        gpus=header.gpus,
        mean_call_tokens=usual if mean_call_tokens is None else mean_call_tokens,
        notes=f"Measured on a running engine: {about}. Host, per-sequence and all-reduce times are in dense and a1.",
        origins=tuple(origins),
        **{name: getattr(header, name) for name in SETTINGS},
        **numbers,
    )


def _seconds(cell: Measurement) -> float:
    return cell.seconds if cell.engine_s is None else cell.engine_s


def _pace(cell: Measurement) -> float:
    """Seconds a decode step, or a prefill: what repeats of one cell can be compared by."""
    return cell.seconds / cell.steps if cell.kind == "decode" else _seconds(cell) / cell.prefills


def _scatter(measurements: Sequence[Measurement]) -> dict[str, float]:
    """By kind the median over cells of (slowest - fastest) / typical repeat."""
    paces: dict[tuple[str, str], list[float]] = {}
    for each in measurements:
        paces.setdefault((each.kind, each.cell), []).append(_pace(each))
    spread: dict[str, list[float]] = {}
    for (kind, _), values in paces.items():
        if len(values) > 1:
            spread.setdefault(kind, []).append((max(values) - min(values)) / median_low(values))
    return {kind: float(np.median(values)) for kind, values in spread.items()}


def _short(value: float) -> float:
    """Five digits: more would pretend."""
    return float(f"{value:.5g}")
