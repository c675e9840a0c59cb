"""Process titles: what ``ps`` and dashboards read. The form is documented in the README, and stable."""

from __future__ import annotations

import setproctitle

from gym_gunicorn.metrics.values import Reading

_COUNTS = ("stamped", "active", "local", "forwarded", "received", "gone")


def plain_title(name: str) -> str:
    """Return the title that gunicorn gives a worker of the server ``name``."""
    return f"gunicorn: worker [{name}]"


def worker_title(name: str, reading: Reading) -> str:
    """Return the title of a routed worker of the server ``name``."""
    state = "" if reading.state == "serving" else f" state={reading.state}"
    counts = " ".join(f"{key}={reading[key]}" for key in _COUNTS)
    return f"{plain_title(name)} owner={reading.owner_id}{state} {counts}"


def master_title(name: str, workers: int, sockets: str) -> str:
    """Return the title of an arbiter that has ``workers`` workers and the socket directory ``sockets``."""
    return f"gunicorn: master [{name}] workers={workers} sockets={sockets}"


def show(title: str) -> None:
    """Make ``title`` this process's, where it is not: gunicorn writes its own at several moments."""
    if setproctitle.getproctitle() != title:
        setproctitle.setproctitle(title)
