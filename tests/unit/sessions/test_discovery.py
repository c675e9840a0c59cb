from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from fastapi import FastAPI
from itsdangerous import TimestampSigner
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Host, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gym_gunicorn.problems import SESSION_GONE
from gym_gunicorn.sessions.carriers import Carried, SessionCookie
from gym_gunicorn.sessions.discovery import FoundSession, find_cors, find_sessions, session_middleware
from gym_gunicorn.sessions.stamp import SessionStamp

SECRET = "a secret"
KEY = "gym_worker"
OWNER = "0" * 12


class Wrapper:
    """A plain ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


class OwnSessions(SessionMiddleware):
    """A session middleware of the app's own, with other arguments."""

    def __init__(self, app: ASGIApp, *, strict: bool) -> None:
        super().__init__(app, SECRET, session_cookie="own", max_age=None, https_only=strict)


async def writes(request: Request) -> PlainTextResponse:
    request.session["n"] = 1
    return PlainTextResponse("written")


def stamp(owner_key: str) -> partial[SessionStamp]:
    """Return what makes the stamp to be placed."""
    return partial(SessionStamp, owner_id=OWNER, owner_key=owner_key)


def starlette_app(*middleware: Middleware) -> Starlette:
    return Starlette(routes=[Route("/", writes)], middleware=middleware)


def sessions(secret: str = SECRET, **options: Any) -> Middleware:
    return Middleware(SessionMiddleware, secret, **options)


def with_sessions() -> Starlette:
    return starlette_app(sessions())


def starlette_with_sessions_added() -> ASGIApp:
    app = starlette_app(Middleware(GZipMiddleware))
    app.add_middleware(SessionMiddleware, secret_key=SECRET)
    app.add_middleware(Wrapper)
    return app


def fastapi_app() -> ASGIApp:
    app = FastAPI()
    app.add_middleware(SessionMiddleware, secret_key=SECRET)
    app.add_api_route("/", writes, response_model=None)
    return app


def wrapped_app() -> ASGIApp:
    return Wrapper(GZipMiddleware(Wrapper(with_sessions())))


def app_inside_the_middleware() -> ASGIApp:
    return SessionMiddleware(starlette_app(), SECRET)


def wrapped_app_inside_the_middleware() -> ASGIApp:
    return Wrapper(SessionMiddleware(Wrapper(starlette_app()), SECRET))


def function_inside_the_middleware() -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (await writes(Request(scope, receive)))(scope, receive, send)

    return SessionMiddleware(app, SECRET)


def app_with_a_subclass() -> ASGIApp:
    return starlette_app(Middleware(OwnSessions, strict=True))


def app_inside_a_subclass() -> ASGIApp:
    return OwnSessions(starlette_app(), strict=True)


def app_that_was_called_before() -> ASGIApp:
    app = with_sessions()
    assert session_cookies(app) == {"session": {"n": 1}}
    assert app.middleware_stack is not None
    return app


APPS = pytest.mark.parametrize(
    "make_app",
    [
        with_sessions,
        starlette_with_sessions_added,
        fastapi_app,
        wrapped_app,
        app_inside_the_middleware,
        wrapped_app_inside_the_middleware,
        function_inside_the_middleware,
        app_with_a_subclass,
        app_inside_a_subclass,
        app_that_was_called_before,
    ],
    ids=lambda make: make.__name__,
)


def reply_headers(app: ASGIApp, *headers: tuple[bytes, bytes], method: str = "GET") -> Headers:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": "/",
        "raw_path": b"/",
        "root_path": "",
        "query_string": b"",
        "headers": list(headers),
    }

    async def called() -> None:
        await app(scope, receive, send)

    asyncio.run(called())
    return Headers(raw=sent[0]["headers"])


def session_cookies(app: ASGIApp, secret: str = SECRET) -> dict[str, Any]:
    """Return the sessions in the cookies that a reply of ``app`` sets."""
    cookies = (cookie.split(";")[0].split("=", 1) for cookie in reply_headers(app).getlist("set-cookie"))
    return {name: json.loads(b64decode(TimestampSigner(secret).unsign(value))) for name, value in cookies}


def found_in(app: ASGIApp) -> FoundSession:
    [found] = find_sessions(app)
    return found


def cookie_of(found: FoundSession) -> SessionCookie:
    middleware = found.middleware
    return SessionCookie(middleware.signer, middleware.session_cookie, middleware.max_age, KEY)


@APPS
def test_a_session_of_the_app_is_stamped(make_app: Callable[[], ASGIApp]) -> None:
    app = make_app()
    found_in(app).place_stamp(stamp(KEY))
    assert list(session_cookies(app).values()) == [{"n": 1, KEY: OWNER}]


@APPS
def test_the_cookie_that_the_app_sets_is_read_with_what_is_found(make_app: Callable[[], ASGIApp]) -> None:
    app = make_app()
    found = found_in(app)
    found.place_stamp(stamp(KEY))
    cookie = reply_headers(app)["set-cookie"].split(";")[0]
    assert cookie_of(found).read([(b"cookie", cookie.encode())]) == Carried(OWNER)


