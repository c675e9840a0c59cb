"""The links to one owner: those that are idle, and room for more."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from starlette.types import Scope

from gym_gunicorn.forwarding.errors import Broken, Busy, ForwardError, describe
from gym_gunicorn.forwarding.links.frames import BODY, END, REPLY
from gym_gunicorn.forwarding.links.link import Link
from gym_gunicorn.forwarding.peer import KEEP_ALIVE, Peer
from gym_gunicorn.forwarding.sockets import check_listener, connect_failure
from gym_gunicorn.metrics.values import Figures


class LinkPeer(Peer):
    """Links to the worker ``owner_id``: the idle ones, and room for more.

    Raises as ``Peer``.
    """

    def __init__(self, owner_id: str, path: str, max_forwards: int, figures: Figures) -> None:
        super().__init__(owner_id, path, max_forwards)
        self._figures = figures
        self._idle: deque[Link] = deque()
        self._used: set[Link] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def has_idle(self) -> bool:
        """Tell whether ``idle`` would return a link."""
        # One that was aborted a moment ago is not lost yet.
        while self._idle and self._idle[-1].transport.is_closing():
            self._idle.pop()
        return bool(self._idle)

    def idle(self) -> Link | None:
        """Return a link that is there and that nobody uses."""
        if not self.has_idle():
            return None
        link = self._idle.pop()
        self._used.add(link)
        return link

    async def connect(self) -> Link:
        """Return a new link.

        Raises:
            Gone, Busy, Broken: there is none to be had.
            NoLink: the owner has no links.
        """
        try:
            _, link = await self._loop.create_unix_connection(lambda: Link(self.owner_id, self._figures), self.path)
            self._used.add(link)
            try:
                check_listener(self.owner_id, link.transport.get_extra_info("socket"))
                await link.greet()
            except BaseException:
                self.drop(link)
                raise
        except OSError as error:
            failure: ForwardError | None = connect_failure(self.owner_id, error)
            if failure is None and isinstance(error, ConnectionError):
                # Closed before the greeting, or while it still waited to be accepted, of which
                # uvloop tells as a connect that failed: a listener that is closed resets what waits.
                failure = await self.verdict(error)
                if isinstance(failure, Broken):
                    # Nothing of the request was sent.
                    failure = Busy(self.owner_id, "it closed a new connection: no descriptor was free, most likely")
            raise failure or Broken(self.owner_id, f"its socket can't be connected to ({describe(error)})") from error
        return link

    def drop_read(self) -> bool:
        for link in list(self._used):
            if not link.waited_for_caller():
                self.drop(link)
        return bool(self._used)

    def give_back(self, link: Link) -> None:
        """Keep a link whose exchange is complete for the next one."""
        self._used.discard(link)
        link.idle_since = self._loop.time()
        self._idle.append(link)
        if self._sweeper is None:
            self._sweep()

    def drop(self, link: Link) -> None:
        """Close a link whose exchange is not complete: the owner sees that nobody waits for the reply."""
        self._used.discard(link)
        link.transport.abort()

    def _sweep(self) -> None:
        """Close what has been idle for long, and look again."""
        while self._idle and (self._idle[0].lost or self._loop.time() - self._idle[0].idle_since >= KEEP_ALIVE):
            self._idle.popleft().transport.abort()
        self._sweeper = self._loop.call_later(KEEP_ALIVE, self._sweep) if self._idle else None

    async def close(self) -> None:
        await super().close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for link in (*self._idle, *self._used):
            link.transport.abort()
        self._idle.clear()

    async def open(self, scope: Scope, body: AsyncIterator[bytes]) -> LinkExchange:
        """Begin an exchange whose bodies are streamed both ways; raises as ``connect``, and ``LinkLost``."""
        link = self.idle() or await self.connect()
        try:
            link.begin(scope, has_body=True)
            link.flush()
        except BaseException:
            self.drop(link)
            raise
        return LinkExchange(self, link, body)


class LinkExchange:
    """An exchange whose request's head was sent, and whose bodies are streamed both ways."""

    def __init__(self, peer: LinkPeer, link: Link, body: AsyncIterator[bytes]) -> None:
        self._peer = peer
        self._link = link
        self._ended = False
        self._feeder = asyncio.create_task(self._feed(body))

    async def _feed(self, body: AsyncIterator[bytes]) -> None:
        try:
            async for piece in body:
                if piece:
                    await self._link.drain()
                    self._link.write(BODY, piece)
        except Exception:
            # What has come of the body must not pass for the whole.
            self._peer.drop(self._link)
            raise
        self._link.write(END, b"")

    async def head(self) -> bytes | None:
        """Return the reply's head, as ``gym_gunicorn.forwarding.wire`` reads it, or ``None`` where the app gave none.

        Raises:
            LinkLost: there is no reply.
        """
        kind, payload = await self._link.next()
        return payload if kind == REPLY else None

    async def read(self) -> bytes:
        """Return a piece of the reply's body, or nothing at its end.

        Raises:
            LinkLost: the reply is not complete.
        """
        while not self._ended:
            kind, payload = await self._link.next()
            self._ended = kind != BODY
            if payload:
                return payload
        return b""

    def close(self) -> None:
        """End the exchange, complete or not."""
        self._feeder.cancel()
        self._peer.drop(self._link)
