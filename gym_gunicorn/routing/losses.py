"""The log of requests that their owners did not answer."""

from __future__ import annotations

import time
from logging import Logger

from gym_gunicorn.forwarding.errors import ForwardError


class LossLog:
    """Logs what was lost: for each owner and reason one line at once, then at most one in ten seconds."""

    _INTERVAL = 10.0
    _MOST = 10_000

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._losses: dict[tuple[str, type[ForwardError]], tuple[float, int]] = {}

    def add(self, error: ForwardError) -> None:
        now = time.monotonic()
        key = (error.owner_id, type(error))
        logged_at, unlogged = self._losses.pop(key, (-self._INTERVAL, 0))
        if now - logged_at < self._INTERVAL:
            self._losses[key] = (logged_at, unlogged + 1)
            return
        self._losses[key] = (now, 0)
        if len(self._losses) > self._MOST:
            # The one that was last heard of the longest ago; owner IDs come from outside.
            del self._losses[next(iter(self._losses))]
        more = f" (and {unlogged} more since the last such line)" if unlogged else ""
        kind = type(error).__name__.lower()
        self._log.warning("A session's request was not answered by its owner: %s: %s%s", kind, error, more)
