"""One owner as another worker sees it: how much is under way to it, and whether its process lives."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Generic, TypeVar

from gym_gunicorn.forwarding.errors import Broken, Busy, ForwardError, Gone, describe
from gym_gunicorn.forwarding.sockets import listener_process

# Seconds. The private server keeps idle connections longer than this, so that it is
# always the forwarding side that closes them, and no request meets a closed one.
KEEP_ALIVE = 30

# Seconds. The kernel ends a process piece by piece: a connection can break a moment
# before the process counts as dead. Also how long an exchange with a dead owner may
# go on, unless its caller takes slowly what the owner had sent: a child that was forked
# past Python's hooks may hold the connection open for ever.
DEATH = 0.5


class Peer:
    """The worker ``owner_id``, which listens at ``path``. Subclasses connect to it.

    Must be made within a running event loop.

    Args:
        max_forwards: how many exchanges may be in flight at once.

    Raises:
        Gone, Busy, OSError: as ``gym_gunicorn.forwarding.sockets.listener_process``.
    """

    def __init__(self, owner_id: str, path: str, max_forwards: int) -> None:
        self.owner_id = owner_id
        self.path = path
        self.ended = asyncio.Event()
        self.in_flight = 0
        self.exchange = _InFlight(self)
        self.max_forwards = max_forwards
        self._pidfd = listener_process(owner_id, path)
        if self._pidfd is not None:
            asyncio.get_running_loop().add_reader(self._pidfd, self._stop_watching)
        self.retired = False

    def has_room(self) -> bool:
        """Tell whether the owner lives and one more exchange may begin."""
        return self.in_flight < self.max_forwards and not self.ended.is_set()

    async def verdict(self, error: Exception) -> ForwardError:
        """Say what it means for the session that an exchange failed before the reply began."""
        try:
            pidfd = listener_process(self.owner_id, self.path)
            if pidfd is not None:
                os.close(pidfd)
            async with asyncio.timeout(DEATH):
                await self.ended.wait()
        except Gone as gone:
            # Not that error itself: of this request something may have been sent.
            return Gone(gone.owner_id, gone.cause)
        except (TimeoutError, Busy, OSError):
            return Broken(self.owner_id, f"the exchange broke before the reply ({describe(error)})")
        return Gone(self.owner_id, "its process died before it replied")

    def is_unwatched(self) -> bool:
        """Tell whether nothing but a failed exchange will tell of the owner's death."""
        return self._pidfd is None

    def drop_read(self) -> bool:
        """Close the connections by which nothing more comes from an owner that has ended; tell whether any is left."""
        return False

    async def close(self) -> None:
        """Close all connections, whoever uses them."""
        self._stop_watching()

    def _stop_watching(self) -> None:
        self.ended.set()
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None


class _InFlight:
    """Counts one exchange in flight, as a context manager.

    Raises:
        Busy: as many are in flight as may be.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def __enter__(self) -> None:
        peer = self._peer
        if peer.in_flight >= peer.max_forwards:
            raise Busy(peer.owner_id, f"{peer.in_flight} forwards to it are in flight")
        peer.in_flight += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> None:
        peer = self._peer
        peer.in_flight -= 1
        if isinstance(error, Gone):
            # Where no pidfd tells of the death, this is the only news of it.
            peer.retired = peer.is_unwatched()
        if peer.retired and not peer.in_flight:
            peer.ended.set()


P = TypeVar("P", bound=Peer)


class Peers(Generic[P]):
    """All owners that this worker has forwarded to.

    What leads to an owner is made by ``make`` with the first request for it and closed when
    its process has ended, so that a gone owner leaves nothing behind.
    """

    def __init__(self, make: Callable[[str], P]) -> None:
        self._make = make
        self._peers: dict[str, P] = {}
        self._watchers: set[asyncio.Task[None]] = set()

    def get(self, owner_id: str) -> P:
        """Return what leads to the worker ``owner_id``.

        Raises:
            Gone, Busy, Broken: nothing does.
        """
        peer = self._peers.get(owner_id)
        if peer is None:
            try:
                peer = self._make(owner_id)
            except OSError as error:
                raise Broken(owner_id, f"its socket can't be connected to ({describe(error)})") from error
            self._peers[owner_id] = peer
            watcher = asyncio.create_task(self._watch(peer))
            self._watchers.add(watcher)
            watcher.add_done_callback(self._watchers.discard)
        return peer

    @property
    def in_flight(self) -> int:
        """How many exchanges are in flight."""
        return sum(peer.in_flight for peer in self._peers.values())

    async def close(self) -> None:
        """Close all connections, whoever uses them."""
        watchers = list(self._watchers)
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)

    async def _watch(self, peer: P) -> None:
        """Wait for the end of the owner's process, then close what leads to it."""
        try:
            await peer.ended.wait()
            self._peers.pop(peer.owner_id, None)
            await asyncio.sleep(DEATH)
            # A caller may take slowly what the owner had sent before it ended.
            while peer.drop_read():  # noqa: ASYNC110  # no event tells of it
                await asyncio.sleep(DEATH)
        finally:
            await peer.close()
