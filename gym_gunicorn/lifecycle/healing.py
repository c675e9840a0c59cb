"""Puts back what somebody has removed from under a running worker: its socket, its figures, their directory."""

from __future__ import annotations

import time
from logging import Logger

from gym_gunicorn.forwarding.private.server import PrivateServer
from gym_gunicorn.lifecycle.socket_directory import DirectoryError, SocketDirectory
from gym_gunicorn.metrics.values import Figures


class Healing:
    """Looks, about once a second, whether siblings still find this worker.

    While they don't, they answer its sessions' requests with 410.

    Args:
        backlog: how many connections may wait at the private socket.
    """

    _INTERVAL = 10.0

    def __init__(
        self, directory: SocketDirectory, private: PrivateServer, figures: Figures, backlog: int, log: Logger
    ) -> None:
        self._directory = directory
        self._private = private
        self._figures = figures
        self._backlog = backlog
        self._log = log
        self._complained = -self._INTERVAL

    async def look(self) -> None:
        """Restore what is missing. What can't be restored is logged, once in ten seconds."""
        try:
            self._directory.restore()
            if await self._private.restore(self._backlog):
                self._log.warning(
                    "The private socket of this worker had been removed or replaced, and is there again: %s",
                    self._private.path,
                )
            self._figures.restore()
        except (DirectoryError, OSError) as error:
            now = time.monotonic()
            if now - self._complained >= self._INTERVAL:
                self._complained = now
                self._log.error("Other workers can't reach this one, and answer its sessions with 410: %s", error)
