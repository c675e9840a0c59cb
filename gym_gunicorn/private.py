"""The private server: serves a worker's app to its siblings, on its private socket."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

from gym_gunicorn import wire
from gym_gunicorn.peer import KEEP_ALIVE
from gym_gunicorn.sockets import unlink

log = logging.getLogger("uvicorn.error")

# Fields that say how a body is framed, on this connection and on the caller's.
_FRAMING = (b"content-length", b"transfer-encoding")


class PrivateApp:
    """ASGI application that gives the app the caller's own request.

    A request with a head gets the scope that the head holds, and its reply travels
    in a reply head. A request without one is served as it is, so that an operator
    can ``curl --unix-socket`` a worker.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.websockets: set[_WebSocket] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = next((value for name, value in scope["headers"] if name == wire.HEAD_FIELD), None)
        if head is None:
            await self.app(scope, receive, send)
            return
        # An unreadable head is the fault of another release: raised, it becomes a
        # 500 without a reply head, and the sender knows.
        callers = {"state": scope["state"], **wire.decode_head(head)}
        if callers["type"] == "websocket":
            websocket = _WebSocket(receive, send)
            self.websockets.add(websocket)
            try:
                await self.app(callers, websocket.receive, websocket.send)
                await websocket.end()
            finally:
                self.websockets.discard(websocket)
            return

        async def send_reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                framing = [field for field in message.get("headers", ()) if field[0].lower() in _FRAMING]
                message = {**message, "headers": [(wire.REPLY_FIELD, wire.encode_reply(message)), *framing]}
            await send(message)

        await self.app(callers, receive, send_reply)

    async def close_websockets(self) -> None:
        """Tell the callers of all WebSockets that their owner stops."""
        for websocket in list(self.websockets):
            await websocket.send({"type": "websocket.close", "code": 1012})


class _WebSocket:
    """A WebSocket that travels as frames in the bodies of one HTTP request and its reply."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._frames = wire.FrameReader("websocket.receive")
        self._events: list[Message] = [{"type": "websocket.connect"}]
        self._started = False
        self._closed = False

    async def receive(self) -> Message:
        while not self._events:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return {"type": "websocket.disconnect", "code": 1006, "reason": ""}
            self._events = self._frames.feed(message.get("body", b""))
            if not self._events and not message.get("more_body", False):
                return {"type": "websocket.disconnect", "code": 1006, "reason": ""}
        return self._events.pop(0)

    async def send(self, event: Message) -> None:
        if self._closed:
            return
        self._closed = event["type"] == "websocket.close"
        if not self._started:
            self._started = True
            start = {"type": "http.response.start", "status": 200}
            headers = [(wire.REPLY_FIELD, wire.encode_reply(start))]
            await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": wire.encode_frame(event), "more_body": True})

    async def end(self) -> None:
        """End the reply: the app has returned."""
        if self._started:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class PrivateServer:
    """Serves ``app`` on ``listener``, on the event loop and with the protocol of a public server.

    It runs no lifespan, adds no ``Date`` and no ``Server``, writes no access log and
    believes no forwarding headers: the public server of the worker that received
    the request does all that. It keeps idle connections longer than a forwarder does.

    Args:
        app: what is served, without the router.
        listener: a listening Unix socket.
        path: the socket's path, removed when the server stops accepting.
    """

    def __init__(self, app: PrivateApp, listener: socket.socket, path: str) -> None:
        self.app = app
        self.path = path
        self.state = ServerState()
        self._listener = listener
        self._server: asyncio.Server | None = None

    async def start(self, public: Config, lifespan_state: dict[str, Any]) -> None:
        """Start accepting; ``lifespan_state`` is what the app's lifespan has made."""
        config = Config(
            self.app,
            http=_without_access_log(public.http_protocol_class),
            ws="none",
            lifespan="off",
            log_config=None,
            interface="asgi3",
            proxy_headers=False,
            root_path=public.root_path,
            backlog=public.backlog,
            timeout_keep_alive=KEEP_ALIVE * 3,
            h11_max_incomplete_event_size=2**24,
            reset_contextvars=public.reset_contextvars,
        )
        config.load()

        def protocol() -> asyncio.Protocol:
            made: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]  # uvicorn's protocols take these
                config=config, server_state=self.state, app_state=lifespan_state
            )
            return made

        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(protocol, sock=self._listener, backlog=config.backlog)

    def stop_accepting(self) -> None:
        """Close the socket and remove its file: who needs a new connection is told that the session is gone."""
        unlink(self.path)
        if self._server is None:
            self._listener.close()
        else:
            self._server.close()


def _without_access_log(protocol: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
    """Return a protocol class of uvicorn's that writes no access log.

    ``Config(access_log=False)`` would empty the process-wide logger (uvicorn 0.54).
    """

    class PrivateProtocol(protocol):  # type: ignore[valid-type, misc]  # a class known at run time only
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.access_log = False

    return PrivateProtocol
