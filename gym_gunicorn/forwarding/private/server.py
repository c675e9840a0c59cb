"""The private server: serves a worker to its siblings, on its private socket."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
from collections.abc import Callable
from typing import Any

from starlette.types import Message
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from gym_gunicorn.forwarding.links.frames import greeting
from gym_gunicorn.forwarding.links.server import LinkOrHttp, LinkServer
from gym_gunicorn.forwarding.peer import KEEP_ALIVE
from gym_gunicorn.forwarding.private.app import PrivateApp
from gym_gunicorn.forwarding.sockets import bind_private_socket, unlink


class PrivateServer:
    """Serves ``app`` on ``listener``, on the event loop of a public server: over links, and over its HTTP.

    It runs no lifespan, adds no ``Date`` and no ``Server``, writes no access log and
    believes no forwarding headers: the public server of the worker that received
    the request does all that. It keeps idle connections longer than a forwarder does.

    Args:
        app: what is served, without the router.
        owner_id: told to who begins a link.
        listener: a listening Unix socket.
        path: the socket's path, removed when the server stops accepting.
    """

    def __init__(self, app: PrivateApp, owner_id: str, listener: socket.socket, path: str) -> None:
        self.app = app
        self._owner_id = owner_id
        self.path = path
        self.state = ServerState()
        self._listener = listener
        self._inode = _inode(path)
        # The one that accepts last; one before it is left until its queue is empty.
        self._servers: list[asyncio.Server] = []
        self._protocol: Callable[[], asyncio.Protocol] | None = None

    async def start(self, public: Config, lifespan_state: dict[str, Any]) -> None:
        """Start accepting; ``lifespan_state`` is what the app's lifespan has made."""
        config = Config(
            self.app,
            http=_without_access_log(public.http_protocol_class),
            ws="none",
            lifespan="off",
            log_config=None,
            interface="asgi3",
            proxy_headers=False,
            root_path=public.root_path,
            backlog=public.backlog,
            timeout_keep_alive=KEEP_ALIVE * 3,
            h11_max_incomplete_event_size=2**24,
            reset_contextvars=public.reset_contextvars,
        )
        config.load()

        def http() -> asyncio.Protocol:
            made: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]  # uvicorn's protocols take these
                config=config, server_state=self.state, app_state=lifespan_state
            )
            return made

        failure = _failure(config.http_protocol_class)
        link = functools.partial(
            LinkServer, self.app, self.state, lifespan_state, failure, isolated=config.reset_contextvars
        )
        self._protocol = functools.partial(LinkOrHttp, greeting(self._owner_id), link, http, self.state)
        await self._accept(config.backlog)

    async def _accept(self, backlog: int) -> None:
        assert self._protocol is not None
        loop = asyncio.get_running_loop()
        self._servers.append(await loop.create_unix_server(self._protocol, sock=self._listener, backlog=backlog))

    async def restore(self, backlog: int) -> bool:
        """Bind the socket again where somebody has removed or replaced it; return whether it had to be.

        What is connected stays so.

        Raises:
            OSError: it can't be bound.
        """
        while len(self._servers) > 1:
            self._servers.pop(0).close()
        if _inode(self.path) == self._inode:
            return False
        # Takes the place of whatever is there, and never without somebody who listens.
        beside = self.path.removesuffix("sock") + "next"
        unlink(beside)
        self._listener = bind_private_socket(beside, backlog)
        os.rename(beside, self.path)
        self._inode = _inode(self.path)
        await self._accept(backlog)
        return True

    def stop_accepting(self) -> None:
        """Close the socket and remove its file: who needs a new connection is told that the session is gone."""
        if _inode(self.path) == self._inode:
            unlink(self.path)
        if not self._servers:
            self._listener.close()
        for server in self._servers:
            server.close()


def _inode(path: str) -> tuple[int, int] | None:
    """Return what tells a file from another one that has taken its name."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    # The number alone is given to the next file at once.
    return status.st_ino, status.st_ctime_ns


def _failure(protocol: type[asyncio.Protocol]) -> Message:
    """Return the head of the reply that a protocol of uvicorn's gives for an app that raised (uvicorn 0.54)."""
    fields = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    if not issubclass(protocol, H11Protocol):
        fields.insert(1, (b"content-length", b"21"))
    return {"type": "http.response.start", "status": 500, "headers": fields}


def _without_access_log(protocol: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
    """Return a protocol class of uvicorn's that writes no access log.

    ``Config(access_log=False)`` would empty the process-wide logger (uvicorn 0.54).
    """

    class PrivateProtocol(protocol):  # type: ignore[valid-type, misc]  # a class known at run time only
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.access_log = False

    return PrivateProtocol
