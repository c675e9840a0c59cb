"""Signals, deaths and upgrades of real gunicorn: right answers or explicit ones, and nothing left behind."""

from __future__ import annotations

import asyncio
import operator
import os
import signal
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.client import HTTPException
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.calls import (
    Journal,
    ask,
    assert_nothing_left,
    connection_to,
    count,
    owner_of,
    probe_server,
    session_at,
    status,
    stopped,
)
from tests.e2e.launching import reconfigure
from tests.gunicorn_server import CONFIG, GunicornServer, children, errors, gunicorn_server, is_alive, until
from tests.sessions import Answered, caller, play

NAME = operator.attrgetter("name")


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path)


# The arbiter is told to stop


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT], ids=NAME)
@pytest.mark.parametrize("graceful_timeout", ["300", "600"])
def test_an_idle_server_is_gone_within_moments(signum: signal.Signals, graceful_timeout: str) -> None:
    with gunicorn_server("--graceful-timeout", graceful_timeout) as server:
        # Sessions that were forwarded leave connections between the workers.
        assert asyncio.run(play(server.url, 20)) == {"right": 20}
        server.send(signum)
        assert server.wait() == 0
        assert_nothing_left(server)
        assert errors(server.log()) == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGQUIT], ids=NAME)
def test_open_connections_do_not_keep_an_idle_server(signum: signal.Signals) -> None:
    with probe_server("--graceful-timeout", "600") as server, ExitStack() as stack:
        for pid in server.workers():
            stack.enter_context(connection_to(server, pid))
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        server.send(signum)
        assert server.wait() == 0
        assert_nothing_left(server)


def test_requests_in_flight_finish_when_the_server_is_told_to_stop(journal: Journal) -> None:
    with ThreadPoolExecutor() as pool, probe_server(journal=journal) as server:
        receiver, owner = server.workers()
        session = session_at(server, owner)
        with connection_to(server, receiver) as local, connection_to(server, receiver) as forwarded:
            answers = [
                pool.submit(ask, local, "/hold?name=local"),
                pool.submit(ask, forwarded, "/hold?name=forwarded", session),
            ]
            journal.wait_for(f"hold local {receiver}")
            journal.wait_for(f"hold forwarded {owner}")
            server.send(signal.SIGTERM)
            until(lambda: server.log().count("Shutting down") == 2, "both workers are stopping")
            journal.release("local")
            journal.release("forwarded")
            assert [answer.result().status for answer in answers] == [200, 200]
        assert server.wait() == 0
        assert_nothing_left(server)
        assert errors(server.log()) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGQUIT], ids=NAME)
def test_quick_stop_does_not_wait_for_what_is_in_flight_and_leaves_no_caller_in_silence(
    signum: signal.Signals, journal: Journal
) -> None:
    with ThreadPoolExecutor() as pool, probe_server("--graceful-timeout", "600", journal=journal) as server:
        receiver, owner = server.workers()
        session = session_at(server, owner)
        with connection_to(server, receiver) as local, connection_to(server, receiver) as forwarded:
            answers = [
                pool.submit(ask, local, "/hold?name=never"),
                pool.submit(ask, forwarded, "/hold?name=never", session),
            ]
            journal.wait_for(f"hold never {receiver}")
            journal.wait_for(f"hold never {owner}")
            server.send(signum)
            assert server.wait() == 0
            for answer in answers:
                # A connection that ends is an answer too.
                with suppress(HTTPException, ConnectionError):
                    assert answer.result().status >= 500
        assert_nothing_left(server)
        assert sum(line.startswith("shutdown") for line in journal.lines()) == 2


def test_lifespan_runs_once_in_each_worker_and_ends_after_the_private_server(journal: Journal) -> None:
    config = CONFIG + 'raw_env = ["SOCKETS={parent}"]\n'
    with ThreadPoolExecutor() as pool, probe_server(journal=journal, config=config) as server:
        receiver, owner = workers = server.workers()
        owners = {pid: owner_of(server, pid) for pid in workers}
        session = session_at(server, owner)
        with connection_to(server, receiver) as connection:
            assert ask(connection, "/seen", session).json()["started_by"] == owner
            answer = pool.submit(ask, connection, "/hold?name=it", session)
            journal.wait_for(f"hold it {owner}")
            server.send(signal.SIGTERM)
            until(lambda: server.log().count("Shutting down") == 2, "both workers are stopping")
            journal.release("it")
            assert answer.result().status == 200
        assert server.wait() == 0
        lines = journal.lines()
        for pid in workers:
            assert lines.count(f"startup {pid}") == 1
            (shutdown,) = [line for line in lines if line.startswith("shutdown") and line.endswith(f" {pid}")]
            assert owners[pid] not in shutdown
        (shutdown,) = [line for line in lines if line.startswith("shutdown") and line.endswith(f" {owner}")]
        assert lines.index(f"held it {owner}") < lines.index(shutdown)


