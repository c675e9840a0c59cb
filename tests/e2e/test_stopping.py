"""What a stopping server does with what is in flight, and with what still reaches it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from http.client import HTTPConnection, HTTPException, IncompleteRead
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.calls import (
    Journal,
    Session,
    ask,
    assert_nothing_left,
    connection_to,
    count,
    probe_server,
    session_at,
    status,
    stopped,
)
from tests.gunicorn_server import CONFIG, GunicornServer, errors, is_alive, until

STREAMS = "tests.e2e.apps.streams:app"

# Told to be done in 4 seconds, and given more: how fast a process ends is the machine's affair.
SOON = (
    CONFIG
    + """
graceful_timeout = 60


def post_worker_init(worker):
    routing.post_worker_init(worker)
    worker.cfg.set("graceful_timeout", 4)
"""
)

# A caller that is slow itself finds its idle connection open.
LINGERING = CONFIG + "from gym_gunicorn.lifecycle import public_server\n\npublic_server.LINGER = 600.0\n"


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path)


# What is in flight


def test_worker_that_drains_for_longer_than_timeout_is_not_killed_as_hung(journal: Journal) -> None:
    options = ("--timeout", "8", "--graceful-timeout", "60")
    with ThreadPoolExecutor() as pool, probe_server(*options, journal=journal, workers=3) as server:
        draining, hung, other = server.workers()
        lost = session_at(server, draining)
        with (
            connection_to(server, draining) as local,
            connection_to(server, other) as forwarded,
            connection_to(server, hung) as clock,
        ):
            answers = [
                pool.submit(ask, local, "/hold?name=it"),
                pool.submit(ask, forwarded, "/hold?name=it", lost),
            ]
            until(lambda: journal.lines().count(f"hold it {draining}") == 2, "both are in flight")
            os.kill(draining, signal.SIGTERM)
            until(lambda: lost.owner not in server.owners(), "it drains")
            # Blocked after the other began to drain: once it is killed for it, `timeout` has passed for both.
            with suppress(HTTPException, ConnectionError):
                ask(clock, "/block")
            until(lambda: f"WORKER TIMEOUT (pid:{hung})" in server.log(), "the blocked one is killed")
            assert is_alive(draining)
            journal.release("it")
            assert [answer.result().json()["pid"] for answer in answers] == [draining, draining]
        until(lambda: not is_alive(draining), "it has stopped")
        assert f"WORKER TIMEOUT (pid:{draining})" not in server.log()


def test_what_does_not_finish_is_cancelled_and_answered_in_time_for_the_lifespan_to_end(journal: Journal) -> None:
    with (
        ThreadPoolExecutor() as pool,
        probe_server(config=SOON, app=STREAMS, journal=journal) as server,
        ExitStack() as stack,
    ):
        receiver, owner = workers = server.workers()
        session = session_at(server, owner)
        local, forwarded, local_stream, forwarded_stream = (
            stack.enter_context(connection_to(server, receiver)) for _ in range(4)
        )
        answers = [
            pool.submit(ask, local, "/hold?name=never"),
            pool.submit(ask, forwarded, "/hold?name=never", session),
        ]
        journal.wait_for(f"hold never {receiver}")
        journal.wait_for(f"hold never {owner}")
        streams = []
        for stream, handled_by, cookie in ((local_stream, receiver, ""), (forwarded_stream, owner, session.cookie)):
            stream.request("GET", "/events", headers={"Cookie": cookie or ""})
            streams.append(stream.getresponse())
            assert streams[-1].readline() == f"data: {handled_by}\n".encode()
            streams[-1].readline()
        server.send(signal.SIGTERM)
        assert [answer.result().status for answer in answers] == [503, 503]
        for response in streams:
            # Not as if it had come to its end.
            with pytest.raises((IncompleteRead, ConnectionError)):
                response.read()
        assert server.wait() == 0
        for pid in workers:
            assert f"the stream is cleaned up {pid}" in journal.lines()
            assert any(line.startswith("shutdown") and line.endswith(f" {pid}") for line in journal.lines())
        assert "SIGKILL" not in server.log()
        assert_nothing_left(server)


@asynccontextmanager
async def websockets(
    server: GunicornServer, path: str, sessions: list[Session | None]
) -> AsyncIterator[list[aiohttp.ClientWebSocketResponse]]:
    """WebSockets to one server, one for each session."""
    async with aiohttp.ClientSession() as http:
        made = []
        for session in sessions:
            headers = {"Cookie": session.cookie or ""} if session is not None else {}
            made.append(await http.ws_connect(f"{server.url}{path}", headers=headers))
        yield made


def test_websockets_of_a_stopping_server_are_closed_with_1012_and_their_handlers_end(journal: Journal) -> None:
    async def talk(server: GunicornServer, sessions: list[Session | None], owners: list[int]) -> None:
        async with websockets(server, "/talk", sessions) as talks:
            for number, websocket in enumerate(talks):
                assert await websocket.receive_str() == str(owners[number % 2])
                await websocket.send_str("hello")
                assert await websocket.receive_str() == "hello"
            server.send(signal.SIGTERM)
            for websocket in talks:
                message = await websocket.receive(timeout=60)
                assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1012)

    with probe_server("--graceful-timeout", "600", app=STREAMS, journal=journal) as server:
        owners = server.workers()
        # Four of each: some are handled where they arrive, and some are forwarded.
        sessions: list[Session | None] = [session_at(server, pid) for pid in owners]
        asyncio.run(talk(server, sessions * 4, owners))
        assert server.wait() == 0
        assert sum(line.startswith("the WebSocket is closed") for line in journal.lines()) == 8
        assert sum(line.startswith("shutdown") for line in journal.lines()) == 2
        assert_nothing_left(server)
        assert errors(server.log()) == []


def test_websocket_handler_that_stays_is_cancelled_in_time_for_the_lifespan_to_end(journal: Journal) -> None:
    async def stay(server: GunicornServer, sessions: list[Session | None]) -> None:
        async with websockets(server, "/stubborn", sessions) as stubborn:
            for websocket in stubborn:
                await websocket.receive_str()
            server.send(signal.SIGTERM)
            for websocket in stubborn:
                assert (await websocket.receive(timeout=60)).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)

    with probe_server(config=SOON, app=STREAMS, journal=journal) as server:
        sessions: list[Session | None] = [session_at(server, pid) for pid in server.workers()]
        asyncio.run(stay(server, sessions * 2))
        assert server.wait() == 0
        assert sum(line.startswith("the WebSocket is cleaned up") for line in journal.lines()) == 4
        assert sum(line.startswith("shutdown") for line in journal.lines()) == 2
        assert "SIGKILL" not in server.log()
        assert_nothing_left(server)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGQUIT], ids=lambda signum: str(signum.name))
def test_stop_that_drains_can_be_hurried(signum: signal.Signals, journal: Journal) -> None:
    with ThreadPoolExecutor() as pool, probe_server("--graceful-timeout", "600", journal=journal) as server:
        worker = server.workers()[0]
        with connection_to(server, worker) as connection:
            answer = pool.submit(ask, connection, "/hold?name=never")
            journal.wait_for(f"hold never {worker}")
            server.send(signal.SIGTERM)
            until(lambda: server.log().count("Shutting down") == 2, "the workers drain")
            server.send(signum)
            assert server.wait() == 0
            with suppress(HTTPException, ConnectionError):
                assert answer.result().status == 503
        assert sum(line.startswith("shutdown") for line in journal.lines()) == 2
        assert "SIGKILL" not in server.log()
        assert_nothing_left(server)


# What still reaches a stopping worker


@pytest.mark.xdist_group("load")
def test_siblings_of_a_stopping_owner_get_200_and_then_410_and_never_502() -> None:
    answers: Counter[int] = Counter()

    def hammer(connection: HTTPConnection, session: Session) -> None:
        """Ask for the session until it is gone."""
        while True:
            got = ask(connection, "/count", session, method="POST").status
            answers[got] += 1
            if got != 200:
                return

    with ThreadPoolExecutor(16) as pool, probe_server() as server:
        owner, receiver = server.workers()
        for round_ in range(1, 6):
            session = session_at(server, owner)
            with ExitStack() as stack:
                connections = [stack.enter_context(connection_to(server, receiver)) for _ in range(16)]
                before = answers[200]
                hammers = []
                for connection in connections:
                    own = Session()
                    own.cookie = session.cookie
                    hammers.append(pool.submit(hammer, connection, own))
                until(lambda: answers[200] > before + 200, "requests are forwarded")  # noqa: B023
                os.kill(owner, signal.SIGTERM)
                for ended in hammers:
                    ended.result()
            until(lambda: server.ready_workers() == 2 + round_, "the owner is replaced")  # noqa: B023
            until(lambda: not is_alive(owner), "it has stopped")  # noqa: B023
            (owner,) = set(server.workers()) - {receiver}
        print(dict(answers))
        assert set(answers) == {200, 410}, answers
        assert answers[410] == 5 * 16
        assert errors(server.log()) == []


def test_what_reaches_a_stopping_owner_before_it_knows_of_the_stop_is_answered_too(journal: Journal) -> None:
    with ThreadPoolExecutor() as pool, probe_server(journal=journal) as server:
        owner, receiver = server.workers()
        session = session_at(server, owner)
        with connection_to(server, owner) as held, ExitStack() as stack:
            connections = [stack.enter_context(connection_to(server, receiver)) for _ in range(4)]
            assert count(connections[0], session) == 2
            answer = pool.submit(ask, held, "/hold?name=it")
            journal.wait_for(f"hold it {owner}")
            with stopped(owner):
                # One goes over the connection between the workers that there is; the others wait at the socket.
                waiting = [pool.submit(status, connection, session) for connection in connections]
                os.kill(owner, signal.SIGTERM)
            assert {answer.result() for answer in waiting} <= {200, 410}
            until(lambda: session.owner not in server.owners(), "it is stopping")
            for connection in connections:
                while (got := status(connection, session)) == 200:
                    pass
                assert got == 410
            journal.release("it")
            assert answer.result().status == 200
        until(lambda: not is_alive(owner), "the owner has stopped")


def test_request_over_a_connection_from_before_the_stop_is_answered_and_ends_it(journal: Journal) -> None:
    with ThreadPoolExecutor() as pool, probe_server(config=LINGERING, journal=journal) as server:
        told, _ = server.workers()
        session = session_at(server, told)
        with connection_to(server, told) as held, connection_to(server, told) as connection:
            answer = pool.submit(ask, held, "/hold?name=it")
            journal.wait_for(f"hold it {told}")
            assert count(connection, session) == 2
            os.kill(told, signal.SIGTERM)
            until(lambda: session.owner not in server.owners(), "it is stopping")
            reply = ask(connection, "/count", session, method="POST")
            assert reply.json() == {"count": 3, "pid": told}
            assert reply.headers["connection"] == "close"
            journal.release("it")
            assert answer.result().status == 200
        until(lambda: not is_alive(told), "it has stopped")
        assert status(server, session) == 410
        assert errors(server.log()) == []
