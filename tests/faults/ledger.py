"""An app in which every request leaves a trace: what was run, how often, for which session, by which process.

``LEDGER`` names the file that all its processes write to. A session counts its
requests in this process's memory; whoever asks another process gets a wrong count.
``PAUSE`` are seconds for which each request waits outside the session middleware, as in an app
that asks somebody who the caller is. ``SLOW_IMPORT`` are seconds that its import takes, and
``NO_IMPORT`` makes it fail.
"""

from __future__ import annotations

import asyncio
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
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

counts: dict[str, int] = {}
hoard: list[bytes] = []

if os.environ.get("SLOW_IMPORT"):
    time.sleep(float(os.environ["SLOW_IMPORT"]))
if os.environ.get("NO_IMPORT"):
    raise RuntimeError("this app can't be imported")

_ledger = os.open(os.environ["LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666) if "LEDGER" in os.environ else -1


def note(nonce: str) -> None:
    """Write that the request ``nonce`` was run, in one system call, so that no line is torn."""
    if _ledger >= 0:
        os.write(_ledger, f"{nonce} {os.getpid()}\n".encode())


async def count(request: Request) -> Response:
    """Count one request of the session: ``{"session", "count", "pid", "padding"}``.

    Query: ``hold`` (seconds to wait), ``block`` (seconds to hold up the event loop),
    ``size`` (characters of padding), ``stream`` (the reply has no length).
    """
    session = request.session.setdefault("id", uuid.uuid4().hex)
    received = await request.body()
    counts[session] = counts.get(session, 0) + 1
    number = counts[session]
    note(request.headers.get("x-nonce", "-"))
    query = request.query_params
    if "block" in query:
        time.sleep(float(query["block"]))  # noqa: ASYNC251  # the fault that is wanted
    if "hold" in query:
        await asyncio.sleep(float(query["hold"]))
    padding = "x" * int(query.get("size", 0))
    answer = {"session": session, "count": number, "pid": os.getpid(), "received": len(received), "padding": padding}
    whole = JSONResponse(answer)
    if "stream" not in query:
        return whole
    body = bytes(whole.body)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 16384):
            yield body[start : start + 16384]
            await asyncio.sleep(0)

    return StreamingResponse(pieces(), media_type="application/json")


async def leak(request: Request) -> JSONResponse:
    """Keep ``size`` bytes more for ever."""
    hoard.append(os.urandom(int(request.query_params["size"])))
    return JSONResponse({"pid": os.getpid()})


async def fork(request: Request) -> JSONResponse:
    """Leave a child behind that outlives this process; it inherits every descriptor that can be inherited by a fork."""
    child = os.fork()
    if child == 0:
        time.sleep(float(request.query_params.get("seconds", 60)))  # noqa: ASYNC251  # in the child
        os._exit(0)
    return JSONResponse({"pid": os.getpid(), "child": child})


async def who(request: Request) -> JSONResponse:
    """Tell which process answers, without a session."""
    return JSONResponse({"pid": os.getpid()})


async def echo(websocket: WebSocket) -> None:
    """Send back what comes, with the session and this process's count of it."""
    session = websocket.session.get("id", "")
    await websocket.accept()
    async for text in websocket.iter_text():
        await websocket.send_json({"session": session, "count": counts.get(session, 0), "text": text})


class Pause:
    """ASGI middleware that waits before it goes on."""

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self.app = app
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(self.seconds)
        await self.app(scope, receive, send)


outside = [Middleware(Pause, seconds=float(os.environ["PAUSE"]))] if os.environ.get("PAUSE") else []

app = Starlette(
    routes=[
        Route("/count", count, methods=["POST"]),
        Route("/leak", leak, methods=["POST"]),
        Route("/fork", fork, methods=["POST"]),
        Route("/who", who),
        WebSocketRoute("/echo", echo),
    ],
    middleware=[*outside, Middleware(SessionMiddleware, secret_key=os.environ.get("SESSION_SECRET", "ledger"))],
)