# The arbiter is told to reload


def test_reload_ends_old_sessions_with_410_and_serves_new_ones() -> None:
    with probe_server() as server:
        (directory,) = server.directories()
        old_workers, old_owners = server.workers(), server.owners()
        old_sessions = [session_at(server, pid) for pid in old_workers]
        server.send(signal.SIGHUP)
        until(lambda: server.ready_workers() == 4, "the new workers serve")
        until(lambda: not any(map(is_alive, old_workers)), "the old workers are gone")
        until(lambda: not server.owners() & old_owners, "the old sockets are gone")
        assert [status(server, session) for session in old_sessions] == [410, 410]
        for pid in server.workers():
            session = session_at(server, pid)
            assert [count(server, session) for _ in range(5)] == [2, 3, 4, 5, 6]
        assert server.directories() == [directory]
        assert len(server.owners()) == 2
        assert errors(server.log()) == []


def test_requests_in_flight_finish_over_a_reload(journal: Journal) -> None:
    with ThreadPoolExecutor() as pool, probe_server(journal=journal) as server:
        receiver, owner = old_workers = server.workers()
        session = session_at(server, owner)
        with connection_to(server, receiver) as local, connection_to(server, receiver) as forwarded:
            answers = [
                pool.submit(ask, local, "/hold?name=local"),
                pool.submit(ask, forwarded, "/hold?name=forwarded", session),
            ]
            journal.wait_for(f"hold local {receiver}")
            journal.wait_for(f"hold forwarded {owner}")
            server.send(signal.SIGHUP)
            until(lambda: server.log().count("Shutting down") == 2, "both old workers are stopping")
            journal.release("local")
            journal.release("forwarded")
            assert [answer.result().json()["pid"] for answer in answers] == old_workers
        until(lambda: not any(map(is_alive, old_workers)), "the old workers are gone")
        assert status(server, session) == 410


def test_reload_under_load_gives_right_answers_or_410_and_fails_no_new_session() -> None:
    answers: Counter[str] = Counter()

    async def call_on(url: str, number: int, stop: asyncio.Event) -> None:
        while not stop.is_set():
            async with caller(url) as session:
                try:
                    await session.seed(number)
                except Answered as answered:
                    answers[f"new: {answered.status}"] += 1
                    continue
                except aiohttp.ClientError as error:
                    answers[f"new: {error!r}"] += 1
                    continue
                answers["new: right"] += 1
                try:
                    for step in range(8):
                        await session.increment(step)
                        answers["old: right" if await session.verify() else "old: wrong"] += 1
                except Answered as answered:
                    answers[f"old: {answered.status}"] += 1
                except aiohttp.ClientError as error:
                    answers[f"old: {error!r}"] += 1

    async def reload_twice(server: GunicornServer) -> None:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(call_on(server.url, number, stop))
            for reloads in (1, 2):
                old_workers = server.workers()
                enough = answers["new: right"] + 100
                await asyncio.to_thread(until, lambda: answers["new: right"] > enough, "some sessions are played")  # noqa: B023
                server.send(signal.SIGHUP)
                await asyncio.to_thread(until, lambda: server.ready_workers() == 4 + 4 * reloads, "new workers")  # noqa: B023
                await asyncio.to_thread(until, lambda: not any(map(is_alive, old_workers)), "old workers go")  # noqa: B023
            stop.set()

    with gunicorn_server() as server:
        asyncio.run(reload_twice(server))
        assert set(answers) == {"new: right", "old: right", "old: 410"}, answers
        assert errors(server.log()) == []


def test_reload_from_four_workers_to_one_goes_on_answering_410() -> None:
    with probe_server(config=CONFIG + "workers = 4\n", workers=4) as server:
        old_workers = server.workers()
        old_sessions = [session_at(server, pid) for pid in old_workers]
        reconfigure(server, "workers = 4", "workers = 1")
        server.send(signal.SIGHUP)
        until(lambda: not any(map(is_alive, old_workers)), "the old workers are gone")
        until(lambda: server.ready_workers() == 5, "the one new worker serves")
        assert [status(server, session) for session in old_sessions] == [410] * 4
        (pid,) = server.workers()
        session = session_at(server, pid)
        assert count(server, session) == 2
        assert server.owners() == {session.owner}


