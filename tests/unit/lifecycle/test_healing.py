"""A private socket that is taken from under a running worker: put back, and nobody connected to it notices."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gym_gunicorn.lifecycle.healing import Healing
from gym_gunicorn.lifecycle.socket_directory import SocketDirectory
from gym_gunicorn.metrics.values import LOCAL, Figures, figures_path, read_all
from tests.e2e.apps.probe import app
from tests.workers import Worker, running

BACKLOG = 128
REQUEST = b"GET /pid HTTP/1.1\r\nhost: owner\r\n\r\n"

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a test's coroutine on one kind of event loop, then on the other."""

    def run(coroutine: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(coroutine)

    return run


@pytest.fixture
def directory() -> Iterator[SocketDirectory]:
    parent = tempfile.mkdtemp(prefix="unit-", dir="/tmp")
    made = SocketDirectory.create(parent, os.geteuid(), os.getegid())
    try:
        yield made
    finally:
        made.leave()
        shutil.rmtree(parent)


@contextlib.asynccontextmanager
async def healed(directory: SocketDirectory) -> AsyncIterator[tuple[Worker, Healing, Figures]]:
    """Run a worker, and what looks after it."""
    async with running(app, directory.path) as worker:
        assert worker.routed is not None
        figures = Figures(figures_path(directory.path, worker.owner_id))
        log = logging.getLogger("tests.healing")
        yield worker, Healing(directory, worker.routed.private, figures, BACKLOG, log), figures


def connected(path: str) -> socket.socket:
    """Connect, and leave the connection in the queue of who listens."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(60)
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


async def answer(connection: socket.socket) -> bytes:
    """Return the head of the reply to one request."""
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    await loop.sock_sendall(connection, REQUEST)
    async with asyncio.timeout(60):
        reply = b""
        while not reply.endswith(b"}"):
            piece = await loop.sock_recv(connection, 65536)
            assert piece, reply
            reply += piece
    return reply


def remove(worker: Worker) -> None:
    os.unlink(worker.socket_path)


def replace_by_a_socket(worker: Worker) -> None:
    os.unlink(worker.socket_path)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(worker.socket_path)


def replace_by_a_file(worker: Worker) -> None:
    os.unlink(worker.socket_path)
    Path(worker.socket_path).write_text("in the way")


def remove_the_directory(worker: Worker) -> None:
    shutil.rmtree(os.path.dirname(worker.socket_path))


def replace_the_directory_by_a_file(worker: Worker) -> None:
    remove_the_directory(worker)
    Path(worker.socket_path).parent.write_text("in the way")


def is_there(worker: Worker) -> bool:
    return os.path.lexists(worker.socket_path)


def is_the_file(worker: Worker) -> bool:
    """Tell whether what ``replace_by_a_file`` put there is there."""
    return Path(worker.socket_path).read_text() == "in the way"


LOSSES = [remove, replace_by_a_socket, replace_by_a_file, remove_the_directory]


@pytest.mark.parametrize("lose", LOSSES)
def test_socket_that_was_taken_away_is_there_again(
    lose: Callable[[Worker], None], run: Run, directory: SocketDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with healed(directory) as (worker, healing, figures):
            figures.values[LOCAL] = 5
            lose(worker)
            await healing.look()
            with connected(worker.socket_path) as connection:
                assert (await answer(connection)).startswith(b"HTTP/1.1 200")
            ((reading,), _) = read_all(directory.path)
            assert reading["local"] == 5
            assert os.stat(worker.socket_path).st_mode & 0o777 == 0o600
            assert sorted(os.listdir(directory.path)) == [f"{worker.owner_id}.figures", f"{worker.owner_id}.sock"]

    run(test())
    assert [record.levelname for record in caplog.records if record.name == "tests.healing"] == ["WARNING"]


def test_socket_that_is_there_is_left_as_it_is(
    run: Run, directory: SocketDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with healed(directory) as (worker, healing, _):
            inode = os.stat(worker.socket_path).st_ino
            for _ in range(5):
                await healing.look()
            assert os.stat(worker.socket_path).st_ino == inode

    run(test())
    assert [record for record in caplog.records if record.name == "tests.healing"] == []


@pytest.mark.parametrize("lose", LOSSES)
def test_connections_stay_and_those_in_the_queue_are_answered_however_often_it_happens(
    lose: Callable[[Worker], None], run: Run, directory: SocketDirectory
) -> None:
    async def test() -> None:
        async with healed(directory) as (worker, healing, _):
            with contextlib.ExitStack() as stack:
                kept = [stack.enter_context(connected(worker.socket_path))]
                await answer(kept[0])
                for _ in range(5):
                    # Not accepted yet: nothing has been awaited since.
                    queued = [stack.enter_context(connected(worker.socket_path)) for _ in range(20)]
                    lose(worker)
                    await healing.look()
                    for connection in (*queued, *kept):
                        assert (await answer(connection)).startswith(b"HTTP/1.1 200")
                    kept += queued[:2]
                    await healing.look()
                    for connection in kept:
                        await answer(connection)

    run(test())


def test_socket_made_again_is_removed_when_the_worker_stops(run: Run, directory: SocketDirectory) -> None:
    async def test() -> None:
        async with healed(directory) as (worker, healing, _):
            remove(worker)
            await healing.look()
            await worker.stop()
            assert not is_there(worker)

    run(test())


def test_what_stands_in_the_socket_s_place_is_another_s_when_the_worker_stops(
    run: Run, directory: SocketDirectory
) -> None:
    async def test() -> None:
        async with healed(directory) as (worker, _, _):
            replace_by_a_file(worker)
            await worker.stop()
            assert is_the_file(worker)

    run(test())


def test_what_cannot_be_put_back_is_said_once_in_ten_seconds_and_ends_nothing(
    run: Run, directory: SocketDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with healed(directory) as (worker, healing, figures):
            with connected(worker.socket_path) as connection:
                await answer(connection)
                replace_the_directory_by_a_file(worker)
                for _ in range(5):
                    await healing.look()
                figures.values[LOCAL] += 1
                assert (await answer(connection)).startswith(b"HTTP/1.1 200")
                os.unlink(directory.path)
                await healing.look()
                with connected(worker.socket_path) as another:
                    assert (await answer(another)).startswith(b"HTTP/1.1 200")

    run(test())
    found = [record.levelname for record in caplog.records if record.name == "tests.healing"]
    assert found == ["ERROR", "WARNING"]
