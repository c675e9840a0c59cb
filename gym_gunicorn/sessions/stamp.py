"""The stamp: writes the owner ID into a session when the response starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gym_gunicorn.owner import is_owner_id, new_session_id

_SCOPE_KEY = "gym_gunicorn.owner"
_INNERMOST_KEY = "gym_gunicorn.session"
_COUNT_KEY = "gym_gunicorn.stamped"


def session_owner(scope: Scope) -> str | None:
    """Return the owner ID of the session that ``scope`` belongs to, for an app's logs.

    For a session that this request makes it is the worker that handles it, and so
    for a request that has no session. ``None`` where the server's workers are not routed.
    """
    owner: str | None = scope.get(_SCOPE_KEY)
    return owner


def with_owner(app: ASGIApp, owner_id: str, count: Callable[[], None]) -> ASGIApp:
    """Return ``app`` told who the owner of what it handles is, for a ``SessionStamp`` that it brings itself.

    ``count`` is called for each session that is stamped.
    """

    async def app_with_owner(scope: Scope, receive: Receive, send: Send) -> None:
        scope[_SCOPE_KEY] = owner_id
        scope[_COUNT_KEY] = count
        await app(scope, receive, send)

    return app_with_owner


class SessionStamp:
    """ASGI middleware, to be placed directly inside ``SessionMiddleware``.

    When the response starts, a session that holds data and names no owner gets
    ``owner_id`` under ``owner_key``, so that ``SessionMiddleware`` writes it into
    the signed cookie. The key is taken out again when it is the only one left, so
    that an emptied session's cookie is expired as without the stamp. A session that
    already names an owner is left untouched.

    With ``session_id_key`` a session without a session ID is offered one that names the
    owner, before the app's own code looks for one. It is kept if the app looks at the
    session. For apps that put their session ID into tokens that they sign themselves.

    The server puts it into Starlette and FastAPI apps by itself. Only an app that
    can't be looked into adds it, with no ``owner_id``: it then takes the owner ID
    of the worker that serves the app, and does nothing in an unrouted server.
    """

    def __init__(
        self,
        app: ASGIApp,
        owner_id: str | None = None,
        owner_key: str = "gym_worker",
        session_id_key: str | None = None,
        count: Callable[[], None] | None = None,
    ) -> None:
        self.app = app
        self.owner_id = owner_id
        self.owner_key = owner_key
        self.session_id_key = session_id_key
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner_id = self.owner_id or scope.get(_SCOPE_KEY)
        session: dict[str, Any] | None = scope.get("session")
        if session is None or owner_id is None:
            await self.app(scope, receive, send)
            return

        named = session.get(self.owner_key)
        scope[_SCOPE_KEY] = named if named == owner_id or is_owner_id(named) else owner_id
        scope[_INNERMOST_KEY] = session
        provisional = self._offer_session_id(session, owner_id) if scope["type"] == "http" else None

        async def send_stamped(message: Message) -> None:
            if message["type"] != "http.response.start":
                await send(message)
                return
            present = scope["session"]
            if present is not scope[_INNERMOST_KEY]:
                # The app has put another session in the place of the one that it was given.
                self._stamp(present, owner_id, scope)
                await send(message)
                return
            if provisional is not None:
                self._settle_session_id(session, provisional)
            self._stamp(session, owner_id, scope)
            # The session middleware of an app that is mounted in this one has put its own
            # session into the scope; the outer one would write that into its cookie.
            scope["session"] = session
            try:
                await send(message)
            finally:
                scope["session"] = present

        await self.app(scope, receive, send_stamped)

    def _offer_session_id(self, session: dict[str, Any], owner_id: str) -> str | None:
        """Give a session that has no ID one that names its owner, unnoticed by the session."""
        if self.session_id_key is None or self.session_id_key in session:
            return None
        session_id = new_session_id(owner_id)
        dict.__setitem__(session, self.session_id_key, session_id)
        return session_id

    def _settle_session_id(self, session: dict[str, Any], session_id: str) -> None:
        """Take the offered ID back from a session that the app has not looked at; keep any other's."""
        key = self.session_id_key
        if key is None or session.get(key) != session_id:
            return
        if getattr(session, "accessed", True):
            session[key] = session_id
        else:
            dict.__delitem__(session, key)

    def _stamp(self, session: dict[str, Any], owner_id: str, scope: Scope) -> None:
        # Written only where it changes something: any write makes
        # SessionMiddleware send a Set-Cookie.
        if not session:
            return
        named = session.get(self.owner_key)
        if len(session) == 1 and self.owner_key in session:
            del session[self.owner_key]
        elif named != owner_id and not is_owner_id(named):
            session[self.owner_key] = owner_id
            count = self._count or scope.get(_COUNT_KEY)
            if count is not None:
                count()