# A worker ends


def test_session_of_a_killed_worker_gets_410_at_once_though_its_socket_is_left() -> None:
    with probe_server() as server:
        killed, other = server.workers()
        lost, kept = session_at(server, killed), session_at(server, other)
        owner = owner_of(server, killed)
        with connection_to(server, other) as connection, stopped(server.pid):
            # A connection to the owner is kept when it dies, and the arbiter can't clean up.
            assert count(connection, lost) == 2
            os.kill(killed, signal.SIGKILL)
            until(lambda: not is_alive(killed), "the worker is dead")
            assert owner in server.owners()
            assert status(connection, lost) == 410
            assert count(connection, kept) == 2


def test_arbiter_removes_the_socket_of_a_killed_worker_and_replaces_it() -> None:
    with probe_server() as server:
        killed, other = server.workers()
        lost, kept = session_at(server, killed), session_at(server, other)
        owner = owner_of(server, killed)
        os.kill(killed, signal.SIGKILL)
        until(lambda: owner not in server.owners(), "its socket is removed")
        until(lambda: server.ready_workers() == 3, "it is replaced")
        assert [status(server, lost) for _ in range(5)] == [410] * 5
        assert [count(server, kept) for _ in range(5)] == [2, 3, 4, 5, 6]
        (replacement,) = set(server.workers()) - {killed, other}
        session = session_at(server, replacement)
        assert [count(server, session) for _ in range(5)] == [2, 3, 4, 5, 6]


def test_log_says_whose_sessions_a_dead_worker_took_with_it() -> None:
    with probe_server() as server:
        killed, _ = server.workers()
        owner = owner_of(server, killed)
        os.kill(killed, signal.SIGKILL)
        line = f"Owner {owner} has died, worker (pid:{killed}): the 0 sessions that it had stamped get 410"
        until(lambda: line in server.log(), "the log says so")


def test_worker_told_to_stop_is_replaced_and_its_sessions_get_410() -> None:
    with probe_server() as server:
        told, other = server.workers()
        lost, kept = session_at(server, told), session_at(server, other)
        os.kill(told, signal.SIGTERM)
        until(lambda: not is_alive(told), "the worker has stopped")
        until(lambda: server.ready_workers() == 3, "it is replaced")
        assert [status(server, lost) for _ in range(5)] == [410] * 5
        assert [count(server, kept) for _ in range(5)] == [2, 3, 4, 5, 6]
        assert lost.owner not in server.owners()
        assert errors(server.log()) == []


def test_stopping_worker_removes_its_socket_itself() -> None:
    with probe_server() as server:
        told, _ = server.workers()
        owner = owner_of(server, told)
        with stopped(server.pid):
            os.kill(told, signal.SIGTERM)
            until(lambda: not is_alive(told), "the worker has stopped")
            assert owner not in server.owners()


def test_stopping_worker_answers_what_reaches_it_over_connections_that_it_has(journal: Journal) -> None:
    with ThreadPoolExecutor() as pool, probe_server(journal=journal) as server:
        owner, receiver = server.workers()
        session = session_at(server, owner)
        with connection_to(server, owner) as held, connection_to(server, receiver) as connection:
            assert count(connection, session) == 2
            answer = pool.submit(ask, held, "/hold?name=it")
            journal.wait_for(f"hold it {owner}")
            os.kill(owner, signal.SIGTERM)
            until(lambda: session.owner not in server.owners(), "the owner takes no new connections")
            assert count(connection, session) == 3
            # That reply ended the connection between the workers, and a new one is not to be had.
            assert status(connection, session) == 410
            journal.release("it")
            assert answer.result().status == 200
        until(lambda: not is_alive(owner), "the owner has stopped")
        assert status(server, session) == 410


def test_hangup_of_every_worker_changes_nothing() -> None:
    with probe_server() as server:
        workers = server.workers()
        sessions = [session_at(server, pid) for pid in workers]
        for pid in workers:
            os.kill(pid, signal.SIGHUP)
        assert [count(server, session) for session in sessions for _ in range(3)] == [2, 3, 4] * 2
        assert server.workers() == workers
        assert server.ready_workers() == 2


