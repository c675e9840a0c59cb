"""What a worker's siblings reach: its app, given each caller's own request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Protocol

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.utils import ClientDisconnected

from gym_gunicorn.forwarding import wire
from gym_gunicorn.forwarding.cancelled import AnswerCancelled
from gym_gunicorn.metrics.values import ACTIVE, RECEIVED, WEBSOCKETS, Figures
from gym_gunicorn.problems import EXCHANGE_BROKEN

log = logging.getLogger("uvicorn.error")


# Where the scope that a link's server makes holds the ``LinkedExchange``.
EXCHANGE = "gym_gunicorn.exchange"


class Reply(Protocol):
    """A reply that is under way; ``complete`` tells whether its end was sent."""

    complete: bool

    async def send(self, message: Message) -> None: ...


class LinkedExchange(Reply, Protocol):
    """An exchange over a link.

    ``head`` is that of the caller's request; ``began`` (nanoseconds) says that what is sent
    is the app's, and since when that is at it, or ``None`` that it is the server's own.
    """

    head: bytes
    began: int | None


class PrivateApp:
    """ASGI application that gives the app the caller's own request.

    A request with a head gets the scope that the head holds, and its reply travels
    in a reply head. A request without one is served as it is, so that an operator
    can ``curl --unix-socket`` a worker. One that is meant for another owner is refused.
    """

    def __init__(self, app: AnswerCancelled, figures: Figures | None = None, owner_id: str | None = None) -> None:
        self.app = app
        self._owner_id = None if owner_id is None else owner_id.encode()
        self.websockets_served = 0
        self._figures = figures or Figures()
        self._websockets: set[_WebSocket] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: LinkedExchange | None = scope.get(EXCHANGE)
        field = b""
        if exchange is None:
            headers: wire.Fields = scope["headers"]
            found = _head_among(headers)
            if found is None:
                await self.app(scope, receive, send)
                return
            field = found
            if _meant_for(headers, self._owner_id) != self._owner_id:
                # Somebody has given this worker's socket another's name.
                close = [(b"connection", b"close")]
                await send({"type": "http.response.start", "status": wire.MISDIRECTED, "headers": close})
                await send({"type": "http.response.body"})
                return
        try:
            callers = wire.decode_head(wire.from_field(field) if exchange is None else exchange.head)
        except wire.WireError as error:
            log.error("A sibling's request can't be read, and is refused with 502: %s", error)
            await EXCHANGE_BROKEN(scope, receive, send)
            return
        callers["state"] = scope["state"]
        values = self._figures.values
        values[RECEIVED] += 1
        values[ACTIVE] += 1
        began = time.monotonic_ns()
        reply: Reply
        if exchange is None:
            reply = _ReplyInField(send, began)
        else:
            reply, exchange.began = exchange, began
        try:
            if callers["type"] == "websocket":
                values[WEBSOCKETS] += 1
                await self._websocket(callers, _WebSocket(receive, reply.send))
            else:
                await self.app(callers, receive, reply.send)
        except (Exception, asyncio.CancelledError):
            if not reply.complete:
                raise
            # A background task: uvicorn would close the connection, which may serve
            # another caller's request by now.
            log.exception("Exception in ASGI application, after its reply")
        finally:
            self._figures.values[ACTIVE] -= 1
            if exchange is not None:
                exchange.began = None

    @property
    def stopping(self) -> bool:
        """Whether the server stops; this ends links with the reply that is under way."""
        return self.app.stopping

    async def close_websockets(self) -> None:
        """Tell both ends of all WebSockets that their owner stops; one that takes nothing is not waited for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                stops = (websocket.stop() for websocket in self._websockets)
                await asyncio.gather(*stops, return_exceptions=True)

    async def _websocket(self, scope: Scope, websocket: _WebSocket) -> None:
        reader = asyncio.create_task(websocket.read())
        self._websockets.add(websocket)
        try:
            with contextlib.suppress(ClientDisconnected):
                await self.app(scope, websocket.receive, websocket.send)
            await websocket.end()
        finally:
            self.websockets_served += 1
            self._websockets.discard(websocket)
            reader.cancel()


