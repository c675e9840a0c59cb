"""Two releases side by side (SIGUSR2) with other links: what they can't say to each other in frames goes over HTTP."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from websockets.sync.client import connect

from tests.e2e.calls import Session, assert_nothing_left, connection_to, count, probe_server, session_at
from tests.e2e.launching import reconfigure
from tests.gunicorn_server import CONFIG, GunicornServer, children, errors, is_alive, until

APP = "tests.e2e.apps.streams:app"

# Before anything has begun a link.
OTHER = """
from gym_gunicorn.forwarding.links import frames, link, server

for module in (frames, link, server):
    module.PREFACE = b"\\0gym-gunicorn link 2\\r\\n"
"""

# What the HTTP server says where it meets the preface of links that it does not know.
REFUSED = "Invalid HTTP request received."


class Releases:
    """A server during an upgrade: its old workers, the new arbiter, and its workers."""

    def __init__(self, server: GunicornServer, old: list[int], arbiter: int, new: list[int]) -> None:
        self.server = server
        self.old = old
        self.arbiter = arbiter
        self.new = new

    @property
    def everyone(self) -> list[int]:
        return self.old + self.new

    def sessions(self) -> list[Session]:
        """Return a new session at each worker of both."""
        return [session_at(self.server, pid, among=self.everyone) for pid in self.everyone]


@contextmanager
def releases(before: str, after: str) -> Iterator[Releases]:
    """A server whose configuration begins with the text ``before``, upgraded to one that begins with ``after``."""
    with probe_server(app=APP, config=f"# the release\n{before}# so far\n{CONFIG}") as server:
        old = server.workers()
        reconfigure(server, f"# the release\n{before}# so far\n", after)
        server.send(signal.SIGUSR2)
        until(lambda: server.ready_workers() == 4, "the new workers serve")
        (arbiter,) = set(server.workers()) - set(old)
        new = children(arbiter)
        server.seen.update(new)
        yield Releases(server, old, arbiter, new)
        assert errors(server.log()) == []


def talks(there: Releases, receiver: int, session: Session, owner: int) -> None:
    """Talk over a WebSocket that the worker ``receiver`` accepts and the worker ``owner`` handles."""
    with connection_to(there.server, receiver, among=there.everyone) as connection:
        url = there.server.url.replace("http", "ws") + "/talk"
        fields = {"Cookie": session.cookie or ""}
        with connect(url, sock=connection.sock, additional_headers=fields, compression=None) as websocket:
            assert websocket.recv(60) == str(owner)
            for message in ("one", "two" * 100_000):
                websocket.send(message)
                assert websocket.recv(60) == message


BOTH_WAYS = [pytest.param("", OTHER, id="to links of another version"), pytest.param(OTHER, "", id="and back")]


@pytest.mark.parametrize(("before", "after"), BOTH_WAYS)
def test_sessions_of_both_releases_are_answered_by_both(before: str, after: str) -> None:
    with releases(before, after) as there:
        sessions = there.sessions()
        for number, pid in enumerate(there.everyone, start=2):
            with connection_to(there.server, pid, among=there.everyone) as connection:
                assert [count(connection, session) for session in sessions] == [number] * 4
        # Each worker tries each of the other release's once.
        assert there.server.log().count(REFUSED) == 8


@pytest.mark.parametrize(("before", "after"), BOTH_WAYS)
def test_websockets_of_both_releases_are_answered_by_both(before: str, after: str) -> None:
    with releases(before, after) as there:
        for owner, session in zip(there.everyone, there.sessions(), strict=True):
            for receiver in there.everyone:
                talks(there, receiver, session, owner)
        assert there.server.log().count(REFUSED) == 8


def test_one_release_beside_itself_uses_links_alone() -> None:
    with releases("", "") as there:
        sessions = there.sessions()
        for number, pid in enumerate(there.everyone, start=2):
            with connection_to(there.server, pid, among=there.everyone) as connection:
                assert [count(connection, session) for session in sessions] == [number] * 4
        assert REFUSED not in there.server.log()


def test_sessions_of_the_release_that_stays_are_answered_when_the_other_has_gone() -> None:
    with releases("", OTHER) as there:
        server, sessions = there.server, there.sessions()
        for number, pid in enumerate(there.everyone, start=2):
            with connection_to(server, pid, among=there.everyone) as connection:
                assert [count(connection, session) for session in sessions] == [number] * 4
        assert server.stop() == 0
        until(lambda: not any(map(is_alive, there.old)), "the old workers are gone")
        for number, pid in enumerate(there.new, start=6):
            with connection_to(server, pid, among=there.new) as connection:
                assert [count(connection, session) for session in sessions[2:]] == [number] * 2
        os.kill(there.arbiter, signal.SIGTERM)
        assert_nothing_left(server)
