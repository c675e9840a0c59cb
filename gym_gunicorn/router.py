"""The router: handles a request here, or has it answered by its session's owner."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from logging import Logger

from starlette.types import ASGIApp, Receive, Scope, Send

from gym_gunicorn.carriers import Carrier
from gym_gunicorn.errors import Broken, Busy, ForwardError, Gone, Truncated
from gym_gunicorn.forwarder import Forwarder
from gym_gunicorn.problems import EXCHANGE_BROKEN, OWNER_BUSY, SESSION_GONE, Problem

_PROBLEMS: dict[type[ForwardError], Problem] = {
    Gone: SESSION_GONE,
    Busy: OWNER_BUSY,
    Broken: EXCHANGE_BROKEN,
}


def owner_of(scope: Scope, carriers: Sequence[Carrier]) -> str | None:
    """Return the owner ID that a request names, or ``None``.

    The first carrier that is present decides, whether what it says is valid or not.
    """
    for carrier in carriers:
        carried = carrier.read(scope["headers"])
        if carried is not None:
            return carried.owner
    return None


class SessionRouter:
    """ASGI application around a whole app, outside its session middleware.

    Args:
        app: what handles a request that belongs to this worker or to nobody.
        owner_id: the owner ID of this worker.
        carriers: where requests name their owner, the deciding one first.
        forwarder: the way to other workers.
        log: told of requests that an owner could not answer.
        local_paths: prefixes of paths that are never forwarded.
        around_problems: what the app would put around an error of its own, such as
            its CORS middleware.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        owner_id: str,
        carriers: Sequence[Carrier],
        forwarder: Forwarder,
        log: Logger,
        local_paths: Sequence[str] = (),
        around_problems: Callable[[ASGIApp], ASGIApp] = lambda problem: problem,
    ) -> None:
        self.app = app
        self.owner_id = owner_id
        self.carriers = tuple(carriers)
        self.forwarder = forwarder
        self.local_paths = tuple(local_paths)
        self._losses = _LossLog(log)
        self._problems = {kind: around_problems(problem) for kind, problem in _PROBLEMS.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"].startswith(self.local_paths):
            await self.app(scope, receive, send)
            return
        owner_id = owner_of(scope, self.carriers)
        if owner_id is None or owner_id == self.owner_id:
            await self.app(scope, receive, send)
            return
        forward = self.forwarder.http if scope["type"] == "http" else self.forwarder.websocket
        try:
            await forward(owner_id, scope, receive, send)
        except Truncated as error:
            # The server aborts the connection of a caller whose reply is not complete.
            self._losses.add(error)
        except ForwardError as error:
            self._losses.add(error)
            await self._problems[type(error)](scope, receive, send)


class _LossLog:
    """Logs what was lost: the first of its kind at once, then one line in ten seconds."""

    _INTERVAL = 10.0

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._kinds: dict[type[ForwardError], tuple[float, int]] = {}

    def add(self, error: ForwardError) -> None:
        now = time.monotonic()
        logged_at, unlogged = self._kinds.get(type(error), (-self._INTERVAL, 0))
        if now - logged_at < self._INTERVAL:
            self._kinds[type(error)] = (logged_at, unlogged + 1)
            return
        self._kinds[type(error)] = (now, 0)
        more = f" (and {unlogged} more since the last such line)" if unlogged else ""
        kind = type(error).__name__.lower()
        self._log.warning("A session's request was not answered by its owner: %s: %s%s", kind, error, more)
