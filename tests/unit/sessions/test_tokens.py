"""Routing by token: callers that keep no cookies, and apps that sign session tokens of their own."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI
from itsdangerous import BadSignature, URLSafeSerializer
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gym_gunicorn.owner import new_owner_id, new_session_id, owner_in
from gym_gunicorn.sessions.carriers import NO_OWNER, Carried, SessionToken
from gym_gunicorn.settings import Settings
from tests import sessions
from tests.workers import Worker, two

SECRET = "a secret of the tests"
HEADER = "X-NeMo-Gym-Session-Token"
SALT = "nemo-gym-mcp-session-token"

# What routes the app below, of which not a line knows of this package.
SETTINGS = Settings(
    session_id_key="session_id", token_header=HEADER, token_salt=SALT, token_session_id_key="sid", token_path="/mcp"
)


def make_app() -> FastAPI:
    """A server as they are written elsewhere: its middleware makes the session ID, its token holds that alone."""
    serializer = URLSafeSerializer(SECRET, salt=SALT)
    counts: dict[str, int] = {}
    app = FastAPI()

    async def add_session_id(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        if request.url.path.startswith("/seed") and "session_id" not in request.session:
            request.session["session_id"] = str(uuid.uuid4())
        return await call_next(request)

    app.add_middleware(BaseHTTPMiddleware, dispatch=add_session_id)
    app.add_middleware(SessionMiddleware, secret_key=SECRET)

    @app.post("/seed_session")
    async def seed_session(request: Request) -> dict[str, str]:
        session_id = request.session["session_id"]
        counts[session_id] = 0
        return {"token": serializer.dumps({"sid": session_id})}

    @app.post("/mcp")
    @app.post("/tools")
    async def tool(request: Request) -> Response:
        try:
            session_id = serializer.loads(request.headers[HEADER])["sid"]
        except (KeyError, BadSignature):
            return JSONResponse({"error": "no valid token"}, 401)
        if session_id not in counts:
            return JSONResponse({"error": "unknown session"}, 404)
        counts[session_id] += 1
        return JSONResponse({"count": counts[session_id]})

    @app.get("/health")
    async def health() -> dict[str, bool]:
        return {"ok": True}

    return app


async def call(worker: Worker, method: str, path: str, **headers: str) -> tuple[int, Any, str | None]:
    """Return status, JSON, and the session cookie that was set, as name=value."""
    async with (
        aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as http,
        http.request(method, worker.url + path, headers=headers) as response,
    ):
        cookie = response.headers.get("Set-Cookie")
        return response.status, json.loads(await response.read()), cookie and cookie.partition(";")[0]


async def seed(worker: Worker, **headers: str) -> tuple[str, str]:
    """Return the token and the cookie of a new session."""
    status, body, cookie = await call(worker, "POST", "/seed_session", **headers)
    assert status == 200
    assert cookie is not None
    return body["token"], cookie


def owner_of_cookie(cookie: str) -> str | None:
    return sessions.owner_in(cookie.partition("=")[2])


@pytest.mark.parametrize("path", ["/mcp", "/tools"])
def test_call_with_a_token_alone_reaches_the_worker_that_holds_the_session(path: str) -> None:
    async def scenario() -> None:
        async with two(make_app, settings=SETTINGS) as (one, other):
            token, _ = await seed(one)
            assert await call(other, "POST", path, **{HEADER: token}) == (200, {"count": 1}, None)
            assert await call(one, "POST", path, **{HEADER: token}) == (200, {"count": 2}, None)
            await one.stop()
            assert (await call(other, "POST", path, **{HEADER: token}))[0] == 410

    asyncio.run(scenario())


def test_session_id_that_the_app_finds_names_the_owner_and_is_the_one_in_token_and_cookie() -> None:
    async def scenario() -> None:
        async with two(make_app, settings=SETTINGS) as (one, _):
            token, cookie = await seed(one)
            session_id = URLSafeSerializer(SECRET, salt=SALT).loads(token)["sid"]
            assert owner_in(session_id) == one.owner_id
            assert owner_of_cookie(cookie) == one.owner_id

    asyncio.run(scenario())


def test_app_without_the_setting_makes_its_own_session_id() -> None:
    async def scenario() -> None:
        async with two(make_app) as (one, _):
            token, _ = await seed(one)
            assert owner_in(URLSafeSerializer(SECRET, salt=SALT).loads(token)["sid"]) is None

    asyncio.run(scenario())


def test_session_id_is_taken_back_from_a_session_that_the_app_never_touched() -> None:
    async def scenario() -> None:
        async with two(make_app, settings=SETTINGS) as (one, _):
            assert await call(one, "GET", "/health") == (200, {"ok": True}, None)

    asyncio.run(scenario())


def test_on_the_token_path_the_token_decides_and_elsewhere_the_cookie() -> None:
    async def scenario() -> None:
        async with two(make_app, settings=SETTINGS) as (one, other):
            token, _ = await seed(one)
            _, cookie = await seed(other)
            both = {HEADER: token, "Cookie": cookie}
            # The tool reads the token: found at its owner alone, so the answer tells who was asked.
            assert (await call(other, "POST", "/mcp", **both))[:2] == (200, {"count": 1})
            assert (await call(one, "POST", "/tools", **both))[:2] == (404, {"error": "unknown session"})
            # A token that is not valid decides as well: nobody's, so it is handled here.
            assert (await call(other, "POST", "/mcp", **{HEADER: "x", "Cookie": cookie}))[0] == 401

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "token",
    [
        pytest.param(URLSafeSerializer(SECRET, salt=SALT).dumps({"sid": str(uuid.uuid4())}), id="without an owner"),
        pytest.param(
            URLSafeSerializer("other", salt=SALT).dumps({"sid": new_session_id("0" * 12)}), id="of another secret"
        ),
        pytest.param(
            URLSafeSerializer(SECRET, salt="other").dumps({"sid": new_session_id("0" * 12)}), id="of another salt"
        ),
        pytest.param("nonsense", id="malformed"),
    ],
)
def test_token_that_names_no_owner_validly_is_handled_where_it_lands(token: str) -> None:
    async def scenario() -> None:
        async with two(make_app, settings=SETTINGS) as (one, other):
            assert (await call(other, "POST", "/mcp", **{HEADER: token}))[0] in (401, 404)
            assert one.routed is not None
            assert one.routed.private.state.total_requests == 0

    asyncio.run(scenario())


def carrier() -> tuple[SessionToken, URLSafeSerializer]:
    serializer = URLSafeSerializer(SECRET, salt=SALT)
    return SessionToken(serializer, HEADER, "sid"), serializer


def test_token_names_its_owner_beside_the_session_id_or_in_it() -> None:
    token, serializer = carrier()
    owner = new_owner_id()

    def read(payload: object) -> Carried | None:
        return token.read([(b"x-nemo-gym-session-token", serializer.dumps(payload).encode())])

    assert read({"gym_worker": owner}) == Carried(owner)
    assert read({"sid": new_session_id(owner)}) == Carried(owner)
    assert read({"sid": new_session_id(new_owner_id()), "gym_worker": owner}) == Carried(owner)
    for payload in ({"gym_worker": "../../0123456"}, {"sid": owner}, {"sid": f"{owner}-x"}, {"sid": 5}, [owner], "x"):
        assert read(payload) == NO_OWNER
    assert token.read([(b"cookie", b"x")]) is None


def test_any_bytes_whatever_are_read_without_an_error() -> None:
    token, serializer = carrier()
    seeded = random.Random(5)
    owner = new_owner_id()
    valid = serializer.dumps({"sid": new_session_id(owner)}).encode()
    for length in range(2000):
        damaged = bytearray(valid)
        damaged[seeded.randrange(len(damaged))] ^= 1 << seeded.randrange(8)
        for field in (seeded.randbytes(length), bytes(damaged)):
            # A bit that base64 does not use may change: then the token is the same.
            assert token.read([(b"x-nemo-gym-session-token", field)]) in (NO_OWNER, Carried(owner))


def test_what_is_remembered_of_tokens_is_bounded() -> None:
    token, serializer = carrier()
    for number in range(5000):
        token.read([(b"x-nemo-gym-session-token", str(number).encode())])
    long = serializer.dumps({"gym_worker": new_owner_id(), "filling": [random.random() for _ in range(1000)]})
    before = token._verified.cache_info()
    assert token.read([(b"x-nemo-gym-session-token", long.encode())]) != NO_OWNER
    assert token._verified.cache_info() == before
    assert before.currsize <= 4096
