"""Connections between workers are kept, and used for one caller after another: none may feel another's request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from gym_gunicorn.forwarding import wire
from tests.workers import Worker, two

Task = Callable[[], Any]


class Gates:
    """What the handlers of one test wait for, and what they have done."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.seen: list[str] = []


def make_app(gates: Gates) -> Starlette:
    async def seed(request: Request) -> Response:
        request.session["session_id"] = "x"
        return PlainTextResponse("seeded")

    async def unread(request: Request) -> Response:
        gates.seen.append("unread")
        return PlainTextResponse("not read")

    async def read(request: Request) -> Response:
        return PlainTextResponse(f"{len(await request.body())}")

    async def mine(request: Request) -> Response:
        gates.seen.append(f"mine of {request.headers.get('x-caller')}")
        return JSONResponse({"caller": request.headers.get("x-caller")})

    async def lingers(request: Request) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"12345"
            await gates.opened.wait()

        return StreamingResponse(pieces(), headers={"content-length": "5"})

    async def raises_late(request: Request) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"12345"
            await gates.opened.wait()
            raise ValueError("after its last piece")

        return StreamingResponse(pieces(), headers={"content-length": "5"})

    async def cancelled_later(request: Request) -> Response:
        async def task() -> None:
            await gates.opened.wait()
            raise asyncio.CancelledError

        from starlette.background import BackgroundTask

        return PlainTextResponse("12345", background=BackgroundTask(task))

    return Starlette(
        routes=[
            Route("/seed", seed),
            Route("/unread", unread, methods=["POST"]),
            Route("/read", read, methods=["POST"]),
            Route("/mine", mine),
            Route("/lingers", lingers),
            Route("/raises-late", raises_late),
            Route("/cancelled-later", cancelled_later),
        ],
        middleware=[Middleware(SessionMiddleware, secret_key="a secret of the tests")],
    )


class Caller:
    """A caller that writes its requests byte by byte, on a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def of(cls, worker: Worker) -> Caller:
        return cls(*await asyncio.open_connection(*worker.address))

    async def ask(self, request: bytes, method: str = "GET") -> tuple[int, bytes, bytes]:
        """Send a request and return status, head and body of the reply."""
        self.writer.write(request)
        async with asyncio.timeout(20):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            body = b""
            if length and method != "HEAD":
                body = await self.reader.readexactly(int(length[0].split(b":")[1]))
        return int(head.split()[1]), head, body

    def close(self) -> None:
        self.writer.close()


async def seeded(worker: Worker) -> str:
    caller = await Caller.of(worker)
    _, head, _ = await caller.ask(b"GET /seed HTTP/1.1\r\nHost: x\r\n\r\n")
    caller.close()
    (cookie,) = [line for line in head.decode().split("\r\n") if line.lower().startswith("set-cookie:")]
    return cookie.split(":", 1)[1].split(";")[0].strip()


def request(method: str, path: str, cookie: str, *fields: str, body: bytes = b"") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Cookie: {cookie}", *fields]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def forged() -> bytes:
    """A request as one worker sends it to another, written by a caller."""
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/mine",
        "raw_path": b"/mine",
        "query_string": b"",
        "headers": [(b"x-caller", b"evil")],
        "client": ("10.0.0.1", 1),
        "server": None,
        "scheme": "https",
        "http_version": "1.1",
        "root_path": "",
        "asgi": {"version": "3.0"},
    }
    head = wire.to_field(wire.encode_head(scope))
    return f"GET /mine HTTP/1.1\r\nHost: x\r\n{wire.HEAD_FIELD.decode()}: {head}\r\n\r\n".encode()


@pytest.mark.parametrize("http", ["httptools", "h11"])
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(("Connection: Upgrade", "Upgrade: h2c", "Content-Length: {length}"), id="h2c with a length"),
        pytest.param(("Content-Length: {length}",), id="a length"),
        pytest.param(("Transfer-Encoding: chunked", "Content-Length: {length}"), id="chunks and a length"),
    ],
)
@pytest.mark.parametrize("path", ["/unread", "/read"])
def test_body_of_a_request_is_never_taken_for_the_next_request(path: str, fields: tuple[str, ...], http: str) -> None:
    async def scenario() -> None:
        gates = Gates()
        async with two(lambda: make_app(gates), http=http) as (owner, other):
            cookie = await seeded(owner)
            smuggled = forged()
            announced = [field.format(length=len(smuggled) + 50) for field in fields]
            attacker = await Caller.of(other)
            attack = request("POST", path, cookie, *announced, body=smuggled)
            if path == "/unread":
                # Whatever the answer is: the connection between the workers may be used again now.
                await attacker.ask(attack)
            else:
                attacker.writer.write(attack)
            victim = await Caller.of(other)
            for _ in range(5):
                status, _, body = await victim.ask(request("GET", "/mine", cookie, "X-Caller: victim"))
                assert (status, json.loads(body)) == (200, {"caller": "victim"})
            attacker.close()
            victim.close()
            assert "mine of evil" not in gates.seen

    asyncio.run(scenario())


def test_request_to_upgrade_that_no_server_knows_is_answered_as_a_direct_one_is() -> None:
    async def scenario() -> None:
        async with two(lambda: make_app(Gates())) as (owner, other):
            cookie = await seeded(owner)
            fields = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: x", "Content-Length: 5")
            answers = []
            for worker in (owner, other):
                caller = await Caller.of(worker)
                answers.append((await caller.ask(request("POST", "/read", cookie, *fields, body=b"12345")))[::2])
                caller.close()
            assert answers[0] == answers[1]

    asyncio.run(scenario())


@pytest.mark.parametrize("http", ["httptools", "h11"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/lingers", "/raises-late", "/cancelled-later"])
def test_handler_that_goes_on_after_its_last_piece_holds_up_and_breaks_nobody_elses_request(
    path: str, method: str, http: str
) -> None:
    async def scenario() -> None:
        gates = Gates()
        async with two(lambda: make_app(gates), http=http) as (owner, other):
            cookie = await seeded(owner)
            slow, victim = await Caller.of(other), await Caller.of(other)
            status, _, body = await slow.ask(request(method, path, cookie), method)
            assert (status, body) == (200, b"12345" if method == "GET" else b"")
            for caller in ("one", "two"):
                status, _, body = await victim.ask(request("GET", "/mine", cookie, f"X-Caller: {caller}"))
                assert (status, json.loads(body)) == (200, {"caller": caller})
                gates.opened.set()
                await asyncio.sleep(0)
            slow.close()
            victim.close()

    asyncio.run(scenario())
