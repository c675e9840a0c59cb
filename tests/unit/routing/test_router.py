"""Routing between two workers: who handles what, and what a caller gets where nobody can."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import pytest
from itsdangerous import TimestampSigner
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from gym_gunicorn import session_owner
from gym_gunicorn.forwarding.links.frames import BODY, PREFACE, REPLY, REQUEST, frame, greeting
from gym_gunicorn.owner import new_owner_id
from gym_gunicorn.settings import Settings
from tests.sessions import owner_in
from tests.workers import Worker, running, socket_directory, two

SECRET = "a secret of the tests"


def make_app() -> Starlette:
    """An app that counts in memory, and says in each reply how many requests it has handled."""
    counts: dict[str, int] = {}
    handled: list[str] = []

    async def count(request: Request) -> JSONResponse:
        handled.append(request.url.path)
        session_id = request.session.setdefault("session_id", os.urandom(8).hex())
        counts[session_id] = counts.get(session_id, 0) + 1
        return JSONResponse({"count": counts[session_id]})

    async def read(request: Request) -> JSONResponse:
        handled.append(request.url.path)
        return JSONResponse({"count": counts.get(request.session.get("session_id", ""), 0)})

    async def plain(request: Request) -> PlainTextResponse:
        handled.append(request.url.path)
        return PlainTextResponse("no session here")

    async def forget(request: Request) -> PlainTextResponse:
        request.session.pop("session_id", None)
        return PlainTextResponse("forgotten")

    async def owner(request: Request) -> JSONResponse:
        return JSONResponse({"owner": session_owner(request.scope)})

    async def websocket(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text(str(session_owner(socket.scope)))
        await socket.close()

    app = Starlette(
        routes=[
            Route("/count", count, methods=["GET", "POST"]),
            Route("/read", read),
            Route("/plain", plain),
            Route("/forget", forget),
            Route("/owner", owner),
            Route("/login/page", plain),
            WebSocketRoute("/ws", websocket),
        ],
        middleware=[
            Middleware(CORSMiddleware, allow_origins=["https://page.example"], allow_credentials=True),
            Middleware(SessionMiddleware, secret_key=SECRET),
        ],
    )
    app.state.handled = handled
    return app


def handled(worker: Worker) -> list[str]:
    """Return the paths of the requests that the worker's app has handled."""
    assert isinstance(worker.app, Starlette)
    paths: list[str] = worker.app.state.handled
    return paths


def signed(session: Mapping[str, Any], secret: str = SECRET) -> str:
    """Return a session cookie's value as SessionMiddleware would write it."""
    return TimestampSigner(secret).sign(b64encode(json.dumps(session).encode())).decode()


class Reply:
    """A reply, read to its end."""

    def __init__(self, response: aiohttp.ClientResponse, body: bytes) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = body
        self.set_cookies = response.headers.getall("Set-Cookie", [])

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def cookie(self) -> str:
        """The value of the session cookie that was set."""
        (field,) = self.set_cookies
        return field.split(";")[0].partition("=")[2]


async def get(worker: Worker, path: str, cookie: str | None = None, **headers: str) -> Reply:
    if cookie is not None:
        headers["Cookie"] = f"session={cookie}"
    async with (
        aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as http,
        http.get(worker.url + path, headers=headers) as response,
    ):
        return Reply(response, await response.read())


def test_new_session_is_handled_where_it_lands_and_its_cookie_names_that_worker() -> None:
    async def scenario() -> None:
        async with two(make_app) as (one, other):
            reply = await get(other, "/count")
            assert reply.status == 200
            assert owner_in(reply.cookie) == other.owner_id
            assert (handled(one), handled(other)) == ([], ["/count"])

    asyncio.run(scenario())


def test_session_of_another_worker_is_forwarded_with_one_set_cookie() -> None:
    async def scenario() -> None:
        async with two(make_app) as (one, other):
            cookie = (await get(one, "/count")).cookie
            forgotten = await get(other, "/forget", cookie)
            # The handler changed the session: the owner's cookie alone arrives.
            assert len(forgotten.set_cookies) == 1
            reply = await get(other, "/count", cookie)
            assert (reply.status, reply.json) == (200, {"count": 2})
            assert reply.set_cookies == []
            assert handled(other) == []

    asyncio.run(scenario())


