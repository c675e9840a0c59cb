"""Finds the session middleware of an app, and places the stamp inside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from gym_gunicorn.carriers import SessionCookie
from gym_gunicorn.stamp import SessionStamp


@dataclass(frozen=True, slots=True)
class Discovered:
    """What was found in an app.

    ``sessions`` is a session middleware like the app's own, from which the carrier
    takes the signer, the cookie's name and ``max_age``, and ``place_stamp`` puts a
    stamp inside the app's own. ``around_problems`` wraps an error as the app's CORS
    middleware would wrap an answer of the app.
    """

    sessions: SessionMiddleware
    place_stamp: Callable[[str, str], None]
    around_problems: Callable[[ASGIApp], ASGIApp]

    def cookie(self, owner_key: str) -> SessionCookie:
        """Return the carrier for the app's session cookie."""
        return SessionCookie(self.sessions.signer, self.sessions.session_cookie, self.sessions.max_age, owner_key)


def discover(app: ASGIApp) -> Discovered | None:
    """Look into ``app`` for a ``SessionMiddleware`` and return what was found.

    Looks through plain ASGI wrappers that expose ``.app``, into the
    ``user_middleware`` of a Starlette or FastAPI app. Of several session
    middlewares around one another the innermost counts, since its session is the
    one that handlers see. Apps mounted in the app are not looked into.
    """
    found: Discovered | None = None
    cors: Callable[[ASGIApp], ASGIApp] = _unchanged
    seen: set[int] = set()
    while id(app) not in seen:
        seen.add(id(app))
        if isinstance(app, SessionMiddleware):
            found = Discovered(app, partial(_wrap, app), cors)
        if isinstance(app, CORSMiddleware):
            cors = _unchanged  # Constructed already: its arguments are not kept.
        if isinstance(app, Starlette):
            for entry in app.user_middleware:
                if _is(entry, CORSMiddleware):
                    cors = partial(_construct, entry)
                if _is(entry, SessionMiddleware):
                    sessions = _construct(entry, _nothing)
                    assert isinstance(sessions, SessionMiddleware)
                    found = Discovered(sessions, partial(_insert, app, entry), cors)
            break
        app = getattr(app, "app", app)
    return None if found is None else Discovered(found.sessions, found.place_stamp, cors)


def _is(entry: Middleware, kind: type) -> bool:
    return isinstance(entry.cls, type) and issubclass(entry.cls, kind)


def _construct(entry: Middleware, app: ASGIApp) -> ASGIApp:
    constructed: ASGIApp = entry.cls(app, *entry.args, **entry.kwargs)
    return constructed


def _insert(app: Starlette, entry: Middleware, owner_id: str, owner_key: str) -> None:
    place = next(place for place, other in enumerate(app.user_middleware) if other is entry)
    app.user_middleware.insert(place + 1, Middleware(SessionStamp, owner_id, owner_key))
    # Built anew, with the stamp, where something had called the app before it was
    # served: a test client in the module, say, and then preload_app.
    app.middleware_stack = None


def _wrap(sessions: SessionMiddleware, owner_id: str, owner_key: str) -> None:
    sessions.app = SessionStamp(sessions.app, owner_id, owner_key)


def _unchanged(app: ASGIApp) -> ASGIApp:
    return app


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """Stands for the app within a middleware that is made only to be read."""
