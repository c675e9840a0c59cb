from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import socket
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from starlette.types import Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import Server

from gym_gunicorn.forwarding.wire import (
    VERSION,
    FrameReader,
    WireError,
    decode_head,
    decode_reply,
    encode_frame,
    encode_head,
    encode_reply,
    from_field,
    to_field,
)
from tests.workers import socket_directory

ALL_BYTES = bytes(range(256))

HTTP: Scope = {
    "type": "http",
    "asgi": {"version": "3.0", "spec_version": "2.3"},
    "http_version": "1.1",
    "method": "GET",
    "scheme": "http",
    "path": "/",
    "root_path": "",
    "raw_path": b"/",
    "query_string": b"",
    "client": ("127.0.0.1", 50000),
    "server": ("127.0.0.1", 8000),
    "headers": [(b"host", b"localhost")],
}
WEBSOCKET: Scope = {
    **{key: value for key, value in HTTP.items() if key != "method"},
    "type": "websocket",
    "scheme": "ws",
    "subprotocols": ["chat", "superchat"],
    "extensions": {"websocket.http.response": {}},
}

# A scope's entries that differ from the plain ones above.
SCOPES: dict[str, Scope] = {
    "plain": HTTP,
    "websocket": WEBSOCKET,
    "websocket without subprotocols": {**WEBSOCKET, "subprotocols": [], "extensions": {}},
    "websocket with odd subprotocols": {**WEBSOCKET, "subprotocols": ["", "\xff", "a b", "a"]},
    "extensions with options": {**WEBSOCKET, "extensions": {"tls": {"server_cert": None, "cipher_suite": 4865}}},
    "odd method": {**HTTP, "method": "M-SEARCH"},
    "HTTP/1.0 and TLS": {**HTTP, "http_version": "1.0", "scheme": "https"},
    "every byte in a header": {**HTTP, "headers": [(b"x-bytes", ALL_BYTES), (ALL_BYTES, b"")]},
    "headers in their order, repeated": {**HTTP, "headers": [(b"a", b"1"), (b"b", b"2"), (b"a", b"3"), (b"a", b"3")]},
    "upper-case header": {**HTTP, "headers": [(b"Host", b"a"), (b"host", b"b")]},
    "no headers": {**HTTP, "headers": []},
    "a large header": {**HTTP, "headers": [(b"x", b"\xff" * 200_000)]},
    "thousands of headers": {**HTTP, "headers": [(b"x-%d" % number, b"y") for number in range(70_000)]},
    "a header that poses as ours": {
        **HTTP,
        "headers": [(b"gym-gunicorn-link-head", b"\x97\x01\x80"), (b"gym-gunicorn-head", b"lwGA"), (b"", b"")],
    },
    "every byte in the target": {**HTTP, "raw_path": b"/" + ALL_BYTES, "query_string": ALL_BYTES},
    "a decoded DEL": {**HTTP, "path": "/\x7f", "raw_path": b"/%7F"},
    "a DEL after backslashes": {**HTTP, "path": "/\\\x7f\\\\\x7f", "raw_path": b"/%5C%7F", "query_string": b"\\\x7f"},
    "an escaped DEL that is none": {**HTTP, "path": "/\\u007f\\x7f", "query_string": b"\\u007f"},
    "control characters": {**HTTP, "path": "/\0\r\n\t\x1b\x85\u2028", "raw_path": b"/%00%0D%0A"},
    "outside the BMP": {**HTTP, "path": "/\N{GRINNING FACE}\N{CUNEIFORM SIGN A}", "raw_path": b"/%F0%9F%98%80"},
    "a root path": {**HTTP, "root_path": "/\N{LATIN SMALL LETTER E WITH ACUTE}", "path": "/\u00e9/x"},
    "no client and no server": {**HTTP, "client": None, "server": None},
    "a Unix socket": {**HTTP, "client": None, "server": ("/run/\N{SNOWMAN}.sock", None)},
    "IPv6": {**HTTP, "client": ("::1", 0), "server": ("fe80::1%eth0", 65535)},
    "the target *": {**HTTP, "method": "OPTIONS", "path": "*", "raw_path": b"*"},
}


@pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES.keys())
def test_a_scope_arrives_as_it_was(scope: Scope) -> None:
    arrived = decode_head(encode_head(scope))
    assert arrived == scope
    assert type(arrived["client"]) is type(scope["client"])
    assert type(arrived["server"]) is type(scope["server"])
    assert type(arrived["headers"]) is list
    assert all(type(field) is tuple for field in arrived["headers"])
    assert {type(part) for field in arrived["headers"] for part in field} <= {bytes}


@pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES.keys())
def test_a_head_in_a_field_is_printable_ascii_and_arrives_as_it_was(scope: Scope) -> None:
    head = encode_head(scope)
    field = to_field(head)
    assert all(0x20 < byte < 0x7F for byte in field.encode("ascii"))
    assert from_field(field) == from_field(field.encode("ascii")) == head


def test_random_scopes_arrive_as_they_were() -> None:
    source = random.Random(1)

    def character() -> str:
        code = source.choice([source.randrange(0x110000 - 0x800), source.randrange(256), 0x7F, 0x5C])
        return chr(code if code < 0xD800 else code + 0x800)

    def text() -> str:
        return "".join(character() for _ in range(6))

    for _ in range(2000):
        scope = {
            **HTTP,
            "method": text(),
            "path": text(),
            "root_path": text(),
            "raw_path": source.randbytes(9),
            "query_string": source.randbytes(9),
            "client": (text(), source.randrange(65536)),
            "headers": [(source.randbytes(5), source.randbytes(9)) for _ in range(source.randrange(4))],
        }
        assert decode_head(encode_head(scope)) == scope


def test_an_absent_client_and_server_arrive_as_none() -> None:
    scope = {key: value for key, value in HTTP.items() if key not in ("client", "server")}
    assert decode_head(encode_head(scope)) == {**scope, "client": None, "server": None}


def test_what_the_receiving_worker_added_to_the_scope_stays_there() -> None:
    scope = {**HTTP, "state": {"pool": object()}, "app": object(), "session": {"n": 1}, "gym_gunicorn.owner": "f" * 12}
    assert decode_head(encode_head(scope)) == HTTP


def test_headers_in_any_sequence_of_pairs_are_taken() -> None:
    scope = {**HTTP, "headers": ((b"a", bytearray(b"1")), [memoryview(b"b"), b"2"])}
    assert decode_head(encode_head(scope))["headers"] == [(b"a", b"1"), (b"b", b"2")]


@pytest.mark.parametrize(
    "entries",
    [
        {"path": "/\ud83d"},
        {"path": "/\udcff"},
        {"root_path": "/\ud800"},
        {"method": "\udfff"},
        {"scheme": "\ud800"},
        {"client": ("\ud800", 1)},
        {"server": ("\udcff", None)},
        {"subprotocols": ["chat", "\udcff"]},
        {"extensions": {"\udcff": {}}},
    ],
    ids=repr,
)
def test_a_scope_with_half_a_surrogate_pair_is_a_wire_error(entries: Scope) -> None:
    with pytest.raises(WireError):
        encode_head({**WEBSOCKET, **entries})


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param({"extensions": {"x": object()}}, id="an object"),
        pytest.param({"headers": [(b"a", object())]}, id="an object as a header"),
        pytest.param({"client": ("::1", 2**64)}, id="an integer out of range"),
        pytest.param({"client": ("::1", -(2**63) - 1)}, id="a negative integer out of range"),
        pytest.param({"extensions": {"x": nested(100_000)}}, id="nested deeply"),
        pytest.param({"raw_path": memoryview(b"/abc")[::2]}, id="bytes with gaps"),
    ],
)
def test_a_scope_that_can_be_no_head_is_a_wire_error(entries: Scope) -> None:
    with pytest.raises(WireError):
        encode_head({**HTTP, **entries})


# Scopes of uvicorn's own

