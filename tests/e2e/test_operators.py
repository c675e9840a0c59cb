"""Paths that a server answers for its operators: its health, its metrics."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gym_gunicorn.metrics.values import read_all
from tests.e2e.calls import (
    Journal,
    Session,
    ask,
    connection_to,
    count,
    probe_server,
    session_at,
    status,
    stopped,
)
from tests.gunicorn_server import CONFIG, GunicornServer, errors, gunicorn_server, until

PATHS = CONFIG.replace("directory=", 'health_path="/health", metrics_path="/metrics", directory=')

# Idle connections stay open for as long as a test wants while a worker stops.
LINGERING = PATHS + "from gym_gunicorn.lifecycle import public_server\n\npublic_server.LINGER = 600.0\n"


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path)


@pytest.fixture
def server() -> Iterator[GunicornServer]:
    with probe_server(config=PATHS) as server:
        wait_until_all_serve(server)
        yield server


@contextmanager
def connections_to_all(server: GunicornServer) -> Iterator[list[HTTPConnection]]:
    """A kept-alive connection to each of two workers."""
    one, other = server.workers()
    with connection_to(server, one) as first, connection_to(server, other) as second:
        yield [first, second]


def states(server: GunicornServer) -> list[str]:
    (directory,) = server.directories()
    return [reading.state for reading in read_all(str(directory))[0]]


def wait_until_all_serve(server: GunicornServer) -> None:
    """Wait until both workers count as serving, which is a moment after they have said so in the log."""
    until(lambda: states(server) == ["serving", "serving"], "both workers serve")


def samples(to: GunicornServer | HTTPConnection) -> dict[tuple[str, str], float]:
    """Return what the metrics say, by name and the values of labels."""
    reply = ask(to, "/metrics")
    assert reply.status == 200
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(reply.body.decode())
        for sample in family.samples
    }


def counted(to: GunicornServer | HTTPConnection, name: str, labels: str = "") -> float:
    return samples(to)[f"gym_gunicorn_{name}", labels]


def test_paths_are_the_apps_own_unless_they_are_set() -> None:
    with probe_server() as server:
        assert ask(server, "/health").status == 404
        assert ask(server, "/metrics").status == 404


def test_server_that_serves_is_healthy(server: GunicornServer) -> None:
    reply = ask(server, "/health")
    assert (reply.status, reply.body) == (200, b"2 of 2 workers take new sessions\n")
    assert reply.headers["cache-control"] == "no-store"


def test_server_that_is_not_routed_answers_balancers_alike() -> None:
    with probe_server(config=PATHS, workers=1) as server:
        reply = ask(server, "/health")
        assert (reply.status, reply.body) == (200, b"serving\n")
        assert ask(server, "/metrics").status == 404


def test_health_is_asked_for_with_head_too(server: GunicornServer) -> None:
    length = ask(server, "/health").headers["content-length"]
    reply = ask(server, "/health", method="HEAD")
    assert (reply.status, reply.body, reply.headers["content-length"]) == (200, b"", length)


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_other_methods_and_paths_are_the_apps(server: GunicornServer, path: str) -> None:
    assert ask(server, path, method="POST", body=b"{}").status == 404
    assert ask(server, path + "/").status == 404
    assert ask(server, path + "y").status == 404


def test_paths_are_below_the_root_path() -> None:
    env = {"SCRIPT_NAME": "/api"}
    with gunicorn_server(app="tests.e2e.apps.probe:app", config=PATHS, workers=2, env=env) as server:
        wait_until_all_serve(server)
        # What a proxy sends that takes the prefix off.
        assert ask(server, "/health").status == 200
        assert ask(server, "/metrics").status == 200
        assert ask(server, "/api/health").status == 404


def test_server_is_not_healthy_while_all_its_workers_stop(journal: Journal) -> None:
    with probe_server(journal=journal, config=LINGERING) as server, connections_to_all(server) as (first, second):
        wait_until_all_serve(server)
        held = HTTPConnection("127.0.0.1", server.port, timeout=60)
        held.request("GET", "/hold?name=x")
        until(lambda: any(line.startswith("hold x ") for line in journal.lines()), "the request is held")
        assert ask(first, "/health").status == 200
        server.send(signal.SIGTERM)
        until(lambda: states(server) == ["stopping", "stopping"], "both workers stop")
        for connection in (first, second):
            reply = ask(connection, "/health")
            assert (reply.status, reply.body) == (503, b"0 of 2 workers take new sessions\n")
        journal.release("x")
        assert held.getresponse().status == 200
        held.close()
        assert server.wait() == 0


def test_server_stays_healthy_while_one_of_its_workers_stops() -> None:
    with probe_server(config=LINGERING) as server, connections_to_all(server) as (first, _):
        wait_until_all_serve(server)
        os.kill(server.workers()[0], signal.SIGTERM)
        until(lambda: "stopping" in states(server), "the worker stops")
        assert ask(first, "/health").status == 200


def test_worker_that_stands_still_does_not_count(server: GunicornServer) -> None:
    one, other = server.workers()
    with connection_to(server, other) as connection:
        with stopped(one):
            until(lambda: ask(connection, "/health").body.startswith(b"1 of 2 "), "the worker is not counted on")
            assert ask(connection, "/health").status == 200
        until(lambda: ask(connection, "/health").body.startswith(b"2 of 2 "), "the worker is counted on again")


def test_every_worker_answers_with_the_figures_of_the_whole_server(server: GunicornServer) -> None:
    one, other = server.workers()
    session = session_at(server, one)
    with connections_to_all(server) as connections:
        count(connections[1], session)
        for connection in connections:
            assert counted(connection, "sessions_stamped_total") == 1
            # The session's first request, and one a connection.
            assert counted(connection, "requests_local_total") == 4
            assert counted(connection, "requests_forwarded_total") == 1
            assert counted(connection, "requests_received_total") == 1
            assert counted(connection, "forward_added_seconds_count") == 1
            assert counted(connection, "workers", "serving") == 2
            assert counted(connection, "worker_pid", "0") in (one, other)


def test_410s_are_in_the_metrics_and_a_dead_workers_counts_stay(server: GunicornServer) -> None:
    one, other = server.workers()
    session = session_at(server, one)
    os.kill(one, signal.SIGKILL)
    until(lambda: server.ready_workers() == 3, "another worker serves")
    with connection_to(server, other) as connection:
        assert status(connection, session) == 410
        until(lambda: counted(connection, "workers", "serving") == 2, "the dead worker is gone")
        assert counted(connection, "requests_gone_total") == 1
        assert counted(connection, "sessions_stamped_total") == 1
        assert counted(connection, "requests_local_total") == 3


def test_metrics_have_as_many_lines_after_workers_were_replaced(server: GunicornServer) -> None:
    before = set(samples(server))
    for ready in (3, 4):
        os.kill(server.workers()[0], signal.SIGKILL)
        until(lambda: server.ready_workers() == ready, "another worker serves")  # noqa: B023
    until(lambda: counted(server, "workers", "serving") == 2, "the dead workers are gone")
    assert set(samples(server)) == before


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_paths_are_not_routed_not_counted_and_no_session_is_touched(server: GunicornServer, path: str) -> None:
    one, other = server.workers()
    session = session_at(server, one)
    with connection_to(server, other) as connection:
        before = samples(connection)
        for _ in range(3):
            reply = ask(connection, path, session)
            assert reply.status == 200
            assert reply.headers.get_all("set-cookie") is None
        after = samples(connection)
        counters = {key for key in before if key[0].endswith(("_total", "_count"))}
        assert {key: after[key] for key in counters} == {key: before[key] for key in counters}


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_paths_are_answered_to_who_brings_a_lost_session(server: GunicornServer, path: str) -> None:
    session = session_at(server, server.workers()[0])
    os.kill(server.workers()[0], signal.SIGKILL)
    until(lambda: server.ready_workers() == 3, "another worker serves")
    assert status(server, session) == 410
    assert ask(server, path, session).status == 200


def test_paths_need_no_session_and_make_none(server: GunicornServer) -> None:
    session = Session()
    ask(server, "/health", session)
    ask(server, "/metrics", session)
    assert session.cookie is None
    assert counted(server, "sessions_stamped_total") == 0
    assert errors(server.log()) == []
