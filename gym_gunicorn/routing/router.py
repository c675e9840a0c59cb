"""The router: handles a request here, or has it answered by its session's owner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from logging import Logger

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gym_gunicorn.forwarding.errors import Broken, Busy, ForwardError, Gone, Truncated
from gym_gunicorn.forwarding.forwarder import Forwarder
from gym_gunicorn.metrics.values import ACTIVE, BROKEN, BUSY, FORWARDED, GONE, LOCAL, TRUNCATED, WEBSOCKETS, Figures
from gym_gunicorn.problems import EXCHANGE_BROKEN, OWNER_BUSY, SESSION_GONE, Problem
from gym_gunicorn.routing.balancer import Balancer
from gym_gunicorn.routing.losses import LossLog
from gym_gunicorn.sessions.carriers import Carrier

PROBLEMS: Mapping[type[ForwardError], Problem] = {
    Gone: SESSION_GONE,
    Busy: OWNER_BUSY,
    Broken: EXCHANGE_BROKEN,
}


_LOST = {Gone: GONE, Busy: BUSY, Broken: BROKEN, Truncated: TRUNCATED}


@dataclass(frozen=True, slots=True)
class Placed:
    """A carrier, and the requests for which it counts: ``None`` for all."""

    carrier: Carrier
    applies: Callable[[Scope], bool] | None = None


def owner_of(scope: Scope, carriers: Sequence[Placed], local_paths: Sequence[str] = ()) -> str | None:
    """Return the owner ID that a request names, or ``None``.

    The first carrier that counts for the request and is present in it decides, whether
    what it says is valid or not. On ``local_paths`` none counts.
    """
    for prefix in local_paths:
        if is_below(prefix, scope):
            return None
    for placed in carriers:
        if placed.applies is None or placed.applies(scope):
            carried = placed.carrier.read(scope["headers"])
            if carried is not None:
                return carried.owner
    return None


def is_below(prefix: str, scope: Scope) -> bool:
    """Tell whether a request's path begins with the segments of ``prefix``: "/a/b" does with "/a", "/ab" does not."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path == prefix or path.startswith(prefix if prefix.endswith("/") else prefix + "/")


class SessionRouter:
    """ASGI application around a whole app, outside its session middleware.

    Args:
        app: what handles a request that belongs to this worker or to nobody.
        owner_id: the owner ID of this worker.
        carriers: where requests name their owner, the deciding one first.
        forwarder: the way to other workers.
        log: told of requests that an owner could not answer.
        local_paths: prefixes of paths that are never forwarded.
        problems: what answers where an owner can't, for each kind of error.
        figures: where it counts.
        placement: chooses who takes a request that names no owner; without it, who received it.
        placement_paths: prefixes of the paths that are placed; without any, all are.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        owner_id: str,
        carriers: Sequence[Placed],
        forwarder: Forwarder,
        log: Logger,
        local_paths: Sequence[str] = (),
        problems: Mapping[type[ForwardError], ASGIApp] = PROBLEMS,
        figures: Figures | None = None,
        placement: Balancer | None = None,
        placement_paths: Sequence[str] = (),
    ) -> None:
        self.app = app
        self.owner_id = owner_id
        self.carriers = tuple(carriers)
        self.forwarder = forwarder
        self.local_paths = tuple(local_paths)
        self._losses = LossLog(log)
        self.problems = problems
        self.figures = figures or Figures()
        self.placement = placement
        self.placement_paths = tuple(placement_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        owner_id = owner_of(scope, self.carriers, self.local_paths)
        kept: _Kept | None = None
        if owner_id is None and self.placement is not None:
            owner_id = await self._place(scope, self.placement)
            if owner_id is not None:
                receive = kept = _Kept(receive)
        if owner_id is None or owner_id == self.owner_id:
            await self._here(scope, receive, send)
            return
        self.figures.values[FORWARDED] += 1
        forward = self.forwarder.http if scope["type"] == "http" else self.forwarder.websocket
        try:
            await forward(owner_id, scope, receive, send)
        except Truncated as error:
            # The server aborts the connection of a caller whose reply is not complete.
            self._lost(error)
        except ForwardError as error:
            lost = error
            if kept is not None:
                if error.unsent and kept.is_whole():
                    await self._here(scope, kept.again, send)
                    return
                if isinstance(error, Gone):
                    # A request that belonged to nobody has lost no session, and may have been run.
                    lost = Broken(error.owner_id, error.cause)
            self._lost(lost)
            await self.problems[type(lost)](scope, receive, send)

    async def _place(self, scope: Scope, placement: Balancer) -> str | None:
        """Return the owner ID of another worker that is to take a request of nobody's, and can."""
        if scope["type"] != "http" or any(is_below(prefix, scope) for prefix in self.local_paths):
            return None
        if self.placement_paths and not any(is_below(prefix, scope) for prefix in self.placement_paths):
            return None
        chosen = placement.choose()
        if chosen is None or chosen == self.owner_id:
            return None
        return chosen if await self.forwarder.reach(chosen) else None

    async def _here(self, scope: Scope, receive: Receive, send: Send) -> None:
        values = self.figures.values
        values[LOCAL] += 1
        values[ACTIVE] += 1
        if scope["type"] == "websocket":
            values[WEBSOCKETS] += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.figures.values[ACTIVE] -= 1

    def _lost(self, error: ForwardError) -> None:
        self.figures.values[_LOST[type(error)]] += 1
        self._losses.add(error)


class _Kept:
    """What was read of a request's body ahead of the forward, so that it can still be handled here.

    A forwarder reads one event ahead and no more before it is connected.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._first: Message | None = None
        self._read = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        # A disconnect is told again to who asks again.
        if message["type"] != "http.disconnect":
            self._read += 1
            self._first = message if self._read == 1 else None
        return message

    def is_whole(self) -> bool:
        """Tell whether ``again`` returns all that there was from the beginning."""
        return self._read <= 1

    async def again(self) -> Message:
        """Return the next event, from the beginning."""
        if self._first is not None:
            message, self._first = self._first, None
            return message
        return await self._receive()
