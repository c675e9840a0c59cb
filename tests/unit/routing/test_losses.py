"""What the log says of requests that owners did not answer: never one line a request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

import pytest
from starlette.types import Message, Receive, Scope, Send

from gym_gunicorn.forwarding.errors import Busy, ForwardError, Gone
from gym_gunicorn.metrics.values import BUSY, FORWARDED, GONE, LOCAL, Figures
from gym_gunicorn.routing.router import Placed, SessionRouter
from gym_gunicorn.sessions.carriers import Carried, Headers

HERE = "f" * 12


class FromHeader:
    """Carrier of the tests: a header field is the owner."""

    def read(self, headers: Headers) -> Carried | None:
        return next((Carried(value.decode()) for name, value in headers if name == b"owner"), None)


class Lost:
    """Forwarder to owners of which none answers."""

    finished = 0

    def __init__(self) -> None:
        self.error: type[ForwardError] = Gone

    async def http(self, owner_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        raise self.error(owner_id, "in the test")

    async def websocket(self, owner_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        raise self.error(owner_id, "in the test")

    async def reach(self, owner_id: str) -> bool:
        raise AssertionError("nothing is placed")

    def transports(self) -> list[asyncio.BaseTransport]:
        return []

    async def close(self) -> None:
        """Nothing is open."""


async def the_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer nothing."""


class Server:
    """A router whose forwards are all lost."""

    def __init__(self) -> None:
        self.forwarder = Lost()
        self.figures = Figures()
        self.router = SessionRouter(
            the_app,
            owner_id=HERE,
            carriers=[Placed(FromHeader())],
            forwarder=self.forwarder,
            log=logging.getLogger("tests.losses"),
            figures=self.figures,
        )

    def ask(self, *owners: str) -> list[int | None]:
        """Send a request of a session of each owner, and return the statuses; ``None`` where the app answers."""
        return asyncio.run(self._ask_all(owners))

    async def _ask_all(self, owners: Iterable[str]) -> list[int | None]:
        return [await self._ask(owner) for owner in owners]

    async def _ask(self, owner: str) -> int | None:
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"owner", owner.encode())]}
        await self.router(scope, receive, send)
        return sent[0]["status"] if sent else None


def owners(number: int) -> list[str]:
    return [f"{owner:012x}" for owner in range(number)]


@pytest.fixture
def lines_for(caplog: pytest.LogCaptureFixture) -> Callable[[int], list[str]]:
    """Return the lines of the log, of which there must not be more than there may be for that many losses."""
    began = time.monotonic()

    def lines_for(losses: int) -> list[str]:
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) <= losses * (1 + (time.monotonic() - began) // 10)
        return lines

    return lines_for


def test_losses_of_one_owner_are_one_line_for_each_reason(lines_for: Callable[[int], list[str]]) -> None:
    server = Server()
    for error, status in ((Gone, 410), (Busy, 503)):
        server.forwarder.error = error
        assert server.ask(*owners(1) * 20) == [status] * 20
    lines = lines_for(2)
    assert "gone" in lines[0]
    assert "busy" in lines[-1]


def test_losses_of_other_owners_have_lines_of_their_own(lines_for: Callable[[int], list[str]]) -> None:
    server = Server()
    server.ask(*owners(20) * 3)
    lines = lines_for(20)
    for owner in owners(20):
        assert any(owner in line for line in lines)


def test_losses_of_very_many_owners_are_not_one_line_a_request(lines_for: Callable[[int], list[str]]) -> None:
    server = Server()
    server.ask(*owners(200) * 3)
    lines_for(200)


def test_losses_are_counted_by_reason() -> None:
    server = Server()
    server.ask(*owners(1) * 3)
    server.forwarder.error = Busy
    server.ask(*owners(1))
    assert server.ask(HERE) == [None]
    values = server.figures.values
    assert (values[GONE], values[BUSY], values[FORWARDED], values[LOCAL]) == (3, 1, 4, 1)
