"""A worker in a process of its own, to be measured and to be killed.

``python -m tests.difference.process <socket directory> <protocol>`` writes a line of
JSON that says where it listens, and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import json
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import uvloop
from starlette.middleware.sessions import SessionMiddleware
from starlette.types import Receive, Scope, Send

from tests.workers import running, until

MIB = 2**20


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Make a session, take an upload and return its digest, send a download, or echo over a WebSocket."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
    elif scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
        while (event := await receive())["type"] != "websocket.disconnect":
            if event["type"] == "websocket.receive":
                await send({"type": "websocket.send", "text": event["text"]})
    elif scope["path"] == "/session":
        scope["session"]["made"] = True
        await _reply(send, b"")
    elif scope["path"] == "/upload":
        digest = hashlib.sha256()
        more_body = True
        while more_body:
            message = await receive()
            digest.update(message.get("body", b""))
            more_body = message.get("more_body", False)
        await _reply(send, digest.hexdigest().encode())
    else:
        (mebibytes,) = urllib.parse.parse_qs(scope["query_string"].decode())["mebibytes"]
        await send({"type": "http.response.start", "status": 200})
        for number in range(int(mebibytes) * 16):
            await send({"type": "http.response.body", "body": piece(number), "more_body": True})
        await send({"type": "http.response.body"})


def piece(number: int) -> bytes:
    """Return the 64 KiB of that number in a download."""
    return number.to_bytes(8, "big") * 8192


async def _reply(send: Send, content: bytes) -> None:
    headers = [(b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


@dataclass
class WorkerProcess:
    """A running process: where its public server listens."""

    process: subprocess.Popen[bytes]
    address: tuple[str, int]

    def peak(self) -> int:
        """Return the most memory that the process has held since ``forget_peak``, in bytes."""
        with open(f"/proc/{self.process.pid}/status") as status:
            (line,) = [line for line in status if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024

    def forget_peak(self) -> None:
        with open(f"/proc/{self.process.pid}/clear_refs", "w") as file:
            file.write("5")


@contextlib.contextmanager
def worker_process(directory: str, protocol: str) -> Iterator[WorkerProcess]:
    """Run a worker in a process of its own; it is gone at the end, however the test ends."""
    command = [sys.executable, "-m", "tests.difference.process", directory, protocol]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            host, port = json.loads(process.stdout.readline())
            yield WorkerProcess(process, (host, port))
        finally:
            process.kill()


def session_at(worker: WorkerProcess) -> str:
    """Have ``worker`` make a session and return the value of its cookie."""
    connection = http.client.HTTPConnection(*worker.address)
    with contextlib.closing(connection):
        connection.request("GET", "/session")
        return str(connection.getresponse().headers["set-cookie"]).split(";")[0].partition("=")[2]


async def _main(directory: str, protocol: str) -> None:
    loop = asyncio.get_running_loop()
    async with running(SessionMiddleware(app, secret_key="difference"), directory, http=protocol) as worker:
        await until(lambda: worker.server.server_state.default_headers)
        print(json.dumps(worker.address), flush=True)
        await loop.run_in_executor(None, sys.stdin.read)


_LOOPS: dict[str, Any] = {"httptools": uvloop.new_event_loop, "h11": asyncio.new_event_loop}

if __name__ == "__main__":
    with asyncio.Runner(loop_factory=_LOOPS[sys.argv[2]]) as runner:
        runner.run(_main(sys.argv[1], sys.argv[2]))
