"""The readers of what travels between workers, given anything."""

from __future__ import annotations

from hypothesis import example, find, given
from hypothesis import strategies as st
from starlette.types import Message, Scope

from gym_gunicorn import wire
from tests.fuzz import properties
from tests.fuzz.strategies import CUTS, EVENTS, HEADS, NANOSECONDS, REPLIES, REPLY_HEADS, SCOPES, frames, fuzzed

DEEP = "[" * 100_000


@fuzzed()
@given(HEADS)
@example(DEEP.encode())
@example(b'[1,{"type":' + b"[" * 900 + b"]" * 900 + b'},"/","",null,null,[]]')
@example(b"[" + b"9" * 5000 + b',{"type":"http"},"/","",null,null,[]]')
@example(b'[1,{"type":"http"},"\\ud800","",null,null,[]]')
@example('[1,{"type":"http"},"/","",null,null,[]]'.encode("utf-16"))
@example(b'{"1":1,"2":1,"3":1,"4":1,"5":1,"6":1,"7":1}')
def test_any_bytes_are_a_head_or_a_wire_error(value: bytes) -> None:
    properties.heads_are_read_or_refused(value)


@fuzzed()
@given(SCOPES)
def test_any_scope_arrives_as_it_was(scope: Scope) -> None:
    properties.heads_arrive_as_they_were(scope)


@fuzzed()
@given(REPLY_HEADS)
@example(DEEP)
@example("[1," + "9" * 5000 + ",[],7]")
@example('[1,NaN,[["\\ud800","a"]],7]')
@example("[1,NaN,[],7]")
@example("[1,200,[],NaN]")
@example("[1,200,[],1e999]")
@example('[1,200,[],"\\u0661"]')
@example("[1,200,[],[]]")
@example("\ud800")
def test_any_text_is_a_reply_head_or_a_wire_error(value: str) -> None:
    properties.replies_are_read_or_refused(value)


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
    value = wire.encode_reply(message, 7).decode("ascii")
    assert properties.replies_are_read_or_refused(value[: min(length, len(value) - 1)]) is None


@fuzzed(0.25)
@given(SCOPES, st.integers(0, 1000))
def test_part_of_a_head_is_never_taken_for_the_whole(scope: Scope, length: int) -> None:
    value = wire.encode_head(scope).encode()
    assert properties.heads_are_read_or_refused(value[: min(length, len(value) - 1)]) is None


def test_fuzzed_values_are_both_read_and_refused() -> None:
    for is_read in (True, False):
        find(HEADS, lambda value: (properties.heads_are_read_or_refused(value) is not None) is is_read)  # noqa: B023  # called at once
        find(REPLY_HEADS, lambda value: (properties.replies_are_read_or_refused(value) is not None) is is_read)  # noqa: B023
    find(frames(), lambda data: len(properties.frames_are_read_or_refused(data)) > 1)
