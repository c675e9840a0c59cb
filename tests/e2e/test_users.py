"""Users, groups and umasks: the sockets are the workers' own, and nobody else's."""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import signal
import socket
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.calls import assert_nothing_left, connection_to, count, session_at, status
from tests.e2e.launching import ANOTHER_UID, hang_up, needs, open_to_all, reconfigure
from tests.gunicorn_server import CONFIG, GunicornServer, children, errors, gunicorn_server, is_alive, until
from tests.sessions import play

PROBE = "tests.e2e.apps.probe:app"


@pytest.fixture
def command(tmp_path: Path) -> Path:
    """A command that starts gunicorn where workers of every user can import what they need."""
    needs("root", "--mount")
    return open_to_all(tmp_path / "gunicorn")


@pytest.fixture
def command_of_another_user(tmp_path: Path) -> Path:
    """A command that starts gunicorn as a user other than root."""
    needs("root", "--mount")
    return open_to_all(tmp_path / "gunicorn", ANOTHER_UID)


def ids(user: str) -> tuple[int, int]:
    """Return uid and gid of a user."""
    entry = pwd.getpwnam(user)
    return entry.pw_uid, entry.pw_gid


def group_of(user: str) -> str:
    return grp.getgrgid(ids(user)[1]).gr_name


def as_user(uid: int, act: Callable[[], None]) -> bool:
    """Do something in a process of another user, and return whether it could: that is, was not denied."""
    child = os.fork()
    if child == 0:
        outcome = 2
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            act()
            outcome = 0
        except PermissionError:
            outcome = 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(outcome)
    outcome = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert outcome in (0, 1)
    return outcome == 0


def connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))


def assert_private(server: GunicornServer, expected: tuple[int, int], workers: int) -> None:
    """Directory, sockets and workers belong to that user, who alone can list and connect."""
    uid, _ = expected
    (directory,) = server.directories()
    sockets = list(directory.glob("*.sock"))
    assert len(sockets) == workers
    for path in (directory, *sockets):
        assert (path.stat().st_uid, path.stat().st_gid) == expected
        assert path.stat().st_mode & 0o077 == 0
    for pid in (server.pid_of(path.stem) for path in sockets):
        assert os.stat(f"/proc/{pid}").st_uid == uid
    stranger = ANOTHER_UID + 1
    for user, may in ((uid, True), (stranger, False)):
        assert as_user(user, lambda: list(directory.iterdir()).clear()) is may
        for path in sockets:
            assert as_user(user, lambda: connect(path)) is may  # noqa: B023


# Started as root, with workers of another user


def test_directory_and_sockets_belong_to_the_workers_user_and_no_other_may_list_or_connect(command: Path) -> None:
    user = ("--user", "nobody", "--group", group_of("nobody"))
    with gunicorn_server(*user, workers=2, gunicorn=command) as server:
        assert_private(server, ids("nobody"), 2)
        assert asyncio.run(play(server.url, 20)) == {"right": 20}
        assert errors(server.log()) == []
        assert server.stop() == 0
        assert_nothing_left(server)


def test_reload_and_upgrade_of_a_server_whose_workers_are_another_users(command: Path) -> None:
    user = ("--user", "nobody", "--group", group_of("nobody"))
    with gunicorn_server(*user, app=PROBE, workers=2, gunicorn=command) as server:
        lost = [session_at(server, pid) for pid in server.workers()]
        hang_up(server, 2)
        assert [status(server, session) for session in lost] == [410, 410]
        assert_private(server, ids("nobody"), 2)
        old = server.workers()
        server.send(signal.SIGUSR2)
        until(lambda: server.ready_workers() == 6, "the new workers serve")
        (arbiter,) = set(server.workers()) - set(old)
        new = children(arbiter)
        server.seen.update(new)
        everyone = old + new
        assert_private(server, ids("nobody"), 4)
        sessions = [session_at(server, pid, among=everyone) for pid in everyone]
        for calls, pid in enumerate(everyone, start=2):
            with connection_to(server, pid, among=everyone) as connection:
                assert [count(connection, session) for session in sessions] == [calls] * 4
        assert server.stop() == 0
        until(lambda: not any(map(is_alive, old)), "the old workers are gone")
        assert [status(server, session) for session in sessions[:2]] == [410, 410]
        assert [count(server, session) for session in sessions[2:]] == [6, 6]
        assert errors(server.log()) == []
        os.kill(arbiter, signal.SIGTERM)
        assert_nothing_left(server)