class _WebSocket:
    """A WebSocket that travels as frames in the bodies of one HTTP request and its reply.

    To the app it behaves like uvicorn's own (``websockets_sansio_impl``): what comes is
    read one message ahead, a close is followed by a disconnect, and sending to a caller
    who has gone raises ``ClientDisconnected``.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        # uvicorn's own record of the request: it knows that the forwarder has gone when
        # nothing is read, since the app asks for nothing (uvicorn 0.54).
        self._cycle = getattr(receive, "__self__", None)
        self._events: asyncio.Queue[Message] = asyncio.Queue()
        self._events.put_nowait({"type": "websocket.connect"})
        self._asked = asyncio.Event()
        self._started = False
        self._accepted = False
        self._closed = False
        self._disconnected = False

    async def read(self) -> None:
        """Read what the caller sends, until it disconnects."""
        frames = wire.FrameReader("websocket.receive")
        while not self._disconnected:
            message = await self._receive()
            try:
                events = frames.feed(message.get("body", b""))
            except wire.WireError as error:
                log.error("A sibling's WebSocket can't be read, and ends: %s", error)
                events = [{"type": "websocket.disconnect", "code": 1011, "reason": ""}]
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                # The forwarder has gone; where the caller itself left, a frame says so first.
                events.append({"type": "websocket.disconnect", "code": 1006, "reason": ""})
            for event in events:
                self._disconnected = self._disconnected or event["type"] == "websocket.disconnect"
                self._events.put_nowait(event)
                if not self._disconnected:
                    await self._asked.wait()
                    self._asked.clear()

    async def receive(self) -> Message:
        self._asked.set()
        return await self._events.get()

    async def send(self, event: Message) -> None:
        if self._disconnected or getattr(self._cycle, "disconnected", False):
            raise ClientDisconnected
        if self._closed:
            raise RuntimeError(f"Unexpected ASGI message '{event['type']}', after sending 'websocket.close'.")
        if event["type"] == "websocket.accept":
            self._accepted = True
        elif event["type"] == "websocket.close":
            self._closed = True
            end: Message = {"type": "websocket.disconnect", "code": 1006}
            if self._accepted:
                end = {**end, "code": event.get("code", 1000), "reason": event.get("reason") or ""}
            self._events.put_nowait(end)
        await self._send_frame(event)

    async def stop(self) -> None:
        """Close with code 1012, unless the handshake is not answered yet or the app has closed."""
        if self._accepted and not self._closed:
            # As uvicorn does when it stops: what the app sends from now on meets a caller who has gone.
            self._closed = self._disconnected = True
            self._events.put_nowait({"type": "websocket.disconnect", "code": 1012})
            await self._send_frame({"type": "websocket.close", "code": 1012})

    async def end(self) -> None:
        """End the reply, after the app has returned."""
        if self._started:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_frame(self, event: Message) -> None:
        if not self._started:
            self._started = True
            await self._send({"type": "http.response.start", "status": 200})
        await self._send({"type": "http.response.body", "body": wire.encode_frame(event), "more_body": True})


def _head_among(headers: wire.Fields) -> bytes | None:
    """Return the field with the head of a request that has come over HTTP, or ``None`` where it is no sibling's."""
    return next((value for name, value in headers if name == wire.HEAD_FIELD), None)


def _meant_for(headers: wire.Fields, otherwise: bytes | None) -> bytes | None:
    return next((value for name, value in headers if name == wire.OWNER_FIELD), otherwise)


class _ReplyInField:
    """A reply over HTTP: its head travels in a field, and its status is always 200.

    The head holds the app's status and fields, and the caller's own server judges
    them. On this connection the reply is made of chunks and ends when the handler
    says so: with a length it would end before, and the connection be another caller's.
    """

    def __init__(self, send: Send, began: int) -> None:
        self.complete = False
        self._send = send
        self._began = began

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            head = wire.encode_reply(message, time.monotonic_ns() - self._began)
            fields = [(wire.REPLY_FIELD, wire.to_field(head).encode("ascii"))]
            message = {"type": "http.response.start", "status": 200, "headers": fields}
        await self._send(message)
        self.complete = message["type"] == "http.response.body" and not message.get("more_body", False)
