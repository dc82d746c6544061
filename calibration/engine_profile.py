"""The engine profile: how long a step of one model on one kind of GPU takes, and how much KV memory it has.

Values and arithmetic only: it keeps no clock and no queue, and reads no file. Times are in seconds, lengths in tokens.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import NamedTuple

from calibration.curves import CURVES, ChunkCurve, DecodeCurve, MixedGrid, RowCurve
from calibration.figures import DENSE, FIELDS, Figure, ProfileError, Provenance, check_number, near, write_figures

__all__ = ["EngineProfile", "ProvenanceRow"]

DECODE_TERMS = ("a0", "a1", "a2")
MIXED_TERMS = ("w0", "w1", "w2", "m0", "m1")


class ProvenanceRow(NamedTuple):
    """One number of a profile as people read it."""

    field: str
    value: float
    unit: str
    provenance: Provenance
    source: str


@dataclass(frozen=True)
class EngineProfile:
    """One model on one kind of GPU (``gpus`` of them with tensor parallelism).

    A step of ``T`` tokens in ``rows`` sequences takes (a closed form fitted to measured operation tables)::

        t = host_s + dense(T) + sequence_s * rows + layers * attention
            + allreduce_base_s + allreduce_token_s * T
        pure decode:  attention = a0 + a1 * n + a2 * S
        with chunks:  attention = w0 + sum(w1 * c * (k + c / 2) + w2 * k) + m0 * n + m1 * S

    with ``n`` decodes that have ``S`` tokens of context together, and prefill chunks of ``c`` tokens after
    ``k`` tokens of context. ``dense`` is a table (tokens, seconds), linear in between, constant before its
    first entry and continued at its last slope; ``capture_tokens`` are the graph sizes to which T is padded.

    Where straight lines do not fit, tables take their place (see `calibration.curves`): ``sequences`` that of
    sequence_s * rows, ``decode`` that of a0 + a1 * n + a2 * S, ``chunk`` with ``mixed`` that of the w and m terms.
    ``X``, the excess, is n times the longest context of the decodes, minus S: what skewed batches pay for. While the
    batch is the same X is too, so a pure decode step is linear in S with either form.

    ``num_kv_tokens`` counts all blocks, the one that vLLM reserves too. ``origins`` says of each number
    (name, provenance, source); a number without an entry was set in code. Raises `ProfileError`.
    """

    model: str
    gpu: str
    dense: tuple[tuple[int, float], ...]
    num_kv_tokens: int
    max_model_len: int
    layers: int = 1
    aliases: tuple[str, ...] = ()
    gpus: int = 1
    notes: str = ""
    hidden_size: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    parameters: float = 0.0
    block_parameters: float = 0.0
    head_parameters: float = 0.0
    memory_bytes: int = 0
    kv_bytes_per_token: int = 0
    mean_call_tokens: float = 2000.0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_tokens: int = 16
    host_s: float = 0.0
    sequence_s: float = 0.0
    capture_tokens: tuple[int, ...] = ()
    a0: float = 0.0
    a1: float = 0.0
    a2: float = 0.0
    w0: float = 0.0
    w1: float = 0.0
    w2: float = 0.0
    m0: float = 0.0
    m1: float = 0.0
    allreduce_base_s: float = 0.0
    allreduce_token_s: float = 0.0
    sequences: RowCurve | None = None
    decode: DecodeCurve | None = None
    chunk: ChunkCurve | None = None
    mixed: MixedGrid | None = None
    origins: tuple[tuple[str, Provenance, str], ...] = ()

    def __post_init__(self) -> None:
        for name, field in FIELDS.items():
            wrong = check_number(getattr(self, name), field)
            if wrong:
                raise ProfileError(f"profile {self.model!r}: {name} {wrong}")
        if not self.dense:
            raise ProfileError(f"profile {self.model!r}: dense is empty; expected at least one (tokens, seconds)")
        for (tokens, seconds), before in zip(self.dense, (None, *self.dense), strict=False):
            if tokens < 1 or (before is not None and tokens <= before[0]):
                raise ProfileError(f"profile {self.model!r}: dense at {tokens} tokens; expected rising tokens from 1")
            wrong = check_number(seconds, DENSE)
            if wrong:
                raise ProfileError(f"profile {self.model!r}: dense at {tokens} tokens {wrong}")
        if self.dense[-1][1] < self.dense[-2:][0][1]:
            raise ProfileError(
                f"profile {self.model!r}: dense ends falling ({self.dense[-2][1]} to {self.dense[-1][1]}); "
                "expected a last segment that does not fall, because it is continued"
            )
        if (self.chunk is None) != (self.mixed is None):
            raise ProfileError(
                f"profile {self.model!r}: attention.chunk and attention.mixed go together; one is missing"
            )
        for key, terms in (("sequences", ("sequence_s",)), ("decode", DECODE_TERMS), ("mixed", MIXED_TERMS)):
            both = [term for term in terms if getattr(self, key) is not None and getattr(self, term)]
            if both:
                raise ProfileError(
                    f"profile {self.model!r}: {', '.join(both)} beside the table {key}, which takes their place; "
                    "expected 0, or no table"
                )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ProfileError(
                f"profile {self.model!r}: max_num_batched_tokens is {self.max_num_batched_tokens}; "
                f"expected at least max_num_seqs ({self.max_num_seqs}), as vLLM demands"
            )
        if self.num_kv_tokens < self.mean_call_tokens:
            raise ProfileError(
                f"profile {self.model!r}: num_kv_tokens is {self.num_kv_tokens}; expected room for one call "
                f"of mean_call_tokens ({self.mean_call_tokens:g})"
            )

    @property
    def max_batch_size(self) -> int:
        """The smaller of ``max_num_seqs`` and the number of mean calls that KV memory holds."""
        return min(self.max_num_seqs, int(self.num_kv_tokens // self.mean_call_tokens))

    def dense_s(self, tokens: int) -> float:
        """Everything of a step that depends on the number of tokens alone, host and all-reduce left out."""
        if self.capture_tokens and tokens <= self.capture_tokens[-1]:
            tokens = self.capture_tokens[bisect_left(self.capture_tokens, tokens)]
        table = self.dense
        if tokens <= table[0][0] or len(table) == 1:
            return table[0][1]
        right = min(bisect_left(table, (tokens, 0.0)), len(table) - 1)
        (x0, y0), (x1, y1) = table[right - 1], table[right]
        return y1 if tokens == x1 else y0 + (y1 - y0) * ((tokens - x0) / (x1 - x0))

    @cached_property
    def _by_tokens(self) -> list[float]:
        """host + dense + all-reduce by tokens of the step: what every step looks up."""
        last = max(self.max_num_batched_tokens, self.max_num_seqs)
        return [self._token_terms_s(tokens) for tokens in range(last + 1)]

    def _token_terms_s(self, tokens: int) -> float:
        return self.host_s + self.dense_s(tokens) + self.allreduce_base_s + self.allreduce_token_s * tokens

    @cached_property
    def _factors(self) -> tuple[float, ...]:
        """The attention terms times the layers: w0, w1, w2, m0, m1."""
        return tuple(self.layers * getattr(self, term) for term in MIXED_TERMS)

    @property
    def skewed(self) -> bool:
        """Whether a step depends on the longest context of the decodes, not on their total alone."""
        return any(any(table.skew) for table in (self.decode, self.mixed) if table is not None)

    @cached_property
    def _by_rows(self) -> list[float]:
        """What the sequences of a step take, by their number."""
        return [self._rows_s(rows) for rows in range(self.max_num_seqs + 1)]

    def _rows_s(self, rows: int) -> float:
        return self.sequence_s * rows if self.sequences is None else self.sequences.at(rows)

    def decode_constant_s(self, n: int, excess_tokens: int = 0) -> float:
        """A pure decode step of ``n`` sequences, all but the term that grows with their context."""
        by_tokens = self._by_tokens
        tokens_s = by_tokens[n] if n < len(by_tokens) else self._token_terms_s(n)
        if self.decode is None:
            attention_s = self.a0 + self.a1 * n
        else:
            base_s, context_s, skew = self.decode.at(n)
            attention_s = base_s + context_s * skew * excess_tokens
        return tokens_s + self._rows_s(n) + self.layers * attention_s

    def decode_slope_s(self, n: int = 1) -> float:
        """Seconds that each token of the decodes' total context adds to a pure decode step of ``n`` sequences."""
        return self.layers * (self.a2 if self.decode is None else self.decode.at(n)[1])

    def mixed_step_s(
        self, n_decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]], excess_tokens: int = 0
    ) -> float:
        """A step of ``n_decodes`` decodes (total context ``context_tokens``) and prefill ``chunks``.

        A chunk is (its tokens, the tokens of context before them). Without chunks this is a pure decode step.
        ``excess_tokens`` is n_decodes times the longest context, minus the total; 0 is a batch of equals.
        """
        if not chunks:
            constant_s = self.decode_constant_s(n_decodes, excess_tokens)
            return constant_s + self.decode_slope_s(n_decodes) * context_tokens
        prefill, pairs, before = 0, 0.0, 0
        for tokens, context in chunks:
            prefill += tokens
            pairs += tokens * (context + 0.5 * tokens)
            before += context
        if self.chunk is None or self.mixed is None:
            w0, w1, w2, m0, m1 = self._factors
            attention_s = w0 + w1 * pairs + w2 * before + m0 * n_decodes + m1 * context_tokens
        else:
            attention_s = self.chunk.base_s[0] + self.mixed.at(n_decodes, context_tokens, excess_tokens, prefill)
            for tokens, context in chunks:
                base_s, context_s = self.chunk.at(tokens)
                attention_s += base_s + context_s * context
            attention_s *= self.layers
        step_tokens, rows = n_decodes + prefill, n_decodes + len(chunks)
        by_tokens, by_rows = self._by_tokens, self._by_rows
        tokens_s = by_tokens[step_tokens] if step_tokens < len(by_tokens) else self._token_terms_s(step_tokens)
        rows_s = by_rows[rows] if rows < len(by_rows) else self._rows_s(rows)
        return tokens_s + rows_s + attention_s

    def decode_s_per_token(self, batch: int, mean_context: float = 0.0) -> float:
        """Step time, hence time per output token of each sequence, of ``batch`` decodes.

        Divide by the same ``batch`` only: the step time at one batch over the size of another is the classic
        mistake. With the default context of 0 it is the bare decode table.
        """
        return self.decode_constant_s(batch) + self.decode_slope_s(batch) * batch * mean_context

    def figure(self, name: str) -> Figure:
        """The number of that name (``dense[8]`` for a table entry) with where it comes from."""
        for row in self.provenance():
            if row.field == name:
                return Figure(row.value, row.provenance, row.source)
        raise ProfileError(f"profile {self.model!r}: unknown number {name!r}{near(name, FIELDS)}")

    def provenance(self) -> list[ProvenanceRow]:
        """Every number with its unit, provenance and source; of a table in `CURVES` one row with its length."""
        origins = {name: (provenance, source) for name, provenance, source in self.origins}
        unset: tuple[Provenance, str] = ("assumed", "not stated: the default")
        rows = []
        for name, field in FIELDS.items():
            rows.append(ProvenanceRow(name, float(getattr(self, name)), field.unit, *origins.get(name, unset)))
            if name == "sequence_s":
                for tokens, seconds in self.dense:
                    key = f"dense[{tokens}]"
                    rows.append(ProvenanceRow(key, seconds, DENSE.unit, *origins.get(key, unset)))
                rows += [
                    ProvenanceRow("capture_tokens", float(size), "tokens", *origins.get("capture_tokens", unset))
                    for size in self.capture_tokens
                ]
        for key in CURVES:
            table = getattr(self, key)
            if table is not None:
                entries = len(getattr(table, table.axis))
                rows.append(ProvenanceRow(key, float(entries), f"entries by {table.axis}", *origins.get(key, unset)))
        return rows

    def to_toml(self) -> str:
        """A TOML file that `load_profile` reads back to an equal profile (with every origin filled in)."""
        rows = self.provenance()
        figures = {row.field: Figure(row.value, row.provenance, row.source) for row in rows}
        captures = (self.capture_tokens, figures.pop("capture_tokens")) if self.capture_tokens else None
        tables = {key: (getattr(self, key), figures.pop(key)) for key in CURVES if key in figures}
        head = {name: getattr(self, name) for name in ("model", "aliases", "gpu", "gpus", "notes")}
        return write_figures(head, figures, captures, tables)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over what a run can depend on: model, GPU and numbers, not notes, aliases and sources."""
        skip = {"aliases", "notes", "origins"}
        content = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in skip}
        for key in CURVES:
            table = content.pop(key)
            if table is not None:
                content[key] = asdict(table)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
