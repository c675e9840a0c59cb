"""Which worker takes a request that names no owner: the one that it reached, or one with more room.

The policies are pure; ``gym_gunicorn.routing.balancer`` feeds them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Seconds of event-loop lag that count like twice the load.
LAGGING = 0.05


@dataclass(frozen=True, slots=True)
class Room:
    """How much room a worker has.

    ``active``: requests in progress. ``lately``: sessions stamped, of which one counts the
    less the longer ago it was. ``lag``: seconds by which its event loop is late.
    """

    owner_id: str
    active: float
    lately: float
    lag: float

    def load(self) -> float:
        """Return how busy the worker is: what it does and has lately begun, and the more where its loop is held up."""
        return (self.active + self.lately) * (1 + self.lag / LAGGING) + self.lag / LAGGING


Policy = Callable[[Room, Sequence[Room]], str | None]
"""Takes the room of the worker that a request has reached and that of the others; returns the owner ID
of the one that is to take it, or ``None`` for the first."""


def balanced(mine: Room, others: Sequence[Room]) -> str | None:
    """Choose the better of two others picked by chance, if it has more room by at least a session.

    Two suffice, and chance keeps many workers from choosing the same one. Where it is no
    better there, the request stays: a hop costs.
    """
    candidates = random.sample(others, min(2, len(others)))
    best = min(candidates, key=Room.load, default=None)
    return best.owner_id if best is not None and best.load() + 1 <= mine.load() else None
