"""The app that every set-up serves: a counter for each session in this process's memory, in several sizes.

State begins at a session's first count, not with its cookie, so that a balancer that hashes the
cookie is right too: it can't know where a session will go before the cookie is there.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from benchmarks.content import COMPUTED_SECONDS, EVENTS, PATTERN, event

counts: dict[str, int] = {}

# Made once: a reply then costs its way to the caller, and not its making.
_replies: dict[int, bytes] = {}


def _count(session_id: str) -> int:
    counts[session_id] = counts.get(session_id, 0) + 1
    return counts[session_id]


async def session(request: Request) -> JSONResponse:
    """Make a session, and keep nothing of it."""
    request.session["id"] = uuid.uuid4().hex
    return JSONResponse({"session_id": request.session["id"]})


async def nothing(request: Request) -> JSONResponse:
    """Answer within a session, and keep nothing of it."""
    return JSONResponse({"session_id": request.session["id"], "pid": os.getpid()})


async def where(request: Request) -> JSONResponse:
    """Tell which process handles this."""
    return JSONResponse({"pid": os.getpid()})


async def hold(request: Request) -> JSONResponse:
    """Hold this worker's loop up, so that its siblings accept the connections that come meanwhile."""
    time.sleep(0.05)  # noqa: ASYNC251  # it is what this is for
    return JSONResponse({"pid": os.getpid()})


async def count(request: Request) -> JSONResponse:
    session_id = request.session["id"]
    body = await request.json()
    return JSONResponse({"session_id": session_id, "count": _count(session_id), "echo": body["text"]})


async def upload(request: Request) -> JSONResponse:
    session_id = request.session["id"]
    same = PATTERN.startswith(await request.body())
    return JSONResponse({"session_id": session_id, "count": _count(session_id), "same": same})


async def reply(request: Request) -> Response:
    size = request.path_params["size"]
    if size not in _replies:
        _replies[size] = PATTERN[:size]
    return Response(_replies[size], headers={"x-count": str(_count(request.session["id"]))})


async def events(request: Request) -> StreamingResponse:
    async def produced() -> AsyncIterator[bytes]:
        for number in range(EVENTS):
            yield event(number)

    headers = {"x-count": str(_count(request.session["id"]))}
    return StreamingResponse(produced(), media_type="text/event-stream", headers=headers)


async def compute(request: Request) -> JSONResponse:
    end = time.thread_time() + COMPUTED_SECONDS
    while time.thread_time() < end:
        sum(range(1000))
    session_id = request.session["id"]
    return JSONResponse({"session_id": session_id, "count": _count(session_id)})


async def echo(websocket: WebSocket) -> None:
    session_id = websocket.session["id"]
    await websocket.accept()
    try:
        while True:
            text = await websocket.receive_text()
            await websocket.send_text(f"{text} {_count(session_id)}")
    except WebSocketDisconnect:
        pass


app = Starlette(
    routes=[
        Route("/session", session, methods=["POST"]),
        Route("/nothing", nothing, methods=["POST"]),
        Route("/where", where, methods=["POST"]),
        Route("/hold", hold, methods=["POST"]),
        Route("/count", count, methods=["POST"]),
        Route("/upload", upload, methods=["POST"]),
        Route("/reply/{size:int}", reply),
        Route("/events", events),
        Route("/compute", compute, methods=["POST"]),
        WebSocketRoute("/echo", echo),
    ],
    middleware=[Middleware(SessionMiddleware, secret_key="for the benchmark alone")],
)
