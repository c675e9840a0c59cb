"""gunicorn's configuration for those who want the defaults.

``gunicorn -c python:gym_gunicorn.conf app:app``, or, in a file of your own,
``from gym_gunicorn.conf import *``.
"""

from __future__ import annotations

import os

from gym_gunicorn.lifecycle.hooks import SessionRouting

__all__ = ["worker_class", "workers", *SessionRouting.HOOKS]

routing = SessionRouting()

worker_class = "gym_gunicorn.RoutingWorker"
workers = int(os.environ.get("WEB_CONCURRENCY", 4))

globals().update({name: getattr(routing, name) for name in SessionRouting.HOOKS})
