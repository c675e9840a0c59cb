"""Cancels handlers whose caller has gone away."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class CancelOnDisconnect:
    """ASGI middleware that cancels a handler when its caller disconnects.

    A server tells a handler of a disconnect only when the handler reads; one that
    computes or waits goes on for nobody. Within this middleware the handler's task
    is cancelled instead, and cleans up in its ``finally`` blocks. A handler that has
    sent its whole response is left to finish.

    The middleware reads one event ahead of the handler and no more, so bodies are
    still streamed. A body announced by ``Expect: 100-continue`` is not asked for before
    the handler asks; until then a caller that leaves is not noticed. It costs a task a
    request. WebSockets pass unchanged: their handlers always read.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        events: asyncio.Queue[Message | Exception] = asyncio.Queue()
        asked = asyncio.Event()
        answered = False

        async def receive_event() -> Message:
            asked.set()
            event = await events.get()
            if isinstance(event, Exception):
                raise event
            if answered and event["type"] == "http.disconnect":
                # Who is left to finish may ask again, and is told again, as servers do.
                events.put_nowait(event)
            return event

        async def send_event(message: Message) -> None:
            nonlocal answered
            answered = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        async def watch(handler: asyncio.Timeout) -> None:
            if expects_continue(scope):
                await asked.wait()
            while True:
                try:
                    message = await receive()
                except Exception as error:
                    events.put_nowait(error)
                    return
                events.put_nowait(message)
                if message["type"] == "http.disconnect":
                    break
                if message.get("more_body", False):
                    await asked.wait()
                    asked.clear()
            if not answered:
                handler.reschedule(0)

        try:
            # A time limit that is never reached, but brought forward by a disconnect:
            # unlike Task.cancel() it can't be mistaken for a cancellation from outside.
            async with asyncio.timeout(None) as handler:
                watcher = asyncio.create_task(watch(handler))
                try:
                    await self.app(scope, receive_event, send_event)
                finally:
                    watcher.cancel()
        except TimeoutError:
            if not handler.expired():
                raise


def expects_continue(scope: Scope) -> bool:
    """Tell whether the caller waits for ``100 Continue`` before it sends the body (RFC 9110, section 10.1.1)."""
    return any(name == b"expect" and is_continue(value) for name, value in scope["headers"])


def is_continue(value: bytes) -> bool:
    """Tell whether the value of an ``Expect`` field is one."""
    return value.lower() == b"100-continue"
