"""Any bytes on a link, at either end: frames, or an end of the connection with a line in the log, and nothing left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import Any
from unittest import mock

from hypothesis import example, find, given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

from gym_gunicorn.forwarding import peer, wire
from gym_gunicorn.forwarding.cancelled import AnswerCancelled
from gym_gunicorn.forwarding.errors import Broken, Busy, ForwardError, Gone, Truncated
from gym_gunicorn.forwarding.links import frames
from gym_gunicorn.forwarding.links.forwarder import FramedForwarder
from gym_gunicorn.forwarding.links.frames import (
    BODILESS,
    BODY,
    END,
    EXPECTING,
    LAST,
    OWN_REPLY,
    PREFACE,
    REPLY,
    REQUEST,
    FrameError,
    FrameParser,
    frame,
    greeting,
)
from gym_gunicorn.forwarding.links.server import LinkOrHttp, LinkServer
from gym_gunicorn.forwarding.private.app import PrivateApp
from gym_gunicorn.forwarding.sockets import bind_private_socket, socket_path
from gym_gunicorn.metrics.values import CONNECTIONS
from gym_gunicorn.problems import SERVER_STOPPING
from tests.fuzz.strategies import CUTS, HEADS, REPLY_HEADS, fuzzed
from tests.workers import socket_directory, until

OWNER = "0123456789ab"
SCOPE: Scope = {
    **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"},
    **{"path": "/", "raw_path": b"/", "query_string": b"", "root_path": "", "client": None, "server": None},
    "headers": [(b"content-length", b"1")],
}
HEAD = wire.encode_head(SCOPE)
START = wire.encode_reply({"status": 200}, 0)
FAILURE: Message = {"type": "http.response.start", "status": 500, "headers": []}

KINDS = st.integers(0, 10) | st.integers(0, 255)
PAYLOADS = st.one_of(
    st.sampled_from([b"", HEAD, START]),
    st.binary(max_size=20),
    HEADS,
    REPLY_HEADS,
)
REQUESTS = st.tuples(st.sampled_from([BODILESS, REQUEST, EXPECTING]), st.just(HEAD) | PAYLOADS)
REPLIES_BEGUN = st.tuples(st.sampled_from([REPLY, OWN_REPLY]), st.just(START) | PAYLOADS)
PIECES = st.tuples(st.sampled_from([BODY, END, LAST]), st.binary(max_size=20))
FRAMES = st.one_of(REQUESTS, REPLIES_BEGUN, PIECES, PIECES, st.tuples(KINDS, PAYLOADS))


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Frames in any order, and then what is not quite one."""
    data = b"".join(frame(*item) for item in draw(st.lists(FRAMES, max_size=6)))
    if draw(st.booleans()):
        data = data[: draw(st.integers(0, len(data)))]
    return data + draw(st.just(b"") | st.binary(max_size=8))


def cut(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = [0, *sorted(min(at, len(data)) for at in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(places)]


def parsed(pieces: Sequence[bytes]) -> list[tuple[int, bytes]] | None:
    """Return the frames in ``pieces``, of a body what it holds and how it ends; ``None`` where they are none."""
    parser = FrameParser()
    found: list[tuple[int, bytes]] = []
    for piece in pieces:
        try:
            for kind, payload in parser.feed(piece):
                if kind in (BODY, END, LAST) and found and found[-1][0] == BODY:
                    payload = found.pop()[1] + payload
                found.append((kind, payload))
        except FrameError:
            return None
    # A body that is empty so far says nothing.
    return found[:-1] if found and found[-1] == (BODY, b"") else found


@contextlib.asynccontextmanager
async def nothing_left() -> AsyncIterator[list[str]]:
    """Fail where something of a link is left, or an exception met by nobody; gives the lines of the log."""
    unmet: list[dict[str, Any]] = []
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("uvicorn.error")
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unmet.append(context))
    log.addHandler(handler)
    propagates, log.propagate = log.propagate, False
    try:
        yield lines
        await until(lambda: len(asyncio.all_tasks()) == 1)
        # What a task has ended with is done one step of the loop later.
        for _ in range(3):
            await asyncio.sleep(0)
    finally:
        log.removeHandler(handler)
        log.propagate = propagates
    gc.collect(0)
    assert unmet == []


# The parser


@fuzzed()
@given(streams(), CUTS)
@example(b"\xff\xff\xff\xff\1", [])
@example(b"\xff\xff\xff\xff\6", [])
@example(b"\0\0\0\0\6" * 5, [3])
def test_any_bytes_are_the_same_frames_however_they_are_cut(data: bytes, cuts: list[int]) -> None:
    assert parsed(cut(data, cuts)) == parsed([data])


@fuzzed()
@given(streams(), CUTS, st.integers(0, 100))
def test_parser_never_holds_more_than_a_head(data: bytes, cuts: list[int], most: int) -> None:
    parser = FrameParser()
    with mock.patch.object(frames, "MAX_HEAD", most), contextlib.suppress(FrameError):
        for piece in cut(data, cuts):
            found = parser.feed(piece)
            assert len(parser._buffer) < most + 5
            assert all(kind in (BODY, END, LAST) or len(payload) <= most for kind, payload in found)


def test_fuzzed_streams_are_both_read_and_refused() -> None:
    find(streams(), lambda data: len(parsed([data]) or []) > 3)
    find(streams(), lambda data: parsed([data]) is None)


# The owner's end


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        more = message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def owner_meets(pieces: Sequence[bytes]) -> None:
    app = PrivateApp(AnswerCancelled(echo, SERVER_STOPPING), owner_id=OWNER)
    state = ServerState()
    config = Config(app, log_config=None, lifespan="off", interface="asgi3", ws="none", access_log=False)
    config.load()

    def link() -> LinkServer:
        return LinkServer(app, state, {}, FAILURE, isolated=False)

    def http() -> asyncio.Protocol:
        made: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]  # uvicorn's protocols take these
            config=config, server_state=state, app_state={}
        )
        return made

    here, there = socket.socketpair()
    async with nothing_left() as lines:
        here.setblocking(False)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_accepted_socket(lambda: LinkOrHttp(greeting(OWNER), link, http, state), there)
        with here:
            for piece in pieces:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    await loop.sock_sendall(here, piece)
                for _ in range(5):
                    await asyncio.sleep(0)
            refused = [line for line in lines if "its connection is closed" in line]
            assert len(refused) <= 1
            if refused:
                assert transport.is_closing()
        await until(lambda: not state.connections and not state.tasks)
        assert not any("Exception" in line for line in lines), lines


