"""The probe's sessions, and a handler that never reads and is cancelled when its caller leaves."""

from __future__ import annotations

import asyncio

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from gym_gunicorn import CancelOnDisconnect
from tests.e2e.apps.journal import note
from tests.e2e.apps.probe import count, pid


async def compute(request: Request) -> JSONResponse:
    note("compute")
    try:
        await asyncio.Event().wait()
    finally:
        note("cleaned", "up")
    return JSONResponse({})


app = Starlette(
    routes=[Route("/pid", pid), Route("/count", count, methods=["POST"]), Route("/compute", compute)],
    middleware=[Middleware(SessionMiddleware, secret_key="of the tests"), Middleware(CancelOnDisconnect)],
)
