"""Forwards a WebSocket: its ASGI events, framed, in the bodies of one HTTP exchange.

The handshake, its refusal, close codes and reasons, text and binary messages are
events, so they arrive as they were sent. Masks, fragments, pings and extensions are
between the caller and the server that it talks to.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
from starlette.types import Receive, Scope, Send

from gym_gunicorn import wire
from gym_gunicorn.errors import Truncated
from gym_gunicorn.peer import Peer


async def websocket_exchange(peer: Peer, scope: Scope, receive: Receive, send: Send) -> None:
    """Have a WebSocket handled by the owner that ``peer`` leads to.

    Raises:
        Gone, Busy, Broken: nothing has been sent to the caller.
        Truncated: the exchange broke after the handshake was answered; the caller has
            been sent a close code.
    """
    frames = wire.FrameReader("websocket.send")
    answered = False
    response: aiohttp.ClientResponse | None = None
    try:
        while True:
            try:
                if response is None:
                    response = await peer.request("POST", scope, _frames(receive))
                chunk = await response.content.readany()
                events = frames.feed(chunk)
            except (aiohttp.ClientError, OSError, wire.WireError) as error:
                if not answered:
                    raise await peer.verdict(error) from error
                await send({"type": "websocket.close", "code": 1011, "reason": "session gone"})
                raise Truncated(peer.owner_id, f"the exchange broke in a WebSocket ({error!r})") from error
            if not chunk:
                return
            for event in events:
                answered = True
                await send(event)
    finally:
        if response is not None:
            response.close()


async def _frames(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        event = await receive()
        if event["type"] != "websocket.connect":
            yield wire.encode_frame(event)
        if event["type"] == "websocket.disconnect":
            return
