"""What tests of the server's files look at, take away and put in their place."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.calls import Session, count
from tests.gunicorn_server import GunicornServer, is_alive, until


def listener_of(path: Path) -> int:
    """Return the pid of the process that listens at ``path``, or 0 where nobody does."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(10)
        try:
            probe.connect(str(path))
        except OSError:
            return 0
        return int.from_bytes(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)


def lockers(directory: Path) -> set[int]:
    """Return the pids of the processes that took the shared locks that there are on a directory."""
    status = directory.lstat()
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return {int(line[4]) for line in lines if line[1:6:4] == ["FLOCK", file] and line[3] == "READ"}


def is_held(directory: Path) -> bool:
    """Tell whether somebody holds the lock on a directory, as a sweeper and systemd-tmpfiles find out."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def has_open(pid: int, path: Path) -> bool:
    """Tell whether a process has the file or directory open that is at this path now."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if entry.stat().st_ino == path.lstat().st_ino and os.readlink(entry) == str(path):
                    return True
    return False


def is_served(folder: Path, owner: str) -> bool:
    """Tell whether a living process listens on an owner's private socket, in any socket directory in ``folder``."""
    for path in folder.glob(f"gym-gunicorn-*/{owner}.sock"):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            probe.connect(str(path))
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if is_alive(int.from_bytes(credentials[:4], sys.byteorder)):
                return True
    return False


@dataclass
class Sockets:
    """The socket directory of a server as it was before something broke, and who listened in it (owner to pid)."""

    directory: Path
    inode: int
    pids: dict[str, int]

    @classmethod
    def of(cls, server: GunicornServer) -> Sockets:
        (directory,) = server.directories()
        return cls(directory, directory.lstat().st_ino, {owner: server.pid_of(owner) for owner in server.owners()})

    def path(self, owner: str) -> Path:
        return self.directory / f"{owner}.sock"

    def are_there(self) -> bool:
        """Tell whether all the workers can be reached again where they were."""
        return all(listener_of(self.path(owner)) == pid for owner, pid in self.pids.items() if is_alive(pid))

    def wait(self) -> None:
        until(self.are_there, "every worker's socket is there again")

    def assert_as_before(self, server: GunicornServer) -> None:
        """One directory, at the same path, private, and locked by each process of its own."""
        assert server.directories() == [self.directory]
        there = self.directory.lstat()
        assert stat.S_ISDIR(there.st_mode)
        assert stat.S_IMODE(there.st_mode) == 0o700
        assert {there.st_uid} == {os.stat(f"/proc/{pid}").st_uid for pid in self.pids.values()}
        everyone = {server.pid, *self.pids.values()}
        until(lambda: all(has_open(pid, self.directory) for pid in everyone), "everyone has it open")
        if there.st_ino != self.inode:
            # At the start workers share their arbiter's lock; afterwards each has taken its own.
            until(lambda: lockers(self.directory) >= everyone, "everyone has locked it")
        assert is_held(self.directory)


def witnesses(server: GunicornServer, number: int = 20) -> list[Session]:
    """Sessions that have counted one call each, wherever they landed."""
    sessions = [Session() for _ in range(number)]
    assert [count(server, session) for session in sessions] == [1] * number
    return sessions


def remove_tree(folder: Path) -> None:
    """Remove a folder in which a server may still write and remove files meanwhile."""

    def is_gone() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    until(is_gone, f"{folder} is gone")


def the_directory(sockets: Sockets) -> None:
    # While somebody puts back what is being removed, rmtree starts again, as `rm -rf` would be.
    while sockets.directory.exists() and not sockets.are_there():
        shutil.rmtree(sockets.directory, ignore_errors=True)
    shutil.rmtree(sockets.directory, ignore_errors=True)


def seen(path: Path) -> tuple[int, int, int, list[str]]:
    """Return what must not change of what stands in the way."""
    status = path.stat(follow_symlinks=False)
    inside = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    return status.st_uid, status.st_gid, status.st_mode, inside


# What others put there


def a_file(path: Path) -> None:
    path.write_text("of somebody's")


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


# Listens at a path as a user of its own, writes down whatever it is sent, and hangs up, until nobody
# waits and its input has ended.
IMPOSTOR = """
import os, select, socket, sys
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
while listener in select.select([listener, sys.stdin], [], [])[0]:
    connection, _ = listener.accept()
    connection.settimeout(10)
    try:
        print(f"got {len(connection.recv(65536))}", flush=True)
    except (TimeoutError, ConnectionResetError):
        print("got 0", flush=True)
    connection.close()
"""


@contextmanager
def impostor(path: Path, uid: int, received: Path) -> Iterator[None]:
    """A program of the user ``uid`` that listens at ``path``; at the end ``received`` says what it got."""
    with received.open("wb") as output:
        command = [sys.executable, "-c", IMPOSTOR, str(path), str(uid)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output)
    assert process.stdin is not None
    try:
        until(lambda: "listens" in received.read_text(), "the impostor listens")
        yield
        process.stdin.close()
        assert process.wait(60) == 0
    finally:
        process.stdin.close()
        process.kill()
        process.wait()


def bytes_in(received: Path) -> int:
    return sum(map(int, re.findall(r"^got (\d+)$", received.read_text(), re.MULTILINE)))


def error_lines(server: GunicornServer) -> list[str]:
    return [line for line in server.log().splitlines() if "[ERROR]" in line]


def complaints(server: GunicornServer, path: Path) -> Counter[str]:
    """Return how many ERROR lines that name ``path`` each process has written."""
    lines = (re.search(r"\] \[(\d+)\] \[ERROR\] .*" + re.escape(str(path)), line) for line in error_lines(server))
    return Counter(line[1] for line in lines if line is not None)
