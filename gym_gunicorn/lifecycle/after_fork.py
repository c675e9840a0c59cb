"""What a child that the app forks must not keep: it may outlive its worker, and whoever is connected would wait."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable
from typing import Any


def letting_go(listeners: Iterable[socket.socket], directory: str) -> Callable[[], None]:
    """Return what gives up, in a forked child, the sockets at which its parent listens, and all connections to them.

    They are told by their addresses, as those are now: a connection that was accepted a
    moment ago is known to nobody but the kernel and the event loop's own library, and a
    server that stops still has connections when it listens no more.

    Args:
        listeners: sockets that are listened at; connections to their addresses are given up too.
        directory: a folder: so is what is bound or connected to a Unix socket in it.
    """
    addresses = {_place(listener.family, listener.getsockname()) for listener in listeners}
    folder = os.path.join(directory, "")
    # Opened now: a child of a process without a free descriptor could not.
    null = os.open(os.devnull, os.O_RDWR)

    def let_go() -> None:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if _leads_to(descriptor, addresses, folder):
                # Not closed: the number stays taken, so that a close by the event loop hits nothing else.
                os.dup2(null, descriptor, inheritable=False)

    return let_go


def _leads_to(descriptor: int, addresses: set[Any], folder: str) -> bool:
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError:
        # No socket.
        return False
    names: list[Any] = []
    try:
        if sock.type == socket.SOCK_STREAM:
            # Only a connection has the second.
            with contextlib.suppress(OSError):
                names.append(sock.getsockname())
                names.append(sock.getpeername())
        own = bool(names) and _place(sock.family, names[0]) in addresses
        return own or any(isinstance(name, str) and name.startswith(folder) for name in names)
    finally:
        sock.detach()


def _place(family: int, address: Any) -> Any:
    """Return what a listener's address has in common with those of the connections that it accepts."""
    return (family, address[1]) if family in (socket.AF_INET, socket.AF_INET6) else address
