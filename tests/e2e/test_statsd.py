"""What gunicorn's statsd is told: names, and sums in which nothing is told twice."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gym_gunicorn.metrics.values import read_all, sums
from tests.e2e.calls import Journal, connection_to, count, probe_server, session_at, status
from tests.gunicorn_server import GunicornServer, children, is_alive, until

SLOW = "tests.e2e.apps.slow:app"

NAMES = {
    "sessions.stamped",
    "requests",
    "requests.local",
    "requests.forwarded",
    "requests.received",
    "requests.gone",
    "requests.busy",
    "requests.broken",
    "requests.truncated",
    "websockets",
}


class Listener:
    """A statsd: adds up the counters that it is told, and keeps the last of each gauge."""

    def __init__(self, bound: socket.socket, prefix: str = "") -> None:
        self.bound = bound
        self.prefix = prefix
        self.counters: Counter[str] = Counter()
        self.gauges: dict[str, float] = {}
        self.reports = 0

    @property
    def address(self) -> str:
        host, port = self.bound.getsockname()
        return f"{host}:{port}"

    def listen(self) -> None:
        """Take what has come."""
        while True:
            try:
                line = self.bound.recv(65536).decode()
            except BlockingIOError:
                return
            name, _, rest = line.partition(":")
            value, kind, *_ = rest.split("|")
            assert name.startswith(f"{self.prefix}gunicorn."), line
            name = name.removeprefix(f"{self.prefix}gunicorn.")
            if kind == "c":
                self.counters[name] += int(value)
            elif kind == "g":
                self.gauges[name] = float(value)
            self.reports += name == "workers.lag_ms"

    def told(self) -> dict[str, int]:
        """Return the counters that are ours."""
        self.listen()
        return {name: value for name, value in self.counters.items() if name in NAMES}

    def wait_for_reports(self, number: int) -> None:
        """Wait until the figures have been told that often again."""
        self.listen()
        expected = self.reports + number

        def are_told() -> bool:
            self.listen()
            return self.reports >= expected

        until(are_told, "the figures are told")


@contextmanager
def listener(prefix: str = "") -> Iterator[Listener]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
        bound.bind(("127.0.0.1", 0))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        bound.setblocking(False)
        yield Listener(bound, prefix)


def assert_told(statsd: Listener, **expected: int) -> None:
    """Wait until the sums are as expected, and see that they stay so."""
    wanted = {name.replace("_", "."): value for name, value in expected.items()}
    try:
        until(lambda: statsd.told() == wanted, "the sums are right")
    except AssertionError as error:
        raise AssertionError(f"{statsd.told()} instead of {wanted}") from error
    statsd.wait_for_reports(3)
    assert statsd.told() == wanted


def play(server: GunicornServer, one: int, other: int) -> None:
    """Two sessions at one worker, one of them reached three times through the other: local 4, forwarded 3."""
    session_at(server, one, among=[one, other])
    session = session_at(server, one, among=[one, other])
    with connection_to(server, other, among=[one, other]) as connection:
        assert [count(connection, session) for _ in range(3)] == [2, 3, 4]


# What ``play`` adds: with two requests to see which worker a connection leads to, and one more.
PLAYED = {"sessions_stamped": 2, "requests_local": 5, "requests_forwarded": 3, "requests_received": 3, "requests": 8}
TWICE = {name: 2 * value for name, value in PLAYED.items()}


def second_arbiter(server: GunicornServer) -> tuple[int, list[int]]:
    """Start a second arbiter, and return its pid and its workers' when they serve."""
    old, ready = server.workers(), server.ready_workers()
    server.send(signal.SIGUSR2)
    until(lambda: server.ready_workers() == ready + 2, "the new workers serve")
    (arbiter,) = set(server.workers()) - set(old)
    until(lambda: len(children(arbiter)) == 2, "the new workers are there")
    server.seen.update(children(arbiter))
    return arbiter, children(arbiter)


def test_statsd_is_told_what_is_counted_under_gunicorns_names_and_the_prefix() -> None:
    with (
        listener("lab.") as statsd,
        probe_server("--statsd-host", statsd.address, "--statsd-prefix", "lab") as server,
    ):
        one, other = server.workers()
        play(server, one, other)
        assert_told(statsd, **PLAYED)
        assert statsd.gauges["requests.active"] == 0
        assert statsd.gauges["workers.lag_ms"] >= 0


def test_requests_in_progress_are_a_gauge_that_ends_at_nothing() -> None:
    with listener() as statsd, probe_server("--statsd-host", statsd.address) as server:
        with connection_to(server, server.workers()[0]) as connection:
            connection.request("GET", "/listen")
            until(lambda: statsd.told() is not None and statsd.gauges.get("requests.active") == 1, "it is in progress")
        until(lambda: statsd.told() is not None and statsd.gauges["requests.active"] == 0, "it has ended")


