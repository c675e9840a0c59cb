"""The forwarding end of a link, with an owner written by hand: what it takes, refuses, keeps and gives up."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import pytest
import uvloop
from starlette.types import Message, Scope

from gym_gunicorn.forwarding import peer, wire
from gym_gunicorn.forwarding.errors import Broken, Busy, Gone, Truncated
from gym_gunicorn.forwarding.links.forwarder import FramedForwarder
from gym_gunicorn.forwarding.links.frames import (
    ASK,
    BODILESS,
    BODY,
    END,
    EXPECTING,
    LAST,
    OWN_REPLY,
    PREFACE,
    REPLY,
    REQUEST,
    FrameParser,
    frame,
    greeting,
)
from gym_gunicorn.forwarding.links.link import Link
from gym_gunicorn.forwarding.sockets import bind_private_socket, socket_path
from gym_gunicorn.metrics.values import CONNECTIONS, SENT_BYTES, Figures
from tests.workers import socket_directory, until

OWNER = "0123456789ab"
START = wire.encode_reply({"status": 200}, 0)
LARGE = 2**23
DISCONNECT: Message = {"type": "http.disconnect"}

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
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
    """What an owner has of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._parser = FrameParser()
        self._frames: list[tuple[int, bytes]] = []

    async def greeted(self) -> None:
        assert await self.reader.readexactly(len(PREFACE)) == PREFACE
        self.writer.write(greeting(OWNER))

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

    async def body(self) -> bytes:
        kind, body = BODY, b""
        while kind == BODY:
            kind, piece = await self.next()
            body += piece
        assert kind == END
        return body

    def send(self, *frames: tuple[int, bytes]) -> None:
        self.writer.write(b"".join(frame(*item) for item in frames))

    async def answer(self, body: bytes = b"", last: int = END) -> None:
        """Take a request and answer it."""
        kind, _ = await self.next()
        if kind == EXPECTING:
            self.send((ASK, b""))
        if kind != BODILESS:
            await self.body()
        self.send((REPLY, START), (last, body))


