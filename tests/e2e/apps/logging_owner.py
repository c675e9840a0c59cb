"""The probe's sessions, with a log line of the app's own for each request."""

from __future__ import annotations

import logging
import os

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from gym_gunicorn import session_owner
from tests.e2e.apps import probe

# One of those that gunicorn's worker lets through.
log = logging.getLogger("uvicorn.error")


async def count(request: Request) -> JSONResponse:
    log.info("app's own: %s of %s in %s", request.method, session_owner(request.scope), os.getpid())
    return await probe.count(request)


app = Starlette(
    routes=[Route("/pid", probe.pid), Route("/count", count, methods=["POST"])],
    middleware=[Middleware(SessionMiddleware, secret_key="of the tests")],
    lifespan=probe.lifespan,
)
