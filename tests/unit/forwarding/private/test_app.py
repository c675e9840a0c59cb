"""What a private server makes of a sibling that it does not understand."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gym_gunicorn.forwarding import wire
from gym_gunicorn.forwarding.cancelled import AnswerCancelled
from gym_gunicorn.forwarding.private.app import EXCHANGE, PrivateApp
from gym_gunicorn.problems import SERVER_STOPPING

OWNER = "0123456789ab"
OTHER = "ba9876543210"
WEBSOCKET: Scope = {
    "type": "websocket",
    "path": "/",
    "raw_path": b"/",
    "query_string": b"",
    "headers": [],
    "scheme": "ws",
    "http_version": "1.1",
    "root_path": "",
    "subprotocols": [],
}
HTTP: Scope = {
    **{key: value for key, value in WEBSOCKET.items() if key != "subprotocols"},
    "type": "http",
    "scheme": "http",
    "method": "GET",
}
HEAD = wire.encode_head(WEBSOCKET)


def over_http(*heads: bytes, owner: str | None = None) -> Scope:
    """Return the scope of a request of a sibling that has come over HTTP, with these values of the head's field."""
    headers = [(b"host", b"owner"), *((wire.HEAD_FIELD, head) for head in heads)]
    if owner is not None:
        headers.append((wire.OWNER_FIELD, owner.encode()))
    return {"type": "http", "method": "POST", "headers": headers, "state": {}}


def over_link(head: bytes) -> Scope:
    """Return the scope that a link's server makes of a request of a sibling."""
    exchange = SimpleNamespace(head=head, began=None, complete=False)
    return {"type": "http", "headers": [], "state": {}, EXCHANGE: exchange}


def answering(scope: Scope, send: Send) -> Scope:
    """Return the scope with ``send`` in its exchange, where it has one."""
    if EXCHANGE in scope:
        scope[EXCHANGE].send = send
    return scope


def in_field(head: bytes) -> bytes:
    return wire.to_field(head).encode("ascii")


WAYS: dict[str, Callable[[bytes], Scope]] = {
    "HTTP": lambda head: over_http(in_field(head)),
    "a link": over_link,
}


@pytest.mark.parametrize("scope", WAYS.values(), ids=WAYS.keys())
def test_frame_that_can_not_be_read_ends_the_websocket(
    scope: Callable[[bytes], Scope], caplog: pytest.LogCaptureFixture
) -> None:
    received: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        received.append(await receive())
        received.append(await receive())

    async def receive() -> Message:
        return {"type": "http.request", "body": b"\xff" * 20, "more_body": True}

    async def send(message: Message) -> None:
        raise AssertionError("the app sends nothing")

    async def scenario() -> None:
        async with asyncio.timeout(20):
            await PrivateApp(AnswerCancelled(app, SERVER_STOPPING))(answering(scope(HEAD), send), receive, send)

    with caplog.at_level(logging.ERROR, logger="uvicorn.error"):
        asyncio.run(scenario())
    assert [event["type"] for event in received] == ["websocket.connect", "websocket.disconnect"]
    assert received[1]["code"] == 1011
    assert "can't be read" in caplog.text


