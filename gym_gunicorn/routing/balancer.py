"""Knows how much room there is in each worker, and asks a placement policy."""

from __future__ import annotations

import math
import time

from gym_gunicorn.metrics.values import ACTIVE, LAG, STAMPED, Figures, Reading, read_all
from gym_gunicorn.placement import Policy, Room

# Seconds for which the other workers' figures are taken for true.
FRESH = 0.05

# Seconds after which a worker that does not show that it lives is not placed on.
SILENT = 1.0

# Seconds after which a session that was stamped counts half.
LATELY = 10.0


class Balancer:
    """Knows how much room there is in each worker, and asks a policy.

    Args:
        owner_id: of this worker.
        directory: the socket directory, with all workers' figures.
        figures: this worker's.
    """

    def __init__(self, owner_id: str, directory: str, figures: Figures, policy: Policy) -> None:
        self._owner_id = owner_id
        self._directory = directory
        self._figures = figures
        self._policy = policy
        self._looked = 0.0
        # By owner ID: the figures at the last look, what was stamped lately, what was placed since.
        self._readings: dict[str, Reading] = {}
        self._lately: dict[str, float] = {}
        self._placed: dict[str, int] = {}
        self._own_stamped = figures.values[STAMPED]

    def choose(self) -> str | None:
        """Return the owner ID of another worker that is to take the next new session, or ``None``."""
        now = time.monotonic()
        if now - self._looked > FRESH:
            self._look(now)
        chosen = self._policy(self._mine(), [self._room(reading) for reading in self._readings.values()])
        if chosen is not None:
            self._placed[chosen] = self._placed.get(chosen, 0) + 1
        return chosen

    def _mine(self) -> Room:
        values = self._figures.values
        return Room(self._owner_id, values[ACTIVE], self._own_lately(), values[LAG] / 1e9)

    def _own_lately(self) -> float:
        return self._lately.get(self._owner_id, 0.0) + self._figures.values[STAMPED] - self._own_stamped

    def _room(self, reading: Reading) -> Room:
        owner_id = reading.owner_id or ""
        # Each is a request in progress or a session stamped by the next look.
        placed = self._placed.get(owner_id, 0)
        return Room(owner_id, reading["active"] + placed, self._lately[owner_id], reading["lag"] / 1e9)

    def _look(self, now: float) -> None:
        """Read the figures, and forget workers that are no more or take nothing."""
        workers, _ = read_all(self._directory)
        # What was stamped since, at a time that is not known, counts as if it had come evenly.
        halves = (now - self._looked) / LATELY
        fade = 0.5**halves
        since = (1 - fade) / (halves * math.log(2))
        known = {owner_id: lately * fade for owner_id, lately in self._lately.items()}
        stamped = self._figures.values[STAMPED]
        known[self._owner_id] = known.get(self._owner_id, 0.0)
        if self._looked:
            known[self._owner_id] += (stamped - self._own_stamped) * since
        self._own_stamped = stamped
        others = [
            worker
            for worker in workers
            if worker.owner_id != self._owner_id and worker.state == "serving" and worker.silence() < SILENT
        ]
        lately = {self._owner_id: known[self._owner_id]}
        for worker in others:
            owner_id = worker.owner_id or ""
            if owner_id in self._readings and owner_id in known:
                stamped = worker["stamped"] - self._readings[owner_id]["stamped"]
                lately[owner_id] = known[owner_id] + stamped * since
        # A new worker begins like the others, or it would be sent everything.
        middle = sum(lately.values()) / len(lately)
        for worker in others:
            lately.setdefault(worker.owner_id or "", middle)
        self._lately = lately
        self._readings = {worker.owner_id or "": worker for worker in others}
        self._placed = {}
        self._looked = now
