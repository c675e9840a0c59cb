"""The metrics: read by the official client's parser, right, and of one size however long a server runs."""

from __future__ import annotations

import re
import time

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from gym_gunicorn.metrics.prometheus import CONTENT_TYPE, render
from gym_gunicorn.metrics.values import (
    ADDED_BOUNDS,
    BEAT,
    BROKEN,
    CONNECTIONS,
    FORWARDED,
    LAG,
    LOCAL,
    PID,
    RECEIVED_BYTES,
    SENT_BYTES,
    SERVING,
    STAMPED,
    STARTED,
    STATE,
    STOPPING,
    Figures,
    Reading,
)
from gym_gunicorn.owner import new_owner_id


def worker(**values: int) -> Reading:
    figures = Figures()
    figures.values[STATE] = SERVING
    for place, value in values.items():
        figures.values[PLACES[place]] = value
    return figures.reading(new_owner_id())


PLACES = {
    "pid": PID,
    "started": STARTED,
    "beat": BEAT,
    "state": STATE,
    "connections": CONNECTIONS,
    "lag": LAG,
    "local": LOCAL,
    "forwarded": FORWARDED,
    "stamped": STAMPED,
    "broken": BROKEN,
    "sent_bytes": SENT_BYTES,
    "received_bytes": RECEIVED_BYTES,
}


def families(*workers: Reading, total: Reading | None = None) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(render(workers, total).decode())}


def value(found: dict[str, Metric], name: str, **labels: str) -> float:
    (only,) = (
        sample.value
        for family in found.values()
        for sample in family.samples
        if sample.name == name and sample.labels == labels
    )
    return only


def test_counters_are_sums_over_living_and_ended_workers() -> None:
    found = families(worker(local=3, stamped=1), worker(local=4, broken=2), total=worker(local=10, broken=1))
    assert value(found, "gym_gunicorn_requests_local_total") == 17
    assert value(found, "gym_gunicorn_sessions_stamped_total") == 1
    assert value(found, "gym_gunicorn_requests_failed_total", reason="broken") == 3
    assert value(found, "gym_gunicorn_requests_failed_total", reason="busy") == 0


def test_ended_workers_are_in_no_gauge() -> None:
    found = families(worker(connections=3), total=worker(connections=4))
    assert [sample.value for sample in found["gym_gunicorn_owner_connections"].samples] == [3]
    assert value(found, "gym_gunicorn_workers", state="serving") == 1


def test_bytes_are_told_each_way() -> None:
    found = families(worker(sent_bytes=5, received_bytes=70))
    assert value(found, "gym_gunicorn_forwarded_bytes_total", direction="sent") == 5
    assert value(found, "gym_gunicorn_forwarded_bytes_total", direction="received") == 70


def test_time_that_forwards_add_is_a_cumulative_histogram_in_seconds() -> None:
    one, other = Figures(), Figures()
    for milliseconds in (0.1, 3, 3, 700):
        one.added(int(milliseconds * 1e6))
    other.added(60 * 10**9)
    found = families(one.reading(new_owner_id()), other.reading(new_owner_id()))
    name = "gym_gunicorn_forward_added_seconds"
    counts = {bound: value(found, f"{name}_bucket", le=str(bound)) for bound in ADDED_BOUNDS}
    assert counts[0.0005] == counts[0.0025] == 1
    assert counts[0.005] == counts[0.5] == 3
    assert counts[1.0] == counts[2.5] == 4
    assert value(found, f"{name}_bucket", le="+Inf") == value(found, f"{name}_count") == 5
    assert value(found, f"{name}_sum") == pytest.approx(60.7061)
    assert found[name].type == "histogram"


def test_gauges_call_workers_by_their_order() -> None:
    found = families(worker(pid=70, connections=1), worker(pid=60, connections=2))
    assert value(found, "gym_gunicorn_worker_pid", worker="0") == 70
    assert value(found, "gym_gunicorn_owner_connections", worker="0") == 1
    assert value(found, "gym_gunicorn_worker_pid", worker="1") == 60
    assert value(found, "gym_gunicorn_owner_connections", worker="1") == 2


def test_workers_are_counted_by_their_state() -> None:
    found = families(worker(), worker(), worker(state=STOPPING))
    assert value(found, "gym_gunicorn_workers", state="serving") == 2
    assert value(found, "gym_gunicorn_workers", state="stopping") == 1
    assert value(found, "gym_gunicorn_workers", state="starting") == 0


def test_lag_is_that_which_was_measured_while_the_loop_goes_round() -> None:
    found = families(worker(lag=250_000_000, beat=time.monotonic_ns() + 10**12))
    assert value(found, "gym_gunicorn_event_loop_lag_seconds", worker="0") == 0.25


def test_loop_that_does_not_go_round_lags_though_nobody_measures_it() -> None:
    found = families(worker(beat=time.monotonic_ns() - 30 * 10**9))
    assert value(found, "gym_gunicorn_event_loop_lag_seconds", worker="0") >= 30
    assert value(found, "gym_gunicorn_worker_silence_seconds", worker="0") >= 30


def test_times_are_in_seconds() -> None:
    found = families(worker(started=1_700_000_000 * 10**9))
    assert value(found, "gym_gunicorn_worker_start_time_seconds", worker="0") == 1_700_000_000


def test_every_metric_is_explained_and_named_in_prometheus_style() -> None:
    for name, family in families(worker()).items():
        assert re.fullmatch(r"gym_gunicorn_[a-z]+(_[a-z]+)*", name)
        assert family.documentation.endswith(".")
        assert family.type in ("counter", "gauge", "histogram")
        if family.type == "counter":
            assert all(sample.name == f"{name}_total" for sample in family.samples)


def test_owner_ids_are_in_no_metric() -> None:
    workers = [worker(), worker()]
    text = render(workers, None).decode()
    assert not any(reading.owner_id and reading.owner_id in text for reading in workers)


def test_series_are_the_same_whoever_the_workers_are_and_whatever_they_counted() -> None:
    def series(workers: list[Reading], total: Reading | None) -> set[str]:
        return {line.rpartition(" ")[0] for line in render(workers, total).decode().splitlines()}

    once = series([worker(), worker()], None)
    later = series([worker(local=9, forwarded=7), worker(broken=3)], worker(local=10**9))
    assert once == later


def test_server_without_workers_has_metrics_too() -> None:
    found = families()
    assert value(found, "gym_gunicorn_requests_local_total") == 0
    assert value(found, "gym_gunicorn_workers", state="serving") == 0


def test_any_figures_can_be_shown() -> None:
    most = Reading(new_owner_id(), (2**64 - 1,) * len(worker().values))
    found = families(most, most, total=most)
    assert value(found, "gym_gunicorn_requests_local_total") == pytest.approx(3 * 2.0**64)


def test_content_type_is_that_of_the_text_format() -> None:
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")
