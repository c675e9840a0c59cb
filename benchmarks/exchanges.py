"""The kinds of exchange, each with its request and the check of its answer, byte by byte."""

from __future__ import annotations

import re
import socket

from benchmarks import asking
from benchmarks.asking import WrongAnswer
from benchmarks.callers import Caller, Session, Verdict
from benchmarks.content import EVENTS, KIB, PATTERN, STREAMED

_OK = b"HTTP/1.1 200"


def _wrong(caller: Caller, expected: bytes) -> WrongAnswer:
    return WrongAnswer(f"{bytes(caller.buffer[: min(caller.filled, 400)])!r}, and expected was {expected[:100]!r}")


class HttpExchange:
    """What all HTTP exchanges have in common."""

    capacity = 64 * KIB
    body = b""
    opens = False

    def open(self, connection: socket.socket, session: Session) -> None:
        """Nothing has to be done."""

    def request(self, session: Session) -> bytes:
        if not session.request:
            session.request = self._request(session)
        return session.request

    def verdict(self, caller: Caller, session: Session) -> Verdict:
        raise NotImplementedError

    def _request(self, session: Session) -> bytes:
        raise NotImplementedError

    def _head(self, caller: Caller) -> bytes | None:
        """Return the answer's head once all of its announced body is there; ``needed`` is where that ends then."""
        buffer = caller.buffer
        if not caller.needed:
            end = buffer.find(b"\r\n\r\n", 0, caller.filled)
            if end < 0:
                return None
            length = asking.content_length(bytes(buffer[:end]))
            if length is None or not buffer.startswith(_OK):
                raise _wrong(caller, _OK)
            caller.needed = end + 4 + length
        if caller.filled < caller.needed:
            return None
        if caller.filled > caller.needed:
            raise WrongAnswer("more came than the answer that was asked for")
        return bytes(buffer[: buffer.find(b"\r\n\r\n")])


class JsonExchange(HttpExchange):
    """A request whose answer is ``{"session_id": ..., "count": ...}`` and what else the path says.

    Args:
        path: the endpoint.
        body: what is sent with every request.
        more: what the answer says after the count, as it is written.
        counted: whether the endpoint counts.
    """

    def __init__(self, path: str, body: bytes = b"", more: bytes = b"", counted: bool = True) -> None:
        self._path, self._more, self._counted = path, more, counted
        large = len(body) > KIB
        self.body = body if large else b""
        self._small = b"" if large else body

    def _request(self, session: Session) -> bytes:
        if self.body:
            length = b"content-length: %d\r\n" % len(self.body)
            return asking.head("POST", self._path, session.cookie, b"content-type: text/plain\r\n" + length)
        return asking.post(self._path, session.cookie, self._small)

    def verdict(self, caller: Caller, session: Session) -> Verdict:
        buffer = caller.buffer
        if self._counted:
            end = b'\r\n\r\n{"session_id":"%b","count":%d%b}' % (session.name, session.count + 1, self._more)
        else:
            end = b'\r\n\r\n{"session_id":"%b"%b}' % (session.name, self._more)
        if buffer.endswith(end, 0, caller.filled) and buffer.startswith(_OK):
            session.count += 1
            return "right"
        top = self._head(caller)
        if top is None:
            return ""
        # Another worker's count of this session is the one thing that a set-up without affinity may have wrong.
        pattern = rb'\{"session_id":"%b","count":\d+%b\}' % (session.name, re.escape(self._more))
        if self._counted and re.fullmatch(pattern, buffer[len(top) + 4 : caller.filled]):
            session.count += 1
            return "stale"
        raise _wrong(caller, end)


class ReplyExchange(HttpExchange):
    """A reply of ``size`` bytes."""

    def __init__(self, size: int) -> None:
        self._size, self._expected = size, PATTERN[:size]
        self.capacity = size + 16 * KIB

    def _request(self, session: Session) -> bytes:
        return asking.head("GET", f"/reply/{self._size}", session.cookie)

    def verdict(self, caller: Caller, session: Session) -> Verdict:
        top = self._head(caller)
        if top is None:
            return ""
        at = len(top) + 4
        if caller.needed - at != self._size or not caller.buffer.startswith(self._expected, at):
            raise _wrong(caller, self._expected)
        return _counted(top, session)


class EventsExchange(HttpExchange):
    """A reply that is streamed in many events, in chunks."""

    capacity = EVENTS * 100

    def __init__(self) -> None:
        # Chunked bodies that were taken apart and found right: most are cut like the one before.
        self._known: set[bytes] = set()

    def _request(self, session: Session) -> bytes:
        return asking.head("GET", "/events", session.cookie)

    def verdict(self, caller: Caller, session: Session) -> Verdict:
        buffer = caller.buffer
        if not buffer.startswith(_OK):
            raise _wrong(caller, _OK)
        if not buffer.endswith(b"\r\n0\r\n\r\n", 0, caller.filled):
            return ""
        top, _, body = bytes(buffer[: caller.filled]).partition(b"\r\n\r\n")
        if body not in self._known:
            if _unchunked(body) != STREAMED:
                raise _wrong(caller, STREAMED)
            if len(self._known) < 1000:
                self._known.add(body)
        return _counted(top, session)


