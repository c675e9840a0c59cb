from __future__ import annotations

import asyncio
import json
import random
from base64 import b64encode
from typing import Any

import pytest
from itsdangerous import TimestampSigner
from starlette.datastructures import Headers
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import HTTPConnection
from starlette.types import Message, Receive, Scope, Send

from gym_gunicorn.owner import is_owner_id
from gym_gunicorn.sessions.carriers import NO_OWNER, Carried, SessionCookie

SECRET = "a secret"
KEY = "gym_worker"
A = "a" * 12
B = "b" * 12
MAX_AGE = 3600


class ClockedSigner(TimestampSigner):
    """A signer whose clock is set by the test."""

    now = 1_700_000_000

    def get_timestamp(self) -> int:
        return self.now


def signed(payload: object, signer: TimestampSigner | None = None) -> str:
    """Return a session cookie's value; ``payload`` is the session, or what stands in its place as bytes."""
    data = payload if isinstance(payload, bytes) else b64encode(json.dumps(payload).encode())
    return (signer or TimestampSigner(SECRET)).sign(data).decode()


def of(owner: object) -> str:
    return signed({"n": 1, KEY: owner})


def carrier(signer: TimestampSigner | None = None, max_age: int | None = MAX_AGE) -> SessionCookie:
    return SessionCookie(signer or TimestampSigner(SECRET), "session", max_age, KEY)


def cookie_fields(*fields: bytes | str) -> list[tuple[bytes, bytes]]:
    return [(b"cookie", field.encode() if isinstance(field, str) else field) for field in fields]


def read(value: str) -> Carried | None:
    return carrier().read(cookie_fields(f"session={value}"))


async def starlette_read(headers: list[tuple[bytes, bytes]], signer: TimestampSigner | None = None) -> Carried | None:
    """Return what Starlette's own middleware makes of the same request."""
    sessions: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        sessions.append(scope["session"])

    async def receive() -> Message:
        raise AssertionError("not read")

    async def send(message: Message) -> None:
        raise AssertionError("not answered")

    scope = {"type": "http", "headers": headers}
    if "session" not in HTTPConnection(scope).cookies:
        return None
    middleware = SessionMiddleware(app, SECRET, max_age=MAX_AGE)
    if signer is not None:
        middleware.signer = signer
    try:
        await middleware(scope, receive, send)
    except (ValueError, TypeError):
        return NO_OWNER  # Signed, and no session: Starlette (1.10) answers 500.
    owner = sessions[0].get(KEY)
    return Carried(owner) if is_owner_id(owner) else NO_OWNER


COOKIE_A, COOKIE_B = of(A), of(B)
# Not the signature's last digit: two of its bits mean nothing.
BROKEN_A = COOKIE_A[:-2] + ("x" if COOKIE_A[-2] != "x" else "y") + COOKIE_A[-1]
OCTAL_A = "".join(f"\\{ord(character):03o}" for character in COOKIE_A)


