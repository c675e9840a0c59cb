"""Deaths of workers and of the arbiter: 410 for what is lost, right answers for the rest, and nothing left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException, IncompleteRead
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
    processes_of,
    session_at,
    status,
    stopped,
)
from tests.e2e.launching import ANOTHER_UID, needs
from tests.gunicorn_server import CONFIG, errors, gunicorn_server, is_alive, until
from tests.sessions import Answered, caller, play

BREAKING = "tests.e2e.apps.breaking:app"
STREAMS = "tests.e2e.apps.streams:app"


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path)


# A worker


def test_sessions_of_a_killed_worker_get_410_though_its_child_lives_on_and_holds_its_sockets(journal: Journal) -> None:
    with ThreadPoolExecutor() as pool, probe_server(app=BREAKING, journal=journal) as server:
        killed, other = server.workers()
        lost, kept = session_at(server, killed), session_at(server, other)
        with (
            connection_to(server, other) as connection,
            connection_to(server, other) as waiting,
            connection_to(server, killed) as to_killed,
        ):
            # The child has a kept connection between the workers, and one with a request in flight.
            assert count(connection, lost) == 2
            answer = pool.submit(ask, waiting, "/hold?name=never", lost)
            journal.wait_for(f"hold never {killed}")
            child: int = ask(to_killed, "/fork").json()["child"]
            server.seen.add(child)
            with stopped(server.pid):
                os.kill(killed, signal.SIGKILL)
                until(lambda: not is_alive(killed), "the worker is dead")
                assert is_alive(child)
                assert status(connection, lost) == 410
                assert answer.result().status == 410
                assert count(connection, kept) == 2
        until(lambda: server.ready_workers() == 3, "it is replaced")
        assert [status(server, lost) for _ in range(5)] == [410] * 5
        assert [count(server, kept) for _ in range(3)] == [3, 4, 5]
        assert server.stop() == 0
        # The app's own process is left, and nothing of ours.
        until(lambda: processes_of(server) == [child], "all others have ended")
        assert server.directories() == []


def test_caller_who_connects_as_the_app_forks_does_not_wait_for_the_child(journal: Journal) -> None:
    with probe_server(app=BREAKING, journal=journal) as server:
        forked, other = server.workers()
        with connection_to(server, forked) as forking, socket.socket() as caller:
            caller.settimeout(60)
            with stopped(other):
                with stopped(forked):
                    # Both come in one look of the event loop: the connection is accepted, and the
                    # handler forks before anything is told of it.
                    forking.request("GET", "/fork")
                    caller.connect(("127.0.0.1", server.port))
                server.seen.add(json.loads(forking.getresponse().read())["child"])
                assert ask(forking, "/pid").json()["pid"] == forked
            with stopped(server.pid):
                os.kill(forked, signal.SIGKILL)
                until(lambda: not is_alive(forked), "the worker is dead")
                with suppress(ConnectionResetError):
                    assert caller.recv(1) == b""


def test_children_forked_while_the_app_is_imported_hold_no_port(journal: Journal) -> None:
    with probe_server(app="tests.e2e.apps.forking:app", journal=journal) as server:
        forked = [int(line.split()[1]) for line in journal.lines() if line.startswith("forked")]
        assert len(forked) == 2
        server.seen.update(forked)
        assert server.stop() == 0
        assert all(map(is_alive, forked))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), timeout=60)
        assert server.directories() == []


def test_callers_of_a_blocked_worker_wait_and_get_410_when_timeout_ends_it(journal: Journal) -> None:
    with ThreadPoolExecutor() as pool, probe_server("--timeout", "10", journal=journal) as server:
        blocked, other = server.workers()
        lost, kept = session_at(server, blocked), session_at(server, other)
        with (
            connection_to(server, blocked) as connection,
            connection_to(server, other) as used,
            connection_to(server, other) as fresh,
        ):
            # One waits on a connection between the workers that was there before, one on a new one.
            assert count(used, lost) == 2
            block = pool.submit(ask, connection, "/block")
            journal.wait_for(f"block {blocked}")
            waiting = [pool.submit(status, used, lost), pool.submit(status, fresh, lost)]
            assert [answer.result() for answer in waiting] == [410, 410]
            assert f"WORKER TIMEOUT (pid:{blocked})" in server.log()
            with pytest.raises((HTTPException, ConnectionError)):
                block.result()
        until(lambda: server.ready_workers() == 3, "it is replaced")
        assert status(server, lost) == 410
        assert [count(server, kept) for _ in range(3)] == [2, 3, 4]
        assert server.log().count("WORKER TIMEOUT") == 1


@pytest.mark.parametrize("forwarded", [False, True], ids=["local", "forwarded"])
def test_worker_that_reaches_max_requests_under_an_open_event_stream_is_never_a_hung_one(
    forwarded: bool, journal: Journal
) -> None:
    options = ("--max-requests", "20", "--timeout", "6", "--graceful-timeout", "10")
    with probe_server(*options, app=STREAMS, journal=journal) as server:
        worn, other = server.workers()
        lost, kept = session_at(server, worn), session_at(server, other)
        with connection_to(server, other if forwarded else worn) as stream, connection_to(server, worn) as connection:
            stream.request("GET", "/events", headers={"Cookie": lost.cookie or ""})
            response = stream.getresponse()
            assert response.readline() == f"data: {worn}\n".encode()
            response.readline()
            with suppress(HTTPException, ConnectionError):
                for _ in range(25):
                    ask(connection, "/pid")
            until(lambda: lost.owner not in server.owners(), "it stops")
            # The stream goes on for as long as the worker may take, and then breaks; it does not end as if complete.
            with pytest.raises((IncompleteRead, ConnectionError)):
                response.read()
        until(lambda: not is_alive(worn), "it is out")
        assert any(line.startswith("shutdown") and line.endswith(f" {worn}") for line in journal.lines())
        assert f"the stream is cleaned up {worn}" in journal.lines()
        until(lambda: server.ready_workers() == 3, "it is replaced")
        assert status(server, lost) == 410
        assert count(server, kept) == 2
        assert "WORKER TIMEOUT" not in server.log()
        assert "SIGKILL" not in server.log()


@pytest.mark.parametrize("how", ["os._exit", "SIGSEGV", "SystemExit", "KeyboardInterrupt"])
def test_worker_that_its_app_ends_is_replaced_and_its_sessions_get_410(how: str, journal: Journal) -> None:
    with ThreadPoolExecutor() as pool, probe_server(app=BREAKING, journal=journal) as server:
        ended, other = server.workers()
        lost, kept = session_at(server, ended), session_at(server, other)
        with (
            connection_to(server, ended) as own,
            connection_to(server, other) as forwarded,
            connection_to(server, other) as through_ended,
        ):
            bystander = pool.submit(ask, forwarded, "/hold?name=never", lost)
            journal.wait_for(f"hold never {ended}")
            # A connection that ends is an answer too; silence is not.
            with suppress(HTTPException, ConnectionError):
                assert ask(own, f"/end?how={how}").status >= 500
            assert bystander.result().status in (410, 500, 502, 503)
            until(lambda: not is_alive(ended), "the worker is gone")
            assert status(through_ended, lost) == 410
        until(lambda: server.ready_workers() == 3, "it is replaced")
        assert [status(server, lost) for _ in range(3)] == [410] * 3
        assert [count(server, kept) for _ in range(3)] == [2, 3, 4]
        assert lost.owner not in server.owners()
        assert is_alive(server.pid)
        assert server.stop() == 0
        assert_nothing_left(server)


def test_exception_in_the_event_loop_is_logged_and_loses_nothing() -> None:
    with probe_server(app=BREAKING) as server:
        workers = server.workers()
        sessions = [session_at(server, pid) for pid in workers]
        for session in sessions:
            ask(server, "/throw_in_the_loop?what=RuntimeError", session)
        until(lambda: server.log().count("RuntimeError: raised on purpose") == 2, "both are logged")
        assert [count(server, session) for session in sessions for _ in range(3)] == [2, 3, 4] * 2
        assert server.workers() == workers


@pytest.mark.parametrize("what", ["RuntimeError", "SystemExit", "KeyboardInterrupt"])
def test_whatever_a_handler_raises_is_a_500_and_loses_nothing(what: str) -> None:
    with probe_server(app=BREAKING) as server:
        workers = server.workers()
        session = session_at(server, workers[0])
        for calls, pid in enumerate(workers, start=2):
            with connection_to(server, pid) as connection:
                assert ask(connection, f"/throw?what={what}", session).status == 500
            assert count(server, session) == calls
        assert server.workers() == workers
        assert server.log().count(f"{what}: raised on purpose") == 2


# All at once


def test_sessions_get_410_when_all_workers_are_killed_at_once() -> None:
    with probe_server(workers=4) as server:
        (directory,) = server.directories()
        workers = server.workers()
        lost = [session_at(server, pid) for pid in workers]
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        until(lambda: server.ready_workers() == 8, "all are replaced")
        assert [status(server, session) for session in lost for _ in range(3)] == [410] * 12
        for pid in server.workers():
            new = session_at(server, pid)
            assert [count(server, new) for _ in range(3)] == [2, 3, 4]
        assert server.directories() == [directory]
        assert len(server.owners()) == 4
        assert server.stop() == 0
        assert_nothing_left(server)


# The arbiter


@pytest.mark.xdist_group("load")
def test_killed_arbiter_under_load_leaves_no_wrong_answer_and_nothing_else() -> None:
    answers: Counter[str] = Counter()

    async def call_on(url: str, number: int) -> None:
        """Play sessions until the server is gone."""
        while True:
            async with caller(url) as session:
                try:
                    await session.seed(number)
                    for step in range(4):
                        await session.increment(step)
                        answers["right" if await session.verify() else "wrong"] += 1
                except Answered as answered:
                    answers[str(answered.status)] += 1
                except aiohttp.ClientConnectorError:
                    return
                except aiohttp.ClientError:
                    answers["reset"] += 1

    async def kill_under_load(url: str, pid: int) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(50):
                group.create_task(call_on(url, number))
            await asyncio.to_thread(until, lambda: answers["right"] > 500, "sessions are played")
            os.kill(pid, signal.SIGKILL)

    with gunicorn_server() as server:
        (left,) = server.directories()
        asyncio.run(kill_under_load(server.url, server.pid))
        print(dict(answers))
        # What was waiting at the listener is reset with it; a session whose owner went first gets 410.
        assert set(answers) <= {"right", "410", "reset"}, answers
        server.wait()
        assert_nothing_left(server)
        socket.create_server(("127.0.0.1", server.port)).close()
        assert not left.exists()
        assert errors(server.log()) == []


def test_server_started_after_one_that_was_killed_as_a_whole_sweeps_what_it_left() -> None:
    with gunicorn_server(workers=2) as dead:
        (left,) = dead.directories()
        workers = dead.workers()
        with stopped(*workers):
            # So that no worker sees its arbiter's death and cleans up.
            dead.kill()
        assert len(list(left.glob("*.sock"))) == 2
        with gunicorn_server(
            "-b", f"127.0.0.1:{dead.port}", config=CONFIG.replace("{parent}", str(dead.parent))
        ) as new:
            assert not left.exists()
            assert len(dead.directories()) == 1
            assert asyncio.run(play(dead.url, 20)) == {"right": 20}
            assert new.stop() == 0
        assert dead.directories() == []


def test_start_leaves_alone_what_is_not_its_own() -> None:
    needs("root")
    with gunicorn_server(workers=2) as living:
        (its,) = living.directories()
        folder = living.parent
        until(lambda: list(its.glob("*.arbiter")), "the arbiter has said what it is")
        others = folder / "gym-gunicorn-others"
        others.mkdir()
        (others / "0123456789ab.sock").touch()
        os.chown(others, ANOTHER_UID, ANOTHER_UID)
        (folder / "gym-gunicorn-file").touch()
        (folder / "gym-gunicorn-link").symlink_to(its)
        (folder / "another-gym-gunicorn-folder").mkdir()
        before = sorted(folder.rglob("*"))
        (folder / "gym-gunicorn-dead").mkdir()
        with gunicorn_server(config=CONFIG.replace("{parent}", str(folder)), workers=2) as started:
            assert started.stop() == 0
        assert sorted(folder.rglob("*")) == before
        assert asyncio.run(play(living.url, 20)) == {"right": 20}


@pytest.mark.parametrize("forwarder", ["framed", "aiohttp"])
def test_caller_that_leaves_is_noticed_though_a_child_of_the_forwarding_worker_lives_on(
    journal: Journal, forwarder: str
) -> None:
    config = CONFIG.replace("SessionRouting(", f"SessionRouting(forwarder={forwarder!r}, ")
    with probe_server(app=BREAKING, journal=journal, config=config) as server:
        owner, other = server.workers()
        session = session_at(server, owner)
        with connection_to(server, other) as connection:
            connection.request("GET", "/events", headers={"Cookie": session.cookie or ""})
            response = connection.getresponse()
            assert response.readline() == f"data: {owner}\n".encode()
            with connection_to(server, other) as beside:
                server.seen.add(ask(beside, "/fork").json()["child"])
        response.close()
        journal.wait_for(f"the stream is cleaned up {owner}")


def test_killed_arbiter_leaves_no_directory_though_a_child_of_its_app_lives_on(journal: Journal) -> None:
    with probe_server(app=BREAKING, journal=journal) as server:
        session = Session()
        assert count(server, session) == 1
        child: int = ask(server, "/fork", session).json()["child"]
        server.seen.add(child)
        server.send(signal.SIGKILL)
        server.wait()
        until(lambda: processes_of(server) == [child], "all others have ended")
        assert server.directories() == []


def test_worker_of_a_killed_arbiter_goes_though_a_handler_holds_a_thread(journal: Journal) -> None:
    arguments = ("--graceful-timeout", "1")
    with (
        ThreadPoolExecutor() as pool,
        gunicorn_server(*arguments, app="tests.e2e.apps.blocking:app", workers=2, env=journal.env) as server,
    ):
        held = pool.submit(ask, server, "/hold")
        until(lambda: any(line.startswith("hold ") for line in journal.lines()), "a thread is held")
        server.send(signal.SIGKILL)
        server.wait()
        until(lambda: not server.survivors(), "all workers are gone")
        assert server.directories() == []
        assert "has no arbiter: ended" in server.log()
        # An answer or a reset, and not silence.
        with suppress(OSError, HTTPException):
            assert held.result(timeout=60).status == 503
