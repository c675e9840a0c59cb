"""A worker that has loaded its app joins its siblings."""

from __future__ import annotations

from functools import partial

from gym_gunicorn.lifecycle.secret_check import secret_trouble
from gym_gunicorn.lifecycle.socket_directory import SocketDirectory
from gym_gunicorn.lifecycle.worker import RoutingWorker
from gym_gunicorn.metrics.endpoints import OperatorPaths, own_health
from gym_gunicorn.metrics.values import read_all
from gym_gunicorn.routing.routed_app import route
from gym_gunicorn.sessions.discovery import find_declaration
from gym_gunicorn.settings import Settings


def join(worker: RoutingWorker, owner_id: str, directory: SocketDirectory, settings: Settings) -> None:
    """Bind the private socket of a worker that has loaded its app, and put the router around the app.

    Where there is nothing to route by, the app is served as an ordinary worker serves it.

    Raises:
        OSError: the private socket can't be bound.
    """
    if not find_declaration(worker.wsgi).routed:
        if worker.announces:
            worker.log.info("The app says that it keeps no sessions: its requests are not routed")
        worker.be_unrouted()
        stay_unrouted(worker, settings)
        return
    worker.routed = route(
        worker.wsgi,
        owner_id=owner_id,
        directory=directory.path,
        settings=settings,
        backlog=worker.cfg.backlog,
        log=worker.log.error_log,
        figures=worker.figures,
    )
    if worker.routed is not None:
        worker.wsgi = worker.routed.app
        worker.log.info("This worker is owner %s", owner_id)
        _compare_secrets(worker, owner_id, directory)
        return
    worker.be_unrouted()
    stay_unrouted(worker, settings)
    if worker.announces:
        worker.log.warning(
            "Session routing found nothing to route by: the app has no SessionMiddleware that can be seen. "
            "Requests are served by whichever worker they reach. Add SessionMiddleware to the app, or set "
            "SessionRouting(secret_key=...) and add SessionStamp inside the app's own; or, for an app that "
            "keeps no state, SessionRouting(routing='off')."
        )


def stay_unrouted(worker: RoutingWorker, settings: Settings) -> None:
    """Have a worker that is not routed answer what does not depend on routing: balancers ask each server alike."""
    if settings.health_path is not None:
        health = partial(own_health, lambda: bool(worker.alive))
        worker.wsgi = OperatorPaths(worker.wsgi, {settings.health_path: health})


def _compare_secrets(worker: RoutingWorker, owner_id: str, directory: SocketDirectory) -> None:
    if worker.figures is None:
        return
    siblings, total = read_all(directory.path)
    others = siblings if total is None else [*siblings, total]
    error, note = secret_trouble(worker.figures.reading(owner_id), others)
    if error is not None:
        worker.log.error("%s", error)
    if note is not None and worker.announces:
        worker.log.warning("%s", note)
