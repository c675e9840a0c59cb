"""An app that says which process handles what, and holds requests until a test releases them."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gym_gunicorn import session_owner
from tests.e2e.apps.journal import note, released

note("import")

counts: dict[str, int] = {}


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[dict[str, int]]:
    note("startup")
    yield {"started_by": os.getpid()}
    note("shutdown", "sockets:" + ",".join(sockets()))


def sockets() -> list[str]:
    """Return the owner IDs of the private sockets that are there now."""
    return [path.stem for path in Path(os.environ.get("SOCKETS", "/nowhere")).glob("gym-gunicorn-*/*.sock")]


async def pid(request: Request) -> JSONResponse:
    """Needs no session."""
    return JSONResponse({"pid": os.getpid()})


async def count(request: Request) -> JSONResponse:
    """Count the calls of a session: 1, 2, 3, as long as they reach the process that counted before."""
    session_id = request.session.setdefault("id", str(uuid.uuid4()))
    counts[session_id] = counts.get(session_id, 0) + 1
    note("owner", session_owner(request.scope))
    return JSONResponse({"count": counts[session_id], "pid": os.getpid()})


async def hold(request: Request) -> JSONResponse:
    """Answer when the test says so."""
    name = request.query_params["name"]
    note("hold", name)
    await released(name)
    note("held", name)
    return JSONResponse({"pid": os.getpid()})


async def block(request: Request) -> JSONResponse:
    """Block the event loop for longer than any test waits."""
    note("block")
    time.sleep(600)  # noqa: ASYNC251  # that is what it is for
    return JSONResponse({})


async def seen(request: Request) -> JSONResponse:
    """Return the request as the handler sees it."""
    scope = request.scope
    return JSONResponse(
        {
            "pid": os.getpid(),
            "started_by": request.state.started_by,
            "client": scope["client"],
            "scheme": scope["scheme"],
            "method": scope["method"],
            "raw_path": scope["raw_path"].decode("latin-1"),
            "query_string": scope["query_string"].decode("latin-1"),
            "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]],
        }
    )


async def listen(request: Request) -> JSONResponse:
    """Read on until the caller has gone."""
    note("listen")
    while (await request.receive())["type"] != "http.disconnect":
        pass
    note("disconnected")
    return JSONResponse({})


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Send each piece of the body back as soon as it has come."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-pid", str(os.getpid()).encode())]})
    more_body = True
    while more_body:
        message = await receive()
        more_body = message.get("more_body", False)
        await send({"type": "http.response.body", "body": message.get("body", b""), "more_body": more_body})


app = Starlette(
    routes=[
        Route("/pid", pid),
        Route("/count", count, methods=["POST"]),
        Route("/hold", hold),
        Route("/block", block),
        Route("/seen", seen),
        Route("/listen", listen),
    ],
    middleware=[Middleware(SessionMiddleware, secret_key="of the tests")],
    lifespan=lifespan,
)
app.mount("/echo", echo)
