"""A router with real carriers and a real forwarder, given whatever a signed cookie can hold.

Every path that the process opens, connects to, or changes meanwhile is recorded by an
audit hook (PEP 578), which sees what Python itself does, whoever calls it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from itsdangerous import TimestampSigner, URLSafeSerializer
from starlette.types import Message, Receive, Scope, Send

from gym_gunicorn.forwarding.http.forwarder import AiohttpForwarder
from gym_gunicorn.routing.router import Placed, SessionRouter
from gym_gunicorn.sessions.carriers import SessionCookie, SessionToken
from tests.fuzz.oracle import has_form_of_an_owner_id
from tests.fuzz.strategies import OWNERS, fuzzed
from tests.hostile.forging import NO_OWNER_IDS
from tests.workers import socket_directory

SECRET = "a secret of the fuzzers"
KEY = "gym_worker"
ME = "f" * 12

# Events whose first argument, or the second of a socket's, is a path or an address.
WATCHED = frozenset(
    {"open", "socket.connect", "socket.bind", "socket.sendto", "os.remove", "os.rename", "os.mkdir", "os.rmdir"}
    | {"os.listdir", "os.scandir", "os.chmod", "os.chown", "os.link", "os.symlink", "os.truncate", "os.utime"}
)
_recorders: dict[int, list[tuple[str, Any]]] = {}


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    recorded = _recorders.get(threading.get_ident())
    if recorded is not None and event in WATCHED:
        recorded.append((event, arguments[1] if event.startswith("socket.") else arguments[0]))


@pytest.fixture(scope="module", autouse=True)
def audited() -> None:
    """Add the audit hook. It can't be removed again, and does nothing while nobody records."""
    sys.addaudithook(_hook)


@contextmanager
def recorded() -> Iterator[list[tuple[str, Any]]]:
    """Record what this thread opens and connects to."""
    paths: list[tuple[str, Any]] = []
    _recorders[threading.get_ident()] = paths
    try:
        yield paths
    finally:
        del _recorders[threading.get_ident()]


def ask(directory: str, fields: list[tuple[bytes, bytes]]) -> tuple[int, list[tuple[str, Any]]]:
    """Have a router handle one request; return the status, 200 where it is handled here, and what was opened."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    async def scenario() -> tuple[int, list[tuple[str, Any]]]:
        forwarder = AiohttpForwarder(directory, 10)
        cookie = SessionCookie(TimestampSigner(SECRET), "session", None, KEY)
        token = SessionToken(URLSafeSerializer(SECRET, "salt"), "X-Token", "session_id")
        router = SessionRouter(
            app,
            owner_id=ME,
            carriers=[Placed(cookie), Placed(token)],
            forwarder=forwarder,
            log=logging.getLogger("tests"),
        )
        scope = {"type": "http", "method": "GET", "path": "/", "raw_path": b"/", "query_string": b"", "headers": fields}
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        with recorded() as paths:
            await router(scope, receive, send)
            await forwarder.close()
        return sent[0]["status"], paths

    return asyncio.run(scenario())


def cookie_of(session: object) -> list[tuple[bytes, bytes]]:
    return [(b"cookie", b"session=" + TimestampSigner(SECRET).sign(b64encode(json.dumps(session).encode())))]


def token_of(payload: object) -> list[tuple[bytes, bytes]]:
    signer = URLSafeSerializer(SECRET, "salt").make_signer("salt")
    # Not dumps(), which refuses half surrogates: JSON may hold them.
    return [(b"x-token", signer.sign(b64encode(json.dumps(payload).encode(), b"-_").rstrip(b"=")))]


@pytest.fixture(scope="module")
def directory() -> Iterator[str]:
    with socket_directory() as path:
        yield path


def opens_only_its_own(directory: str, owner: object, fields: list[tuple[bytes, bytes]]) -> None:
    status, paths = ask(directory, fields)
    if has_form_of_an_owner_id(owner) and owner != ME:
        own = os.path.join(directory, f"{owner}.sock")
        assert (status, set(paths)) == (410, {("socket.connect", own)})
    else:
        assert (status, paths) == (200, [])


@fuzzed(0.5)
@given(owner=OWNERS)
@example(owner=ME)
def test_no_owner_in_a_signed_cookie_opens_a_path_outside_the_directory(directory: str, owner: object) -> None:
    opens_only_its_own(directory, owner, cookie_of({KEY: owner, "n": 1}))


@fuzzed(0.5)
@given(owner=OWNERS)
@example(owner=ME)
def test_no_owner_in_a_signed_token_opens_a_path_outside_the_directory(directory: str, owner: object) -> None:
    opens_only_its_own(directory, owner, token_of({KEY: owner}))


@fuzzed(0.5)
@given(owner=OWNERS, rest=st.just("0" * 32) | st.text("0123456789abcdef/.\0", min_size=31, max_size=33))
def test_no_session_id_in_a_signed_token_opens_a_path_outside_the_directory(
    directory: str, owner: object, rest: str
) -> None:
    names_one = len(rest) == 32 and set(rest) <= set("0123456789abcdef")
    opens_only_its_own(directory, str(owner) if names_one else None, token_of({"session_id": f"{owner}-{rest}"}))


@pytest.mark.parametrize("make", [cookie_of, token_of])
@pytest.mark.parametrize("owner", NO_OWNER_IDS, ids=lambda owner: repr(owner)[:30])
def test_what_is_no_owner_id_opens_nothing(directory: str, owner: object, make: Any) -> None:
    assert ask(directory, make({KEY: owner, "n": 1})) == (200, [])


def test_recorder_sees_what_a_path_outside_would_be(directory: str) -> None:
    with recorded() as paths, pytest.raises(FileNotFoundError):
        os.close(os.open(os.path.join(directory, "../../nowhere/x"), os.O_RDONLY))
    assert paths == [("open", os.path.join(directory, "../../nowhere/x"))]