REQUESTS = {
    "plain": b"GET / HTTP/1.1\r\nHost: x\r\n",
    "HTTP/1.0": b"GET / HTTP/1.0\r\n",
    "a target with everything": b"GET /%00%7F%ED%A0%BD%FF%F0%9F%98%80%2F;a//..?%FF&a=%ED%A0%BD?# HTTP/1.1\r\n"
    + b"Host: x\r\n",
    "the target *": b"OPTIONS * HTTP/1.1\r\nHost: x\r\n",
    "a whole URL": b"GET http://y:1/a%20b?c HTTP/1.1\r\nHost: x\r\n",
    "bytes in a header": b"GET / HTTP/1.1\r\nHost: x\r\nX-B: a\t"
    + bytes(range(0x80, 0x100))
    + b"\r\nx-b:\r\nX-B: 2\r\n",
    "a proxy's fields": b"GET / HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: \xff, 1.2.3.4\r\nX-Forwarded-Proto: https\r\n",
}
HANDSHAKE = (
    b"GET /%ED%A0%BD%FF?%FF HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nX-B: \xff\x80\r\n"
)
HANDSHAKES = {
    "websocket": HANDSHAKE,
    "websocket with subprotocols": HANDSHAKE + b"Sec-WebSocket-Protocol: chat, superchat\r\n",
    "websocket with extensions": HANDSHAKE
    + b"Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits\r\n",
}


@contextlib.contextmanager
def listening(unix: bool) -> Iterator[socket.socket]:
    """Listen on a port, or on a socket whose name is no ASCII."""
    with socket_directory() as directory, socket.socket(socket.AF_UNIX if unix else socket.AF_INET) as listener:
        listener.bind(os.path.join(directory, "\N{SNOWMAN}.sock") if unix else ("127.0.0.1", 0))
        listener.listen()
        yield listener


def scope_of(request: bytes, unix: bool = False, **config: Any) -> Scope:
    """Return the scope that uvicorn makes of a request."""
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(dict(scope))
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close"})
        else:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body"})

    async def scenario(listener: socket.socket) -> None:
        server = Server(Config(app, lifespan="off", log_config=None, **config))
        serving = asyncio.create_task(server.serve([listener]))
        try:
            async with asyncio.timeout(60):
                address = listener.getsockname()
                if unix:
                    reader, writer = await asyncio.open_unix_connection(address)
                else:
                    reader, writer = await asyncio.open_connection(*address)
                writer.write(request + b"\r\n")
                assert await reader.readline()
                writer.close()
        finally:
            server.should_exit = True
            await serving

    with listening(unix) as listener:
        asyncio.run(scenario(listener))
    (scope,) = seen
    return scope


def assert_arrives(scope: Scope) -> None:
    assert decode_head(encode_head(scope)) == {key: value for key, value in scope.items() if key != "state"}


@pytest.mark.parametrize("unix", [False, True], ids=["port", "unix"])
@pytest.mark.parametrize("http", ["httptools", "h11"])
@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS.keys())
def test_what_uvicorn_makes_of_a_request_arrives_as_it_was(request_: bytes, http: str, unix: bool) -> None:
    assert_arrives(scope_of(request_, unix, http=http, root_path="/root", forwarded_allow_ips="*"))


@pytest.mark.parametrize("unix", [False, True], ids=["port", "unix"])
@pytest.mark.parametrize("ws", ["websockets-sansio", "wsproto"])
@pytest.mark.parametrize("handshake", HANDSHAKES.values(), ids=HANDSHAKES.keys())
def test_what_uvicorn_makes_of_a_handshake_arrives_as_it_was(handshake: bytes, ws: str, unix: bool) -> None:
    scope = scope_of(handshake, unix, ws=ws, root_path="/root")
    assert scope["type"] == "websocket"
    assert_arrives(scope)


# Reply heads


