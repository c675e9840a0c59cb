"""Two workers in one process, and a hostile caller that writes its requests itself."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from base64 import b64decode
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from itsdangerous import URLSafeSerializer
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gym_gunicorn.settings import Settings
from tests.hostile.forging import DAY, OWNER_KEY, SECRET, TOKEN_HEADER, TOKEN_SALT
from tests.workers import Worker, running, socket_directory

SETTINGS = Settings(token_header=TOKEN_HEADER, token_salt=TOKEN_SALT, token_path="/mcp")
MAX_AGE = 14 * DAY


def make_app(name: str) -> Starlette:
    """An app that says who handles a request, and what session and token it believes."""
    serializer = URLSafeSerializer(SECRET, salt=TOKEN_SALT)

    async def seed(request: Request) -> Response:
        request.session["n"] = 1
        return Response(status_code=204)

    async def seen(request: Request) -> Response:
        valid, token = serializer.loads_unsafe(request.headers.get(TOKEN_HEADER, ""))
        # Not JSONResponse, which can't say half surrogates.
        content = json.dumps(
            {
                "by": name,
                "session": dict(request.session),
                "token": token if valid else None,
                "path": request.url.path,
                "client": request.scope["client"],
                "scheme": request.scope["scheme"],
                "headers": [[key.decode("latin-1"), value.decode("latin-1")] for key, value in request.headers.raw],
                "body": (await request.body()).decode("latin-1"),
            }
        )
        return Response(content, media_type="application/json")

    return Starlette(
        routes=[Route("/seed", seed), Route("/{path:path}", seen, methods=["GET", "POST"])],
        middleware=[Middleware(SessionMiddleware, secret_key=SECRET)],
    )


@dataclass
class Answer:
    """A whole reply: its status, fields in lower case, and body."""

    status: int
    fields: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""

    @property
    def seen(self) -> dict[str, Any]:
        """What the handler says it saw."""
        assert self.status == 200, (self.status, self.body)
        result: dict[str, Any] = json.loads(self.body)
        return result

    @property
    def set_session(self) -> dict[str, Any] | None:
        """The session in the cookie that the reply sets."""
        for name, value in self.fields:
            if name == "set-cookie":
                result: dict[str, Any] = json.loads(b64decode(value.partition("=")[2].partition(".")[0] + "=="))
                return result
        return None


async def send(worker: Worker, data: bytes) -> Answer:
    """Write ``data`` to a worker on a connection of its own, and return the first reply."""
    reader, writer = await asyncio.open_connection(*worker.address, limit=2**20)
    try:
        async with asyncio.timeout(60):
            writer.write(data)
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
            fields = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
            length = dict(fields).get("content-length")
            body = await (reader.read() if length is None else reader.readexactly(int(length)))
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return Answer(int(status.split()[1]), fields, body)


@dataclass
class Pair:
    """``owner`` holds sessions; ``other`` is the worker that hostile callers reach."""

    owner: Worker
    other: Worker

    def forwards(self) -> int:
        """Return how many requests have been passed on by either worker."""
        return sum(worker.routed.forwarder.finished for worker in (self.owner, self.other) if worker.routed)

    async def ask(
        self,
        *,
        cookies: Sequence[str | bytes] = (),
        token: str | None = None,
        path: str = "/",
        fields: Sequence[bytes] = (),
        to: Worker | None = None,
    ) -> Answer:
        """Send a request to ``other``, or to another worker; each of ``cookies`` is the value of a Cookie field."""
        lines = [f"GET {path} HTTP/1.1".encode(), b"Host: x"]
        lines += [b"Cookie: " + (one if isinstance(one, bytes) else one.encode("latin-1")) for one in cookies]
        if token is not None:
            lines.append(f"{TOKEN_HEADER}: {token}".encode("latin-1"))
        data = b"\r\n".join([*lines, *fields, b"Connection: close", b"", b""])
        return await send(to or self.other, data)


@contextlib.asynccontextmanager
async def pair(**config: Any) -> AsyncIterator[Pair]:
    """Run two workers that share a secret, a salt and a socket directory."""
    names = itertools.chain(["owner", "other"])
    with socket_directory() as directory:

        def worker() -> contextlib.AbstractAsyncContextManager[Worker]:
            return running(make_app(next(names)), directory, settings=SETTINGS, **config)

        async with worker() as owner, worker() as other:
            yield Pair(owner, other)


def of(owner: object) -> dict[str, object]:
    """Return a session, or a token, that names an owner."""
    return {"n": 1, OWNER_KEY: owner}
