"""One request at a time, over a connection to the worker of a test's choice."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPMessage
from pathlib import Path
from typing import Any

from tests.gunicorn_server import GunicornServer, gunicorn_server, until
from tests.sessions import owner_in

PROBE = "tests.e2e.apps.probe:app"


@dataclass
class Reply:
    """A whole reply."""

    status: int
    headers: HTTPMessage
    body: bytes

    def json(self) -> Any:
        assert self.status == 200, (self.status, self.body)
        return json.loads(self.body)


class Session:
    """What a caller keeps of its session: the cookie, as ``name=value``."""

    def __init__(self) -> None:
        self.cookie: str | None = None

    @property
    def owner(self) -> str | None:
        """The owner ID that the cookie names."""
        return None if self.cookie is None else owner_in(self.cookie.partition("=")[2])

    @property
    def data(self) -> Any:
        """What the cookie holds."""
        assert self.cookie is not None
        payload = self.cookie.partition("=")[2].split(".")[0]
        return json.loads(base64.b64decode(payload + "=" * (-len(payload) % 4)))


class UnixConnection(HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self.path))


def ask(
    to: GunicornServer | HTTPConnection,
    path: str,
    session: Session | None = None,
    *,
    method: str = "GET",
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """Send one request and return the reply: over the connection given, or over one of its own."""
    own = isinstance(to, GunicornServer)
    connection = HTTPConnection("127.0.0.1", to.port, timeout=60) if isinstance(to, GunicornServer) else to
    fields = dict(headers or {})
    if session is not None and session.cookie is not None:
        fields["Cookie"] = session.cookie
    try:
        connection.request(method, path, body, fields)
        response = connection.getresponse()
        reply = Reply(response.status, response.headers, response.read())
    finally:
        if own:
            connection.close()
    cookies = reply.headers.get_all("set-cookie", [])
    assert len(cookies) <= 1
    if session is not None and cookies:
        session.cookie = cookies[0].partition(";")[0]
    return reply


def count(to: GunicornServer | HTTPConnection, session: Session) -> int:
    """Have the probe count one more call of the session: 1, 2, 3, where nothing is lost."""
    number: int = ask(to, "/count", session, method="POST").json()["count"]
    return number


def status(to: GunicornServer | HTTPConnection, session: Session) -> int:
    """Return the status of one more call of the session."""
    return ask(to, "/count", session, method="POST").status


def is_stopped(pid: int) -> bool:
    """Tell whether a signal has stopped the process."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Stop processes with SIGSTOP, and let them go on at the end."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        until(lambda: all(map(is_stopped, pids)), "the processes are stopped")
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextmanager
def connection_to(
    server: GunicornServer,
    pid: int,
    *,
    among: list[int] | None = None,
    make: Callable[[], HTTPConnection] | None = None,
) -> Iterator[HTTPConnection]:
    """A kept-alive connection that the worker ``pid`` has accepted, since all others stand still meanwhile."""
    connection = make() if make is not None else HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        with stopped(*(other for other in among or server.workers() if other != pid)):
            assert ask(connection, "/pid").json()["pid"] == pid
        # A closed connection is to be seen, and not to be replaced by one to another worker.
        connection.auto_open = 0
        yield connection
    finally:
        connection.close()


def session_at(server: GunicornServer, pid: int, *, among: list[int] | None = None) -> Session:
    """A new session of the probe, held by the worker ``pid``, which has counted one call."""
    session = Session()
    with connection_to(server, pid, among=among) as connection:
        assert count(connection, session) == 1
    return session


def owner_of(server: GunicornServer, pid: int) -> str:
    """Return the owner ID of the worker ``pid``."""
    (owner,) = (owner for owner in server.owners() if server.pid_of(owner) == pid)
    return owner


def processes_of(server: GunicornServer) -> list[int]:
    """Return the pids of all processes that have the server's log open: whatever it started, and their children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if any(os.readlink(item) == str(server.log_path) for item in (entry / "fd").iterdir()):
                    found.append(int(entry.name))
    return found


def assert_nothing_left(server: GunicornServer) -> None:
    """No process, no socket, no directory."""
    until(lambda: not processes_of(server), "every process has ended")
    assert server.directories() == []


class Journal:
    """The test's side of ``tests.e2e.apps.journal``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def env(self) -> dict[str, str]:
        return {"JOURNAL": str(self.folder)}

    def lines(self) -> list[str]:
        path = self.folder / "lines"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, line: str) -> None:
        until(lambda: line in self.lines(), f"the app notes {line!r}")

    def release(self, name: str) -> None:
        (self.folder / name).touch()


@contextmanager
def probe_server(
    *arguments: str,
    journal: Journal | None = None,
    app: str = PROBE,
    config: str | None = None,
    workers: int = 2,
) -> Iterator[GunicornServer]:
    """Serve the probe, with kept-alive connections that last as long as a test."""
    env = journal.env if journal is not None else {}
    with gunicorn_server("--keep-alive", "75", *arguments, app=app, config=config, workers=workers, env=env) as server:
        yield server
