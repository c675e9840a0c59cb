"""The gunicorn worker: uvicorn's, with its life cycle mended and room for routing."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from types import FrameType
from typing import Any, NoReturn

from gunicorn.arbiter import Arbiter
from gunicorn.config import Config
from gunicorn.glogging import Logger
from starlette.types import ASGIApp
from uvicorn.protocols.websockets.auto import AutoWebSocketsProtocol
from uvicorn_worker import UvicornWorker

from gym_gunicorn.forwarding.sockets import unlink
from gym_gunicorn.lifecycle.after_fork import letting_go
from gym_gunicorn.lifecycle.configuration import ConfigurationError, check_hooks
from gym_gunicorn.lifecycle.healing import Healing
from gym_gunicorn.lifecycle.public_server import RoutedServer
from gym_gunicorn.lifecycle.socket_directory import SocketDirectory
from gym_gunicorn.metrics.titles import plain_title, show, worker_title
from gym_gunicorn.metrics.values import GENERATION, SERVING, STATE, Figures, figures_path
from gym_gunicorn.routing.routed_app import Routed


class RoutingWorker(UvicornWorker):  # type: ignore[misc]  # uvicorn-worker has no types
    """A worker that can be an owner.

    The hooks of ``SessionRouting`` fill in the attributes below: ``routed`` in the worker,
    the others before the fork. Without an owner ID it serves its app as uvicorn's worker
    does, and stops as this one does.
    """

    prepared: bool = False
    owner_id: str | None = None
    directory: SocketDirectory | None = None
    server_name: str = "gunicorn"
    generation: int = 0
    announces: bool = False
    figures: Figures | None = None
    routed: Routed | None = None
    wsgi: ASGIApp

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hurry = False
        self._stopped_by = "told to"
        self._healing: Healing | None = None

    @classmethod
    def check_config(cls, cfg: Config, log: Logger) -> None:
        """Refuse to start without the hooks. gunicorn calls this at the start, not at a reload."""
        check_hooks(cfg)

    def init_process(self) -> None:
        # What the arbiter has loaded (with preload_app the app, too) lies in memory that all workers
        # share, until a full garbage collection writes to every object that it looks at.
        gc.freeze()
        try:
            check_hooks(self.cfg)
        except ConfigurationError as error:
            self.log.error("%s", error)
            sys.exit(Arbiter.WORKER_BOOT_ERROR)
        if not self.prepared:
            self.log.error("This worker was not prepared, for the reason above: another one will be started")
            self.leave_in_a_moment()
        super().init_process()

    def leave_in_a_moment(self) -> NoReturn:
        """End this process so that the arbiter starts another one, though not at full speed.

        Its exit status is not that of a failed boot, on which gunicorn would halt the whole
        server.
        """
        time.sleep(1)
        sys.exit(1)

    def init_signals(self) -> None:
        super().init_signals()
        # `pkill -HUP` means the arbiter. Not SIG_IGN: programs that the app starts
        # would inherit it.
        signal.signal(signal.SIGHUP, _ignore)

    def load_wsgi(self) -> None:
        # Whose user it is to be, this process is by now.
        if self.owner_id is not None and self.directory is not None:
            # A child that the app forks, also while it is loaded, may outlive this worker, and must not pass for it.
            os.register_at_fork(after_in_child=self.directory.let_go)
            listeners = [wrapper.sock for wrapper in self.sockets]
            os.register_at_fork(after_in_child=letting_go(listeners, self.directory.path))
            try:
                self.figures = Figures(figures_path(self.directory.path, self.owner_id))
            except OSError as error:
                self.log.error("This worker counts for itself alone, since its figures can't be written: %s", error)
                self.figures = Figures()
            self.figures.values[GENERATION] = self.generation
            self._show_title()
        super().load_wsgi()

    def be_unrouted(self) -> None:
        """Serve the app as an ordinary worker does."""
        if self.figures is not None and self.figures.path is not None:
            unlink(self.figures.path)
            self.figures = None
            show(plain_title(self.server_name))

    def _show_title(self) -> None:
        if self.figures is not None and self.owner_id is not None:
            show(worker_title(self.server_name, self.figures.reading(self.owner_id)))

    async def _each_second(self) -> None:
        # While it stops, its socket is to be gone.
        if self._healing is not None and self.figures is not None and self.figures.values[STATE] == SERVING:
            await self._healing.look()
        self._show_title()

    async def _serve(self) -> None:
        # From here on; before, while the app is being loaded, a signal ends the process.
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            signal.signal(signum, self._stop)
        if self.announces and self.config.ws == "auto" and AutoWebSocketsProtocol is None:
            self.log.info(
                "WebSockets can't be served: neither websockets nor wsproto is installed. "
                "pip install 'gym-gunicorn[websockets]' brings one"
            )
        self.config.app = self.wsgi
        if self.routed is not None and self.directory is not None and self.figures is not None:
            self._healing = Healing(
                self.directory, self.routed.private, self.figures, self.cfg.backlog, self.log.error_log
            )
        server = RoutedServer(
            self.config,
            self.routed,
            must_stop=self._must_stop,
            must_hurry=lambda: self._hurry,
            graceful_timeout=self.cfg.graceful_timeout,
            each_second=self._each_second,
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
