"""What holds for whatever bytes the readers of cookies, tokens and links are given.

Each property is a function of plain values that raises where it does not hold: one
fuzzer chooses the values by strategies, another by coverage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from itsdangerous import TimestampSigner, URLSafeSerializer
from starlette.types import Message, Scope

from gym_gunicorn.forwarding import wire
from gym_gunicorn.sessions.carriers import Carried, SessionCookie, SessionToken
from tests.fuzz.oracle import ABSENT, Fields, has_form_of_an_owner_id, owner_of_cookie, owner_of_token

SECRET = "a secret of the fuzzers"
KEY = "gym_worker"
NAME = "session"
HEADER = "x-token"
SESSION_ID_KEY = "session_id"
MAX_AGE = 3600
NOW = 1_700_000_000


class StoppedSigner(TimestampSigner):
    """A signer whose clock stands still, so that the same bytes always mean the same."""

    now = NOW

    def get_timestamp(self) -> int:
        return self.now


def stopped_signer(now: int = NOW) -> StoppedSigner:
    """Return a signer whose clock says ``now``."""
    signer = StoppedSigner(SECRET)
    signer.now = now
    return signer


SERIALIZER = URLSafeSerializer(SECRET, salt="of the fuzzers' tokens")


# Cookies and tokens


def cookies_are_read_as_by_starlette(fields: Fields, age: int = 0, max_age: int | None = MAX_AGE) -> str | None:
    """The cookie reader never raises, and agrees with Starlette; ``age`` is the clock's distance from ``NOW``.

    Returns the owner that was read, or ``ABSENT``.
    """
    signer = stopped_signer(NOW + age)
    carrier = SessionCookie(signer, NAME, max_age, KEY)
    verdict = _owner(carrier.read(fields))
    assert verdict == owner_of_cookie(fields, signer, NAME, max_age, KEY), fields
    # What was remembered is what was read.
    assert _owner(carrier.read(fields)) == verdict
    return verdict


def signed_sessions_are_read_as_by_starlette(
    session: bytes, signed_at: int = NOW, max_age: int | None = MAX_AGE
) -> str | None:
    """What holds for any cookie holds for one that is validly signed, whatever it holds."""
    cookie = stopped_signer(signed_at).sign(session)
    return cookies_are_read_as_by_starlette([(b"cookie", b"session=" + cookie)], max_age=max_age)


def tokens_are_read_as_by_itsdangerous(fields: Fields) -> str | None:
    """The token reader never raises, and agrees with itsdangerous. Returns the owner read, or ``ABSENT``."""
    carrier = SessionToken(SERIALIZER, HEADER, SESSION_ID_KEY)
    verdict = _owner(carrier.read(fields))
    assert verdict == owner_of_token(fields, SERIALIZER, HEADER, KEY, SESSION_ID_KEY), fields
    assert _owner(carrier.read(fields)) == verdict
    return verdict


def signed_payloads_are_read_as_by_itsdangerous(payload: bytes) -> str | None:
    """What holds for any token holds for one that is validly signed, whatever it holds."""
    signer = SERIALIZER.make_signer(SERIALIZER.salt)
    return tokens_are_read_as_by_itsdangerous([(HEADER.encode(), signer.sign(payload))])


def _owner(carried: Carried | None) -> str | None:
    if carried is None:
        return ABSENT
    assert carried.owner is None or has_form_of_an_owner_id(carried.owner), carried
    return carried.owner


# Links


def heads_are_read_or_refused(value: bytes) -> Scope | None:
    """Any bytes are a head, and then one that can be written again, or a ``WireError``."""
    try:
        scope = wire.decode_head(value)
    except wire.WireError:
        return None
    assert scope["type"] in ("http", "websocket")
    assert isinstance(scope["raw_path"], bytes)
    assert isinstance(scope["query_string"], bytes)
    assert_is_address(scope["client"])
    assert_is_address(scope["server"])
    assert_are_fields(scope["headers"])
    # Compared as bytes, since an entry may be anything, and NaN is not equal to itself.
    again = wire.encode_head(scope)
    assert wire.encode_head(wire.decode_head(again)) == again
    return scope


def heads_arrive_as_they_were(scope: Scope) -> None:
    """A scope is the same on the other side, over a link and in a header field."""
    value = wire.encode_head(scope)
    assert wire.decode_head(value) == scope
    assert_travels_in_a_field(value)


def scopes_are_written_or_refused(scope: Scope) -> None:
    """Any entries of a scope are a head, which can be read unless they are of other types, or a ``WireError``."""
    try:
        value = wire.encode_head(scope)
    except wire.WireError:
        return
    heads_are_read_or_refused(value)


def replies_are_read_or_refused(value: bytes) -> Message | None:
    """Any bytes are a reply head, and then one that can be written again, or a ``WireError``."""
    try:
        message, taken = wire.decode_reply(value)
    except wire.WireError:
        return None
    assert message["type"] == "http.response.start"
    assert_are_fields(message["headers"])
    assert isinstance(taken, int)
    again = wire.encode_reply(message, taken)
    assert wire.encode_reply(*wire.decode_reply(again)) == again
    return message


def replies_arrive_as_they_were(message: Message, taken: int) -> None:
    """A reply's head is the same on the other side, over a link and in a header field."""
    value = wire.encode_reply(message, taken)
    assert wire.decode_reply(value) == (message, taken)
    assert_travels_in_a_field(value)


def fields_are_read_or_refused(value: bytes | str) -> bytes | None:
    """Any field is base64 of a head, of at most the field's length, or a ``WireError``."""
    try:
        head = wire.from_field(value)
    except wire.WireError:
        return None
    assert len(head) <= len(value)
    assert wire.from_field(wire.to_field(head)) == head
    return head


def frames_are_read_or_refused(data: bytes, cuts: Sequence[int] = ()) -> list[Message]:
    """Any bytes in any pieces are events, or a ``WireError``; returns the events before it.

    ``cuts`` are the places to cut the bytes at.
    """
    reader = wire.FrameReader("websocket.receive")
    events: list[Message] = []
    for start, end in pairwise([0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]):
        try:
            events += reader.feed(data[start:end])
        except wire.WireError:
            break
    for event in events:
        assert isinstance(event["type"], str)
        if "headers" in event:
            assert_are_fields(event["headers"])
    return events


def frames_arrive_as_they_were(events: Sequence[Message], cuts: Sequence[int]) -> None:
    """Events are the same on the other side, however the bytes between are cut."""
    data = b"".join(map(wire.encode_frame, events))
    assert frames_are_read_or_refused(data, cuts) == list(events)


def assert_travels_in_a_field(head: bytes) -> None:
    """Fail where a head is another after a header field, or in bytes that a field may not have."""
    field = wire.to_field(head)
    assert field.isascii()
    assert field.isprintable()
    assert " " not in field
    assert wire.from_field(field) == wire.from_field(field.encode("ascii")) == head


def assert_is_address(address: object) -> None:
    """Fail where ``address`` is no client or server of ASGI."""
    if address is not None:
        assert isinstance(address, tuple)
        host, port = address
        assert isinstance(host, str)
        assert port is None or type(port) is int


def assert_are_fields(headers: object) -> None:
    """Fail where ``headers`` is no header list of ASGI."""
    assert isinstance(headers, list)
    for field in headers:
        assert isinstance(field, tuple)
        name, value = field
        assert isinstance(name, bytes)
        assert isinstance(value, bytes)
