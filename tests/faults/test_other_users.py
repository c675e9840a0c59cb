"""What another user of the machine tries with a server's files, sockets and processes is refused, and harms nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest

from gym_gunicorn.forwarding import wire
from tests.e2e.calls import Session, ask, connection_to, count, session_at
from tests.e2e.launching import ANOTHER_UID, hang_up, needs
from tests.e2e.test_users import as_user
from tests.faults.another_user import Served, serving, wholly_of_another_user, workers_of_another_user
from tests.faults.files import (
    bytes_in,
    complaints,
    impostor,
    remove_tree,
    seen,
)
from tests.gunicorn_server import errors, is_alive, until

STRANGER = ANOTHER_UID + 1


@pytest.fixture(params=[workers_of_another_user, wholly_of_another_user])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    needs("root", "--mount")
    command, options = request.param(tmp_path / "gunicorn")
    with serving(command, *options) as served:
        yield served


def assert_refused(act: Callable[[], object], uid: int = STRANGER) -> None:
    """Fail where a process of the user ``uid`` can do that."""

    def do() -> None:
        act()

    assert not as_user(uid, do)


def connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))


def lock(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def lock_by_its_name_alone(directory: Path) -> None:
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        assert error.errno == errno.EBADF
        raise PermissionError("a descriptor without the right to read can hold no lock") from error


def bind_beside(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path.with_suffix(".next")))


ATTEMPTS: dict[str, Callable[[Served], list[Callable[[], object]]]] = {
    "connect": lambda s: [lambda path=path: connect(path) for path in s.paths],  # type: ignore[misc]
    "list": lambda s: [lambda: list(s.directory.iterdir())],
    "plant": lambda s: [
        lambda: (s.directory / "planted").touch(),
        lambda: (s.directory / "planted").mkdir(),
        lambda: (s.directory / "0123456789ab.sock").symlink_to("/etc/passwd"),
        lambda: bind_beside(s.paths[0]),
    ],
    "unlink": lambda s: [lambda path=path: path.unlink() for path in s.paths],  # type: ignore[misc]
    "rename": lambda s: [
        lambda: s.paths[0].rename(s.paths[1]),
        lambda: s.paths[0].rename(s.server.parent / "mine"),
        lambda: s.directory.rename(s.server.parent / "mine"),
        lambda: s.directory.rmdir(),
    ],
    "open up": lambda s: [
        lambda: s.directory.chmod(0o777),
        lambda: os.chown(s.directory, STRANGER, STRANGER),
        lambda: s.paths[0].chmod(0o777),
    ],
    "lock": lambda s: [lambda: lock(s.directory), lambda: lock_by_its_name_alone(s.directory)],
    "signal": lambda s: [
        lambda pid=pid: os.kill(pid, signal.SIGKILL)  # type: ignore[misc]
        for pid in (s.server.pid, *s.sessions)
    ],
    "by way of /proc": lambda s: [
        lambda pid=pid: list(Path(f"/proc/{pid}/{name}").iterdir())  # type: ignore[misc]  # noqa: B023
        for pid in s.sessions
        for name in ("fd", "cwd")
    ],
}


def all_but_the_arbiters(served: Served) -> tuple[int, int, int, list[str]]:
    """Return what must not change of the directory: the arbiter says of itself there from time to time what is new."""
    user, group, mode, inside = seen(served.directory)
    return user, group, mode, [name for name in inside if not name.startswith(f"{served.server.pid}.arbiter")]


def test_whatever_another_user_tries_with_directory_sockets_and_processes_is_refused(served: Served) -> None:
    before = all_but_the_arbiters(served)
    for name, attempts in ATTEMPTS.items():
        for number, attempt in enumerate(attempts(served)):
            try:
                assert_refused(attempt)
            except AssertionError as error:
                raise AssertionError(f"attempt {number} to {name}") from error
    assert all_but_the_arbiters(served) == before
    served.sockets.assert_as_before(served.server)
    served.assert_right()
    assert errors(served.server.log()) == []


def test_name_of_a_removed_directory_that_another_user_takes_first_is_not_used(served: Served, tmp_path: Path) -> None:
    """Removed by whoever may; before it is made again, a stranger has a directory there, with listening sockets."""
    received = [tmp_path / f"received-{owner}" for owner in served.sockets.pids]
    new = served.server.parent / "new"

    def make() -> None:
        new.mkdir()
        new.chmod(0o777)

    assert as_user(STRANGER, make)
    with ExitStack() as stack:
        for file, path in zip(received, served.paths, strict=True):
            stack.enter_context(impostor(new / path.name, STRANGER, file))
        before = seen(new)
        until(lambda: take_the_place(new, served.directory), "it stands there")
        until(lambda: len(complaints(served.server, served.directory)) >= 2, "each worker says what is wrong")
        for pid in served.sessions:
            with connection_to(served.server, pid) as connection:
                for at, session in served.sessions.items():
                    reply = ask(connection, "/count", session, method="POST")
                    if at == pid:
                        assert reply.json() == {"count": served.calls + 1, "pid": pid}
                    else:
                        assert reply.status in (410, 502, 503)
        served.calls += 1
        assert seen(served.directory) == before
    assert all("got" in file.read_text() for file in received), "each was connected to"
    assert sum(map(bytes_in, received)) == 0
    shutil.rmtree(served.directory)
    served.sockets.wait()
    served.sockets.assert_as_before(served.server)
    served.assert_right()


def take_the_place(new: Path, path: Path) -> bool:
    """Try to put ``new`` at ``path``, as root could, where the server makes its directory again whenever it is gone."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        new.rename(path)
        return True
    return False


