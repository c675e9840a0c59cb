"""What a forwarder keeps of an owner, and what is left of it when the owner is gone."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.types import Message, Scope

from gym_gunicorn.forwarding.errors import Busy, Gone
from gym_gunicorn.forwarding.http.forwarder import AiohttpForwarder
from gym_gunicorn.forwarding.sockets import socket_path
from gym_gunicorn.owner import new_owner_id
from tests.workers import socket_directory, until

# A process that listens, takes connections, and answers nothing.
SILENT = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1] + "~")
listener.listen(100)
os.rename(sys.argv[1] + "~", sys.argv[1])
kept = []
while True:
    kept.append(listener.accept())
"""

SCOPE: Scope = {
    "type": "http",
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "method": "GET",
    "scheme": "http",
    "path": "/",
    "raw_path": b"/",
    "query_string": b"",
    "root_path": "",
    "headers": [],
    "client": None,
    "server": None,
}


async def receive() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def send(message: Message) -> None:
    raise AssertionError(f"the owner answers nothing, and {message} was sent")


def silent_owner(path: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SILENT, path])


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("rounds", [5])
def test_owner_that_is_gone_leaves_nothing_behind(rounds: int) -> None:
    async def one(forwarder: AiohttpForwarder, directory: str) -> None:
        owner_id = new_owner_id()
        path = socket_path(directory, owner_id)
        owner = silent_owner(path)
        try:
            await until(lambda: os.path.exists(path))
            waiting = asyncio.create_task(forwarder.http(owner_id, dict(SCOPE), receive, send))
            await until(lambda: forwarder._peers.in_flight)
        finally:
            owner.kill()
            owner.wait()
        with pytest.raises(Gone):
            await waiting
        await until(lambda: not forwarder._peers._peers and not forwarder._peers._watchers)
        with pytest.raises(Gone):
            await forwarder.http(owner_id, dict(SCOPE), receive, send)

    async def scenario() -> None:
        with socket_directory() as directory:
            forwarder = AiohttpForwarder(directory, 10)
            await one(forwarder, directory)
            before = descriptors()
            for _ in range(rounds):
                await one(forwarder, directory)
            assert descriptors() == before
            assert forwarder.finished == 2 * (rounds + 1)
            await forwarder.close()

    asyncio.run(scenario())


def test_more_forwards_than_are_allowed_are_refused_and_none_is_kept() -> None:
    async def scenario() -> None:
        with socket_directory() as directory:
            owner_id = new_owner_id()
            path = socket_path(directory, owner_id)
            owner = silent_owner(path)
            try:
                await until(lambda: os.path.exists(path))
                forwarder = AiohttpForwarder(directory, 3)
                waiting = [asyncio.create_task(forwarder.http(owner_id, dict(SCOPE), receive, send)) for _ in range(3)]
                await until(lambda: forwarder._peers.in_flight == 3)
                with pytest.raises(Busy):
                    await forwarder.http(owner_id, dict(SCOPE), receive, send)
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
                assert forwarder._peers.in_flight == 0
                await forwarder.close()
            finally:
                owner.kill()
                owner.wait()

    asyncio.run(scenario())
