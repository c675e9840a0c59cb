"""gunicorn's configuration for those who want the defaults.

``gunicorn -c python:gym_gunicorn.conf app:app``, or, in a file of your own,
``from gym_gunicorn.conf import *``.
"""

from __future__ import annotations

import os

from gym_gunicorn.routing import SessionRouting

__all__ = ["worker_class", "workers", *SessionRouting.HOOKS]

routing = SessionRouting()

worker_class = "gym_gunicorn.RoutingWorker"
workers = int(os.environ.get("WEB_CONCURRENCY", 4))

on_starting = routing.on_starting
on_reload = routing.on_reload
nworkers_changed = routing.nworkers_changed
pre_fork = routing.pre_fork
post_worker_init = routing.post_worker_init
worker_exit = routing.worker_exit
child_exit = routing.child_exit
pre_exec = routing.pre_exec
on_exit = routing.on_exit
