"""What holds for whatever bytes the readers of cookies, tokens and links are given.

Each property is a function of plain values that raises where it does not hold: one
fuzzer chooses the values by strategies, another by coverage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from itsdangerous import TimestampSigner, URLSafeSerializer
from starlette.types import Message, Scope

from gym_gunicorn import wire
from gym_gunicorn.carriers import Carried, SessionCookie, SessionToken
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
    assert scope["client"] is None or isinstance(scope["client"], tuple)
    assert scope["server"] is None or isinstance(scope["server"], tuple)
    assert_are_fields(scope["headers"])
    again = wire.encode_head(scope)
    assert again.isascii()
    assert again.isprintable()
    return scope


def heads_arrive_as_they_were(scope: Scope) -> None:
    """A scope is the same on the other side, and travels in bytes that a header field may have."""
    value = wire.encode_head(scope)
    assert value.isascii()
    assert value.isprintable()
    assert wire.decode_head(value.encode()) == scope


def replies_are_read_or_refused(value: str) -> Message | None:
    """Any text is a reply head, and then one that can be written again, or a ``WireError``."""
    try:
        message, taken = wire.decode_reply(value)
    except wire.WireError:
        return None
    assert message["type"] == "http.response.start"
    assert_are_fields(message["headers"])
    assert isinstance(taken, int)
    # Compared as text, since a status may be anything, and NaN is not equal to itself.
    assert repr(wire.decode_reply(wire.encode_reply(message, taken).decode("ascii"))) == repr((message, taken))
    return message


def replies_arrive_as_they_were(message: Message, taken: int) -> None:
    """A reply's head is the same on the other side, and travels in bytes that a header field may have."""
    value = wire.encode_reply(message, taken).decode("ascii")
    assert value.isprintable()
    assert wire.decode_reply(value) == (message, taken)


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


def assert_are_fields(headers: object) -> None:
    """Fail where ``headers`` is no header list of ASGI."""
    assert isinstance(headers, list)
    for field in headers:
        assert isinstance(field, tuple)
        name, value = field
        assert isinstance(name, bytes)
        assert isinstance(value, bytes)
