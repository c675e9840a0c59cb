"""A worker's beats: they tell whether its event loop goes round, from its first turn to its last."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from gym_gunicorn.metrics.values import BEAT, LAG, SERVING, STATE, STOPPING, Figures
from gym_gunicorn.routing import routed_app
from tests.workers import Worker, running, socket_directory, until

LOADED_FOR = 60 * 10**9


class SlowlyLoaded(Figures):
    """Figures that were made long before the worker serves: its app took that long to load."""

    def __init__(self, path: str | None = None) -> None:
        super().__init__(path)
        self.values[BEAT] -= LOADED_FOR


def figures_of(worker: Worker) -> Figures:
    assert worker.routed is not None
    return worker.routed.figures


async def next_beat(figures: Figures) -> None:
    since = figures.values[BEAT]
    await until(lambda: figures.values[BEAT] != since, 60)


def app(release: asyncio.Event) -> Starlette:
    async def hold(request: Request) -> PlainTextResponse:
        await release.wait()
        return PlainTextResponse("held")

    return Starlette(routes=[Route("/", hold)], middleware=[Middleware(SessionMiddleware, secret_key="of the tests")])


def test_time_that_an_app_takes_to_load_is_no_lag_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed_app, "Figures", SlowlyLoaded)

    async def test() -> None:
        with socket_directory() as directory:
            async with running(app(asyncio.Event()), directory) as worker:
                figures = figures_of(worker)
                await until(lambda: figures.values[STATE] == SERVING, 60)
                # What is remembered of it would be most after a few turns.
                for _ in range(3):
                    assert figures.values[LAG] < LOADED_FOR // 10
                    await next_beat(figures)

    asyncio.run(test())


def test_event_loop_that_is_held_up_is_late() -> None:
    async def test() -> None:
        with socket_directory() as directory:
            async with running(app(asyncio.Event()), directory) as worker:
                figures = figures_of(worker)
                await next_beat(figures)
                before = time.monotonic_ns()
                time.sleep(1)  # noqa: ASYNC251  # that is what it is for
                held = time.monotonic_ns() - before
                await next_beat(figures)
                # A tenth of a second is meant to pass between two.
                assert figures.values[LAG] >= held - 10**8

    asyncio.run(test())


def test_worker_that_drains_beats_on() -> None:
    async def test() -> None:
        release = asyncio.Event()
        with socket_directory() as directory:
            async with (
                running(app(release), directory, graceful_timeout=600.0) as worker,
                aiohttp.ClientSession() as http,
            ):
                figures = figures_of(worker)
                request = asyncio.create_task(http.get(worker.url))
                server = worker.server
                await until(lambda: server.server_state.tasks, 60)
                worker.reason_to_stop = "the test says so"
                await until(lambda: figures.values[STATE] == STOPPING, 60)
                try:
                    for _ in range(3):
                        await next_beat(figures)
                finally:
                    release.set()
                    assert (await request).status == 200

    asyncio.run(test())
