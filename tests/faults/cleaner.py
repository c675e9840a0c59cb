"""A cleaner of temporary folders that looks at locks."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path


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
