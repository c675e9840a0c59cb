"""What a hostile caller sends as its cookie or token, signed and unsigned."""

from __future__ import annotations

import json
import time
from base64 import b64encode, urlsafe_b64encode
from typing import Any

from itsdangerous import TimestampSigner, URLSafeSerializer

SECRET = "the server's secret"
OWNER_KEY = "gym_worker"
TOKEN_HEADER = "X-Session-Token"
TOKEN_SALT = "the server's salt for tokens"
DAY = 24 * 60 * 60

# What is no owner ID, though it looks like one, or like a way to somewhere else.
NO_OWNER_IDS: tuple[Any, ...] = (
    "../../x",
    "../../../../../../tmp/x",
    "..",
    ".",
    "",
    "/",
    "/etc/passwd",
    "/tmp/evil.sock",
    "aaaaaaaaaaa/",
    "../aaaaaaaaa",
    "a/b/c/d/e/f0",
    "%2e%2e%2f%2e",
    "\0",
    "\0aaaaaaaaaaa",
    "aaaaaaaaaaa\0",
    "aaaaaaaaaaaa\0",
    "aaaaaaaaaaaa\0.sock",
    "aaaaaaaaaaaa\n",
    "aaaaaaaaaaaa\r\n",
    " aaaaaaaaaaaa",
    "aaaaaaaaaaaa.sock",
    "AAAAAAAAAAAA",
    "gggggggggggg",
    "aaaaaaaaaaa",
    "aaaaaaaaaaaaa",
    "a" * 100_000,
    "\N{FULLWIDTH DIGIT ONE}" * 12,
    "\N{ARABIC-INDIC DIGIT ONE}" * 12,
    "\N{MATHEMATICAL DOUBLE-STRUCK DIGIT ONE}" * 12,
    "\N{FULLWIDTH LATIN SMALL LETTER A}" * 12,
    "\N{CYRILLIC SMALL LETTER A}" * 12,
    "\N{SUPERSCRIPT TWO}" * 12,
    "\ud800" * 12,
    "aaaaaaaaaaa\udcff",
    "aaaaaaaaaaaa\N{COMBINING ACUTE ACCENT}",
    123456789012,
    -1,
    0.5,
    True,
    None,
    [],
    ["aaaaaaaaaaaa"],
    ["a"] * 12,
    {},
    {"aaaaaaaaaaaa": "aaaaaaaaaaaa"},
)


class PastSigner(TimestampSigner):
    """A signer whose clock is ``age`` seconds slow: what it signs is that old."""

    age = 0

    def get_timestamp(self) -> int:
        return int(time.time()) - self.age


def session_cookie(session: object, *, secret: str = SECRET, salt: str | None = None, age: int = 0) -> str:
    """Return the value of a session cookie: signed ``age`` seconds ago, if need be with another secret or salt.

    ``session`` is the session, or as bytes what stands in its place.
    """
    signer = PastSigner(secret) if salt is None else PastSigner(secret, salt=salt)
    signer.age = age
    data = session if isinstance(session, bytes) else b64encode(json.dumps(session).encode())
    return signer.sign(data).decode("latin-1")


def session_token(payload: object, *, secret: str = SECRET, salt: str = TOKEN_SALT) -> str:
    """Return a session token, if need be signed with another secret or salt."""
    signer = URLSafeSerializer(secret, salt=salt).make_signer(salt)
    # Not dumps(), which refuses half surrogates: JSON may hold them.
    return signer.sign(urlsafe_b64encode(json.dumps(payload).encode()).rstrip(b"=")).decode()


def changed(signed: str, place: int) -> str:
    """Return a signed value with one character changed, so that it stands for other bits."""
    # Differs in the first four bits: the last two of a signature's last digit mean nothing.
    other = "Q" if signed[place] in "ABCD" else "A"
    return signed[:place] + other + signed[place + 1 :]
