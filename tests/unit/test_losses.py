"""What the log says of requests that owners did not answer: never one line a request."""

from __future__ import annotations

import asyncio
import logging

import pytest
from starlette.types import Message, Receive, Scope, Send

from gym_gunicorn.carriers import Carried
from gym_gunicorn.errors import Busy, ForwardError, Gone
from gym_gunicorn.figures import BUSY, FORWARDED, GONE, LOCAL, Figures
from gym_gunicorn.router import Placed, SessionRouter

HERE = "f" * 12


class FromHeader:
    """Carrier of the tests: a header field is the owner."""

    def read(self, headers: list[tuple[bytes, bytes]]) -> Carried | None:
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

    async def close(self) -> None:
        """Nothing is open."""
