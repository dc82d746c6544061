"""What goes wrong because of the input: one error class, and near names for its messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ChimsimError(ValueError):
    """Bad input; the message names the file or option, what was found and what is allowed.

    The command line prints the message on one line and exits with code 2.
    """


def near(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: ``"; did you mean 'x'?"``, or nothing if none is near."""
    by_lower = {known_name.lower(): known_name for known_name in sorted(set(known))}
    close = get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""
