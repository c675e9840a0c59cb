"""The plain HTTP way to an owner: aiohttp's kept connections."""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import yarl
from aiohttp.client_proto import ResponseHandler
from starlette.types import Scope

from gym_gunicorn.disconnect import expects_continue
from gym_gunicorn.forwarding import wire
from gym_gunicorn.forwarding.errors import ForwardError, Gone
from gym_gunicorn.forwarding.peer import KEEP_ALIVE, Peer
from gym_gunicorn.forwarding.sockets import check_listener, connect_failure
from gym_gunicorn.metrics.values import CONNECTIONS, Figures

# Methods on whose meaning every HTTP library agrees, and targets that the client leaves
# as they are. Others travel as POST and as "/": the handler sees what the head holds.
# HEAD too: its reply would end, and the connection be another caller's, before its
# handler has.
_PLAIN_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_PLAIN_TARGET = re.compile(rb"/[!$-~]{0,1000}")

_HEAD_FIELD = wire.HEAD_FIELD.decode()
_OWNER_FIELD = wire.OWNER_FIELD.decode()
_REPLY_FIELD = wire.REPLY_FIELD.decode()

# What aiohttp would otherwise limit to 8,190 bytes: a reply's head is one field.
_MAX_FIELD = 2**24


class HttpPeer(Peer):
    """Kept HTTP connections to the worker ``owner_id``; ``figures`` is where they are counted. Raises as ``Peer``."""

    def __init__(self, owner_id: str, path: str, max_forwards: int, figures: Figures) -> None:
        super().__init__(owner_id, path, max_forwards)
        self.session = aiohttp.ClientSession(
            connector=_OwnerConnector(owner_id, path, figures),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            auto_decompress=False,
            max_line_size=_MAX_FIELD,
            max_field_size=_MAX_FIELD,
        )
        # aiohttp (3.14) sends an idempotent request again when a kept connection breaks,
        # and has no public switch for it. Here nothing is ever sent twice.
        self.session._retry_connection = False

    async def request(self, scope: Scope, body: AsyncIterator[bytes] | None) -> aiohttp.ClientResponse:
        """Send the request of ``scope`` and return the response when its head has come.

        ``body`` is streamed, in chunks: a length that the caller announced may be another
        than that of what the server made of its body, and then the rest of this request
        would be the beginning of the next one, another caller's. Where the caller waits
        for ``100 Continue``, so does the body.

        Raises:
            Gone: another worker has taken the owner's place.
            aiohttp.ClientError, OSError: the exchange failed; ``verdict`` says what it means.
        """
        target = scope["raw_path"]
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        if _PLAIN_TARGET.fullmatch(target) is None:
            target = b"/"
        method = scope.get("method", "POST")
        response = await self.session.request(
            method if method in _PLAIN_METHODS else "POST",
            yarl.URL("http://owner" + target.decode("ascii"), encoded=True),
            data=body,
            headers={_HEAD_FIELD: wire.to_field(wire.encode_head(scope)), _OWNER_FIELD: self.owner_id},
            allow_redirects=False,
            expect100=body is not None and expects_continue(scope),
        )
        if response.status == wire.MISDIRECTED and _REPLY_FIELD not in response.headers:
            response.close()
            raise Gone(self.owner_id, "in its place listens another worker")
        return response

    async def verdict(self, error: Exception) -> ForwardError:
        if isinstance(error, aiohttp.ClientConnectorError) or getattr(error, "errno", None) == errno.ENOTCONN:
            assert isinstance(error, OSError)
            failure = connect_failure(self.owner_id, error)
            if failure is not None:
                return failure
        return await super().verdict(error)

    async def open(self, scope: Scope, body: AsyncIterator[bytes]) -> HttpExchange:
        """Begin an exchange whose bodies are streamed both ways; raises as ``request``."""
        return HttpExchange(await self.request(scope, body))

    async def close(self) -> None:
        await super().close()
        await self.session.close()


class HttpExchange:
    """An exchange whose bodies are streamed both ways."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def head(self) -> bytes | None:
        """Return the reply's head, as ``wire`` reads it, or ``None`` where the app gave none."""
        return reply_head(self._response)

    async def read(self) -> bytes:
        """Return a piece of the reply's body, or nothing at its end."""
        piece: bytes = await self._response.content.readany()
        return piece

    def close(self) -> None:
        """End the exchange, complete or not."""
        self._response.close()


class _OwnerConnector(aiohttp.UnixConnector):
    """Connects to an owner, and to nobody who has taken its place."""

    def __init__(self, owner_id: str, path: str, figures: Figures) -> None:
        super().__init__(path, limit=0, keepalive_timeout=KEEP_ALIVE)
        self._owner_id = owner_id
        self._figures = figures

    # Not public in aiohttp (3.14), which has no other place to look at a connection before it is used.
    async def _create_connection(self, *args: Any) -> ResponseHandler:
        protocol = await super()._create_connection(*args)
        assert protocol.transport is not None
        try:
            check_listener(self._owner_id, protocol.transport.get_extra_info("socket"))
        except (Gone, OSError):
            protocol.close()
            raise
        if protocol.closed is not None:
            self._figures.values[CONNECTIONS] += 1
            protocol.closed.add_done_callback(self._forget)
        return protocol

    def _forget(self, closed: asyncio.Future[None]) -> None:
        # A connection that broke says so here too, to whom it may concern.
        if not closed.cancelled():
            closed.exception()
        self._figures.values[CONNECTIONS] -= 1


def reply_head(response: aiohttp.ClientResponse) -> bytes | None:
    """Return the reply head of a response, or ``None`` where the owner's server answered by itself, not its app.

    Raises:
        WireError: it is none.
    """
    value: str | None = response.headers.get(_REPLY_FIELD)
    return None if value is None else wire.from_field(value)
