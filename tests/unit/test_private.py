"""What a private server makes of a sibling that it does not understand."""

from __future__ import annotations

import asyncio
import logging

import pytest
from starlette.types import Message, Receive, Scope, Send

from gym_gunicorn import wire
from gym_gunicorn.private import PrivateApp


def websocket_scope(head: bytes) -> Scope:
    return {"type": "http", "method": "POST", "headers": [(wire.HEAD_FIELD, head)], "state": {}}


HEAD = wire.encode_head(
    {
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
).encode()


def test_frame_that_can_not_be_read_ends_the_websocket(caplog: pytest.LogCaptureFixture) -> None:
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
            await PrivateApp(app)(websocket_scope(HEAD), receive, send)

    with caplog.at_level(logging.ERROR, logger="uvicorn.error"):
        asyncio.run(scenario())
    assert [event["type"] for event in received] == ["websocket.connect", "websocket.disconnect"]
    assert received[1]["code"] == 1011
    assert "can't be read" in caplog.text


@pytest.mark.parametrize("head", [b"x", b"[99]", HEAD.replace(b"[1,", b"[2,", 1)], ids=["nonsense", "odd", "version"])
def test_head_that_can_not_be_read_is_answered_with_502(head: bytes) -> None:
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("the app is not called")

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(PrivateApp(app)(websocket_scope(head), receive, send))
    assert sent[0]["status"] == 502
