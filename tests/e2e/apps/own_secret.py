"""An app whose secret is the environment's, or, where it has none, made in each process that imports it."""

from __future__ import annotations

import os
import secrets

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.routing import Route

from tests.e2e.apps.journal import note
from tests.e2e.apps.probe import count, hold, lifespan, pid

secret = os.environ.get("SECRET") or secrets.token_hex()
note("secret", secret)

app = Starlette(
    routes=[Route("/pid", pid), Route("/count", count, methods=["POST"]), Route("/hold", hold)],
    middleware=[Middleware(SessionMiddleware, secret_key=secret, session_cookie=os.environ.get("COOKIE", "session"))],
    lifespan=lifespan,
)
