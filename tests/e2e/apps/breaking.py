"""The probe's sessions, with handlers that break the process that they run in."""

from __future__ import annotations

import asyncio
import os
import signal

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.e2e.apps.journal import note
from tests.e2e.apps.probe import block, count, hold, lifespan, pid
from tests.e2e.apps.streams import events


async def fork(request: Request) -> JSONResponse:
    """Leave a child that does nothing, and keeps everything that this process has open."""
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    return JSONResponse({"child": child})


async def end(request: Request) -> JSONResponse:
    """End the process, in the way asked for."""
    how = request.query_params["how"]
    note("end", how)
    if how == "os._exit":
        os._exit(7)
    if how == "SIGSEGV":
        os.kill(os.getpid(), signal.SIGSEGV)
    asyncio.get_running_loop().call_soon(throw, how)
    await asyncio.Event().wait()
    return JSONResponse({})


def throw(name: str) -> None:
    raise {"RuntimeError": RuntimeError, "SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt}[name](
        "raised on purpose"
    )


async def throw_here(request: Request) -> JSONResponse:
    throw(request.query_params["what"])
    return JSONResponse({})


async def throw_in_the_loop(request: Request) -> JSONResponse:
    asyncio.get_running_loop().call_soon(throw, request.query_params["what"])
    return JSONResponse({})


app = Starlette(
    routes=[
        Route("/pid", pid),
        Route("/count", count, methods=["POST"]),
        Route("/hold", hold),
        Route("/block", block),
        Route("/events", events),
        Route("/fork", fork),
        Route("/end", end),
        Route("/throw", throw_here),
        Route("/throw_in_the_loop", throw_in_the_loop),
    ],
    middleware=[Middleware(SessionMiddleware, secret_key="of the tests")],
    lifespan=lifespan,
)
