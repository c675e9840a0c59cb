from __future__ import annotations

import asyncio
import json
import logging
import shutil
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from itsdangerous import TimestampSigner
from starlette.datastructures import Headers
from starlette.middleware.sessions import Session as StarletteSession
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from gym_gunicorn import SessionStamp, session_owner
from gym_gunicorn.routing.routed_app import Routed, route
from gym_gunicorn.settings import Settings

SECRET = "a secret"
KEY = "gym_worker"
OWNER = "0" * 12
OTHER = "f" * 12

Session = dict[str, Any]
Handler = Callable[[Request], None]


@dataclass
class Reply:
    """What a caller sees of a reply's session."""

    set_cookie: str | None
    vary: str | None

    @property
    def session(self) -> Session:
        """The session in the cookie that the reply sets."""
        assert self.set_cookie is not None
        value = self.set_cookie.split(";")[0].removeprefix("session=")
        session: Session = json.loads(b64decode(TimestampSigner(SECRET).unsign(value)))
        return session


def request_scope(session: Session | None = None, kind: str = "http") -> Scope:
    headers = []
    if session is not None:
        cookie = TimestampSigner(SECRET).sign(b64encode(json.dumps(session).encode()))
        headers.append((b"cookie", b"session=" + cookie))
    return {"type": kind, "method": "GET", "path": "/", "headers": headers}


def reply_of(app: ASGIApp, scope: Scope) -> Reply:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    async def called() -> None:
        await app(scope, receive, send)

    asyncio.run(called())
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    headers = Headers(raw=sent[0]["headers"])
    assert len(headers.getlist("set-cookie")) <= 1
    return Reply(headers.get("set-cookie"), headers.get("vary"))


def handled_by(handler: Handler) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        handler(Request(scope, receive))
        await PlainTextResponse("done")(scope, receive, send)

    return app


def stamped(handler: Handler, session: Session | None = None) -> Reply:
    app = SessionMiddleware(SessionStamp(handled_by(handler), OWNER, KEY), SECRET)
    return reply_of(app, request_scope(session))


def unstamped(handler: Handler, session: Session | None = None) -> Reply:
    return reply_of(SessionMiddleware(handled_by(handler), SECRET), request_scope(session))


def nothing(request: Request) -> None:
    pass


def reads(request: Request) -> None:
    request.session.get("n")


def writes(request: Request) -> None:
    request.session["n"] = 1


def pops(request: Request) -> None:
    request.session.pop("n")


def clears(request: Request) -> None:
    request.session.clear()


def clears_and_writes(request: Request) -> None:
    request.session.clear()
    request.session["m"] = 2


def test_a_new_session_gets_the_owner_beside_its_data() -> None:
    assert stamped(writes).session == {"n": 1, KEY: OWNER}


def test_the_owner_is_kept_under_the_configured_key() -> None:
    app = SessionMiddleware(SessionStamp(handled_by(writes), OWNER, "owner"), SECRET)
    assert reply_of(app, request_scope()).session == {"n": 1, "owner": OWNER}


def test_the_default_key_is_gym_worker() -> None:
    app = SessionMiddleware(SessionStamp(handled_by(writes), OWNER), SECRET)
    assert reply_of(app, request_scope()).session == {"n": 1, "gym_worker": OWNER}


@pytest.mark.parametrize("handler", [nothing, reads])
def test_a_request_that_makes_no_session_gets_no_cookie(handler: Handler) -> None:
    reply = stamped(handler)
    assert reply.set_cookie is None
    assert reply == unstamped(handler)


@pytest.mark.parametrize(("handler", "vary"), [(nothing, None), (reads, "Cookie")])
def test_a_stamped_session_that_is_only_read_gets_no_set_cookie(handler: Handler, vary: str | None) -> None:
    assert stamped(handler, {"n": 1, KEY: OWNER}) == Reply(None, vary)


def test_a_stamped_session_that_is_written_keeps_its_owner() -> None:
    assert stamped(writes, {"n": 0, KEY: OWNER}).session == {"n": 1, KEY: OWNER}


@pytest.mark.parametrize("handler", [nothing, reads])
def test_a_session_without_an_owner_is_adopted(handler: Handler) -> None:
    assert stamped(handler, {"n": 1}).session == {"n": 1, KEY: OWNER}


def test_a_session_that_names_another_owner_is_left_to_it() -> None:
    assert stamped(reads, {"n": 1, KEY: OTHER}) == Reply(None, "Cookie")
    assert stamped(writes, {"n": 0, KEY: OTHER}).session == {"n": 1, KEY: OTHER}


