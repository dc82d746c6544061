"""The activity monitor: predicted output tokens in flight on every engine.

One entry a workflow, replaced when a stage of it starts and removed when it ends; nothing is subtracted in
between. Every operation takes constant time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_UNITS_PER_TOKEN = 1 << 20
# Sums are kept in whole units: a float that is added to and subtracted from would never return to exactly 0,
# and an idle engine would lose its ties.


@dataclass
class Activity:
    """Tokens in flight by engine, exact to 2^-20 of a token whatever was added and removed before."""

    _entries: dict[str, tuple[str, int]] = field(default_factory=dict)
    _units: dict[str, int] = field(default_factory=dict)

    def start(self, workflow_id: str, engine: str, tokens: float) -> None:
        """A stage starts: ``tokens`` (finite) are predicted for it and all later ones, on ``engine``."""
        if workflow_id in self._entries:
            self.end(workflow_id)
        units = round(tokens * _UNITS_PER_TOKEN)
        self._entries[workflow_id] = (engine, units)
        self._units[engine] = self._units.get(engine, 0) + units

    def end(self, workflow_id: str) -> None:
        """The workflow ended; an unknown one is no error."""
        entry = self._entries.pop(workflow_id, None)
        if entry is not None:
            engine, units = entry
            left = self._units.get(engine, 0) - units
            if left:
                self._units[engine] = left
            else:
                self._units.pop(engine, None)

    def tokens(self, engine: str) -> float:
        """Predicted tokens in flight on the engine."""
        return self._units.get(engine, 0) / _UNITS_PER_TOKEN
