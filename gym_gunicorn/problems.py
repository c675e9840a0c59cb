"""What a caller is told when a session's owner could not answer.

Bodies are RFC 9457 problem details. They name no cookie, token or owner ID;
the log does.
"""

from __future__ import annotations

import json

from starlette.types import Message, Receive, Scope, Send


class Problem:
    """An ASGI application that answers every request with one error.

    A WebSocket handshake is refused with the same status and body where the
    server knows the ASGI extension ``websocket.http.response``; elsewhere with
    the 403 that ASGI has for it.
    """

    def __init__(
        self,
        status: int,
        type_: str,
        title: str,
        detail: str,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        self.status = status
        self._arguments = (status, type_, title, detail)
        self._extra = headers
        self._body = json.dumps({"type": type_, "title": title, "status": status, "detail": detail}).encode()
        self._headers = (
            (b"content-type", b"application/problem+json"),
            (b"content-length", str(len(self._body)).encode()),
            # Without this a 410 may be cached (RFC 9110, section 15.5.11).
            (b"cache-control", b"no-store"),
            *headers,
        )

    def with_header(self, name: bytes, value: bytes) -> Problem:
        """Return the same problem with one header field more."""
        return Problem(*self._arguments, (*self._extra, (name, value)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = "http.response"
        if scope["type"] == "websocket":
            if "websocket.http.response" not in scope.get("extensions", {}):
                await send({"type": "websocket.close"})
                return
            kind = "websocket.http.response"
        # A list made anew: middlewares on the way out, CORS for one, write to it.
        start: Message = {"type": f"{kind}.start", "status": self.status, "headers": list(self._headers)}
        await send(start)
        await send({"type": f"{kind}.body", "body": self._body})


SESSION_GONE = Problem(
    410,
    "urn:gym-gunicorn:session-gone",
    "Session gone",
    "The worker process that held this session in memory has stopped, and the session's state with it. "
    "Start a new session. (Or another server on this host made this session's cookie.)",
)
OWNER_BUSY = Problem(
    503,
    "urn:gym-gunicorn:owner-busy",
    "Owner busy",
    "The worker process that holds this session has too many requests waiting. The request was not run; "
    "send it again after a moment.",
    ((b"retry-after", b"1"),),
)
SERVER_STOPPING = Problem(
    503,
    "urn:gym-gunicorn:server-stopping",
    "Server stopping",
    "The worker process that handled this request had to stop before it was answered. It may have been run in part.",
)
EXCHANGE_BROKEN = Problem(
    502,
    "urn:gym-gunicorn:exchange-broken",
    "Exchange broken",
    "The worker process that holds this session is alive, but its connection broke before it answered. "
    "The request may have been run; it was not sent again.",
)
