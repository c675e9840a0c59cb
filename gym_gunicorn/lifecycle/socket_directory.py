"""The socket directory: made by an arbiter, held by a lock, removed by whoever is last.

Every arbiter and worker keeps the directory itself open with a shared lock
(flock(2)). A worker has its arbiter's open file, so the lock lasts as long as
either of them lives. Who gets the exclusive lock knows that nobody else is there.
A locked directory is also left alone by systemd-tmpfiles, which empties /tmp.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator

from gym_gunicorn.forwarding.sockets import MAX_PATH, socket_path
from gym_gunicorn.owner import new_owner_id

PREFIX = "gym-gunicorn-"

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class DirectoryError(RuntimeError):
    """The socket directory can't be made or joined. The message says why and what to do."""


class SocketDirectory:
    """A socket directory that this process holds a shared lock on.

    Make one with ``create`` or ``join``. ``path`` is its absolute path, and
    ``descriptor`` the open file that carries the lock.
    """

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    @classmethod
    def create(cls, parent: str, uid: int, gid: int) -> SocketDirectory:
        """Make a directory below ``parent`` that only ``uid`` may enter, and lock it.

        Raises:
            DirectoryError: it can't be made there, or a socket's path would be too long.
        """
        parent = os.path.abspath(parent)
        longest = socket_path(os.path.join(parent, PREFIX + "x" * 8), new_owner_id())
        if len(os.fsencode(longest)) > MAX_PATH:
            raise DirectoryError(
                f"the socket directory can't be made in {parent!r}: a socket's path there would have "
                f"{len(os.fsencode(longest))} bytes, and Unix sockets allow {MAX_PATH}. "
                "Set SessionRouting(directory=...) to a folder with a shorter path."
            )
        while True:
            try:
                path = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
            except OSError as error:
                raise _cannot_make(parent, error) from error
            try:
                # Whatever the umask left of it.
                os.chmod(path, 0o700)
                directory = cls(path, os.open(path, _OPEN))
            except FileNotFoundError:
                # A sweeper was faster.
                continue
            fcntl.flock(directory.descriptor, fcntl.LOCK_SH)
            if not _is_at(path, directory.descriptor):
                os.close(directory.descriptor)
                continue
            try:
                directory.give_to(uid, gid)
            except OSError as error:
                directory.leave(force=True)
                raise _cannot_make(parent, error) from error
            return directory

    @classmethod
    def join(cls, inherited: str) -> SocketDirectory:
        """Take over the directory of the arbiter that started this one (SIGUSR2).

        ``inherited`` is what ``inheritance`` returned there; the lock came with it.

        Raises:
            DirectoryError: the directory is not there any more.
        """
        number, _, path = inherited.partition(":")
        try:
            descriptor = int(number)
            if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise ValueError(f"{inherited!r} leads to no directory")
            os.set_inheritable(descriptor, False)
        except (ValueError, OverflowError, OSError) as error:
            raise DirectoryError(f"the old arbiter's socket directory can't be joined: {error}") from error
        joined = cls(path, descriptor)
        try:
            joined.restore()
        except DirectoryError:
            joined.let_go()
            raise
        return joined

    def inheritance(self) -> str:
        """Let the open file and its lock outlive an ``exec``, and return what ``join`` needs."""
        os.set_inheritable(self.descriptor, True)
        return f"{self.descriptor}:{self.path}"

    def socket_path(self, owner_id: str) -> str:
        """Return the path of the private socket of the worker ``owner_id``."""
        return socket_path(self.path, owner_id)

    def give_to(self, uid: int, gid: int) -> None:
        """Make the directory that of ``uid`` and ``gid``, where it is not."""
        status = os.fstat(self.descriptor)
        if (status.st_uid, status.st_gid) != (uid, gid):
            os.fchown(self.descriptor, uid, gid)

    def remove_socket(self, owner_id: str) -> bool:
        """Remove the private socket of the worker ``owner_id`` if it is there, and return whether it was."""
        if self.descriptor < 0:
            return False
        with contextlib.suppress(OSError):
            os.unlink(os.path.basename(self.socket_path(owner_id)), dir_fd=self.descriptor)
            return True
        return False

    @property
    def uid(self) -> int:
        """The user whose directory it is."""
        return os.fstat(self.descriptor).st_uid

    def is_there(self) -> bool:
        """Tell whether the path still leads to the directory."""
        return _is_at(self.path, self.descriptor)

    def restore(self) -> bool:
        """Make the directory again at its path, where somebody has removed it; return whether it was missing.

        Every process that holds it does this: the first makes it, the others take and
        lock what the first has made.

        Raises:
            DirectoryError: it can't be made, or something else stands in its place.
        """
        if self.is_there():
            return False
        if os.geteuid() not in (0, self.uid):
            raise DirectoryError(f"the socket directory {self.path!r} was removed, and is to be another user's")
        try:
            os.mkdir(self.path, 0o700)
            # Whatever the umask left of it.
            os.chmod(self.path, 0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise _cannot_make(os.path.dirname(self.path), error) from error
        try:
            descriptor = os.open(self.path, _OPEN)
        except OSError as error:
            raise DirectoryError(f"the socket directory {self.path!r} was removed: {error.strerror}") from error
        try:
            self._take(descriptor)
        except (DirectoryError, OSError) as error:
            os.close(descriptor)
            raise error if isinstance(error, DirectoryError) else _cannot_make(self.path, error) from error
        return True

    def _take(self, descriptor: int) -> None:
        """Hold another directory in the place of the one that was removed, if it is as safe."""
        status, wanted = os.fstat(descriptor), os.fstat(self.descriptor)
        if os.geteuid() == 0 and status.st_uid == 0 and not os.listdir(descriptor):
            # Made by this process, or by an arbiter beside this one. Not any folder of root's
            # that somebody has moved to this place.
            os.fchown(descriptor, wanted.st_uid, wanted.st_gid)
            status = os.fstat(descriptor)
        if status.st_uid != wanted.st_uid or status.st_mode & 0o077:
            raise DirectoryError(
                f"the socket directory {self.path!r} was removed, and what stands in its place is another user's "
                "or open to others. Remove that, and the server makes its own again"
            )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            raise DirectoryError(f"the socket directory {self.path!r} is being removed by another program") from error
        if not _is_at(self.path, descriptor):
            raise DirectoryError(f"the socket directory {self.path!r} was removed again")
        os.close(self.descriptor)
        self.descriptor = descriptor

    def let_go(self) -> None:
        """Give up this process's part of the lock."""
        if self.descriptor >= 0:
            # Closed, never unlocked: workers and arbiter share one open file and its lock.
            os.close(self.descriptor)
            self.descriptor = -1

    def leave(self, wait: float = 0.0, force: bool = False) -> bool:
        """Give up the lock, and remove the directory if nobody else holds it.

        Tries for ``wait`` seconds, for processes that are just ending. With ``force``
        the directory is removed then all the same: the caller knows that whoever
        holds it serves nobody. Returns whether the directory is gone.
        """
        if self.descriptor < 0:
            return not os.path.lexists(self.path)
        self.let_go()
        deadline = time.monotonic() + wait
        while not _remove_if_unheld(self.path):
            if time.monotonic() >= deadline:
                if force:
                    with contextlib.suppress(OSError), _opened(self.path) as descriptor:
                        _remove(self.path, descriptor)
                return not os.path.lexists(self.path)
            time.sleep(0.02)
        return True


def sweep(parent: str, uids: set[int]) -> list[str]:
    """Remove the socket directories in ``parent`` that belong to ``uids`` and that nobody holds.

    Returns the paths that were removed.
    """
    removed = []
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if not entry.name.startswith(PREFIX):
                continue
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode) and status.st_uid in uids and _remove_if_unheld(entry.path):
                    removed.append(entry.path)
    return removed


def _cannot_make(parent: str, error: OSError) -> DirectoryError:
    return DirectoryError(
        f"the socket directory can't be made in {parent!r}: {error.strerror}. "
        "The folder must exist, and this user must be able to write to it; SessionRouting(directory=...) names another."
    )


def _remove_if_unheld(path: str) -> bool:
    """Remove the directory if nobody holds a lock on it; return whether it is gone."""
    try:
        with _opened(path) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path, descriptor)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _remove(path: str, descriptor: int) -> None:
    # By descriptor: the directory is the workers' user's, who can put a link in its place.
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(descriptor):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=descriptor)
        if _is_at(path, descriptor):
            os.rmdir(path)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    descriptor = os.open(path, _OPEN)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is_at(path: str, descriptor: int) -> bool:
    """Tell whether ``path`` still leads to the open directory ``descriptor``."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False
