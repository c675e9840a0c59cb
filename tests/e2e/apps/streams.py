"""The probe's sessions, with event streams and WebSockets."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from tests.e2e.apps.journal import note, released
from tests.e2e.apps.probe import count, hold, lifespan, pid


async def events(request: Request) -> StreamingResponse:
    """An event now, and no end."""

    async def stream() -> AsyncIterator[str]:
        try:
            yield f"data: {os.getpid()}\n\n"
            await asyncio.Event().wait()
        finally:
            note("the stream is cleaned up")

    return StreamingResponse(stream(), media_type="text/event-stream")


async def talk(websocket: WebSocket) -> None:
    """Send every message back, after this process's pid."""
    await websocket.accept()
    await websocket.send_text(str(os.getpid()))
    async for message in websocket.iter_text():
        await websocket.send_text(message)
    note("the WebSocket is closed")


async def stubborn(websocket: WebSocket) -> None:
    """Stay after the caller has gone."""
    await websocket.accept()
    await websocket.send_text(str(os.getpid()))
    try:
        await released("never")
    finally:
        note("the WebSocket is cleaned up")


app = Starlette(
    routes=[
        Route("/pid", pid),
        Route("/count", count, methods=["POST"]),
        Route("/hold", hold),
        Route("/events", events),
        WebSocketRoute("/talk", talk),
        WebSocketRoute("/stubborn", stubborn),
    ],
    middleware=[Middleware(SessionMiddleware, secret_key="of the tests")],
    lifespan=lifespan,
)
