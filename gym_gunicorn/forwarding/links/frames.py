"""Frames: how two workers talk over a link, which is a connection to a private socket that is no HTTP.

A link begins with ``PREFACE`` from one side and a ``greeting`` from the other, and carries
one exchange after another. A frame is its payload's length, its kind and its payload; the
payloads of heads are those of ``gym_gunicorn.forwarding.wire``. Closing the connection cancels what is
under way, its end is the other worker's end, and the kernel's buffers are the only ones: that
is the whole protocol.
"""

from __future__ import annotations

import asyncio
import struct
from typing import cast

# Another release with another protocol has another number here. What is not these bytes
# is HTTP, which never begins with a zero.
PREFACE = b"\0gym-gunicorn link 1\r\n"

# From the one that forwards: a request's head, which has no body, has one that follows, or
# has one that is to be asked for (Expect: 100-continue).
BODILESS, REQUEST, EXPECTING = 1, 2, 3
# From the owner: it asks for the body; the head of the app's reply, or of one that its server
# gives by itself.
ASK, REPLY, OWN_REPLY = 4, 5, 8
# From both: a piece of a body, and the last one, which may be empty. From an owner that stops:
# the last one, after which the link is to be closed. Not by the owner: what still comes of
# the request's body would then break the connection under the reply.
BODY, END, LAST = 6, 7, 9

_HEADER = struct.Struct("!IB")
_HEADS = frozenset((BODILESS, REQUEST, EXPECTING, ASK, REPLY, OWN_REPLY))
_BODIES = frozenset((BODY, END, LAST))

# What one frame may hold before it is whole. Bodies are passed on as they come.
MAX_HEAD = 2**24

# Bytes that may wait to be taken before reading stops.
HIGH_WATER = 65536


def greeting(owner_id: str) -> bytes:
    """Return with what the owner ``owner_id`` answers a preface."""
    return PREFACE + owner_id.encode("ascii")


def frame(kind: int, payload: bytes) -> bytes:
    """Return a frame."""
    return _HEADER.pack(len(payload), kind) + payload


class FrameError(Exception):
    """The other side has sent what is no frame."""


class FrameParser:
    """Takes bytes in any pieces and returns kinds and payloads.

    Of a body's frame each piece is returned as it comes, as ``BODY`` until the last one, and
    what comes together of a body as one piece, however many frames it is in.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._kind = 0
        self._missing = 0

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Add ``data`` and return what is complete.

        Raises:
            FrameError: these are no frames.
        """
        found: list[tuple[int, bytes]] = []
        body: list[bytes] = []
        source: bytes | bytearray = data
        if self._buffer:
            self._buffer += data
            source = self._buffer
        start, end = 0, len(source)
        while start < end:
            if self._missing:
                piece = bytes(source[start : start + self._missing])
                start += len(piece)
                self._missing -= len(piece)
                body.append(piece)
                if not self._missing and self._kind != BODY:
                    found.append((self._kind, b"".join(body)))
                    body = []
                continue
            if end - start < _HEADER.size:
                break
            length, kind = _HEADER.unpack_from(source, start)
            after = start + _HEADER.size
            if kind in _BODIES:
                start = after
                self._kind, self._missing = kind, length
                if not length:
                    found.append((kind, b"".join(body)))
                    body = []
            elif kind not in _HEADS or length > MAX_HEAD:
                raise FrameError(f"a frame of kind {kind} with {length} bytes")
            elif end - after < length:
                break
            else:
                start = after + length
                if body:
                    found.append((BODY, b"".join(body)))
                    body = []
                found.append((kind, bytes(source[after:start])))
        if body:
            found.append((BODY, b"".join(body)))
        if source is self._buffer:
            del self._buffer[:start]
        elif start < end:
            self._buffer += source[start:]
        return found


class FramedConnection(asyncio.Protocol):
    """One end of a link: what both ends have in common.

    A subclass takes frames in ``took`` and the end of the connection in ``ended``.
    """

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.lost = False
        self._parser = FrameParser()
        self._reading = True
        self._waited = False
        self._writable: asyncio.Future[None] | None = None
        self.loop = asyncio.get_running_loop()
        self._held = b""

    def took(self, kind: int, payload: bytes) -> None:
        """Take a frame.

        Raises:
            FrameError: it is none that may come now. The connection is then closed.
        """
        raise NotImplementedError

    def ended(self, error: Exception | None) -> None:
        """Take note that the connection is closed; ``error`` says why it broke."""
        raise NotImplementedError

    def write(self, kind: int, payload: bytes) -> None:
        """Send a frame, or nothing where the connection is lost; ``drain`` before the next one of a body."""
        if self.lost:
            # uvloop (0.23) raises RuntimeError here, asyncio warns.
            return
        if type(payload) is not bytes:
            # An app's body: of other kinds of bytes len() may count items, and what is none is
            # refused before anything of the frame is sent.
            payload = bytes(memoryview(payload))
        data, self._held = self._held + _HEADER.pack(len(payload), kind), b""
        if len(payload) < HIGH_WATER:
            self.transport.write(data + payload)
        else:
            self.transport.write(data)
            self.transport.write(payload)

    def hold(self, kind: int, payload: bytes) -> None:
        """Send a frame with the next one, or with ``flush``, which has to follow.

        A head and a small body are one system call so, and one wake-up at the other end.
        """
        self._held = _HEADER.pack(len(payload), kind) + payload

    def flush(self) -> None:
        """Send what is held, if there is anything."""
        if self._held:
            held, self._held = self._held, b""
            if not self.lost:
                self.transport.write(held)

    def is_full(self) -> bool:
        """Tell whether ``drain`` would wait."""
        return self._writable is not None and not self.lost

    async def drain(self) -> None:
        """Wait until what was written has room; return at once where the connection is lost."""
        while self._writable is not None and not self.lost:
            await asyncio.shield(self._writable)

    def pause(self) -> None:
        """Read no more for now."""
        if self._reading and not self.transport.is_closing():
            self._reading = False
            self._waited = True
            self.transport.pause_reading()

    def waited_for_caller(self) -> bool:
        """Tell whether reading is paused, or has been since this was last asked: then there may be more to read."""
        waited, self._waited = self._waited, not self._reading
        return waited and not self.lost

    def resume(self) -> None:
        """Read on."""
        if not self._reading and not self.lost:
            self._reading = True
            self.transport.resume_reading()

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's (0.23) is one, and not of that class.
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self.resume_writing()
        self.ended(error)

    def pause_writing(self) -> None:
        if self._writable is None:
            self._writable = self.loop.create_future()

    def resume_writing(self) -> None:
        if self._writable is not None:
            self._writable.set_result(None)
            self._writable = None

    def data_received(self, data: bytes) -> None:
        try:
            for kind, payload in self._parser.feed(data):
                self.took(kind, payload)
        except FrameError as error:
            self.refused(error)
            self.transport.abort()

    def refused(self, error: FrameError) -> None:
        """Take note that the other side has sent what can't be read."""
