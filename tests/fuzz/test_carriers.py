"""The readers of cookies and tokens, given anything."""

from __future__ import annotations

import json
from base64 import b64encode

from hypothesis import example, find, given
from hypothesis import strategies as st

from tests.fuzz import properties
from tests.fuzz.oracle import ABSENT
from tests.fuzz.properties import KEY, NOW
from tests.fuzz.strategies import COOKIE_FIELDS, OWNER_IDS, TOKEN_FIELDS, cookie_payloads, fuzzed, token_payloads

AGES = st.sampled_from([0, 0, 0, 1, -1, 3599, 3600, 3601, -3600, 10**9])
MAX_AGES = st.sampled_from([3600, 3600, 1, None])
# The last second that a datetime can say. A cookie signed after it is none, though Starlette
# takes it where it has no max_age; no clock is that far ahead.
END = 253_402_300_799


@fuzzed()
@given(COOKIE_FIELDS, AGES, MAX_AGES)
def test_any_cookie_fields_are_read_as_by_starlette(
    fields: list[tuple[bytes, bytes]], age: int, max_age: int | None
) -> None:
    properties.cookies_are_read_as_by_starlette(fields, age, max_age)


@fuzzed()
@given(cookie_payloads(), st.sampled_from([NOW, NOW, NOW, NOW - 3601, NOW + 1, 0, END]), MAX_AGES)
@example(b"[" * 100_000, NOW, 3600)
@example(b64encode(b"[" * 100_000), NOW, 3600)
@example(b64encode(b'{"gym_worker": ' + b"9" * 10_000 + b"}"), NOW, 3600)
@example(b64encode(b'{"gym_worker": "aaaaaaaaaaaa"}\0'), NOW, 3600)
@example(b64encode(b'{"gym_worker": 1e999}'), NOW, 3600)
def test_whatever_is_validly_signed_in_a_cookie_is_read_as_by_starlette(
    payload: bytes, signed_at: int, max_age: int | None
) -> None:
    properties.signed_sessions_are_read_as_by_starlette(payload, signed_at, max_age)


@fuzzed()
@given(st.integers(0, 2**64 - 1))
def test_cookie_of_any_time_is_read_as_by_starlette(signed_at: int) -> None:
    payload = b64encode(json.dumps({KEY: "a" * 12}).encode())
    properties.signed_sessions_are_read_as_by_starlette(payload, signed_at)


@fuzzed()
@given(TOKEN_FIELDS)
def test_any_token_fields_are_read_as_by_itsdangerous(fields: list[tuple[bytes, bytes]]) -> None:
    properties.tokens_are_read_as_by_itsdangerous(fields)


@fuzzed()
@given(token_payloads())
@example(b"." + b"A" * 1000)
@example(b"W" * 100_000)
def test_whatever_is_validly_signed_in_a_token_is_read_as_by_itsdangerous(payload: bytes) -> None:
    properties.signed_payloads_are_read_as_by_itsdangerous(payload)


@fuzzed(0.25)
@given(OWNER_IDS)
def test_every_owner_id_is_read_from_a_cookie_and_a_token(owner: str) -> None:
    payload = json.dumps({KEY: owner}).encode()
    assert properties.signed_sessions_are_read_as_by_starlette(b64encode(payload)) == owner
    dumped = properties.SERIALIZER.dump_payload({KEY: owner})
    assert properties.signed_payloads_are_read_as_by_itsdangerous(dumped) == owner


def test_fuzzed_fields_reach_every_verdict() -> None:
    def cookies(verdict: object) -> None:
        find(COOKIE_FIELDS, lambda fields: properties.cookies_are_read_as_by_starlette(fields) == verdict)

    def tokens(verdict: object) -> None:
        find(TOKEN_FIELDS, lambda fields: properties.tokens_are_read_as_by_itsdangerous(fields) == verdict)

    for reach in (cookies, tokens):
        for verdict in (ABSENT, None, "a" * 12, "b" * 12):
            reach(verdict)
