"""The quick-start app within plain ASGI middleware that knows nothing of Starlette."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import app as counter


class Branded:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_branded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-brand", b"ours")]}
            await send(message)

        await self.app(scope, receive, send_branded)


app = Branded(Branded(counter))