@pytest.mark.parametrize(
    "message",
    [
        {"type": "http.response.start", "status": 200, "headers": []},
        {"type": "http.response.start", "status": 599, "headers": [(b"set-cookie", b"a=1"), (b"set-cookie", b"a=1")]},
        {"type": "http.response.start", "status": 204, "headers": [(b"X-Bytes", ALL_BYTES), (ALL_BYTES, b"")]},
        {"type": "http.response.start", "status": 200, "headers": [(b"x", b"\x7f" * 100_000)]},
    ],
)
def test_a_replys_head_arrives_as_it_was(message: Message) -> None:
    encoded = encode_reply(message, 7)
    assert decode_reply(encoded) == (message, 7)
    field = to_field(encoded)
    assert all(0x20 < byte < 0x7F for byte in field.encode("ascii"))
    assert from_field(field) == encoded


def test_a_reply_without_headers_arrives_without_headers() -> None:
    message = {"type": "http.response.start", "status": 200}
    assert decode_reply(encode_reply(message, 7)) == ({**message, "headers": []}, 7)


def test_headers_of_a_reply_in_any_sequence_of_pairs_are_taken() -> None:
    message = {"status": 200, "headers": iter([(bytearray(b"a"), b"1"), [memoryview(b"b"), [50]]])}
    assert decode_reply(encode_reply(message, 7))[0]["headers"] == [(b"a", b"1"), (b"b", b"2")]


def test_headers_of_a_reply_that_are_text_are_the_apps_error() -> None:
    with pytest.raises(TypeError):
        encode_reply({"status": 200, "headers": [("a", "b")]}, 7)


# What can't be read

pack: Callable[[object], bytes] = msgspec.msgpack.encode

GOOD_HEAD: list[Any] = msgspec.msgpack.decode(encode_head(HTTP))
GOOD_REPLY: list[Any] = msgspec.msgpack.decode(encode_reply({"status": 200, "headers": [(b"a", b"b")]}, 7))


def head_with(place: int, packed: bytes) -> bytes:
    """Return a head in whose place ``place`` are these bytes."""
    return b"\x97" + b"".join(packed if at == place else pack(value) for at, value in enumerate(GOOD_HEAD))


def reply_with(place: int, packed: bytes) -> bytes:
    """Return a reply's head in whose place ``place`` are these bytes."""
    return b"\x94" + b"".join(packed if at == place else pack(value) for at, value in enumerate(GOOD_REPLY))


def test_what_the_tests_change_is_readable_as_it_is() -> None:
    assert decode_head(head_with(-1, b"")) == HTTP
    assert decode_reply(reply_with(-1, b""))[1] == 7


@pytest.mark.parametrize("version", [0, 2, -1, 2**64 - 1, None, True, 1.0, "1", b"1", [1], {}], ids=repr)
@pytest.mark.parametrize(
    "others",
    [lambda good: good, lambda good: [], lambda good: [*good, 0], lambda good: [None] * len(good)],
    ids=["the same", "fewer", "more", "of other kinds"],
)
def test_another_version_is_a_wire_error_that_names_both(
    version: object, others: Callable[[list[Any]], list[Any]]
) -> None:
    with pytest.raises(WireError) as caught_head:
        decode_head(pack([version, *others(GOOD_HEAD[1:])]))
    with pytest.raises(WireError) as caught_reply:
        decode_reply(pack([version, *others(GOOD_REPLY[1:])]))
    for caught in (caught_head, caught_reply):
        assert f"version {version!r}" in str(caught.value)
        assert re.search(rf"\b{VERSION}\b", str(caught.value).replace(f"version {version!r}", ""))


def test_a_head_of_this_version_that_is_wrong_is_not_taken_for_one_of_another() -> None:
    with pytest.raises(WireError) as caught_head:
        decode_head(pack([VERSION]))
    with pytest.raises(WireError) as caught_reply:
        decode_reply(pack([VERSION]))
    for caught in (caught_head, caught_reply):
        assert "version" not in str(caught.value)


