"""Forwards over links: frames on pooled connections, one exchange at a time on each."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from starlette.types import Receive, Scope, Send

from gym_gunicorn.disconnect import CancelOnDisconnect
from gym_gunicorn.forwarding import wire
from gym_gunicorn.forwarding.eager import start
from gym_gunicorn.forwarding.errors import ForwardError, Truncated, describe
from gym_gunicorn.forwarding.forwarder import announced_body
from gym_gunicorn.forwarding.http.forwarder import AiohttpForwarder
from gym_gunicorn.forwarding.links.frames import BODY, END
from gym_gunicorn.forwarding.links.link import Link, NoLink
from gym_gunicorn.forwarding.links.peer import LinkPeer
from gym_gunicorn.forwarding.peer import Peers
from gym_gunicorn.forwarding.sockets import socket_path
from gym_gunicorn.forwarding.websocket import websocket_exchange
from gym_gunicorn.metrics.values import RECEIVED_BYTES, SENT_BYTES, Figures

# Seconds after which it is watched whether a caller whose whole request was sent is still
# there. Most replies come sooner, and a task for each would cost more than the rest of the way.
PATIENCE = 0.02

# Seconds in which a worker has to take a connection for a request that may go elsewhere.
REACH = 0.25


class FramedForwarder:
    """Forwards over links, and over HTTP to an owner that has none or others: another release's (SIGUSR2).

    The arguments are those of ``AiohttpForwarder``.
    """

    def __init__(self, directory: str, max_forwards: int, figures: Figures | None = None) -> None:
        self.figures = figures or Figures()
        self._directory = directory
        self._max_forwards = max_forwards
        self._peers = Peers(self._peer)
        self._patience = _Patience()
        self._http = AiohttpForwarder(directory, max_forwards, self.figures)
        self._without_links: set[str] = set()
        self._finished = 0

    @property
    def finished(self) -> int:
        return self._finished + self._http.finished

    async def http(self, owner_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        if owner_id in self._without_links:
            await self._http.http(owner_id, scope, receive, send)
            return
        try:
            peer = self._peers.get(owner_id)
            with peer.exchange:
                link = peer.idle()
                if link is not None:
                    await self._exchange(peer, link, scope, receive, send)
                else:
                    # Connecting may take as long as the owner is silent; a caller that leaves ends it.
                    await CancelOnDisconnect(partial(self._connect, peer))(scope, receive, send)
        finally:
            self._finished += 1

    async def websocket(self, owner_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        if owner_id not in self._without_links:
            try:
                peer = self._peers.get(owner_id)
                with peer.exchange:
                    await websocket_exchange(peer, scope, receive, send)
                return
            except NoLink:
                self._without_links.add(owner_id)
        await self._http.websocket(owner_id, scope, receive, send)

    async def reach(self, owner_id: str) -> bool:
        if owner_id in self._without_links:
            return await self._http.reach(owner_id)
        try:
            peer = self._peers.get(owner_id)
            if peer.has_room() and not peer.has_idle():
                async with asyncio.timeout(REACH):
                    peer.give_back(await peer.connect())
        except NoLink:
            self._without_links.add(owner_id)
            return await self._http.reach(owner_id)
        except (ForwardError, TimeoutError):
            return False
        return peer.has_room()

    async def close(self) -> None:
        await self._peers.close()
        self._patience.close()
        await self._http.close()

    def _peer(self, owner_id: str) -> LinkPeer:
        return LinkPeer(owner_id, socket_path(self._directory, owner_id), self._max_forwards, self.figures)

    async def _connect(self, peer: LinkPeer, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            link = await peer.connect()
        except NoLink:
            self._without_links.add(peer.owner_id)
            # Which counts it itself.
            self._finished -= 1
            await self._http.http(peer.owner_id, scope, receive, send)
        else:
            await self._exchange(peer, link, scope, receive, send)

    async def _exchange(self, peer: LinkPeer, link: Link, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic_ns()
        kind = BODY
        caller = _Caller(link, receive, self.figures, self._patience)
        try:
            try:
                has_body, is_awaited = announced_body(scope)
                link.begin(scope, has_body, is_awaited)
                caller.begin(has_body)
                link.flush()
                _, head = await link.next()
                reply, taken = wire.decode_reply(head)
            except (OSError, wire.WireError) as error:
                if caller.has_left:
                    return
                if caller.error is not None:
                    raise caller.error from None
                raise await peer.verdict(error) from error
            self.figures.added(max(0, time.monotonic_ns() - began - taken))
            await send(reply)
            # An owner asks for a body no more once it has replied, and reads what comes of it all the same.
            link.asked.set()
            while kind == BODY:
                try:
                    kind, piece = await link.next()
                except OSError as error:
                    if caller.has_left:
                        return
                    if caller.error is not None:
                        raise caller.error from None
                    raise Truncated(
                        peer.owner_id, f"the exchange broke after the reply began ({describe(error)})"
                    ) from error
                self.figures.values[RECEIVED_BYTES] += len(piece)
                caller.answered = kind != BODY
                await send({"type": "http.response.body", "body": piece, "more_body": kind == BODY})
        finally:
            caller.end()
            if caller.answered and caller.body_complete and kind == END:
                peer.give_back(link)
            else:
                peer.drop(link)


class _Patience:
    """Has each caller watched who waits for longer than ``PATIENCE``; one timer serves them all."""

    def __init__(self) -> None:
        # Since when each waits, the one that has waited longest first.
        self._since: dict[_Caller, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, caller: _Caller, loop: asyncio.AbstractEventLoop) -> None:
        self._since[caller] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(PATIENCE, self._look, loop)

    def discard(self, caller: _Caller) -> None:
        self._since.pop(caller, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        long_ago = loop.time() - PATIENCE
        for caller in [caller for caller, since in self._since.items() if since <= long_ago]:
            del self._since[caller]
            caller.watch()
        self._timer = loop.call_later(PATIENCE, self._look, loop) if self._since else None


class _Caller:
    """The caller's side of one exchange: its body, and whether it is still there."""

    def __init__(self, link: Link, receive: Receive, figures: Figures, patience: _Patience) -> None:
        self.has_left = False
        self.error: Exception | None = None
        self.answered = False
        self.body_complete = False
        self._link = link
        self._receive = receive
        self._figures = figures
        self._patience = patience
        self._task: asyncio.Task[None] | None = None

    def begin(self, has_body: bool) -> None:
        """Begin to send the body, where there is one, or else to watch in a moment."""
        if has_body:
            self._task = start(self._feed(), self._link.loop)
        else:
            self._complete()

    def watch(self) -> None:
        """Watch from now on whether the caller leaves."""
        self._task = self._link.loop.create_task(self._wait())

    def end(self) -> None:
        """Neither send nor watch any more."""
        self._patience.discard(self)
        if self._task is not None:
            self._task.cancel()

    def _complete(self) -> None:
        self.body_complete = True
        self._patience.add(self, self._link.loop)

    async def _feed(self) -> None:
        link = self._link
        try:
            if not link.asked.is_set():
                await link.asked.wait()
            while not self.body_complete:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    # Not an end of the body: the owner would take the part for the whole.
                    self._leave()
                    return
                more = message.get("more_body", False)
                body = message.get("body", b"")
                self._figures.values[SENT_BYTES] += len(body)
                if link.is_full():
                    await link.drain()
                link.write(BODY if more else END, body)
                if not more:
                    self._complete()
        except Exception as error:
            self._fail(error)

    async def _wait(self) -> None:
        try:
            while not self.answered:
                if (await self._receive())["type"] == "http.disconnect":
                    self._leave()
                    return
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End the exchange: reading from the caller has failed."""
        if not self.answered:
            self.error = error
            self._link.transport.abort()

    def _leave(self) -> None:
        if not self.answered:
            self.has_left = True
            self._link.transport.abort()
