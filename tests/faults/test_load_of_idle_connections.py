"""Thousands of idle kept-alive connections, beside the sessions that are played, and in the way of a stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from typing import Any

from tests.e2e.calls import stopped
from tests.e2e.launching import hang_up
from tests.faults.crowd import descriptors, descriptors_for, eventually
from tests.faults.scenario import scenario
from tests.gunicorn_server import GunicornServer, until

# A worker that stands still for the test is not to be killed for it.
KEPT = ("--keep-alive", "75", "--timeout", "120")
WHO = b"GET /who HTTP/1.1\r\nHost: localhost\r\n\r\n"


def _reply(connection: socket.socket) -> bytes:
    reply = b""
    while not reply.endswith(b"}"):
        piece = connection.recv(4096)
        assert piece, reply
        reply += piece
    return reply


def _idle(server: GunicornServer, pid: int, count: int, stack: contextlib.ExitStack) -> list[socket.socket]:
    """Open ``count`` connections that the worker ``pid`` accepts; nine in ten of them make a request first."""
    made = []
    with stopped(*(other for other in server.workers() if other != pid)):
        before = len(descriptors(pid))
        for number in range(count):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            made.append(connection)
            if number % 10:
                connection.sendall(WHO)
                assert _reply(connection).endswith(f'{{"pid":{pid}}}'.encode())
        until(lambda: len(descriptors(pid)) >= before + count, "all are accepted")
    return made


def test_five_thousand_idle_connections_hold_up_neither_sessions_nor_a_reload() -> None:
    with (
        descriptors_for(8000),
        scenario("5,000 idle connections, then SIGHUP", *KEPT, workers=4) as scene,
        contextlib.ExitStack() as stack,
    ):
        server = scene.server
        idle = [one for pid in server.workers() for one in _idle(server, pid, 1250, stack)]

        async def disturb() -> Any:
            # Each player has answers before the reload.
            await eventually(lambda: scene.ledger.runs().total() >= 500, "the players are served")
            assert all(len(descriptors(pid)) > 1250 for pid in server.workers())
            await asyncio.to_thread(hang_up, server, 4)

        tally = scene.play(disturb, players=50)
        assert tally.broken == 0
        for connection in idle:
            assert connection.recv(4096) == b""
        log = server.log()
        # Nobody was waited for until the end, and nobody had to be killed.
        assert log.count("Application shutdown complete") == 4
        assert "SIGKILL" not in log
        assert "Cancelling" not in log
        scene.end()


def test_five_thousand_idle_connections_do_not_hold_up_a_stop() -> None:
    with (
        descriptors_for(8000),
        scenario("5,000 idle connections, then SIGTERM", *KEPT, workers=2) as scene,
        contextlib.ExitStack() as stack,
    ):
        server = scene.server
        idle = [one for pid in server.workers() for one in _idle(server, pid, 2500, stack)]
        scene.play(lambda: asyncio.sleep(0), players=50)
        scene.server.send(signal.SIGTERM)
        for connection in idle:
            assert connection.recv(4096) == b""
        assert server.wait() == 0
        log = server.log()
        assert log.count("Application shutdown complete") == 2
        assert "SIGKILL" not in log
        scene.ended()
