"""The life of a worker's server: what uvicorn's does, made to end as gunicorn expects.

Everything that overrides uvicorn's server stands here (seen on uvicorn 0.54).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from uvicorn.config import Config
from uvicorn.server import Server, ServerState

from gym_gunicorn.forwarding.sockets import is_readable
from gym_gunicorn.lifecycle.write_coalescing import in_one_write
from gym_gunicorn.metrics.values import STAMPED
from gym_gunicorn.routing.balancer import FRESH
from gym_gunicorn.routing.routed_app import Routed

log = logging.getLogger("uvicorn.error")

# Seconds. A connection that has not had its first request may still have it, and one
# that is kept alive may have one more: a caller must never find it closed under a
# request that is on its way.
FIRST_REQUEST = 2.0
LINGER = 1.0

# Seconds that a server has which is told to stop quickly (SIGQUIT, SIGINT).
QUICK = 0.5

# Seconds between two looks of uvicorn's at what is to be done (uvicorn 0.54).
TICK = 0.1

# Seconds for which a stopping worker answers at least what siblings send, who may not know of the stop yet.
SETTLE = 3 * FRESH

# Seconds between two looks of a stopping server at what is still in progress.
LOOK = 0.05

_CLOSE = (b"connection", b"close")


class RoutedServer(Server):
    """A uvicorn server with a private server beside it, and a stop of its own.

    Args:
        config: of the public server.
        routed: what a routed worker has more, or ``None``.
        must_stop: asked ten times a second: why the server is to stop, or ``None``.
        must_hurry: asked while the server stops: whether to stop quickly.
        graceful_timeout: seconds after which the arbiter kills a worker that stops.
        each_second: awaited about once a second while the server serves, and while it stops.
    """

    def __init__(
        self,
        config: Config,
        routed: Routed | None,
        must_stop: Callable[[], str | None],
        must_hurry: Callable[[], bool],
        graceful_timeout: float,
        each_second: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(config)
        self.routed = routed
        self._must_stop = must_stop
        self._must_hurry = must_hurry
        self._each_second = each_second
        # The one reason that uvicorn itself has.
        self._reason = "max_requests"
        # A margin for the cancelled to clean up, and for the app's own shutdown.
        self._margin = min(1.0, graceful_timeout / 2)
        self._drain_time = graceful_timeout - self._margin

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the worker.

        uvicorn's own puts its handlers in the place of the worker's, and raises each signal
        again after serving: under the default action the process would die before
        gunicorn's ``worker_exit``.
        """
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.routed is not None:
            self.config.http_protocol_class = in_one_write(self.config.http_protocol_class)
        await super().startup(sockets)
        if self.started and self.routed is not None:
            await self.routed.private.start(self.config, self.lifespan.state)
            self.routed.figures.serve()

    async def on_tick(self, counter: int) -> bool:
        if self.routed is not None:
            self.routed.figures.beat(TICK)
            # A request counts towards max_requests where it is handled.
            self.server_state.total_requests += self.routed.moved_requests()
        # uvicorn tells gunicorn that the worker lives by the wall clock: one that was set
        # back would have it killed as hung. So it does at each look, once a second.
        self.last_notified = 0.0
        if counter % 10 == 0 and self._each_second is not None:
            await self._each_second()
        reason = self._must_stop()
        if reason is not None and not self.should_exit:
            log.info("Stopping: %s", reason)
            self._reason = reason
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("Shutting down")
        # Stock workers notify gunicorn from their main loop only: one that drains for
        # longer than `timeout` would be killed as hung.
        heartbeat = asyncio.create_task(self._keep_notifying())
        try:
            for server in self.servers:
                server.close()
            if self.routed is not None:
                log.info(
                    "Owner %s stops (%s): the %s sessions that it had stamped get 410",
                    self.routed.owner_id,
                    self._reason,
                    self.routed.figures.values[STAMPED],
                )
                await self.routed.begin_stop()
            if not await self._drain():
                await self._cancel()
            for state in self._states():
                for connection in list(state.connections):
                    connection.transport.close()
            if self.routed is not None:
                await self.routed.forwarder.close()
            await self.lifespan.shutdown()
        finally:
            heartbeat.cancel()
            await asyncio.gather(heartbeat, return_exceptions=True)

    def _states(self) -> list[ServerState]:
        states = [self.server_state]
        if self.routed is not None:
            states.append(self.routed.private.state)
        return states

    async def _keep_notifying(self) -> None:
        while True:
            if self.config.callback_notify is not None:
                await self.config.callback_notify()
            if self.routed is not None:
                self.routed.figures.beat(1.0)
            if self._each_second is not None:
                await self._each_second()
            await asyncio.sleep(min(1.0, self.config.timeout_notify) or 1.0)

    async def _drain(self) -> bool:
        """Let what is in flight finish; return whether all of it did in time."""
        for state in self._states():
            # Given to each request that begins from now on: its reply says that the
            # connection closes, and uvicorn then closes it.
            state.default_headers = [*state.default_headers, _CLOSE]
        loop = asyncio.get_running_loop()
        started = loop.time()
        idle_since: dict[Any, float] = {}
        while True:
            now = loop.time()
            if self.routed is not None:
                self.routed.figures.beat(LOOK)
            hurry = self._must_hurry()
            if now - started > (min(QUICK, self._drain_time) if hurry else self._drain_time):
                return False
            for connection in list(self.server_state.connections):
                _release(connection, idle_since, now, 0.0 if hurry else 1.0)
            # Siblings' connections wait for the callers' own; what reaches this worker
            # over them is answered until then.
            settled = hurry or self.routed is None or now - started > SETTLE
            if settled and not self.server_state.connections and not any(map(_is_busy, self._states())):
                return True
            await asyncio.sleep(LOOK)

    async def _cancel(self) -> None:
        tasks = [task for state in self._states() for task in state.tasks]
        log.error("Cancelling %s request(s) that did not finish in time", len(tasks))
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self._margin / 2)


def _is_busy(state: ServerState) -> bool:
    """Tell whether a request is being handled, or a reply still has to be sent."""
    return bool(state.tasks) or any(connection.transport.get_write_buffer_size() for connection in state.connections)


def _release(connection: Any, idle_since: dict[Any, float], now: float, patience: float) -> None:
    """Close a connection as soon as no request can be on its way over it any more."""
    if not hasattr(connection, "cycle"):
        # A WebSocket: closed with code 1012 at once.
        if idle_since.setdefault(connection, now) == now:
            connection.shutdown()
        return
    cycle = connection.cycle
    if cycle is not None and not cycle.response_complete:
        idle_since.pop(connection, None)
        if not cycle.response_started:
            cycle.keep_alive = False
        return
    wait = FIRST_REQUEST if cycle is None else LINGER
    if now - idle_since.setdefault(connection, now) >= wait * patience and not _has_input(connection.transport):
        connection.shutdown()


def _has_input(transport: asyncio.Transport) -> bool:
    """Tell whether something has come over a connection that was not read yet: a request, most likely."""
    sock = transport.get_extra_info("socket")
    return sock is not None and sock.fileno() >= 0 and is_readable(sock.fileno())