def test_death_of_a_worker_takes_nothing_from_the_sums_and_adds_nothing() -> None:
    with listener() as statsd, probe_server("--statsd-host", statsd.address) as server:
        one, other = server.workers()
        play(server, one, other)
        session = session_at(server, one)
        os.kill(one, signal.SIGKILL)
        until(lambda: server.ready_workers() == 3, "another worker serves")
        with connection_to(server, other) as connection:
            assert status(connection, session) == 410
        until(lambda: statsd.told().get("requests.gone") == 1, "the 410 is told")
        statsd.wait_for_reports(3)
        told = statsd.told()
        assert (told["sessions.stamped"], told["requests.local"], told["requests.received"]) == (3, 8, 3)


def test_reload_takes_nothing_from_the_sums_and_adds_nothing() -> None:
    with listener() as statsd, probe_server("--statsd-host", statsd.address) as server:
        one, other = server.workers()
        play(server, one, other)
        server.send(signal.SIGHUP)
        until(lambda: server.ready_workers() == 4, "the new workers serve")
        until(lambda: not set(server.workers()) & {one, other}, "the old ones are gone")
        assert_told(statsd, **PLAYED)


def test_nothing_is_told_twice_while_there_are_two_arbiters_and_after() -> None:
    with listener() as statsd, probe_server("--statsd-host", statsd.address) as server:
        one, other = server.workers()
        play(server, one, other)
        assert_told(statsd, **PLAYED)
        arbiter, new = second_arbiter(server)
        assert_told(statsd, **PLAYED)
        with connection_to(server, new[0], among=[one, other, *new]):
            pass
        more = {**PLAYED, "requests_local": 6, "requests": 9}
        assert_told(statsd, **more)
        assert server.stop() == 0
        until(lambda: not is_alive(one) and not is_alive(other), "the old workers are gone")
        assert_told(statsd, **more)
        assert is_alive(arbiter)


def test_nothing_is_told_twice_where_the_new_arbiter_is_stopped() -> None:
    with listener() as statsd, probe_server("--statsd-host", statsd.address) as server:
        one, other = server.workers()
        play(server, one, other)
        assert_told(statsd, **PLAYED)
        arbiter, _ = second_arbiter(server)
        statsd.wait_for_reports(2)
        os.kill(arbiter, signal.SIGTERM)
        until(lambda: not is_alive(arbiter), "the new server is gone")
        assert_told(statsd, **PLAYED)
        play(server, one, other)
        assert_told(statsd, **TWICE)


def test_what_is_counted_while_the_new_arbiter_loads_its_app_is_told_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with (
        listener() as statsd,
        probe_server("--preload", "--statsd-host", statsd.address, app=SLOW, journal=journal) as server,
    ):
        one, other = server.workers()
        play(server, one, other)
        assert_told(statsd, **PLAYED)
        journal.release("loading takes long")
        server.send(signal.SIGUSR2)
        until(lambda: sum(line.startswith("loading") for line in journal.lines()) == 2, "the new arbiter loads")
        play(server, one, other)
        (journal.folder / "loading takes long").unlink()
        until(lambda: server.ready_workers() == 4, "the new workers serve")
        for arbiter in set(server.workers()) - {one, other}:
            server.seen.update(children(arbiter))
        assert_told(statsd, **TWICE)


def test_what_is_counted_until_the_end_of_the_server_is_told(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with listener() as statsd, probe_server("--statsd-host", statsd.address, journal=journal) as server:
        one, other = server.workers()
        session = session_at(server, one)
        with connection_to(server, other) as connection:
            connection.request("GET", "/hold?name=x", headers={"cookie": session.cookie or ""})
            journal.wait_for(f"hold x {one}")
            server.send(signal.SIGTERM)
            until(lambda: len(re.findall("Owner [0-9a-f]+ stops", server.log())) == 2, "both workers stop")
            journal.release("x")
            assert connection.getresponse().status == 200
        assert server.wait() == 0
        told = statsd.told()
        assert told == {
            "sessions.stamped": 1,
            "requests.local": 3,
            "requests.forwarded": 1,
            "requests.received": 1,
            "requests": 4,
        }


def test_nothing_is_told_twice_where_somebody_removes_the_socket_directory() -> None:
    with listener() as statsd, probe_server("--statsd-host", statsd.address) as server:
        one, other = server.workers()
        play(server, one, other)
        assert_told(statsd, **PLAYED)
        (directory,) = server.directories()
        shutil.rmtree(directory)
        until(lambda: len(server.owners()) == 2 and len(read_all(str(directory))[0]) == 2, "all is there again")
        assert_told(statsd, **PLAYED)


def test_ended_workers_stay_in_the_sums_where_somebody_removes_the_socket_directory() -> None:
    with listener() as statsd, probe_server("--statsd-host", statsd.address) as server:
        one, other = server.workers()
        play(server, one, other)
        assert_told(statsd, **PLAYED)
        os.kill(one, signal.SIGKILL)
        until(lambda: server.ready_workers() == 3, "another worker serves")
        (directory,) = server.directories()
        until(lambda: read_all(str(directory))[1] is not None, "the dead worker is in the total")
        shutil.rmtree(directory)
        until(lambda: len(server.owners()) == 2 and len(read_all(str(directory))[0]) == 2, "all is there again")
        until(lambda: sums(*read_all(str(directory)))["stamped"] == 2, "the dead worker is in the sums")
        assert_told(statsd, **PLAYED)
