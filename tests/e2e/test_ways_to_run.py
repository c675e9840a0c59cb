"""Other ways to run a server: under systemd, on several listeners, as a daemon, as PID 1, with --reload."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

from tests.e2e.calls import (
    PROBE,
    Session,
    UnixConnection,
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
from tests.e2e.launching import daemon, hang_up, needs, program
from tests.gunicorn_server import (
    CONFIG,
    GUNICORN,
    ROOT,
    GunicornServer,
    children,
    errors,
    gunicorn_server,
    is_alive,
    until,
)

# What systemd does for a socket unit: the listener is descriptor 3.
ACTIVATED = """
import socket

at = sys.argv.index("-b")
host, port = sys.argv[at + 1].split(":")
listener = socket.create_server((host, int(port)))
os.dup2(listener.fileno(), 3)
os.set_inheritable(3, True)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
# The unit says where it listens.
del sys.argv[at : at + 2]
"""


def wait_for_upgrade(server: GunicornServer, old: list[int]) -> tuple[int, list[int]]:
    """Wait until a new arbiter's workers serve; return its pid and theirs."""
    until(lambda: server.ready_workers() == 2 * len(old), "the new workers serve")
    (arbiter,) = set(server.workers()) - set(old)
    new = children(arbiter)
    server.seen.update(new)
    return arbiter, new


def test_sessions_are_right_under_socket_activation_over_a_reload(tmp_path: Path) -> None:
    command = program(tmp_path / "gunicorn", ACTIVATED)
    with gunicorn_server("--keep-alive", "75", app=PROBE, workers=2, gunicorn=command) as server:
        lost = [session_at(server, pid) for pid in server.workers()]
        for calls, pid in enumerate(server.workers(), start=2):
            with connection_to(server, pid) as connection:
                assert [count(connection, session) for session in lost] == [calls, calls]
        hang_up(server, 2)
        assert [status(server, session) for session in lost] == [410, 410]
        new = Session()
        assert [count(server, new) for _ in range(5)] == [1, 2, 3, 4, 5]
        assert server.stop() == 0
        assert_nothing_left(server)
        assert errors(server.log()) == []


def test_upgrade_that_gunicorn_can_not_do_under_socket_activation_loses_nothing(tmp_path: Path) -> None:
    # gunicorn (27.0) tells its successor that the listener is descriptor 3, which it has closed.
    with gunicorn_server(app=PROBE, workers=2, gunicorn=program(tmp_path / "gunicorn", ACTIVATED)) as server:
        workers, owners = server.workers(), server.owners()
        kept = [session_at(server, pid) for pid in workers]
        server.send(signal.SIGUSR2)
        until(lambda: server.log().count("Starting gunicorn") == 2, "the new arbiter starts")
        until(lambda: server.workers() == workers, "it has ended")
        assert [count(server, session) for session in kept for _ in range(3)] == [2, 3, 4] * 2
        assert server.owners() == owners
        assert server.stop() == 0
        assert_nothing_left(server)


def test_one_session_is_right_over_every_listener_of_a_server(tmp_path: Path) -> None:
    path = tmp_path / "listener"
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port: int = reserved.getsockname()[1]
    with probe_server("-b", f"127.0.0.1:{port}", "-b", f"unix:{path}") as server:

        def second() -> HTTPConnection:
            return HTTPConnection("127.0.0.1", port, timeout=60)

        def third() -> HTTPConnection:
            return UnixConnection(path)

        workers = server.workers()
        server.port = port
        sessions = [session_at(server, pid) for pid in workers]
        expected = 1
        for pid in workers:
            for make in (second, third):
                expected += 1
                with connection_to(server, pid, make=make) as connection:
                    assert [count(connection, session) for session in sessions] == [expected, expected]
        hang_up(server, 2)
        for make in (second, third):
            with connection_to(server, server.workers()[0], make=make) as connection:
                assert [status(connection, session) for session in sessions] == [410, 410]
        assert server.stop() == 0
        assert_nothing_left(server)
        assert not path.exists()
        assert errors(server.log()) == []


