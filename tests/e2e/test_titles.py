"""Process titles, as `ps` shows them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gym_gunicorn.metrics.values import read_all
from tests.e2e.calls import (
    PROBE,
    Journal,
    connection_to,
    count,
    owner_of,
    probe_server,
    session_at,
    status,
)
from tests.e2e.launching import hang_up, reconfigure
from tests.gunicorn_server import CONFIG, GunicornServer, children, gunicorn_server, is_alive, until

COUNTS = ("stamped", "active", "local", "forwarded", "received", "gone")
WORKER = re.compile(
    r"gunicorn: worker \[(?P<name>[^]]+)\] owner=(?P<owner>[0-9a-f]{12})( state=(?P<state>[a-z]+))? "
    + " ".join(rf"{key}=(?P<{key}>\d+)" for key in COUNTS)
)
MASTER = re.compile(r"gunicorn: master \[(?P<name>[^]]+)\] workers=(?P<workers>\d+) sockets=(?P<sockets>/\S+)")

# Notes each title that is written: one cannot see that from outside, where it is the same again.
NOTING = (
    CONFIG
    + """
import setproctitle

_write = setproctitle.setproctitle


def _write_and_note(title):
    from tests.e2e.apps.journal import note

    note("title")
    _write(title)


setproctitle.setproctitle = _write_and_note
"""
)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path)


@pytest.fixture
def server(journal: Journal) -> Iterator[GunicornServer]:
    with probe_server(journal=journal) as server:
        yield server


def shown(pid: int) -> str:
    """Return what `ps` shows of a process."""
    command = ["ps", "-ww", "-o", "args=", "-p", str(pid)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def parts(pid: int, form: re.Pattern[str] = WORKER) -> dict[str, str | None]:
    """Return what a title of the documented form says; nothing where it is not of the form."""
    match = form.fullmatch(shown(pid))
    return match.groupdict() if match is not None else {}


def counts(pid: int) -> dict[str, int]:
    return {key: int(value) for key, value in parts(pid).items() if key in COUNTS and value is not None}


def wait_for_counts(pid: int, **expected: int) -> None:
    """Wait until a worker's title has these counts, and 0 for all others."""
    wanted = {**dict.fromkeys(COUNTS, 0), **expected}
    try:
        until(lambda: counts(pid) == wanted, "the title has the right counts")
    except AssertionError as error:
        raise AssertionError(f"{shown(pid)!r} instead of {wanted}") from error


def wait_for_titles(
    server: GunicornServer, arbiter: int, workers: list[int], name: str = PROBE, names: tuple[str, ...] = ()
) -> None:
    """Wait until an arbiter and its workers have titles of the documented form, which say what is true."""
    (directory,) = server.directories()

    def are_right() -> bool:
        expected = {"name": name, "workers": str(len(workers)), "sockets": str(directory)}
        if parts(arbiter, MASTER) != expected:
            return False
        return all(
            parts(pid).get("owner") == owner_of(server, pid)
            and parts(pid).get("state", "") is None
            and parts(pid).get("name") in (names or (name,))
            for pid in workers
        )

    try:
        until(are_right, "all titles are right")
    except AssertionError as error:
        raise AssertionError([shown(pid) for pid in (arbiter, *workers)]) from error


def test_titles_of_workers_and_arbiter_are_as_documented(server: GunicornServer) -> None:
    wait_for_titles(server, server.pid, server.workers())
    assert len({parts(pid)["owner"] for pid in server.workers()}) == 2


def test_name_of_the_server_is_in_its_titles() -> None:
    with probe_server("--name", "guess who") as server:
        wait_for_titles(server, server.pid, server.workers(), "guess who")


def test_name_that_a_reload_changes_is_in_the_titles_again() -> None:
    with probe_server(config=CONFIG + 'proc_name = "before"\n') as server:
        wait_for_titles(server, server.pid, server.workers(), "before")
        reconfigure(server, '"before"', '"after"')
        hang_up(server, 2)
        wait_for_titles(server, server.pid, server.workers(), "after")


def test_titles_are_right_again_after_a_reload(server: GunicornServer) -> None:
    wait_for_titles(server, server.pid, server.workers())
    hang_up(server, 2)
    wait_for_titles(server, server.pid, server.workers())


