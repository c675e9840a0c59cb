"""Single requests, asked and waited for: what is done before and after the measuring."""

from __future__ import annotations

import re
import socket

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_COOKIE = re.compile(rb"\r\nset-cookie: *([^;\r\n]+)", re.IGNORECASE)


class WrongAnswer(Exception):
    """An answer is not what it has to be. The message shows its beginning."""


def connect(port: int) -> socket.socket:
    """Open a connection to a server of this machine."""
    connection = socket.create_connection(("127.0.0.1", port), 30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def head(method: str, path: str, cookie: bytes = b"", fields: bytes = b"") -> bytes:
    """Return a request without its body. ``fields`` are whole lines."""
    cookies = b"cookie: " + cookie + b"\r\n" if cookie else b""
    return f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n".encode() + cookies + fields + b"\r\n"


def post(path: str, cookie: bytes = b"", body: bytes = b"") -> bytes:
    """Return a whole POST request; a body that is not empty is JSON."""
    fields = b"content-type: application/json\r\n" if body else b""
    return head("POST", path, cookie, fields + b"content-length: %d\r\n" % len(body)) + body


def ask(connection: socket.socket, request: bytes) -> tuple[bytes, bytes]:
    """Send a request, and return its answer's head and body.

    Raises:
        WrongAnswer: its status is not 200, or it has no end.
    """
    connection.sendall(request)
    return receive(connection)


def receive(connection: socket.socket) -> tuple[bytes, bytes]:
    """Return the head and the body of the answer to a request that was sent."""
    received = b""
    while True:
        received += (piece := connection.recv(65536))
        top, end, body = received.partition(b"\r\n\r\n")
        if end and (length := content_length(top)) is not None and len(body) >= length:
            break
        if not piece:
            raise WrongAnswer(f"the connection ended after {received[:200]!r}")
    if not top.startswith(b"HTTP/1.1 200"):
        raise WrongAnswer(f"{received[:300]!r}")
    return top, body


def content_length(top: bytes) -> int | None:
    """Return what an answer's head says of its body's length."""
    found = _LENGTH.search(top)
    return int(found[1]) if found else None


def cookies(top: bytes) -> bytes:
    """Return the Cookie field's value for all cookies that an answer's head sets."""
    return b"; ".join(_COOKIE.findall(top))
