"""``SessionRouting``: the configuration, whose methods are gunicorn's server hooks."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
from collections.abc import Sequence

from gunicorn.arbiter import Arbiter

from gym_gunicorn.lifecycle import arbiter_record
from gym_gunicorn.lifecycle.activation import join, stay_unrouted
from gym_gunicorn.lifecycle.arbiter import (
    check,
    each_second,
    keep_over_reloads,
    log_of,
    look_after,
    restore_directory,
    show_title,
    state_of,
    tell_statsd,
)
from gym_gunicorn.lifecycle.configuration import HOOKS, contained
from gym_gunicorn.lifecycle.socket_directory import DirectoryError, SocketDirectory, sweep
from gym_gunicorn.lifecycle.worker import RoutingWorker
from gym_gunicorn.metrics.totals import fold
from gym_gunicorn.owner import new_owner_id
from gym_gunicorn.placement import Policy
from gym_gunicorn.settings import Placed, Routing, SettingError, Settings, Way

# How an arbiter tells the one that it starts (SIGUSR2) which directory they share.
_INHERITED = "GYM_GUNICORN_DIRECTORY"


class SessionRouting:
    """Routes each session's requests to the worker that holds it.

    Make one in ``gunicorn.conf.py``, set ``worker_class`` to
    ``"gym_gunicorn.RoutingWorker"``, and give each of gunicorn's settings in ``HOOKS``
    the method of that name. A hook of your own calls ours.

    The arguments are the fields of ``gym_gunicorn.settings.Settings``.

    Raises:
        SettingError: a setting has a value that it can't have.
    """

    HOOKS = HOOKS

    def __init__(
        self,
        *,
        routing: Routing = Settings.routing,
        owner_key: str = Settings.owner_key,
        secret_key: str | None = Settings.secret_key,
        session_cookie: str = Settings.session_cookie,
        max_age: int | None = Settings.max_age,
        session_id_key: str | None = Settings.session_id_key,
        token_header: str | None = Settings.token_header,
        token_salt: str = Settings.token_salt,
        token_session_id_key: str = Settings.token_session_id_key,
        token_path: str = Settings.token_path,
        local_paths: Sequence[str] = Settings.local_paths,
        expire_lost_cookie: bool = Settings.expire_lost_cookie,
        placement: Placed | Policy = Settings.placement,
        placement_paths: Sequence[str] = Settings.placement_paths,
        forwarder: Way = Settings.forwarder,
        max_forwards: int = Settings.max_forwards,
        health_path: str | None = Settings.health_path,
        metrics_path: str | None = Settings.metrics_path,
        directory: str = Settings.directory,
    ) -> None:
        self.settings = Settings(
            routing=routing,
            owner_key=owner_key,
            secret_key=secret_key,
            session_cookie=session_cookie,
            max_age=max_age,
            session_id_key=session_id_key,
            token_header=token_header,
            token_salt=token_salt,
            token_session_id_key=token_session_id_key,
            token_path=token_path,
            local_paths=local_paths,
            expire_lost_cookie=expire_lost_cookie,
            placement=placement,
            placement_paths=placement_paths,
            forwarder=forwarder,
            max_forwards=max_forwards,
            health_path=health_path,
            metrics_path=metrics_path,
            directory=directory,
        )
        if metrics_path is not None and importlib.util.find_spec("prometheus_client") is None:
            raise SettingError(
                "SessionRouting(metrics_path=...) needs prometheus-client: pip install 'gym-gunicorn[metrics]'"
            )

    # In the arbiter

    def on_starting(self, server: Arbiter) -> None:
        """Check the configuration, and make the socket directory.

        Raises:
            ConfigurationError, DirectoryError: the server can't be started so.
        """
        check(server)
        inherited = os.environ.pop(_INHERITED, None)
        if inherited is not None and server.master_pid:
            try:
                directory = SocketDirectory.join(inherited)
                if directory.uid != server.cfg.uid:
                    directory.leave()
                    raise DirectoryError(f"{directory.path} is another user's, and this server changes the user")
                self._hold(server, directory)
            except DirectoryError as error:
                log_of(server).warning("Session routing: %s; the sessions of the old workers are gone.", error)
        self._prepare(server)
        state_of(server).routing = self
        keep_over_reloads(server)
        each_second(server, functools.partial(look_after, server))

    @contained
    def on_reload(self, server: Arbiter) -> None:
        state = state_of(server)
        state.routing = self
        state.announced = False
        state.reloads += 1
        self._renew(server, reloads=True)
        directory = state.directory
        if directory is not None:
            if self.settings.routing == "off":
                log_of(server).warning(
                    "Session routing is off now: sessions made before this reload start over wherever they land."
                )
            directory.give_to(server.cfg.uid, server.cfg.gid)
            return
        try:
            self._prepare(server)
        except DirectoryError as error:
            log_of(server).error("This server stays at one worker: %s", error)
            server.cfg.set("workers", 1)
            server.num_workers = 1

    @contained
    def nworkers_changed(self, server: Arbiter, new_value: int, old_value: int | None) -> None:
        started = old_value is not None and server.cfg.workers == 1
        if started and new_value > 1 and self.settings.routing != "off" and state_of(server).directory is None:
            log_of(server).warning(
                "This server started with one worker, whose sessions name no owner: another worker would lose them. "
                "It stays at one. Start it with two or more, or with SessionRouting(routing='always')."
            )
            server.num_workers = 1

    @contained
    def pre_fork(self, server: Arbiter, worker: RoutingWorker) -> None:
        state = state_of(server)
        try:
            self._renew(server)
        except DirectoryError as error:
            log_of(server).error("No worker can be added: %s", error)
            return
        worker.announces, state.announced = not state.announced, True
        # Alike in the workers that one arbiter has started with one configuration.
        worker.generation = server.pid << 24 | state.reloads & 0xFFFFFF
        worker.server_name = server.proc_name or worker.server_name
        if self._is_routed(server):
            worker.owner_id = new_owner_id()
            worker.directory = state.directory
            show_title(server)
        worker.prepared = True

    @contained
    def child_exit(self, server: Arbiter, worker: RoutingWorker) -> None:
        if worker.owner_id is not None and worker.directory is not None:
            with contextlib.suppress(DirectoryError):
                restore_directory(worker.directory, log_of(server))
            left = worker.directory.remove_socket(worker.owner_id)
            try:
                last = fold(worker.directory.descriptor, worker.owner_id)
            except OSError as error:
                last = None
                log_of(server).error("The figures of owner %s are not in the total: %s", worker.owner_id, error)
            # After a reload to another user the worker could not remove it itself.
            if left and worker.cfg.uid == worker.directory.uid:
                log_of(server).warning(
                    "Owner %s has died, worker (pid:%s): the %s sessions that it had stamped get 410",
                    worker.owner_id,
                    worker.pid,
                    "unknown" if last is None else last["stamped"],
                )

    @contained
    def pre_exec(self, server: Arbiter) -> None:
        directory = state_of(server).directory
        if directory is not None:
            server.cfg.env_orig[_INHERITED] = directory.inheritance()
        else:
            server.cfg.env_orig.pop(_INHERITED, None)
            if self.settings.routing != "off":
                log_of(server).warning(
                    "The new arbiter's workers will not hold the sessions of this server's worker, which name no owner."
                )

    @contained
    def on_exit(self, server: Arbiter) -> None:
        directory = state_of(server).directory
        if directory is not None:
            with contextlib.suppress(OSError):
                tell_statsd(server)
            arbiter_record.remove(directory.descriptor)
            alone = server.reexec_pid == 0 and server.master_pid == 0
            directory.leave(wait=1.0 if alone else 0.0, force=alone)

    # In the worker

    def post_worker_init(self, worker: RoutingWorker) -> None:
        """Bind the private socket, and put the router around the app."""
        if worker.owner_id is None or worker.directory is None:
            stay_unrouted(worker, self.settings)
            return
        try:
            join(worker, worker.owner_id, worker.directory, self.settings)
        except Exception:
            worker.log.exception("The private socket of worker %s can't be served", worker.owner_id)
            worker.leave_in_a_moment()

    @contained
    def worker_exit(self, server: Arbiter, worker: RoutingWorker) -> None:
        if worker.pid != os.getpid():
            # gunicorn's arbiter calls this for a worker that it did not find.
            self.child_exit(server, worker)
            return
        if worker.owner_id is None or worker.directory is None:
            return
        worker.directory.remove_socket(worker.owner_id)

    # Inside

    def _is_routed(self, server: Arbiter) -> bool:
        return self.settings.routing != "off" and state_of(server).directory is not None

    def _prepare(self, server: Arbiter) -> None:
        """Make the socket directory, where this server is to be routed and has none."""
        cfg, settings = server.cfg, self.settings
        if settings.routing == "off":
            return
        state = state_of(server)
        if state.directory is None and (settings.routing == "always" or cfg.workers > 1):
            sweep(settings.directory, {os.geteuid(), cfg.uid})
            self._hold(server, SocketDirectory.create(settings.directory, cfg.uid, cfg.gid))

    def _renew(self, server: Arbiter, reloads: bool = False) -> None:
        """Make the socket directory again where somebody has removed it, or else another one.

        Another one only where that parts no living workers from each other: where there are none, or
        where all of them are replaced.

        Raises:
            DirectoryError: it can't be made, and there are workers in it.
        """
        state = state_of(server)
        if state.directory is None:
            return
        try:
            restore_directory(state.directory, log_of(server))
        except DirectoryError as error:
            held = any(getattr(worker, "directory", None) is state.directory for worker in server.WORKERS.values())
            if held and not reloads:
                raise
            log_of(server).error("The sessions of the workers that there are now are lost: %s", error)
            # First, so that where it fails the server is not taken for one that never routed.
            made = SocketDirectory.create(self.settings.directory, server.cfg.uid, server.cfg.gid)
            state.directory.let_go()
            self._hold(server, made)

    def _hold(self, server: Arbiter, directory: SocketDirectory) -> None:
        state_of(server).directory = directory
        log_of(server).info(
            "Session routing: private sockets in %s. A session ends with its worker, so a reload and max_requests "
            "end those of the workers that they replace",
            directory.path,
        )
        # gunicorn calls on_exit only where it halts in good order (27.0: not when the port
        # is in use, a certificate is missing or two workers fail to boot). Workers inherit
        # this: whoever is last removes the directory, orphaned workers among them.
        atexit.register(directory.leave)
