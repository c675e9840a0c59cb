"""What a forked child gives up, and what it keeps."""

from __future__ import annotations

import json
import os
import resource
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from gym_gunicorn.lifecycle.after_fork import letting_go


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def kept_by_a_child(let_go: Callable[[], None], sockets: dict[str, socket.socket]) -> set[str]:
    """Return which of ``sockets`` a forked child still holds after ``let_go``."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            let_go()
            kept = [name for name, sock in sockets.items() if stat.S_ISSOCK(os.fstat(sock.fileno()).st_mode)]
            os.write(writing, json.dumps(kept).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return set(json.loads(found))


def listening(stack: ExitStack, family: socket.AddressFamily, address: object) -> socket.socket:
    sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
    sock.bind(address)  # type: ignore[arg-type]  # of the family
    sock.listen()
    return sock


def connected(stack: ExitStack, to: socket.socket, address: object) -> tuple[socket.socket, socket.socket]:
    """Connect to a listener; return the two ends, the one that it has accepted last."""
    near = stack.enter_context(socket.socket(to.family, socket.SOCK_STREAM))
    near.connect(address)  # type: ignore[arg-type]  # of the family
    return near, stack.enter_context(to.accept()[0])


def test_child_gives_up_listeners_and_what_is_connected_to_them(stack: ExitStack, tmp_path: Path) -> None:
    everywhere = listening(stack, socket.AF_INET, ("0.0.0.0", 0))
    sixth = listening(stack, socket.AF_INET6, ("::1", 0))
    local = listening(stack, socket.AF_UNIX, str(tmp_path / "public"))
    own = tmp_path / "sockets"
    own.mkdir()
    private = listening(stack, socket.AF_UNIX, str(own / "0123.sock"))
    siblings = tmp_path / "sockets-of-others"
    siblings.mkdir()
    other = listening(stack, socket.AF_UNIX, str(siblings / "0123.sock"))
    ends = {
        "IPv4": connected(stack, everywhere, ("127.0.0.1", everywhere.getsockname()[1])),
        "IPv6": connected(stack, sixth, sixth.getsockname()),
        "Unix": connected(stack, local, local.getsockname()),
        "private": connected(stack, private, private.getsockname()),
        "the app's": connected(stack, other, other.getsockname()),
        "a pair": socket.socketpair(),
    }
    for end in ends["a pair"]:
        stack.enter_context(end)
    sockets = {f"{name}, {side}": end[number] for name, end in ends.items() for number, side in enumerate("ab")}
    sockets |= {"public": everywhere, "private listener": private, "the app's listener": other}
    udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    udp.bind(("127.0.0.1", everywhere.getsockname()[1]))
    sockets["UDP"] = udp
    assert kept_by_a_child(letting_go([everywhere, sixth, local], str(own)), sockets) == {
        # The app's connections to its own server are the app's.
        "IPv4, a",
        "IPv6, a",
        "Unix, a",
        "the app's, a",
        "the app's, b",
        "the app's listener",
        "a pair, a",
        "a pair, b",
        "UDP",
    }


def test_child_of_a_server_that_listens_no_more_gives_up_its_connections(stack: ExitStack, tmp_path: Path) -> None:
    public = listening(stack, socket.AF_INET, ("127.0.0.1", 0))
    let_go = letting_go([public], str(tmp_path))
    near, accepted = connected(stack, public, public.getsockname())
    public.close()
    assert kept_by_a_child(let_go, {"near": near, "accepted": accepted}) == {"near"}


def test_child_keeps_the_numbers_of_what_it_gives_up(stack: ExitStack, tmp_path: Path) -> None:
    public = listening(stack, socket.AF_INET, ("127.0.0.1", 0))
    child = os.fork()
    if child == 0:
        let_go = letting_go([public], str(tmp_path))
        before = set(os.listdir("/proc/self/fd"))
        let_go()
        # Taken, by what reads as an end.
        same = set(os.listdir("/proc/self/fd")) == before and os.read(public.fileno(), 1) == b""
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_child_of_a_process_with_no_free_descriptor_gives_up_all_the_same(stack: ExitStack, tmp_path: Path) -> None:
    public = listening(stack, socket.AF_INET, ("127.0.0.1", 0))
    near, accepted = connected(stack, public, public.getsockname())
    let_go = letting_go([public], str(tmp_path))

    def let_go_without_room() -> None:
        soft = max(map(int, os.listdir("/proc/self/fd"))) + 8
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
        with suppress(OSError):
            while True:
                last = os.dup(near.fileno())
        # The lock on the socket directory is given up first.
        os.close(last)
        let_go()

    sockets = {"public": public, "near": near, "accepted": accepted}
    assert kept_by_a_child(let_go_without_room, sockets) == {"near"}
