"""What `gunicorn -c gunicorn.conf.py app:app` uses. Copy it beside your own app.

Four workers, or as many as WEB_CONCURRENCY says. gunicorn's flags override what is
set here: `-w 8`, `-b 0.0.0.0:80`, `--timeout 120`, ...
"""

from gym_gunicorn.conf import *  # noqa: F403  # worker_class, workers, and SessionRouting's hooks

bind = "127.0.0.1:8000"