def test_request_over_a_private_socket_is_handled_there_whosever_session_it_is() -> None:
    async def scenario() -> None:
        async with two(make_app) as (one, other):
            cookie = (await get(one, "/count")).cookie
            async with (
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(other.socket_path)) as http,
                http.get("http://worker/read", headers={"Cookie": f"session={cookie}"}) as response,
            ):
                assert await response.json() == {"count": 0}
                assert "Date" not in response.headers
                assert "Server" not in response.headers
            assert handled(other) == ["/read"]

    asyncio.run(scenario())


def test_session_of_a_worker_that_has_stopped_gets_410() -> None:
    async def scenario() -> None:
        async with two(make_app) as (one, other):
            cookie = (await get(one, "/count")).cookie
            assert (await get(other, "/count", cookie)).status == 200
            await one.stop()
            reply = await get(other, "/count", cookie)
            assert reply.status == 410
            assert reply.headers["Content-Type"] == "application/problem+json"
            assert reply.headers["Cache-Control"] == "no-store"
            assert reply.json["status"] == 410
            assert one.owner_id not in reply.body.decode()
            assert handled(other) == []

    asyncio.run(scenario())


def test_session_of_a_worker_that_left_its_socket_file_behind_gets_410() -> None:
    async def scenario() -> None:
        with socket_directory() as directory:
            async with running(make_app(), directory) as worker:
                dead = new_owner_id()
                with socket.socket(socket.AF_UNIX) as left_behind:
                    left_behind.bind(os.path.join(directory, f"{dead}.sock"))
                reply = await get(worker, "/count", signed({"session_id": "x", "gym_worker": dead}))
                assert reply.status == 410
                assert handled(worker) == []

    asyncio.run(scenario())


def test_session_of_a_server_that_was_restarted_gets_410() -> None:
    async def scenario() -> None:
        with socket_directory() as directory:
            async with running(make_app(), directory) as before:
                cookie = (await get(before, "/count")).cookie
        with socket_directory() as directory:
            async with running(make_app(), directory) as after:
                assert (await get(after, "/read", cookie)).status == 410

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "cookie",
    [
        pytest.param(signed({"session_id": "x", "gym_worker": "0123456789ab"}, "another secret"), id="badly signed"),
        pytest.param("nonsense", id="malformed"),
        pytest.param("", id="empty"),
        pytest.param(signed({"session_id": "x", "gym_worker": "../../0123456"}), id="an owner that is a path"),
        pytest.param(signed({"session_id": "x", "gym_worker": "0123456789AB"}), id="an owner in upper case"),
        pytest.param(signed({"session_id": "x", "gym_worker": "0123456789ab\n"}), id="an owner with a line feed"),
        pytest.param(signed({"session_id": "x", "gym_worker": 12}), id="an owner that is a number"),
    ],
)
def test_cookie_that_names_no_owner_validly_is_handled_where_it_lands(cookie: str) -> None:
    async def scenario() -> None:
        async with two(make_app) as (one, other):
            assert (await get(other, "/count", cookie)).status == 200
            assert (handled(one), handled(other)) == ([], ["/count"])

    asyncio.run(scenario())


