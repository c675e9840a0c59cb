"""Forwards over HTTP with aiohttp, on kept connections."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial

import aiohttp
from starlette.types import Message, Receive, Scope, Send

from gym_gunicorn.disconnect import CancelOnDisconnect
from gym_gunicorn.forwarding import wire
from gym_gunicorn.forwarding.errors import ForwardError, Truncated, describe
from gym_gunicorn.forwarding.forwarder import announced_body
from gym_gunicorn.forwarding.http.peer import HttpPeer, reply_head
from gym_gunicorn.forwarding.peer import Peers
from gym_gunicorn.forwarding.sockets import socket_path
from gym_gunicorn.forwarding.websocket import websocket_exchange
from gym_gunicorn.metrics.values import RECEIVED_BYTES, SENT_BYTES, Figures


class CallerLeft(Exception):
    """The caller disconnected before its request was complete."""


class AiohttpForwarder:
    """Forwards over HTTP with aiohttp, on kept connections.

    Args:
        directory: the socket directory.
        max_forwards: how many exchanges may be in flight to one owner at once.
        figures: where it counts.
    """

    def __init__(self, directory: str, max_forwards: int, figures: Figures | None = None) -> None:
        self.finished = 0
        self.figures = figures or Figures()
        self._directory = directory
        self._max_forwards = max_forwards
        self._peers = Peers(self._peer)

    async def http(self, owner_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            peer = self._peers.get(owner_id)
            with peer.exchange:
                await CancelOnDisconnect(partial(self._exchange, peer))(scope, receive, send)
        finally:
            self.finished += 1

    async def websocket(self, owner_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        peer = self._peers.get(owner_id)
        with peer.exchange:
            await websocket_exchange(peer, scope, receive, send)

    async def reach(self, owner_id: str) -> bool:
        try:
            return self._peers.get(owner_id).has_room()
        except ForwardError:
            return False

    async def close(self) -> None:
        await self._peers.close()

    def _peer(self, owner_id: str) -> HttpPeer:
        return HttpPeer(owner_id, socket_path(self._directory, owner_id), self._max_forwards, self.figures)

    async def _exchange(self, peer: HttpPeer, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic_ns()
        figures = self.figures
        body = _body(receive, figures) if announced_body(scope)[0] else None
        response: aiohttp.ClientResponse | None = None
        try:
            try:
                response = await peer.request(scope, body)
                reply, taken = _reply(response)
            except (aiohttp.ClientError, OSError, wire.WireError) as error:
                if _caused_by_caller(error):
                    return
                raise await peer.verdict(error) from error
            figures.added(max(0, time.monotonic_ns() - began - taken))
            await send(reply)
            more_body = True
            while more_body:
                try:
                    chunk = await response.content.readany()
                except (aiohttp.ClientError, OSError) as error:
                    if _caused_by_caller(error):
                        return
                    raise Truncated(
                        peer.owner_id, f"the exchange broke after the reply began ({describe(error)})"
                    ) from error
                more_body = not response.content.at_eof()
                figures.values[RECEIVED_BYTES] += len(chunk)
                await send({"type": "http.response.body", "body": chunk, "more_body": more_body})
        finally:
            if response is not None:
                # A complete reply has given its connection back; any other's is of no more use.
                response.close()


async def _body(receive: Receive, figures: Figures) -> AsyncIterator[bytes]:
    # aiohttp (3.14) holds the head back until the first piece of the body; the owner may
    # answer before there is one.
    yield b""
    more_body = True
    while more_body:
        message = await receive()
        if message["type"] == "http.disconnect":
            # Not a return: aiohttp would end the body, and the owner would take the
            # part for the whole.
            raise CallerLeft
        more_body = message.get("more_body", False)
        if message.get("body"):
            figures.values[SENT_BYTES] += len(message["body"])
            yield message["body"]


def _caused_by_caller(error: BaseException) -> bool:
    return isinstance(error.__cause__, CallerLeft)


def _reply(response: aiohttp.ClientResponse) -> tuple[Message, int]:
    """Return the reply's ``http.response.start`` event, and how many nanoseconds the owner took for it.

    Raises:
        WireError: the owner speaks another version.
    """
    head = reply_head(response)
    if head is not None:
        return wire.decode_reply(head)
    # The owner's server answers by itself where the app raised: as it is.
    headers = [(name.lower(), value) for name, value in response.raw_headers]
    return {"type": "http.response.start", "status": response.status, "headers": headers}, 0
