"""A FastAPI app as its author wrote it: it knows nothing of gym_gunicorn."""

from __future__ import annotations

import uuid
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from pydantic import BaseModel
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.sessions import SessionMiddleware

app = FastAPI()
counters: dict[str, int] = {}


class Timing(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        response = await call_next(request)
        response.headers.append("X-Served", "once")
        return response


app.add_middleware(Timing)
app.add_middleware(SessionMiddleware, secret_key="of FastAPI")
app.add_middleware(
    CORSMiddleware, allow_origins=["https://page.example"], allow_credentials=True, expose_headers=["X-Served"]
)


class Seed(BaseModel):
    initial_count: int


class Increment(BaseModel):
    count: int


class Expected(BaseModel):
    expected_count: int


def session_id(request: Request) -> str:
    """A dependency that runs in a thread."""
    name: str = request.session.setdefault("session_id", str(uuid.uuid4()))
    return name


async def seeded(name: Annotated[str, Depends(session_id)]) -> str:
    """A dependency that runs on the event loop."""
    if name not in counters:
        raise HTTPException(404, "not seeded")
    return name


@app.post("/seed_session")
def seed_session(seed: Seed, name: Annotated[str, Depends(session_id)]) -> dict[str, bool]:
    counters[name] = seed.initial_count
    return {"success": True}


@app.post("/increment_counter")
async def increment_counter(increment: Increment, name: Annotated[str, Depends(seeded)]) -> dict[str, bool]:
    counters[name] += increment.count
    return {"success": True}


@app.post("/verify")
def verify(expected: Expected, name: Annotated[str, Depends(seeded)]) -> dict[str, float]:
    return {"reward": 1.0 if counters[name] == expected.expected_count else 0.0}