# Each claims what does not come, or is what MessagePack does not have.
NO_MESSAGEPACK = {
    "nothing": b"",
    "half": b"\x97\x01",
    "no such byte": b"\xc1",
    "nested lists": b"\x91" * 100_000,
    "nested dicts": b"\x81\xa1x" * 100_000,
    "nested keys": b"\x81" * 100_000,
    "2**32 - 1 items": b"\xdd\xff\xff\xff\xff",
    "2**28 items, some of them": b"\xdd\x10\x00\x00\x00" + b"\x90" * 1000,
    "2**28 items in each other": b"\xdd\x10\x00\x00\x00" * 500,
    "2**32 - 1 entries": b"\xdf\xff\xff\xff\xff",
    "2**28 entries in each other": b"\xdf\x10\x00\x00\x00\xa1x" * 500,
    "a key of 2**32 - 1 items": b"\x81\xdd\xff\xff\xff\xff",
    "text of 2**32 - 1 bytes": b"\xdb\xff\xff\xff\xff",
    "2**32 - 1 bytes": b"\xc6\xff\xff\xff\xff",
    "an extension of 2**32 - 1 bytes": b"\xc9\xff\xff\xff\xff\x05",
    "a key that is a dict": b"\x81\x80\xc0",
    "a key that is a list with a dict": b"\x81\x91\x80\xc0",
    "a key that is an extension": b"\x81\xd4\x05x\xc0",
    "a time that is none": b"\xc7\x0c\xff" + b"\xff" * 12,
    "a time outside the calendar": b"\xc7\x0c\xff\0\0\0\0" + b"\x7f" * 8,
    "a time of no length": b"\xd4\xff\x01",
    "text that is no UTF-8": b"\xa1\xff",
    "text with half a surrogate pair": b"\xa3\xed\xa0\x80",
}
NO_SUCH_SHAPE: list[object] = [None, 1, "1234567", b"1234567", [], {}, [1], [1] * 8, [[]] * 7, {"1": 1}, 0.5, True]
OTHER_FORMATS = [
    b"x",
    b"\xff\xfe",
    b"\x00",
    b"[" * 100_000,
    b'[1,{"type":"http"},"/","",null,null,[]]',
    b"[1,200,[],7]",
]
UNREADABLE = [
    *(pytest.param(value, id=name) for name, value in NO_MESSAGEPACK.items()),
    *(pytest.param(pack(value), id=repr(value)) for value in NO_SUCH_SHAPE),
    *(pytest.param(value, id=repr(value[:20])) for value in OTHER_FORMATS),
    pytest.param(encode_head(HTTP) + b"\xc0", id="a head and more"),
    pytest.param(encode_reply({"status": 200}, 7) + b"\xc0", id="a reply and more"),
]


@pytest.mark.parametrize("value", UNREADABLE)
def test_an_unreadable_head_is_a_wire_error(value: bytes) -> None:
    with pytest.raises(WireError):
        decode_head(value)


@pytest.mark.parametrize("value", UNREADABLE)
def test_an_unreadable_reply_is_a_wire_error(value: bytes) -> None:
    with pytest.raises(WireError):
        decode_reply(value)


@pytest.mark.parametrize("packed", NO_MESSAGEPACK.values(), ids=NO_MESSAGEPACK.keys())
def test_what_is_unreadable_is_a_wire_error_in_each_place(packed: bytes) -> None:
    for place in range(len(GOOD_HEAD)):
        with pytest.raises(WireError):
            decode_head(head_with(place, packed))
    with pytest.raises(WireError):
        decode_head(head_with(1, b"\x82\xa4type\xa4http\xaaextensions" + packed))
    with pytest.raises(WireError):
        decode_head(head_with(1, b"\x81\xa4type" + packed))
    for place in range(len(GOOD_REPLY)):
        with pytest.raises(WireError):
            decode_reply(reply_with(place, packed))


def peak(decode: Callable[[bytes], object], value: bytes) -> int:
    """Return how many bytes of memory ``decode`` takes at once for ``value``."""
    tracemalloc.start()
    try:
        with contextlib.suppress(WireError):
            decode(value)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_that_is_taken_is_seen() -> None:
    assert peak(decode_head, encode_head({**HTTP, "headers": [(b"x", bytes(2**22))]})) > 2**22


