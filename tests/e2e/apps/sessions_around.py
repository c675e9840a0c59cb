"""The quick-start app's routes, with SessionMiddleware around the app instead of in it."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware.sessions import SessionMiddleware

from app import app as counter

app = SessionMiddleware(Starlette(routes=counter.routes), secret_key="around", session_cookie="round")
