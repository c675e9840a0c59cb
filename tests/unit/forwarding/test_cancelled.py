"""What callers are told when a stopping owner has to cancel their requests, whichever way they have come."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from gym_gunicorn.settings import Settings, Way
from tests.workers import running, socket_directory

ORIGIN = "https://a.example"


@pytest.mark.parametrize("path", ["/hang", "/mcp/hang"])
@pytest.mark.parametrize("way", ["direct", "framed", "aiohttp"])
def test_cancelled_request_is_answered_with_cors_fields_and_to_mcp_clients_in_json_rpc(way: str, path: str) -> None:
    begun = asyncio.Event()

    async def hang(request: Request) -> PlainTextResponse:
        begun.set()
        await asyncio.Event().wait()
        return PlainTextResponse("never")

    async def seed(request: Request) -> PlainTextResponse:
        request.session["x"] = 1
        return PlainTextResponse("seeded")

    def app() -> Starlette:
        middleware = [Middleware(CORSMiddleware, allow_origins=[ORIGIN]), Middleware(SessionMiddleware, secret_key="s")]
        return Starlette(routes=[Route("/seed", seed), Route(path, hang)], middleware=middleware)

    forwarder: Way = "aiohttp" if way == "aiohttp" else "framed"
    settings = Settings(forwarder=forwarder, token_header="X-Session-Token", token_path="/mcp")

    async def scenario() -> None:
        with socket_directory() as directory:
            async with (
                running(app(), directory, settings=settings) as other,
                running(app(), directory, settings=settings, graceful_timeout=1.5) as owner,
                aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as http,
            ):
                async with http.get(f"{owner.url}/seed") as seeded:
                    assert seeded.status == 200
                receiver = owner if way == "direct" else other

                async def ask() -> None:
                    async with http.get(f"{receiver.url}{path}", headers={"Origin": ORIGIN}) as response:
                        assert response.status == 503
                        assert response.headers["access-control-allow-origin"] == ORIGIN
                        problem = await response.json(content_type=None)
                        if path == "/hang":
                            assert problem["type"] == "urn:gym-gunicorn:server-stopping"
                        else:
                            assert problem["error"]["data"]["type"] == "urn:gym-gunicorn:server-stopping"

                asking = asyncio.create_task(ask())
                await begun.wait()
                await owner.stop()
                await asking

    asyncio.run(scenario())
