"""The quick-start app: a counter for each session, kept in this process's memory.

It knows nothing of gym_gunicorn. On several stock workers most of its answers are wrong.
"""

from __future__ import annotations

import os
import uuid
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

counters: dict[str, int] = {}


async def seed_session(request: Request) -> JSONResponse:
    initial_count = await _integer(request, "initial_count")
    session_id = request.session.setdefault("session_id", str(uuid.uuid4()))
    counters[session_id] = initial_count
    return JSONResponse({"success": True})


async def increment_counter(request: Request) -> JSONResponse:
    count = await _integer(request, "count")
    session_id = request.session.setdefault("session_id", str(uuid.uuid4()))
    counters[session_id] = counters.get(session_id, 0) + count
    return JSONResponse({"success": True})


async def get_counter_value(request: Request) -> JSONResponse:
    return JSONResponse({"count": _count(request)})


async def verify(request: Request) -> JSONResponse:
    expected_count = await _integer(request, "expected_count")
    return JSONResponse({"reward": 1.0 if _count(request) == expected_count else 0.0})


def _count(request: Request) -> int:
    return counters.get(request.session.get("session_id", ""), 0)


async def _integer(request: Request, name: str) -> int:
    """Return the integer ``name`` of the request's JSON body; answer 422 with the reason if there is none."""
    try:
        body: Any = await request.json()
    except (ValueError, RecursionError):
        raise HTTPException(422, "the body is not JSON") from None
    if not isinstance(body, dict):
        raise HTTPException(422, "the body is not a JSON object")
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
        raise HTTPException(422, f"{name!r} must be an integer of at most 64 bits")
    return value


async def explain(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)


app = Starlette(
    routes=[
        Route("/seed_session", seed_session, methods=["POST"]),
        Route("/increment_counter", increment_counter, methods=["POST"]),
        Route("/get_counter_value", get_counter_value, methods=["POST"]),
        Route("/verify", verify, methods=["POST"]),
    ],
    middleware=[Middleware(SessionMiddleware, secret_key=os.environ.get("SESSION_SECRET", "change-me"))],
    exception_handlers={HTTPException: explain},
)