@pytest.mark.parametrize("malformed", ["../../x", "F" * 12, "f" * 13, "f" * 12 + "\n", 5, None, [OTHER], ""], ids=repr)
def test_a_malformed_owner_is_replaced(malformed: object) -> None:
    assert stamped(reads, {"n": 1, KEY: malformed}).session == {"n": 1, KEY: OWNER}


def test_a_cookie_of_another_secret_starts_a_new_session_here() -> None:
    scope = request_scope()
    forged = TimestampSigner("another secret").sign(b64encode(json.dumps({"n": 0, KEY: OTHER}).encode()))
    scope["headers"] = [(b"cookie", b"session=" + forged)]
    app = SessionMiddleware(SessionStamp(handled_by(writes), OWNER, KEY), SECRET)
    assert reply_of(app, scope).session == {"n": 1, KEY: OWNER}


@pytest.mark.parametrize("handler", [pops, clears])
def test_an_emptied_session_has_its_cookie_expired_as_without_the_stamp(handler: Handler) -> None:
    reply = stamped(handler, {"n": 1, KEY: OWNER})
    assert reply.set_cookie is not None and "expires=Thu, 01 Jan 1970" in reply.set_cookie
    assert reply == unstamped(handler, {"n": 1})


def test_a_session_made_and_emptied_in_one_request_gets_no_cookie() -> None:
    def handler(request: Request) -> None:
        writes(request)
        pops(request)

    assert stamped(handler) == unstamped(handler) == Reply(None, "Cookie")


def test_a_session_that_keeps_a_key_keeps_its_owner() -> None:
    assert stamped(pops, {"n": 1, "m": 2, KEY: OWNER}).session == {"m": 2, KEY: OWNER}


def test_a_session_that_is_cleared_and_written_anew_is_stamped() -> None:
    assert stamped(clears_and_writes, {"n": 1, KEY: OTHER}).session == {"m": 2, KEY: OWNER}
    assert stamped(clears_and_writes, {"n": 1, KEY: OWNER}).session == {"m": 2, KEY: OWNER}


def test_what_is_written_after_the_response_began_is_lost_as_without_the_stamp() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        scope["session"]["n"] = 1
        await send({"type": "http.response.body"})

    assert reply_of(SessionMiddleware(SessionStamp(app, OWNER, KEY), SECRET), request_scope()) == Reply(None, None)


def test_a_session_that_the_app_puts_in_the_place_of_the_old_one_is_kept_and_stamped() -> None:
    def replaces(request: Request) -> None:
        fresh = StarletteSession()
        fresh["m"] = 2
        request.scope["session"] = fresh

    assert unstamped(replaces, {"n": 1}).session == {"m": 2}
    assert stamped(replaces, {"n": 1, KEY: OWNER}).session == {"m": 2, KEY: OWNER}


def test_a_session_seen_on_entry_is_stamped_though_another_takes_its_place() -> None:
    """An inner middleware puts another session into the scope, which both share."""
    inner = SessionMiddleware(SessionStamp(handled_by(writes), OWNER, KEY), SECRET, session_cookie="inner")
    on_entry: list[Session] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        on_entry.append(scope["session"])
        await inner(scope, receive, send)
        assert scope["session"] is not on_entry[0]

    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {**request_scope(), "session": {"n": 0}}
    asyncio.run(SessionStamp(app, OWNER, KEY)(scope, receive, send))
    assert on_entry == [{"n": 0, KEY: OWNER}]


def test_a_session_of_an_inner_middleware_is_not_written_into_the_outer_cookie() -> None:
    inner = SessionMiddleware(SessionStamp(handled_by(writes), OWNER, KEY), SECRET, session_cookie="inner")
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    async def called() -> None:
        outer = SessionMiddleware(SessionStamp(inner, OWNER, KEY), SECRET)
        await outer(request_scope({"outer": True}), receive, send)

    asyncio.run(called())
    cookies = (cookie.split(";")[0].split("=", 1) for cookie in Headers(raw=sent[0]["headers"]).getlist("set-cookie"))
    assert {name: json.loads(b64decode(TimestampSigner(SECRET).unsign(value))) for name, value in cookies} == {
        "inner": {"n": 1, KEY: OWNER},
        "session": {"outer": True, KEY: OWNER},
    }


# session_owner


def owner_seen_by_a_handler(app_around: Callable[[ASGIApp], ASGIApp], session: Session | None = None) -> str | None:
    seen: list[str | None] = []
    reply_of(app_around(handled_by(lambda request: seen.append(session_owner(request.scope)))), request_scope(session))
    return seen[0]


