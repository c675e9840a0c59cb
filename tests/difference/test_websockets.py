"""WebSockets: routed like requests, and the same to both ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import websockets
import websockets.sync.client
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.difference.exchange import (
    FORWARDERS,
    PATIENCE,
    Configuration,
    Connection,
    Gate,
    Pair,
    Seen,
    eventually,
    handlers_end,
    running_pair,
)
from tests.difference.process import session_at, worker_process
from tests.difference.websocket import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    Conversation,
    Frame,
    close_frame,
    does,
    echo,
    frame,
    handshake,
    read_frame,
    talk,
)
from tests.workers import Worker, socket_directory

with warnings.catch_warnings():
    # uvicorn's older implementation and the library under it say that they are deprecated.
    warnings.simplefilter("ignore")
    import uvicorn.protocols.websockets.websockets_impl  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore:remove second argument of ws_handler:DeprecationWarning")

CONFIGURATIONS = [
    Configuration(http, tls, unix, forwarder, {"ws": ws})
    for forwarder in FORWARDERS
    for http, tls, unix, ws in (
        ("httptools", False, False, "websockets-sansio"),
        ("h11", True, False, "websockets-sansio"),
        ("httptools", False, True, "websockets-sansio"),
        ("httptools", False, False, "wsproto"),
        ("h11", True, True, "wsproto"),
    )
]
DEFAULT = [CONFIGURATIONS[0], CONFIGURATIONS[3]]


@pytest.fixture(scope="module", params=CONFIGURATIONS, ids=str)
def pair(request: pytest.FixtureRequest, certificate: tuple[str, str]) -> Iterator[Pair]:
    with running_pair(request.param, certificate) as pair:
        yield pair


@pytest.fixture(scope="module", params=DEFAULT, ids=str)
def plain_pair(request: pytest.FixtureRequest, certificate: tuple[str, str]) -> Iterator[Pair]:
    with running_pair(request.param, certificate) as pair:
        yield pair


ACCEPT: Message = {"type": "websocket.accept"}
BYE = close_frame(1000)


def text(content: str) -> Message:
    return {"type": "websocket.send", "text": content}


def binary(content: bytes) -> Message:
    return {"type": "websocket.send", "bytes": content}


def closes(*code: int, **more: str | None) -> Message:
    return {"type": "websocket.close", **({"code": code[0]} if code else {}), **more}


def refuses(status: int, *bodies: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> ASGIApp:
    last = len(bodies) - 1
    return does(
        {"type": "websocket.http.response.start", "status": status, "headers": list(headers)},
        *(
            {"type": "websocket.http.response.body", "body": body, "more_body": number < last}
            for number, body in enumerate(bodies)
        ),
    )


async def raises(scope: Scope, receive: Receive, send: Send) -> None:
    raise ValueError("the app raises")


async def raises_after_the_handshake(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send(ACCEPT)
    await send(text("last"))
    raise ValueError("the app raises")


async def returns(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()


async def returns_after_the_handshake(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send(ACCEPT)
    await send(text("last"))


async def sends_after_its_close(scope: Scope, receive: Receive, send: Send) -> None:
    await does(ACCEPT, closes(4001))(scope, receive, send)
    await send(text("late"))


async def goes_on_sending_to_a_caller_who_has_closed(scope: Scope, receive: Receive, send: Send) -> None:
    await does(ACCEPT)(scope, receive, send)
    await send(text("late"))


CLOSE_CODES = [1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 1013, 1014, 3000, 3999, 4000, 4321, 4999]
MESSAGES = [
    Conversation(f"text of {name}", [frame(TEXT, content.encode()), 1, BYE])
    for name, content in (
        ("ASCII", "hello"),
        ("nothing", ""),
        ("Unicode", "café € 🦄 \x00\x7f"),
        ("64 KiB", "x" * 2**16),
    )
] + [
    Conversation("binary", [frame(BINARY, bytes(range(256))), 1, BYE]),
    Conversation("binary of nothing", [frame(BINARY), 1, BYE]),
    Conversation("text of 8 MiB", [frame(TEXT, "é".encode() * 2**22), 1, BYE]),
    Conversation("binary of 8 MiB", [frame(BINARY, bytes(range(256)) * 2**15), 1, BYE]),
    Conversation("a thousand messages", [b"".join(frame(TEXT, b"%d" % number) for number in range(1000)), 1000, BYE]),
    Conversation("both kinds in turn", [frame(TEXT, b"1") + frame(BINARY, b"2") + frame(TEXT, b"3"), 3, BYE]),
    Conversation(
        "a fragmented message with a ping in it",
        [
            frame(TEXT, b"caf\xc3", fin=False),
            frame(PING, b"ping"),
            1,
            frame(CONTINUATION, b"\xa9", fin=False) + frame(CONTINUATION, b"!"),
            1,
            BYE,
        ],
    ),
    Conversation("a ping", [frame(PING, b"payload"), 1, frame(PING), 1, BYE]),
    Conversation("a pong that nobody asked for", [frame(PONG, b"payload") + frame(TEXT, b"hello"), 1, BYE]),
    Conversation("messages of the app's own accord", [3, BYE], does(ACCEPT, text("a"), binary(b"b"), text("c"))),
    Conversation(
        "events with both keys",
        [2, BYE],
        does(
            ACCEPT,
            {"type": "websocket.send", "text": "a", "bytes": None},
            {"type": "websocket.send", "text": None, "bytes": b"b"},
        ),
    ),
]
BROKEN = [
    Conversation("text that is not UTF-8", [frame(TEXT, b"\xff\xfe")]),
    Conversation("a frame that is not masked", [frame(TEXT, b"hello", masked=False)]),
    Conversation("reserved bits", [frame(TEXT, b"hello", bits=0x70)]),
    Conversation("an unknown opcode", [frame(5, b"hello")]),
    Conversation("a continuation of nothing", [frame(CONTINUATION, b"hello")]),
    Conversation("a fragmented ping", [frame(PING, b"", fin=False)]),
    Conversation("a close of one byte", [frame(CLOSE, b"\x03")]),
    Conversation("a close with code 1005", [close_frame(1005)]),
    Conversation("a close with code 999", [close_frame(999)]),
    Conversation("a message that is too big", [frame(BINARY, bytes(2**24 + 1))]),
]
HANDSHAKES = [
    Conversation(f"handshake: {one.name}", one.steps, one.handler, one.status, one.request)
    for one in (
        Conversation(
            "subprotocols of which one is taken",
            [BYE],
            does({**ACCEPT, "subprotocol": "chat.v2"}),
            request=handshake(b"Sec-WebSocket-Protocol: chat, chat.v2", b"Sec-WebSocket-Protocol:  third "),
        ),
        Conversation(
            "subprotocols of which none is taken",
            [BYE],
            does(ACCEPT),
            request=handshake(b"Sec-WebSocket-Protocol: chat"),
        ),
        Conversation(
            "headers of the app",
            [BYE],
            does(
                {
                    **ACCEPT,
                    "headers": [(b"X-A", b"1"), (b"set-cookie", b"a=b"), (b"set-cookie", b"c=\xe9"), (b"x-a", b"2")],
                }
            ),
        ),
        Conversation(
            "a date of the app", [BYE], does({**ACCEPT, "headers": [(b"date", b"then"), (b"server", b"mine")]})
        ),
        Conversation(
            "compression",
            [frame(TEXT, b"hello" * 100), 1, BYE],
            request=handshake(b"Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits"),
        ),
        Conversation(
            "extensions that nobody knows",
            [frame(TEXT, b"hello"), 1, BYE],
            request=handshake(b"Sec-WebSocket-Extensions: x-foo; a=1, x-bar"),
        ),
        Conversation(
            "odd fields and target",
            [BYE],
            request=handshake(b"X-A: 1", b"x-a: \xe9", b"Origin: null", b"X-Empty:", target=b"/a%2Fb//..;c?d=%FF&e"),
        ),
        Conversation("proxies", [BYE], request=handshake(b"X-Forwarded-For: 203.0.113.7", b"X-Forwarded-Proto: https")),
        Conversation("refused", (), does(closes()), 403),
        Conversation("refused with a code and a reason", (), does(closes(4003, reason="no")), 403),
        Conversation("refused with a status", (), refuses(401, b"who are you?"), 401),
        Conversation(
            "refused with headers and a body in pieces",
            (),
            refuses(
                429,
                b"wait",
                b" a ",
                b"while",
                headers=(
                    (b"content-type", b"text/x"),
                    (b"content-length", b"12"),
                    (b"retry-after", b"9"),
                    (b"set-cookie", b"a=b"),
                    (b"set-cookie", b"c=d"),
                ),
            ),
            429,
        ),
        Conversation("refused with bytes that are no text", (), refuses(400, bytes(range(256))), 400),
        Conversation("refused with a redirect", (), refuses(302, b"", headers=((b"location", b"/x"),)), 302),
        Conversation("the app raises", (), raises, 500),
        Conversation("the app returns", (), returns, 500),
        Conversation(
            "of another version", (), status=(400, 426), request=handshake().replace(b"Version: 13", b"Version: 9")
        ),
        Conversation(
            "without a key", (), status=(400, 426), request=handshake().replace(b"Sec-WebSocket-Key", b"X-Key")
        ),
        Conversation("by POST", (), status=(400, 405), request=handshake().replace(b"GET ", b"POST ")),
    )
]
ENDS = [
    *(
        Conversation(f"caller closes with {code}{reason and ' and a reason'}", [close_frame(code, reason)])
        for code in CLOSE_CODES
        for reason in ("", "why é")
    ),
    Conversation("caller closes without a code", [close_frame()]),
    Conversation("caller closes with the longest reason", [close_frame(4000, "r" * 123)]),
    Conversation("caller closes after messages", [frame(TEXT, b"a") + frame(TEXT, b"b"), 2, close_frame(4001, "done")]),
    *(
        Conversation(
            f"app closes with {code}{reason and ' and a reason'}",
            [1, close_frame(code)],
            does(ACCEPT, closes(code, reason=reason)),
        )
        for code in CLOSE_CODES
        for reason in ("", "why é")
    ),
    Conversation("app closes without a code", [1, BYE], does(ACCEPT, closes())),
    Conversation("app closes with no reason", [1, BYE], does(ACCEPT, closes(1000, reason=None))),
    Conversation("app closes after messages", [3, BYE], does(ACCEPT, text("a"), binary(b"b"), closes(4002))),
    Conversation("app sends after its close", [1, BYE], sends_after_its_close),
    Conversation("app sends after the caller's close", [close_frame(4000)], goes_on_sending_to_a_caller_who_has_closed),
    Conversation("app raises", (), raises_after_the_handshake),
    Conversation("app returns", (), returns_after_the_handshake),
]


@pytest.mark.parametrize("conversation", MESSAGES + BROKEN + HANDSHAKES + ENDS, ids=str)
def test_forwarded_websocket_is_the_same_websocket(pair: Pair, conversation: Conversation) -> None:
    direct, forwarded = (talk(pair, worker, conversation) for worker in pair.ways)
    assert direct.reply.status in conversation.statuses, "the case is not what its name says"
    assert {facts["app"] for facts in direct.seen} <= {"app 1"}
    assert forwarded == direct
    pair.nothing_is_left()


# uvicorn's older implementation, which it calls deprecated, often tells a handler long after the connection has ended
# that it has, on a direct connection too: only what travels can be compared.
OLDER = [Configuration(forwarder=forwarder, server={"ws": "websockets"}) for forwarder in FORWARDERS]


@pytest.fixture(scope="module", params=OLDER, ids=str)
def older_pair(request: pytest.FixtureRequest, certificate: tuple[str, str]) -> Iterator[Pair]:
    with running_pair(request.param, certificate) as pair:
        yield pair


@pytest.mark.parametrize("conversation", MESSAGES, ids=str)
def test_older_implementation_carries_the_same_frames(older_pair: Pair, conversation: Conversation) -> None:
    direct, forwarded = (talk(older_pair, worker, conversation, ends=False) for worker in older_pair.ways)
    assert direct.reply.status == 101
    assert (forwarded.reply, forwarded.frames) == (direct.reply, direct.frames)


LEAVE = [Connection.leave, Connection.reset, Connection.end_sending]


@pytest.mark.parametrize("leave", LEAVE, ids=lambda way: way.__name__)
@pytest.mark.parametrize("way", ["direct", "forwarded"])
def test_handler_sees_a_caller_that_vanishes(pair: Pair, way: str, leave: Callable[[Connection], None]) -> None:
    with _opened(pair, way, echo) as (connection, seen):
        connection.send(frame(TEXT, b"hello"))
        assert read_frame(connection) == Frame(0x80, TEXT, b"hello")
        leave(connection)
        eventually(lambda: seen.ended == "returned", "the handler's end")
        pair.nothing_is_left()
    assert seen.events[-1]["type"] == "websocket.disconnect"


@pytest.mark.parametrize("way", ["direct", "forwarded"])
def test_handler_that_waits_before_the_handshake_sees_a_caller_that_vanishes(plain_pair: Pair, way: str) -> None:
    seen = plain_pair.begin(does())
    with plain_pair.connect(_worker(plain_pair, way)) as connection:
        connection.send(handshake())
        eventually(lambda: seen, "the handler's call")
        connection.leave()
    eventually(lambda: seen[0].ended == "returned", "the handler's end")
    assert seen[0].events[-1]["code"] == 1006
    plain_pair.nothing_is_left()


@pytest.mark.parametrize("way", ["direct", "forwarded"])
def test_handler_that_only_sends_is_told_that_its_caller_has_vanished(plain_pair: Pair, way: str) -> None:
    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(ACCEPT)
        while True:
            await send(text("a message of some length" * 100))
            await asyncio.sleep(0)

    with _opened(plain_pair, way, handler) as (connection, seen):
        assert read_frame(connection) is not None
        connection.leave()
    eventually(lambda: seen.ended == "ClientDisconnected", "the handler's end")
    plain_pair.nothing_is_left()


def test_vanished_caller_is_reported_alike(pair: Pair) -> None:
    events = []
    for way in ("direct", "forwarded"):
        with _opened(pair, way, echo) as (connection, seen):
            connection.leave()
        handlers_end([seen])
        events.append(seen.events)
    assert events[1] == events[0]


@contextlib.contextmanager
def _opened(pair: Pair, way: str, handler: ASGIApp, **options: int) -> Iterator[tuple[Connection, Seen]]:
    seen = pair.begin(handler)
    with pair.connect(_worker(pair, way), **options) as connection:
        connection.send(handshake())
        assert connection.head().status == 101
        yield connection, seen[0]


def _worker(pair: Pair, way: str) -> Worker:
    return pair.owner if way == "direct" else pair.other


# Many, and slow


def test_500_websockets_at_once_keep_a_steady_flow(plain_pair: Pair) -> None:
    seen = plain_pair.begin(echo)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(plain_pair.connect(plain_pair.other)) for _ in range(500)]
        for connection in connections:
            connection.send(handshake())
        assert [connection.head().status for connection in connections] == [101] * 500
        for round_ in range(5):
            for number, connection in enumerate(connections):
                connection.send(frame(TEXT, b"%d %d" % (round_, number)))
            for number, connection in enumerate(connections):
                assert read_frame(connection) == Frame(0x80, TEXT, b"%d %d" % (round_, number))
        assert not any(one.ended for one in seen)
    eventually(lambda: all(one.ended == "returned" for one in seen), "the handlers' ends")
    assert {one.app for one in seen} == {"app 1"}
    plain_pair.nothing_is_left()


@pytest.mark.parametrize("way", ["direct", "forwarded"])
def test_slow_reader_slows_only_its_own_sender(plain_pair: Pair, way: str) -> None:
    sent: list[int] = []
    content = bytes(2**16)

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["raw_path"] != b"/slow":
            await echo(scope, receive, send)
            return
        await receive()
        await send(ACCEPT)
        for number in range(1024):
            await send(binary(content))
            sent.append(number)
        await send({"type": "websocket.close"})

    def is_held_up() -> bool:
        before = len(sent)
        # A round of another caller's messages, in which the slow one's sender could have gone on.
        for number in range(20):
            quick.send(frame(TEXT, b"%d" % number))
            assert read_frame(quick) == Frame(0x80, TEXT, b"%d" % number)
        return len(sent) == before > 0

    plain_pair.begin(handler)
    worker = _worker(plain_pair, way)
    with plain_pair.connect(worker, receive_buffer=2**16) as slow, plain_pair.connect(worker) as quick:
        quick.send(handshake())
        assert quick.head().status == 101
        slow.send(handshake(target=b"/slow"))
        assert slow.head().status == 101
        eventually(is_held_up, "a sender that is held up")
        assert len(sent) * 2**16 < 24 * 2**20
        for _ in range(1024):
            assert read_frame(slow) == Frame(0x80, BINARY, content)
        assert read_frame(slow) == Frame(0x80, CLOSE, struct.pack("!H", 1000))
    plain_pair.nothing_is_left()


@pytest.mark.parametrize("way", ["direct", "forwarded"])
def test_handler_that_does_not_read_slows_its_caller(plain_pair: Pair, way: str) -> None:
    gate = Gate(plain_pair)

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(ACCEPT)
        await gate.wait()
        for _ in range(1024):
            await receive()
        await send({"type": "websocket.close"})

    taken: list[int] = []

    def upload() -> None:
        for number in range(1024):
            connection.send(frame(BINARY, bytes(2**16)))
            taken.append(number)

    with _opened(plain_pair, way, handler) as (connection, seen):
        uploader = threading.Thread(target=upload)
        uploader.start()
        try:
            eventually(lambda: _is_paused(plain_pair, way), "a caller that is held up")
            assert len(taken) * 2**16 < 24 * 2**20
        finally:
            gate.open()
            uploader.join()
        assert read_frame(connection) == Frame(0x80, CLOSE, struct.pack("!H", 1000))
        assert sum(len(event.get("bytes", b"")) for event in seen.events) == 2**26
    plain_pair.nothing_is_left()


def _is_paused(pair: Pair, way: str) -> bool:
    """Tell whether the worker that the caller talks to reads no more from it."""

    async def look() -> bool:
        (connection,) = _worker(pair, way).server.server_state.connections
        return bool(getattr(connection, "read_paused", False))

    return pair.call(look())


# The owner's end


@pytest.mark.parametrize("configuration", DEFAULT, ids=str)
def test_websocket_whose_owner_stops_is_closed_with_1012(
    configuration: Configuration, certificate: tuple[str, str]
) -> None:
    ends = []
    for way in ("direct", "forwarded"):
        with running_pair(configuration, certificate) as pair, _opened(pair, way, echo) as (connection, seen):
            stopped = asyncio.run_coroutine_threadsafe(pair.owner.stop(), pair.loop)
            frames = [read_frame(connection)]
            connection.send_as_taken(close_frame(1012))
            frames.append(read_frame(connection))
            connection.leave()
            handlers_end([seen])
            ends.append((frames, seen.ended, seen.events[-1]))
            stopped.result(PATIENCE)
    assert ends[0][0] == [Frame(0x80, CLOSE, struct.pack("!H", 1012)), None]
    assert ends[1] == ends[0]


@pytest.mark.parametrize("configuration", DEFAULT, ids=str)
def test_handshake_for_a_session_whose_owner_is_gone_is_refused_with_410(
    configuration: Configuration, certificate: tuple[str, str]
) -> None:
    with running_pair(configuration, certificate) as pair:
        pair.call(pair.owner.stop())
        seen = pair.begin(echo)
        with pair.connect(pair.other) as connection:
            connection.send(handshake())
            reply = connection.reply()
        assert (reply.status, reply.values(b"content-type")) == (410, [b"application/problem+json"])
        assert json.loads(reply.body)["type"] == "urn:gym-gunicorn:session-gone"
        assert seen == []


@pytest.mark.parametrize("way", ["direct", "forwarded"])
def test_websocket_whose_owner_is_killed_ends_without_a_close(way: str) -> None:
    with (
        socket_directory() as directory,
        worker_process(directory, "httptools") as owner,
        worker_process(directory, "httptools") as other,
    ):
        cookie = session_at(owner)
        worker = owner if way == "direct" else other
        with websockets.sync.client.connect(
            f"ws://{worker.address[0]}:{worker.address[1]}/", additional_headers={"Cookie": f"session={cookie}"}
        ) as socket:
            socket.send("hello")
            assert socket.recv(PATIENCE) == "hello"
            owner.process.kill()
            with pytest.raises(websockets.ConnectionClosedError) as closed:
                socket.recv(PATIENCE)
            assert closed.value.rcvd is None
        if way == "forwarded":
            with pytest.raises(websockets.InvalidStatus) as refused:
                websockets.sync.client.connect(
                    f"ws://{other.address[0]}:{other.address[1]}/", additional_headers={"Cookie": f"session={cookie}"}
                )
            assert refused.value.response.status_code == 410
