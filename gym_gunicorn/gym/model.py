"""Model servers: an OpenAI-compatible front for an OpenAI-compatible backend. They keep no state."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar

import aiohttp
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gym_gunicorn.disconnect import CancelOnDisconnect
from gym_gunicorn.gym.agent import KEEP_ALIVE
from gym_gunicorn.gym.server import GymServer

# What a caller's request and a backend's reply keep on their way.
_REQUEST_FIELDS = ("content-type", "accept")
_REPLY_FIELDS = ("content-type", "retry-after", "x-request-id")


class ModelServer(GymServer):
    """Serves ``/v1/responses`` and ``/v1/chat/completions`` from a backend, streams included.

    Its workers are not routed, however many there are: any of them can answer.

    Args:
        backend_url: the base URL of the backend, without ``/v1``.
        api_key: sent to the backend as a bearer token.
    """

    routed: ClassVar[bool] = False

    def __init__(self, *, backend_url: str, api_key: str | None = None) -> None:
        super().__init__()
        self.backend_url = backend_url.rstrip("/")
        self._authorization = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http: aiohttp.ClientSession | None = None
        for path in ("/v1/responses", "/v1/chat/completions"):
            # Nobody pays for an answer that its caller no longer waits for.
            self.app.router.routes.append(Route(path, CancelOnDisconnect(self._serve), methods=["POST"]))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._relay(Request(scope, receive))
        await answer(scope, receive, send)

    async def _relay(self, request: Request) -> Response:
        assert self._http is not None, "the server is not running"
        headers = {name: value for name, value in request.headers.items() if name in _REQUEST_FIELDS}
        try:
            answer = await self._http.post(
                self.backend_url + request.url.path,
                data=await request.body(),
                headers={**headers, **self._authorization},
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError) as error:
            # As OpenAI's own errors look, so that its clients raise what they should.
            message = f"the backend does not answer ({error or type(error).__name__})"
            return JSONResponse({"error": {"message": message, "type": "backend_error", "code": None}}, 502)
        kept = {name: value for name, value in answer.headers.items() if name.lower() in _REPLY_FIELDS}
        return StreamingResponse(_body(answer), answer.status, kept)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with (
            super().running(),
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
                cookie_jar=aiohttp.DummyCookieJar(),
            ) as http,
        ):
            self._http = http
            yield


async def _body(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async with answer:
        async for chunk in answer.content.iter_any():
            yield chunk
