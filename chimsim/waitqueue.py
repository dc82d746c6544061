"""The queue in front of one engine: best standing first, and whoever has waited too long before all others.

Pure bookkeeping: instants are passed in, nothing here reads a clock.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

from policies.interface import Priority

Standing = tuple[float, ...]
"""(0,) while promoted, else (1, *priority): promoted requests are equals, and better than all others."""

PROMOTED: Standing = (0.0,)


def standing_of(priority: Priority) -> Standing:
    """The standing of a request that is not promoted."""
    return (1.0, *priority)


class Waiting:
    """A request's place in the queue; ``queued`` turns false when it leaves."""

    __slots__ = ("deadline_at", "number", "promoted", "queued", "request_id", "standing")

    def __init__(self, request_id: int, standing: Standing, number: int, deadline_at: float) -> None:
        self.request_id = request_id
        self.standing = standing
        self.number = number
        self.deadline_at = deadline_at
        self.promoted = False
        self.queued = True


class WaitQueue:
    """Waiting requests by (standing, submission); a request past its deadline is promoted by `promote`.

    Promoted requests are served in order of enqueueing. Push and pop are O(log n).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Standing, int, int, Waiting]] = []
        self._deadlines: list[tuple[float, int, Waiting]] = []
        self._promoted: list[tuple[int, Waiting]] = []
        self._size = 0
        self._pushed = 0

    def __len__(self) -> int:
        return self._size

    def push(self, request_id: int, standing: Standing, deadline_at: float = inf) -> Waiting:
        """Enqueue a request that is to be promoted at ``deadline_at`` (an instant in seconds)."""
        number = self._pushed
        self._pushed = number + 1
        place = Waiting(request_id, standing, number, deadline_at)
        heappush(self._heap, (standing, request_id, number, place))
        if deadline_at < inf:
            heappush(self._deadlines, (deadline_at, number, place))
        self._size += 1
        return place

    def promote(self, now: float) -> None:
        """Give every request whose deadline has come its promotion."""
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= now or not deadlines[0][2].queued):
            place = heappop(deadlines)[2]
            if place.queued:
                place.promoted = True
                heappush(self._promoted, (place.number, place))

    def best(self, now: float) -> Standing | None:
        """The standing of the next request to be served, None when the queue is empty."""
        place = self._head(now)
        if place is None:
            return None
        return PROMOTED if place.promoted else place.standing

    def pop(self, now: float) -> Waiting | None:
        """Take the next request to be served out of the queue."""
        place = self._head(now)
        if place is not None:
            self.remove(place)
        return place

    def remove(self, place: Waiting) -> None:
        """Take a request out of the queue, wherever it stands."""
        place.queued = False
        self._size -= 1

    def _head(self, now: float) -> Waiting | None:
        if self._deadlines:
            self.promote(now)
        promoted = self._promoted
        while promoted and not promoted[0][1].queued:
            heappop(promoted)
        if promoted:
            return promoted[0][1]
        heap = self._heap
        while heap and not heap[0][3].queued:
            heappop(heap)
        return heap[0][3] if heap else None