@pytest.mark.parametrize("packed", NO_MESSAGEPACK.values(), ids=NO_MESSAGEPACK.keys())
def test_no_memory_is_taken_for_what_does_not_come(packed: bytes) -> None:
    # An empty list of one byte is an object of some 60, and a list has room for a few items at first.
    room = 100_000 + 500 * len(packed)
    for place in range(len(GOOD_HEAD)):
        assert peak(decode_head, head_with(place, packed)) < room
    assert peak(decode_head, head_with(1, b"\x82\xa4type\xa4http\xaaextensions" + packed)) < room
    assert peak(decode_head, head_with(6, b"\x91" + packed)) < room
    assert peak(decode_head, head_with(6, b"\x91\x92" + packed)) < room
    for place in range(len(GOOD_REPLY)):
        assert peak(decode_reply, reply_with(place, packed)) < room
    assert peak(decode_head, packed) < room
    assert peak(decode_reply, packed) < room


@pytest.mark.parametrize("depth", [1, 100, *range(900, 1100)])
def test_depth_that_can_just_be_read_is_a_value_or_a_wire_error(depth: int) -> None:
    deep = b"\x91" * depth + b"\xc0"
    scopes = []
    with contextlib.suppress(WireError):
        scopes.append(decode_head(head_with(1, b"\x82\xa4type\xa4http\xaaextensions" + deep)))
    for scope in scopes:
        with contextlib.suppress(WireError):
            encode_head(scope)
    for value in (head_with(1, b"\x81\xa4type" + deep), head_with(0, deep), b"\x91" + deep, deep):
        with pytest.raises(WireError):
            decode_head(value)
    for value in (reply_with(0, deep), b"\x91" + deep, deep):
        with pytest.raises(WireError):
            decode_reply(value)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (1, None),
        (1, [1]),
        (1, "x"),
        (1, {}),
        (1, {"type": "lifespan"}),
        (1, {"type": None}),
        (1, {"type": ["http"]}),
        (1, {"type": {"http": 1}}),
        (1, {"type": b"http"}),
        (1, {"type": "http", 1: 2}),
        (1, {"type": "http", b"path": "/"}),
        (1, [["type", "http"]]),
        (2, None),
        (2, 1),
        (2, "/"),
        (2, "aaaa"),
        (2, [47]),
        (3, None),
        (3, []),
        (3, ""),
        (4, 1),
        (4, []),
        (4, "::1"),
        (4, ["::1"]),
        (4, ["::1", 1, 0, 0]),
        (4, ["::1", "1"]),
        (4, ["::1", 1.0]),
        (4, ["::1", True]),
        (4, [b"::1", 1]),
        (4, [None, 1]),
        (5, True),
        (5, {}),
        (5, [b"/run/x.sock", None]),
        (6, None),
        (6, 1),
        (6, "ab"),
        (6, {b"a": b"b"}),
        (6, [None]),
        (6, [[b"a"]]),
        (6, [[b"a", b"b", b"c"]]),
        (6, [[b"a", 1]]),
        (6, [[b"a", None]]),
        (6, [["a", b"b"]]),
        (6, [[b"a", "b"]]),
        (6, [["aaaa", "bbbb"]]),
        (6, [[b"a", [98]]]),
        (6, [[[b"a"], b"b"]]),
        (6, [b"ab"]),
    ],
)
def test_a_head_with_an_entry_of_the_wrong_shape_is_a_wire_error(place: int, value: object) -> None:
    with pytest.raises(WireError):
        decode_head(head_with(place, pack(value)))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (2, None),
        (2, 1),
        (2, {}),
        (2, [[b"a"]]),
        (2, [[b"a", 1]]),
        (2, [[b"a", "b"]]),
        (2, [["a", b"b"]]),
        (2, [["aaaa", "bbbb"]]),
        (3, None),
        (3, "7"),
        (3, b"7"),
        (3, 7.5),
        (3, float("nan")),
        (3, True),
        (3, []),
    ],
)
def test_a_reply_with_an_entry_of_the_wrong_shape_is_a_wire_error(place: int, value: object) -> None:
    with pytest.raises(WireError):
        decode_reply(reply_with(place, pack(value)))


def test_a_status_is_what_the_app_gave_and_the_callers_server_judges_it() -> None:
    for status in (200, 103, 999, "OK", None):
        assert decode_reply(encode_reply({"status": status}, 7))[0]["status"] == status


