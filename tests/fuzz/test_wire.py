"""The readers of what travels between workers, given anything."""

from __future__ import annotations

from hypothesis import example, find, given
from hypothesis import strategies as st
from starlette.types import Message, Scope

from gym_gunicorn.forwarding import wire
from tests.fuzz import properties
from tests.fuzz.strategies import (
    CUTS,
    EVENTS,
    FIELDS,
    HEADS,
    NANOSECONDS,
    NEARLY_SCOPES,
    REPLIES,
    REPLY_HEADS,
    SCOPES,
    frames,
    fuzzed,
)

DEEP = "[" * 100_000
TYPE = b"\x81\xa4type\xa4http"
SCOPE: Scope = {"type": "http", "raw_path": b"/", "query_string": b"", "headers": []}
REST = b"\xc4\1/\xc4\0\xc0\xc0\x90"


@fuzzed()
@given(HEADS)
@example(b"\x91" * 100_000)
@example(b"\x81\xa1x" * 100_000)
@example(b"\x97\1\x81\xa4type" + b"\x91" * 900 + b"\xc0" + REST)
@example(b"\x97\1\x82" + TYPE[1:] + b"\xaaextensions" + b"\x91" * 900 + b"\xc0" + REST)
@example(b"\x97\1\x82" + TYPE[1:] + b"\xaaextensions\xdd\xff\xff\xff\xff")
@example(b"\x97\1\x82" + TYPE[1:] + b"\xaaextensions\xdf\xff\xff\xff\xff")
@example(b"\x97\1" + TYPE + b"\xc4\1/\xc4\0\xc0\xc0\xdd\xff\xff\xff\xff")
@example(b"\x97\1" + TYPE + b"\xc6\xff\xff\xff\xff")
@example(b"\x97\xcf" + b"\xff" * 8 + TYPE + REST)
@example(b"\x97\1" + TYPE + b"\xa1/\xc4\0\xc0\xc0\x90")
@example(b"\x97\1\x82" + TYPE[1:] + b"\xaaextensions\x81\xcb\x7f\xf8\0\0\0\0\0\0\xc0" + REST)
@example(b"\x97\1\x82" + TYPE[1:] + b"\xa4path\xa3\xed\xa0\x80" + REST)
@example(b'[1,{"type":"http"},"/","",null,null,[]]')
@example(b"\x87\1\1\2\2\3\3\4\4\5\5\6\6\7\7")
def test_any_bytes_are_a_head_or_a_wire_error(value: bytes) -> None:
    properties.heads_are_read_or_refused(value)


@fuzzed()
@given(SCOPES)
def test_any_scope_arrives_as_it_was(scope: Scope) -> None:
    properties.heads_arrive_as_they_were(scope)


@fuzzed()
@given(NEARLY_SCOPES)
@example({**SCOPE, "client": ("::1", 2**64)})
@example({**SCOPE, "path": "/\udcff"})
@example({**SCOPE, "headers": None})
@example({**SCOPE, "raw_path": memoryview(b"/abc")[::2]})
def test_any_entries_of_a_scope_are_a_head_or_a_wire_error(scope: Scope) -> None:
    properties.scopes_are_written_or_refused(scope)


@fuzzed()
@given(REPLY_HEADS)
@example(b"\x91" * 100_000)
@example(b"\x94\1" + b"\x91" * 900 + b"\xc0\x90\7")
@example(b"\x94\1\xdd\xff\xff\xff\xff")
@example(b"\x94\1\xcc\xc8\xdd\xff\xff\xff\xff")
@example(b"\x94\1\xcb\x7f\xf8\0\0\0\0\0\0\x90\7")
@example(b"\x94\1\xcc\xc8\x90\xcb\x7f\xf8\0\0\0\0\0\0")
@example(b"\x94\1\xcc\xc8\x90\xcb\x7f\xf0\0\0\0\0\0\0")
@example(b"\x94\1\xcc\xc8\x90\xcf" + b"\xff" * 8)
@example(b"\x94\1\xcc\xc8\x90\xa2\xd9\xa1")
@example(b"\x94\1\xcc\xc8\x90\x90")
@example(b"\x94\1\xcc\xc8\x91\x92\xa1a\xa1b\7")
@example(b"[1,200,[],7]")
def test_any_bytes_are_a_reply_head_or_a_wire_error(value: bytes) -> None:
    properties.replies_are_read_or_refused(value)


@fuzzed()
@given(FIELDS)
@example("\ud800AAA")
@example("\u0661AAA")
@example(b"AAAA====")
def test_any_field_holds_bytes_or_is_a_wire_error(value: bytes | str) -> None:
    properties.fields_are_read_or_refused(value)


@fuzzed()
@given(REPLIES, NANOSECONDS)
def test_any_reply_head_arrives_as_it_was(message: Message, taken: int) -> None:
    properties.replies_arrive_as_they_were(message, taken)


@fuzzed()
@given(frames(), CUTS)
@example(b"\xff\xff\xff\xffB", [])
@example(b"\0\0\0\2J{}", [])
@example(b"\0\0\0\2J[]", [])
@example(b'\0\0\0\x1eJ{"type":"a","headers":"ab\\ud80"}', [])
@example(len(DEEP).to_bytes(4, "big") + b"J" + DEEP.encode(), [])
def test_any_bytes_are_frames_or_a_wire_error(data: bytes, cuts: list[int]) -> None:
    properties.frames_are_read_or_refused(data, cuts)


@fuzzed()
@given(st.lists(EVENTS, max_size=5), CUTS)
def test_any_events_arrive_as_they_were_however_their_bytes_are_cut(events: list[Message], cuts: list[int]) -> None:
    properties.frames_arrive_as_they_were(events, cuts)


@fuzzed(0.25)
@given(REPLIES, st.integers(0, 1000))
def test_part_of_a_reply_head_is_never_taken_for_the_whole(message: Message, length: int) -> None:
    value = wire.encode_reply(message, 7)
    assert properties.replies_are_read_or_refused(value[: min(length, len(value) - 1)]) is None


@fuzzed(0.25)
@given(SCOPES, st.integers(0, 1000))
def test_part_of_a_head_is_never_taken_for_the_whole(scope: Scope, length: int) -> None:
    value = wire.encode_head(scope)
    assert properties.heads_are_read_or_refused(value[: min(length, len(value) - 1)]) is None


def test_fuzzed_values_are_both_read_and_refused() -> None:
    for is_read in (True, False):
        find(HEADS, lambda value: (properties.heads_are_read_or_refused(value) is not None) is is_read)  # noqa: B023  # called at once
        find(REPLY_HEADS, lambda value: (properties.replies_are_read_or_refused(value) is not None) is is_read)  # noqa: B023
        find(FIELDS, lambda value: (properties.fields_are_read_or_refused(value) is not None) is is_read)  # noqa: B023
    find(frames(), lambda data: len(properties.frames_are_read_or_refused(data)) > 1)