@pytest.mark.parametrize(("before", "after"), [("nobody", "daemon"), ("root", "nobody"), ("nobody", "root")])
def test_reload_that_changes_the_user_gives_the_directory_to_the_new_one(
    before: str, after: str, command: Path
) -> None:
    config = CONFIG + f'user, group = "{before}", "{group_of(before)}"\n'
    with gunicorn_server(app=PROBE, config=config, workers=2, gunicorn=command) as server:
        assert_private(server, ids(before), 2)
        lost = [session_at(server, pid) for pid in server.workers()]
        reconfigure(server, f'"{before}", "{group_of(before)}"', f'"{after}", "{group_of(after)}"')
        hang_up(server, 2)
        until(lambda: len(server.owners()) == 2, "the old sockets are gone")
        assert_private(server, ids(after), 2)
        assert [status(server, session) for session in lost] == [410, 410]
        new = [session_at(server, pid) for pid in server.workers()]
        assert [count(server, session) for session in new for _ in range(3)] == [2, 3, 4] * 2
        assert errors(server.log()) == []
        assert "has died" not in server.log(), "the old workers stopped in good order"
        assert server.stop() == 0
        assert_nothing_left(server)


# Any umask


@pytest.mark.parametrize("umask", ["0", "0o077", "0o777"])
def test_sockets_are_private_and_sessions_right_under_any_umask(umask: str, command: Path) -> None:
    user = ("--user", "nobody", "--group", group_of("nobody"))
    with gunicorn_server(*user, "--umask", umask, app=PROBE, workers=2, gunicorn=command) as server:
        assert_private(server, ids("nobody"), 2)
        sessions = [session_at(server, pid) for pid in server.workers()]
        for calls, pid in enumerate(server.workers(), start=2):
            with connection_to(server, pid) as connection:
                assert [count(connection, session) for session in sessions] == [calls, calls]
        hang_up(server, 2)
        assert_private(server, ids("nobody"), 2)
        assert server.stop() == 0
        assert_nothing_left(server)
        assert errors(server.log()) == []


@pytest.mark.parametrize("umask", ["0", "0o077", "0o777"])
def test_server_of_a_user_who_is_not_root_works_under_any_umask(umask: str, command_of_another_user: Path) -> None:
    options = ("--umask", umask, "--keep-alive", "75")
    with gunicorn_server(*options, app=PROBE, workers=2, gunicorn=command_of_another_user) as server:
        assert os.stat(f"/proc/{server.pid}").st_uid == ANOTHER_UID
        assert_private(server, (ANOTHER_UID, ANOTHER_UID), 2)
        lost = [session_at(server, pid) for pid in server.workers()]
        for calls, pid in enumerate(server.workers(), start=2):
            with connection_to(server, pid) as connection:
                assert [count(connection, session) for session in lost] == [calls, calls]
        hang_up(server, 2)
        assert_private(server, (ANOTHER_UID, ANOTHER_UID), 2)
        assert [status(server, session) for session in lost] == [410, 410]
        assert server.stop() == 0
        assert_nothing_left(server)
        assert errors(server.log()) == []


def test_user_who_is_not_root_and_can_not_write_to_the_folder_is_told_so(command_of_another_user: Path) -> None:
    config = CONFIG.replace("{parent}", "/")
    with gunicorn_server(config=config, workers=2, ready=False, gunicorn=command_of_another_user) as server:
        assert server.wait() != 0
        assert server.log().count("the socket directory can't be made in '/': Permission denied") == 1
        assert_nothing_left(server)
