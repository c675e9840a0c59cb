"""A handler that only sends over a forwarded WebSocket learns that its caller has left."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from tests.workers import two, until


@pytest.mark.parametrize("messages", [0, 1, 2, 50], ids=lambda messages: f"{messages} messages that it never reads")
@pytest.mark.parametrize("leave", ["closes", "breaks off"])
def test_handler_that_only_sends_ends_when_its_caller_has_left(messages: int, leave: str) -> None:
    ended: list[str] = []

    async def seed(request: Request) -> PlainTextResponse:
        request.session["session_id"] = "x"
        return PlainTextResponse("")

    async def stream(websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            while True:
                await websocket.send_text("tick")
                await asyncio.sleep(0.01)
        finally:
            ended.append("ended")

    def make_app() -> Starlette:
        return Starlette(
            routes=[Route("/seed", seed), WebSocketRoute("/stream", stream)],
            middleware=[Middleware(SessionMiddleware, secret_key="a secret of the tests")],
        )

    async def scenario() -> None:
        async with two(make_app) as (owner, other), aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as http:
            async with http.get(owner.url + "/seed") as response:
                cookie = response.headers["Set-Cookie"].partition(";")[0]
            websocket = await http.ws_connect(other.url + "/stream", headers={"Cookie": cookie})
            await websocket.receive()
            for _ in range(messages):
                await websocket.send_str("never read")
            if leave == "closes":
                await websocket.close()
            else:
                assert websocket._conn is not None
                websocket._conn.close()
            await until(lambda: ended == ["ended"])
            assert owner.routed is not None
            state = owner.routed.private.state
            await until(lambda: not state.tasks)

    asyncio.run(scenario())