def test_unix_listener_of_a_server_that_is_upgraded_stays_and_goes_with_the_last(tmp_path: Path) -> None:
    path = tmp_path / "listener"

    def make() -> HTTPConnection:
        return UnixConnection(path)

    with probe_server("-b", f"unix:{path}") as server:
        old = server.workers()
        session = Session()
        with connection_to(server, old[0], make=make) as connection:
            assert count(connection, session) == 1
        server.send(signal.SIGUSR2)
        arbiter, new = wait_for_upgrade(server, old)
        with connection_to(server, new[0], make=make, among=old + new) as connection:
            assert count(connection, session) == 2
        assert server.stop() == 0
        until(lambda: not any(map(is_alive, old)), "the old workers are gone")
        with connection_to(server, new[0], make=make, among=new) as connection:
            assert status(connection, session) == 410
        # Not before it knows that it is the only one.
        until(lambda: "Master has been promoted" in server.log(), "the new arbiter takes over")
        os.kill(arbiter, signal.SIGTERM)
        assert_nothing_left(server)
        assert not path.exists()


def test_daemon_reloads_and_is_upgraded_by_its_pid_file(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with daemon(pid_file) as (server, arbiter):
        workers = children(arbiter)
        lost = [session_at(server, pid, among=workers) for pid in workers]
        os.kill(int(pid_file.read_text()), signal.SIGHUP)
        until(lambda: server.ready_workers() == 4, "the new workers serve")
        until(lambda: not any(map(is_alive, workers)), "the old workers are gone")
        assert [status(server, session) for session in lost] == [410, 410]
        old = children(arbiter)
        kept = [session_at(server, pid, among=old) for pid in old]
        os.kill(int(pid_file.read_text()), signal.SIGUSR2)
        until(lambda: server.ready_workers() == 6, "the new arbiter's workers serve")
        successor = int(Path(f"{pid_file}.2").read_text())
        server.seen.update((successor, *children(successor)))
        assert [count(server, session) for session in kept for _ in range(3)] == [2, 3, 4] * 2
        os.kill(arbiter, signal.SIGTERM)
        until(lambda: not is_alive(arbiter), "the old arbiter is gone")
        until(lambda: pid_file.exists() and int(pid_file.read_text()) == successor, "the new one has its pid file")
        assert [status(server, session) for session in kept] == [410, 410]
        new = Session()
        assert [count(server, new) for _ in range(5)] == [1, 2, 3, 4, 5]
        os.kill(int(pid_file.read_text()), signal.SIGTERM)
        assert_nothing_left(server)
        assert not pid_file.exists()
        assert errors(server.log()) == []


# As PID 1


def contained(path: Path) -> Path:
    """Write a command that starts gunicorn as PID 1 of a namespace, as a container does."""
    needs("root", "--pid --fork --mount-proc")
    path.write_text(f'#!/bin/sh\nexec unshare --pid --fork --mount-proc {GUNICORN} "$@"\n')
    path.chmod(0o755)
    return path


def inside(pid: int) -> int:
    """Return the pid that a process has within its namespace."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("NSpid:")]
    return int(line.split()[-1])


@contextmanager
def connection_inside(server: GunicornServer, pid: int, workers: list[int]) -> Iterator[HTTPConnection]:
    """A kept-alive connection that the worker ``pid`` of a container has accepted."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        with stopped(*(other for other in workers if other != pid)):
            assert ask(connection, "/pid").json()["pid"] == inside(pid)
        connection.auto_open = 0
        yield connection
    finally:
        connection.close()


def test_server_that_is_pid_1_of_a_container_keeps_sessions_right_and_leaves_nothing(tmp_path: Path) -> None:
    options = ("--keep-alive", "75")
    with gunicorn_server(*options, app=PROBE, workers=2, gunicorn=contained(tmp_path / "gunicorn")) as server:
        (arbiter,) = server.workers()
        workers = children(arbiter)
        server.seen.update(workers)
        assert inside(arbiter) == 1
        sessions = [Session(), Session()]
        for pid, session in zip(workers, sessions, strict=True):
            with connection_inside(server, pid, workers) as connection:
                assert count(connection, session) == 1
        for calls, pid in enumerate(workers, start=2):
            with connection_inside(server, pid, workers) as connection:
                assert [count(connection, session) for session in sessions] == [calls, calls]
        killed, other = workers
        os.kill(killed, signal.SIGKILL)
        until(lambda: server.ready_workers() == 3, "it is replaced")
        assert [status(server, sessions[0]) for _ in range(3)] == [410] * 3
        assert [count(server, sessions[1]) for _ in range(3)] == [4, 5, 6]
        old = children(arbiter)
        assert other in old
        os.kill(arbiter, signal.SIGHUP)
        until(lambda: server.ready_workers() == 5, "the new workers serve")
        until(lambda: not any(map(is_alive, old)), "the old workers are gone")
        assert [status(server, session) for session in sessions] == [410, 410]
        new = Session()
        assert [count(server, new) for _ in range(5)] == [1, 2, 3, 4, 5]
        os.kill(arbiter, signal.SIGTERM)
        assert server.wait() == 0
        assert_nothing_left(server)


def test_container_that_is_killed_takes_every_worker_along_and_the_next_sweeps_what_it_left(tmp_path: Path) -> None:
    command = contained(tmp_path / "gunicorn")
    session = Session()
    with gunicorn_server(app=PROBE, workers=2, gunicorn=command) as dead:
        (arbiter,) = dead.workers()
        (left,) = dead.directories()
        assert count(dead, session) == 1
        os.kill(arbiter, signal.SIGKILL)
        dead.wait()
        assert left.exists()
        # As a container that is started anew and keeps its /tmp.
        config = CONFIG.replace("{parent}", str(dead.parent))
        with gunicorn_server(app=PROBE, config=config, workers=2, gunicorn=command) as server:
            assert not left.exists()
            assert len(dead.directories()) == 1
            assert [status(server, session) for _ in range(3)] == [410] * 3
            (arbiter,) = server.workers()
            os.kill(arbiter, signal.SIGTERM)
            assert server.wait() == 0
        assert dead.directories() == []


# While developing, and beside another


def test_reload_flag_replaces_every_worker_when_a_module_changes(tmp_path: Path) -> None:
    module = tmp_path / "developed.py"
    module.write_text("from tests.e2e.apps.probe import app\n")
    options = ("--reload", "--reload-engine", "poll", "--pythonpath", str(tmp_path))
    with gunicorn_server(*options, app="developed:app", workers=2) as server:
        workers = server.workers()
        lost = [session_at(server, pid) for pid in workers]
        module.write_text("from tests.e2e.apps.probe import app\n# changed\n")
        later = module.stat().st_mtime + 10
        os.utime(module, (later, later))
        until(lambda: not any(map(is_alive, workers)), "both workers are replaced")
        until(lambda: server.ready_workers() == 4, "their replacements serve")
        assert [status(server, session) for session in lost for _ in range(3)] == [410] * 6
        for pid in server.workers():
            new = session_at(server, pid)
            assert [count(server, new) for _ in range(3)] == [2, 3, 4]
        assert len(server.owners()) == 2
        assert server.stop() == 0
        assert_nothing_left(server)


def test_two_servers_of_one_user_side_by_side_do_not_meet() -> None:
    with probe_server() as one, probe_server(config=CONFIG.replace("{parent}", str(one.parent))) as other:
        assert len(one.directories()) == 2
        sessions = [(server, session_at(server, pid)) for server in (one, other) for pid in server.workers()]
        assert [count(server, session) for server, session in sessions for _ in range(3)] == [2, 3, 4] * 4
        # The cookie of the one is signed validly for the other too.
        assert status(other, sessions[0][1]) == 410
        assert status(one, sessions[2][1]) == 410
        killed = one.workers()[0]
        owner = owner_of(one, killed)
        os.kill(killed, signal.SIGKILL)
        until(lambda: owner not in one.owners(), "its socket is removed")
        until(lambda: one.ready_workers() == 3, "it is replaced")
        hang_up(one, 2)
        assert one.stop() == 0
        assert len(one.directories()) == 1
        assert [count(server, session) for server, session in sessions[2:]] == [5, 5]
        assert other.stop() == 0
        assert_nothing_left(one)
        assert_nothing_left(other)


def test_folder_for_sockets_may_be_a_relative_one() -> None:
    config = "import os\n" + CONFIG.replace('"{parent}"', 'os.path.basename("{parent}")')
    with probe_server("--chdir", "/tmp", "--pythonpath", str(ROOT), config=config) as server:
        lost = [session_at(server, pid) for pid in server.workers()]
        for calls, pid in enumerate(server.workers(), start=2):
            with connection_to(server, pid) as connection:
                assert [count(connection, session) for session in lost] == [calls, calls]
        hang_up(server, 2)
        assert [status(server, session) for session in lost] == [410, 410]
        assert server.stop() == 0
        assert_nothing_left(server)
