"""Cleaners of temporary folders: those that look at locks leave a living server alone, others are healed from."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.e2e.calls import Journal, ask, assert_nothing_left, connection_to, count, probe_server, session_at, stopped
from tests.e2e.launching import ANOTHER_UID, needs
from tests.faults.scenario import scenario
from tests.faults.test_files_removed import Sockets, is_held, the_directory, witnesses
from tests.gunicorn_server import CONFIG, errors, gunicorn_server, is_alive, until
from tests.sessions import play


@dataclass
class Cleaner:
    """What systemd-tmpfiles does to a folder with an age (``tmpfiles.d(5)``, and its source, release 257).

    It looks at each entry without following links. A directory is opened and locked with
    ``flock(LOCK_EX | LOCK_NB)``: where that fails it is skipped with all that is in it;
    else its entries come first, and then the directory itself, if it is old and empty.
    Other files stay where the sticky bit is set, where they are devices or sockets that
    /proc/net/unix lists, and where another program holds a lock on them. Old is what was
    neither accessed, changed nor made (a file: nor its inode changed) within ``age`` seconds.
    """

    age: float = 0.0
    locked: list[Path] = field(default_factory=list)
    removed: list[Path] = field(default_factory=list)

    def clean(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._clean(folder, descriptor, time.time() - self.age)
        finally:
            os.close(descriptor)

    def _clean(self, folder: Path, descriptor: int, cutoff: float) -> None:
        before = os.fstat(descriptor)
        for name in os.listdir(descriptor):
            path = folder / name
            try:
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISDIR(status.st_mode):
                self._directory(path, name, descriptor, status, cutoff)
            elif not self._is_kept(path, status) and max(*_times(status), status.st_ctime) < cutoff:
                self._file(path, name, descriptor)
        # A directory keeps its age when something is removed from it.
        os.utime(descriptor, ns=(before.st_atime_ns, before.st_mtime_ns))

    def _directory(self, path: Path, name: str, parent: int, status: os.stat_result, cutoff: float) -> None:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NOATIME, dir_fd=parent)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.locked.append(path)
                return
            self._clean(path, descriptor, cutoff)
            if max(_times(status)) < cutoff:
                try:
                    os.rmdir(name, dir_fd=parent)
                    self.removed.append(path)
                except OSError:
                    pass
        finally:
            os.close(descriptor)

    def _is_kept(self, path: Path, status: os.stat_result) -> bool:
        mode = status.st_mode
        live = any(line.split()[-1] == str(path) for line in Path("/proc/net/unix").read_text().splitlines())
        return bool(mode & stat.S_ISVTX) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or (stat.S_ISSOCK(mode) and live)

    def _file(self, path: Path, name: str, parent: int) -> None:
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
        except OSError:
            # A socket, or a link: there is nothing to lock.
            descriptor = -1
        try:
            if descriptor >= 0:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(name, dir_fd=parent)
            self.removed.append(path)
        except (BlockingIOError, FileNotFoundError):
            pass
        finally:
            if descriptor >= 0:
                os.close(descriptor)


def _times(status: os.stat_result) -> tuple[float, float]:
    return status.st_atime, status.st_mtime


# The socket directory in a folder in which nothing else is.
IN_A_FOLDER = 'import os\nos.makedirs("{parent}/tmp", exist_ok=True)\n' + CONFIG.replace("{parent}", "{parent}/tmp")


def cleans_away(cleaner: Cleaner, path: Path) -> bool:
    """Clean the folder in which ``path`` is, and tell whether that is gone: nothing is old in the moment it is made."""
    cleaner.clean(path.parent)
    return not path.exists()


def the_one_in(folder: Path) -> Path:
    (directory,) = folder.glob("gym-gunicorn-*")
    return directory


def content(directory: Path) -> dict[str, int]:
    return {path.name: path.lstat().st_ino for path in directory.glob("*.sock")}


def test_the_cleaner_of_this_test_removes_what_nobody_holds_and_leaves_what_somebody_does(tmp_path: Path) -> None:
    for name in ("old", "held"):
        (tmp_path / name / "below").mkdir(parents=True)
        (tmp_path / name / "file").touch()
    descriptor = os.open(tmp_path / "held", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        young = Cleaner(age=3600)
        young.clean(tmp_path)
        assert young.removed == []
        cleaner = Cleaner()
        until(lambda: cleans_away(cleaner, tmp_path / "old"), "the old one is removed")
        assert (tmp_path / "held" / "file").exists() and (tmp_path / "held" / "below").exists()
        assert set(cleaner.locked) == {tmp_path / "held"}
    finally:
        os.close(descriptor)


def test_cleaner_leaves_the_directory_of_a_living_server_alone_and_removes_that_of_a_dead_one() -> None:
    with scenario("files: a cleaner that looks at locks", config=IN_A_FOLDER, workers=2) as broken:
        folder = broken.server.parent / "tmp"
        directory = the_one_in(folder)
        before = content(directory)
        sessions = witnesses(broken.server)

        async def clean() -> None:
            for _ in range(10):
                cleaner = Cleaner()
                await asyncio.to_thread(cleaner.clean, folder)
                assert (cleaner.locked, cleaner.removed) == ([directory], [])
                await asyncio.sleep(0.05)

        tally = broken.play(clean, players=20)
        assert tally.gone == 0
        assert content(directory) == before
        assert [count(broken.server, session) for session in sessions] == [2] * len(sessions)
        with stopped(*broken.server.workers()):
            # So that no worker sees its arbiter's death and cleans up.
            broken.server.kill()
        assert directory.exists()
        until(lambda: cleans_away(Cleaner(), directory), "it is removed")
        broken.tally.report(broken.name)


def test_cleaner_leaves_the_directory_alone_that_only_orphaned_workers_hold(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with probe_server(journal=journal, config=IN_A_FOLDER) as server, ThreadPoolExecutor() as pool:
        folder = server.parent / "tmp"
        directory = the_one_in(folder)
        workers = server.workers()
        held = []
        for pid in workers:
            with connection_to(server, pid) as connection:
                held.append(pool.submit(ask, connection, f"/hold?name={pid}"))
                journal.wait_for(f"hold {pid} {pid}")
        server.send(signal.SIGKILL)
        server.wait()
        cleaner = Cleaner()
        for _ in range(10):
            cleaner.clean(folder)
        assert set(cleaner.locked) == {directory}
        assert directory.exists() and is_held(directory)
        journal.release(str(workers[0]))
        until(lambda: not is_alive(workers[0]), "one worker is gone")
        Cleaner().clean(folder)
        assert directory.exists()
        journal.release(str(workers[1]))
        until(lambda: not is_alive(workers[1]), "the other one is gone")
        for future in held:
            assert future.exception(timeout=60) is not None or future.result().status == 200
        assert list(folder.iterdir()) == []


def test_directory_that_was_made_again_is_left_alone_by_a_cleaner_too() -> None:
    with probe_server(config=IN_A_FOLDER) as server:
        folder = server.parent / "tmp"
        directory = the_one_in(folder)
        session = session_at(server, server.workers()[0])
        shutil.rmtree(directory)
        until(lambda: directory.exists() and len(list(directory.glob("*.sock"))) == 2, "the sockets are there again")
        # One that is made and not locked yet may be removed once more, which heals too.
        until(lambda: directory.exists() and is_held(directory), "it is locked")
        for _ in range(10):
            cleaner = Cleaner()
            cleaner.clean(folder)
            assert (cleaner.locked, cleaner.removed) == ([directory], [])
        assert count(server, session) == 2
        assert server.stop() == 0
        assert list(folder.iterdir()) == []


def test_cleaner_that_meets_each_making_of_the_directory_delays_the_healing_and_no_more() -> None:
    with scenario("files: a cleaner that looks at locks, all the time") as broken:
        sockets, sessions = Sockets.of(broken.server), witnesses(broken.server)
        cleaner = Cleaner()

        async def clean() -> None:
            await asyncio.to_thread(the_directory, sockets)
            for _ in range(200):
                for directory in broken.server.directories():
                    if not is_held(directory):
                        await asyncio.to_thread(cleaner.clean, directory)
                await asyncio.sleep(0.01)
            await asyncio.to_thread(sockets.wait)

        broken.play(clean, players=20, owners_live=True)
        assert [count(broken.server, session) for session in sessions] == [2] * len(sessions)
        sockets.assert_as_before(broken.server)
        broken.end()


def delete_old(folder: Path) -> None:
    """Delete what is older than a day, as found in crontabs: it looks at no lock."""
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (0, 0), follow_symlinks=False)
    subprocess.run(["find", str(folder), "-mtime", "+0", "-delete"], check=False, capture_output=True)


def sweep_of_old_sockets(folder: Path) -> None:
    """Delete old sockets alone."""
    for path in folder.glob("*.sock"):
        os.utime(path, (0, 0), follow_symlinks=False)
    subprocess.run(["find", str(folder), "-type", "s", "-mtime", "+0", "-delete"], check=False, capture_output=True)


@pytest.mark.parametrize("delete", [delete_old, sweep_of_old_sockets])
def test_server_heals_from_a_cleaner_that_looks_at_no_lock(delete: Callable[[Path], None]) -> None:
    with scenario(f"files: {delete.__name__}, by find -delete") as broken:
        sockets, sessions = Sockets.of(broken.server), witnesses(broken.server)

        def clean() -> None:
            for calls in (2, 3):
                delete(sockets.directory)
                sockets.wait()
                assert [count(broken.server, session) for session in sessions] == [calls] * len(sessions)

        broken.play(lambda: asyncio.to_thread(clean), players=20, owners_live=True)
        sockets.assert_as_before(broken.server)
        broken.end()


# What the dead leave, and what others plant


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