@APPS
def test_an_apps_own_sessions_are_for_all_paths(make_app: Callable[[], ASGIApp]) -> None:
    assert found_in(make_app()).routes == ()


@APPS
def test_looking_into_an_app_changes_nothing(make_app: Callable[[], ASGIApp]) -> None:
    app = make_app()
    found_in(app)
    assert list(session_cookies(app).values()) == [{"n": 1}]


def test_secret_name_age_and_path_are_the_apps_own() -> None:
    found = found_in(starlette_app(sessions("another secret", session_cookie="sid", max_age=60, path="/api")))
    assert (found.middleware.session_cookie, found.middleware.max_age, found.middleware.path) == ("sid", 60, "/api")
    cookie = TimestampSigner("another secret").sign(b"eyJneW1fd29ya2VyIjogIjAwMDAwMDAwMDAwMCJ9")
    assert cookie_of(found).read([(b"cookie", b"sid=" + cookie)]) == Carried(OWNER)


def test_the_arguments_of_a_subclass_are_the_apps_own() -> None:
    middleware = found_in(app_with_a_subclass()).middleware
    assert (middleware.session_cookie, middleware.max_age) == ("own", None)
    assert middleware.security_flags.endswith("; secure")


def test_the_stamp_keeps_its_owner_under_the_key_that_is_asked_for() -> None:
    app = with_sessions()
    found_in(app).place_stamp(stamp("owner"))
    assert session_cookies(app) == {"session": {"n": 1, "owner": OWNER}}


def test_a_middleware_for_an_app_that_can_not_be_looked_into_is_as_it_is_told() -> None:
    middleware = session_middleware("another secret", "sid", None)
    assert (middleware.session_cookie, middleware.max_age) == ("sid", None)
    assert middleware.signer.unsign(TimestampSigner("another secret").sign(b"x")) == b"x"


# Where nothing is found