def test_worker_that_reaches_max_requests_is_replaced_and_its_sessions_get_410() -> None:
    with probe_server("--max-requests", "10") as server:
        worn, other = server.workers()
        lost, kept = session_at(server, worn), session_at(server, other)
        # It may stop before the last of them.
        with connection_to(server, worn) as connection, suppress(HTTPException, ConnectionError):
            for _ in range(10):
                ask(connection, "/pid")
        until(lambda: not is_alive(worn), "the worker has stopped")
        until(lambda: server.ready_workers() == 3, "it is replaced")
        assert status(server, lost) == 410
        assert count(server, kept) == 2
        assert is_alive(other)


def test_forwarded_requests_count_towards_max_requests_of_their_owner() -> None:
    with probe_server("--max-requests", "30") as server:
        owner, receiver = server.workers()
        session = session_at(server, owner)
        with connection_to(server, receiver) as connection:
            answers: list[int] = []
            while not answers or answers[-1] == 200:
                assert len(answers) < 10_000, "the owner never stops"
                answers.append(status(connection, session))
            assert answers[-1] == 410
            assert len(answers) > 25
            until(lambda: not is_alive(owner), "the owner has stopped")
            # The receiver has received more than 30, and handled hardly any.
            assert ask(connection, "/pid").json() == {"pid": receiver}
        assert receiver in server.workers()


# The arbiter dies


def test_workers_of_a_killed_arbiter_finish_what_is_in_flight_and_go(journal: Journal) -> None:
    with ThreadPoolExecutor() as pool, probe_server(journal=journal) as server:
        receiver, owner = server.workers()
        session = session_at(server, owner)
        with connection_to(server, receiver) as local, connection_to(server, receiver) as forwarded:
            answers = [
                pool.submit(ask, local, "/hold?name=local"),
                pool.submit(ask, forwarded, "/hold?name=forwarded", session),
            ]
            journal.wait_for(f"hold local {receiver}")
            journal.wait_for(f"hold forwarded {owner}")
            server.send(signal.SIGKILL)
            server.wait()
            until(
                lambda: server.log().count(f"Stopping: the arbiter (pid {server.pid}) is gone") == 2,
                "both have seen it",
            )
            journal.release("local")
            journal.release("forwarded")
            assert [answer.result().status for answer in answers] == [200, 200]
        assert_nothing_left(server)
        socket.create_server(("127.0.0.1", server.port)).close()


def test_idle_workers_of_a_killed_arbiter_go_and_leave_nothing() -> None:
    with gunicorn_server("--graceful-timeout", "60") as server:
        assert asyncio.run(play(server.url, 20)) == {"right": 20}
        server.send(signal.SIGKILL)
        server.wait()
        assert_nothing_left(server)
        socket.create_server(("127.0.0.1", server.port)).close()


def test_start_sweeps_what_a_killed_server_left_and_spares_a_living_one() -> None:
    with gunicorn_server(workers=2) as dead:
        (left,) = dead.directories()
        beside = CONFIG.replace("{parent}", str(dead.parent))
        with gunicorn_server(config=beside, workers=2) as living:
            (spared,) = set(dead.directories()) - {left}
            # So that no worker sees its arbiter's death and cleans up.
            with stopped(*dead.workers()):
                dead.kill()
            assert list(left.glob("*.sock"))
            with gunicorn_server(config=beside, workers=2) as started:
                assert left not in dead.directories()
                assert spared in dead.directories()
                assert len(dead.directories()) == 2
                assert len(list(spared.glob("*.sock"))) == 2
                assert asyncio.run(play(living.url, 20)) == {"right": 20}
                assert asyncio.run(play(started.url, 20)) == {"right": 20}


def test_session_of_a_server_that_was_started_anew_gets_410() -> None:
    with probe_server() as server:
        sessions = [session_at(server, pid) for pid in server.workers()]
        assert server.stop() == 0
    with probe_server() as server:
        assert [status(server, session) for session in sessions for _ in range(3)] == [410] * 6
        assert errors(server.log()) == []


# More workers, fewer workers


