"""What the dead leave in the folder of the socket directory, and what others plant there before the start."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.calls import assert_nothing_left, stopped
from tests.e2e.launching import ANOTHER_UID, needs
from tests.gunicorn_server import CONFIG, errors, gunicorn_server
from tests.sessions import play

# Starts `cat` under a pid of one's choice (clone3(2) with set_tid), and waits for its end.
UNDER_A_PID = """
import ctypes, os, signal, struct, sys
pid = ctypes.c_int(int(sys.argv[1]))
fields = struct.pack("11Q", 0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, ctypes.addressof(pid), 1, 0)
child = ctypes.PyDLL(None).syscall(435, ctypes.create_string_buffer(fields, len(fields)), len(fields))
if child == 0:
    os.execvp("cat", ["cat"])
print(child, flush=True)
if child > 0:
    os.waitpid(child, 0)
"""


@contextmanager
def process_with(pid: int) -> Iterator[None]:
    """A program of somebody's, under a pid that was another's."""
    command = [sys.executable, "-c", UNDER_A_PID, str(pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == f"{pid}\n".encode()
            yield
        finally:
            process.stdin.close()


def test_what_a_dead_server_left_is_swept_though_its_arbiters_pid_is_another_programs_now() -> None:
    needs("root")
    with gunicorn_server(workers=2) as dead:
        (left,) = dead.directories()
        with stopped(*dead.workers()):
            dead.kill()
        assert len(list(left.glob("*.sock"))) == 2
        with (
            process_with(dead.pid),
            gunicorn_server(config=CONFIG.replace("{parent}", str(dead.parent)), workers=2) as new,
        ):
            assert not left.exists()
            assert len(dead.directories()) == 1
            assert new.stop() == 0
            assert Path(f"/proc/{dead.pid}/comm").read_text() == "cat\n"
        assert dead.directories() == []


PLANTED_NAMES = (
    """
import itertools, tempfile
planted = ["folder01", "link0002", "dangling", "file0003", "socket04", "free0005"]
tempfile._name_sequence = itertools.chain(planted, tempfile._RandomNameSequence())
"""
    + CONFIG
)


def plant(folder: Path) -> None:
    """Take the names that a server wants first, as another user who can write to the folder."""
    (folder / "victim").mkdir()
    (folder / "victim" / "file").write_text("of the victim's")
    mine = folder / "gym-gunicorn-folder01"
    mine.mkdir()
    mine.chmod(0o777)
    (mine / "file").write_text("of the planter's")
    (mine / "0123456789ab.sock").symlink_to(folder / "victim" / "file")
    (folder / "gym-gunicorn-link0002").symlink_to(folder / "victim")
    (folder / "gym-gunicorn-dangling").symlink_to(folder / "nothing")
    (folder / "gym-gunicorn-file0003").touch()
    os.mkfifo(folder / "gym-gunicorn-socket04")
    for path in (mine, *mine.iterdir(), *folder.glob("gym-gunicorn-*")):
        os.chown(path, ANOTHER_UID, ANOTHER_UID, follow_symlinks=False)


def test_start_takes_another_name_where_those_that_it_wants_are_taken_and_touches_nothing_there(
    tmp_path: Path,
) -> None:
    needs("root")
    plant(tmp_path)

    def snapshot() -> dict[Path, tuple[int, int, int, int]]:
        found = {path: path.lstat() for path in tmp_path.rglob("*")}
        return {path: (at.st_ino, at.st_uid, at.st_mode, at.st_mtime_ns) for path, at in found.items()}

    before = snapshot()
    folder = Path(f"/tmp/gg-planted-{os.getpid()}")
    folder.symlink_to(tmp_path)
    try:
        # Over a link to it, since the path of a socket must be short.
        with gunicorn_server(config=PLANTED_NAMES.replace("{parent}", str(folder)), workers=2) as server:
            (directory,) = set(tmp_path.glob("gym-gunicorn-*")) - set(before)
            assert directory.name == "gym-gunicorn-free0005"
            assert asyncio.run(play(server.url, 20)) == {"right": 20}
            assert errors(server.log()) == []
            assert server.stop() == 0
            assert_nothing_left(server)
        assert snapshot() == before
    finally:
        folder.unlink()
