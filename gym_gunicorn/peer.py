"""One owner as another worker sees it: kept connections, and whether its process lives."""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import yarl
from aiohttp.client_proto import ResponseHandler
from starlette.types import Scope

from gym_gunicorn import wire
from gym_gunicorn.disconnect import expects_continue
from gym_gunicorn.errors import Broken, Busy, ForwardError, Gone, describe
from gym_gunicorn.figures import CONNECTIONS, Figures
from gym_gunicorn.sockets import check_listener, connect_failure, listener_process

# Seconds. The private server keeps idle connections longer than this, so that it is
# always the forwarding side that closes them, and no request meets a closed one.
KEEP_ALIVE = 30

# Seconds. The kernel ends a process piece by piece: a connection can break a moment
# before the process counts as dead. Also how long an exchange with a dead owner may
# go on: what the owner had sent is still being read, but a child that it forked may
# hold the connection open for ever.
DEATH = 0.5

# Methods on whose meaning every HTTP library agrees, and targets that the client leaves
# as they are. Others travel as POST and as "/": the handler sees what the head holds.
# HEAD too: its reply would end, and the connection be another caller's, before its
# handler has.
_PLAIN_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_PLAIN_TARGET = re.compile(rb"/[!$-~]{0,1000}")

_HEAD_FIELD = wire.HEAD_FIELD.decode()
_REPLY_FIELD = wire.REPLY_FIELD.decode()

# What aiohttp would otherwise limit to 8,190 bytes: a reply's head is one field.
_MAX_FIELD = 2**24


class Peer:
    """Connections to the worker ``owner_id``, which listens at ``path``.

    Must be made within a running event loop.

    Args:
        max_forwards: how many exchanges may be in flight at once.
        figures: where connections are counted.

    Raises:
        Gone, Busy, OSError: as ``gym_gunicorn.sockets.listener_process``.
    """

    def __init__(self, owner_id: str, path: str, max_forwards: int, figures: Figures) -> None:
        self.owner_id = owner_id
        self.path = path
        self.ended = asyncio.Event()
        self._in_flight = 0
        self._max_forwards = max_forwards
        self._pidfd = listener_process(owner_id, path)
        if self._pidfd is not None:
            asyncio.get_running_loop().add_reader(self._pidfd, self._stop_watching)
        self._retired = False
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

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Count one exchange in flight.

        Raises:
            Busy: ``max_forwards`` exchanges are in flight.
        """
        if self._in_flight >= self._max_forwards:
            raise Busy(self.owner_id, f"{self._in_flight} forwards to it are in flight")
        self._in_flight += 1
        try:
            yield
        except Gone:
            # Where no pidfd tells of the death, this is the only news of it.
            self._retired = self._pidfd is None
            raise
        finally:
            self._in_flight -= 1
            if self._retired and not self._in_flight:
                self.ended.set()

    async def request(self, scope: Scope, body: AsyncIterator[bytes] | None) -> aiohttp.ClientResponse:
        """Send the request of ``scope`` and return the response when its head has come.

        ``body`` is streamed, in chunks: a length that the caller announced may be another
        than that of what the server made of its body, and then the rest of this request
        would be the beginning of the next one, another caller's. Where the caller waits
        for ``100 Continue``, so does the body.

        Raises:
            aiohttp.ClientError, OSError: the exchange failed; ``verdict`` says what it means.
        """
        target = scope["raw_path"]
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        if _PLAIN_TARGET.fullmatch(target) is None:
            target = b"/"
        method = scope.get("method", "POST")
        return await self.session.request(
            method if method in _PLAIN_METHODS else "POST",
            yarl.URL("http://owner" + target.decode("ascii"), encoded=True),
            data=body,
            headers={_HEAD_FIELD: wire.encode_head(scope)},
            allow_redirects=False,
            expect100=body is not None and expects_continue(scope),
        )

    async def verdict(self, error: Exception) -> ForwardError:
        """Say what it means for the session that an exchange failed before the reply began."""
        if isinstance(error, aiohttp.ClientConnectorError) or getattr(error, "errno", None) == errno.ENOTCONN:
            assert isinstance(error, OSError)
            failure = connect_failure(self.owner_id, error)
            if failure is not None:
                return failure
        try:
            pidfd = listener_process(self.owner_id, self.path)
            if pidfd is not None:
                os.close(pidfd)
            async with asyncio.timeout(DEATH):
                await self.ended.wait()
        except Gone as gone:
            return gone
        except (TimeoutError, Busy, OSError):
            return Broken(self.owner_id, f"the exchange broke before the reply ({describe(error)})")
        return Gone(self.owner_id, "its process died before it replied")

    async def close(self) -> None:
        """Close all connections, whoever uses them."""
        self._stop_watching()
        await self.session.close()

    def _stop_watching(self) -> None:
        self.ended.set()
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None


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
        except Gone:
            protocol.close()
            raise
        self._figures.values[CONNECTIONS] += 1
        if protocol.closed is None:
            self._figures.values[CONNECTIONS] -= 1
        else:
            protocol.closed.add_done_callback(self._forget)
        return protocol

    def _forget(self, closed: asyncio.Future[None]) -> None:
        # A connection that broke says so here too, to whom it may concern.
        if not closed.cancelled():
            closed.exception()
        self._figures.values[CONNECTIONS] -= 1


def reply_head(response: aiohttp.ClientResponse) -> str | None:
    """Return the reply head of a response, or ``None`` where the owner's server answered by itself, not its app."""
    head: str | None = response.headers.get(_REPLY_FIELD)
    return head