def test_one_more_worker_and_one_fewer() -> None:
    with probe_server(workers=4) as server:
        first = server.workers()
        sessions = {pid: session_at(server, pid) for pid in first}
        server.send(signal.SIGTTIN)
        until(lambda: server.ready_workers() == 5, "the fifth worker serves")
        (fifth,) = set(server.workers()) - set(first)
        sessions[fifth] = session_at(server, fifth)
        assert {pid: count(server, session) for pid, session in sessions.items()} == dict.fromkeys(sessions, 2)
        server.send(signal.SIGTTOU)
        until(lambda: len(server.workers()) == 4, "one worker has gone")
        (gone,) = set(sessions) - set(server.workers())
        assert status(server, sessions.pop(gone)) == 410
        assert {pid: count(server, session) for pid, session in sessions.items()} == dict.fromkeys(sessions, 3)
        assert errors(server.log()) == []


def test_server_started_with_one_worker_refuses_to_grow() -> None:
    refusal = "This server started with one worker"
    with probe_server(workers=1) as server:
        workers = server.workers()
        session = session_at(server, workers[0])
        for times in (1, 2):
            # The second answer shows that the first signal has been dealt with.
            server.send(signal.SIGTTIN)
            until(lambda: server.log().count(refusal) == times, "it is refused")  # noqa: B023
        assert server.workers() == workers
        assert [count(server, session) for _ in range(5)] == [2, 3, 4, 5, 6]
        assert session.owner is None


def test_server_with_one_worker_that_always_routes_can_grow() -> None:
    config = CONFIG.replace("directory=", "routing='always', directory=")
    with probe_server(workers=1, config=config) as server:
        (first,) = server.workers()
        session = session_at(server, first)
        server.send(signal.SIGTTIN)
        until(lambda: server.ready_workers() == 2, "the second worker serves")
        (second,) = set(server.workers()) - {first}
        with connection_to(server, second) as connection:
            assert count(connection, session) == 2


# Upgrades


def _upgrade(server: GunicornServer) -> tuple[int, list[int], list[int]]:
    """Start a new arbiter beside the old one; return its pid, the old workers and the new ones."""
    old = server.workers()
    ready = server.ready_workers()
    server.send(signal.SIGUSR2)
    until(lambda: server.ready_workers() == ready + len(old), "the new workers serve")
    (arbiter,) = set(server.workers()) - set(old)
    new = children(arbiter)
    server.seen.update(new)
    return arbiter, old, new


def test_upgrade_answers_sessions_of_both_generations_through_workers_of_both() -> None:
    with probe_server() as server:
        (directory,) = server.directories()
        _, old, new = _upgrade(server)
        everyone = old + new
        assert len(new) == 2
        assert server.directories() == [directory]
        sessions = [session_at(server, pid, among=everyone) for pid in everyone]
        for calls, pid in enumerate(everyone, start=2):
            with connection_to(server, pid, among=everyone) as connection:
                assert [count(connection, session) for session in sessions] == [calls] * 4
        assert errors(server.log()) == []


def test_upgrade_ends_the_old_sessions_with_410_and_the_last_removes_the_directory() -> None:
    with probe_server() as server:
        arbiter, old, new = _upgrade(server)
        everyone = old + new
        lost = [session_at(server, pid, among=everyone) for pid in old]
        kept = [session_at(server, pid, among=everyone) for pid in new]
        assert server.stop() == 0
        until(lambda: not any(map(is_alive, old)), "the old workers are gone")
        assert [status(server, session) for session in lost] == [410, 410]
        assert [count(server, session) for session in kept] == [2, 2]
        assert server.owners() == {session.owner for session in kept}
        os.kill(arbiter, signal.SIGTERM)
        assert_nothing_left(server)
        assert errors(server.log()) == []


def test_upgrade_rolled_back_ends_the_new_sessions_with_410() -> None:
    with probe_server() as server:
        arbiter, old, new = _upgrade(server)
        everyone = old + new
        kept = [session_at(server, pid, among=everyone) for pid in old]
        lost = [session_at(server, pid, among=everyone) for pid in new]
        os.kill(arbiter, signal.SIGTERM)
        until(lambda: not any(map(is_alive, [arbiter, *new])), "the new server is gone")
        assert [status(server, session) for session in lost] == [410, 410]
        assert [count(server, session) for session in kept] == [2, 2]
        assert server.owners() == {session.owner for session in kept}
        assert server.stop() == 0
        assert_nothing_left(server)


def test_upgrade_of_a_server_with_one_worker_warns_that_its_sessions_will_be_lost() -> None:
    with probe_server(workers=1) as server:
        _upgrade(server)
        (warning,) = [line for line in server.log().splitlines() if "[WARNING]" in line]
        assert "The new arbiter's workers will not hold the sessions of this server's worker" in warning
        assert server.directories() == []
