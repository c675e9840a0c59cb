"""The owner's end of a link: serves an ASGI application to siblings, in frames.

To the application it is a server like uvicorn's (0.54), whose behaviour it follows: what a
handler reads, what it may send and when, and what becomes of one that raises.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable
from typing import Any, cast

from starlette.types import ASGIApp, Message, Scope
from uvicorn.server import ServerState

from gym_gunicorn.forwarding import wire
from gym_gunicorn.forwarding.links.frames import (
    ASK,
    BODILESS,
    BODY,
    END,
    EXPECTING,
    HIGH_WATER,
    LAST,
    OWN_REPLY,
    PREFACE,
    REPLY,
    REQUEST,
    FramedConnection,
    FrameError,
)
from gym_gunicorn.forwarding.private.app import EXCHANGE, PrivateApp

log = logging.getLogger("uvicorn.error")


class LinkOrHttp(asyncio.Protocol):
    """Waits for the first bytes of a connection, and hands it to who understands them."""

    def __init__(
        self,
        greeting: bytes,
        link: Callable[[], asyncio.Protocol],
        http: Callable[[], asyncio.Protocol],
        state: ServerState,
    ) -> None:
        self._greeting = greeting
        self._link = link
        self._http = http
        self._state = state
        self._first = b""
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        _connections(self._state).add(self)

    def connection_lost(self, error: Exception | None) -> None:
        _connections(self._state).discard(self)

    def data_received(self, data: bytes) -> None:
        self._first += data
        if len(self._first) < len(PREFACE) and PREFACE.startswith(self._first):
            return
        _connections(self._state).discard(self)
        rest = self._first
        if rest.startswith(PREFACE):
            rest = rest.removeprefix(PREFACE)
            protocol = self._link()
            self.transport.write(self._greeting)
        else:
            protocol = self._http()
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        if rest:
            protocol.data_received(rest)


class LinkServer(FramedConnection):
    """One link to a sibling, which carries one exchange after another.

    Args:
        app: what is served. Its scope holds an exchange under ``private.EXCHANGE``, and nothing
            else of the caller's request.
        state: where connections, tasks and requests are counted.
        app_state: what the app's lifespan has made.
        failure: the head of the reply for an app that gave none; its body is "Internal Server Error".
        isolated: whether each request has a context of its own (uvicorn's ``reset_contextvars``).
    """

    def __init__(
        self, app: PrivateApp, state: ServerState, app_state: dict[str, Any], failure: Message, isolated: bool
    ) -> None:
        super().__init__()
        self.failure = failure
        self.app = app
        self._state = state
        self._app_state = app_state
        self._isolated = isolated
        self._exchange: _Exchange | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        _connections(self._state).add(self)

    def ended(self, error: Exception | None) -> None:
        _connections(self._state).discard(self)
        if self._exchange is not None:
            self._exchange.disconnect()

    def took(self, kind: int, payload: bytes) -> None:
        exchange = self._exchange
        if kind in (BODILESS, REQUEST, EXPECTING):
            if self.is_busy():
                raise FrameError("a request before the end of the one before it")
            self._begin(_Exchange(self, kind, payload, self._app_state))
        elif kind in (BODY, END) and exchange is not None and exchange.more_body:
            exchange.feed(payload, kind == BODY)
        else:
            raise FrameError(f"a frame of kind {kind}, which may not come now")

    def is_busy(self) -> bool:
        """Tell whether an exchange is under way."""
        return self._exchange is not None and not self._exchange.is_over()

    def refused(self, error: FrameError) -> None:
        log.error("A sibling's request can't be read, and its connection is closed: %s", error)

    def _begin(self, exchange: _Exchange) -> None:
        self._exchange = exchange
        self._state.total_requests += 1
        context = contextvars.Context() if self._isolated else None
        task = self.loop.create_task(exchange.run(self.app), context=context)
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)


class _Exchange:
    """One request and its reply. ``disconnected``: the sibling has gone, or its caller has.

    ``head`` and ``began`` are for ``gym_gunicorn.forwarding.private``.
    """

    def __init__(self, link: LinkServer, kind: int, head: bytes, app_state: dict[str, Any]) -> None:
        self._link = link
        self._app_state = app_state
        self.head = head
        self.began: int | None = None
        self.disconnected = False
        # Request
        self.more_body = kind != BODILESS
        self._to_ask = kind == EXPECTING
        self._body: bytes | bytearray = b""
        self._news = asyncio.Event()
        if kind == BODILESS:
            self._news.set()
        # Reply
        self._started = False
        self.complete = False

    def is_over(self) -> bool:
        """Tell whether nothing more is to come, in either direction."""
        return self.complete and not self.more_body

    def feed(self, piece: bytes, more: bool) -> None:
        """Take a piece of the body."""
        self.more_body = more
        if not self.complete:
            if not self._body:
                # Seldom is there more before it is read: no copy then.
                self._body = piece
            else:
                if isinstance(self._body, bytes):
                    self._body = bytearray(self._body)
                self._body += piece
            if len(self._body) > HIGH_WATER:
                self._link.pause()
            self._news.set()

    def disconnect(self) -> None:
        """Take note that nobody waits for the reply."""
        self.disconnected = not self.complete
        self._news.set()

    async def receive(self) -> Message:
        if self._to_ask and not self._started and not self.disconnected:
            self._link.write(ASK, b"")
        self._to_ask = False
        if not self.disconnected and not self.complete:
            self._link.resume()
            await self._news.wait()
            self._news.clear()
        if self.disconnected or self.complete:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), b""
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        link = self._link
        if link.is_full() and not self.disconnected:
            await link.drain()
        if self.disconnected:
            return
        kind = message["type"]
        if not self._started:
            if kind != "http.response.start":
                raise RuntimeError(f"http.response.start must come first, not {kind}")
            taken = 0 if self.began is None else time.monotonic_ns() - self.began
            head = wire.encode_reply(message, taken)
            self._started = True
            self._to_ask = False
            link.hold(OWN_REPLY if self.began is None else REPLY, head)
            # The body is seldom far.
            link.loop.call_soon(link.flush)
        elif not self.complete:
            if kind != "http.response.body":
                raise RuntimeError(f"http.response.body must follow http.response.start, not {kind}")
            more = message.get("more_body", False)
            last = LAST if link.app.stopping else END
            link.write(BODY if more else last, message.get("body", b""))
            if not more:
                self.complete = True
                self._news.set()
                # What still comes of the body is thrown away.
                link.resume()
        else:
            raise RuntimeError(f"{kind} after the reply was complete")

    async def run(self, app: ASGIApp) -> None:
        """Have ``app`` answer, and see to what it leaves undone."""
        scope: Scope = {"type": "http", "headers": [], "state": self._app_state.copy(), EXCHANGE: self}
        try:
            await app(scope, self.receive, self.send)
        except BaseException as error:
            log.error("Exception in ASGI application\n", exc_info=error)
        else:
            if self.complete or self.disconnected:
                return
            log.error("ASGI callable returned without %s response.", "completing" if self._started else "starting")
        if self.complete:
            return
        if self._started:
            self._link.flush()
            self._link.transport.close()
        else:
            await self.send(self._link.failure)
            await self.send({"type": "http.response.body", "body": b"Internal Server Error"})


def _connections(state: ServerState) -> set[Any]:
    """Return where connections are kept that are closed at the end; uvicorn knows of its own protocols alone."""
    return cast(set[Any], state.connections)
