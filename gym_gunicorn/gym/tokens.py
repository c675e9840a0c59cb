"""Session tokens: for callers that keep no cookies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from itsdangerous import URLSafeSerializer
from itsdangerous.exc import BadData

from gym_gunicorn.sessions.carriers import TOKEN_OWNER_KEY


@dataclass(frozen=True)
class SessionToken:
    """What a token says: the session, and the names of the tools that it may use (``None``: all)."""

    session_id: str
    tools: frozenset[str] | None


class TokenError(ValueError):
    """A token is not one that this server has signed."""


class SessionTokens:
    """Signs and reads tokens, with ``itsdangerous.URLSafeSerializer`` under a salt of their own."""

    def __init__(self, secret_key: str, salt: str) -> None:
        self._serializer = URLSafeSerializer(secret_key, salt=salt)

    def mint(self, session_id: str, *, tools: Sequence[str] | None, owner: str | None) -> str:
        """Return a token for a session. Where workers are routed, ``owner`` is the one that holds it."""
        token: dict[str, object] = {"session_id": session_id}
        if tools is not None:
            token["tools"] = list(tools)
        if owner is not None:
            token[TOKEN_OWNER_KEY] = owner
        signed = self._serializer.dumps(token)
        return signed if isinstance(signed, str) else signed.decode()

    def read(self, token: str) -> SessionToken:
        """Return what a token says.

        Raises:
            TokenError: it is badly signed or malformed.
        """
        try:
            payload = self._serializer.loads(token)
        except (BadData, ValueError, RecursionError):
            raise TokenError("the session token is not valid") from None
        session_id = payload.get("session_id") if isinstance(payload, dict) else None
        if not isinstance(session_id, str):
            raise TokenError("the session token names no session")
        tools = payload.get("tools")
        return SessionToken(session_id, None if tools is None else frozenset(tools))
