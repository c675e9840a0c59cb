"""Something else stands at the place of the socket directory: it is never used, and the server heals."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.e2e.calls import (
    PROBE,
    ask,
    assert_nothing_left,
    count,
)
from tests.e2e.launching import ANOTHER_UID, needs, open_to_all
from tests.e2e.test_users import group_of
from tests.faults.files import (
    Sockets,
    a_file,
    a_link_to_nothing,
    complaints,
    error_lines,
    listener_of,
    remove_tree,
    seen,
    witnesses,
)
from tests.faults.scenario import in_words, scenario
from tests.gunicorn_server import CONFIG, GunicornServer, gunicorn_server, until

Place = Callable[[Path], object]


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


@pytest.mark.parametrize(
    "put", [a_file, a_link_to_nothing, a_link_to_a_folder, a_folder_open_to_all, another_users_folder]
)
def test_what_stands_in_the_place_of_the_directory_is_not_used_and_the_server_heals_when_it_is_gone(put: Place) -> None:
    if put is another_users_folder:
        needs("root")
    with scenario(f"files: {in_words(put)} instead of the directory", workers=2) as broken:
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


def take_the_place(new: Path, path: Path) -> bool:
    """Try to put ``new`` at ``path``, where a server makes its directory again whenever it is gone."""
    aside = path.with_name("aside")
    with suppress(FileNotFoundError):
        path.rename(aside)
        remove_tree(aside)
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
            remove_tree(aside)
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
