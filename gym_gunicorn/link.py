"""The forwarding end of links: connections to one owner, each with one exchange at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from starlette.types import Scope

from gym_gunicorn import wire
from gym_gunicorn.disconnect import expects_continue
from gym_gunicorn.errors import Broken, Busy, ForwardError, Gone, describe
from gym_gunicorn.figures import CONNECTIONS, Figures
from gym_gunicorn.frames import (
    ASK,
    BODILESS,
    BODY,
    END,
    EXPECTING,
    HIGH_WATER,
    MAX_HEAD,
    OWN_REPLY,
    PREFACE,
    REPLY,
    REQUEST,
    FramedConnection,
    FrameError,
    greeting,
)
from gym_gunicorn.peer import KEEP_ALIVE, Peer
from gym_gunicorn.sockets import check_listener, connect_failure


class NoLink(Exception):
    """The owner speaks HTTP alone: another release, which has no links or others."""


class LinkLost(ConnectionError):
    """A link was closed before its exchange was complete, or what came over it is no reply."""


def _lost(what: str, cause: Exception | None) -> LinkLost:
    lost = LinkLost(getattr(cause, "errno", None), what)
    lost.__cause__ = cause
    return lost


class Link(FramedConnection):
    """One link to an owner. What comes over it waits in a queue for the exchange that reads it."""

    def __init__(self, owner_id: str, figures: Figures) -> None:
        super().__init__()
        self._owner_id = owner_id
        self.idle_since = 0.0
        self.asked = asyncio.Event()
        self._figures = figures
        self._greeting: bytes | None = b""
        self._greeted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._frames: deque[tuple[int, bytes]] = deque()
        self._waiting = 0
        self._reader: asyncio.Future[None] | None = None
        self._cause: Exception | None = None

    async def greet(self) -> None:
        """Begin the link.

        Raises:
            NoLink: the other side knows nothing of it.
            LinkLost: it has closed the connection.
            Gone: it is another worker, which has taken the owner's place.
        """
        self.transport.write(PREFACE)
        if not await self._greeted:
            self.transport.abort()
            raise NoLink

    def begin(self, scope: Scope, has_body: bool) -> None:
        """Send the head of a request.

        Raises:
            LinkLost: the link is closed, or the head is too long for it.
        """
        head = wire.encode_head(scope).encode("ascii")
        if self.lost or len(head) > MAX_HEAD:
            raise LinkLost("closed" if self.lost else f"a head of {len(head)} bytes")
        if not has_body:
            self.write(BODILESS, head)
        elif expects_continue(scope):
            self.asked.clear()
            self.write(EXPECTING, head)
        else:
            self.asked.set()
            self.write(REQUEST, head)

    async def next(self) -> tuple[int, bytes]:
        """Return the next frame of the reply: ``REPLY`` or ``OWN_REPLY``, then ``BODY`` and at last ``END``.

        Raises:
            LinkLost: the link was closed before.
        """
        while not self._frames:
            if self.lost:
                raise _lost("closed before the reply was complete", self._cause)
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        kind, payload = self._frames.popleft()
        self._waiting -= len(payload)
        if self._waiting < HIGH_WATER:
            self.resume()
        return kind, payload

    def wake(self) -> None:
        """Let whoever waits for the next frame look again."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def took(self, kind: int, payload: bytes) -> None:
        if kind == ASK:
            self.asked.set()
        elif kind in (REPLY, OWN_REPLY, BODY, END):
            self._frames.append((kind, payload))
            self._waiting += len(payload)
            if self._waiting > HIGH_WATER:
                self.pause()
            self.wake()
        else:
            raise FrameError(f"a frame of kind {kind} from an owner")

    def refused(self, error: FrameError) -> None:
        self._cause = error

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._figures.values[CONNECTIONS] += 1

    def ended(self, error: Exception | None) -> None:
        self._figures.values[CONNECTIONS] -= 1
        self._cause = self._cause or error
        if not self._greeted.done():
            self._greeted.set_exception(_lost("closed before it began", self._cause))
            # Nobody may be waiting for it any more.
            self._greeted.exception()
        self.wake()

    def data_received(self, data: bytes) -> None:
        if self._greeting is not None:
            self._greeting += data
            wanted = greeting(self._owner_id)
            if len(self._greeting) < len(wanted) and PREFACE.startswith(self._greeting[: len(PREFACE)]):
                return
            came, data, self._greeting = self._greeting[: len(wanted)], self._greeting[len(wanted) :], None
            if self._greeted.done():
                # Nobody waits for it any more.
                return
            if came == wanted:
                self._greeted.set_result(True)
            elif came.startswith(PREFACE):
                self._greeted.set_exception(Gone(self._owner_id, "in its place listens another worker"))
            else:
                self._greeted.set_result(False)
        if data:
            super().data_received(data)


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

    def idle(self) -> Link | None:
        """Return a link that is there and that nobody uses."""
        while self._idle:
            link = self._idle.pop()
            if not link.lost:
                self._used.add(link)
                return link
        return None

    async def connect(self) -> Link:
        """Return a new link.

        Raises:
            Gone, Busy, Broken: there is none to be had.
            NoLink: the owner has no links.
        """
        loop = asyncio.get_running_loop()
        try:
            _, link = await loop.create_unix_connection(lambda: Link(self.owner_id, self._figures), self.path)
            self._used.add(link)
            try:
                check_listener(self.owner_id, link.transport.get_extra_info("socket"))
                await link.greet()
            except BaseException:
                self.drop(link)
                raise
        except OSError as error:
            failure: ForwardError | None = connect_failure(self.owner_id, error)
            if failure is None and isinstance(error, LinkLost):
                failure = await self.verdict(error)
                if isinstance(failure, Broken):
                    # Nothing of the request was sent.
                    failure = Busy(self.owner_id, "it closed a new connection: no descriptor was free, most likely")
            raise failure or Broken(self.owner_id, f"its socket can't be connected to ({describe(error)})") from error
        return link

    def give_back(self, link: Link) -> None:
        """Keep a link whose exchange is complete for the next one."""
        self._used.discard(link)
        link.idle_since = asyncio.get_running_loop().time()
        self._idle.append(link)
        if self._sweeper is None:
            self._sweep()

    def drop(self, link: Link) -> None:
        """Close a link whose exchange is not complete: the owner sees that nobody waits for the reply."""
        self._used.discard(link)
        link.transport.abort()

    def _sweep(self) -> None:
        """Close what has been idle for long, and look again."""
        loop = asyncio.get_running_loop()
        while self._idle and (self._idle[0].lost or loop.time() - self._idle[0].idle_since >= KEEP_ALIVE):
            self._idle.popleft().transport.abort()
        self._sweeper = loop.call_later(KEEP_ALIVE, self._sweep) if self._idle else None

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
        except LinkLost:
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

    async def head(self) -> str | None:
        """Return the reply's head, as ``gym_gunicorn.wire`` reads it, or ``None`` where the app gave none.

        Raises:
            LinkLost: there is no reply.
        """
        kind, payload = await self._link.next()
        return payload.decode("latin-1") if kind == REPLY else None

    async def read(self) -> bytes:
        """Return a piece of the reply's body, or nothing at its end.

        Raises:
            LinkLost: the reply is not complete.
        """
        while not self._ended:
            kind, payload = await self._link.next()
            self._ended = kind == END
            if payload:
                return payload
        return b""

    def close(self) -> None:
        """End the exchange, complete or not."""
        self._feeder.cancel()
        self._peer.drop(self._link)
