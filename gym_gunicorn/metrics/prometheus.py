"""The figures of a server in Prometheus' text format. Needs the extra ``metrics``.

Counters are sums over the whole server, ended workers included, so that they only ever grow,
and so does their number of lines: not at all. Gauges have one line a worker, which is
called by its place in order of age, the oldest 0: a new owner ID makes no new series.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from gym_gunicorn.metrics.values import ADDED_BOUNDS, STATES, Reading, sums

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_COUNTERS = (
    ("requests_local", "local", "Requests, WebSockets included, that were handled by the worker that they reached."),
    ("requests_forwarded", "forwarded", "Requests that were forwarded to the worker that holds their session."),
    ("requests_received", "received", "Forwarded requests that their owners took from other workers."),
    ("requests_gone", "gone", "Requests answered with 410: their session's worker has stopped or died."),
    ("sessions_stamped", "stamped", "Sessions that were stamped or adopted, each by the worker that holds it."),
    ("websockets", "websockets", "WebSockets that were handled, forwarded ones included."),
)
_REASONS = ("busy", "broken", "truncated")
_NANOSECOND = 1e-9

# Seconds without a turn of its loop after which a worker's loop is taken for held up at this moment.
_HELD_UP = 1.0


def render(workers: Sequence[Reading], total: Reading | None) -> bytes:
    """Return the figures of one server, as ``read_all`` has read them, in the format of ``CONTENT_TYPE``."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(workers, total))
    return generate_latest(registry)


class _Figures(Collector):
    def __init__(self, workers: Sequence[Reading], total: Reading | None) -> None:
        self._workers = workers
        self._sums = sums(workers, total)

    def collect(self) -> Iterator[Metric]:
        yield from self._counters()
        yield self._added()
        yield from self._gauges()

    def describe(self) -> Iterable[Metric]:
        # Nobody else is in the registry, whose names these could clash with.
        return ()

    def _counters(self) -> Iterator[Metric]:
        for name, figure, meaning in _COUNTERS:
            yield CounterMetricFamily(f"gym_gunicorn_{name}", meaning, value=self._sums[figure])
        failed = CounterMetricFamily(
            "gym_gunicorn_requests_failed",
            "Requests that a living owner did not answer: busy (503, not run), broken (502, may have been run), "
            "truncated (the reply began, and the caller's connection was closed).",
            labels=("reason",),
        )
        for reason in _REASONS:
            failed.add_metric((reason,), self._sums[reason])
        yield failed
        carried = CounterMetricFamily(
            "gym_gunicorn_forwarded_bytes",
            "Bytes of the bodies of forwarded requests (sent) and of their replies (received).",
            labels=("direction",),
        )
        for direction in ("sent", "received"):
            carried.add_metric((direction,), self._sums[f"{direction}_bytes"])
        yield carried

    def _added(self) -> Metric:
        counts = accumulate(self._sums[f"added_{number}"] for number in range(len(ADDED_BOUNDS) + 1))
        bounds = [*(str(bound) for bound in ADDED_BOUNDS), "+Inf"]
        return HistogramMetricFamily(
            "gym_gunicorn_forward_added_seconds",
            "How much later a reply began because its request was forwarded.",
            buckets=list(zip(bounds, counts, strict=True)),
            sum_value=self._sums["added_ns"] * _NANOSECOND,
        )

    def _gauges(self) -> Iterator[Metric]:
        numbers = GaugeMetricFamily("gym_gunicorn_workers", "Workers there are now, by their state.", labels=("state",))
        for state in STATES:
            numbers.add_metric((state,), sum(worker.state == state for worker in self._workers))
        yield numbers
        yield self._each("worker_pid", "The process that is the worker.", [worker["pid"] for worker in self._workers])
        yield self._each(
            "worker_start_time_seconds",
            "When the worker was started, in seconds since 1970.",
            [worker["started"] * _NANOSECOND for worker in self._workers],
        )
        yield self._each(
            "worker_silence_seconds",
            "For how long the worker's event loop has not gone round. A tenth of a second is healthy.",
            [worker.silence() for worker in self._workers],
        )
        yield self._each(
            "event_loop_lag_seconds",
            "How late the worker's event loop was of late: it is held up by what computes in it.",
            [_lag(worker) for worker in self._workers],
        )
        yield self._each("requests_active", "Requests in progress.", [worker["active"] for worker in self._workers])
        yield self._each(
            "owner_connections",
            "Connections that the worker keeps to other workers.",
            [worker["connections"] for worker in self._workers],
        )

    def _each(self, name: str, meaning: str, values: Sequence[float]) -> Metric:
        family = GaugeMetricFamily(f"gym_gunicorn_{name}", meaning, labels=("worker",))
        for place, value in enumerate(values):
            family.add_metric((str(place),), value)
        return family


def _lag(worker: Reading) -> float:
    """Return how late the loop is: measured when it went round, or until now where it does not."""
    silence = worker.silence()
    lag = worker["lag"] * _NANOSECOND
    return max(lag, silence) if worker.state == "serving" and silence > _HELD_UP else lag