def test_expired_cookie_is_handled_where_it_lands(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with two(make_app) as (one, other):
            cookie = (await get(one, "/count")).cookie
            later = int(time.time()) + 15 * 24 * 60 * 60
            monkeypatch.setattr(TimestampSigner, "get_timestamp", lambda self: later)
            reply = await get(other, "/count", cookie)
            assert (reply.status, reply.json) == (200, {"count": 1})
            assert owner_in(reply.cookie) == other.owner_id

    asyncio.run(scenario())


def test_cookie_of_a_single_worker_server_is_adopted_even_by_a_request_that_only_reads() -> None:
    async def scenario() -> None:
        async with two(make_app) as (one, other):
            reply = await get(other, "/read", signed({"session_id": "from elsewhere"}))
            assert owner_in(reply.cookie) == other.owner_id
            assert (await get(one, "/count", reply.cookie)).json == {"count": 1}
            assert handled(one) == []

    asyncio.run(scenario())


def test_unrouted_worker_serves_the_app_untouched() -> None:
    async def scenario() -> None:
        with socket_directory() as directory:
            async with running(make_app(), directory, routed=False) as worker:
                reply = await get(worker, "/count")
                assert owner_in(reply.cookie) is None
                assert (await get(worker, "/owner", reply.cookie)).json == {"owner": None}
                assert os.listdir(directory) == []

    asyncio.run(scenario())


def test_stamped_session_that_is_only_read_gets_no_set_cookie_and_keeps_vary() -> None:
    async def scenario() -> None:
        async with two(make_app) as (one, other):
            cookie = (await get(one, "/count")).cookie
            for worker in (one, other):
                reply = await get(worker, "/read", cookie)
                assert reply.set_cookies == []
                assert "Cookie" in reply.headers["Vary"]

    asyncio.run(scenario())


def test_request_that_makes_no_session_gets_no_cookie() -> None:
    async def scenario() -> None:
        async with two(make_app) as (one, _):
            assert (await get(one, "/plain")).set_cookies == []

    asyncio.run(scenario())


def test_session_that_is_emptied_is_expired_as_without_the_stamp() -> None:
    async def scenario() -> None:
        async with two(make_app) as (one, other):
            cookie = (await get(one, "/count")).cookie
            reply = await get(other, "/forget", cookie)
            assert reply.cookie == "null"
            assert "expires=Thu, 01 Jan 1970" in reply.set_cookies[0]

    asyncio.run(scenario())


def test_app_is_told_the_owner_of_a_session() -> None:
    async def scenario() -> None:
        async with two(make_app) as (one, other):
            cookie = (await get(one, "/count")).cookie
            assert (await get(other, "/owner", cookie)).json == {"owner": one.owner_id}
            assert (await get(other, "/owner")).json == {"owner": other.owner_id}

    asyncio.run(scenario())


def test_local_paths_are_handled_where_they_land_and_leave_the_session_alone() -> None:
    async def scenario() -> None:
        async with two(make_app, settings=Settings(local_paths=["/login"])) as (one, other):
            cookie = (await get(one, "/count")).cookie
            await one.stop()
            reply = await get(other, "/login/page", cookie)
            assert (reply.status, reply.set_cookies) == (200, [])
            assert (await get(other, "/count", cookie)).status == 410

    asyncio.run(scenario())


def test_error_carries_the_cors_headers_of_the_app() -> None:
    async def scenario() -> None:
        async with two(make_app) as (one, other):
            cookie = (await get(one, "/count")).cookie
            await one.stop()
            reply = await get(other, "/count", cookie, Origin="https://page.example")
            assert reply.status == 410
            assert reply.headers["Access-Control-Allow-Origin"] == "https://page.example"
            assert reply.headers["Access-Control-Allow-Credentials"] == "true"
            foreign = await get(other, "/count", cookie, Origin="https://other.example")
            assert "Access-Control-Allow-Origin" not in foreign.headers

    asyncio.run(scenario())


def test_websocket_of_a_lost_session_is_refused_with_410() -> None:
    async def scenario() -> None:
        async with two(make_app) as (one, other):
            cookie = (await get(one, "/count")).cookie
            async with aiohttp.ClientSession() as http:
                headers = {"Cookie": f"session={cookie}"}
                async with http.ws_connect(other.url + "/ws", headers=headers) as websocket:
                    assert (await websocket.receive()).data == one.owner_id
                await one.stop()
                with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                    await http.ws_connect(other.url + "/ws", headers=headers)
                assert refused.value.status == 410

    asyncio.run(scenario())


def test_connections_to_an_owner_are_kept_and_reused() -> None:
    async def scenario() -> None:
        async with two(make_app) as (one, other):
            assert one.routed is not None
            cookie = (await get(one, "/count")).cookie
            await get(other, "/read", cookie)
            kept = set(one.routed.private.state.connections)
            for _ in range(20):
                await get(other, "/read", cookie)
            assert set(one.routed.private.state.connections) == kept
            assert len(kept) == 1

    asyncio.run(scenario())


def test_loss_is_logged_once_with_the_owner_and_not_a_line_a_request(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> str:
        async with two(make_app) as (one, other):
            cookie = (await get(one, "/count")).cookie
            await one.stop()
            for _ in range(5):
                assert (await get(other, "/read", cookie)).status == 410
            return one.owner_id

    with caplog.at_level(logging.WARNING, logger="tests"):
        owner_id = asyncio.run(scenario())
    (record,) = [record for record in caplog.records if record.name == "tests"]
    assert owner_id in record.getMessage()
    assert "gone" in record.getMessage()


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"nonsense\r\n\r\n", id="no reply"),
        pytest.param(b"HTTP/1.1 200 OK\r\nno field\r\n\r\n", id="a malformed field"),
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", id="a malformed length"),
        pytest.param(b"HTTP/1.1 200 OK\r\ngym-gunicorn-reply: x\r\ncontent-length: 0\r\n\r\n", id="no base64"),
        pytest.param(b"HTTP/1.1 200 OK\r\ngym-gunicorn-reply: kA==\r\ncontent-length: 0\r\n\r\n", id="no head"),
        pytest.param(b"HTTP/1.1 200 OK\r\ngym-gunicorn-reply:\r\ncontent-length: 0\r\n\r\n", id="an empty head"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\ngym-gunicorn-reply: x\r\ngym-gunicorn-reply: lAHMyJAH\r\ncontent-length: 0\r\n\r\n",
            id="no base64, and then a head",
        ),
    ],
)
def test_exchange_that_breaks_gets_502_and_no_cookie_gets_into_the_log(
    garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1):
            writer.write(garbage)
        writer.close()

    no_secret_is_logged(answer, Settings(forwarder="aiohttp"), caplog)


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xff" * 100, id="no frame"),
        pytest.param(frame(BODY, b"x"), id="a body before the reply"),
        pytest.param(frame(REQUEST, b"x"), id="a request"),
        pytest.param(frame(REPLY, b"x"), id="no head"),
        pytest.param(frame(REPLY, b"\x90"), id="another head"),
        pytest.param(frame(REPLY, b"\x94\x02\xcc\xc8\x90\x07"), id="a head of another version"),
        pytest.param(frame(REPLY, b"lAHMyJAH"), id="a head in base64"),
        pytest.param(b"\x00\x00\x10\x00\x05\x94", id="half a head"),
    ],
)
def test_link_that_breaks_gets_502_and_no_cookie_gets_into_the_log(
    garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readexactly(len(PREFACE))
            path: str = writer.get_extra_info("sockname")
            writer.write(greeting(os.path.basename(path).removesuffix(".sock")))
            await reader.readexactly(10)
            writer.write(garbage)
        writer.close()

    no_secret_is_logged(answer, Settings(forwarder="framed"), caplog)


def no_secret_is_logged(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Have a request forwarded to an owner that answers so, and look for its cookie in the log."""

    async def scenario() -> str:
        with socket_directory() as directory:
            owner = new_owner_id()
            cookie = signed({"session_id": "x", "gym_worker": owner})
            server = await asyncio.start_unix_server(answer, os.path.join(directory, f"{owner}.sock"))
            async with server, running(make_app(), directory, settings=settings) as worker:
                assert (await get(worker, "/read", cookie)).status == 502
            return cookie

    with caplog.at_level(logging.DEBUG, logger="tests"):
        cookie = asyncio.run(scenario())
    logged = "\n".join(record.getMessage() for record in caplog.records if record.name == "tests")
    assert "broken" in logged
    assert cookie not in logged
    assert cookie.split(".")[0] not in logged
