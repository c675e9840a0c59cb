"""gunicorn's arbiter: what hangs on it, and what its configuration must hold, at the start and after reloads."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter
from gunicorn.glogging import Logger
from gunicorn.instrument.statsd import Statsd

from gym_gunicorn.lifecycle import arbiter_record
from gym_gunicorn.lifecycle.configuration import ConfigurationError, check_hooks, missing_hooks
from gym_gunicorn.lifecycle.socket_directory import DirectoryError, SocketDirectory
from gym_gunicorn.lifecycle.worker import RoutingWorker
from gym_gunicorn.metrics.statsd import report
from gym_gunicorn.metrics.titles import master_title, show
from gym_gunicorn.metrics.totals import keep, tell
from gym_gunicorn.metrics.values import Reading, read_all, sums
from gym_gunicorn.settings import Settings

if TYPE_CHECKING:
    from gym_gunicorn.lifecycle.hooks import SessionRouting


VERSION = importlib.metadata.version("gym-gunicorn")


@dataclass
class State:
    """What outlives a reload, which makes a new ``SessionRouting``.

    ``routing`` is the one in force. ``directory`` is there as soon as the server has
    been routed. ``announced``: a worker has been told to say what it found. ``reloads``
    counts them. ``about`` is what the arbiter has last said of itself in the directory,
    ``total`` the figures of the workers that have ended, ``told`` the sums that statsd knows.
    """

    routing: SessionRouting | None = None
    directory: SocketDirectory | None = None
    announced: bool = False
    reloads: int = 0
    total: Reading | None = None
    told: dict[str, int] = field(default_factory=dict)
    arbiter_record: dict[str, object] | None = None


def state_of(server: Arbiter) -> State:
    """Return the state that hangs on the arbiter."""
    state: State | None = getattr(server, "session_routing", None)
    if state is None:
        state = State()
        setattr(server, "session_routing", state)  # noqa: B010  # gunicorn's types do not know it
    return state


def log_of(server: Arbiter) -> Logger:
    """Return the arbiter's log, which it has as soon as it calls hooks."""
    assert server.log is not None
    return server.log


def check(server: Arbiter) -> None:
    """Verify that the hooks are in place, and the worker class.

    Raises:
        ConfigurationError: one is not.
    """
    check_hooks(server.cfg)
    if not issubclass(server.worker_class, RoutingWorker):
        raise ConfigurationError(
            f"session routing needs the worker class gym_gunicorn.RoutingWorker or one derived from it, "
            f"and worker_class is {server.cfg.worker_class_str!r}. Set worker_class, and leave out -k."
        )


def each_second(server: Arbiter, look: Callable[[], None]) -> None:
    """Have ``look`` called about once a second, whenever the arbiter looks after its workers.

    gunicorn (27.0) has no hook for this; looking for hung workers is the one thing that it
    does each time round its loop, and nowhere else.
    """
    murder_workers = server.murder_workers

    def murder_workers_and_look() -> None:
        murder_workers()
        look()

    server.murder_workers = murder_workers_and_look  # type: ignore[method-assign]


def look_after(server: Arbiter) -> None:
    """Do what an arbiter does about once a second, for its socket directory, its title, and what it says of itself."""
    state = state_of(server)
    directory = state.directory
    if directory is None:
        return
    # What can't be restored or written, workers and the next fork say.
    with contextlib.suppress(DirectoryError):
        if restore_directory(directory, log_of(server)):
            state.arbiter_record = None
    show_title(server)
    with contextlib.suppress(OSError):
        _say_what_this_is(server, state, directory)
        _, total = read_all(directory.path)
        if total is not None:
            state.total = total
        elif state.total is not None:
            keep(directory.descriptor, state.total)
        tell_statsd(server)


def show_title(server: Arbiter) -> None:
    """Make the arbiter's title what it is to be; gunicorn (27.0) writes its own at the start and at each reload."""
    directory = state_of(server).directory
    if directory is not None:
        show(master_title(server.proc_name or "gunicorn", len(server.WORKERS), directory.path))


def tell_statsd(server: Arbiter) -> None:
    """Tell statsd, where gunicorn has one, what has changed.

    Raises:
        OSError: it can't be noted what was told.
    """
    state = state_of(server)
    if state.directory is None or not isinstance(server.log, Statsd):
        return
    workers, total = read_all(state.directory.path)
    now = sums(workers, total)
    before = tell(state.directory.descriptor, now, state.told)
    report(server.log, now, before, workers)
    state.told = {name: max(before.get(name, 0), count) for name, count in now.items()}


def _say_what_this_is(server: Arbiter, state: State, directory: SocketDirectory) -> None:
    facts: dict[str, object] = {
        "pid": server.pid,
        "start": arbiter_record.start_of(server.pid),
        "name": server.proc_name,
        "addresses": [str(listener) for listener in server.LISTENERS],
        "workers": server.num_workers,
        "reloads": state.reloads,
        "placement": None if state.routing is None else placement_name(state.routing.settings),
        "version": VERSION,
    }
    if facts != state.arbiter_record:
        arbiter_record.write(directory.descriptor, facts)
        state.arbiter_record = facts


def placement_name(settings: Settings) -> str:
    """Return "local", "balanced", or "own" for a policy of the user's."""
    return "own" if callable(settings.placement) else settings.placement


def restore_directory(directory: SocketDirectory, log: Logger) -> bool:
    """Make the socket directory again where somebody has removed it, and say so; return whether it was missing.

    Raises:
        DirectoryError: it can't be made.
    """
    missing = directory.restore()
    if missing:
        log.warning(
            "The socket directory %s had been removed, and is there again; its workers bind their sockets anew",
            directory.path,
        )
    return missing


def keep_over_reloads(server: Arbiter) -> None:
    """See to it that no reload takes routing away without a word.

    gunicorn (27.0) runs no hook of the old configuration once it has read a new one: one
    without our hooks, or with another worker class, would have sessions start over
    silently. What it lacks is put back, and an error says so.
    """
    setup = server.setup

    def setup_and_keep(app: BaseApplication) -> None:
        setup(app)
        routing = state_of(server).routing
        if routing is None:
            return
        lost = missing_hooks(server.cfg)
        for name in lost:
            server.cfg.set(name, getattr(routing, name))
        if not issubclass(server.worker_class, RoutingWorker):
            lost.append("worker_class")
            server.cfg.set("worker_class", "gym_gunicorn.RoutingWorker")
            server.worker_class = server.cfg.worker_class
        if lost:
            log_of(server).error(
                "The configuration that was read again lacks what session routing needs: %s. It stays as it was, "
                "since sessions would be lost without a word. To be without it, restart the server, or set "
                "SessionRouting(routing='off').",
                ", ".join(lost),
            )

    server.setup = setup_and_keep  # type: ignore[method-assign]
