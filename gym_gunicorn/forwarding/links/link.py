"""The forwarding end of a link: a connection to an owner, with one exchange at a time."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from starlette.types import Scope

from gym_gunicorn.forwarding import wire
from gym_gunicorn.forwarding.errors import Gone
from gym_gunicorn.forwarding.links.frames import (
    ASK,
    BODILESS,
    BODY,
    END,
    EXPECTING,
    HIGH_WATER,
    LAST,
    MAX_HEAD,
    OWN_REPLY,
    PREFACE,
    REPLY,
    REQUEST,
    FramedConnection,
    FrameError,
    greeting,
)
from gym_gunicorn.metrics.values import CONNECTIONS, Figures

# What a frame that waits counts besides its payload: so many bytes it takes, about.
_WEIGHT = 100

_NONE: frozenset[int] = frozenset()
_FIRST = frozenset((ASK, REPLY, OWN_REPLY))
_LATER = frozenset((BODY, END, LAST))

log = logging.getLogger("uvicorn.error")


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
        self._greeted: asyncio.Future[bool] = self.loop.create_future()
        self._frames: deque[tuple[int, bytes]] = deque()
        self._waiting = 0
        # Kinds of frames that may come next.
        self._next: frozenset[int] = _NONE
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

    def begin(self, scope: Scope, has_body: bool, is_awaited: bool = False) -> None:
        """Send the head of a request; ``flush`` has to follow, after as much of the body as is there.

        Args:
            scope: the request's.
            has_body: whether its body follows, in frames.
            is_awaited: whether the body is only to be sent when ``asked`` says so.

        Raises:
            LinkLost: the link is closed, or the head is too long for it.
        """
        head = wire.encode_head(scope)
        if self.lost or len(head) > MAX_HEAD:
            raise LinkLost("closed" if self.lost else f"a head of {len(head)} bytes")
        self._next = _FIRST
        if is_awaited:
            self.asked.clear()
        else:
            self.asked.set()
        self.hold(EXPECTING if is_awaited else REQUEST if has_body else BODILESS, head)

    async def next(self) -> tuple[int, bytes]:
        """Return the next frame of the reply.

        At first its head, ``REPLY`` or ``OWN_REPLY``, then ``BODY``, and at last ``END`` or ``LAST``.

        Raises:
            LinkLost: the link was closed before.
        """
        while not self._frames:
            if self.lost:
                raise _lost("closed before the reply was complete", self._cause)
            self._reader = self.loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        kind, payload = self._frames.popleft()
        self._waiting -= len(payload) + _WEIGHT
        if self._waiting < HIGH_WATER:
            self.resume()
        return kind, payload

    def wake(self) -> None:
        """Let whoever waits for the next frame look again."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def took(self, kind: int, payload: bytes) -> None:
        if kind not in self._next:
            raise FrameError(f"a frame of kind {kind}, which may not come now")
        if kind == ASK:
            self.asked.set()
            return
        if kind != BODY:
            self._next = _LATER if kind in _FIRST else _NONE
        self._frames.append((kind, payload))
        self._waiting += len(payload) + _WEIGHT
        if self._waiting > HIGH_WATER:
            self.pause()
        self.wake()

    def refused(self, error: FrameError) -> None:
        self._cause = error
        log.error("What owner %s sent can't be read, and the link to it is closed: %s", self._owner_id, error)

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
            if came != wanted:
                if came.startswith(PREFACE):
                    self._greeted.set_exception(Gone(self._owner_id, "in its place listens another worker"))
                    # Nobody may be waiting for it any more.
                    self._greeted.exception()
                else:
                    self._greeted.set_result(False)
                # What else comes is no frames.
                return
            self._greeted.set_result(True)
        if data and not self.transport.is_closing():
            super().data_received(data)
