"""Signals to the arbiter, and to all processes at once."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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
from tests.e2e.launching import daemon, reconfigure, rewrite
from tests.faults.files import has_open
from tests.gunicorn_server import CONFIG, GunicornServer, children, errors, is_alive, until

SLOW = "tests.e2e.apps.slow:app"


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path)


def generations(server: GunicornServer, old: list[int]) -> tuple[int, list[int]]:
    """Wait for a new arbiter beside the old workers; return its pid and those of its workers."""
    until(lambda: set(server.workers()) - set(old), "the new arbiter has started")
    (arbiter,) = set(server.workers()) - set(old)
    until(lambda: len(children(arbiter)) == len(old), "it has started its workers")
    new = children(arbiter)
    server.seen.update(new)
    return arbiter, new


def with_zombies(pid: int) -> list[int]:
    """Return all child processes of a process; while one is not reaped, gunicorn starts no other arbiter."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


# SIGUSR1


def test_usr1_has_every_process_reopen_its_logs_and_loses_no_session() -> None:
    config = CONFIG + 'errorlog = "{parent}/log"\naccesslog = "{parent}/access"\n'
    with probe_server(config=config) as server:
        workers = server.workers()
        sessions = [session_at(server, pid) for pid in workers]
        access = server.parent / "access"
        for path in (access, server.log_path):
            path.rename(path.with_suffix(".1"))
        server.send(signal.SIGUSR1)
        everyone = (server.pid, *workers)
        until(
            lambda: all(has_open(pid, path) for pid in everyone for path in (access, server.log_path)),
            "all have opened the logs again",
        )
        for calls, pid in enumerate(workers, start=2):
            with connection_to(server, pid) as connection:
                assert [count(connection, session) for session in sessions] == [calls, calls]
        # Each worker is asked for its pid once.
        until(lambda: access.read_text().count("GET /pid") == 2, "both workers write to the new access log")
        assert server.workers() == workers
        assert server.stop() == 0
        assert server.log().count("Worker exiting") == 2
        assert_nothing_left(server)


# SIGWINCH


def test_winch_changes_nothing_in_the_foreground() -> None:
    with probe_server() as server:
        workers = server.workers()
        sessions = [session_at(server, pid) for pid in workers]
        server.send(signal.SIGWINCH)
        until(lambda: "Handling signal: winch" in server.log(), "the signal is dealt with")
        assert [count(server, session) for session in sessions for _ in range(3)] == [2, 3, 4] * 2
        assert server.workers() == workers


