"""Session tokens of hostile callers, alone and beside a cookie that names another owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gym_gunicorn.owner import new_owner_id
from tests.hostile.forging import NO_OWNER_IDS, OWNER_KEY, TOKEN_HEADER, changed, session_cookie, session_token
from tests.hostile.pair import Pair, of, pair

KIB_100 = 100 * 1024

# Tokens that would name the owner, if they were what they seem to be. Each is made of the owner's ID.
INVALID: dict[str, Callable[[str], str]] = {
    "not signed": lambda owner: session_token(of(owner)).partition(".")[0],
    "with an empty signature": lambda owner: session_token(of(owner)).partition(".")[0] + ".",
    "with the signature of another": lambda owner: (
        session_token(of(owner)).partition(".")[0] + "." + session_token({}).partition(".")[2]
    ),
    "changed in its content": lambda owner: changed(session_token(of(owner)), 3),
    "changed in its signature": lambda owner: changed(session_token(of(owner)), -5),
    "truncated by one": lambda owner: session_token(of(owner))[:-1],
    "truncated to half": lambda owner: session_token(of(owner))[: len(session_token(of(owner))) // 2],
    "of a server with another secret": lambda owner: session_token(of(owner), secret="another secret"),
    "signed with another salt": lambda owner: session_token(of(owner), salt="another salt"),
    "that is the session cookie": lambda owner: session_cookie(of(owner)),
    "of 100 KiB, badly signed": lambda owner: changed(session_token({**of(owner), "x": "xy" * KIB_100}), -5),
    "of 100 KiB of dots": lambda owner: "." * KIB_100,
    "that is said to be compressed": lambda owner: "." + session_token(of(owner)),
    "in quotes": lambda owner: f'"{session_token(of(owner))}"',
}


@pytest.mark.parametrize("path", ["/mcp", "/elsewhere"])
@pytest.mark.parametrize("make", INVALID.values(), ids=INVALID.keys())
def test_token_that_is_not_valid_is_handled_where_it_lands_as_none(make: Callable[[str], str], path: str) -> None:
    async def scenario() -> None:
        async with pair() as two:
            answer = await two.ask(token=make(two.owner.owner_id), path=path)
            assert (answer.seen["by"], answer.seen["session"], answer.seen["token"]) == ("other", {}, None)
            assert two.forwards() == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("owner", NO_OWNER_IDS, ids=lambda owner: repr(owner)[:30])
def test_signed_token_whose_owner_is_no_owner_id_is_handled_where_it_lands(owner: object) -> None:
    async def scenario() -> None:
        async with pair() as two:
            tokens: list[object] = [of(owner), {"session_id": owner}]
            if isinstance(owner, str):
                tokens.append({"session_id": f"{owner}-{'0' * 32}"})
            for token in tokens:
                answer = await two.ask(token=session_token(token), path="/mcp")
                assert (answer.seen["by"], answer.seen["token"]) == ("other", token)
            assert two.forwards() == 0

    asyncio.run(scenario())


def test_token_of_a_worker_that_is_not_of_this_server_gets_410() -> None:
    async def scenario() -> None:
        async with pair() as two:
            for path in ("/mcp", "/elsewhere"):
                assert (await two.ask(token=session_token(of(new_owner_id())), path=path)).status == 410

    asyncio.run(scenario())


def test_of_several_tokens_the_one_that_the_app_reads_decides() -> None:
    async def scenario() -> None:
        async with pair() as two:
            owner, other = (session_token(of(worker.owner_id)) for worker in (two.owner, two.other))
            for first, second, by in ((owner, other, "owner"), (other, owner, "other"), ("broken", owner, "other")):
                field = f"{TOKEN_HEADER.upper()}: {second}".encode()
                answer = await two.ask(token=first, fields=[field] * 3, path="/mcp")
                assert answer.seen["by"] == by

    asyncio.run(scenario())


# Both carriers, each naming somebody else


async def by(two: Pair, cookie: str, token: str, path: str) -> str | int:
    answer = await two.ask(cookies=["session=" + cookie], token=token, path=path)
    return str(answer.seen["by"]) if answer.status == 200 else answer.status


@pytest.mark.parametrize(
    ("path", "decides"),
    [
        ("/mcp", "token"),
        ("/mcp/", "token"),
        ("/mcp/deeper/still", "token"),
        ("/mcp?a=/elsewhere", "token"),
        ("/%6d%63p", "token"),
        ("/mcp%2Fdeeper", "token"),
        ("/mcp/../elsewhere", "token"),
        ("/elsewhere", "cookie"),
        ("/mcpx", "cookie"),
        ("/MCP", "cookie"),
        ("//mcp", "cookie"),
        ("/./mcp", "cookie"),
        ("/elsewhere/../mcp", "cookie"),
        ("/elsewhere?/mcp", "cookie"),
        ("/elsewhere/mcp", "cookie"),
        ("/%2Fmcp", "cookie"),
        ("/mcp%00", "cookie"),
    ],
)
def test_where_both_carriers_name_an_owner_the_path_as_the_app_sees_it_says_which_decides(
    path: str, decides: str
) -> None:
    async def scenario() -> None:
        async with pair() as two:
            owner, other, gone = two.owner.owner_id, two.other.owner_id, new_owner_id()
            broken = changed(session_token(of(owner)), -5)
            for cookie, token, by_cookie, by_token in (
                (owner, other, "owner", "other"),
                (other, owner, "other", "owner"),
                (gone, owner, 410, "owner"),
                (owner, gone, "owner", 410),
                ("../../x", owner, "other", "owner"),
                (owner, "../../x", "owner", "other"),
            ):
                found = await by(two, session_cookie(of(cookie)), session_token(of(token)), path)
                assert found == (by_token if decides == "token" else by_cookie), (cookie, token)
            # What is present decides, though it is not valid: nobody comes to another's session by breaking one.
            badly_signed = changed(session_cookie(of(owner)), -5)
            found = await by(two, badly_signed, session_token(of(owner)), path)
            assert found == ("owner" if decides == "token" else "other")
            assert await by(two, session_cookie(of(owner)), broken, path) == (
                "other" if decides == "token" else "owner"
            )

    asyncio.run(scenario())


def test_handler_sees_both_carriers_whichever_decides() -> None:
    async def scenario() -> None:
        async with pair() as two:
            session, token = of(two.owner.owner_id), {OWNER_KEY: two.other.owner_id, "session_id": "x"}
            cookies = ["session=" + session_cookie(session)]
            for path, name in (("/mcp", "other"), ("/elsewhere", "owner")):
                seen = (await two.ask(cookies=cookies, token=session_token(token), path=path)).seen
                assert (seen["by"], seen["session"], seen["token"]) == (name, session, token)

    asyncio.run(scenario())