def test_titles_are_right_while_a_reload_waits_for_an_old_worker(server: GunicornServer, journal: Journal) -> None:
    old = server.workers()
    with connection_to(server, old[0]) as connection:
        connection.request("GET", "/hold?name=x")
        journal.wait_for(f"hold x {old[0]}")
        server.send(signal.SIGHUP)
        until(lambda: server.ready_workers() == 4, "the new workers serve")
        until(lambda: parts(old[0]).get("state") == "stopping", "the old worker says that it stops")
        until(lambda: parts(server.pid, MASTER), "the arbiter's title is of the documented form")
        assert is_alive(old[0])
        journal.release("x")
        assert connection.getresponse().status == 200
    until(lambda: not set(old) & set(server.workers()), "the old workers are gone")
    wait_for_titles(server, server.pid, server.workers())


def test_titles_are_right_for_both_arbiters_and_after_the_promotion_of_the_new_one(server: GunicornServer) -> None:
    old = server.workers()
    server.send(signal.SIGUSR2)
    until(lambda: server.ready_workers() == 4, "the new workers serve")
    (arbiter,) = set(server.workers()) - set(old)
    new = children(arbiter)
    server.seen.update(new)
    # Gunicorn's own name for the second of two.
    wait_for_titles(server, arbiter, new, f"{PROBE}.2")
    wait_for_titles(server, server.pid, old)
    assert server.stop() == 0
    until(lambda: not any(map(is_alive, old)), "the old server is gone")
    wait_for_titles(server, arbiter, new, PROBE, names=(PROBE, f"{PROBE}.2"))


def test_titles_are_right_again_where_the_new_arbiter_is_stopped(server: GunicornServer) -> None:
    old = server.workers()
    server.send(signal.SIGUSR2)
    until(lambda: server.ready_workers() == 4, "the new workers serve")
    (arbiter,) = set(server.workers()) - set(old)
    server.seen.update(children(arbiter))
    os.kill(arbiter, signal.SIGTERM)
    until(lambda: not is_alive(arbiter), "the new server is gone")
    wait_for_titles(server, server.pid, old)


def test_titles_follow_the_number_of_workers(server: GunicornServer) -> None:
    server.send(signal.SIGTTIN)
    until(lambda: server.ready_workers() == 3, "the third worker serves")
    wait_for_titles(server, server.pid, server.workers())
    assert len(server.workers()) == 3
    server.send(signal.SIGTTOU)
    until(lambda: len(server.workers()) == 2, "the third worker is gone")
    wait_for_titles(server, server.pid, server.workers())


def test_titles_are_right_again_after_a_worker_was_killed(server: GunicornServer) -> None:
    one, other = server.workers()
    os.kill(one, signal.SIGKILL)
    until(lambda: server.ready_workers() == 3, "another worker serves")
    (new,) = set(server.workers()) - {other}
    wait_for_titles(server, server.pid, [other, new])


def test_worker_that_loads_its_app_says_that_it_starts(journal: Journal) -> None:
    journal.release("loading takes long")
    with gunicorn_server(app="tests.e2e.apps.slow:app", workers=2, ready=False, env=journal.env) as server:
        until(lambda: sum(line.startswith("loading") for line in journal.lines()) == 2, "both workers load")
        for pid in server.workers():
            until(lambda: parts(pid).get("state") == "starting", "the worker says that it starts")  # noqa: B023
            assert parts(pid)["name"] == "tests.e2e.apps.slow:app"
        (journal.folder / "loading takes long").unlink()
        server.wait_until_ready(2)
        wait_for_titles(server, server.pid, server.workers(), "tests.e2e.apps.slow:app")


def test_worker_that_drains_says_that_it_stops_and_what_it_still_does(server: GunicornServer, journal: Journal) -> None:
    pid, _ = server.workers()
    with connection_to(server, pid) as connection:
        connection.request("GET", "/hold?name=x")
        journal.wait_for(f"hold x {pid}")
        os.kill(pid, signal.SIGTERM)
        until(lambda: parts(pid).get("state") == "stopping", "the worker says that it stops")
        assert parts(pid)["active"] == "1"
        journal.release("x")
        assert connection.getresponse().status == 200