@fuzzed(0.5)
@given(streams(), CUTS)
@example(frame(BODILESS, HEAD) * 2, [])
@example(frame(EXPECTING, HEAD) + frame(END, b"x") + frame(REQUEST, HEAD) + frame(END, b"y"), [50, 300])
@example(b"\xff" * 20, [])
def test_any_bytes_of_a_sibling_end_in_a_closed_link_with_one_line_or_in_replies(data: bytes, cuts: list[int]) -> None:
    asyncio.run(owner_meets([PREFACE, *cut(data, cuts)]))


@fuzzed(0.25)
@given(st.binary(max_size=30) | st.integers(0, len(PREFACE)).map(lambda at: PREFACE[:at]), streams(), CUTS)
def test_any_first_bytes_of_a_connection_end_in_nothing_left(first: bytes, data: bytes, cuts: list[int]) -> None:
    asyncio.run(owner_meets(cut(first + data, cuts)))


# The forwarding end


async def forwarder_meets(pieces: Sequence[bytes], has_body: bool, greets: bool) -> type[ForwardError] | None:
    """Forward a request to an owner that sends ``pieces`` and closes; return how that ended."""

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readexactly(len(PREFACE))
            if greets:
                writer.write(greeting(OWNER))
                await reader.readexactly(5)
            for piece in pieces:
                writer.write(piece)
                for _ in range(5):
                    await asyncio.sleep(0)
            writer.write_eof()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            await asyncio.sleep(0)
            writer.transport.abort()

    asked = False
    sent: list[Message] = []

    async def receive() -> Message:
        nonlocal asked
        if asked:
            await asyncio.Event().wait()
        asked = True
        return {"type": "http.request", "body": b"x" if has_body else b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {**SCOPE, "headers": SCOPE["headers"] if has_body else []}
    ended: type[ForwardError] | None = None
    with socket_directory() as directory:
        path = socket_path(directory, OWNER)
        async with nothing_left() as lines:
            forwarder = FramedForwarder(directory, 10)
            server = await asyncio.start_unix_server(accepted, sock=bind_private_socket(path, 10))
            try:
                await forwarder.http(OWNER, scope, receive, send)
            except (Gone, Busy, Broken, Truncated) as error:
                ended = type(error)
            # A server that is closed amid an accept (asyncio, Python 3.11) loses the connection.
            for _ in range(5):
                await asyncio.sleep(0)
            server.close()
            await until(lambda: forwarder.figures.values[CONNECTIONS] == 0)
            await forwarder.close()
            assert len(lines) <= 1, lines
    assert [message["type"] for message in sent[1:]] == ["http.response.body"] * len(sent[1:])
    assert (ended is None) == (bool(sent[1:]) and not sent[-1]["more_body"])
    assert ended is Truncated or ended is None or not sent
    return ended


@fuzzed(0.25)
@given(streams() | streams().map(lambda data: frame(REPLY, START) + data), CUTS, st.booleans())
@example(frame(REPLY, START) + frame(REPLY, START), [], False)
@example(frame(REPLY, START) + frame(END, b"") + b"\xff" * 9, [], False)
@example(frame(REPLY, b"[1,200,[],1e30]"), [], False)
@example(frame(REPLY, b"[1,200,[],-1e30]") + frame(END, b""), [], False)
def test_any_bytes_of_an_owner_are_a_reply_or_an_error_of_ours(data: bytes, cuts: list[int], has_body: bool) -> None:
    with mock.patch.object(peer, "DEATH", 0):
        asyncio.run(forwarder_meets(cut(data, cuts), has_body, greets=True))


@fuzzed(0.25)
@given(st.binary(max_size=40) | st.integers(0, 33).map(lambda at: greeting(OWNER)[:at] + b"\xff"), CUTS)
def test_any_greeting_of_an_owner_is_one_or_an_error_of_ours(data: bytes, cuts: list[int]) -> None:
    # What is no greeting may be HTTP, which is tried then.
    with mock.patch.object(peer, "DEATH", 0):
        assert asyncio.run(forwarder_meets(cut(data, cuts), has_body=False, greets=False)) is not None
