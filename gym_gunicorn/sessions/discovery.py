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
from starlette.routing import Host, Match, Mount, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from gym_gunicorn.sessions.stamp import SessionStamp

Wrapper = Callable[[ASGIApp], ASGIApp]
MakeStamp = partial[SessionStamp]


@dataclass(frozen=True, slots=True)
class FoundSession:
    """One session middleware of an app.

    ``middleware`` is the app's own or one made like it, to read its signer, cookie name,
    ``max_age``, path and flags from. ``routes`` are the mounts and hosts that lead to it,
    the outermost first. ``place_stamp`` puts a stamp inside the app's own, once.
    """

    routes: tuple[Mount | Host, ...]
    middleware: SessionMiddleware
    place_stamp: Callable[[MakeStamp], None]

    def applies(self, scope: Scope) -> bool:
        """Tell whether a request gets to this session middleware: Starlette's own routes say so."""
        for route in self.routes:
            match, child = route.matches(scope)
            if match is Match.NONE:
                return False
            scope = {**scope, **child}
        return True


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
    yield from _find_below(app, (), frozenset())


def find_cors(app: ASGIApp) -> Wrapper:
    """Return what wraps an answer as the CORS middleware of ``app`` would; without one, nothing does."""
    for layer in _layers(app):
        if isinstance(layer, CORSMiddleware):
            return partial(_around, layer)
        if isinstance(layer, Starlette):
            for entry in layer.user_middleware:
                if _is(entry, CORSMiddleware):
                    return partial(_construct, entry)
    return lambda answer: answer


def find_declaration(app: ASGIApp) -> Declaration:
    """Return what ``app`` says of itself, or what is taken for granted where it says nothing."""
    for layer in _layers(app):
        declaration = getattr(getattr(layer, "state", None), "gym_gunicorn", None)
        if isinstance(declaration, Declaration):
            return declaration
    return Declaration()


def session_middleware(secret_key: str, session_cookie: str, max_age: int | None) -> SessionMiddleware:
    """Return a session middleware to read from, for an app whose own can't be found."""
    return SessionMiddleware(_nothing, secret_key, session_cookie, max_age)


def _layers(app: ASGIApp) -> Iterator[ASGIApp]:
    """Yield ``app`` and what it wraps, to the innermost, or to the app of a framework."""
    seen: set[int] = set()
    while id(app) not in seen:
        seen.add(id(app))
        yield app
        if isinstance(app, Starlette | Router):
            return
        app = getattr(app, "app", app)


def _find_below(app: ASGIApp, routes: tuple[Mount | Host, ...], above: frozenset[int]) -> Iterator[FoundSession]:
    """Find what ``routes`` lead to; an app that is ``above`` itself is not looked into again."""
    found: FoundSession | None = None
    for layer in _layers(app):
        if id(layer) in above:
            return
        above |= {id(layer)}
        if isinstance(layer, SessionMiddleware):
            found = FoundSession(routes, layer, partial(_wrap, layer))
        if isinstance(layer, Starlette | Router):
            for route in layer.routes:
                if isinstance(route, Mount | Host):
                    yield from _find_below(route.app, (*routes, route), above)
        if isinstance(layer, Starlette):
            for entry in layer.user_middleware:
                if _is(entry, SessionMiddleware):
                    middleware = _construct(entry, _nothing)
                    assert isinstance(middleware, SessionMiddleware)
                    found = FoundSession(routes, middleware, partial(_insert, layer, entry))
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
    place = next(place for place, other in enumerate(app.user_middleware) if other is entry) + 1
    if place < len(app.user_middleware) and _is(app.user_middleware[place], SessionStamp):
        return
    app.user_middleware.insert(place, Middleware(make_stamp.func, *make_stamp.args, **make_stamp.keywords))
    # Built anew, with the stamp, where something has called the app before it is served:
    # a test client in its module, and then preload_app.
    app.middleware_stack = None


def _wrap(middleware: SessionMiddleware, make_stamp: MakeStamp) -> None:
    if not isinstance(middleware.app, SessionStamp):
        middleware.app = make_stamp(middleware.app)


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """Stand for the app within a middleware that is made only to be read."""
