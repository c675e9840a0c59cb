from __future__ import annotations

import json
import random
import struct
from typing import Any

import pytest
from starlette.types import Message, Scope

from gym_gunicorn.wire import (
    VERSION,
    FrameReader,
    WireError,
    decode_head,
    decode_reply,
    encode_frame,
    encode_head,
    encode_reply,
)

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
    "odd method": {**HTTP, "method": "M-SEARCH"},
    "HTTP/1.0 and TLS": {**HTTP, "http_version": "1.0", "scheme": "https"},
    "every byte in a header": {**HTTP, "headers": [(b"x-bytes", ALL_BYTES), (ALL_BYTES, b"")]},
    "headers in their order, repeated": {**HTTP, "headers": [(b"a", b"1"), (b"b", b"2"), (b"a", b"3"), (b"a", b"3")]},
    "upper-case header": {**HTTP, "headers": [(b"Host", b"a"), (b"host", b"b")]},
    "no headers": {**HTTP, "headers": []},
    "a large header": {**HTTP, "headers": [(b"x", b"\xff" * 200_000)]},
    "a header that poses as ours": {
        **HTTP,
        "headers": [(b"gym-gunicorn-head", b"[1,{},0]"), (b"gym-gunicorn-head", b"")],
    },
    "every byte in the target": {**HTTP, "raw_path": b"/" + ALL_BYTES, "query_string": ALL_BYTES},
    "a decoded DEL": {**HTTP, "path": "/\x7f", "raw_path": b"/%7F"},
    "a DEL after backslashes": {**HTTP, "path": "/\\\x7f\\\\\x7f", "raw_path": b"/%5C%7F", "query_string": b"\\\x7f"},
    "an escaped DEL that is none": {**HTTP, "path": "/\\u007f\\x7f", "query_string": b"\\u007f"},
    "control characters": {**HTTP, "path": "/\0\r\n\t\x1b\x85\u2028", "raw_path": b"/%00%0D%0A"},
    "outside the BMP": {**HTTP, "path": "/\N{GRINNING FACE}\N{CUNEIFORM SIGN A}", "raw_path": b"/%F0%9F%98%80"},
    "a lone surrogate": {**HTTP, "path": "/\ud83d", "raw_path": b"/%ED%A0%BD"},
    "a root path": {**HTTP, "root_path": "/\N{LATIN SMALL LETTER E WITH ACUTE}", "path": "/\u00e9/x"},
    "no client and no server": {**HTTP, "client": None, "server": None},
    "a Unix socket": {**HTTP, "client": None, "server": ("/run/\N{SNOWMAN}.sock", None)},
    "IPv6": {**HTTP, "client": ("::1", 0), "server": ("fe80::1%eth0", 65535)},
    "the target *": {**HTTP, "method": "OPTIONS", "path": "*", "raw_path": b"*"},
}


def head(value: object) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES.keys())
def test_a_scope_arrives_as_it_was(scope: Scope) -> None:
    arrived = decode_head(encode_head(scope).encode("ascii"))
    assert arrived == scope
    assert type(arrived["client"]) is type(scope["client"])
    assert type(arrived["server"]) is type(scope["server"])
    assert all(type(field) is tuple for field in arrived["headers"])


@pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES.keys())
def test_a_head_is_printable_ascii(scope: Scope) -> None:
    assert all(0x20 <= byte < 0x7F for byte in encode_head(scope).encode("ascii"))


def test_random_scopes_arrive_as_they_were() -> None:
    source = random.Random(1)

    def text() -> str:
        return "".join(
            chr(source.choice([source.randrange(0x110000), source.randrange(256), 0x7F, 0x5C])) for _ in range(6)
        )

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
        # Two halves of a surrogate pair that meet by chance are one character afterwards.
        if any(json.loads(json.dumps(scope[key])) != scope[key] for key in ("method", "path", "root_path")):
            continue
        encoded = encode_head(scope)
        assert encoded.isascii() and encoded.isprintable()
        assert {**decode_head(encoded.encode()), "client": scope["client"]} == scope


def test_an_absent_client_and_server_arrive_as_none() -> None:
    scope = {key: value for key, value in HTTP.items() if key not in ("client", "server")}
    assert decode_head(encode_head(scope).encode()) == {**scope, "client": None, "server": None}


def test_what_the_receiving_worker_added_to_the_scope_stays_there() -> None:
    scope = {**HTTP, "state": {"pool": object()}, "app": object(), "session": {"n": 1}, "gym_gunicorn.owner": "f" * 12}
    assert decode_head(encode_head(scope).encode()) == HTTP


def test_headers_in_any_sequence_of_pairs_are_taken() -> None:
    scope = {**HTTP, "headers": ((b"a", bytearray(b"1")), [memoryview(b"b"), b"2"])}
    assert decode_head(encode_head(scope).encode())["headers"] == [(b"a", b"1"), (b"b", b"2")]


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
    assert all(0x20 <= byte < 0x7F for byte in encoded)
    assert decode_reply(encoded.decode()) == (message, 7)


