"""What is to be seen of a loaded app: its session middlewares above all."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.sessions import SessionMiddleware
from starlette.routing import Host, Mount, Router, WebSocketRoute
from starlette.types import ASGIApp

from gym_gunicorn.cli.diagnosis.facts import App, Cookie
from gym_gunicorn.sessions.discovery import find_declaration, find_sessions
from gym_gunicorn.sessions.fingerprint import fingerprint

# Of examples and of things left to be filled in, in lower case without what stands between words.
_DEFAULTS = frozenset(
    {
        *("changeme", "changethis", "replaceme", "example", "insecure", "todo", "xxx", "default", "key", "foobar"),
        *("secret", "secretkey", "sessionsecret", "sessionkey", "session", "mysecret", "mysecretkey", "yoursecret"),
        *("yoursecretkey", "yoursecrethere", "supersecret", "supersecretkey", "topsecret", "asecret", "notsosecret"),
        *("password", "passw0rd", "dev", "development", "test", "testing", "onesecretforallworkers"),
        *("123456", "12345678", "1234567890"),
    }
)
# Fewer characters can be tried out by a program that has one cookie.
_SHORT = 16
_FEW = 6


def app_facts(app: ASGIApp) -> App:
    """Return what is to be seen of ``app``, which is not called."""
    declaration = find_declaration(app)
    return App(
        cookies=[cookie_facts(session.middleware, _mount(session.routes)) for session in find_sessions(app)],
        nested=sorted(set(_nested(app))),
        declares_no_state=not declaration.routed,
        token_header=declaration.token_header,
        token_path=declaration.token_path,
        websockets=any(_websocket_routes(app, set())),
        kind="wsgi" if _is_wsgi(app) else "asgi",
    )


def cookie_facts(middleware: SessionMiddleware, mount: str = "") -> Cookie:
    """Return what is to be known of the cookie of ``middleware``, without its secret."""
    return Cookie(
        name=middleware.session_cookie,
        max_age=middleware.max_age,
        fingerprint=fingerprint(middleware.signer, middleware.session_cookie),
        weakness=weakness(middleware.signer.secret_key),
        mount=mount,
        path=middleware.path,
        flags=middleware.security_flags,
    )


def weakness(secret: bytes) -> str:
    """Return "default" for a secret that is in everybody's examples, "short" for one that can be tried out, or ""."""
    word = "".join(chr(byte) for byte in secret.lower() if chr(byte).isalnum())
    if word in _DEFAULTS or not word:
        return "default"
    return "short" if len(secret) < _SHORT or len(set(secret)) < _FEW else ""


def _mount(routes: tuple[Mount | Host, ...]) -> str:
    return "".join(route.path if isinstance(route, Mount) else f"//{route.host}" for route in routes)


def _nested(app: ASGIApp) -> Iterator[str]:
    """Yield the names of cookies whose middlewares stand around one another in the app itself."""
    middlewares: list[SessionMiddleware] = []
    seen: set[int] = set()
    while id(app) not in seen:
        seen.add(id(app))
        if isinstance(app, SessionMiddleware):
            middlewares.append(app)
        if isinstance(app, Starlette):
            for entry in app.user_middleware:
                if isinstance(entry.cls, type) and issubclass(entry.cls, SessionMiddleware):
                    make: Any = entry.cls
                    middlewares.append(make(app, *entry.args, **entry.kwargs))
            break
        app = getattr(app, "app", app)
    if len(middlewares) > 1:
        yield from (middleware.session_cookie for middleware in middlewares)


def _websocket_routes(app: object, seen: set[int]) -> Iterator[bool]:
    while id(app) not in seen:
        seen.add(id(app))
        if isinstance(app, Starlette | Router):
            for route in app.routes:
                if isinstance(route, Mount | Host):
                    yield from _websocket_routes(route.app, seen)
                elif isinstance(route, WebSocketRoute):
                    yield True
            return
        app = getattr(app, "app", app)


def _is_wsgi(app: object) -> bool:
    """Tell whether ``app`` takes the two arguments of a WSGI app, which no other app has."""
    try:
        signature = inspect.signature(app)  # type: ignore[arg-type]  # what can't be called raises
    except (TypeError, ValueError):
        return False
    return list(signature.parameters)[:2] == ["environ", "start_response"]
