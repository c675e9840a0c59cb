"""The figures of a server, for the statsd that gunicorn is told of (``statsd_host``)."""

from __future__ import annotations

from collections.abc import Sequence

from gunicorn.instrument.statsd import Statsd

from gym_gunicorn.figures import Reading, sums

# gunicorn counts requests itself, but not those of uvicorn's workers.
_NAMES = {
    "stamped": "gunicorn.sessions.stamped",
    "local": "gunicorn.requests.local",
    "forwarded": "gunicorn.requests.forwarded",
    "received": "gunicorn.requests.received",
    "gone": "gunicorn.requests.gone",
    "busy": "gunicorn.requests.busy",
    "broken": "gunicorn.requests.broken",
    "truncated": "gunicorn.requests.truncated",
    "websockets": "gunicorn.websockets",
}


def report(
    log: Statsd, workers: Sequence[Reading], total: Reading | None, before: dict[str, int] | None
) -> dict[str, int]:
    """Send what has changed since the sums ``before``, and what there is now; return the sums.

    Where ``before`` is ``None`` it is not known what was sent, and nothing has changed.
    """
    now = sums(workers, total)
    if before is None:
        before = now
    grown = {name: count - before.get(name, 0) for name, count in now.items()}
    for name, metric in _NAMES.items():
        if grown[name] > 0:
            log.increment(metric, grown[name])
    handled = grown["local"] + grown["received"]
    if handled > 0:
        log.increment("gunicorn.requests", handled)
    log.gauge("gunicorn.requests.active", sum(worker["active"] for worker in workers))
    log.gauge("gunicorn.workers.lag_ms", max((worker["lag"] // 1_000_000 for worker in workers), default=0))
    return now