def test_winch_ends_the_workers_of_a_daemon_and_a_reload_starts_new_ones(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with daemon(pid_file) as (server, arbiter):
        workers = children(arbiter)
        sessions = [session_at(server, pid, among=workers) for pid in workers]
        os.kill(arbiter, signal.SIGWINCH)
        until(lambda: not children(arbiter), "the workers are gone")
        assert server.owners() == set()
        assert is_alive(arbiter)
        os.kill(arbiter, signal.SIGHUP)
        until(lambda: server.ready_workers() == 4, "new workers serve")
        assert [status(server, session) for session in sessions] == [410, 410]
        new = Session()
        assert [count(server, new) for _ in range(5)] == [1, 2, 3, 4, 5]
        os.kill(arbiter, signal.SIGTERM)
        assert_nothing_left(server)
        assert not pid_file.exists()
        assert errors(server.log()) == []


# SIGUSR2


@pytest.mark.parametrize("stopped_first", ["old", "new"])
def test_upgrade_of_a_preloaded_app_answers_sessions_of_both_generations(stopped_first: str) -> None:
    with probe_server("--preload") as server:
        old_workers = server.workers()
        server.send(signal.SIGUSR2)
        until(lambda: server.ready_workers() == 4, "the new workers serve")
        arbiter, new_workers = generations(server, old_workers)
        everyone = old_workers + new_workers
        old = [session_at(server, pid, among=everyone) for pid in old_workers]
        new = [session_at(server, pid, among=everyone) for pid in new_workers]
        for calls, pid in enumerate(everyone, start=2):
            with connection_to(server, pid, among=everyone) as connection:
                assert [count(connection, session) for session in old + new] == [calls] * 4
        if stopped_first == "old":
            (lost, ended), (kept, left) = (old, old_workers), (new, arbiter)
            assert server.stop() == 0
        else:
            (lost, ended), (kept, left) = (new, [arbiter, *new_workers]), (old, server.pid)
            os.kill(arbiter, signal.SIGTERM)
        until(lambda: not any(map(is_alive, ended)), "one generation is gone")
        assert [status(server, session) for session in lost] == [410, 410]
        assert [count(server, session) for session in kept] == [6, 6]
        os.kill(left, signal.SIGTERM)
        assert_nothing_left(server)
        assert errors(server.log()) == []


@pytest.mark.parametrize("preload", [[], ["--preload"]], ids=["", "preload"])
def test_old_server_stopped_while_the_new_one_loads_its_app_hands_over(preload: list[str], journal: Journal) -> None:
    with ThreadPoolExecutor() as pool, probe_server(*preload, app=SLOW, journal=journal) as server:
        old = server.workers()
        (directory,) = server.directories()
        lost = [session_at(server, pid) for pid in old]
        loading = len([line for line in journal.lines() if line.startswith("loading")])
        journal.release("loading takes long")
        server.send(signal.SIGUSR2)
        expected = loading + (1 if preload else 2)
        until(
            lambda: sum(line.startswith("loading") for line in journal.lines()) == expected, "the app is being loaded"
        )
        (arbiter,) = set(server.workers()) - set(old)
        server.seen.update(children(arbiter))
        assert server.stop() == 0
        until(lambda: not any(map(is_alive, old)), "the old workers are gone")
        # Nobody serves now: who comes waits for the new workers.
        answers = [pool.submit(status, server, session) for session in lost]
        (journal.folder / "loading takes long").unlink()
        until(lambda: server.ready_workers() == 4, "the new workers serve")
        server.seen.update(children(arbiter))
        assert [answer.result() for answer in answers] == [410, 410]
        new = Session()
        assert [count(server, new) for _ in range(5)] == [1, 2, 3, 4, 5]
        assert server.directories() == [directory]
        assert len(server.owners()) == 2
        os.kill(arbiter, signal.SIGTERM)
        assert_nothing_left(server)
        assert errors(server.log()) == []


@pytest.mark.parametrize("preload", [[], ["--preload"]], ids=["", "preload"])
def test_new_server_stopped_while_it_loads_its_app_leaves_the_old_one_as_it_was(
    preload: list[str], journal: Journal
) -> None:
    with probe_server(*preload, app=SLOW, journal=journal) as server:
        old, owners = server.workers(), server.owners()
        kept = [session_at(server, pid) for pid in old]
        loading = len([line for line in journal.lines() if line.startswith("loading")])
        journal.release("loading takes long")
        for times in (1, 2):
            # The second time shows that the first left nothing in the way.
            server.send(signal.SIGUSR2)
            expected = loading + (1 if preload else 2) * times
            until(lambda: sum(line.startswith("loading") for line in journal.lines()) == expected, "it loads")  # noqa: B023
            (arbiter,) = set(server.workers()) - set(old)
            new = [arbiter, *children(arbiter)]
            server.seen.update(new)
            os.kill(arbiter, signal.SIGTERM)
            until(lambda: not any(map(is_alive, new)), "the new server is gone")  # noqa: B023
            until(lambda: not os.path.exists(f"/proc/{arbiter}"), "it is reaped: before, no other is started")  # noqa: B023
            assert server.workers() == old
            assert server.owners() == owners
            assert [count(server, session) for session in kept] == [1 + times] * 2
        assert server.stop() == 0
        assert_nothing_left(server)


@pytest.mark.parametrize(
    ("old_text", "new_text", "cause"),
    [
        pytest.param("worker_class", "this is no Python\nworker_class", "invalid syntax", id="configuration"),
        pytest.param("from gym", "raise SystemExit('on purpose')\nfrom gym", "on purpose", id="exit"),
        pytest.param("# the end", "del child_exit", "needs the server hooks child_exit", id="hooks"),
        pytest.param("# the end", "raw_env = ['BREAK=1']", "the app can't be loaded", id="app"),
        pytest.param("# the end", "certfile = '/missing.pem'", "/missing.pem", id="certificate"),
    ],
)
def test_upgrade_that_fails_to_start_leaves_the_old_server_as_it_was(
    old_text: str, new_text: str, cause: str, journal: Journal
) -> None:
    with probe_server(config=CONFIG + "# the end\n", app="tests.e2e.apps.breakable:app", journal=journal) as server:
        workers, owners = server.workers(), server.owners()
        kept = [session_at(server, pid) for pid in workers]
        before = (server.parent / "conf.py").read_text()
        reconfigure(server, old_text, new_text)
        server.send(signal.SIGUSR2)
        until(lambda: cause in server.log(), "the log has the cause")
        until(lambda: with_zombies(server.pid) == workers, "the new arbiter is gone and reaped")
        assert [count(server, session) for session in kept for _ in range(3)] == [2, 3, 4] * 2
        assert server.owners() == owners
        # Mended, it starts.
        ready = server.ready_workers()
        rewrite(server, before)
        server.send(signal.SIGUSR2)
        until(lambda: server.ready_workers() == ready + 2, "the new workers serve")
        arbiter, _ = generations(server, workers)
        assert [count(server, session) for session in kept for _ in range(3)] == [5, 6, 7] * 2
        assert server.stop() == 0
        os.kill(arbiter, signal.SIGTERM)
        assert_nothing_left(server)


# To all processes


def test_term_to_all_processes_finishes_what_is_in_flight_and_leaves_nothing(journal: Journal) -> None:
    with ThreadPoolExecutor() as pool, probe_server(journal=journal) as server, ExitStack() as stack:
        receiver, owner = workers = server.workers()
        session = session_at(server, owner)
        local, forwarded = (stack.enter_context(connection_to(server, receiver)) for _ in range(2))
        answers = [
            pool.submit(ask, local, "/hold?name=local"),
            pool.submit(ask, forwarded, "/hold?name=forwarded", session),
        ]
        journal.wait_for(f"hold local {receiver}")
        journal.wait_for(f"hold forwarded {owner}")
        for pid in (server.pid, *workers):
            os.kill(pid, signal.SIGTERM)
        until(lambda: server.log().count("Shutting down") == 2, "both workers are stopping")
        journal.release("local")
        journal.release("forwarded")
        assert [answer.result().status for answer in answers] == [200, 200]
        assert server.wait() == 0
        assert_nothing_left(server)
        assert errors(server.log()) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGQUIT], ids=lambda signum: str(signum.name))
def test_interrupt_of_all_processes_ends_an_idle_server_and_leaves_nothing(signum: signal.Signals) -> None:
    with probe_server("--graceful-timeout", "600") as server:
        for pid in (*server.workers(), server.pid):
            os.kill(pid, signum)
        assert server.wait() == 0
        assert_nothing_left(server)


def test_hangup_of_all_processes_is_one_reload() -> None:
    with probe_server() as server:
        old = server.workers()
        lost = [session_at(server, pid) for pid in old]
        for pid in (*old, server.pid):
            os.kill(pid, signal.SIGHUP)
        until(lambda: server.ready_workers() == 4, "the new workers serve")
        until(lambda: not any(map(is_alive, old)), "the old workers are gone")
        assert [status(server, session) for session in lost] == [410, 410]
        new = Session()
        assert [count(server, new) for _ in range(5)] == [1, 2, 3, 4, 5]
        assert server.log().count("Booting worker") == 4
        assert errors(server.log()) == []
