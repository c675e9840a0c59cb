"""The contract of what passes a request to its owner and streams the reply back."""

from __future__ import annotations

from typing import Protocol

from starlette.types import Receive, Scope, Send

from gym_gunicorn.disconnect import is_continue


class Forwarder(Protocol):
    """A way to other workers. A leaner one can take the place of aiohttp's.

    ``finished`` counts the HTTP exchanges that have ended, however they ended.
    """

    @property
    def finished(self) -> int: ...

    async def http(self, owner_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Have an HTTP request answered by the worker ``owner_id``.

        Returns when the reply is complete, or when the caller has left.

        Raises:
            Gone, Busy, Broken: nothing has been sent to the caller.
            Truncated: the reply began, and can't be completed.
        """
        ...

    async def websocket(self, owner_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Have a WebSocket handled by the worker ``owner_id``. Raises as ``http`` does."""
        ...

    async def reach(self, owner_id: str) -> bool:
        """Tell whether the worker ``owner_id`` can be had at once for one more HTTP exchange.

        Nothing is sent. The next call of ``http`` may come without waiting in between.
        """
        ...

    async def close(self) -> None:
        """Close all connections, whoever uses them."""
        ...


def announced_body(scope: Scope) -> tuple[bool, bool]:
    """Tell whether a request has a body, and whether it is only to be sent when it is asked for.

    A caller who expects ``100 Continue`` may announce none; the owner meets or ignores that.
    """
    announced = False
    for name, value in scope["headers"]:
        if name == b"expect" and is_continue(value):
            return True, True
        announced = announced or name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0")
    return announced, False
