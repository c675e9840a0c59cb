"""What the log says: births, deaths and losses in one line each, requests in one access line each."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.calls import (
    Journal,
    Session,
    ask,
    connection_to,
    count,
    owner_of,
    probe_server,
    processes_of,
    session_at,
    status,
)
from tests.e2e.launching import hang_up
from tests.gunicorn_server import CONFIG, GunicornServer, until


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path)


@pytest.fixture
def server(journal: Journal) -> Iterator[GunicornServer]:
    with probe_server(journal=journal) as server:
        yield server


def births(server: GunicornServer, owner: str) -> list[str]:
    return [line for line in server.log().splitlines() if f"This worker is owner {owner}" in line]


def deaths(server: GunicornServer, owner: str) -> list[str]:
    """Return the lines that say that an owner has stopped or died."""
    return [line for line in server.log().splitlines() if re.search(f"Owner {owner} (stops|has died)", line)]


def losses(server: GunicornServer, owner: str) -> list[str]:
    """Return the lines that say that an owner did not answer."""
    return [line for line in server.log().splitlines() if "was not answered by its owner" in line and owner in line]


def owner_with_sessions(server: GunicornServer, pid: int, sessions: int) -> str:
    for _ in range(sessions):
        session_at(server, pid)
    return owner_of(server, pid)


def test_every_owner_that_is_born_has_a_line_with_its_process(server: GunicornServer) -> None:
    for pid in server.workers():
        (line,) = births(server, owner_of(server, pid))
        assert f"[{pid}]" in line


def test_death_by_sigterm_has_a_line_with_cause_and_sessions(server: GunicornServer) -> None:
    pid = server.workers()[0]
    owner = owner_with_sessions(server, pid, 3)
    os.kill(pid, signal.SIGTERM)
    until(lambda: pid not in server.workers() and server.ready_workers() == 3, "another worker serves")
    (line,) = deaths(server, owner)
    assert f"Owner {owner} stops (SIGTERM): the 3 sessions" in line


def test_death_by_a_reload_has_a_line_with_cause_and_sessions(server: GunicornServer) -> None:
    owners = {owner_with_sessions(server, pid, number): number for number, pid in enumerate(server.workers(), 1)}
    hang_up(server, 2)
    for owner, number in owners.items():
        (line,) = deaths(server, owner)
        assert f"Owner {owner} stops (SIGTERM): the {number} sessions" in line


def test_death_by_the_end_of_the_server_has_a_line_with_cause_and_sessions(server: GunicornServer) -> None:
    one, other = server.workers()
    owners = {owner_with_sessions(server, one, 2): 2, owner_of(server, other): 0}
    assert server.stop() == 0
    for owner, number in owners.items():
        (line,) = deaths(server, owner)
        assert f"Owner {owner} stops (SIGTERM): the {number} sessions" in line


def test_death_by_max_requests_has_a_line_with_cause_and_sessions() -> None:
    # Eight: two for a session each, and what is left ends the worker.
    with probe_server("--max-requests", "8") as server:
        pid, other = server.workers()
        owner = owner_with_sessions(server, pid, 2)
        with connection_to(server, pid) as connection:
            session = Session()
            while pid in server.workers() and not deaths(server, owner):
                try:
                    status(connection, session)
                except OSError:
                    break
        until(lambda: pid not in server.workers(), "the worker is gone")
        (line,) = deaths(server, owner)
        assert f"Owner {owner} stops (max_requests): the 3 sessions" in line
        assert other in server.workers()


def test_death_by_sigkill_has_a_line_with_process_and_sessions(server: GunicornServer) -> None:
    pid = server.workers()[0]
    owner = owner_with_sessions(server, pid, 2)
    os.kill(pid, signal.SIGKILL)
    until(lambda: server.ready_workers() == 3, "another worker serves")
    (line,) = deaths(server, owner)
    assert f"Owner {owner} has died, worker (pid:{pid}): the 2 sessions" in line
    assert "[WARNING]" in line


def test_death_of_the_arbiter_is_the_cause_in_the_lines_of_its_workers(server: GunicornServer) -> None:
    one, other = server.workers()
    owners = {owner_with_sessions(server, one, 2): 2, owner_of(server, other): 0}
    server.send(signal.SIGKILL)
    server.wait()
    until(lambda: not processes_of(server), "the workers have ended")
    for owner, number in owners.items():
        (line,) = deaths(server, owner)
        assert f"Owner {owner} stops (the arbiter (pid {server.pid}) is gone): the {number} sessions" in line


def test_410s_of_one_owner_are_told_at_once_and_then_at_most_every_ten_seconds(server: GunicornServer) -> None:
    pid, other = server.workers()
    sessions = [session_at(server, pid) for _ in range(2)]
    (owner,) = {session.owner for session in sessions}
    assert owner is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: server.ready_workers() == 3, "another worker serves")
    with connection_to(server, other) as connection:
        began = time.monotonic()
        assert status(connection, sessions[0]) == 410
        assert len(losses(server, owner)) == 1
        asked = 1
        while len(losses(server, owner)) < 2:
            assert time.monotonic() - began < 60
            assert status(connection, sessions[asked % 2]) == 410
            asked += 1
            assert len(losses(server, owner)) <= 1 + (time.monotonic() - began) // 10
        first, second = losses(server, owner)
    assert "gone" in first
    assert " more since" not in first
    # All but the two that have lines of their own.
    assert f"(and {asked - 2} more since the last such line)" in second


def test_log_of_a_410_holds_no_cookie(server: GunicornServer) -> None:
    pid, other = server.workers()
    session = session_at(server, pid)
    assert session.cookie is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: server.ready_workers() == 3, "another worker serves")
    with connection_to(server, other) as connection:
        assert status(connection, session) == 410
    assert session.cookie.partition("=")[2] not in server.log()
    assert session.data["id"] not in server.log()


def test_every_request_has_one_access_line_with_its_callers_address() -> None:
    with probe_server("--access-logfile", "-") as server:
        one, other = server.workers()
        session = session_at(server, one)
        for pid in (one, other):
            with connection_to(server, pid) as connection:
                _, port = connection.sock.getsockname()
                assert [count(connection, session) for _ in range(3)]
            lines = until(lambda: _access_lines(server, "POST /count", port, 3), "the lines are there")  # noqa: B023
            assert len(lines) == 3
            # Written by the worker that the caller is connected to.
            assert len(_access_lines(server, "GET /pid", port, 1)) == 1
        posts = [line for line in server.log().splitlines() if "POST /count" in line]
        assert len(posts) == 7


def _access_lines(server: GunicornServer, request: str, port: int, at_least: int) -> list[str]:
    lines = [line for line in server.log().splitlines() if f"127.0.0.1:{port} " in line and f'"{request} ' in line]
    return lines if len(lines) >= at_least else []


def test_lost_and_operators_requests_have_one_access_line_too() -> None:
    config = CONFIG.replace("directory=", 'health_path="/health", directory=')
    with probe_server("--access-logfile", "-", config=config) as server:
        one, other = server.workers()
        session = session_at(server, one)
        os.kill(one, signal.SIGKILL)
        until(lambda: server.ready_workers() == 3, "another worker serves")
        with connection_to(server, other) as connection:
            _, port = connection.sock.getsockname()
            assert status(connection, session) == 410
            assert ask(connection, "/health").status == 200
        (line,) = until(lambda: _access_lines(server, "POST /count", port, 1), "the line is there")
        assert line.rstrip().endswith("410")
        (line,) = until(lambda: _access_lines(server, "GET /health", port, 1), "the line is there")
        assert line.rstrip().endswith("200")


def test_app_names_the_owner_in_its_own_log_wherever_the_request_came_in(journal: Journal) -> None:
    with probe_server(app="tests.e2e.apps.logging_owner:app", journal=journal) as server:
        one, other = server.workers()
        session = session_at(server, one)
        owner = owner_of(server, one)
        for pid in (one, other):
            with connection_to(server, pid) as connection:
                count(connection, session)
        expected = f"app's own: POST of {owner} in {one}"
        assert sum(expected in line for line in server.log().splitlines()) == 3
        assert sum("app's own:" in line for line in server.log().splitlines()) == 3