async def no_app(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("the app is not called")


def sent_for(scope: Scope, app: ASGIApp = no_app) -> list[Message]:
    """Return what the worker ``OWNER`` sends for a request."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(
        PrivateApp(AnswerCancelled(app, SERVER_STOPPING), owner_id=OWNER)(answering(scope, send), receive, send)
    )
    return sent


def served_for(scope: Scope) -> tuple[Scope, list[Message]]:
    """Return what the app of the worker ``OWNER`` gets for a request, and what the worker sends."""
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        await send({"type": "http.response.start", "status": 201, "headers": [(b"x", b"\r\n\xff")]})
        await send({"type": "http.response.body"})

    sent = sent_for(scope, app)
    (got,) = seen
    return got, sent


OTHER_VERSION = HEAD.replace(bytes([wire.VERSION]), bytes([wire.VERSION + 1]), 1)
UNREADABLE = {
    "nothing": b"",
    "nonsense": b"x",
    "another list": b"\x91\x63",
    "another version": OTHER_VERSION,
    "a reply": wire.encode_reply({"status": 200}, 7),
    "half a head": HEAD[:-1],
    "a list that does not come": b"\xdd\xff\xff\xff\xff",
    "a list that is too deep": b"\x91" * 100_000,
    "JSON": b'[1,{"type":"http"},"/","",null,null,[]]',
}


@pytest.mark.parametrize("scope", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("head", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_head_that_can_not_be_read_is_answered_with_502(head: bytes, scope: Callable[[bytes], Scope]) -> None:
    assert sent_for(scope(head))[0]["status"] == 502


@pytest.mark.parametrize(
    "scope",
    [
        pytest.param(over_http(HEAD), id="bytes in a field"),
        pytest.param(over_http(in_field(HEAD) + b"\n"), id="more than base64"),
        pytest.param(over_link(in_field(HEAD)), id="base64 over a link"),
    ],
)
def test_head_in_the_form_of_the_other_way_is_answered_with_502(scope: Scope) -> None:
    assert sent_for(scope)[0]["status"] == 502


def test_head_of_another_version_is_logged_with_both_versions(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, logger="uvicorn.error"):
        sent_for(over_link(OTHER_VERSION))
    (record,) = [record for record in caplog.records if record.name == "uvicorn.error"]
    assert f"version {wire.VERSION + 1}" in record.getMessage()
    assert f"reads {wire.VERSION}" in record.getMessage()


@pytest.mark.parametrize("scope", WAYS.values(), ids=WAYS.keys())
def test_app_gets_the_callers_own_request_and_what_the_owner_has(scope: Callable[[bytes], Scope]) -> None:
    callers: Scope = {**HTTP, "headers": [(b"x", b"\xff"), (wire.HEAD_FIELD, b"x")]}
    got, _ = served_for({**scope(wire.encode_head(callers)), "state": {"pool": 1}})
    assert got == {**callers, "client": None, "server": None, "state": {"pool": 1}}


def test_reply_over_http_has_its_head_in_base64_in_a_field() -> None:
    start, body = served_for(over_http(in_field(wire.encode_head(HTTP))))[1]
    ((name, value),) = start["headers"]
    assert (start["status"], name) == (200, wire.REPLY_FIELD)
    message, taken = wire.decode_reply(wire.from_field(value))
    assert message == {"type": "http.response.start", "status": 201, "headers": [(b"x", b"\r\n\xff")]}
    assert taken >= 0
    assert body == {"type": "http.response.body"}


def test_exchange_over_a_link_is_told_since_when_what_is_sent_is_the_apps() -> None:
    scope = over_link(wire.encode_head(HTTP))
    exchange = scope[EXCHANGE]
    seen: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(exchange.began)
        await send({"type": "http.response.start", "status": 201, "headers": [(b"x", b"\r\n\xff")]})

    start = {"type": "http.response.start", "status": 201, "headers": [(b"x", b"\r\n\xff")]}
    assert sent_for(scope, app) == [start]
    assert isinstance(seen[0], int)
    assert exchange.began is None


def test_of_several_heads_the_first_counts() -> None:
    first, second = (in_field(wire.encode_head({**HTTP, "path": path})) for path in ("/first", "/second"))
    assert served_for(over_http(first, second))[0]["path"] == "/first"
    assert served_for(over_http(first, b"x"))[0]["path"] == "/first"
    assert sent_for(over_http(b"x", first))[0]["status"] == 502
    assert sent_for(over_http(b"", first))[0]["status"] == 502


def test_request_without_a_head_is_served_as_it_is() -> None:
    scope = over_http(owner=OTHER)
    got, sent = served_for(scope)
    assert got is scope
    assert sent[0]["status"] == 201


def test_request_that_is_meant_for_this_owner_is_served() -> None:
    assert served_for(over_http(in_field(wire.encode_head(HTTP)), owner=OWNER))[0]["path"] == "/"


@pytest.mark.parametrize(
    "head", [in_field(HEAD), in_field(OTHER_VERSION), b"x"], ids=["its version", "another version", "no base64"]
)
def test_request_that_is_meant_for_another_owner_is_misdirected_whether_it_can_be_read_or_not(head: bytes) -> None:
    sent = sent_for(over_http(head, owner=OTHER))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert (sent[0]["status"], sent[0]["headers"]) == (421, [(b"connection", b"close")])