@pytest.mark.parametrize(
    ("fields", "owner"),
    [
        ([f"session={COOKIE_A}"], A),
        (["a=1", f"session={COOKIE_A}", "b=2"], A),
        ([f"session={COOKIE_A}", f"session={COOKIE_B}"], B),
        ([f"session={COOKIE_A}; session={COOKIE_B}"], B),
        ([f"session={COOKIE_A}; session={BROKEN_A}"], None),
        ([f"session={BROKEN_A}; session={COOKIE_A}"], A),
        ([f"session={COOKIE_A}; session="], None),
        ([f"session={COOKIE_A}", "session"], A),
        ([f'session="{COOKIE_A}"'], A),
        ([f'session="{OCTAL_A}"'], A),
        ([f'session="{COOKIE_A}'], None),
        ([f"  session \t=  {COOKIE_A}  "], A),
        ([f"session={COOKIE_A};"], A),
        ([f"a=1;session={COOKIE_A};b=2"], A),
        ([f'=; ;;x; y="unterminated; session={COOKIE_A}'], A),
        ([f'x="a;b"; session={COOKIE_A}'], A),
        ([b"\xff\xfe=\x80; \x00\x01; session=" + COOKIE_A.encode()], A),
        ([f"sessi\N{LATIN SMALL LETTER O WITH ACUTE}n=x; session={COOKIE_A}; \N{SNOWMAN}=\N{SNOWMAN}"], A),
        ([b"session=\xff" + COOKIE_A.encode()], None),
        ([b"session=\xe2\x98\x83"], None),
        (["session="], None),
        (['session=""'], None),
        (["session=;"], None),
        ([f"session={BROKEN_A}"], None),
    ],
)
def test_a_cookie_is_read_as_starlette_reads_it(fields: list[bytes | str], owner: str | None) -> None:
    headers = cookie_fields(*fields)
    assert carrier().read(headers) == Carried(owner)
    assert asyncio.run(starlette_read(headers)) == Carried(owner)


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [""],
        [";"],
        ["="],
        ["session"],
        ["other=1"],
        [f"Session={COOKIE_A}"],
        [f"xsession={COOKIE_A}; session2={COOKIE_A}"],
        [f"a=1, session={COOKIE_A}"],
        [b"\xff\xfe\x00"],
    ],
)
def test_an_absent_cookie_is_absent_as_for_starlette(fields: list[bytes | str]) -> None:
    headers = cookie_fields(*fields)
    assert carrier().read(headers) is None
    assert asyncio.run(starlette_read(headers)) is None


def test_only_cookie_fields_are_read() -> None:
    value = f"session={COOKIE_A}".encode()
    assert carrier().read([(b"x-cookie", value), (b"set-cookie", value), (b"authorization", value)]) is None


def test_the_cookie_that_the_middleware_sets_names_its_owner() -> None:
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["session"].update({"name": "J\N{LATIN SMALL LETTER U WITH DIAERESIS}rg", KEY: A})
        await send({"type": "http.response.start", "status": 200})

    async def receive() -> Message:
        raise AssertionError("not read")

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(SessionMiddleware(app, SECRET)({"type": "http", "headers": []}, receive, send))
    cookie = Headers(raw=sent[0]["headers"])["set-cookie"].split(";")[0]
    assert carrier().read(cookie_fields(cookie)) == Carried(A)


def test_a_cookie_of_another_name_is_read_where_it_is_configured() -> None:
    named = SessionCookie(TimestampSigner(SECRET), "sid", MAX_AGE, KEY)
    assert named.read(cookie_fields(f"session={COOKIE_A}; sid={COOKIE_B}")) == Carried(B)


def test_the_owner_is_read_from_the_configured_key_alone() -> None:
    keyed = SessionCookie(TimestampSigner(SECRET), "session", MAX_AGE, "owner")
    assert keyed.read(cookie_fields(f"session={COOKIE_A}")) == NO_OWNER
    assert keyed.read(cookie_fields("session=" + signed({"owner": B, KEY: A}))) == Carried(B)


# What names no owner


def test_a_changed_cookie_names_no_owner() -> None:
    for place in range(len(COOKIE_A)):
        # Differs in the first four bits: the last two of the signature's last digit mean nothing.
        other = "Q" if COOKIE_A[place] in "ABCD" else "A"
        assert read(COOKIE_A[:place] + other + COOKIE_A[place + 1 :]) == NO_OWNER


def test_a_truncated_cookie_names_no_owner() -> None:
    assert [read(COOKIE_A[:length]) for length in range(len(COOKIE_A))] == [NO_OWNER] * len(COOKIE_A)


def test_a_hundred_kibibytes_of_nothing_name_no_owner() -> None:
    assert read("x" * 102_400) == NO_OWNER
    assert read("." * 102_400) == NO_OWNER
    assert read(COOKIE_A + "x" * 102_400) == NO_OWNER


def test_a_signed_cookie_of_a_hundred_kibibytes_names_its_owner() -> None:
    assert read(signed({"data": "x" * 102_400, KEY: A})) == Carried(A)


