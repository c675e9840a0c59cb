"""Private sockets: where one worker listens for its siblings, and who listens there."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct

from gym_gunicorn.forwarding.errors import Busy, Gone

# A Unix socket's path may have 107 bytes and a final zero (unix(7)).
MAX_PATH = 107

_UCRED = struct.Struct("3i")
_NO_ROOM = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def socket_path(directory: str, owner_id: str) -> str:
    """Return the path of the private socket of the worker ``owner_id``."""
    return os.path.join(directory, f"{owner_id}.sock")


def bind_private_socket(path: str, backlog: int) -> socket.socket:
    """Bind and listen on ``path``, for this user alone, and return the socket.

    Raises:
        OSError: the path can't be bound.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        # After the bind, since a umask of 0777 would leave even its owner no way in.
        os.chmod(path, 0o600)
        listener.setblocking(False)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def connect_failure(owner_id: str, error: OSError) -> Gone | Busy | None:
    """Return what a failed ``connect`` says of the owner, or ``None`` if it says nothing.

    A full accept queue is EAGAIN, and under asyncio's own loop, which takes that
    for a connection in progress, ENOTCONN at the first write.
    """
    if error.errno in (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR):
        return Gone(owner_id, "its socket is missing or refuses", unsent=True)
    if error.errno in (*_NO_ROOM, errno.ENOTCONN):
        return Busy(owner_id, f"no room for one more connection ({os.strerror(error.errno)})", unsent=True)
    if error.errno in (errno.EACCES, errno.EPERM):
        cause = "it belongs to another user; a reload has changed the user, and old workers are leaving"
        return Busy(owner_id, cause, unsent=True)
    return None


def listener_process(owner_id: str, path: str) -> int | None:
    """Connect to the private socket at ``path`` and return a pidfd of the process that listens.

    ``None`` where the platform has no ``SO_PEERCRED`` or no ``pidfd_open``. The
    kernel answers for the process that called ``listen``, even when a child that
    it forked holds the same socket open.

    Raises:
        Gone: nobody listens, or the process that did is dead.
        Busy: it listens, but its accept queue is full.
        OSError: the connection failed otherwise.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            probe.connect(path)
            pid = check_listener(owner_id, probe)
    except OSError as error:
        failure = connect_failure(owner_id, error)
        if failure is None:
            raise
        raise failure from error
    return None if pid is None else _pidfd(owner_id, pid)


def _pidfd(owner_id: str, pid: int) -> int | None:
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise Gone(owner_id, f"its process {pid} is dead", unsent=True) from None
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise Busy(owner_id, f"no room to watch it ({os.strerror(error.errno)})", unsent=True) from error
        # A kernel or a sandbox without pidfd: death is seen by refused connections.
        return None
    if is_dead(pidfd):
        os.close(pidfd)
        raise Gone(owner_id, f"its process {pid} is dead", unsent=True)
    return pidfd


def check_listener(owner_id: str, connected: socket.socket) -> int | None:
    """Return the pid of the process that listens at the other end of a connection to an owner.

    Whoever could put a socket of theirs into the place of an owner's would be sent its
    sessions' cookies. ``None`` where the platform does not tell (no ``SO_PEERCRED``).

    Raises:
        Gone: the process is another user's.
        OSError: there is no connection: asyncio's own loop takes a full accept queue for one in progress.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    pid, uid, _ = _UCRED.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if pid == 0 and uid == -1:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
    if uid != os.geteuid():
        raise Gone(owner_id, f"in its place listens a process of user {uid}", unsent=True)
    return int(pid)


def is_dead(pidfd: int) -> bool:
    """Tell whether the process behind ``pidfd`` has ended."""
    return is_readable(pidfd)


def is_readable(descriptor: int) -> bool:
    """Tell whether a descriptor has something to read now, the end of what it reads included."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def unlink(path: str) -> bool:
    """Remove ``path`` if it is there, and return whether it was.

    Where it can't be (a reload changed ``--user``, the file system is read-only by now), removing
    is left to the arbiter.
    """
    with contextlib.suppress(OSError):
        os.unlink(path)
        return True
    return False
