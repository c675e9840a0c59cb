"""Finds out what somebody has copied out of a browser, a log or a program, and whose session it is.

Signatures are not checked: that takes the secret of the app.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, urlsafe_b64decode
from collections.abc import Iterator
from dataclasses import dataclass

from itsdangerous import BadData, TimestampSigner, URLSafeSerializer
from itsdangerous.encoding import base64_decode, bytes_to_int

from gym_gunicorn.owner import is_owner_id, owner_in
from gym_gunicorn.sessions.carriers import TOKEN_OWNER_KEY

# Between cookies of a field, fields of a line, and the columns of a cookie jar.
_BETWEEN = re.compile(r"[\s;,]+")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]*={0,2}")
# No carrier is longer than what a server takes for a header.
_LONGEST = 256 * 1024


@dataclass(frozen=True, slots=True)
class Decoded:
    """What was found.

    ``kind`` is "owner ID", "session ID", "session cookie" or "session token". ``owner`` is
    ``None`` where it names none. ``signed`` is when it was signed (Unix seconds), where it
    says so. ``elsewhere``: under another key than the one looked at it holds an owner ID.
    """

    kind: str
    owner: str | None
    signed: int | None = None
    elsewhere: bool = False


def decode(text: str, owner_key: str) -> list[Decoded]:
    """Return the carriers in ``text``: those that name an owner, or else those that name none.

    Takes an owner ID, a session ID, a cookie's or a token's value, and header fields,
    ``Set-Cookie`` lines and cookie jars that hold them.
    """
    found = list(dict.fromkeys(carrier for part in _parts(text[:_LONGEST]) for carrier in _carriers(part, owner_key)))
    return [carrier for carrier in found if carrier.owner is not None] or found


def _parts(text: str) -> Iterator[str]:
    for part in _BETWEEN.split(text):
        yield part.strip("\"'")
        # As name=value; but a bare value may hold "=", too.
        yield part.partition("=")[2].strip("\"'")


def _carriers(value: str, owner_key: str) -> Iterator[Decoded]:
    if is_owner_id(value):
        yield Decoded("owner ID", value)
    elif (owner := owner_in(value)) is not None:
        yield Decoded("session ID", owner)
    elif (session := _session(value)) is not None:
        yield _cookie(session, _signed(value.rsplit(".", 2)[1]), owner_key)
    elif (token := _token(value)) is not None:
        named = token.get(TOKEN_OWNER_KEY)
        ids = (owner_in(item) for item in token.values())
        yield Decoded("session token", named if is_owner_id(named) else next(filter(None, ids), None))


def _cookie(session: dict[str, object], signed: int | None, owner_key: str) -> Decoded:
    named = session.get(owner_key)
    owner = named if is_owner_id(named) else None
    elsewhere = owner is None and any(is_owner_id(item) for item in session.values())
    return Decoded("session cookie", owner, signed, elsewhere)


def _session(value: str) -> dict[str, object] | None:
    """Return the data of a session cookie, data.time.signature: in Starlette's base64, or in that for URLs."""
    payload, *signature = value.rsplit(".", 2)
    if len(signature) != 2 or _BASE64.fullmatch(payload) is None:
        return None
    payload = payload.rstrip("=")
    padded = payload + "=" * (-len(payload) % 4)
    try:
        data = json.loads(b64decode(padded, validate=True) if set("+/") & set(payload) else urlsafe_b64decode(padded))
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _token(value: str) -> dict[str, object] | None:
    try:
        _, data = URLSafeSerializer("any").loads_unsafe(value)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _signed(time: str) -> int | None:
    """Return the time in a signature of ``TimestampSigner``, in Unix seconds."""
    try:
        seconds = bytes_to_int(base64_decode(time))
    except BadData:
        return None
    return seconds if 0 < seconds <= TimestampSigner("any").get_timestamp() + 24 * 3600 else None
