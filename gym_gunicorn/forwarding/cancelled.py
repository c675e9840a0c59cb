"""Answers requests that a stopping server has to cancel."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Receive, Scope, Send


class AnswerCancelled:
    """ASGI application that answers a request for ``app`` that is cancelled while the server stops.

    uvicorn would log a traceback for each, and answer 500.
    """

    def __init__(self, app: ASGIApp, answer: ASGIApp) -> None:
        self.app = app
        self.answer = answer
        self.stopping = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except asyncio.CancelledError:
            if not self.stopping:
                raise
            # Refused where the reply has begun; the server closes the connection then.
            with contextlib.suppress(RuntimeError):
                await self.answer(scope, receive, send)