def test_title_is_written_when_counts_change_and_not_otherwise(journal: Journal) -> None:
    with probe_server(journal=journal, config=NOTING) as server:
        wait_for_titles(server, server.pid, server.workers())
        (directory,) = server.directories()
        pid = server.workers()[0]
        written = journal.lines().count(f"title {pid}")
        masters = journal.lines().count(f"title {server.pid}")

        def beat() -> int:
            (reading,) = (reading for reading in read_all(str(directory))[0] if reading["pid"] == pid)
            return reading["beat"]

        since = beat()
        # Seconds of the worker's own loop, in which it has looked at its title.
        until(lambda: beat() - since > 4 * 10**9, "the worker has had time")
        assert journal.lines().count(f"title {pid}") == written
        assert journal.lines().count(f"title {server.pid}") == masters
        with connection_to(server, pid):
            until(lambda: counts(pid)["local"] == 1, "the title has the new count")
        assert journal.lines().count(f"title {pid}") > written


def test_requests_are_counted_where_they_are_handled_and_sessions_where_they_are_stamped(
    server: GunicornServer,
) -> None:
    one, other = server.workers()
    session = session_at(server, one)
    # One for the connection, one for the session.
    wait_for_counts(one, stamped=1, local=2)
    wait_for_counts(other)
    with connection_to(server, other) as connection:
        assert [count(connection, session) for _ in range(3)] == [2, 3, 4]
    wait_for_counts(one, stamped=1, local=2, received=3)
    wait_for_counts(other, local=1, forwarded=3)
    with connection_to(server, one) as connection:
        assert count(connection, session) == 5
    wait_for_counts(one, stamped=1, local=4, received=3)


def test_session_that_names_no_owner_is_counted_where_it_is_adopted(journal: Journal) -> None:
    stock = 'worker_class = "uvicorn_worker.UvicornWorker"\n'
    with probe_server(journal=journal, config=stock, workers=1) as unrouted:
        session = session_at(unrouted, unrouted.workers()[0])
        assert session.owner is None
    with probe_server(journal=journal) as server:
        pid, _ = server.workers()
        with connection_to(server, pid) as connection:
            assert count(connection, session) == 1
            assert session.owner == owner_of(server, pid)
            assert count(connection, session) == 2
        wait_for_counts(pid, stamped=1, local=3)


def test_request_in_progress_is_active_at_its_owner_alone(server: GunicornServer, journal: Journal) -> None:
    one, other = server.workers()
    session = session_at(server, one)
    with connection_to(server, other) as connection:
        connection.request("GET", "/hold?name=x", headers={"cookie": session.cookie or ""})
        journal.wait_for(f"hold x {one}")
        wait_for_counts(one, stamped=1, active=1, local=2, received=1)
        wait_for_counts(other, local=1, forwarded=1)
        journal.release("x")
        assert connection.getresponse().status == 200
    wait_for_counts(one, stamped=1, local=2, received=1)


def test_410s_are_counted_by_the_worker_that_answers_them(server: GunicornServer) -> None:
    one, other = server.workers()
    session = session_at(server, one)
    os.kill(one, signal.SIGKILL)
    until(lambda: server.ready_workers() == 3, "another worker serves")
    with connection_to(server, other) as connection:
        assert [status(connection, session) for _ in range(2)] == [410, 410]
    until(lambda: counts(other)["gone"] == 2, "the title has the new count")
    assert counts(other)["received"] == 0


@pytest.mark.parametrize(
    ("app", "workers", "config"),
    [
        pytest.param(PROBE, 1, CONFIG, id="one worker"),
        pytest.param(PROBE, 2, CONFIG.replace("directory=", 'routing="off", directory='), id="routing is off"),
        pytest.param("tests.e2e.apps.no_sessions:app", 2, CONFIG, id="no sessions"),
    ],
)
def test_workers_that_are_not_routed_keep_gunicorns_titles(app: str, workers: int, config: str) -> None:
    with probe_server("--name", "plain", app=app, config=config, workers=workers) as server:
        for pid in server.workers():
            until(lambda: shown(pid) == "gunicorn: worker [plain]", "the title is gunicorn's own")  # noqa: B023
        if app == PROBE:
            assert shown(server.pid) == "gunicorn: master [plain]"
