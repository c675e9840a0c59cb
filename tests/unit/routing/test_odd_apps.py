"""Sessions in odd apps: mounted ones, hidden ones, cookies with attributes, cookies among others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gym_gunicorn import SessionStamp
from gym_gunicorn.settings import Settings
from tests.sessions import owner_in
from tests.workers import Worker, two

SECRET = "a secret of the tests"


class Page:
    """A reply, with the cookies that it set by name: their values and their attributes."""

    def __init__(self, status: int, body: Any, set_cookies: list[str]) -> None:
        self.status = status
        self.body = body
        fields = [field.split("; ") for field in set_cookies]
        self.cookies = {name: value for name, _, value in (field[0].partition("=") for field in fields)}
        self.attributes = {field[0].partition("=")[0]: set(field[1:]) for field in fields}


async def get(worker: Worker, path: str, *cookies: str) -> Page:
    headers = [("Cookie", cookie) for cookie in cookies]
    async with (
        aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as http,
        http.get(worker.url + path, headers=headers) as response,
    ):
        text = await response.text()
        body = json.loads(text) if "json" in response.content_type else text
        return Page(response.status, body, response.headers.getall("Set-Cookie", []))


def counter(key: str) -> tuple[Callable[[Request], Any], dict[str, int]]:
    """Return an endpoint that counts in memory by a session of its own, and what it counts in."""
    counts: dict[str, int] = {}

    async def count(request: Request) -> JSONResponse:
        name = request.session.setdefault(key, f"{key} {len(counts)} {id(counts)}")
        counts[name] = counts.get(name, 0) + 1
        return JSONResponse({"count": counts[name], "session": dict(request.session)})

    return count, counts


def make_app(**session: Any) -> Starlette:
    count, _ = counter("session_id")
    middleware = [Middleware(SessionMiddleware, **{"secret_key": SECRET, **session})]
    return Starlette(routes=[Route("/count", count), Route("/login", count)], middleware=middleware)


def make_mounting_app() -> Starlette:
    outer, _ = counter("outer")
    inner, _ = counter("inner")
    mounted = Starlette(
        routes=[Route("/count", inner)],
        middleware=[Middleware(SessionMiddleware, secret_key="another secret", session_cookie="inner_session")],
    )
    return Starlette(
        routes=[Route("/count", outer), Mount("/inner", mounted)],
        middleware=[Middleware(SessionMiddleware, secret_key=SECRET)],
    )


def test_sessions_of_a_mounted_app_and_of_the_app_around_it_both_stay_right() -> None:
    async def scenario() -> None:
        async with two(make_mounting_app) as (one, other):
            outer = (await get(one, "/count")).cookies
            assert set(outer) == {"session"}
            page = await get(other, "/inner/count", f"session={outer['session']}")
            assert owner_in(page.cookies["inner_session"]) == one.owner_id
            both = f"session={outer['session']}; inner_session={page.cookies['inner_session']}"
            # Neither session is written into the other's cookie.
            assert set(page.cookies) == {"inner_session"}
            assert page.body["session"].keys() == {"inner"}
            assert (await get(other, "/inner/count", both)).body["count"] == 2
            again = await get(other, "/count", both)
            assert again.body["count"] == 2
            assert again.body["session"].keys() == {"outer", "gym_worker"}

    asyncio.run(scenario())


def test_session_that_only_a_mounted_app_makes_is_routed() -> None:
    async def scenario() -> None:
        async with two(make_mounting_app) as (one, other):
            page = await get(one, "/inner/count")
            assert set(page.cookies) == {"inner_session"}
            cookie = f"inner_session={page.cookies['inner_session']}"
            assert (await get(other, "/inner/count", cookie)).body["count"] == 2
            await one.stop()
            assert (await get(other, "/inner/count", cookie)).status == 410

    asyncio.run(scenario())


def hide(app: ASGIApp) -> ASGIApp:
    """Return an app that nobody can look into."""

    async def hidden(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, send)

    return hidden


def test_app_that_can_not_be_looked_into_is_routed_by_what_it_is_told() -> None:
    def make_hidden() -> ASGIApp:
        count, _ = counter("session_id")
        inner = SessionStamp(Starlette(routes=[Route("/count", count)]))
        return hide(SessionMiddleware(inner, secret_key=SECRET, session_cookie="hidden"))

    settings = Settings(secret_key=SECRET, session_cookie="hidden")

    async def scenario() -> None:
        async with two(make_hidden, settings=settings) as (one, other):
            page = await get(one, "/count")
            assert owner_in(page.cookies["hidden"]) == one.owner_id
            assert (await get(other, "/count", f"hidden={page.cookies['hidden']}")).body["count"] == 2

    asyncio.run(scenario())


def test_session_middleware_around_the_app_is_found() -> None:
    def make_wrapped() -> ASGIApp:
        count, _ = counter("session_id")
        return SessionMiddleware(Starlette(routes=[Route("/count", count)]), secret_key=SECRET)

    async def scenario() -> None:
        async with two(make_wrapped) as (one, other):
            page = await get(one, "/count")
            assert (await get(other, "/count", f"session={page.cookies['session']}")).body["count"] == 2

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "session",
    [
        pytest.param({"domain": "example.org"}, id="domain"),
        pytest.param({"path": "/count"}, id="path"),
        pytest.param({"same_site": "none", "https_only": True}, id="same-site none and https only"),
        pytest.param({"partitioned": True, "https_only": True}, id="partitioned"),
        pytest.param({"max_age": None}, id="no max-age"),
        pytest.param({"session_cookie": "__Host-other"}, id="another name"),
    ],
)
def test_lost_cookie_is_expired_with_the_attributes_that_it_was_set_with(session: dict[str, Any]) -> None:
    async def scenario() -> None:
        settings = Settings(expire_lost_cookie=True)
        async with two(lambda: make_app(**session), settings=settings) as (one, other):
            page = await get(one, "/count")
            ((name, value),) = page.cookies.items()
            assert (await get(other, "/count", f"{name}={value}")).body["count"] == 2
            await one.stop()
            lost = await get(other, "/count", f"{name}={value}")
            assert (lost.status, lost.cookies) == (410, {name: "null"})
            lasting = {attribute for attribute in page.attributes[name] if not attribute.startswith("Max-Age")}
            assert lost.attributes[name] == lasting | {"expires=Thu, 01 Jan 1970 00:00:00 GMT"}

    asyncio.run(scenario())


def test_lost_cookie_is_not_expired_unless_asked_for_and_the_login_page_still_loads() -> None:
    async def scenario() -> None:
        async with two(make_app, settings=Settings(local_paths=["/login"])) as (one, other):
            cookie = f"session={(await get(one, '/count')).cookies['session']}"
            await one.stop()
            lost = await get(other, "/count", cookie)
            assert (lost.status, lost.cookies) == (410, {})
            assert (await get(other, "/login", cookie)).status == 200

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "around",
    [
        pytest.param('broken="; {}; =; ;;', id="a neighbour's broken cookie"),
        pytest.param("session_id=x; sessions=y; {}", id="names that are alike"),
        pytest.param("session=older; {}", id="an older one of the same name before it"),
        pytest.param("name=\xe9\xff; {}", id="bytes that are not ASCII"),
    ],
)
def test_session_is_found_among_other_cookies(around: str) -> None:
    async def scenario() -> None:
        async with two(make_app) as (one, other):
            cookie = f"session={(await get(one, '/count')).cookies['session']}"
            assert (await get(other, "/count", around.format(cookie))).body["count"] == 2
            assert (await get(other, "/count", "a=b", cookie)).body["count"] == 3

    asyncio.run(scenario())


def test_session_of_four_kilobytes_is_routed() -> None:
    def make_large() -> Starlette:
        async def fill(request: Request) -> JSONResponse:
            request.session["filling"] = "x" * 2900
            return JSONResponse({})

        app = make_app()
        app.routes.append(Route("/fill", fill))
        return app

    async def scenario() -> None:
        async with two(make_large) as (one, other):
            cookie = (await get(one, "/fill")).cookies["session"]
            assert len(cookie) > 3900
            await get(other, "/count", f"session={cookie}")
            assert one.routed is not None
            assert one.routed.private.state.total_requests == 1

    asyncio.run(scenario())
