"""Paths that a server answers for its operators: its health, its metrics."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gym_gunicorn.metrics.endpoints import SILENT, OperatorPaths, health, metrics, takes_sessions
from gym_gunicorn.metrics.values import BEAT, LOCAL, SERVING, STATE, STOPPING, Figures, figures_path

OWNERS = [f"{number:012x}" for number in range(1, 5)]


@pytest.fixture
def directory() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="unit-", dir="/tmp")
    try:
        yield path
    finally:
        shutil.rmtree(path)


def worker(directory: str, owner: str, state: int = SERVING, silence: float = 0.0) -> Figures:
    made = Figures(figures_path(directory, owner))
    made.values[STATE] = state
    made.values[BEAT] = time.monotonic_ns() - int(silence * 1e9)
    return made


async def the_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Say what has been asked for."""
    if scope["type"] == "http":
        await PlainTextResponse(f"app: {scope['method']} {scope['path']}")(scope, receive, send)
    else:
        await send({"type": "app", "of": scope["type"]})


def asked(app: ASGIApp, path: str, method: str = "GET", **scope: Any) -> list[Message]:
    """Return what the app sends."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    base = {"type": "http", "method": method, "path": path, "root_path": "", "headers": [], "query_string": b""}
    asyncio.run(_call(app, {**base, **scope}, receive, send))
    return sent


async def _call(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)


def body(sent: list[Message]) -> bytes:
    return b"".join(message.get("body", b"") for message in sent)


def answered() -> Response:
    return PlainTextResponse("the server", 203)


PATHS = OperatorPaths(the_app, {"/health": answered})


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_path_is_answered_outside_the_app(method: str) -> None:
    start, *_ = asked(PATHS, "/health", method)
    assert start["status"] == 203


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "get"])
def test_other_methods_go_to_the_app(method: str) -> None:
    assert body(asked(PATHS, "/health", method)) == f"app: {method} /health".encode()


@pytest.mark.parametrize("path", ["/", "/healthy", "/health/", "/health/x", "/x/health", "//health", "/HEALTH", ""])
def test_other_paths_go_to_the_app(path: str) -> None:
    assert body(asked(PATHS, path)) == f"app: GET {path}".encode()


def test_path_is_taken_below_the_root_path() -> None:
    assert body(asked(PATHS, "/api/health", root_path="/api")) == b"the server"
    assert body(asked(PATHS, "/api/health")) == b"app: GET /api/health"


def test_query_does_not_matter() -> None:
    assert body(asked(PATHS, "/health", query_string=b"verbose=1")) == b"the server"


@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
def test_what_is_no_request_goes_to_the_app(kind: str) -> None:
    assert asked(PATHS, "/health", type=kind) == [{"type": "app", "of": kind}]


def test_server_is_healthy_while_one_worker_takes_sessions(directory: str) -> None:
    kept = [worker(directory, OWNERS[0]), worker(directory, OWNERS[1], STOPPING)]
    response = health(directory)
    assert response.status_code == 200
    assert response.body == b"1 of 2 workers take new sessions\n"
    assert response.headers["cache-control"] == "no-store"
    kept[0].values[STATE] = STOPPING
    assert health(directory).status_code == 503
    assert health(directory).headers["cache-control"] == "no-store"


def test_worker_that_starts_takes_no_sessions_yet(directory: str) -> None:
    kept = worker(directory, OWNERS[0], 0)
    assert health(directory).status_code == 503
    kept.values[STATE] = SERVING
    assert health(directory).status_code == 200


def test_worker_that_is_silent_does_not_count(directory: str) -> None:
    kept = worker(directory, OWNERS[0], silence=SILENT)
    assert health(directory).status_code == 503
    assert not takes_sessions(kept.reading(OWNERS[0]))
    kept.beat(0.1)
    assert health(directory).status_code == 200
    assert takes_sessions(kept.reading(OWNERS[0]))


def test_server_without_workers_or_directory_is_not_healthy(directory: str) -> None:
    assert health(directory).status_code == 503
    assert health(directory + "/missing").status_code == 503


def test_metrics_are_the_whole_servers(directory: str) -> None:
    kept = [worker(directory, owner) for owner in OWNERS]
    for number, figures in enumerate(kept, 1):
        figures.values[LOCAL] = number
    response = metrics(directory)
    assert response.status_code == 200
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(bytes(response.body).decode())}
    (sample,) = families["gym_gunicorn_requests_local"].samples
    assert sample.value == 10
