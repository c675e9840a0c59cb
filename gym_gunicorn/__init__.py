"""gunicorn with many workers, for apps that keep a session's state in memory.

Each session's requests reach the worker that holds it. See README.md.
"""

from gym_gunicorn.disconnect import CancelOnDisconnect
from gym_gunicorn.lifecycle.hooks import SessionRouting
from gym_gunicorn.lifecycle.worker import RoutingWorker
from gym_gunicorn.sessions.stamp import SessionStamp, session_owner

__all__ = ["CancelOnDisconnect", "RoutingWorker", "SessionRouting", "SessionStamp", "session_owner"]
