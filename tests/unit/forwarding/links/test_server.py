"""The owner's end of a link, with a sibling written by hand: what it answers, refuses, and takes in."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import uvloop
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config

from gym_gunicorn.forwarding import wire
from gym_gunicorn.forwarding.cancelled import AnswerCancelled
from gym_gunicorn.forwarding.links.frames import (
    ASK,
    BODILESS,
    BODY,
    END,
    EXPECTING,
    LAST,
    MAX_HEAD,
    OWN_REPLY,
    PREFACE,
    REPLY,
    REQUEST,
    FrameParser,
    frame,
    greeting,
)
from gym_gunicorn.forwarding.private.app import PrivateApp
from gym_gunicorn.forwarding.private.server import PrivateServer
from gym_gunicorn.forwarding.sockets import bind_private_socket, socket_path
from gym_gunicorn.problems import SERVER_STOPPING
from tests.workers import socket_directory, until

OWNER = "0123456789ab"
SCOPE: Scope = {
    "type": "http",
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "method": "POST",
    "scheme": "http",
    "path": "/",
    "raw_path": b"/",
    "query_string": b"",
    "root_path": "",
    "headers": [(b"x-caller", b"one")],
    "client": None,
    "server": None,
}
HEAD = wire.encode_head(SCOPE)
START: Message = {"type": "http.response.start", "status": 200, "headers": []}

# More than buffers of the system and of both ends hold together.
LARGE = 2**23


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Run a scenario on a loop of each kind, and fail where an exception was met by nobody."""

    def run_on_loop(scenario: Coroutine[Any, Any, None]) -> None:
        unmet: list[dict[str, Any]] = []
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.get_loop().set_exception_handler(lambda loop, context: unmet.append(context))
            runner.run(asyncio.wait_for(scenario, 60))
            gc.collect()
        assert unmet == []

    return run_on_loop


