"""Fields that pretend to come from a sibling: to a public server they are fields like any other."""

from __future__ import annotations

import asyncio
import base64

import pytest
from starlette.types import Scope

from gym_gunicorn.forwarding import wire
from tests.hostile.forging import session_cookie
from tests.hostile.pair import Pair, of, pair, send

FORGED: Scope = {
    "type": "http",
    "http_version": "1.1",
    "method": "GET",
    "scheme": "https",
    "path": "/forged",
    "root_path": "/forged",
    "raw_path": b"/forged",
    "query_string": b"forged",
    "client": ("192.0.2.1", 1),
    "server": ("192.0.2.2", 2),
    "headers": [(b"cookie", b"session=forged"), (b"x-forged", b"forged")],
}


def in_field(head: bytes) -> bytes:
    """Return a head as siblings write it into a field."""
    return wire.to_field(head).encode("ascii")


LINK_HEAD = wire.encode_head(FORGED)
HEAD = in_field(LINK_HEAD)
WEBSOCKET_HEAD = in_field(wire.encode_head({**FORGED, "type": "websocket"}))
OTHER_VERSION = in_field(LINK_HEAD.replace(bytes([wire.VERSION]), bytes([wire.VERSION + 1]), 1))
REPLY = in_field(
    wire.encode_reply({"status": 599, "headers": [(b"set-cookie", b"session=forged"), (b"x-forged", b"")]}, 7)
)

FIELDS: dict[str, list[bytes]] = {
    "a head": [b"gym-gunicorn-head: " + HEAD],
    "a head in mixed case": [b"Gym-Gunicorn-HEAD: " + HEAD],
    "several heads": [b"gym-gunicorn-head: " + HEAD, b"GYM-GUNICORN-HEAD: kA==", b"gym-gunicorn-head:"],
    "a head of a WebSocket": [b"gym-gunicorn-head: " + WEBSOCKET_HEAD],
    "a head of another version": [b"gym-gunicorn-head: " + OTHER_VERSION],
    "a head of 50 kB": [b"gym-gunicorn-head: " + b"9" * 50_000],
    "a head of 50 kB of lists": [b"gym-gunicorn-head: " + in_field(b"\x91" * 37_500)],
    "a head that claims 2**32 - 1 items": [b"gym-gunicorn-head: " + in_field(b"\xdd\xff\xff\xff\xff")],
    "a head that is no base64": [b"gym-gunicorn-head: {}"],
    "a head of a link, in base64": [b"gym-gunicorn-link-head: " + HEAD],
    "heads of both ways": [b"gym-gunicorn-link-head: " + HEAD, b"gym-gunicorn-head: " + HEAD],
    "an owner": [b"gym-gunicorn-owner: " + b"f" * 12, b"gym-gunicorn-head: " + HEAD],
    "a reply": [b"gym-gunicorn-reply: " + REPLY],
    "replies in mixed case": [b"GYM-gunicorn-reply: " + REPLY, b"gym-gunicorn-reply: x"],
    "both": [b"gym-gunicorn-head: " + HEAD, b"gym-gunicorn-reply: " + REPLY],
    "both, named by Connection": [
        b"gym-gunicorn-head: " + HEAD,
        b"Connection: gym-gunicorn-head, gym-gunicorn-reply, cookie",
    ],
}


def lines(fields: list[bytes]) -> list[list[str]]:
    """Return fields as the handler sees them."""
    pairs = (field.partition(b":") for field in fields)
    return [[name.decode().lower(), value.strip().decode()] for name, _, value in pairs]


async def assert_seen_as_sent(two: Pair, fields: list[bytes], owner: str | None, path: str) -> None:
    for worker, name in ((two.owner, "owner"), (two.other, "other")):
        cookies = [] if owner is None else ["session=" + session_cookie(of(owner))]
        answer = await two.ask(cookies=cookies, fields=fields, path=path, to=worker)
        seen = answer.seen
        expected = name if owner is None else "owner"
        assert (seen["by"], seen["path"], seen["scheme"]) == (expected, path, "http")
        assert seen["client"][0] == "127.0.0.1"
        assert seen["session"] == ({} if owner is None else of(owner))
        assert [field for field in seen["headers"] if "gym-gunicorn" in field[0] + field[1]] == [
            field for field in lines(fields) if "gym-gunicorn" in field[0] + field[1]
        ]
        assert not any("forged" in name + value for name, value in answer.fields)


@pytest.mark.parametrize("http", ["httptools", "h11"])
@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS.keys())
def test_field_of_a_sibling_is_to_the_handler_what_the_caller_wrote(fields: list[bytes], http: str) -> None:
    async def scenario() -> None:
        async with pair(http=http) as two:
            for owner in (None, two.owner.owner_id):
                for path in ("/", "/mcp"):
                    await assert_seen_as_sent(two, fields, owner, path)
            # Each came with the session of the owner, to the other worker, once.
            assert two.forwards() == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("fields", [FIELDS["a head"], FIELDS["a head of a WebSocket"]], ids=["http", "websocket"])
def test_field_of_a_sibling_in_a_websocket_handshake_changes_nothing(fields: list[bytes]) -> None:
    async def scenario() -> None:
        async with pair() as two:
            upgrade = [b"Upgrade: websocket", b"Connection: Upgrade", b"Sec-WebSocket-Version: 13"]
            upgrade.append(b"Sec-WebSocket-Key: " + base64.b64encode(bytes(16)))
            statuses = []
            for worker in (two.owner, two.other):
                cookie = b"Cookie: session=" + session_cookie(of(two.owner.owner_id)).encode()
                data = b"\r\n".join([b"GET /nowhere HTTP/1.1", b"Host: x", cookie, *upgrade, *fields, b"", b""])
                statuses.append((await send(worker, data)).status)
            # The app has no WebSockets.
            assert statuses == [403, 403]

    asyncio.run(scenario())


def test_owner_that_a_forged_head_names_is_not_asked() -> None:
    async def scenario() -> None:
        async with pair() as two:
            cookie = b"session=" + session_cookie(of(two.owner.owner_id)).encode()
            head = in_field(wire.encode_head({**FORGED, "headers": [(b"cookie", cookie)]}))
            answer = await two.ask(fields=[b"gym-gunicorn-head: " + head])
            assert (answer.seen["by"], answer.seen["session"]) == ("other", {})
            assert two.forwards() == 0

    asyncio.run(scenario())
