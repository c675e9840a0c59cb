"""Something else stands at the place of a socket or of the socket directory: it is never used, and the server heals."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.e2e.calls import (
    PROBE,
    Journal,
    ask,
    assert_nothing_left,
    connection_to,
    count,
    probe_server,
    session_at,
    stopped,
)
from tests.e2e.launching import ANOTHER_UID, needs, open_to_all
from tests.e2e.test_users import group_of
from tests.faults.scenario import scenario
from tests.faults.test_files_removed import Sockets, listener_of, witnesses
from tests.gunicorn_server import CONFIG, GunicornServer, gunicorn_server, until

Place = Callable[[Path], object]

# Listens at a path as a user of its own, writes down whatever it is sent, and hangs up.
IMPOSTOR = """
import os, socket, sys
path, uid = sys.argv[1], int(sys.argv[2])
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
os.chmod(path, 0o666)
if uid != os.getuid():
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
listener.listen(64)
print("listens", flush=True)
while True:
    connection, _ = listener.accept()
    connection.settimeout(0.2)
    try:
        print(f"got {len(connection.recv(65536))}", flush=True)
    except TimeoutError:
        print("got 0", flush=True)
    connection.close()
"""


@contextmanager
def impostor(path: Path, uid: int, received: Path) -> Iterator[None]:
    """A program of the user ``uid`` that listens at ``path``; what it gets is written to ``received``."""
    with received.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", IMPOSTOR, str(path), str(uid)], stdout=output)
    try:
        until(lambda: "listens" in received.read_text(), "the impostor listens")
        yield
    finally:
        process.kill()
        process.wait()


def bytes_in(received: Path) -> int:
    return sum(map(int, re.findall(r"^got (\d+)$", received.read_text(), re.MULTILINE)))


# The socket


def a_file(path: Path) -> None:
    path.write_text("of somebody's")


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


def a_link_to_its_sibling(path: Path) -> None:
    (sibling,) = (other for other in path.parent.glob("*.sock") if other != path)
    path.symlink_to(sibling.name)


def another_name_of_its_sibling(path: Path) -> None:
    (sibling,) = (other for other in path.parent.glob("*.sock") if other != path)
    os.link(sibling, path)


def a_socket_that_nobody_serves(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()


def an_empty_folder(path: Path) -> None:
    path.mkdir()


def a_folder_with_a_file(path: Path) -> None:
    path.mkdir()
    (path / "file").touch()


@pytest.mark.parametrize(
    "put",
    [a_file, a_link_to_nothing, a_link_to_its_sibling, another_name_of_its_sibling, a_socket_that_nobody_serves],
)
def test_socket_that_was_replaced_is_bound_again_and_meanwhile_no_answer_is_wrong(put: Place) -> None:
    with probe_server(workers=2) as server:
        sockets = Sockets.of(server)
        sessions = {pid: session_at(server, pid) for pid in server.workers()}
        counted = dict.fromkeys(sessions, 1)
        statuses: Counter[int] = Counter()

        def all_right() -> bool:
            """Call each session once more from everywhere: what is not right is an error that says so."""
            right = True
            for pid, session in sessions.items():
                for _ in range(4):
                    reply = ask(server, "/count", session, method="POST")
                    statuses[reply.status] += 1
                    right = right and reply.status == 200
                    if reply.status == 200:
                        counted[pid] += 1
                        assert reply.json() == {"count": counted[pid], "pid": pid}
                    else:
                        assert reply.status in (410, 502, 503), reply
            return right

        for owner in sockets.pids:
            path = sockets.path(owner)
            path.unlink()
            put(path)
            until(lambda: all_right() and sockets.are_there(), "all is well again")
        assert all_right(), statuses
        sockets.assert_as_before(server)
        assert server.owners() == set(sockets.pids)
        assert not list(sockets.directory.glob("*.next")), "nothing is left of how a socket is put back"
        assert server.stop() == 0
        assert_nothing_left(server)


@pytest.mark.parametrize("put", [an_empty_folder, a_folder_with_a_file])
def test_socket_in_whose_place_a_folder_stands_is_bound_again_when_that_is_gone(put: Place) -> None:
    with scenario(f"files: {put.__name__} instead of a socket", workers=2) as broken:
        sockets, sessions = Sockets.of(broken.server), witnesses(broken.server)
        path = sockets.path(min(sockets.pids))

        def replace() -> None:
            until(lambda: put_at(path, put), "it stands there")
            until(lambda: str(path) in "\n".join(error_lines(broken.server)) or not path.is_dir(), "the log names it")
            if path.is_dir():
                shutil.rmtree(path)
            sockets.wait()

        broken.play(lambda: asyncio.to_thread(replace), players=20, owners_live=True)
        assert [count(broken.server, session) for session in sessions] == [2] * len(sessions)
        sockets.assert_as_before(broken.server)
        broken.end()


def error_lines(server: GunicornServer) -> list[str]:
    return [line for line in server.log().splitlines() if "[ERROR]" in line]


def put_at(path: Path, put: Place) -> bool:
    """Try to replace what is at ``path``, which its server puts back."""
    with suppress(FileNotFoundError):
        path.unlink()
    with suppress(FileExistsError):
        put(path)
        return True
    return False


def test_reply_of_another_program_of_this_user_in_a_sockets_place_is_an_error_and_then_the_session_is_right(
    tmp_path: Path,
) -> None:
    with probe_server(workers=2) as server:
        sockets = Sockets.of(server)
        owner, receiver = server.workers()
        session = session_at(server, owner)
        (name,) = (name for name, pid in sockets.pids.items() if pid == owner)
        with connection_to(server, receiver) as connection:
            with stopped(owner):
                sockets.path(name).unlink()
                with impostor(sockets.path(name), os.geteuid(), tmp_path / "received"):
                    assert ask(connection, "/count", session, method="POST").status in (410, 502)
            sockets.wait()
            assert [count(connection, session) for _ in range(3)] == [2, 3, 4]
        assert server.stop() == 0
        assert_nothing_left(server)


@pytest.mark.parametrize("known", [False, True], ids=["never forwarded to", "with a forward in flight"])
def test_no_byte_is_sent_to_the_socket_of_another_user(known: bool, tmp_path: Path) -> None:
    needs("root")
    journal = Journal(tmp_path)
    received = tmp_path / "received"
    with probe_server(workers=2, journal=journal) as server, ThreadPoolExecutor() as pool:
        sockets = Sockets.of(server)
        owner, receiver = server.workers()
        session = session_at(server, owner)
        (name,) = (name for name, pid in sockets.pids.items() if pid == owner)
        with connection_to(server, receiver) as busy, connection_to(server, receiver) as connection:
            held = None
            if known:
                held = pool.submit(ask, busy, "/hold?name=it", session)
                journal.wait_for(f"hold it {owner}")
            # It can't put its socket back while it stands still.
            with stopped(owner):
                sockets.path(name).unlink()
                with impostor(sockets.path(name), ANOTHER_UID, received):
                    for _ in range(3):
                        assert ask(connection, "/count", session, method="POST").status in (410, 502, 503)
                assert "got" in received.read_text(), "it was connected to"
                assert bytes_in(received) == 0
            sockets.wait()
            journal.release("it")
            if held is not None:
                assert held.result(timeout=60).json() == {"pid": owner}
            assert [count(connection, session) for _ in range(3)] == [2, 3, 4]
        assert server.stop() == 0
        assert_nothing_left(server)


# The directory


def another_users_folder(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)
    os.chown(path, ANOTHER_UID, ANOTHER_UID)


def a_folder_open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def a_link_to_a_folder(path: Path) -> None:
    target = path.with_name("target")
    target.mkdir(mode=0o700, exist_ok=True)
    path.symlink_to(target)


def seen(path: Path) -> tuple[int, int, int, list[str]]:
    """Return what must not change of what stands in the way."""
    status = path.stat(follow_symlinks=False)
    inside = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    return status.st_uid, status.st_gid, status.st_mode, inside


@pytest.mark.parametrize(
    "put", [a_file, a_link_to_nothing, a_link_to_a_folder, a_folder_open_to_all, another_users_folder]
)
def test_what_stands_in_the_place_of_the_directory_is_not_used_and_the_server_heals_when_it_is_gone(put: Place) -> None:
    if put is another_users_folder:
        needs("root")
    with scenario(f"files: {put.__name__} instead of the directory", workers=2) as broken:
        server = broken.server
        sockets, sessions = Sockets.of(server), witnesses(server)
        started = time.monotonic()

        def replace() -> None:
            path = sockets.directory
            new = path.with_name("new")
            put(new)
            before = seen(new)
            until(lambda: take_the_place(new, path), "it stands there")
            until(lambda: len(complaints(server, path)) >= len(sockets.pids), "each worker says what is wrong")
            for session in sessions:
                reply = ask(server, "/count", session, method="POST")
                assert reply.status in (200, 410)
                if reply.status == 200:
                    right[id(session)] += 1
                    assert reply.json()["count"] == 1 + right[id(session)]
            assert seen(path) == before
            remove(path)
            sockets.wait()

        right: Counter[int] = Counter()
        broken.play(lambda: asyncio.to_thread(replace), players=20, owners_live=True)
        assert [count(server, session) for session in sessions] == [2 + right[id(session)] for session in sessions]
        sockets.assert_as_before(server)
        most = 1 + (time.monotonic() - started) // 9
        assert all(lines <= most for lines in complaints(server, sockets.directory).values()), error_lines(server)
        assert "Traceback" not in server.log()
        broken.end()


def complaints(server: GunicornServer, path: Path) -> Counter[str]:
    """Return how many ERROR lines that name ``path`` each process has written."""
    lines = (re.search(r"\] \[(\d+)\] \[ERROR\] .*" + re.escape(str(path)), line) for line in error_lines(server))
    return Counter(line[1] for line in lines if line is not None)


def take_the_place(new: Path, path: Path) -> bool:
    """Try to put ``new`` at ``path``, where a server makes its directory again whenever it is gone."""
    aside = path.with_name("aside")
    with suppress(FileNotFoundError):
        path.rename(aside)
        shutil.rmtree(aside)
    with suppress(OSError):
        new.rename(path)
        return True
    return False


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def test_server_whose_folder_vanishes_heals_when_the_folder_is_back() -> None:
    config_folder = "sub"
    with scenario("files: the folder of the directory removed", config=below(config_folder), workers=2) as broken:
        folder = broken.server.parent / config_folder
        sockets = Sockets(*found_below(broken.server, folder))
        sessions = witnesses(broken.server)

        def take_away() -> None:
            aside = folder.with_name("aside")
            folder.rename(aside)
            until(lambda: len(complaints(broken.server, folder)) >= 2, "each worker says what is wrong")
            folder.mkdir()
            shutil.rmtree(aside)
            sockets.wait()

        broken.play(lambda: asyncio.to_thread(take_away), players=20, owners_live=True)
        assert [count(broken.server, session) for session in sessions] == [2] * len(sessions)
        broken.end()
        assert list(folder.iterdir()) == []


def below(folder: str) -> str:
    """Return a configuration whose socket directory is made in a folder below the usual one."""
    made = f'import os\nos.makedirs("{{parent}}/{folder}", exist_ok=True)\n'
    return made + CONFIG.replace("{parent}", f"{{parent}}/{folder}")


def found_below(server: GunicornServer, folder: Path) -> tuple[Path, int, dict[str, int]]:
    (directory,) = folder.glob("gym-gunicorn-*")
    return directory, directory.lstat().st_ino, {path.stem: listener_of(path) for path in directory.glob("*.sock")}


def test_root_gives_no_folder_away_that_it_has_not_made(tmp_path: Path) -> None:
    """A folder of root's that its workers' user can move into the place of the directory stays root's."""
    needs("root", "--mount")
    command = open_to_all(tmp_path / "gunicorn")
    with probe_server_of("nobody", command) as server:
        sockets = Sockets.of(server)
        secret = server.parent / "secret"
        secret.mkdir(mode=0o700)
        (secret / "file").touch()
        before = seen(secret)
        until(lambda: take_the_place(secret, sockets.directory), "it stands there")
        # So that the arbiter is sure to have looked at what is there.
        os.kill(server.workers()[0], signal.SIGKILL)
        until(lambda: server.log().count("Booting worker") >= 3, "the arbiter has forked once more")
        assert seen(sockets.directory) == before
        sockets.directory.rename(secret)
        sockets.wait()
        assert server.stop() == 0
        assert_nothing_left(server)


@contextmanager
def probe_server_of(user: str, command: Path) -> Iterator[GunicornServer]:
    """Serve the probe as root, with workers of another user."""
    options = ("--user", user, "--group", group_of(user), "--keep-alive", "75")
    with gunicorn_server(*options, app=PROBE, workers=2, gunicorn=command) as server:
        yield server
