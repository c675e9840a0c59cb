"""What somebody pastes: whose session it is, and nothing else that it holds."""

from __future__ import annotations

import json
from base64 import b64encode

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from itsdangerous import TimestampSigner, URLSafeSerializer, URLSafeTimedSerializer

from gym_gunicorn.cli.decoding import Decoded, decode
from gym_gunicorn.owner import new_owner_id, new_session_id

OWNER = "3f2a91c04b7e"
KEY = "gym_worker"


def cookie(session: object) -> str:
    """Return a session cookie as Starlette writes it."""
    return TimestampSigner("secret").sign(b64encode(json.dumps(session).encode())).decode()


def token(data: object) -> str:
    written = URLSafeSerializer("secret", "salt").dumps(data)
    assert isinstance(written, str)
    return written


def owners(text: str, key: str = KEY) -> list[str | None]:
    return [carrier.owner for carrier in decode(text, key)]


COOKIE = cookie({"user": "someone", KEY: OWNER})
# With padding in the middle, and with signs of the base64 that is not for URLs.
PADDED = cookie({"user": "x", KEY: OWNER})
SIGNS = cookie({"user": "???>>>~~~", KEY: OWNER})


def test_the_examples_are_the_hard_ones() -> None:
    assert "=" in PADDED + COOKIE
    assert set("+/") & set(SIGNS)


@pytest.mark.parametrize("value", [COOKIE, PADDED, SIGNS], ids=["plain", "padded", "signs"])
@pytest.mark.parametrize(
    "form",
    [
        "{}",
        "  {}\n",
        '"{}"',
        "session={}",
        "session={}; path=/; Max-Age=1209600; httponly; samesite=lax",
        'session="{}"; Path=/',
        "Set-Cookie: session={}; path=/; Max-Age=1209600; httponly; samesite=lax",
        "set-cookie: session={}; expires=Thu, 01 Jan 2099 00:00:00 GMT",
        "Cookie: theme=dark; session={}; consent=1",
        "cookie: session={}",
        "-H 'Cookie: session={}'",
        "#HttpOnly_127.0.0.1\tFALSE\t/\tFALSE\t1797207263\tsession\t{}",
    ],
)
def test_session_cookie_is_found_in_whatever_it_was_copied_with(value: str, form: str) -> None:
    (found,) = decode(form.format(value), KEY)
    assert (found.kind, found.owner) == ("session cookie", OWNER)
    assert found.signed is not None


@pytest.mark.parametrize("form", ["{}", "X-Session-Token: {}", "Authorization: Bearer {}", '"{}"', "token={}"])
@pytest.mark.parametrize(
    "data",
    [
        {"gym_worker": OWNER, "session_id": "whatever"},
        {"session_id": new_session_id(OWNER)},
        {"sid": new_session_id(OWNER)},
        {"gym_worker": OWNER, "long": "x" * 2000},
    ],
    ids=["owner", "session ID", "another key", "compressed"],
)
def test_session_token_is_found_in_whatever_it_was_copied_with(data: object, form: str) -> None:
    (found,) = decode(form.format(token(data)), KEY)
    assert found == Decoded("session token", OWNER)


def test_long_token_is_compressed_and_read_all_the_same() -> None:
    assert token({"gym_worker": OWNER, "long": "x" * 2000}).startswith(".")


def test_token_with_a_time_is_read_too() -> None:
    written = URLSafeTimedSerializer("secret").dumps({KEY: OWNER})
    assert isinstance(written, str)
    assert set(owners(written)) == {OWNER}


def test_owner_id_and_session_id_are_read_as_they_are() -> None:
    assert decode(f" {OWNER}\n", KEY) == [Decoded("owner ID", OWNER)]
    assert decode(new_session_id(OWNER), KEY) == [Decoded("session ID", OWNER)]


def test_session_of_an_app_with_another_owner_key_is_read_with_that_alone() -> None:
    value = cookie({"home": OWNER})
    assert owners(value, "home") == [OWNER]
    (found,) = decode(value, KEY)
    assert found.owner is None
    assert found.elsewhere


@pytest.mark.parametrize(
    "session", [{}, {"user": "x"}, {KEY: 5}, {KEY: OWNER.upper()}, {KEY: OWNER + "0"}, {KEY: None}]
)
def test_session_that_names_no_owner_is_known_for_one(session: dict[str, object]) -> None:
    (found,) = decode(cookie(session), KEY)
    assert (found.kind, found.owner, found.elsewhere) == ("session cookie", None, False)


def test_cookies_that_name_no_owner_are_passed_over_where_another_does() -> None:
    assert owners(f"Cookie: other={cookie({'a': 1})}; session={COOKIE}") == [OWNER]


def test_two_sessions_are_both_found() -> None:
    other = new_owner_id()
    assert set(owners(f"Cookie: a={COOKIE}; b={cookie({KEY: other})}")) == {OWNER, other}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "session",
        "session=",
        "3f2a91c04b7",
        "a.b.c",
        "..",
        "...",
        COOKIE.split(".")[0],
        COOKIE[10:],
        cookie([1, 2]),
        cookie("text"),
        token([1]),
        "eyJhbGciOiJub25lIn0.e30.!",
        "é" * 50,
        "\0\x1b[31m",
    ],
    ids=lambda text: f"{len(text)} letters",
)
def test_what_is_no_carrier_is_none(text: str) -> None:
    assert owners(text) in ([], [None])


def test_deep_nesting_is_no_carrier() -> None:
    payload = b64encode(b"[" * 100_000).decode()
    assert decode(f"{payload}.a.b", KEY) == []
    assert decode(f"{payload}.b", KEY) == []


@given(st.text())
def test_no_text_is_too_odd(text: str) -> None:
    decode(text, KEY)


@given(st.binary(), st.text("abcXYZ019-_=", max_size=8))
@example(b"{}", "0").via("a time that is no base64")
def test_no_payload_is_too_odd(payload: bytes, time: str) -> None:
    for carrier in decode(f"{b64encode(payload).decode()}.{time}.signature", KEY):
        assert carrier.owner is None or carrier.owner.encode() in payload


def test_what_is_found_holds_nothing_of_what_else_the_session_held() -> None:
    value = cookie({"password": "hunter2", KEY: OWNER})
    assert "hunter2" not in repr(decode(value, KEY))
    assert "secret" not in repr(decode(value, KEY))
