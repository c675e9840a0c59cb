"""Finds the session middlewares of an app, and places the stamp inside them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.routing import Host, Mount, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from gym_gunicorn.stamp import SessionStamp

Wrapper = Callable[[ASGIApp], ASGIApp]
MakeStamp = partial[SessionStamp]


@dataclass(frozen=True, slots=True)
class FoundSession:
    """One session middleware of an app.

    ``middleware`` is the app's own or one made like it, to read its signer, cookie name,
    ``max_age``, path and flags from. ``prefix`` is the path below which it is the one
    that handlers see, "" for all paths. ``place_stamp`` puts a stamp inside the app's own.
    """

    prefix: str
    middleware: SessionMiddleware
    place_stamp: Callable[[MakeStamp], None]


@dataclass(frozen=True, slots=True)
class Declaration:
    """What an app says of itself, as ``app.state.gym_gunicorn``.

    ``routed``: whether it keeps state that its requests must reach. The others say where
    its session tokens are, as the settings of the same names do.
    """

    routed: bool = True
    token_header: str | None = None
    token_salt: str = "gym-gunicorn-session-token"
    token_path: str = "/mcp"


def find_sessions(app: ASGIApp) -> Iterator[FoundSession]:
    """Find the session middlewares of ``app``, those of apps mounted in it before its own.

    Looks through plain ASGI wrappers that expose ``.app``, into the middlewares and the
    mounts of Starlette and FastAPI apps. Of several around one another the innermost is
    found, since its session is the one that handlers see.
    """
    yield from _find_below(app, "", set())


def find_cors(app: ASGIApp) -> Wrapper:
    """Return what wraps an answer as the CORS middleware of ``app`` would; without one, nothing does."""
    for layer in _layers(app, set()):
        if isinstance(layer, CORSMiddleware):
            return partial(_around, layer)
        if isinstance(layer, Starlette):
            for entry in layer.user_middleware:
                if _is(entry, CORSMiddleware):
                    return partial(_construct, entry)
    return lambda answer: answer


def find_declaration(app: ASGIApp) -> Declaration:
    """Return what ``app`` says of itself, or what is taken for granted where it says nothing."""
    for layer in _layers(app, set()):
        declaration = getattr(getattr(layer, "state", None), "gym_gunicorn", None)
        if isinstance(declaration, Declaration):
            return declaration
    return Declaration()


def session_middleware(secret_key: str, session_cookie: str, max_age: int | None) -> SessionMiddleware:
    """Return a session middleware to read from, for an app whose own can't be found."""
    return SessionMiddleware(_nothing, secret_key, session_cookie, max_age)


def _layers(app: ASGIApp, seen: set[int]) -> Iterator[ASGIApp]:
    """Yield ``app`` and what it wraps, to the innermost, or to the app of a framework; none that was ``seen``."""
    while id(app) not in seen:
        seen.add(id(app))
        yield app
        if isinstance(app, Starlette | Router):
            return
        app = getattr(app, "app", app)


def _find_below(app: ASGIApp, prefix: str, seen: set[int]) -> Iterator[FoundSession]:
    found: FoundSession | None = None
    for layer in _layers(app, seen):
        if isinstance(layer, SessionMiddleware):
            found = FoundSession(prefix, layer, partial(_wrap, layer))
        if isinstance(layer, Starlette | Router):
            for route in layer.routes:
                # A path with parameters is not one prefix.
                if isinstance(route, Mount) and "{" not in route.path:
                    yield from _find_below(route.app, prefix + route.path, seen)
                elif isinstance(route, Host):
                    yield from _find_below(route.app, prefix, seen)
        if isinstance(layer, Starlette):
            for entry in layer.user_middleware:
                if _is(entry, SessionMiddleware):
                    middleware = _construct(entry, _nothing)
                    assert isinstance(middleware, SessionMiddleware)
                    found = FoundSession(prefix, middleware, partial(_insert, layer, entry))
    if found is not None:
        yield found


def _is(entry: Middleware, kind: type) -> bool:
    return isinstance(entry.cls, type) and issubclass(entry.cls, kind)


def _around(layer: CORSMiddleware, app: ASGIApp) -> ASGIApp:
    other = copy.copy(layer)
    other.app = app
    return other


def _construct(entry: Middleware, app: ASGIApp) -> ASGIApp:
    constructed: ASGIApp = entry.cls(app, *entry.args, **entry.kwargs)
    return constructed


def _insert(app: Starlette, entry: Middleware, make_stamp: MakeStamp) -> None:
    place = next(place for place, other in enumerate(app.user_middleware) if other is entry)
    app.user_middleware.insert(place + 1, Middleware(make_stamp.func, *make_stamp.args, **make_stamp.keywords))
    # Built anew, with the stamp, where something has called the app before it is served:
    # a test client in its module, and then preload_app.
    app.middleware_stack = None


def _wrap(middleware: SessionMiddleware, make_stamp: MakeStamp) -> None:
    middleware.app = make_stamp(middleware.app)


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """Stand for the app within a middleware that is made only to be read."""