def test_time_that_an_owner_took_is_never_negative() -> None:
    assert decode_reply(reply_with(3, pack(-1)))[1] == 0


def test_a_status_of_the_apps_own_kind_of_integer_is_its_value() -> None:
    class Status(int):
        pass

    assert decode_reply(encode_reply({"status": Status(201)}, 7))[0]["status"] == 201


@pytest.mark.parametrize(
    "value",
    [
        b"x",
        b"====",
        b"AA=",
        b"AA==AA==",
        b"AAAA\n",
        b"AAAA ",
        b"AA AA",
        b"AA\0A",
        b"A\xff==",
        b"-_-_",
        b'[1,{},"/","",null,null,[]]',
        "\u0661AAA",
        "\ud800AAA",
        "\xe9\xe9\xe9\xe9",
        "AAAA,AAAA",
        "AAAA, AAAA",
    ],
    ids=repr,
)
def test_a_field_that_is_no_base64_is_a_wire_error(value: bytes | str) -> None:
    with pytest.raises(WireError):
        from_field(value)


def test_an_empty_field_is_no_head() -> None:
    for decode in (decode_head, decode_reply):
        with pytest.raises(WireError):
            decode(from_field(b""))


def mutated(source: random.Random, value: bytes, pieces: list[bytes]) -> bytes:
    mutable = bytearray(value)
    for _ in range(source.randrange(1, 4)):
        place = source.randrange(len(mutable))
        piece = source.choice([b"", *pieces, source.randbytes(1)])
        mutable[place : place + source.randrange(3)] = piece
    return bytes(mutable)


PACKED = [
    *(value for value in NO_MESSAGEPACK.values() if len(value) < 20),
    b"\xc0",
    b"\x80",
    b"\x90",
    b"\xa0",
    b"\xc4\0",
]
WRITTEN = [b"[", b"]", b"{", b"}", b'"', b",", b"1", b"null", b"Infinity"]


def test_random_and_mutated_bytes_are_heads_or_wire_errors() -> None:
    source = random.Random(2)
    good, errors = encode_head(HTTP), 0
    for value in [
        *(source.randbytes(source.randrange(60)) for _ in range(3000)),
        *(mutated(source, good, PACKED) for _ in range(3000)),
    ]:
        try:
            decode_head(value)
        except WireError:
            errors += 1
    assert 3000 < errors < 6000


def test_random_and_mutated_bytes_are_replies_or_wire_errors() -> None:
    source = random.Random(3)
    good, errors = encode_reply({"status": 200, "headers": [(b"a", b"b")]}, 7), 0
    for value in [
        *(source.randbytes(source.randrange(60)) for _ in range(3000)),
        *(mutated(source, good, PACKED) for _ in range(3000)),
    ]:
        try:
            decode_reply(value)
        except WireError:
            errors += 1
    assert 3000 < errors < 6000


# Frames

EVENTS: list[Message] = [
    {"type": "websocket.receive", "text": ""},
    {"type": "websocket.receive", "text": "\x00\x7f\N{GRINNING FACE}"},
    {"type": "websocket.receive", "text": "a lone \ud83d"},
    {"type": "websocket.receive", "bytes": b""},
    {"type": "websocket.receive", "bytes": ALL_BYTES},
    {"type": "websocket.receive", "bytes": b"x" * 70_000},
    {"type": "websocket.accept", "subprotocol": None, "headers": [(b"x", ALL_BYTES), (b"x", b"")]},
    {"type": "websocket.accept", "subprotocol": "chat"},
    {"type": "websocket.disconnect", "code": 1005, "reason": None},
    {"type": "websocket.close", "code": 1000, "reason": "\N{SNOWMAN}"},
    {"type": "websocket.http.response.start", "status": 403, "headers": []},
    {"type": "websocket.http.response.body", "body": ALL_BYTES, "more_body": True},
    {"type": "websocket.http.response.body", "body": b""},
]
STREAM = b"".join(encode_frame(event) for event in EVENTS)