class HeldExchange(HttpExchange):
    """A small request in a session of which the app keeps nothing: its answer names the process that it came from.

    So several callers may share one session.
    """

    def _request(self, session: Session) -> bytes:
        return asking.post("/nothing", session.cookie)

    def verdict(self, caller: Caller, session: Session) -> Verdict:
        buffer = caller.buffer
        end = b'\r\n\r\n{"session_id":"%b","pid":%d}' % (session.name, session.owner or 0)
        if buffer.endswith(end, 0, caller.filled) and buffer.startswith(_OK):
            return "right"
        top = self._head(caller)
        if top is None:
            return ""
        if buffer.startswith(b'{"session_id":"%b","pid":' % session.name, len(top) + 4):
            return "stale"
        raise _wrong(caller, end)


class CreateExchange(HttpExchange):
    """A session made: a request without a cookie, and a cookie in the answer."""

    def _request(self, session: Session) -> bytes:
        return asking.post("/session")

    def verdict(self, caller: Caller, session: Session) -> Verdict:
        top = self._head(caller)
        if top is None:
            return ""
        if b"session=" not in asking.cookies(top) or not re.fullmatch(
            rb'\{"session_id":"[0-9a-f]{32}"\}', caller.buffer[len(top) + 4 : caller.filled]
        ):
            raise _wrong(caller, b"a session")
        return "right"


class ComeAndGoExchange(CreateExchange):
    """A session made, one request in it, and never another: what most sessions of a long run are by now."""

    def request(self, session: Session) -> bytes:
        return asking.post("/nothing", session.cookie) if session.cookie else asking.post("/session")

    def verdict(self, caller: Caller, session: Session) -> Verdict:
        top = self._head(caller)
        if top is None:
            return ""
        if not session.cookie:
            verdict = super().verdict(caller, session)
            session.cookie, session.name = asking.cookies(top), bytes(caller.buffer[len(top) + 4 : caller.filled - 1])
            return verdict
        if not caller.buffer.startswith(session.name + b',"pid":', len(top) + 4):
            raise _wrong(caller, session.name)
        session.cookie = session.name = b""
        return "right"


class EchoExchange(HttpExchange):
    """A WebSocket message that comes back with the session's count behind it."""

    opens = True

    def __init__(self) -> None:
        self._text = b"t" * 64

    def open(self, connection: socket.socket, session: Session) -> None:
        fields = b"upgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-version: 13\r\n"
        fields += b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        connection.sendall(asking.head("GET", "/echo", session.cookie, fields))
        received = b""
        while not received.endswith(b"\r\n\r\n"):
            if not (piece := connection.recv(4096)):
                break
            received += piece
        if not received.startswith(b"HTTP/1.1 101"):
            raise WrongAnswer(f"the WebSocket handshake got {received[:300]!r}")

    def _request(self, session: Session) -> bytes:
        # A masking key of zeros leaves the text as it is.
        return bytes((0x81, 0x80 | len(self._text))) + bytes(4) + self._text

    def verdict(self, caller: Caller, session: Session) -> Verdict:
        buffer = caller.buffer
        # Servers ping when they like: before the answer, and behind it.
        at = answers = 0
        while at + 2 <= caller.filled and (end := at + 2 + buffer[at + 1]) <= caller.filled:
            if buffer[at] != 0x89:
                at, answers = end, answers + 1
                continue
            caller.connection.send(bytes((0x8A, 0x80 | buffer[at + 1])) + bytes(4) + buffer[at + 2 : end])
            buffer[at : caller.filled - end + at] = buffer[end : caller.filled]
            caller.filled -= end - at
        if not answers or at < caller.filled:
            return ""
        expected = b"%b %d" % (self._text, session.count + 1)
        if buffer[: caller.filled] != bytes((0x81, len(expected))) + expected:
            text = bytes(buffer[2 : caller.filled])
            if buffer[0] != 0x81 or not re.fullmatch(re.escape(self._text) + rb" \d+", text):
                raise _wrong(caller, expected)
            session.count += 1
            return "stale"
        session.count += 1
        return "right"


def _counted(top: bytes, session: Session) -> Verdict:
    session.count += 1
    if b"\r\nx-count: %d\r\n" % session.count in top + b"\r\n":
        return "right"
    if b"\r\nx-count: " in top:
        return "stale"
    raise WrongAnswer(f"no count in {top[:400]!r}")


def _unchunked(body: bytes) -> bytes:
    """Return what is in a chunked body."""
    pieces: list[bytes] = []
    at = 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        if not size:
            return b"".join(pieces)
        pieces.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