def test_reload_and_worker_deaths_while_another_user_has_the_name_end_well_when_it_is_free(served: Served) -> None:
    server = served.server
    new = server.parent / "new"
    assert as_user(STRANGER, lambda: new.mkdir())
    until(lambda: take_the_place(new, served.directory), "it stands there")
    dead, living = served.sessions
    os.kill(dead, signal.SIGKILL)
    until(lambda: not is_alive(dead), "one worker is dead")
    with connection_to(server, living) as connection:
        assert count(connection, served.sessions[living]) == 2
        assert ask(connection, "/count", served.sessions[dead], method="POST").status == 410
    until(lambda: complaints(server, served.directory), "the log says what is wrong")
    assert list(served.directory.iterdir()) == []
    assert is_alive(server.pid)
    shutil.rmtree(served.directory)
    until(lambda: len(server.owners()) == 2, "both workers have sockets")
    until(lambda: len(server.workers()) == 2, "two workers serve")
    assert server.directories() == [served.directory]
    for calls, pid in enumerate(server.workers(), start=3):
        with connection_to(server, pid) as connection:
            assert count(connection, served.sessions[living]) == calls
    hang_up(server, 2)
    made = [session_at(server, pid) for pid in server.workers()]
    assert [count(server, session) for session in made for _ in range(3)] == [2, 3, 4] * 2


# Forged forwards


def forged(session: Session, path: str = "/seen") -> str:
    """Return the head of a request that its caller has not made, as a sibling would send it."""
    assert session.cookie is not None
    head = wire.encode_head(
        {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "https",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "/forged",
            "query_string": b"forged",
            "client": ("192.0.2.1", 1),
            "server": ("forged.example", 443),
            "headers": [(b"cookie", session.cookie.encode()), (b"x-forged", b"yes")],
        }
    )
    return wire.to_field(head)


def test_forged_forward_over_the_public_listener_is_a_request_like_any_other(served: Served) -> None:
    field = "Gym-Gunicorn-Head"
    for at, session in served.sessions.items():
        for pid in served.sessions:
            with connection_to(served.server, pid) as connection:
                reply = ask(connection, "/seen", session, headers={field: forged(session, "/count")}).json()
                assert (reply["pid"], reply["raw_path"], reply["query_string"]) == (at, "/seen", "")
                assert reply["scheme"] == "http"
                assert reply["client"][0] == "127.0.0.1"
                assert "x-forged" not in dict(reply["headers"])
                without = ask(connection, "/seen", headers={field: forged(session)}).json()
                assert (without["pid"], without["raw_path"], without["scheme"]) == (pid, "/seen", "http")
                # A victim's session is not reached by what the head names.
                assert ask(connection, "/count", headers={field: forged(session)}, method="POST").json()["count"] == 1
    served.assert_right()


def test_forged_forward_to_a_socket_is_refused_to_another_user_and_served_to_the_workers_own(served: Served) -> None:
    """The right to connect is what protects a worker: its own user can send what a sibling can."""
    (victim, session), *_ = served.sessions.items()
    (path,) = (served.sockets.path(owner) for owner, pid in served.sockets.pids.items() if pid == victim)

    def forge() -> None:
        connection = HTTPConnection("localhost", timeout=60)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(path))
        connection.request("GET", "/", headers={"gym-gunicorn-head": forged(session)})
        assert connection.getresponse().status == 200

    assert_refused(forge)
    assert as_user(served.directory.stat().st_uid, forge)
    served.assert_right()


# A user of the workers' own name who is hostile to root


def test_link_of_the_workers_user_in_the_place_of_the_directory_leads_root_nowhere(tmp_path: Path) -> None:
    needs("root", "--mount")
    command, options = workers_of_another_user(tmp_path / "gunicorn")
    with serving(command, *options) as served:
        victim = tmp_path / "victim"
        victim.mkdir(mode=0o700)
        (victim / "file").touch()
        before = seen(victim)
        user = served.directory.stat().st_uid
        aside = served.server.parent / "aside"

        def put_a_link() -> None:
            served.directory.rename(aside)
            served.directory.symlink_to(victim)

        assert as_user(user, put_a_link)
        until(lambda: complaints(served.server, served.directory), "somebody says what is wrong")
        served.server.send(signal.SIGHUP)
        until(lambda: not any(map(is_alive, served.sessions)), "the old workers are gone")
        assert served.directory.is_symlink()
        assert seen(victim) == before
        assert as_user(user, served.directory.unlink)
        until(lambda: len(served.server.owners()) == 2, "new workers have sockets")
        until(lambda: len(served.server.workers()) == 2, "two workers serve")
        assert seen(victim) == before
        made = [session_at(served.server, pid) for pid in served.server.workers()]
        assert [count(served.server, session) for session in made for _ in range(3)] == [2, 3, 4] * 2
        remove_tree(aside)