def test_a_cookie_of_another_secret_names_no_owner() -> None:
    assert read(signed({KEY: A}, TimestampSigner("another secret"))) == NO_OWNER


def test_a_cookie_of_another_salt_names_no_owner() -> None:
    assert read(signed({KEY: A}, TimestampSigner(SECRET, salt="another salt"))) == NO_OWNER


def test_an_unsigned_session_names_no_owner() -> None:
    assert read(b64encode(json.dumps({KEY: A}).encode()).decode()) == NO_OWNER


def test_an_expired_cookie_names_no_owner() -> None:
    signer = ClockedSigner(SECRET)
    headers = cookie_fields("session=" + signed({KEY: A}, signer))
    signer.now += MAX_AGE + 1
    assert carrier(signer).read(headers) == NO_OWNER


@pytest.mark.parametrize("age", [0, 1, MAX_AGE - 1, MAX_AGE, MAX_AGE + 1])
def test_a_cookie_is_as_valid_as_starlette_finds_it_at_every_age(age: int) -> None:
    signer = ClockedSigner(SECRET)
    headers = cookie_fields("session=" + signed({KEY: A}, signer))
    signer.now += age
    assert carrier(signer).read(headers) == Carried(A if age <= MAX_AGE else None)
    assert carrier(signer).read(headers) == asyncio.run(starlette_read(headers, signer))


def test_a_cookie_signed_in_the_future_names_its_owner_who_judges_it() -> None:
    # A clock that was set back, and may be set again before the session middleware looks.
    signer = ClockedSigner(SECRET)
    read_by = carrier(signer)
    headers = cookie_fields("session=" + signed({KEY: A}, signer))
    signer.now -= 1
    assert read_by.read(headers) == Carried(A)
    signer.now += 1
    assert read_by.read(headers) == Carried(A)


def test_a_remembered_verdict_does_not_outlive_max_age() -> None:
    signer = ClockedSigner(SECRET)
    read_by = carrier(signer)
    headers = cookie_fields("session=" + signed({KEY: A}, signer))
    assert read_by.read(headers) == Carried(A)
    signer.now += MAX_AGE
    assert read_by.read(headers) == Carried(A)
    signer.now += 1
    assert read_by.read(headers) == NO_OWNER
    assert read_by._verified.cache_info().misses == 1


def test_a_cookie_without_max_age_is_valid_for_ever() -> None:
    signer = ClockedSigner(SECRET)
    read_by = carrier(signer, max_age=None)
    headers = cookie_fields("session=" + signed({KEY: A}, signer))
    for years in (0, 50, -100):
        signer.now += years * 365 * 24 * 3600
        assert read_by.read(headers) == Carried(A)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"x",
        b"====",
        b"not base64 \xff\xfe",
        b64encode(b""),
        b64encode(b"{"),
        b64encode(b'{"gym_worker": "aaaaaaaaaaaa"'),
        b64encode(b"{'gym_worker': 'aaaaaaaaaaaa'}"),
        b64encode(b"\xff\xfe\xfd"),
        b64encode(b"\x00" * 9),
        b64encode(b"[" * 100_000),
        b64encode(b"9" * 10_000),
    ],
    ids=lambda payload: repr(payload[:40]),
)
def test_a_signed_cookie_of_malformed_json_names_no_owner(payload: bytes) -> None:
    signer = TimestampSigner(SECRET)
    headers = [(b"cookie", b"session=" + signer.sign(payload))]
    assert carrier().read(headers) == NO_OWNER


@pytest.mark.parametrize("session", [None, True, 1, 1.5, "x", A, [], [A], [[KEY, A]], {}, {"other": A}], ids=repr)
def test_a_signed_value_without_an_owner_names_none(session: object) -> None:
    assert read(signed(session)) == NO_OWNER


