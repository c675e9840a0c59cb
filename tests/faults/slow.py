"""The ledger's app, with handlers that wait until the test lets them go on, and with bodies that are long."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.faults import ledger

PIECE = bytes(range(256)) * 256

# What this process's handlers wait for.
gate = asyncio.Event()
held = poured = swallowed = running = 0


class Running:
    """Counts the handlers that run in this process."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        global running
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        running += 1
        try:
            await self.app(scope, receive, send)
        finally:
            running -= 1


async def hold(request: Request) -> Response:
    """Count as the ledger does, and answer when the gate is open."""
    global held
    answer = await ledger.count(request)
    held += 1
    try:
        await gate.wait()
    finally:
        held -= 1
    return answer


async def let_go(request: Request) -> JSONResponse:
    """Open this process's gate."""
    gate.set()
    return JSONResponse({"pid": os.getpid()})


async def pour(request: Request) -> StreamingResponse:
    """Count one request of the session, and send ``pieces`` times ``PIECE``."""
    session = request.session["id"]
    ledger.counts[session] += 1
    ledger.note(request.headers["x-nonce"])

    async def pieces() -> AsyncIterator[bytes]:
        global poured
        for _ in range(int(request.query_params["pieces"])):
            yield PIECE
            poured += len(PIECE)

    return StreamingResponse(pieces(), media_type="application/octet-stream")


async def swallow(request: Request) -> JSONResponse:
    """Count one request of the session, and read its body piece by piece; with ``held`` when the gate is open."""
    global swallowed
    session = request.session["id"]
    ledger.counts[session] += 1
    number = ledger.counts[session]
    ledger.note(request.headers["x-nonce"])
    if "held" in request.query_params:
        await gate.wait()
    received = 0
    async for piece in request.stream():
        received += len(piece)
        swallowed += len(piece)
    return JSONResponse({"session": session, "count": number, "pid": os.getpid(), "received": received})


async def state(request: Request) -> JSONResponse:
    """Tell what this process's handlers hold, and have sent and read, and how many others run."""
    others = running - 1
    return JSONResponse({"held": held, "poured": poured, "swallowed": swallowed, "running": others})


app = Starlette(
    routes=[
        *ledger.app.routes,
        Route("/hold", hold, methods=["POST"]),
        Route("/let_go", let_go, methods=["POST"]),
        Route("/pour", pour, methods=["POST"]),
        Route("/swallow", swallow, methods=["POST"]),
        Route("/state", state, methods=["POST"]),
        Route("/pid", ledger.who),
    ],
    middleware=[
        Middleware(SessionMiddleware, secret_key=os.environ.get("SESSION_SECRET", "ledger")),
        Middleware(Running),
    ],
)