class Sibling:
    """The forwarding end of a link, by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._parser = FrameParser()
        self._frames: list[tuple[int, bytes]] = []

    async def greet(self) -> None:
        self.writer.write(PREFACE)
        expected = greeting(OWNER)
        assert await self.reader.readexactly(len(expected)) == expected

    def send(self, kind: int, payload: bytes = b"") -> None:
        self.writer.write(frame(kind, payload))

    async def next(self) -> tuple[int, bytes]:
        """Return the next frame, or (0, b"") where the link was closed instead."""
        while not self._frames:
            try:
                data = await self.reader.read(2**16)
            except ConnectionResetError:
                data = b""
            if not data:
                return 0, b""
            self._frames = self._parser.feed(data)
        return self._frames.pop(0)

    async def reply(self) -> tuple[int, bytes]:
        """Take a whole reply; return the kind of its last frame, and its body."""
        kind, _ = await self.next()
        assert kind in (REPLY, OWN_REPLY)
        kind, body = BODY, b""
        while kind == BODY:
            kind, piece = await self.next()
            body += piece
        return kind, body

    def close(self) -> None:
        self.writer.transport.abort()


class Owner:
    """A private server that serves an app."""

    def __init__(self, server: PrivateServer) -> None:
        self.server = server
        self.siblings: list[Sibling] = []

    async def sibling(self) -> Sibling:
        sibling = Sibling(*await asyncio.open_unix_connection(self.server.path))
        self.siblings.append(sibling)
        return sibling

    async def link(self) -> Sibling:
        sibling = await self.sibling()
        await sibling.greet()
        return sibling


@contextlib.asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[Owner]:
    with socket_directory() as directory:
        path = socket_path(directory, OWNER)
        served = PrivateApp(AnswerCancelled(app, SERVER_STOPPING), owner_id=OWNER)
        server = PrivateServer(served, OWNER, bind_private_socket(path, 100), path)
        config = Config(app, log_config=None)
        config.load()
        await server.start(config, {})
        owner = Owner(server)
        try:
            yield owner
        finally:
            for sibling in owner.siblings:
                sibling.close()
            await until(lambda: not server.state.connections and not server.state.tasks)
            server.stop_accepting()


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    await send(START)
    await send({"type": "http.response.body", "body": body})


Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.mark.parametrize("size", [1, 7, len(PREFACE)])
def test_preface_is_answered_however_it_is_cut(size: int, run: Run) -> None:
    async def scenario() -> None:
        async with serving(echo) as owner:
            sibling = await owner.sibling()
            data = PREFACE + frame(BODILESS, HEAD)
            for start in range(0, len(data), size):
                sibling.writer.write(data[start : start + size])
                await asyncio.sleep(0)
            assert await sibling.reader.readexactly(len(greeting(OWNER))) == greeting(OWNER)
            assert await sibling.reply() == (END, b"")

    run(scenario())


def test_what_begins_as_no_link_is_http(run: Run) -> None:
    async def scenario() -> None:
        async with serving(echo) as owner:
            sibling = await owner.sibling()
            sibling.writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc")
            assert (await sibling.reader.readuntil(b"abc")).startswith(b"HTTP/1.1 200 ")

    run(scenario())


@pytest.mark.parametrize("data", [PREFACE.replace(b"1", b"2"), b"\0", b"\xff" * 100, PREFACE[:-1] + b"x"])
def test_other_preface_is_answered_as_http_and_closed(data: bytes, run: Run) -> None:
    async def scenario() -> None:
        async with serving(echo) as owner:
            sibling = await owner.sibling()
            sibling.writer.write(data)
            sibling.writer.write_eof()
            assert (await sibling.reader.read()).startswith((b"HTTP/1.1 400 ", b""))

    run(scenario())


def test_one_exchange_follows_another_on_a_link(run: Run) -> None:
    async def scenario() -> None:
        async with serving(echo) as owner:
            sibling = await owner.link()
            for number in range(20):
                body = b"%d" % number
                sibling.send(REQUEST, HEAD)
                sibling.send(BODY, body)
                sibling.send(BODY)
                sibling.send(END, body)
                assert await sibling.reply() == (END, body * 2)
                sibling.send(BODILESS, HEAD)
                assert await sibling.reply() == (END, b"")
            assert owner.server.state.total_requests == 40

    run(scenario())


def test_body_that_the_app_does_not_read_holds_up_the_sender(run: Run) -> None:
    async def scenario() -> None:
        reads = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await reads.wait()
            await echo(scope, receive, send)

        async with serving(app) as owner:
            sibling = await owner.link()
            sibling.send(REQUEST, HEAD)
            body = b"x" * LARGE
            sibling.send(END, body)
            transport = sibling.writer.transport
            # What the system and the owner took at once, they took; the rest stays here.
            waiting = -1
            while waiting != transport.get_write_buffer_size():
                waiting = transport.get_write_buffer_size()
                for _ in range(100):
                    await asyncio.sleep(0)
            assert waiting > LARGE / 2
            reads.set()
            assert await sibling.reply() == (END, body)

    run(scenario())


def test_reply_that_the_sibling_does_not_take_holds_up_the_app(run: Run) -> None:
    async def scenario() -> None:
        sent = 0

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal sent
            await send(START)
            for _ in range(300):
                await send({"type": "http.response.body", "body": b"x" * 2**14, "more_body": True})
                sent += 1
            await send({"type": "http.response.body", "body": b""})

        async with serving(app) as owner:
            sibling = await owner.link()
            sibling.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's can
            sibling.send(BODILESS, HEAD)
            await until(lambda: sent)
            before = -1
            while before != sent:
                before = sent
                for _ in range(100):
                    await asyncio.sleep(0)
            assert sent < 150
            sibling.writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert await sibling.reply() == (END, b"x" * 2**14 * 300)

    run(scenario())


def test_body_is_asked_for_when_the_app_reads(run: Run) -> None:
    async def scenario() -> None:
        async with serving(echo) as owner:
            sibling = await owner.link()
            sibling.send(EXPECTING, HEAD)
            assert await sibling.next() == (ASK, b"")
            sibling.send(END, b"asked for")
            assert await sibling.reply() == (END, b"asked for")

    run(scenario())


def test_body_is_not_asked_for_by_an_app_that_has_begun_its_reply(run: Run) -> None:
    async def scenario() -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send(START)
            await receive()
            await send({"type": "http.response.body", "body": b"later"})

        async with serving(app) as owner:
            sibling = await owner.link()
            sibling.send(EXPECTING, HEAD)
            assert (await sibling.next())[0] == REPLY
            sibling.send(END, b"unasked")
            assert await sibling.next() == (END, b"later")

    run(scenario())


@pytest.mark.parametrize("kind", [REQUEST, EXPECTING])
def test_app_whose_sibling_has_left_reads_a_disconnect(kind: int, run: Run) -> None:
    async def scenario() -> None:
        seen: list[str] = []
        goes_on = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            seen.append("called")
            await goes_on.wait()
            seen.append((await receive())["type"])
            # As to uvicorn's own: into the void.
            await send(START)
            await send({"type": "http.response.body", "body": b"x"})
            seen.append((await receive())["type"])

        async with serving(app) as owner:
            sibling = await owner.link()
            sibling.send(kind, HEAD)
            await until(lambda: seen)
            sibling.close()
            await until(lambda: not owner.server.state.connections)
            goes_on.set()
            await until(lambda: not owner.server.state.tasks)
            assert seen == ["called", "http.disconnect", "http.disconnect"]

    run(scenario())


def test_app_that_raises_gets_the_servers_own_reply_and_the_link_serves_on(run: Run) -> None:
    async def scenario() -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            raise ValueError("on purpose")

        async with serving(app) as owner:
            sibling = await owner.link()
            for _ in range(2):
                sibling.send(BODILESS, HEAD)
                kind, head = await sibling.next()
                assert kind == OWN_REPLY
                assert wire.decode_reply(head)[0]["status"] == 500
                assert await sibling.next() == (END, b"Internal Server Error")

    run(scenario())


def test_reply_that_is_not_completed_ends_the_link(run: Run) -> None:
    async def scenario() -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send(START)
            await send({"type": "http.response.body", "body": b"part", "more_body": True})

        async with serving(app) as owner:
            sibling = await owner.link()
            sibling.send(BODILESS, HEAD)
            assert await sibling.reply() == (0, b"part")

    run(scenario())


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(frame(BODILESS, HEAD) * 2, id="a request before the end of another"),
        pytest.param(frame(BODY, b"x"), id="a body of no request"),
        pytest.param(frame(END, b""), id="an end of no request"),
        pytest.param(frame(BODILESS, HEAD) + frame(END, b""), id="a body of a request that has none"),
        pytest.param(frame(REQUEST, HEAD) + frame(END, b"") * 2, id="two ends"),
        pytest.param(frame(REQUEST, HEAD) + frame(LAST, b""), id="an end of a reply"),
        pytest.param(frame(REPLY, b"x"), id="a reply"),
        pytest.param(frame(ASK, b""), id="a question"),
        pytest.param(frame(77, b""), id="another kind"),
        pytest.param((MAX_HEAD + 1).to_bytes(4, "big") + bytes((BODILESS,)), id="too long a head"),
    ],
)
def test_what_may_not_come_ends_in_a_closed_link_and_one_line(
    data: bytes, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        disconnected = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            disconnected.set()

        async with serving(app) as owner:
            sibling = await owner.link()
            sibling.writer.write(data)
            assert await sibling.next() == (0, b"")
            if data[4] in (BODILESS, REQUEST) and len(data) > len(HEAD):
                await disconnected.wait()

    with caplog.at_level(logging.INFO, "uvicorn.error"):
        run(scenario())
    lines = [record for record in caplog.records if record.name == "uvicorn.error"]
    assert [record.levelname for record in lines] == ["ERROR"]
    assert "A sibling's request can't be read" in lines[0].getMessage()


def test_rest_of_a_body_that_was_not_read_is_thrown_away(run: Run) -> None:
    async def scenario() -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send(START)
            await send({"type": "http.response.body", "body": b"unread"})

        async with serving(app) as owner:
            sibling = await owner.link()
            for _ in range(3):
                sibling.send(REQUEST, HEAD)
                sibling.send(END, b"x" * LARGE)
                assert await sibling.reply() == (END, b"unread")
                await sibling.writer.drain()

    run(scenario())


def test_reply_of_a_stopping_owner_arrives_whole_while_the_body_is_still_under_way(run: Run) -> None:
    async def scenario() -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send(START)
            await send({"type": "http.response.body", "body": b"early"})

        async with serving(app) as owner:
            sibling = await owner.link()
            owner.server.app.app.stopping = True
            sibling.send(REQUEST, HEAD)
            # The sibling takes nothing before it has sent a piece that the owner did not wait for.
            sibling.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's can
            await until(lambda: owner.server.state.total_requests == 1 and not owner.server.state.tasks)
            for _ in range(10):
                sibling.send(BODY, b"x" * 2**16)
                await until(lambda: not sibling.writer.transport.get_write_buffer_size())
            sibling.writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert await sibling.reply() == (LAST, b"early")

    run(scenario())


def test_descriptors_of_closed_links_are_given_back(run: Run) -> None:
    async def scenario() -> None:
        async with serving(echo) as owner:
            for data in (b"", PREFACE[:5], PREFACE, PREFACE + frame(REQUEST, HEAD), PREFACE + b"\xff" * 9):
                sock = socket.socket(socket.AF_UNIX)
                sock.connect(owner.server.path)
                sock.sendall(data)
                sock.close()
            await until(lambda: owner.server.state.total_requests == 1)
            await until(lambda: not owner.server.state.connections and not owner.server.state.tasks)

    run(scenario())
