"""What a child that the app forks must not keep: it may outlive its worker, and whoever is connected would wait."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from typing import Any


def let_go(listeners: Iterable[socket.socket], directory: str) -> None:
    """Give up, in a forked child, the sockets at which its parent listens, and all connections to and from them.

    They are told by their addresses: a connection that was accepted a moment ago is
    known to nobody but the kernel and the event loop's own library.

    Args:
        listeners: sockets that are listened at; connections to their addresses are given up too.
        directory: a folder: so is what is bound or connected to a Unix socket in it.
    """
    addresses = {_place(listener.family, listener.getsockname()) for listener in listeners}
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if _leads_to(descriptor, addresses, os.path.join(directory, "")):
            # Not closed: the number stays taken, so that a close by the event loop hits nothing else.
            os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def _leads_to(descriptor: int, addresses: set[Any], folder: str) -> bool:
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError:
        # No socket.
        return False
    names: list[Any] = []
    try:
        if sock.type == socket.SOCK_STREAM:
            names.append(sock.getsockname())
            # Only a connection has one.
            with contextlib.suppress(OSError):
                names.append(sock.getpeername())
        own = bool(names) and _place(sock.family, names[0]) in addresses
        return own or any(isinstance(name, str) and name.startswith(folder) for name in names)
    finally:
        sock.detach()


def _place(family: int, address: Any) -> Any:
    """Return what a listener's address has in common with those of the connections that it accepts."""
    return (family, address[1]) if family in (socket.AF_INET, socket.AF_INET6) else address
