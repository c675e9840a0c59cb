"""Figures that arbiters keep: the total of the workers that have ended, and what statsd was told.

Two arbiters (SIGUSR2) keep them together, under a lock; nobody else waits for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator, Mapping

from gym_gunicorn.metrics.values import SUFFIX, TOTAL, Reading, pack, read, sums, unpack

# Longer than any file of figures.
_ENOUGH = 2**16

TOLD = "told"

# Seconds to wait for another arbiter, which needs microseconds; nobody else can hold an arbiter up.
_PATIENCE = 0.5


def fold(directory: int, owner_id: str) -> Reading | None:
    """Add the figures of a worker that has ended to the total, remove its file, and return what it held.

    ``directory`` is an open descriptor of the socket directory. Returns ``None`` where there
    is nothing to be added.

    Raises:
        OSError: the total can't be written. The worker's file is left then.
    """
    with _locked(directory, TOTAL) as descriptor:
        before = _held(descriptor)
        if before is not None and before.folded:
            # An arbiter may have been killed before it removed what it had added.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{before.folded:012x}{SUFFIX}", dir_fd=directory)
        reading = read(directory, owner_id)
        if reading is None:
            # It may be there and hold nothing.
            with contextlib.suppress(OSError):
                os.unlink(owner_id + SUFFIX, dir_fd=directory)
            return None
        counters = sums([reading], before)
        _write(descriptor, pack(reading["secret"], reading["generation"], int(owner_id, 16), counters))
        os.unlink(owner_id + SUFFIX, dir_fd=directory)
    return reading


def keep(directory: int, total: Reading) -> None:
    """Write the total again where somebody has removed it.

    Raises:
        OSError: it can't be written.
    """
    with _locked(directory, TOTAL) as descriptor:
        if _held(descriptor) is None:
            _write(descriptor, pack(total["secret"], total["generation"], total.folded, total.counters()))


def tell(directory: int, now: Mapping[str, int], told: Mapping[str, int]) -> dict[str, int]:
    """Note that all of the sums ``now`` are told, and return what of them was told before.

    ``told`` is what this arbiter knows to be told, should somebody have removed the file.

    Raises:
        OSError: it can't be noted.
    """
    with _locked(directory, TOLD) as descriptor:
        held = _held(descriptor)
        before = dict(told)
        if held is not None:
            before = {name: max(before.get(name, 0), count) for name, count in held.counters().items()}
        after = {name: max(before.get(name, 0), count) for name, count in now.items()}
        _write(descriptor, pack(0, 0, 0, after))
    return before


@contextlib.contextmanager
def _locked(directory: int, stem: str) -> Iterator[int]:
    descriptor = _opened(directory, stem + SUFFIX)
    try:
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        yield descriptor
    finally:
        os.close(descriptor)


def _opened(directory: int, name: str) -> int:
    """Open a file of the directory's user, and make it where there is none.

    The directory is the workers' user's, who may be another than the arbiter's: what they
    have linked to this name is not written to.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    owner = os.fstat(directory)
    try:
        descriptor = os.open(name, flags, dir_fd=directory)
    except FileNotFoundError:
        pass
    except OSError:
        # A link, most likely.
        os.unlink(name, dir_fd=directory)
    else:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid == owner.st_uid:
            return descriptor
        os.close(descriptor)
        os.unlink(name, dir_fd=directory)
    descriptor = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory)
    if os.geteuid() == 0:
        os.fchown(descriptor, owner.st_uid, owner.st_gid)
    return descriptor


def _held(descriptor: int) -> Reading | None:
    return unpack(None, os.pread(descriptor, _ENOUGH, 0))


def _write(descriptor: int, data: bytes) -> None:
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))