def test_frames_arrive_together() -> None:
    assert FrameReader("websocket.receive").feed(STREAM) == EVENTS


def test_frames_arrive_byte_by_byte() -> None:
    reader = FrameReader("websocket.receive")
    assert [event for byte in STREAM for event in reader.feed(bytes([byte]))] == EVENTS


def test_frames_arrive_however_they_are_cut() -> None:
    source = random.Random(4)
    for _ in range(300):
        reader, events, start = FrameReader("websocket.receive"), [], 0
        while start < len(STREAM):
            end = start + source.choice([0, 1, 4, 5, 6, 300, 40_000])
            events += reader.feed(STREAM[start:end])
            start = end
        assert events == EVENTS


def test_a_frame_arrives_with_its_last_byte() -> None:
    for event in EVENTS:
        frame = encode_frame(event)
        reader = FrameReader("websocket.receive")
        assert reader.feed(frame[:-1]) == []
        assert reader.feed(frame[-1:]) == [event]


def test_messages_are_of_the_direction_of_their_reader() -> None:
    frames = encode_frame({"type": "websocket.receive", "text": "x"}) + encode_frame({"type": "any", "bytes": b"y"})
    assert FrameReader("websocket.send").feed(frames) == [
        {"type": "websocket.send", "text": "x"},
        {"type": "websocket.send", "bytes": b"y"},
    ]


def test_an_event_that_has_both_keys_is_the_one_that_is_set() -> None:
    frames = encode_frame({"type": "websocket.receive", "text": "x", "bytes": None})
    frames += encode_frame({"type": "websocket.receive", "text": None, "bytes": b""})
    assert FrameReader("websocket.receive").feed(frames) == [
        {"type": "websocket.receive", "text": "x"},
        {"type": "websocket.receive", "bytes": b""},
    ]


def frame(kind: bytes, payload: bytes) -> bytes:
    return struct.pack("!I", len(payload)) + kind + payload


@pytest.mark.parametrize(
    "value",
    [
        frame(b"X", b""),
        frame(b"\x00", b"x"),
        frame(b"j", b"{}"),
        frame(b"T", b"\xff"),
        frame(b"T", b"\xf0\x9f"),
        frame(b"J", b""),
        frame(b"J", b"null"),
        frame(b"J", b"[]"),
        frame(b"J", b"{}"),
        frame(b"J", b'{"type":1}'),
        frame(b"J", b'{"type":"websocket.close"'),
        frame(b"J", b'{"type":"x","headers":null}'),
        frame(b"J", b'{"type":"x","headers":[["a"]]}'),
        frame(b"J", b'{"type":"x","headers":[["a",1]]}'),
        frame(b"J", b'{"type":"x","headers":[["a","\\u2603"]]}'),
        frame(b"J", b'{"type":"x","body":1}'),
        frame(b"J", b'{"type":"x","body":"\\u2603"}'),
        frame(b"J", b"[" * 100_000),
        frame(b"J", b"\xff"),
        b"\xff\xff\xff\xffB",
        b"\x40\x00\x00\x01B",
    ],
    ids=lambda value: repr(value[:40]),
)
def test_an_unreadable_frame_is_a_wire_error(value: bytes) -> None:
    with pytest.raises(WireError):
        FrameReader("websocket.receive").feed(value)


def test_a_frame_that_is_too_long_is_refused_before_it_comes() -> None:
    reader = FrameReader("websocket.receive")
    assert reader.feed(b"\xff\xff\xff\xff") == []
    with pytest.raises(WireError, match="too long"):
        reader.feed(b"B")


def test_random_and_mutated_bytes_are_frames_or_wire_errors() -> None:
    source = random.Random(5)
    good = b"".join(encode_frame(event) for event in EVENTS if len(encode_frame(event)) < 10_000)
    errors = 0
    for value in [
        *(source.randbytes(source.randrange(60)) for _ in range(3000)),
        *(mutated(source, good, WRITTEN) for _ in range(3000)),
    ]:
        try:
            FrameReader("websocket.receive").feed(value)
        except WireError:
            errors += 1
    assert errors > 1000
