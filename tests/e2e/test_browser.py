"""A page of another origin reads our errors, in a real browser."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from gym_gunicorn.settings import Settings
from tests.workers import Worker, running, socket_directory, until

# Fetches each path of the worker that is not the owner, and reports what a script could read.
PAGE = """
<script>
const read = async (path) => {
  try {
    const reply = await fetch(path, {credentials: "include"});
    return {status: reply.status, body: await reply.json()};
  } catch (error) { return {error: String(error)}; }
};
(async () => {
  const results = {};
  await read(OWNER + "/seed");
  results.routed = await read(OTHER + "/seed");
  results.broken = await read(OTHER + "/break");
  const held = read(OTHER + "/hold");
  await fetch("/until-held");
  results.busy = await read(OTHER + "/seed");
  await fetch("/release");
  results.held = await held;
  await fetch("/stop-owner");
  results.gone = await read(OTHER + "/seed");
  await fetch("/report", {method: "POST", body: JSON.stringify(results)});
})();
</script>
"""


def make_app(origin: str, private_connections: list[Worker], held: asyncio.Event, release: asyncio.Event) -> Starlette:
    async def seed(request: Request) -> Response:
        request.session["session_id"] = "x"
        return JSONResponse({"seeded": True})

    async def break_exchange(request: Request) -> Response:
        for worker in private_connections:
            assert worker.routed is not None
            for connection in list(worker.routed.private.state.connections):
                connection.transport.abort()
        await asyncio.Event().wait()
        raise AssertionError

    async def hold(request: Request) -> Response:
        held.set()
        await release.wait()
        return JSONResponse({"held": True})

    return Starlette(
        routes=[Route("/seed", seed), Route("/break", break_exchange), Route("/hold", hold)],
        middleware=[
            Middleware(CORSMiddleware, allow_origins=[origin], allow_credentials=True),
            Middleware(SessionMiddleware, secret_key="a secret of the tests"),
        ],
    )


async def browse(chromium: str, profile: str) -> dict[str, Any]:
    """Run the page in a browser and return what it reports."""
    workers: list[Worker] = []
    held, release = asyncio.Event(), asyncio.Event()
    report: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    async def page(request: Request) -> Response:
        owner, other = workers
        return HTMLResponse(PAGE.replace("OWNER", json.dumps(owner.url)).replace("OTHER", json.dumps(other.url)))

    async def until_held(request: Request) -> Response:
        await held.wait()
        return Response()

    async def let_go(request: Request) -> Response:
        release.set()
        return Response()

    async def stop_owner(request: Request) -> Response:
        await workers[0].stop()
        return Response()

    async def take_report(request: Request) -> Response:
        report.set_result(await request.json())
        return Response()

    pages = Starlette(
        routes=[
            Route("/", page),
            Route("/until-held", until_held),
            Route("/release", let_go),
            Route("/stop-owner", stop_owner),
            Route("/report", take_report, methods=["POST"]),
        ]
    )
    with socket_directory() as directory:
        async with running(pages, directory, routed=False) as server:
            made = [make_app(server.url, workers, held, release) for _ in range(2)]
            settings = Settings(max_forwards=1)
            async with (
                running(made[0], directory, settings=settings, graceful_timeout=2) as owner,
                running(made[1], directory, settings=settings) as other,
            ):
                workers += [owner, other]
                browser = await asyncio.create_subprocess_exec(
                    chromium,
                    "--headless",
                    "--no-sandbox",
                    "--disable-gpu",
                    "--disable-quic",
                    "--no-first-run",
                    "--disable-background-networking",
                    "--disable-component-update",
                    "--disable-sync",
                    "--remote-debugging-port=0",
                    f"--user-data-dir={profile}",
                    server.url,
                    env={**os.environ, "TMPDIR": profile},
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL,
                )
                try:
                    await until(report.done, 60)
                finally:
                    browser.kill()
                    await browser.wait()
    return report.result()


def test_page_of_another_origin_can_read_410_502_and_503() -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("left out: chromium is not installed (Debian's package `chromium`)")
    profile = tempfile.mkdtemp(prefix="gg-chromium-")
    try:
        results = asyncio.run(browse(chromium, profile))
    finally:
        shutil.rmtree(profile, ignore_errors=True)
    assert results["routed"] == {"status": 200, "body": {"seeded": True}}
    assert results["held"] == {"status": 200, "body": {"held": True}}
    for name, status in {"broken": 502, "busy": 503, "gone": 410}.items():
        assert results[name]["status"] == results[name]["body"]["status"] == status, results
    assert not Path(profile).exists()
