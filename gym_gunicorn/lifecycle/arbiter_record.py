"""What an arbiter says of itself in the socket directory, for who looks at a server from outside."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping

SUFFIX = ".arbiter"


def start_of(pid: int) -> int | None:
    """Return when the process ``pid`` was started (clock ticks since the boot, proc(5)), or ``None``.

    A pid is used again; together with this it is not.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def write(directory: int, facts: Mapping[str, object]) -> None:
    """Write ``<pid>.arbiter`` into the open directory, for the directory's user: ``facts`` as JSON.

    Raises:
        OSError: it can't be written.
    """
    name = f"{os.getpid()}{SUFFIX}"
    beside = f"{name}~"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(beside, dir_fd=directory)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(beside, flags, 0o600, dir_fd=directory)
    try:
        os.write(descriptor, json.dumps(facts).encode())
        if os.geteuid() == 0:
            status = os.fstat(directory)
            os.fchown(descriptor, status.st_uid, status.st_gid)
    finally:
        os.close(descriptor)
    os.rename(beside, name, src_dir_fd=directory, dst_dir_fd=directory)


def remove(directory: int) -> None:
    """Remove what this process has written."""
    with contextlib.suppress(OSError):
        os.unlink(f"{os.getpid()}{SUFFIX}", dir_fd=directory)
