"""A digest of what signs a session cookie, to compare workers by: the secret itself is nobody's business."""

from __future__ import annotations

import hashlib

from itsdangerous import TimestampSigner


def fingerprint(signer: TimestampSigner, cookie: str) -> int:
    """Return 64 bits, never 0, that are the same where the secret and the name of a session cookie are."""
    digest = hashlib.blake2b(digest_size=8, person=b"gym-gunicorn")
    for part in (signer.secret_key, cookie.encode()):
        digest.update(len(part).to_bytes(8, "big") + part)
    return int.from_bytes(digest.digest(), "big") or 1
