"""What starlette and itsdangerous make of a request: the answer that a carrier has to agree with.

Nothing here is the package's: not its parser, not its idea of an owner ID.
"""

from __future__ import annotations

import copy
import json
from base64 import b64decode
from typing import Any

from itsdangerous import TimestampSigner, URLSafeSerializer
from itsdangerous.exc import BadData
from starlette.datastructures import Headers
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import HTTPConnection
from starlette.types import Message, Receive, Scope, Send

ABSENT = "absent"

Fields = list[tuple[bytes, bytes]]


def has_form_of_an_owner_id(value: object) -> bool:
    """Tell whether ``value`` is 12 lower-case ASCII hexadecimal digits."""
    return isinstance(value, str) and len(value) == 12 and all(character in "0123456789abcdef" for character in value)


def owner_of_cookie(fields: Fields, signer: TimestampSigner, name: str, max_age: int | None, key: str) -> str | None:
    """Return the owner that Starlette's session middleware would hand to an app, ``None``, or ``ABSENT``."""
    cookies = HTTPConnection({"type": "http", "headers": fields}).cookies
    if name not in cookies:
        return ABSENT
    sessions: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        sessions.append(scope["session"])

    async def receive() -> Message:
        raise AssertionError("the middleware reads nothing")

    async def send(message: Message) -> None:
        raise AssertionError("the app answers nothing")

    middleware = SessionMiddleware(app, "replaced below", session_cookie=name, max_age=max_age)
    middleware.signer = _looking_when_it_was_signed(signer, cookies[name])
    try:
        # No step of it waits for anything, so no event loop is needed.
        middleware({"type": "http", "headers": fields}, receive, send).__await__().send(None)
    except StopIteration:
        pass
    except (ValueError, TypeError, OverflowError, OSError, RecursionError):
        return None  # Signed, and no session: the app gets no request.
    (session,) = sessions
    if key not in session:
        return None
    # Starlette (1.10) makes a session of a signed list of pairs too. No app writes one.
    if not isinstance(json.loads(b64decode(signer.unsign(cookies[name].encode()))), dict):
        return None
    return session[key] if has_form_of_an_owner_id(session[key]) else None


def _looking_when_it_was_signed(signer: TimestampSigner, cookie: str) -> TimestampSigner:
    """Return the signer with a clock that is not behind the cookie's: one of the future is its owner's to judge."""
    try:
        _, signed = signer.unsign(cookie.encode(), return_timestamp=True)
    except (BadData, ValueError, OverflowError, OSError):
        return signer
    looking = copy.copy(signer)
    now = max(signer.get_timestamp(), int(signed.timestamp()))
    setattr(looking, "get_timestamp", lambda: now)  # noqa: B010  # mypy would refuse the plain assignment
    return looking


def owner_of_token(
    fields: Fields, serializer: URLSafeSerializer, name: str, key: str, session_id_key: str
) -> str | None:
    """Return the owner that the first token of a request names, ``None``, or ``ABSENT``."""
    headers = Headers(raw=fields)
    if name not in headers:
        return ABSENT
    try:
        payload = serializer.loads(headers[name])
    except BadData:
        return None
    if not isinstance(payload, dict):
        return None
    if has_form_of_an_owner_id(payload.get(key)):
        return str(payload[key])
    session_id = payload.get(session_id_key)
    if not isinstance(session_id, str):
        return None
    owner, dash, rest = session_id.partition("-")
    is_one = has_form_of_an_owner_id(owner) and dash and len(rest) == 32 and set(rest) <= set("0123456789abcdef")
    return owner if is_one else None
