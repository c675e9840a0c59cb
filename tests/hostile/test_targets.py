"""Targets in absolute and authority form: they name other hosts, and nobody goes there."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from gym_gunicorn.forwarding.sockets import is_readable
from tests.difference.exchange import COOKIE, Pair, request
from tests.hostile.verdicts import echoing_pair, verdict, victims_are_answered

CLOSE = b"Connection: close"
AFTER = request(b"GET", b"/after", CLOSE)

# ``<host>`` stands for the address at which somebody else listens, ``<socket>`` for the path of a private socket.
TARGETS: dict[str, tuple[bytes, bytes]] = {
    "absolute form": (b"GET", b"http://<host>/first"),
    "absolute form with a query": (b"GET", b"http://<host>/first?a=b?c"),
    "absolute form of https": (b"GET", b"https://<host>/first"),
    "absolute form of ftp": (b"GET", b"ftp://<host>/first"),
    "absolute form of http+unix": (b"GET", b"http+unix://<socket>/first"),
    "absolute form of unix": (b"GET", b"unix:<socket>"),
    "absolute form of file": (b"GET", b"file:///etc/passwd"),
    "absolute form without a path": (b"GET", b"http://<host>"),
    "absolute form with a user": (b"GET", b"http://owner@<host>/first"),
    "absolute form of an owner": (b"GET", b"http://owner/first"),
    "absolute form in capitals": (b"GET", b"HTTP://<host>/first"),
    "absolute form without a scheme": (b"GET", b"//<host>/first"),
    "absolute form of a POST": (b"POST", b"http://<host>/first"),
    "absolute form of OPTIONS": (b"OPTIONS", b"http://<host>"),
    "absolute form that climbs": (b"GET", b"http://<host>/../../<socket>"),
    "absolute form with a backslash": (b"GET", b"http:\\\\<host>\\first"),
    "absolute form of no host": (b"GET", b"http:///first"),
    "absolute form with a bad port": (b"GET", b"http://127.0.0.1:99999999/first"),
    "absolute form of IPv6": (b"GET", b"http://[::1]:80/first"),
    "absolute form of broken IPv6": (b"GET", b"http://[::1/first"),
    "authority form": (b"GET", b"<host>"),
    "authority form of a POST": (b"POST", b"<host>"),
    "authority form of CONNECT": (b"CONNECT", b"<host>"),
    "authority form of CONNECT to an owner": (b"CONNECT", b"owner:80"),
    "CONNECT with a path": (b"CONNECT", b"/first"),
    "CONNECT in absolute form": (b"CONNECT", b"http://<host>/first"),
    "asterisk form of GET": (b"GET", b"*"),
    "asterisk form of OPTIONS": (b"OPTIONS", b"*"),
    "path of a socket": (b"GET", b"<socket>"),
    "path that climbs": (b"GET", b"/../../../../<socket>"),
    "path in a fragment": (b"GET", b"/first#http://<host>/"),
}


@pytest.fixture(scope="module", params=["httptools", "h11"])
def workers(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A pair of workers for each protocol."""
    with echoing_pair(request.param) as pair:
        yield pair


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    """A listener that nobody has a reason to connect to."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.mark.parametrize("name", TARGETS)
def test_target_that_names_a_host_gets_the_same_verdict_forwarded_as_direct_and_nobody_goes_there(
    workers: Pair, stranger: socket.socket, name: str
) -> None:
    method, target = TARGETS[name]
    host, port = stranger.getsockname()
    target = target.replace(b"<host>", f"{host}:{port}".encode())
    target = target.replace(b"<socket>", workers.owner.socket_path.encode())
    data = request(method, target, b"Content-Length: 0" if method == b"POST" else b"X-A: a") + AFTER * 2
    direct = verdict(workers, workers.owner, data)
    forwarded = verdict(workers, workers.other, data)
    assert forwarded == direct
    # After 200 to CONNECT there is no HTTP on the connection, and h11 (0.16) sends no more of the reply.
    assert direct.is_whole or method == b"CONNECT"
    assert direct.statuses[-1] == 400 or direct.targets[-1:] == ("/after",) or method == b"CONNECT"
    victims_are_answered(workers, "of-a-target")
    assert not is_readable(stranger.fileno())


@pytest.mark.parametrize("host", [b"<other host>", b"owner", b"", b"a b", b"../../x", b"/tmp/x.sock", b"\xff"])
def test_host_field_that_names_somebody_else_decides_nothing(
    workers: Pair, stranger: socket.socket, host: bytes
) -> None:
    address, port = stranger.getsockname()
    field = b"Host: " + host.replace(b"<other host>", f"{address}:{port}".encode())
    data = request(b"GET", b"/first", CLOSE, host=field)
    direct = verdict(workers, workers.owner, data)
    assert verdict(workers, workers.other, data) == direct
    assert direct.targets in ((), ("/first",))
    assert not is_readable(stranger.fileno())


def test_stranger_would_notice_a_connection(stranger: socket.socket) -> None:
    with socket.create_connection(stranger.getsockname()):
        assert is_readable(stranger.fileno())


def test_absolute_form_is_handled_for_its_session_and_not_for_its_host(workers: Pair) -> None:
    data = request(b"GET", b"http://other.example/first", CLOSE)
    assert verdict(workers, workers.other, data).statuses == (200,)
    nobodys = data.replace(b"Cookie: " + COOKIE + b"\r\n", b"")
    assert verdict(workers, workers.other, nobodys).statuses == (200,)
