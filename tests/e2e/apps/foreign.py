"""An app that can't be looked into: a plain function, which brings its stamp itself."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware.sessions import SessionMiddleware
from starlette.types import Receive, Scope, Send

from app import app as counter
from gym_gunicorn import SessionStamp

_inside = SessionMiddleware(
    SessionStamp(Starlette(routes=counter.routes)), secret_key="nobody sees this", session_cookie="foreign"
)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await _inside(scope, receive, send)
