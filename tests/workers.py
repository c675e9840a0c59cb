"""Two or more workers in one process, with real sockets between them.

A worker here is what a gunicorn worker runs: its own app, the router, the public and
the private server, all from the package. Only gunicorn itself is missing, so a test
can say which worker receives a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp
from uvicorn.config import Config

from gym_gunicorn.lifecycle.public_server import RoutedServer
from gym_gunicorn.owner import new_owner_id
from gym_gunicorn.routing.routed_app import Routed, route
from gym_gunicorn.settings import Settings


@dataclass
class Worker:
    """A running worker. ``address`` is where its public server listens."""

    owner_id: str
    app: ASGIApp
    routed: Routed | None
    server: RoutedServer
    listener: socket.socket
    reason_to_stop: str | None = None
    hurry: bool = False
    task: asyncio.Task[None] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> Any:
        return self.listener.getsockname()

    @property
    def url(self) -> str:
        host, port = self.address
        return f"http://{host}:{port}"

    @property
    def socket_path(self) -> str:
        assert self.routed is not None
        return self.routed.private.path

    async def stop(self) -> None:
        self.reason_to_stop = "the test says so"
        if self.task is not None:
            await self.task


@contextlib.contextmanager
def socket_directory() -> Iterator[str]:
    """A short path, as Unix sockets need it."""
    path = tempfile.mkdtemp(prefix="gg-test-", dir="/tmp")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.asynccontextmanager
async def running(
    app: ASGIApp,
    directory: str,
    *,
    settings: Settings | None = None,
    routed: bool = True,
    listener: socket.socket | None = None,
    graceful_timeout: float = 10.0,
    **config: Any,
) -> AsyncIterator[Worker]:
    """Run one worker that serves ``app``. ``config`` goes to uvicorn's ``Config``."""
    owner_id = new_owner_id()
    parts = None
    if routed:
        parts = route(
            app,
            owner_id=owner_id,
            directory=directory,
            settings=settings or Settings(),
            backlog=128,
            log=logging.getLogger("tests"),
        )
    if listener is None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    # The server closes its own; a test still wants the address.
    served = listener.dup()
    worker: Worker
    server = RoutedServer(
        Config(parts.app if parts is not None else app, log_config=None, **{"ws": "auto", **config}),
        parts,
        must_stop=lambda: worker.reason_to_stop,
        must_hurry=lambda: worker.hurry,
        graceful_timeout=graceful_timeout,
    )
    worker = Worker(owner_id, app, parts, server, listener)
    worker.task = asyncio.create_task(server.serve(sockets=[served]))
    try:
        await until(lambda: server.started and (parts is None or os.path.exists(parts.private.path)))
        yield worker
    finally:
        worker.hurry = True
        await worker.stop()
        listener.close()


@contextlib.asynccontextmanager
async def two(make_app: Callable[[], ASGIApp], **options: Any) -> AsyncIterator[tuple[Worker, Worker]]:
    """Run two workers, each with an app of its own, in one socket directory."""
    with socket_directory() as directory:
        async with running(make_app(), directory, **options) as one, running(make_app(), directory, **options) as other:
            yield one, other


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for ``condition``, and fail when it does not come true in time."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # the conditions are not events
            await asyncio.sleep(0.01)