@pytest.mark.parametrize(
    "owner",
    [
        "../../x",
        "../../../../",
        "A" * 12,
        "a" * 11,
        "a" * 13,
        "\N{ARABIC-INDIC DIGIT ONE}" * 12,
        "\N{FULLWIDTH DIGIT ONE}" * 12,
        "a" * 11 + "\0",
        "a" * 12 + "\0",
        "a" * 12 + "\n",
        "",
        123456789012,
        [A],
        {A: A},
        None,
        True,
    ],
    ids=repr,
)
def test_an_owner_in_any_other_form_is_no_owner(owner: object) -> None:
    assert read(of(owner)) == NO_OWNER


@pytest.mark.parametrize("signed_at", [2**40, 2**57, 2**62, 2**63, 2**64 - 1])
def test_a_signed_time_that_no_clock_can_show_names_no_owner(signed_at: int) -> None:
    signer = ClockedSigner(SECRET)
    signer.now = signed_at
    assert read(signed({KEY: A}, signer)) == NO_OWNER


# What is remembered


def test_a_cookie_is_verified_once() -> None:
    read_by = carrier()
    headers = cookie_fields(f"session={COOKIE_A}")
    assert [read_by.read(headers) for _ in range(5)] == [Carried(A)] * 5
    info = read_by._verified.cache_info()
    assert (info.misses, info.hits) == (1, 4)


def test_what_is_remembered_is_bounded() -> None:
    read_by = carrier()
    maximum = read_by._verified.cache_info().maxsize
    assert maximum is not None
    for number in range(maximum + 100):
        read_by.read(cookie_fields(f"session={number}"))
    assert read_by._verified.cache_info().currsize == maximum


@pytest.mark.parametrize(("length", "remembered"), [(2048, 1), (2049, 0), (102_400, 0)])
def test_long_cookies_are_not_remembered(length: int, remembered: int) -> None:
    read_by = carrier()
    assert read_by.read(cookie_fields("session=".ljust(length, "x"))) == NO_OWNER
    assert read_by._verified.cache_info().currsize == remembered


def test_what_one_carrier_remembers_another_does_not_believe() -> None:
    headers = cookie_fields(f"session={COOKIE_A}")
    assert carrier().read(headers) == Carried(A)
    assert carrier(TimestampSigner("another secret")).read(headers) == NO_OWNER


# Whatever is sent


def test_random_bytes_never_raise() -> None:
    source = random.Random(20261129)
    read_by = carrier()
    for _ in range(5000):
        value = source.randbytes(source.randrange(80))
        verdict = read_by.read([(source.randbytes(3), value), (b"cookie", value), (b"cookie", b"session=" + value)])
        assert verdict in (None, NO_OWNER)


def test_signed_random_bytes_never_raise() -> None:
    source = random.Random(20261130)
    signer = TimestampSigner(SECRET)
    alphabet = [*(bytes([byte]) for byte in b'{}[]":,\\u0eE+-.tfn \xff\x00'), f'"{KEY}":'.encode(), b"null"]
    read_by = carrier()
    for _ in range(5000):
        session = b"".join(source.choices(alphabet, k=source.randrange(12)))
        payload = source.choice([session, b64encode(session), b64encode(session)[:-1]])
        cookie = signer.sign(payload)
        assert read_by.read([(b"cookie", b'session="' + cookie + b'"')]) == NO_OWNER


def test_random_cookie_fields_are_read_as_starlette_reads_them() -> None:
    source = random.Random(20261201)
    pieces = [
        COOKIE_A,
        COOKIE_B,
        BROKEN_A,
        "session",
        "session=",
        "=",
        ";",
        "; ",
        '"',
        "\\",
        "\\073",
        " ",
        "\t",
        "x",
        "é",
    ]

    async def compare() -> set[Carried | None]:
        read_by = carrier()
        seen: set[Carried | None] = set()
        for _ in range(4000):
            fields = ["".join(source.choices(pieces, k=source.randrange(9))) for _ in range(source.randrange(1, 4))]
            headers = cookie_fields(*fields)
            verdict = read_by.read(headers)
            assert verdict == await starlette_read(headers), fields
            seen.add(verdict)
        return seen

    assert asyncio.run(compare()) == {None, NO_OWNER, Carried(A), Carried(B)}
