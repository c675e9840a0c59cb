"""An app whose handler holds a thread of its worker, which nothing can cancel."""

from __future__ import annotations

import threading

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.e2e.apps.journal import note


def hold(request: Request) -> PlainTextResponse:
    note("hold")
    threading.Event().wait(600)
    return PlainTextResponse("held")


app = Starlette(
    routes=[Route("/hold", hold)], middleware=[Middleware(SessionMiddleware, secret_key="a secret of the tests")]
)
