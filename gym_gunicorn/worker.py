"""The gunicorn worker: uvicorn's, with its life cycle mended and room for routing."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any

from gunicorn.arbiter import Arbiter
from gunicorn.config import Config
from gunicorn.glogging import Logger
from starlette.types import ASGIApp
from uvicorn_worker import UvicornWorker

from gym_gunicorn.directory import SocketDirectory
from gym_gunicorn.routed import Routed
from gym_gunicorn.server import RoutedServer

_WITHOUT_HOOKS = (
    "the worker class gym_gunicorn.RoutingWorker needs the hooks of SessionRouting, and pre_fork is not in place: "
    "sessions would reach workers that do not hold them. Use `-c python:gym_gunicorn.conf`, begin the configuration "
    "with `from gym_gunicorn.conf import *`, or call SessionRouting's hooks from yours."
)


class RoutingWorker(UvicornWorker):  # type: ignore[misc]  # uvicorn-worker has no types
    """A worker that can be an owner.

    The hooks of ``SessionRouting`` fill in the attributes below: ``hooked``, ``owner_id``
    and ``directory`` before the fork, ``routed`` in the worker. Without an owner ID it
    serves its app as uvicorn's worker does, and stops as this one does.
    """

    hooked: bool = False
    owner_id: str | None = None
    directory: SocketDirectory | None = None
    announces: bool = False
    routed: Routed | None = None
    wsgi: ASGIApp

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hurry = False
        self._stopped_by = "told to"

    @classmethod
    def check_config(cls, cfg: Config, log: Logger) -> None:
        """Refuse to start without the hooks. gunicorn calls this at the start, not at a reload."""
        if cfg.settings["pre_fork"].get() is cfg.settings["pre_fork"].default:
            raise RuntimeError(_WITHOUT_HOOKS)

    def init_process(self) -> None:
        if not self.hooked:
            self.log.error(_WITHOUT_HOOKS)
            sys.exit(Arbiter.WORKER_BOOT_ERROR)
        super().init_process()

    def init_signals(self) -> None:
        super().init_signals()
        # `pkill -HUP` means the arbiter. Not SIG_IGN: programs that the app starts
        # would inherit it.
        signal.signal(signal.SIGHUP, _ignore)

    async def _serve(self) -> None:
        # From here on; before, while the app is being loaded, a signal ends the process.
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            signal.signal(signum, self._stop)
        self.config.app = self.wsgi
        server = RoutedServer(
            self.config,
            self.routed,
            must_stop=self._must_stop,
            must_hurry=lambda: self._hurry,
            graceful_timeout=self.cfg.graceful_timeout,
        )
        # The sockets themselves, not gunicorn's wrappers: uvloop (0.23) would close those
        # after the descriptor, which then may be another's.
        await server.serve(sockets=[wrapper.sock for wrapper in self.sockets])
        if not server.started:
            sys.exit(Arbiter.WORKER_BOOT_ERROR)

    def _end_by_itself(self) -> None:
        """See to it that this process ends though no arbiter kills it: a thread that blocks would hold it up."""

        def end(signum: int, frame: FrameType | None) -> None:
            self.log.error("Worker (pid:%s) did not end within graceful_timeout, and has no arbiter: ended", self.pid)
            if self.owner_id is not None and self.directory is not None:
                self.directory.remove_socket(self.owner_id)
                self.directory.leave()
            os._exit(1)

        signal.signal(signal.SIGALRM, end)
        signal.alarm(self.cfg.graceful_timeout + 1)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self.alive = False
        self._stopped_by = signal.Signals(signum).name
        self._hurry = self._hurry or signum != signal.SIGTERM

    def _must_stop(self) -> str | None:
        if not self.alive:
            return self._stopped_by
        if os.getppid() != self.ppid:
            self._end_by_itself()
            return f"the arbiter (pid {self.ppid}) is gone"
        return None


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Do nothing on a signal."""
