"""Servers whose workers are another user's, with sessions at each, for other users to attack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.calls import PROBE, Session, assert_nothing_left, connection_to, count, session_at
from tests.e2e.launching import ANOTHER_UID, open_to_all
from tests.e2e.test_users import group_of
from tests.faults.files import (
    Sockets,
)
from tests.gunicorn_server import GunicornServer, gunicorn_server


@dataclass
class Served:
    """A server with sessions at each of its workers, in a folder that everybody may write to, as /tmp is."""

    server: GunicornServer
    sockets: Sockets
    sessions: dict[int, Session]
    calls: int = 1

    def assert_right(self) -> None:
        """Call every session from every worker once more: each is where it was."""
        for pid in self.sessions:
            with connection_to(self.server, pid) as connection:
                self.calls += 1
                assert [count(connection, session) for session in self.sessions.values()] == [self.calls] * 2

    @property
    def directory(self) -> Path:
        return self.sockets.directory

    @property
    def paths(self) -> list[Path]:
        return [self.sockets.path(owner) for owner in self.sockets.pids]


def workers_of_another_user(command: Path) -> tuple[Path, tuple[str, ...]]:
    return open_to_all(command), ("--user", "nobody", "--group", group_of("nobody"))


def wholly_of_another_user(command: Path) -> tuple[Path, tuple[str, ...]]:
    return open_to_all(command, ANOTHER_UID), ()


@contextmanager
def serving(command: Path, *options: str) -> Iterator[Served]:
    arguments = ("--keep-alive", "75", "--graceful-timeout", "5")
    with gunicorn_server(*options, *arguments, app=PROBE, workers=2, gunicorn=command) as server:
        server.parent.chmod(0o1777)
        sessions = {pid: session_at(server, pid) for pid in server.workers()}
        yield Served(server, Sockets.of(server), sessions)
        assert server.stop() == 0
        assert_nothing_left(server)
