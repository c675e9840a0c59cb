"""Replies leave in one write where they can, and nothing is held any longer."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
import uvloop
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gym_gunicorn.lifecycle.write_coalescing import OneWrite
from tests.workers import running, socket_directory, until

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n"
LARGE = b"x" * 65536


class Wire:
    """A transport that remembers what was done to it."""

    def __init__(self) -> None:
        self.did: list[object] = []
        self.closing = False
        self.closed = False

    def write(self, data: bytes) -> None:
        if self.closed:
            raise RuntimeError("as uvloop's")
        self.did.append(data)

    def close(self) -> None:
        self.closing = True
        self.did.append("close")

    def abort(self) -> None:
        self.closing = True
        self.did.append("abort")

    def write_eof(self) -> None:
        self.did.append("eof")

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return 7

    def get_extra_info(self, name: str, default: object = None) -> object:
        return f"the wire's {name}"

    def pause_reading(self) -> None:
        self.did.append("pause")

    def resume_reading(self) -> None:
        self.did.append("resume")


def did(scenario: Callable[[OneWrite, Wire], Coroutine[Any, Any, None]]) -> list[object]:
    """Return what a transport was asked to do in ``scenario``."""

    async def play() -> list[object]:
        wire = Wire()
        await scenario(OneWrite(cast(asyncio.Transport, wire)), wire)
        return wire.did

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        pytest.param([HEAD, b"body"], [HEAD + b"body"], id="a head and a small body"),
        pytest.param([HEAD, LARGE], [HEAD, LARGE], id="a head and a large body"),
        pytest.param([HEAD, bytearray(b"body")], [HEAD, bytearray(b"body")], id="other kinds of bytes"),
        pytest.param([bytearray(HEAD), b"x"], [HEAD, b"x"], id="a piece of other bytes, which may change"),
        pytest.param([memoryview(HEAD), b"x"], [HEAD, b"x"], id="a piece that is a view"),
        pytest.param([HEAD, b"one", b"two"], [HEAD + b"one", b"two"], id="a head and two pieces"),
        pytest.param([b"piece", b"HTTP"], [b"piece", b"HTTP"], id="pieces"),
        pytest.param([HEAD, HEAD, b"body"], [HEAD + HEAD, b"body"], id="heads of two replies"),
        pytest.param([HEAD + LARGE, b"body"], [HEAD + LARGE, b"body"], id="a large head"),
    ],
)
def test_what_is_written_in_one_turn_of_the_loop(written: list[Any], sent: list[Any]) -> None:
    async def scenario(transport: OneWrite, wire: Wire) -> None:
        for data in written:
            transport.write(data)
        # At once, without a turn of the loop.
        assert wire.did == sent

    assert did(scenario) == sent


def test_head_alone_leaves_with_the_next_turn_of_the_loop() -> None:
    async def scenario(transport: OneWrite, wire: Wire) -> None:
        transport.write(HEAD)
        assert wire.did == []
        assert transport.get_write_buffer_size() == 7 + len(HEAD)
        await asyncio.sleep(0)
        assert wire.did == [HEAD]
        assert transport.get_write_buffer_size() == 7
        transport.write(b"body")

    assert did(scenario) == [HEAD, b"body"]


@pytest.mark.parametrize(
    ("end", "sent"), [("close", [HEAD, "close"]), ("write_eof", [HEAD, "eof"]), ("abort", ["abort"])]
)
def test_end_of_the_connection_comes_after_what_is_held(end: str, sent: list[object]) -> None:
    async def scenario(transport: OneWrite, wire: Wire) -> None:
        transport.write(HEAD)
        getattr(transport, end)()
        await asyncio.sleep(0)

    assert did(scenario) == sent


def test_head_that_is_held_while_the_connection_is_closing_is_sent_before_its_body() -> None:
    async def scenario(transport: OneWrite, wire: Wire) -> None:
        transport.write(HEAD)
        # A caller's half-close, while a reply before this one is still being sent.
        wire.closing = True
        await asyncio.sleep(0)
        transport.write(b"body")

    assert did(scenario) == [HEAD, b"body"]


def test_head_that_is_held_when_the_connection_breaks_is_dropped() -> None:
    async def scenario(transport: OneWrite, wire: Wire) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: wire.did.append(context))
        transport.write(HEAD)
        wire.closing = wire.closed = True
        await asyncio.sleep(0)

    assert did(scenario) == []


def test_all_else_is_the_transports_own() -> None:
    async def scenario(transport: OneWrite, wire: Wire) -> None:
        assert transport.get_extra_info("socket") == "the wire's socket"
        assert not transport.is_closing()
        transport.pause_reading()
        transport.resume_reading()
        transport.writelines([HEAD, b"body"])
        await asyncio.sleep(0)

    assert did(scenario) == ["pause", "resume", HEAD + b"body"]


async def hello(request: Request) -> JSONResponse:
    request.session["id"] = "x"
    return JSONResponse({"hello": "world"})


async def head_first(scope: Scope, receive: Receive, send: Send) -> None:
    """Begin a reply, and wait for the caller to have seen that before it goes on."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    await scope["state"]["seen"].wait()
    await send({"type": "http.response.body", "body": b"body"})


def data_segments(sock: socket.socket) -> int:
    """Return how many segments with data have come over a TCP connection: ``tcpi_data_segs_in``."""
    (count,) = struct.unpack_from("=I", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192), 152)
    assert isinstance(count, int)
    return count


@pytest.mark.parametrize("http", ["httptools", "h11"])
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_small_reply_is_one_packet(run: Callable[[Coroutine[Any, Any, None]], None], http: str) -> None:
    app = Starlette(routes=[Route("/", hello)], middleware=[Middleware(SessionMiddleware, secret_key="s")])

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        with socket_directory() as directory:
            async with running(app, directory, http=http) as worker:
                with socket.create_connection(worker.address) as caller:
                    caller.setblocking(False)
                    for number in range(1, 4):
                        await loop.sock_sendall(caller, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                        reply = b""
                        while not reply.endswith(b'{"hello":"world"}'):
                            reply += await loop.sock_recv(caller, 65536)
                        assert data_segments(caller) == number

    run(scenario())


@pytest.mark.parametrize("http", ["httptools", "h11"])
def test_head_whose_body_waits_arrives(http: str) -> None:
    seen = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["state"] = {"seen": seen}
            await head_first(scope, receive, send)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        with socket_directory() as directory:
            wrapped = Starlette(middleware=[Middleware(SessionMiddleware, secret_key="s")])
            wrapped.mount("/", app)
            async with running(wrapped, directory, http=http) as worker:
                with socket.create_connection(worker.address) as caller:
                    caller.setblocking(False)
                    await loop.sock_sendall(caller, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                    async with asyncio.timeout(20):
                        reply = await loop.sock_recv(caller, 65536)
                        assert reply.startswith(b"HTTP/1.1 200")
                        assert reply.endswith(b"\r\n\r\n")
                        seen.set()
                        assert await loop.sock_recv(caller, 65536) == b"body"
                    await until(lambda: not worker.server.server_state.tasks)

    asyncio.run(scenario())