def around(app: ASGIApp) -> ASGIApp:
    return SessionMiddleware(SessionStamp(app, OWNER, KEY), SECRET)


@pytest.mark.parametrize(
    ("session", "owner"),
    [
        (None, OWNER),
        ({"n": 1}, OWNER),
        ({"n": 1, KEY: OWNER}, OWNER),
        ({"n": 1, KEY: OTHER}, OTHER),
        ({"n": 1, KEY: "../../x"}, OWNER),
    ],
    ids=repr,
)
def test_a_handler_can_ask_for_its_sessions_owner(session: Session | None, owner: str) -> None:
    assert owner_seen_by_a_handler(around, session) == owner


def test_there_is_no_owner_in_an_unrouted_server() -> None:
    assert owner_seen_by_a_handler(lambda app: SessionMiddleware(app, SECRET), {"n": 1, KEY: OTHER}) is None
    assert owner_seen_by_a_handler(lambda app: SessionMiddleware(SessionStamp(app), SECRET), {"n": 1}) is None


def test_there_is_no_owner_outside_the_session_middleware() -> None:
    assert session_owner(request_scope({"n": 1, KEY: OTHER})) is None
    assert owner_seen_by_a_handler(lambda app: SessionStamp(app, OWNER, KEY)) is None


# Without an owner ID


@pytest.mark.parametrize("handler", [nothing, reads, writes, pops, clears_and_writes])
def test_without_an_owner_id_nothing_is_done_in_an_unrouted_server(handler: Handler) -> None:
    app = SessionMiddleware(SessionStamp(handled_by(handler)), SECRET)
    reply, expected = reply_of(app, request_scope({"n": 1})), unstamped(handler, {"n": 1})
    assert reply.vary == expected.vary
    assert (reply.set_cookie is None) == (expected.set_cookie is None)
    if handler in (writes, clears_and_writes):
        assert reply.session == expected.session


@pytest.fixture
def routed_worker() -> Iterator[Routed]:
    """A worker whose app can't be looked into, and brings the stamp itself."""
    opaque = SessionMiddleware(SessionStamp(handled_by(writes)), SECRET).__call__
    directory = tempfile.mkdtemp(dir="/tmp", prefix="stamp-")
    settings = Settings(secret_key=SECRET)
    routed = route(
        opaque, owner_id=OWNER, directory=directory, settings=settings, backlog=5, log=logging.getLogger("test")
    )
    assert routed is not None
    try:
        yield routed
    finally:
        routed.private.stop_accepting()
        shutil.rmtree(directory)


def test_without_an_owner_id_a_callers_request_is_stamped_by_the_worker(routed_worker: Routed) -> None:
    assert reply_of(routed_worker.app, request_scope()).session == {"n": 1, KEY: OWNER}


def test_without_an_owner_id_a_siblings_request_is_stamped_by_the_worker(routed_worker: Routed) -> None:
    assert reply_of(routed_worker.private.app, {**request_scope(), "state": {}}).session == {"n": 1, KEY: OWNER}


# WebSockets


def websocket_events(app: ASGIApp, session: Session | None) -> list[Message]:
    sent: list[Message] = []
    events: list[Message] = [{"type": "websocket.connect"}, {"type": "websocket.receive", "text": "hello"}]

    async def receive() -> Message:
        return events.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    async def called() -> None:
        await app(request_scope(session, "websocket"), receive, send)

    asyncio.run(called())
    assert not events
    return sent


@pytest.mark.parametrize("session", [None, {"n": 1}, {"n": 1, KEY: OTHER}], ids=repr)
def test_websockets_pass(session: Session | None) -> None:
    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        websocket = WebSocket(scope, receive, send)
        await websocket.accept()
        await websocket.send_text(
            f"{await websocket.receive_text()} {websocket.session.get('n')} {session_owner(scope)}"
        )
        await websocket.close()

    n, owner = (session or {}).get("n"), (session or {}).get(KEY, OWNER)
    assert websocket_events(around(echo), session) == [
        {"type": "websocket.accept", "subprotocol": None, "headers": []},
        {"type": "websocket.send", "text": f"hello {n} {owner}"},
        {"type": "websocket.close", "code": 1000, "reason": ""},
    ]


def test_scopes_without_a_session_pass() -> None:
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(dict(scope))

    async def receive() -> Message:
        raise AssertionError("not read")

    async def send(message: Message) -> None:
        raise AssertionError("not answered")

    asyncio.run(SessionStamp(app, OWNER, KEY)({"type": "lifespan"}, receive, send))
    assert seen == [{"type": "lifespan"}]
