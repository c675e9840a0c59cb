"""What a caller is told when a session's owner could not answer.

Bodies are RFC 9457 problem details. They name no cookie, token or owner ID;
the log does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from starlette.types import Receive, Scope, Send


@dataclass(frozen=True, slots=True)
class Problem:
    """An ASGI application that answers every request with one error.

    A WebSocket handshake is refused with the same status and body where the
    server knows the ASGI extension ``websocket.http.response``; elsewhere with
    the 403 that ASGI has for it.

    With ``json_rpc`` the body is a JSON-RPC error: what an MCP client reads and reports.
    """

    status: int
    type: str
    title: str
    detail: str
    headers: tuple[tuple[bytes, bytes], ...] = ()
    json_rpc: bool = False

    def with_header(self, name: bytes, value: bytes) -> Problem:
        """Return the same problem with one header field more."""
        return replace(self, headers=(*self.headers, (name, value)))

    def as_json_rpc(self) -> Problem:
        """Return the same problem with a JSON-RPC error as its body."""
        return replace(self, json_rpc=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = "http.response"
        if scope["type"] == "websocket":
            if "websocket.http.response" not in scope.get("extensions", {}):
                await send({"type": "websocket.close"})
                return
            kind = "websocket.http.response"
        media_type, content = self._content()
        body = json.dumps(content).encode()
        headers = [
            (b"content-type", media_type),
            (b"content-length", str(len(body)).encode()),
            # Without this a 410 may be cached (RFC 9110, section 15.5.11).
            (b"cache-control", b"no-store"),
            *self.headers,
        ]
        await send({"type": f"{kind}.start", "status": self.status, "headers": headers})
        await send({"type": f"{kind}.body", "body": body})

    def _content(self) -> tuple[bytes, object]:
        if self.json_rpc:
            data = {"type": self.type, "status": self.status}
            error = {"code": -32000, "message": f"{self.title}: {self.detail}", "data": data}
            return b"application/json", {"jsonrpc": "2.0", "id": None, "error": error}
        return b"application/problem+json", {
            "type": self.type,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
        }


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
