"""Cookies of hostile callers: whatever they hold, no other worker hears of them, and the app's own check applies."""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import Callable

import pytest

from gym_gunicorn.owner import new_owner_id
from tests.hostile.forging import DAY, NO_OWNER_IDS, OWNER_KEY, changed, session_cookie
from tests.hostile.pair import MAX_AGE, Answer, Pair, of, pair

KIB_100 = 100 * 1024

# Cookies that would name the owner, if they were what they seem to be. Each is made of the owner's ID.
INVALID: dict[str, Callable[[str], str]] = {
    "not signed": lambda owner: b64encode(b'{"gym_worker": "%s"}' % owner.encode()).decode(),
    "with an empty signature": lambda owner: session_cookie(of(owner)).rpartition(".")[0] + ".",
    "with the signature of another": lambda owner: (
        session_cookie(of(owner)).rpartition(".")[0] + "." + session_cookie({"n": 1}).rpartition(".")[2]
    ),
    "with another's content under a signature": lambda owner: (
        b64encode(b'{"gym_worker": "%s"}' % owner.encode()).decode() + "." + session_cookie({}).partition(".")[2]
    ),
    "changed in its content": lambda owner: changed(session_cookie(of(owner)), 3),
    "changed in its signature": lambda owner: changed(session_cookie(of(owner)), -5),
    "with a later time": lambda owner: _later(session_cookie(of(owner), age=MAX_AGE + 60)),
    "truncated by one": lambda owner: session_cookie(of(owner))[:-1],
    "truncated to its content": lambda owner: session_cookie(of(owner)).partition(".")[0],
    "truncated to half": lambda owner: session_cookie(of(owner))[: len(session_cookie(of(owner))) // 2],
    "expired": lambda owner: session_cookie(of(owner), age=MAX_AGE + 60),
    "expired long ago": lambda owner: session_cookie(of(owner), age=50 * 365 * DAY),
    "of a server with another secret": lambda owner: session_cookie(of(owner), secret="another secret"),
    "of a server with no secret": lambda owner: session_cookie(of(owner), secret=""),
    "signed with another salt": lambda owner: session_cookie(of(owner), salt="another salt"),
    "signed with the salt of tokens": lambda owner: session_cookie(of(owner), salt="itsdangerous"),
    "of 100 KiB, badly signed": lambda owner: changed(session_cookie({**of(owner), "x": "x" * KIB_100}), 7),
    "of 100 KiB, of another secret": lambda owner: session_cookie({**of(owner), "x": "x" * KIB_100}, secret="no"),
    "of 100 KiB of dots": lambda owner: "." * KIB_100,
    "of 100 KiB after it": lambda owner: session_cookie(of(owner)) + "A" * KIB_100,
}


def _later(cookie: str) -> str:
    content, _, signature = cookie.split(".")
    return ".".join([content, session_cookie({}).split(".")[1], signature])


def to_other(cookie: str | list[str]) -> tuple[Answer, int, str]:
    """Return what the other worker answers to a cookie, how many requests it passed on, and its owner ID."""

    async def scenario() -> tuple[Answer, int, str]:
        async with pair() as two:
            answer = await two.ask(cookies=[cookie] if isinstance(cookie, str) else cookie)
            return answer, two.forwards(), two.other.owner_id

    return asyncio.run(scenario())


@pytest.mark.parametrize("make", INVALID.values(), ids=INVALID.keys())
def test_cookie_that_is_not_valid_is_handled_where_it_lands_as_no_session(make: Callable[[str], str]) -> None:
    async def scenario() -> None:
        async with pair() as two:
            answer = await two.ask(cookies=["session=" + make(two.owner.owner_id)])
            assert (answer.seen["by"], answer.seen["session"]) == ("other", {})
            assert answer.set_session is None
            assert two.forwards() == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("age", [0, DAY, MAX_AGE - 60])
def test_cookie_that_is_old_and_not_expired_reaches_its_owner(age: int) -> None:
    async def scenario() -> None:
        async with pair() as two:
            answer = await two.ask(cookies=["session=" + session_cookie(of(two.owner.owner_id), age=age)])
            assert (answer.seen["by"], answer.seen["session"]) == ("owner", of(two.owner.owner_id))

    asyncio.run(scenario())


def test_cookie_that_is_replayed_after_it_expired_is_no_session_to_a_worker_that_has_believed_it() -> None:
    async def scenario() -> None:
        async with pair() as two:
            assert two.other.routed is not None
            (carrier,) = [
                placed.carrier for placed in two.other.routed.router.carriers if hasattr(placed.carrier, "max_age")
            ]
            cookie = session_cookie(of(two.owner.owner_id), age=MAX_AGE - 60)
            assert (await two.ask(cookies=["session=" + cookie])).seen["by"] == "owner"
            # As if two minutes had passed, for the router that remembers the cookie.
            carrier._signer.get_timestamp = lambda: int(time.time()) + 120  # type: ignore[attr-defined]  # no part of a Carrier
            answer = await two.ask(cookies=["session=" + cookie])
            assert answer.seen["by"] == "other"
            assert two.forwards() == 1

    asyncio.run(scenario())


def test_cookie_of_100_kib_that_is_valid_reaches_its_owner() -> None:
    async def scenario() -> None:
        async with pair() as two:
            session = {**of(two.owner.owner_id), "x": "x" * KIB_100}
            answer = await two.ask(cookies=["session=" + session_cookie(session)])
            assert (answer.seen["by"], answer.seen["session"]) == ("owner", session)

    asyncio.run(scenario())


@pytest.mark.parametrize("owner", NO_OWNER_IDS, ids=lambda owner: repr(owner)[:30])
def test_signed_session_whose_owner_is_no_owner_id_is_adopted_where_it_lands(owner: object) -> None:
    answer, forwards, other = to_other("session=" + session_cookie(of(owner)))
    assert (answer.seen["by"], answer.seen["session"]) == ("other", of(owner))
    assert answer.set_session == of(other)
    assert forwards == 0


def test_session_of_a_worker_that_is_not_of_this_server_gets_410_and_is_served_by_nobody() -> None:
    answer, forwards, _ = to_other("session=" + session_cookie(of(new_owner_id())))
    assert answer.status == 410
    assert dict(answer.fields)["cache-control"] == "no-store"
    # It was tried, where a socket of that name would be.
    assert forwards == 1


# Many cookies


async def _by(two: Pair, cookies: list[str]) -> str:
    return str((await two.ask(cookies=cookies)).seen["by"])


def test_of_many_cookies_of_the_same_name_the_last_decides() -> None:
    async def scenario() -> None:
        async with pair() as two:
            owner = "session=" + session_cookie(of(two.owner.owner_id))
            other = "session=" + session_cookie(of(two.other.owner_id))
            broken = changed(owner, -5)
            for last, by in ((owner, "owner"), (other, "other"), (broken, "other"), ("session=", "other")):
                for before in ([other, broken] * 20, [owner] * 40, [broken] * 40):
                    assert await _by(two, [*before, last]) == by
                    assert await _by(two, ["; ".join([*before, last])]) == by

    asyncio.run(scenario())


def test_five_hundred_cookies_of_the_same_name_are_read_as_the_app_reads_them() -> None:
    async def scenario() -> None:
        async with pair() as two:
            cookies = [session_cookie({"n": number, OWNER_KEY: two.owner.owner_id}) for number in range(500)]
            answer = await two.ask(cookies=["; ".join(f"session={cookie}" for cookie in cookies[:400])])
            assert (answer.seen["by"], answer.seen["session"]["n"]) == ("owner", 399)
            answer = await two.ask(cookies=[f"session={cookie}" for cookie in cookies])
            assert (answer.seen["by"], answer.seen["session"]["n"]) == ("owner", 499)

    asyncio.run(scenario())


def test_cookies_of_similar_names_and_in_other_fields_decide_nothing() -> None:
    async def scenario() -> None:
        async with pair() as two:
            owner = session_cookie(of(two.owner.owner_id))
            cookies = [f"{name}={owner}" for name in ("Session", "session2", "$session", "session[]", "__Host-session")]
            fields = [f"{name}: session={owner}".encode() for name in ("Cookie2", "Set-Cookie", "X-Cookie", "Cookie_")]
            answer = await two.ask(cookies=[*cookies, "; ".join(cookies)], fields=fields)
            assert (answer.seen["by"], answer.seen["session"]) == ("other", {})
            assert two.forwards() == 0

    asyncio.run(scenario())