class Caller:
    """A caller: what it sends, and what it is sent."""

    def __init__(self, *events: Message | Exception, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        self.scope: Scope = {
            **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST"},
            **{"scheme": "http", "path": "/", "raw_path": b"/", "query_string": b"", "root_path": ""},
            **{"headers": list(headers), "client": None, "server": None},
        }
        self.events: asyncio.Queue[Message | Exception] = asyncio.Queue()
        for event in events or (piece(b""),):
            self.events.put_nowait(event)
        self.sent: list[Message] = []
        self.takes = asyncio.Event()
        self.takes.set()

    async def receive(self) -> Message:
        event = await self.events.get()
        if isinstance(event, Exception):
            raise event
        return event

    async def send(self, message: Message) -> None:
        await self.takes.wait()
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def is_answered(self) -> bool:
        return bool(self.sent) and self.sent[-1].get("more_body") is False


LENGTH = ((b"content-length", b"1"),)
EXPECTS = (*LENGTH, (b"expect", b"100-continue"))


def piece(body: bytes, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


class Owner:
    """An owner by hand, and the forwarder that leads to it. ``connections`` counts what it accepted."""

    def __init__(self, forwarder: FramedForwarder, path: str) -> None:
        self.forwarder = forwarder
        self.path = path
        self.connections = 0

    async def forward(self, caller: Caller) -> None:
        await self.forwarder.http(OWNER, caller.scope, caller.receive, caller.send)

    def forwarding(self, caller: Caller) -> asyncio.Task[None]:
        return asyncio.create_task(self.forward(caller))


@contextlib.asynccontextmanager
async def owner(
    serve: Callable[[Sibling], Awaitable[None]], greets: bool = True, max_forwards: int = 10
) -> AsyncIterator[Owner]:
    """An owner that has ``serve`` answer on each connection, and closes it then."""
    failed: list[BaseException] = []

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sibling = Sibling(reader, writer)
        it.connections += 1
        try:
            if greets:
                await sibling.greeted()
            await serve(sibling)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        except BaseException as error:
            failed.append(error)
        finally:
            writer.transport.abort()

    with socket_directory() as directory:
        path = socket_path(directory, OWNER)
        forwarder = FramedForwarder(directory, max_forwards)
        it = Owner(forwarder, path)
        server = await asyncio.start_unix_server(accepted, sock=bind_private_socket(path, 100))
        try:
            yield it
            assert forwarder._peers.in_flight == 0
        finally:
            await forwarder.close()
            server.close()
            await until(lambda: forwarder.figures.values[CONNECTIONS] == 0)
    # The probe of the forwarder's, which asks who listens, ends before it has sent a preface.
    assert failed == []


async def serve_on(sibling: Sibling) -> None:
    """Answer one request after another."""
    while not sibling.reader.at_eof():
        await sibling.answer(b"body")


async def never(sibling: Sibling) -> None:
    """Neither send nor close anything before the other side does."""
    await sibling.reader.read()


def test_link_is_kept_for_the_next_exchange(run: Run) -> None:
    links = 0

    async def serve(sibling: Sibling) -> None:
        nonlocal links
        links += 1
        await serve_on(sibling)

    async def scenario() -> None:
        async with owner(serve) as it:
            for caller in (Caller(), Caller(piece(b"x"), headers=LENGTH), Caller(piece(b"x"), headers=EXPECTS)):
                await it.forward(caller)
                assert caller.body == b"body"
            assert (links, it.forwarder.finished) == (1, 3)

    run(scenario())


@pytest.mark.parametrize("why", ["the owner stops", "the body is still under way", "the body was not asked for"])
def test_link_whose_exchange_leaves_something_is_not_used_again(why: str, run: Run) -> None:
    links = 0

    async def serve(sibling: Sibling) -> None:
        nonlocal links
        links += 1
        await sibling.next()
        sibling.send((REPLY, START), (LAST if why == "the owner stops" else END, b"body"))
        await never(sibling)

    async def scenario() -> None:
        async with owner(serve) as it:
            for number in range(1, 4):
                caller = Caller()
                if why == "the body is still under way":
                    caller = Caller(piece(b"part", True), headers=LENGTH)
                elif why == "the body was not asked for":
                    caller = Caller(piece(b"whole"), headers=EXPECTS)
                await it.forward(caller)
                assert (caller.body, links) == (b"body", number)
                await until(lambda: it.forwarder.figures.values[CONNECTIONS] == 0)

    run(scenario())


@pytest.mark.parametrize(
    ("what", "error"),
    [
        (greeting("ba9876543210"), Gone),
        (greeting("ba9876543210")[:-3] + b"\xff" * 3, Gone),
        (b"", Busy),
        (greeting(OWNER)[:-1], Busy),
        (greeting(OWNER) + b"\xff" * 9, Broken),
    ],
)
def test_other_greeting_says_what_became_of_the_owner(what: bytes, error: type[Exception], run: Run) -> None:
    async def serve(sibling: Sibling) -> None:
        await sibling.reader.readexactly(len(PREFACE))
        sibling.writer.write(what)
        await sibling.writer.drain()
        if error is not Busy:
            await never(sibling)
        sibling.writer.close()
        await sibling.writer.wait_closed()

    async def scenario() -> None:
        async with owner(serve, greets=False) as it:
            caller = Caller()
            with pytest.raises(error):
                await it.forward(caller)
            assert caller.sent == []

    run(scenario())


def test_greeting_arrives_however_it_is_cut(run: Run) -> None:
    async def serve(sibling: Sibling) -> None:
        await sibling.reader.readexactly(len(PREFACE))
        for byte in greeting(OWNER):
            sibling.writer.write(bytes((byte,)))
            for _ in range(5):
                await asyncio.sleep(0)
        await serve_on(sibling)

    async def scenario() -> None:
        async with owner(serve, greets=False) as it:
            caller = Caller()
            await it.forward(caller)
            assert caller.body == b"body"

    run(scenario())


def test_owner_whose_accept_queue_is_full_is_busy_and_not_gone(run: Run) -> None:
    async def scenario() -> None:
        with socket_directory() as directory, contextlib.ExitStack() as stack:
            path = socket_path(directory, OWNER)
            stack.enter_context(bind_private_socket(path, 5))
            forwarder = FramedForwarder(directory, 10)
            forwarder._peers.get(OWNER)
            with pytest.raises(BlockingIOError):
                while True:
                    sock = stack.enter_context(socket.socket(socket.AF_UNIX))
                    sock.setblocking(False)
                    sock.connect(path)
            with pytest.raises(Busy):
                await forwarder.http(OWNER, (caller := Caller()).scope, caller.receive, caller.send)
            await forwarder.close()
            await until(lambda: forwarder.figures.values[CONNECTIONS] == 0)

    run(scenario())


@pytest.mark.parametrize("when", ["greeting", "replying", "amid the reply", "amid the body", "on a kept link"])
def test_caller_that_leaves_ends_the_exchange(when: str, run: Run) -> None:
    seen: Counter[str] = Counter()

    async def serve(sibling: Sibling) -> None:
        if when == "greeting":
            seen["there"] += len(await sibling.reader.readexactly(len(PREFACE)))
        elif when == "on a kept link":
            await sibling.greeted()
            await sibling.answer(b"first")
        else:
            await sibling.greeted()
        if when != "greeting":
            seen["there"] += bool((await sibling.next())[0])
        if when == "amid the reply":
            sibling.send((REPLY, START), (BODY, b"part"))
        if when == "amid the body":
            assert await sibling.next() == (BODY, b"part")
            assert await sibling.next() == (0, b"")
        await never(sibling)
        seen["left"] += 1

    async def scenario() -> None:
        async with owner(serve, greets=False) as it:
            if when == "on a kept link":
                await it.forward(Caller())
            caller = Caller(piece(b"part", True), headers=LENGTH) if when == "amid the body" else Caller()
            task = it.forwarding(caller)
            await until(lambda: seen["there"])
            if when == "amid the reply":
                await until(lambda: caller.body == b"part")
            caller.events.put_nowait(DISCONNECT)
            await task
            await until(lambda: seen["left"])
            assert not caller.is_answered

    run(scenario())


@pytest.mark.parametrize("when", ["connecting", "replying"])
def test_forward_that_is_cancelled_closes_its_link(when: str, run: Run) -> None:
    seen: Counter[str] = Counter()

    async def serve(sibling: Sibling) -> None:
        seen["there"] += len(await sibling.reader.readexactly(len(PREFACE)))
        if when == "replying":
            sibling.writer.write(greeting(OWNER))
            await sibling.next()
            seen["asked"] += 1
        await never(sibling)
        seen["left"] += 1

    async def scenario() -> None:
        async with owner(serve, greets=False) as it:
            task = it.forwarding(Caller(piece(b"part", True), headers=LENGTH))
            await until(lambda: seen["asked" if when == "replying" else "there"])
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: seen["left"])

    run(scenario())


@pytest.mark.parametrize("kind", [REPLY, OWN_REPLY, ASK, REQUEST, 77])
def test_reply_with_another_frame_in_it_is_not_passed_for_a_whole_one(kind: int, run: Run) -> None:
    goes_on = asyncio.Event()

    async def serve(sibling: Sibling) -> None:
        await sibling.next()
        sibling.send((REPLY, START), (BODY, b"part"))
        await sibling.writer.drain()
        await goes_on.wait()
        sibling.send((kind, b"no part of it"), (END, b""))
        await never(sibling)

    async def scenario() -> None:
        async with owner(serve) as it:
            caller = Caller()
            task = it.forwarding(caller)
            await until(lambda: caller.body)
            goes_on.set()
            with pytest.raises(Truncated):
                await task
            assert (caller.body, caller.is_answered) == (b"part", False)

    run(scenario())


@pytest.mark.parametrize("frames", [[(BODY, b"x")], [(END, b"")], [(LAST, b"")], [(77, b"")], [(REPLY, b"no head")]])
def test_what_is_no_reply_is_a_broken_exchange_and_a_closed_link(frames: list[tuple[int, bytes]], run: Run) -> None:
    closed: list[bool] = []

    async def serve(sibling: Sibling) -> None:
        await sibling.next()
        sibling.send(*frames)
        await never(sibling)
        closed.append(True)

    async def scenario() -> None:
        async with owner(serve) as it:
            caller = Caller()
            with pytest.raises(Broken):
                await it.forward(caller)
            assert caller.sent == []
            await until(lambda: closed)

    run(scenario())


@pytest.mark.parametrize("frames", [[(REPLY, START), (END, b"another's")], [(BODY, b"")], [(ASK, b"")], [(77, b"")]])
def test_frames_on_a_link_that_nobody_uses_close_it_with_one_line(
    frames: list[tuple[int, bytes]], run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = asyncio.Event()
    links: list[str] = []

    async def serve(sibling: Sibling) -> None:
        first = not links
        links.append("opened")
        await sibling.answer(b"right")
        await goes_on.wait()
        if first:
            sibling.send(*frames)
        await never(sibling)
        links.append("closed")

    async def scenario() -> None:
        async with owner(serve) as it:
            await it.forward(Caller())
            goes_on.set()
            await until(lambda: "closed" in links)
            second = Caller()
            await it.forward(second)
            assert second.body == b"right"

    with caplog.at_level(logging.INFO, "uvicorn.error"):
        run(scenario())
    assert [record.levelname for record in caplog.records if record.name == "uvicorn.error"] == ["ERROR"]


@pytest.mark.parametrize("payload", [b"", b"x", b"x" * 1000, b"x" * 2**17], ids=len)
def test_reply_that_the_caller_does_not_take_holds_up_the_owner(payload: bytes, run: Run) -> None:
    sent = 0
    batch = [(BODY, payload)] * max(1, 1000 // (len(payload) or 1))

    async def serve(sibling: Sibling) -> None:
        nonlocal sent
        await sibling.next()
        sibling.send((REPLY, START))
        while True:
            sibling.send(*batch)
            await sibling.writer.drain()
            sent += len(batch) * (5 + len(payload))

    async def scenario() -> None:
        async with owner(serve) as it:
            caller = Caller()
            caller.takes.clear()
            task = it.forwarding(caller)
            await until(lambda: sent)
            before = -1
            while before != sent and sent < LARGE:
                before = sent
                for _ in range(200):
                    await asyncio.sleep(0)
            assert sent < LARGE
            caller.events.put_nowait(DISCONNECT)
            caller.takes.set()
            await task

    run(scenario())


@pytest.mark.parametrize("kept", [False, True], ids=["on a new link", "on a kept link"])
@pytest.mark.parametrize("amid", [False, True], ids=["while it waits", "amid its body"])
def test_caller_that_can_not_be_read_ends_the_exchange(amid: bool, kept: bool, run: Run) -> None:
    ended: list[bool] = []

    async def serve(sibling: Sibling) -> None:
        if kept:
            await sibling.answer()
        await sibling.next()
        await never(sibling)
        ended.append(True)

    async def scenario() -> None:
        async with owner(serve) as it:
            if kept:
                await it.forward(Caller())
            broken = ValueError("on purpose")
            caller = Caller(piece(b"part", True), broken, headers=LENGTH) if amid else Caller(piece(b""), broken)
            with pytest.raises(ValueError, match="on purpose"):
                await asyncio.wait_for(it.forward(caller), 10)
            await until(lambda: ended)

    run(scenario())


def test_caller_that_can_not_be_written_to_ends_the_exchange(run: Run) -> None:
    ended: list[bool] = []

    async def serve(sibling: Sibling) -> None:
        await sibling.next()
        sibling.send((REPLY, START), (BODY, b"x"))
        await never(sibling)
        ended.append(True)

    async def scenario() -> None:
        async def send(message: Message) -> None:
            raise ValueError("on purpose")

        async with owner(serve) as it:
            caller = Caller()
            with pytest.raises(ValueError, match="on purpose"):
                await it.forwarder.http(OWNER, caller.scope, caller.receive, send)
            await until(lambda: ended)

    run(scenario())


def test_owner_that_closes_amid_a_body_leaves_no_exception_behind(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def serve(sibling: Sibling) -> None:
        await sibling.next()
        await sibling.next()

    async def scenario() -> None:
        async with owner(serve) as it:
            caller = Caller(*[piece(b"x" * 2**16, True)] * 500, headers=LENGTH)
            with pytest.raises(Broken):
                await it.forward(caller)

    run(scenario())
    assert caplog.records == []


def test_body_that_comes_unasked_after_the_reply_began_reaches_the_owner(run: Run) -> None:
    bodies: list[bytes] = []

    async def serve(sibling: Sibling) -> None:
        assert (await sibling.next())[0] == EXPECTING
        sibling.send((REPLY, START))
        bodies.append(await sibling.body())
        sibling.send((END, b"end"))
        await never(sibling)

    async def scenario() -> None:
        async with owner(serve) as it:
            caller = Caller(piece(b"whole"), headers=EXPECTS)
            await asyncio.wait_for(it.forward(caller), 10)
            assert (bodies, caller.body) == ([b"whole"], b"end")

    run(scenario())


def test_caller_that_leaves_amid_a_reply_to_a_body_that_was_never_asked_for_is_noticed(run: Run) -> None:
    ended: list[bool] = []

    async def serve(sibling: Sibling) -> None:
        await sibling.next()
        sibling.send((REPLY, START), (BODY, b"part"))
        await never(sibling)
        ended.append(True)

    async def scenario() -> None:
        async with owner(serve) as it:
            caller = Caller(DISCONNECT, headers=EXPECTS)
            await asyncio.wait_for(it.forward(caller), 10)
            await until(lambda: ended)

    run(scenario())


def test_bytes_of_a_body_are_counted_once(run: Run) -> None:
    async def scenario() -> None:
        async with owner(serve_on) as it:
            for _ in range(2):
                await it.forward(Caller(piece(b"abc", True), piece(b"", True), piece(b"de"), headers=LENGTH))
            assert it.forwarder.figures.values[SENT_BYTES] == 10

    run(scenario())


def test_more_than_may_be_in_flight_are_busy(run: Run) -> None:
    async def scenario() -> None:
        async with owner(never, max_forwards=2) as it:
            callers = [Caller(), Caller()]
            tasks = [it.forwarding(caller) for caller in callers]
            await until(lambda: it.forwarder._peers.in_flight == 2)
            with pytest.raises(Busy):
                await it.forward(Caller())
            for caller in callers:
                caller.events.put_nowait(DISCONNECT)
            await asyncio.gather(*tasks)

    run(scenario())


def test_greeting_of_another_owner_that_nobody_waits_for_any_more_leaves_no_exception_behind(run: Run) -> None:
    async def scenario() -> None:
        here, there = socket.socketpair()
        with there:
            _, link = await asyncio.get_running_loop().create_unix_connection(lambda: Link(OWNER, Figures()), sock=here)
            task = asyncio.create_task(link.greet())
            await asyncio.sleep(0)
            link.data_received(greeting("ba9876543210"))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            link.transport.abort()
            await until(lambda: link.lost)

    run(scenario())


def test_owner_that_closes_during_a_handshake_leaves_no_exception_behind(run: Run) -> None:
    began: list[bool] = []

    async def serve(sibling: Sibling) -> None:
        await sibling.next()
        began.append(True)

    async def scenario() -> None:
        async with owner(serve) as it:
            caller = Caller({"type": "websocket.connect"})
            caller.scope = {**caller.scope, "type": "websocket", "scheme": "ws", "subprotocols": []}

            async def leave() -> None:
                await until(lambda: began)
                await until(lambda: it.forwarder.figures.values[CONNECTIONS] == 0)
                caller.events.put_nowait({"type": "websocket.disconnect", "code": 1001})

            leaving = asyncio.create_task(leave())
            with pytest.raises(Broken):
                await it.forwarder.websocket(OWNER, caller.scope, caller.receive, caller.send)
            await leaving

    run(scenario())


def test_websocket_whose_scope_can_be_no_head_leaves_no_link_behind(run: Run) -> None:
    async def scenario() -> None:
        async def serve(sibling: Sibling) -> None:
            assert await sibling.next() == (0, b"")

        async with owner(serve) as it:
            caller = Caller()
            scope = {**caller.scope, "type": "websocket", "path": "/\udcff"}
            with pytest.raises(Broken):
                await it.forwarder.websocket(OWNER, scope, caller.receive, caller.send)
            await until(lambda: it.forwarder.figures.values[CONNECTIONS] == 0)

    run(scenario())


def test_link_that_was_aborted_a_moment_ago_is_not_used_again(run: Run) -> None:
    async def serve(sibling: Sibling) -> None:
        await sibling.answer(b"body")
        await never(sibling)

    async def scenario() -> None:
        async with owner(serve) as it:
            await it.forward(Caller())
            (link,) = it.forwarder._peers.get(OWNER)._idle
            # The event loop tells of it later.
            link.transport.abort()
            caller = Caller()
            await it.forward(caller)
            assert caller.body == b"body"
            assert it.connections == 3

    run(scenario())


def test_caller_that_takes_slowly_gets_the_whole_reply_of_an_owner_that_has_ended(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "DEATH", 0.02)
    # More than the kernel and both ends hold.
    whole = b"x" * LARGE

    async def serve(sibling: Sibling) -> None:
        await sibling.next()
        sibling.send((REPLY, START), *[(BODY, whole[: 2**16])] * (LARGE // 2**16), (END, b""))
        await never(sibling)

    async def scenario() -> None:
        async with owner(serve) as it:
            caller = Caller()
            caller.takes.clear()
            task = it.forwarding(caller)
            peers = it.forwarder._peers
            await until(lambda: any(not link._reading for link in peers.get(OWNER)._used))
            peers.get(OWNER).ended.set()
            await until(lambda: OWNER not in peers._peers)
            for _ in range(10):
                await asyncio.sleep(peer.DEATH)
            caller.takes.set()
            await task
            assert caller.body == whole
            await until(lambda: not peers._watchers)

    run(scenario())


def test_caller_of_an_owner_that_has_ended_is_told_though_another_takes_slowly(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "DEATH", 0.02)

    sizes = iter([2**17, 1])

    async def serve(sibling: Sibling) -> None:
        await sibling.next()
        sibling.send((REPLY, START), (BODY, b"x" * next(sizes)))
        await never(sibling)

    async def scenario() -> None:
        async with owner(serve) as it:
            slow, quick = Caller(), Caller()
            slow.takes.clear()
            peers = it.forwarder._peers
            slow_task = it.forwarding(slow)
            await until(lambda: any(not link._reading for link in peers.get(OWNER)._used))
            quick_task = it.forwarding(quick)
            await until(lambda: quick.body)
            peers.get(OWNER).ended.set()
            with pytest.raises(Truncated):
                await quick_task
            assert not slow_task.done()
            slow.events.put_nowait(DISCONNECT)
            slow.takes.set()
            await slow_task

    run(scenario())