def test_a_reply_without_headers_arrives_without_headers() -> None:
    message = {"type": "http.response.start", "status": 200}
    assert decode_reply(encode_reply(message, 7).decode()) == ({**message, "headers": []}, 7)


# What can't be read

GOOD_HEAD: list[Any] = json.loads(encode_head(HTTP))
GOOD_REPLY: list[Any] = json.loads(encode_reply({"status": 200, "headers": [(b"a", b"b")]}, 7))


@pytest.mark.parametrize("version", [0, 2, -1, None, "1", [1], {}])
def test_another_version_is_a_wire_error_that_names_both(version: object) -> None:
    with pytest.raises(WireError) as caught_head:
        decode_head(head([version, *GOOD_HEAD[1:]]))
    with pytest.raises(WireError) as caught_reply:
        decode_reply(json.dumps([version, *GOOD_REPLY[1:]]))
    for caught in (caught_head, caught_reply):
        assert repr(version) in str(caught.value)
        assert str(VERSION) in str(caught.value)


NOT_JSON = [b"", b"x", b"[", b"[1", b"\xff\xfe", b"\x00", b"[" * 100_000, b"9" * 10_000, b"[NaN]", b'"\\ud8']
NO_SUCH_SHAPE = [b"null", b"1", b'"1234567"', b"[]", b"{}", b"[1]", b"[1,2,3,4,5,6,7,8]", b"[[],[],[],[],[],[],[]]"]


@pytest.mark.parametrize("value", NOT_JSON + NO_SUCH_SHAPE, ids=lambda value: repr(value[:20]))
def test_an_unreadable_head_is_a_wire_error(value: bytes) -> None:
    with pytest.raises(WireError):
        decode_head(value)


@pytest.mark.parametrize("value", NOT_JSON + NO_SUCH_SHAPE, ids=lambda value: repr(value[:20]))
def test_an_unreadable_reply_is_a_wire_error(value: bytes) -> None:
    with pytest.raises(WireError):
        decode_reply(value.decode("latin-1"))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (1, None),
        (1, [1]),
        (1, "x"),
        (2, None),
        (2, 1),
        (2, "\N{SNOWMAN}"),
        (3, None),
        (3, []),
        (3, "\N{SNOWMAN}"),
        (4, 1),
        (5, True),
        (6, None),
        (6, 1),
        (6, [None]),
        (6, [["a"]]),
        (6, [["a", "b", "c"]]),
        (6, [["a", 1]]),
        (6, [["a", None]]),
        (6, [["a", "\N{SNOWMAN}"]]),
        (6, [[["a"], "b"]]),
    ],
)
def test_a_head_with_an_entry_of_the_wrong_shape_is_a_wire_error(place: int, value: object) -> None:
    with pytest.raises(WireError):
        decode_head(head([*GOOD_HEAD[:place], value, *GOOD_HEAD[place + 1 :]]))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (2, None),
        (2, 1),
        (2, [["a"]]),
        (2, [["a", 1]]),
        (2, [["a", "\N{SNOWMAN}"]]),
    ],
)
def test_a_reply_with_an_entry_of_the_wrong_shape_is_a_wire_error(place: int, value: object) -> None:
    with pytest.raises(WireError):
        decode_reply(json.dumps([*GOOD_REPLY[:place], value, *GOOD_REPLY[place + 1 :]]))


def test_a_status_is_what_the_app_gave_and_the_callers_server_judges_it() -> None:
    for status in (200, 103, 999, "OK", None):
        assert decode_reply(json.dumps([GOOD_REPLY[0], status, *GOOD_REPLY[2:]]))[0]["status"] == status


def mutated(source: random.Random, value: bytes) -> bytes:
    mutable = bytearray(value)
    for _ in range(source.randrange(1, 4)):
        place = source.randrange(len(mutable))
        piece = source.choice(
            [b"", b"[", b"]", b"{", b"}", b'"', b",", b"1", b"null", b"Infinity", source.randbytes(1)]
        )
        mutable[place : place + source.randrange(3)] = piece
    return bytes(mutable)


def test_random_and_mutated_bytes_are_heads_or_wire_errors() -> None:
    source = random.Random(2)
    good, errors = encode_head(HTTP).encode(), 0
    for value in [
        *(source.randbytes(source.randrange(60)) for _ in range(3000)),
        *(mutated(source, good) for _ in range(3000)),
    ]:
        try:
            decode_head(value)
        except WireError:
            errors += 1
    assert errors > 3000


def test_random_and_mutated_bytes_are_replies_or_wire_errors() -> None:
    source = random.Random(3)
    good, errors = encode_reply({"status": 200, "headers": [(b"a", b"b")]}, 7), 0
    for value in [
        *(source.randbytes(source.randrange(60)) for _ in range(3000)),
        *(mutated(source, good) for _ in range(3000)),
    ]:
        try:
            decode_reply(value.decode("latin-1"))
        except WireError:
            errors += 1
    assert errors > 3000


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
        *(mutated(source, good) for _ in range(3000)),
    ]:
        try:
            FrameReader("websocket.receive").feed(value)
        except WireError:
            errors += 1
    assert errors > 1000
