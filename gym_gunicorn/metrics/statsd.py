"""The figures of a server, for the statsd that gunicorn is told of (``statsd_host``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gunicorn.instrument.statsd import Statsd

from gym_gunicorn.metrics.values import Reading

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


def report(log: Statsd, now: Mapping[str, int], before: Mapping[str, int], workers: Sequence[Reading]) -> None:
    """Send by how much the sums ``now`` are more than those ``before``, and how the workers are."""
    grown = {name: max(0, count - before.get(name, 0)) for name, count in now.items()}
    for name, metric in _NAMES.items():
        if grown[name]:
            log.increment(metric, grown[name])
    if handled := grown["local"] + grown["received"]:
        log.increment("gunicorn.requests", handled)
    log.gauge("gunicorn.requests.active", sum(worker["active"] for worker in workers))
    log.gauge("gunicorn.workers.lag_ms", max((worker["lag"] // 1_000_000 for worker in workers), default=0))
