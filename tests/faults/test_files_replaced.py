"""Something else stands at the place of a private socket: it is never used, and the server heals."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.calls import (
    Journal,
    ask,
    assert_nothing_left,
    connection_to,
    count,
    probe_server,
    session_at,
    stopped,
)
from tests.e2e.launching import ANOTHER_UID, needs
from tests.faults.files import (
    Sockets,
    a_file,
    a_link_to_nothing,
    bytes_in,
    error_lines,
    impostor,
    witnesses,
)
from tests.faults.scenario import in_words, scenario
from tests.gunicorn_server import until

Place = Callable[[Path], object]

# The socket


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
            until(lambda: put_at(path, put), "it stands there")  # noqa: B023
            until(lambda: all_right() and sockets.are_there(), "all is well again")
        assert all_right(), statuses
        sockets.assert_as_before(server)
        assert server.owners() == set(sockets.pids)
        assert not list(sockets.directory.glob("*.next")), "nothing is left of how a socket is put back"
        assert server.stop() == 0
        assert_nothing_left(server)


@pytest.mark.parametrize("put", [an_empty_folder, a_folder_with_a_file])
def test_socket_in_whose_place_a_folder_stands_is_bound_again_when_that_is_gone(put: Place) -> None:
    with scenario(f"files: {in_words(put)} instead of a socket", workers=2) as broken:
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


def put_at(path: Path, put: Place) -> bool:
    """Try to replace what is at ``path``, which its server puts back."""
    with suppress(FileNotFoundError):
        path.unlink()
    with suppress(OSError):
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
                    # It hangs up instead of greeting: nothing of the request was sent.
                    assert ask(connection, "/count", session, method="POST").status == 503
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
