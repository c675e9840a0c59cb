"""A caller's WebSocket, frame by frame (RFC 6455)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.difference.exchange import Connection, Pair, Reply, eventually, request
from tests.workers import Worker

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
UPGRADE = (
    b"Upgrade: websocket",
    b"Connection: Upgrade",
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    b"Sec-WebSocket-Version: 13",
)


@dataclass(frozen=True)
class Frame:
    """A frame as it came. ``bits`` are FIN and the reserved bits."""

    bits: int
    opcode: int
    payload: bytes


def handshake(*fields: bytes, target: bytes = b"/") -> bytes:
    return request(b"GET", target, *UPGRADE, *fields)


def frame(opcode: int, payload: bytes = b"", *, fin: bool = True, bits: int = 0, masked: bool = True) -> bytes:
    """Return a frame, masked with zeros, so that the payload stays as it is."""
    first = (0x80 if fin else 0) | bits | opcode
    mask = 0x80 if masked else 0
    if len(payload) < 126:
        head = struct.pack("!BB", first, mask | len(payload))
    elif len(payload) < 2**16:
        head = struct.pack("!BBH", first, mask | 126, len(payload))
    else:
        head = struct.pack("!BBQ", first, mask | 127, len(payload))
    return head + (bytes(4) if masked else b"") + payload


def close_frame(code: int | None = None, reason: str = "") -> bytes:
    return frame(CLOSE, b"" if code is None else struct.pack("!H", code) + reason.encode())


def read_frame(connection: Connection) -> Frame | None:
    """Return the next frame, or ``None`` where the connection has ended."""
    head = connection.read(2)
    if len(head) < 2:
        return None
    length = head[1]
    if length == 126:
        (length,) = struct.unpack("!H", connection.read(2))
    elif length == 127:
        (length,) = struct.unpack("!Q", connection.read(8))
    payload = connection.read(length)
    return Frame(head[0] & 0xF0, head[0] & 0x0F, payload) if len(payload) == length else None


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Accept, and send back what comes."""
    await receive()
    await send({"type": "websocket.accept"})
    while (event := await receive())["type"] != "websocket.disconnect":
        await send({**event, "type": "websocket.send"})


def does(*messages: Message) -> ASGIApp:
    """Return a handler that sends those messages, and reads until the disconnect."""

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        for message in messages:
            await send(message)
        while (await receive())["type"] != "websocket.disconnect":
            pass

    return handler


@dataclass(frozen=True)
class Conversation:
    """A WebSocket from the handshake to its end.

    Args:
        name: what is special about it.
        steps: what the caller does: write these bytes, or read so many frames.
        handler: what the app does.
        status: the status that answers the handshake, or those that the implementations have for it.
        request: the handshake.
    """

    name: str
    steps: Sequence[bytes | int] = ()
    handler: ASGIApp = echo
    status: int | tuple[int, ...] = 101
    request: bytes = field(default_factory=handshake)

    def __str__(self) -> str:
        return self.name

    @property
    def statuses(self) -> tuple[int, ...]:
        return self.status if isinstance(self.status, tuple) else (self.status,)


@dataclass(frozen=True)
class Talk:
    """What came of a conversation: the answer to the handshake, the frames, what the handler saw, how it ended."""

    reply: Reply
    frames: tuple[Frame, ...]
    seen: tuple[dict[str, Any], ...]
    ended: tuple[str | None, ...]


def talk(pair: Pair, worker: Worker, conversation: Conversation, *, ends: bool = True) -> Talk:
    """Have ``conversation`` with ``worker``, and read until the connection and, with ``ends``, the handler ends."""
    seen = pair.begin(conversation.handler)
    frames: list[Frame] = []
    with pair.connect(worker) as connection:
        connection.send(conversation.request)
        reply = connection.head() if conversation.status == 101 else connection.reply()
        for step in conversation.steps:
            if isinstance(step, bytes):
                connection.send_as_taken(step)
            else:
                for _ in range(step):
                    came = read_frame(connection)
                    assert came is not None, "the connection ended early"
                    frames.append(came)
        while (came := read_frame(connection)) is not None:
            frames.append(came)
        eventually(lambda: not ends or all(one.ended for one in seen), "the handler's end")
        return Talk(reply, tuple(frames), pair.facts(seen, connection), tuple(one.ended for one in seen))
