"""What a routed worker is made of: the router around its app, its private server, its forwarder."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from itsdangerous import TimestampSigner
from starlette.types import ASGIApp

from gym_gunicorn.carriers import SessionCookie
from gym_gunicorn.discovery import discover
from gym_gunicorn.forwarder import AiohttpForwarder, Forwarder
from gym_gunicorn.private import PrivateApp, PrivateServer
from gym_gunicorn.router import SessionRouter
from gym_gunicorn.settings import Settings
from gym_gunicorn.sockets import bind_private_socket, socket_path
from gym_gunicorn.stamp import with_owner


@dataclass
class Routed:
    """A routed worker's parts. ``app`` is what its public server serves."""

    app: SessionRouter
    private: PrivateServer
    forwarder: Forwarder
    _moved: int = 0

    def moved_requests(self) -> int:
        """Return by how many more requests, since the last call, this worker handled than it received."""
        moved = self.private.state.total_requests - self.forwarder.finished
        change, self._moved = moved - self._moved, moved
        return change


def route(
    app: ASGIApp, *, owner_id: str, directory: str, settings: Settings, backlog: int, log: logging.Logger
) -> Routed | None:
    """Bind the private socket of the worker ``owner_id`` and put a router around ``app``.

    ``directory`` is the socket directory, ``backlog`` how many connections may wait at
    the private socket. Returns ``None`` where there is nothing to route by.

    Raises:
        OSError: the private socket can't be bound.
    """
    discovered = discover(app)
    if settings.secret_key is not None:
        signer = TimestampSigner(settings.secret_key)
        carrier = SessionCookie(signer, settings.session_cookie, settings.max_age, settings.owner_key)
    elif discovered is not None:
        carrier = discovered.cookie(settings.owner_key)
    else:
        return None
    path = socket_path(directory, owner_id)
    listener = bind_private_socket(path, backlog)
    if discovered is None:
        app = with_owner(app, owner_id)
    else:
        discovered.place_stamp(owner_id, settings.owner_key)
    forwarder = AiohttpForwarder(directory, settings.max_forwards)
    router = SessionRouter(
        app,
        owner_id=owner_id,
        carriers=[carrier],
        forwarder=forwarder,
        log=log,
        local_paths=settings.local_paths,
        around_problems=discovered.around_problems if discovered is not None else lambda problem: problem,
    )
    return Routed(router, PrivateServer(PrivateApp(app), listener, path), forwarder)
