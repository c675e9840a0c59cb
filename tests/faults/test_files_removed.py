"""The socket file or the whole socket directory is removed under a server that serves: it puts them back by itself."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
)
from tests.faults.files import (
    Sockets,
    is_held,
    remove_tree,
    the_directory,
    witnesses,
)
from tests.faults.scenario import in_words, scenario
from tests.gunicorn_server import CONFIG, GunicornServer, children, is_alive, until

Break = Callable[["Sockets"], object]


def one_socket(sockets: Sockets) -> None:
    sockets.path(min(sockets.pids)).unlink()


def moved_away(sockets: Sockets) -> None:
    aside = sockets.directory.with_name("aside")
    sockets.directory.rename(aside)
    remove_tree(aside)


@pytest.mark.parametrize("remove", [one_socket, the_directory, moved_away])
def test_server_under_load_puts_back_what_was_removed_and_no_session_is_lost(remove: Break) -> None:
    with scenario(f"files: {in_words(remove)} removed, twice", workers=4) as broken:
        sockets = Sockets.of(broken.server)
        sessions = witnesses(broken.server)

        def twice() -> None:
            for calls in (2, 3):
                remove(sockets)
                sockets.wait()
                # From here on no 410 is right.
                assert [count(broken.server, session) for session in sessions] == [calls] * len(sessions)

        broken.play(lambda: asyncio.to_thread(twice), players=40, owners_live=True)
        sockets.assert_as_before(broken.server)
        assert "[ERROR]" not in broken.server.log()
        broken.end()


def test_no_answer_is_410_once_the_sockets_are_back() -> None:
    with scenario("files: directory removed, then 410 only from the dead") as broken:
        sockets = Sockets.of(broken.server)
        the_directory(sockets)
        sockets.wait()

        async def nothing_more() -> None:
            await asyncio.sleep(1)

        tally = broken.play(nothing_more, players=60)
        assert tally.gone == tally.broken == tally.busy == 0
        broken.end()


def test_directory_removed_again_and_again_is_made_again_each_time() -> None:
    with scenario("files: directory removed ten times") as broken:
        sockets = Sockets.of(broken.server)
        sessions = witnesses(broken.server)

        async def again_and_again() -> None:
            for number in range(10):
                await asyncio.to_thread(shutil.rmtree, sockets.directory, ignore_errors=True)
                await asyncio.sleep(0.13 * (number % 4))
            await asyncio.to_thread(sockets.wait)

        broken.play(again_and_again, players=40, owners_live=True)
        assert [count(broken.server, session) for session in sessions] == [2] * len(sessions)
        sockets.assert_as_before(broken.server)
        broken.end()


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path)


def test_exchanges_in_flight_go_on_when_the_directory_is_removed_and_when_it_is_back(journal: Journal) -> None:
    with probe_server(journal=journal) as server, ThreadPoolExecutor() as pool:
        owner, receiver = server.workers()
        sockets = Sockets.of(server)
        session = session_at(server, owner)
        with (
            connection_to(server, receiver) as one,
            connection_to(server, receiver) as other,
            connection_to(server, receiver) as streaming,
        ):
            early = pool.submit(ask, one, "/hold?name=early", session)
            late = pool.submit(ask, other, "/hold?name=late", session)
            assert session.cookie is not None
            streaming.putrequest("POST", "/echo/")
            streaming.putheader("Cookie", session.cookie)
            streaming.putheader("Transfer-Encoding", "chunked")
            streaming.endheaders()
            streaming.send(b"6\r\nbefore\r\n")
            stream = streaming.getresponse()
            assert stream.read(6) == b"before"
            for name in ("early", "late"):
                journal.wait_for(f"hold {name} {owner}")
            the_directory(sockets)
            journal.release("early")
            assert early.result(timeout=60).json() == {"pid": owner}
            sockets.wait()
            journal.release("late")
            assert late.result(timeout=60).json() == {"pid": owner}
            streaming.send(b"5\r\nafter\r\n0\r\n\r\n")
            assert (stream.read(), stream.headers["x-pid"]) == (b"after", str(owner))
            assert count(one, session) == 2
        assert server.stop() == 0
        assert_nothing_left(server)


# Removed, and at once a signal


@pytest.fixture
def with_sessions() -> Callable[[GunicornServer], tuple[Sockets, dict[int, Session]]]:
    def prepare(server: GunicornServer) -> tuple[Sockets, dict[int, Session]]:
        return Sockets.of(server), {pid: session_at(server, pid) for pid in server.workers()}

    return prepare


Prepare = Callable[[GunicornServer], tuple[Sockets, dict[int, Session]]]


def test_reload_right_after_the_removal_serves_at_the_same_path(with_sessions: Prepare) -> None:
    with probe_server() as server:
        sockets, sessions = with_sessions(server)
        the_directory(sockets)
        server.send(signal.SIGHUP)
        until(lambda: server.ready_workers() == 4, "the new workers serve")
        until(lambda: not set(sessions) & set(server.workers()), "the old workers are gone")
        new = Sockets.of(server)
        assert len(new.pids) == 2
        new.assert_as_before(server)
        assert new.directory == sockets.directory
        assert [status(server, session) for session in sessions.values()] == [410, 410]
        made = [session_at(server, pid) for pid in server.workers()]
        assert [count(server, session) for session in made for _ in range(3)] == [2, 3, 4] * 2
        assert server.stop() == 0
        assert_nothing_left(server)


def test_worker_added_right_after_the_removal_reaches_the_old_ones(with_sessions: Prepare) -> None:
    with probe_server() as server:
        sockets, sessions = with_sessions(server)
        the_directory(sockets)
        server.send(signal.SIGTTIN)
        until(lambda: server.ready_workers() == 3, "another worker serves")
        sockets.wait()
        assert server.directories() == [sockets.directory]
        for calls, pid in enumerate(server.workers(), start=2):
            with connection_to(server, pid) as connection:
                assert [count(connection, session) for session in sessions.values()] == [calls] * 2
        assert server.stop() == 0
        assert_nothing_left(server)


def test_new_arbiter_started_right_after_the_removal_shares_the_directory(with_sessions: Prepare) -> None:
    with probe_server() as server:
        sockets, sessions = with_sessions(server)
        the_directory(sockets)
        server.send(signal.SIGUSR2)
        until(lambda: server.ready_workers() == 4, "the new workers serve")
        (arbiter,) = set(server.workers()) - set(sessions)
        new = children(arbiter)
        server.seen.update(new)
        sockets.wait()
        everyone = [*sessions, *new]
        assert server.directories() == [sockets.directory]
        assert {server.pid_of(owner) for owner in server.owners()} == set(everyone)
        for calls, pid in enumerate(everyone, start=2):
            with connection_to(server, pid, among=everyone) as connection:
                assert [count(connection, session) for session in sessions.values()] == [calls] * 2
        assert server.stop() == 0
        until(lambda: not any(map(is_alive, sessions)), "the old workers are gone")
        assert server.directories() == [sockets.directory]
        assert is_held(sockets.directory)
        the_directory(sockets)
        until(lambda: len(server.owners()) == 2, "the new arbiter's workers bind their sockets again")
        os.kill(arbiter, signal.SIGTERM)
        assert_nothing_left(server)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_end_right_after_the_removal_leaves_nothing(signum: signal.Signals, with_sessions: Prepare) -> None:
    with probe_server() as server:
        sockets, _ = with_sessions(server)
        the_directory(sockets)
        server.stop(signum)
        assert_nothing_left(server)
        assert "Traceback" not in server.log()


def test_worker_killed_right_after_the_removal_is_replaced_and_loses_only_its_own(with_sessions: Prepare) -> None:
    with probe_server() as server:
        sockets, sessions = with_sessions(server)
        dead, living = sessions
        the_directory(sockets)
        os.kill(dead, signal.SIGKILL)
        until(lambda: server.ready_workers() == 3, "it is replaced")
        sockets.wait()
        assert server.directories() == [sockets.directory]
        assert [count(server, sessions[living]) for _ in range(10)] == list(range(2, 12))
        assert status(server, sessions[dead]) == 410
        assert server.stop() == 0
        assert_nothing_left(server)


REMOVED_WHILE_STARTING = (
    CONFIG
    + """
import os, shutil

def post_worker_init(worker):
    try:
        os.mkdir("{parent}/once")
    except FileExistsError:
        pass
    else:
        shutil.rmtree(worker.directory.path, ignore_errors=True)
    routing.post_worker_init(worker)
"""
)


def test_directory_removed_while_workers_start_only_delays_the_start() -> None:
    with probe_server(config=REMOVED_WHILE_STARTING) as server:
        until(lambda: len(server.owners()) == 2, "both workers' sockets are there")
        sockets = Sockets.of(server)
        sessions = [session_at(server, pid) for pid in server.workers()]
        for calls, pid in enumerate(server.workers(), start=2):
            with connection_to(server, pid) as connection:
                assert [count(connection, session) for session in sessions] == [calls] * 2
        sockets.assert_as_before(server)
        assert server.stop() == 0
        assert_nothing_left(server)
