"""Forwards a WebSocket: its ASGI events, framed, in the bodies of one exchange.

The handshake, its refusal, close codes and reasons, text and binary messages are
events, so they arrive as they were sent. Masks, fragments, pings and extensions are
between the caller and the server that it talks to.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Protocol

import aiohttp
from starlette.types import Receive, Scope, Send

from gym_gunicorn.forwarding import wire
from gym_gunicorn.forwarding.errors import ForwardError, Truncated, describe


class Exchange(Protocol):
    """An exchange with an owner whose bodies are streamed both ways."""

    async def head(self) -> bytes | None: ...

    async def read(self) -> bytes: ...

    def close(self) -> None: ...


class Opens(Protocol):
    """What leads to an owner, and begins exchanges: an ``HttpPeer``, a ``LinkPeer``."""

    owner_id: str

    def open(self, scope: Scope, body: AsyncIterator[bytes]) -> Awaitable[Exchange]: ...

    async def verdict(self, error: Exception) -> ForwardError: ...


async def websocket_exchange(peer: Opens, scope: Scope, receive: Receive, send: Send) -> None:
    """Have a WebSocket handled by the owner that ``peer`` leads to.

    Returns when the owner's app has returned. Where it has not closed the WebSocket, or
    where the exchange breaks, the server closes the caller's connection, as it does
    for an app of its own.

    Raises:
        Gone, Busy, Broken: nothing has been sent to the caller.
        Truncated: the exchange broke after the handshake was answered.
    """
    frames = wire.FrameReader("websocket.send")
    answered = False
    exchange: Exchange | None = None
    try:
        while True:
            try:
                if exchange is None:
                    exchange = await peer.open(scope, _frames(receive))
                    if await exchange.head() is None:
                        # The app raised, or returned without an answer.
                        return
                chunk = await exchange.read()
                events = frames.feed(chunk)
            except (aiohttp.ClientError, OSError, wire.WireError) as error:
                if not answered:
                    raise await peer.verdict(error) from error
                raise Truncated(peer.owner_id, f"the exchange of a WebSocket broke ({describe(error)})") from error
            if not chunk:
                return
            for event in events:
                answered = True
                await send(event)
    finally:
        if exchange is not None:
            exchange.close()


async def _frames(receive: Receive) -> AsyncIterator[bytes]:
    # aiohttp (3.14) holds the head back until the first piece of the body.
    yield b""
    while True:
        event = await receive()
        if event["type"] != "websocket.connect":
            yield wire.encode_frame(event)
        if event["type"] == "websocket.disconnect":
            return
