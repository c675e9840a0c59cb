"""The parser of frames: the same frames however their bytes are cut, and none beyond its limits."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import tracemalloc
from array import array
from collections.abc import Iterator
from typing import Any, cast

import pytest

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
    FramedConnection,
    FrameError,
    FrameParser,
    frame,
    greeting,
)

HEADS = [BODILESS, REQUEST, EXPECTING, ASK, REPLY, OWN_REPLY]
BODIES = [BODY, END, LAST]
HEADER = 5

FRAMES = [
    (REQUEST, b'[1,{"type":"http"}]'),
    (BODY, b"a piece"),
    (BODY, b""),
    (END, b"the last one"),
    (BODILESS, b""),
    (ASK, b""),
    (REPLY, b"\0" * 30),
    (LAST, b""),
    (OWN_REPLY, b"x"),
    (EXPECTING, b"y"),
]
DATA = b"".join(frame(*item) for item in FRAMES)


def joined(pieces: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Return frames as the other end means them: of a body only what it holds, and how it ends."""
    found: list[tuple[int, bytes]] = []
    body = b""
    for kind, payload in pieces:
        if kind in BODIES:
            body += payload
        if kind != BODY:
            found.append((kind, body if kind in BODIES else payload))
            body = b""
    return found + ([(BODY, body)] if body else [])


def split(data: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


@pytest.mark.parametrize("kind", HEADS + BODIES)
@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 300], ids=len)
def test_frame_of_each_kind_arrives_as_it_was_sent(kind: int, payload: bytes) -> None:
    assert FrameParser().feed(frame(kind, payload)) == [(kind, payload)]


@pytest.mark.parametrize("size", range(1, len(DATA) + 1))
def test_frames_are_the_same_however_their_bytes_are_cut(size: int) -> None:
    parser = FrameParser()
    found = [item for piece in split(DATA, size) for item in parser.feed(piece)]
    assert joined(found) == joined(FRAMES)


@pytest.mark.parametrize("at", range(len(DATA) + 1))
def test_frames_are_the_same_wherever_they_are_cut_in_two(at: int) -> None:
    parser = FrameParser()
    assert joined(parser.feed(DATA[:at]) + parser.feed(b"") + parser.feed(DATA[at:])) == joined(FRAMES)


def test_pieces_of_a_body_are_given_as_they_come() -> None:
    parser = FrameParser()
    data = frame(END, b"abcdef")
    assert parser.feed(data[: HEADER + 2]) == [(BODY, b"ab")]
    assert parser.feed(data[HEADER + 2 : HEADER + 3]) == [(BODY, b"c")]
    assert parser.feed(data[HEADER + 3 :] + frame(ASK, b"")) == [(END, b"def"), (ASK, b"")]


def test_what_comes_together_of_a_body_is_given_as_one_piece() -> None:
    parser = FrameParser()
    pieces = b"".join(frame(BODY, b"%d" % number) for number in range(5))
    assert parser.feed(frame(REPLY, b"head") + pieces) == [(REPLY, b"head"), (BODY, b"01234")]
    assert parser.feed(pieces + frame(END, b"last") + frame(ASK, b"")) == [(END, b"01234last"), (ASK, b"")]
    # One that may not come there is still seen, and what came before it.
    data = frame(BODY, b"a") + frame(ASK, b"") + frame(BODY, b"b")
    assert parser.feed(data) == [(BODY, b"a"), (ASK, b""), (BODY, b"b")]


@pytest.mark.parametrize("kind", HEADS)
def test_head_is_given_when_it_is_whole(kind: int) -> None:
    parser = FrameParser()
    data = frame(kind, b"abc")
    for byte in data[:-1]:
        assert parser.feed(bytes((byte,))) == []
    assert parser.feed(data[-1:]) == [(kind, b"abc")]


@pytest.mark.parametrize("kind", sorted(set(range(256)) - {*HEADS, *BODIES}))
def test_unknown_kind_is_an_error(kind: int) -> None:
    with pytest.raises(FrameError, match=f"kind {kind} "):
        FrameParser().feed(frame(kind, b""))


@pytest.mark.parametrize("kind", HEADS)
def test_head_above_the_limit_is_an_error_before_anything_of_it_has_come(kind: int) -> None:
    parser = FrameParser()
    assert parser.feed(struct.pack("!IB", MAX_HEAD, kind)) == []
    with pytest.raises(FrameError, match=f"{MAX_HEAD + 1} bytes"):
        FrameParser().feed(struct.pack("!IB", MAX_HEAD + 1, kind))


def test_head_at_the_limit_arrives() -> None:
    parser = FrameParser()
    payload = b"h" * MAX_HEAD
    found = [item for piece in split(frame(REPLY, payload), 2**18) for item in parser.feed(piece)]
    assert found == [(REPLY, payload)]


@pytest.mark.parametrize("kind", BODIES)
def test_body_of_any_length_takes_no_memory_but_that_of_its_pieces(kind: int) -> None:
    parser = FrameParser()
    piece = b"b" * 2**16
    tracemalloc.start()
    try:
        assert parser.feed(struct.pack("!IB", 2**32 - 1, kind)) == []
        for _ in range(1000):
            assert parser.feed(piece) == [(BODY, piece)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


def test_what_was_announced_takes_no_memory_before_it_comes() -> None:
    tracemalloc.start()
    try:
        for kind in HEADS:
            FrameParser().feed(struct.pack("!IB", MAX_HEAD, kind))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


def test_greeting_is_the_preface_and_the_owner() -> None:
    assert greeting("0123456789ab") == PREFACE + b"0123456789ab"


def test_preface_begins_as_no_request_of_http_does() -> None:
    assert PREFACE[0] == 0


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data


def written(*frames: tuple[int, Any]) -> list[tuple[int, bytes]]:
    """Return the frames that arrive where these are written one after the other, refused ones left out."""

    async def play() -> bytes:
        connection, wire = FramedConnection(), Wire()
        connection.connection_made(cast(asyncio.BaseTransport, wire))
        for kind, payload in frames:
            with contextlib.suppress(TypeError):
                connection.write(kind, payload)
        return wire.written

    return joined(FrameParser().feed(asyncio.run(play())))


@pytest.mark.parametrize("items", [2, 2**15])
def test_body_of_wide_items_arrives_as_its_bytes(items: int) -> None:
    wide = array("I", range(items))
    assert written((BODY, memoryview(wide)), (END, b"x")) == joined([(BODY, wide.tobytes()), (END, b"x")])
    assert written((BODY, bytearray(b"abc")), (END, b"x")) == joined([(BODY, b"abc"), (END, b"x")])


@pytest.mark.parametrize("length", [1, 70_000])
def test_body_that_is_no_bytes_is_refused_before_anything_of_it_is_sent(length: int) -> None:
    assert written((BODY, "x" * length), (END, b"y")) == [(END, b"y")]