async def bare_app(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("looked into, and not called")


def session_factory(app: ASGIApp) -> ASGIApp:
    return SessionMiddleware(app, SECRET)


OPAQUE_APPS: dict[str, ASGIApp] = {
    "a function": bare_app,
    "a partial": partial(bare_app),
    "a wrapped function": Wrapper(bare_app),
    "Starlette without sessions": starlette_app(),
    "FastAPI without sessions": FastAPI(),
    "another middleware": starlette_app(Middleware(CORSMiddleware, allow_origins=["*"])),
    "a middleware factory": starlette_app(Middleware(session_factory)),
    "a partial middleware": starlette_app(Middleware(partial(SessionMiddleware, secret_key=SECRET))),
}


@pytest.mark.parametrize("app", OPAQUE_APPS.values(), ids=OPAQUE_APPS.keys())
def test_an_app_without_a_session_middleware_that_can_be_seen_has_none(app: ASGIApp) -> None:
    assert list(find_sessions(app)) == []


def test_wrappers_in_a_circle_come_to_an_end() -> None:
    one = Wrapper(bare_app)
    other = Wrapper(one)
    one.app = other
    assert list(find_sessions(one)) == []
    one.app = one
    assert list(find_sessions(one)) == []
    middleware = SessionMiddleware(one, SECRET)
    one.app = middleware
    assert found_in(one).middleware is middleware


# Of several


def test_of_two_session_middlewares_of_an_app_the_inner_counts() -> None:
    app = starlette_app(
        sessions("outer secret", session_cookie="outer"), Middleware(Wrapper), sessions(session_cookie="inner")
    )
    found = found_in(app)
    found.place_stamp(stamp(KEY))
    assert found.middleware.session_cookie == "inner"
    cookies = reply_headers(app).getlist("set-cookie")
    inner = next(cookie for cookie in cookies if cookie.startswith("inner="))
    assert cookie_of(found).read([(b"cookie", inner.encode())]) == Carried(OWNER)


def test_a_session_middleware_in_the_app_counts_before_one_around_it() -> None:
    app = SessionMiddleware(with_sessions(), SECRET, session_cookie="outer")
    assert found_in(app).middleware.session_cookie == "session"


def test_of_two_session_middlewares_around_an_app_the_inner_counts() -> None:
    inner = SessionMiddleware(bare_app, SECRET, session_cookie="inner")
    app = SessionMiddleware(Wrapper(inner), SECRET, session_cookie="outer")
    assert found_in(app).middleware is inner


def test_of_two_equal_middlewares_the_inner_gets_the_stamp() -> None:
    entry = sessions()
    app = starlette_app(entry, sessions())
    found_in(app).place_stamp(stamp(KEY))
    assert [each.cls.__name__ for each in app.user_middleware] == [  # type: ignore[attr-defined]  # all are classes
        "SessionMiddleware",
        "SessionMiddleware",
        "SessionStamp",
    ]


# Mounted apps


def named(name: str) -> Starlette:
    return starlette_app(sessions(session_cookie=name))


PATHS = ("/", "/a/x", "/ab/x", "/a/b/x", "/b/x")
A_AND_BELOW = ["/a/x", "/a/b/x"]

MOUNTS: dict[str, tuple[ASGIApp, list[tuple[str, list[str]]]]] = {
    "one": (Starlette(routes=[Mount("/a", named("a"))]), [("a", A_AND_BELOW)]),
    "with a slash": (Starlette(routes=[Mount("/a/", named("a"))]), [("a", A_AND_BELOW)]),
    "at the root": (Starlette(routes=[Mount("/", named("a"))]), [("a", [*PATHS])]),
    "several": (
        Starlette(routes=[Mount("/a", named("a")), Mount("/b", named("b"))]),
        [("a", A_AND_BELOW), ("b", ["/b/x"])],
    ),
    "one in another": (
        Starlette(routes=[Mount("/a", Starlette(routes=[Mount("/b", named("b"))]))]),
        [("b", ["/a/b/x"])],
    ),
    "one below a group of routes": (
        Starlette(routes=[Mount("/a", routes=[Mount("/b", named("b"))])]),
        [("b", ["/a/b/x"])],
    ),
    "wrapped": (Starlette(routes=[Mount("/a", Wrapper(named("a")))]), [("a", A_AND_BELOW)]),
    "by its own middleware": (
        Starlette(routes=[Mount("/a", starlette_app(), middleware=[sessions()])]),
        [("session", A_AND_BELOW)],
    ),
    "by host": (
        Starlette(routes=[Host("a.example", named("a")), Host("other.example", named("b"))]),
        [("a", [*PATHS]), ("b", [])],
    ),
    "before the app's own": (
        Starlette(routes=[Mount("/a", named("a"))], middleware=[sessions(session_cookie="own")]),
        [("a", A_AND_BELOW), ("own", [*PATHS])],
    ),
    "below a parameter": (Starlette(routes=[Mount("/{name}/b", named("a"))]), [("a", ["/a/b/x"])]),
}


@pytest.mark.parametrize(("app", "expected"), MOUNTS.values(), ids=MOUNTS.keys())
def test_sessions_of_mounted_apps_are_found_with_the_requests_that_get_there(
    app: ASGIApp, expected: list[tuple[str, list[str]]]
) -> None:
    def scope(path: str) -> Scope:
        return {"type": "http", "method": "GET", "path": path, "headers": [(b"host", b"a.example")]}

    assert [
        (found.middleware.session_cookie, [path for path in PATHS if found.applies(scope(path))])
        for found in find_sessions(app)
    ] == expected


def test_an_app_that_is_mounted_twice_is_found_twice_and_stamped_once() -> None:
    app = named("a")
    for found in find_sessions(Starlette(routes=[Mount("/one", app), Mount("/two", app)])):
        found.place_stamp(stamp(KEY))
    classes: list[object] = [each.cls for each in app.user_middleware]
    assert classes == [SessionMiddleware, SessionStamp]


def test_an_app_that_is_mounted_in_itself_is_found_once() -> None:
    app = named("a")
    app.routes.append(Mount("/again", app))
    assert len(list(find_sessions(app))) == 1


# What is around the problems

ORIGIN = (b"origin", b"https://a.example")
CORS_OPTIONS: dict[str, Any] = {
    "allow_origins": ["https://a.example"],
    "allow_credentials": True,
    "expose_headers": ["x-a"],
}
CORS = Middleware(CORSMiddleware, **CORS_OPTIONS)


def problem_headers(app: ASGIApp, origin: tuple[bytes, bytes] = ORIGIN) -> Headers:
    return reply_headers(find_cors(app)(SESSION_GONE), origin)


def cors_of(headers: Headers) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.startswith("access-control-")}


def cors_outside() -> ASGIApp:
    return starlette_app(CORS, sessions())


def cors_inside() -> ASGIApp:
    return starlette_app(sessions(), CORS)


def cors_in_an_app_inside_the_middleware() -> ASGIApp:
    return SessionMiddleware(starlette_app(CORS), SECRET)


def cors_around_the_app() -> ASGIApp:
    return CORSMiddleware(with_sessions(), **CORS_OPTIONS)


@pytest.mark.parametrize(
    "make_app",
    [cors_outside, cors_inside, cors_in_an_app_inside_the_middleware, cors_around_the_app],
    ids=lambda make: make.__name__,
)
def test_a_problem_has_the_cors_headers_that_the_app_gives_its_own_answers(make_app: Callable[[], ASGIApp]) -> None:
    app = make_app()
    expected = cors_of(reply_headers(app, ORIGIN))
    assert expected["access-control-allow-origin"] == "https://a.example"
    assert cors_of(problem_headers(app)) == expected


def test_a_problem_is_hidden_from_other_origins() -> None:
    assert "access-control-allow-origin" not in problem_headers(cors_outside(), (b"origin", b"https://b.example"))


def test_a_problem_is_as_it_is_where_the_app_has_no_cors() -> None:
    assert find_cors(with_sessions())(SESSION_GONE) is SESSION_GONE
    assert find_cors(bare_app)(SESSION_GONE) is SESSION_GONE
