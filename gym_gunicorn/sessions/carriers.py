"""Carriers: where a request names the owner of its session.

A carrier reads the header list of an ASGI scope, believes only what is signed,
and only an owner ID in its exact form. It knows nothing of routing.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from itsdangerous import TimestampSigner, URLSafeSerializer
from itsdangerous.exc import BadData, BadSignature
from starlette.requests import cookie_parser

from gym_gunicorn.owner import is_owner_id, owner_in

Headers = Iterable[tuple[bytes, bytes]]

# Under which a session token names its owner.
TOKEN_OWNER_KEY = "gym_worker"

# What was verified is remembered, by the whole field: reading and verifying it takes about
# ten times as long as looking it up. 4,096 entries of at most 2 KiB bound the memory at
# 8 MiB a carrier, whatever callers send; longer fields are verified each time.
_CACHED = 4096
_CACHED_LENGTH = 2048


@dataclass(frozen=True, slots=True)
class Carried:
    """What a carrier says that is present in a request.

    ``owner`` is an owner ID, or ``None`` where the carrier is not validly
    signed, has expired, or names no owner.
    """

    owner: str | None


NO_OWNER = Carried(None)


class Carrier(Protocol):
    """One place where a request can name its owner."""

    def read(self, headers: Headers) -> Carried | None:
        """Return what the carrier says, or ``None`` where it is not present.

        ``headers`` is the header list of an ASGI scope: pairs of bytes, names
        in lower case. Never raises, whatever the bytes are.
        """
        ...


class SessionCookie:
    """The cookie of Starlette's ``SessionMiddleware``, read as Starlette reads it.

    Args:
        signer: the signer that ``SessionMiddleware`` signs its cookie with.
        name: the cookie's name.
        max_age: seconds for which a signature is valid, or ``None`` for ever.
        owner_key: the key of the session under which the owner ID is kept.
    """

    def __init__(self, signer: TimestampSigner, name: str, max_age: int | None, owner_key: str) -> None:
        self.name = name
        self.max_age = max_age
        self._signer = signer
        self._owner_key = owner_key
        self._verified = lru_cache(_CACHED)(self._verify)

    def read(self, headers: Headers) -> Carried | None:
        # Several Cookie fields are read like one, and of several cookies with
        # one name the last counts: starlette.requests.HTTPConnection.cookies.
        found: tuple[Carried, int] | None = None
        for name, field in headers:
            if name == b"cookie":
                verify = self._verified if len(field) <= _CACHED_LENGTH else self._verify
                found = verify(field) or found
        if found is None:
            return None
        carried, signed_at = found
        if carried.owner is None or self.max_age is None:
            return carried
        # Judged anew at each request, so that what is remembered can't outlive max_age.
        # A time in the future, which no session middleware takes, still names its owner: the
        # clock has stepped back, and may step on before the session middleware looks at it.
        if self._signer.get_timestamp() - signed_at <= self.max_age:
            return carried
        return NO_OWNER

    def _verify(self, field: bytes) -> tuple[Carried, int] | None:
        """Return what the cookie in a field says, and when it was signed (Unix seconds)."""
        value = cookie_parser(field.decode("latin-1")).get(self.name)
        if value is None:
            return None
        try:
            data, signed = self._signer.unsign(value.encode("utf-8"), return_timestamp=True)
            session = json.loads(b64decode(data))
        except (BadSignature, ValueError, OverflowError, OSError, RecursionError):
            return NO_OWNER, 0
        owner = session.get(self._owner_key) if isinstance(session, dict) else None
        return (Carried(owner) if is_owner_id(owner) else NO_OWNER), int(signed.timestamp())


class SessionToken:
    """A signed token in a header field, for callers that keep no cookies, such as MCP clients.

    The token is a mapping, serialized by ``itsdangerous.URLSafeSerializer``. It names its
    owner under ``TOKEN_OWNER_KEY``, or by a session ID that holds one.

    Args:
        serializer: what the app signs its tokens with: secret and salt.
        header: the field's name.
        session_id_key: the key of the token under which the session ID is kept.
    """

    def __init__(self, serializer: URLSafeSerializer, header: str, session_id_key: str) -> None:
        self.header = header
        self._name = header.lower().encode("latin-1")
        self._serializer = serializer
        self._session_id_key = session_id_key
        self._verified = lru_cache(_CACHED)(self._verify)

    def read(self, headers: Headers) -> Carried | None:
        for name, field in headers:
            if name == self._name:
                verify = self._verified if len(field) <= _CACHED_LENGTH else self._verify
                return verify(field)
        return None

    def _verify(self, field: bytes) -> Carried:
        try:
            token = self._serializer.loads(field.decode("latin-1"))
        except (BadData, ValueError, RecursionError):
            return NO_OWNER
        if not isinstance(token, dict):
            return NO_OWNER
        owner = token.get(TOKEN_OWNER_KEY)
        if not is_owner_id(owner):
            owner = owner_in(token.get(self._session_id_key))
        return NO_OWNER if owner is None else Carried(owner)
