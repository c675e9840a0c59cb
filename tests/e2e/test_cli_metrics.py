"""``gym-gunicorn metrics``: figures that add up, and that do not grow in number."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.calls import ask, connection_to, owner_of, probe_server, session_at, stopped
from tests.e2e.command import command, metrics_of, parsed
from tests.e2e.launching import hang_up
from tests.gunicorn_server import GunicornServer, gunicorn_server, until
from tests.sessions import play


def counters(found: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if "_total" in name or "forward_added" in name}


def test_metrics_add_up_to_what_was_asked() -> None:
    with gunicorn_server(workers=4) as server:
        assert asyncio.run(play(server.url, 40)) == {"right": 40}
        until(lambda: metrics_of(server)["gym_gunicorn_workers{'state': 'serving'}"] == 4, "all say that they serve")
        found = metrics_of(server)
        assert found["gym_gunicorn_sessions_stamped_total"] == 40
        local, received = found["gym_gunicorn_requests_local_total"], found["gym_gunicorn_requests_received_total"]
        assert local + received == 160
        assert found["gym_gunicorn_requests_forwarded_total"] == received > 0
        assert found["gym_gunicorn_forward_added_seconds_count"] == received
        assert found["gym_gunicorn_forward_added_seconds_sum"] > 0
        assert found["gym_gunicorn_forwarded_bytes_total{'direction': 'sent'}"] > 0
        pids = {found[f"gym_gunicorn_worker_pid{{'worker': '{place}'}}"] for place in range(4)}
        assert pids == set(server.workers())


def test_counters_never_fall_while_workers_are_killed_and_reloaded_under_load() -> None:
    async def look() -> None:
        playing = asyncio.create_task(play(server.url, 150))
        before: dict[str, float] = {}
        killed = False
        while not playing.done():
            now = counters(await asyncio.to_thread(metrics_of, server))
            assert all(now[name] >= value for name, value in before.items()), (before, now)
            if not killed and now["gym_gunicorn_sessions_stamped_total"] > 10:
                killed = True
                os.kill(server.workers()[0], signal.SIGKILL)
                server.send(signal.SIGHUP)
            before = now
        # Callers of the killed worker met a closed connection, and those of ended owners a 410.
        await asyncio.gather(playing, return_exceptions=True)
        assert killed

    with gunicorn_server(workers=3) as server:
        asyncio.run(look())


def test_what_was_counted_outlives_a_killed_worker_and_a_reload() -> None:
    with probe_server() as server:
        first, other = server.workers()
        session = session_at(server, first)
        before = metrics_of(server)
        assert before["gym_gunicorn_sessions_stamped_total"] == 1
        os.kill(first, signal.SIGKILL)
        until(lambda: first not in server.workers(), "the arbiter has noticed")
        until(lambda: server.ready_workers() == 3, "another worker serves")
        with connection_to(server, other) as connection:
            assert ask(connection, "/count", session, method="POST").status == 410
        lost = metrics_of(server)
        assert lost["gym_gunicorn_sessions_stamped_total"] == 1
        assert lost["gym_gunicorn_requests_gone_total"] == 1
        hang_up(server, 2)
        until(lambda: metrics_of(server)["gym_gunicorn_workers{'state': 'serving'}"] == 2, "the new ones serve")
        now = counters(metrics_of(server))
        assert all(now[name] >= value for name, value in counters(lost).items()), (lost, now)


def test_stopped_workers_silence_and_lag_are_seen() -> None:
    with probe_server("--timeout", "120") as server:
        first, _ = server.workers()
        with stopped(first):

            def silence() -> float:
                found = metrics_of(server)
                places = [place for place in "01" if found[f"gym_gunicorn_worker_pid{{'worker': '{place}'}}"] == first]
                label = f"{{'worker': '{places[0]}'}}"
                lag = found[f"gym_gunicorn_event_loop_lag_seconds{label}"]
                return min(found[f"gym_gunicorn_worker_silence_seconds{label}"], lag)

            until(lambda: silence() > 2, "it has been silent")


@pytest.mark.parametrize("what", ["missing", "garbage"])
def test_total_that_can_not_be_read_is_done_without(what: str) -> None:
    with probe_server() as server:
        (directory,) = server.directories()
        if what == "garbage":
            (directory / "total.figures").write_bytes(os.urandom(77))
        until(lambda: metrics_of(server)["gym_gunicorn_workers{'state': 'serving'}"] == 2, "both say that they serve")


def test_hundred_recycled_workers_leave_metrics_and_directory_as_small_as_before() -> None:
    # Each worker ends after two requests, and another one takes its place.
    with probe_server("--max-requests", "2", workers=2) as server:
        recycle(server, 3)
        before, files = settled(server)
        recycle(server, 103)
        after, left = settled(server)
        assert after.keys() == before.keys()
        assert left == files
        assert after["gym_gunicorn_requests_local_total"] >= 103
        assert len(left) <= 6


def recycle(server: GunicornServer, workers: int) -> None:
    """Ask until so many workers in all have ended."""
    end = time.monotonic() + 900
    while server.log().count(" stops (max_requests)") < workers:
        assert time.monotonic() < end, "workers are not recycled"
        try:
            ask(server, "/pid")
        except OSError:
            # No worker is there at this moment, or the one that was has just closed the connection.
            time.sleep(0.01)


def settled(server: GunicornServer) -> tuple[dict[str, float], list[str]]:
    """Return the metrics, and which kinds of files are there, as soon as two workers serve and no other is left."""
    (directory,) = server.directories()

    def kinds() -> list[str]:
        return sorted(name.rpartition(".")[2] for name in os.listdir(directory))

    def two_serve() -> bool:
        found = metrics_of(server)
        serving = found["gym_gunicorn_workers{'state': 'serving'}"]
        return serving == 2 and len([name for name in found if "worker_pid" in name]) == 2 and len(kinds()) == 6

    until(two_serve, "two workers serve")
    return metrics_of(server), kinds()


def test_one_of_several_servers_has_to_be_chosen() -> None:
    with probe_server() as server:
        config = (server.parent / "conf.py").read_text()
        with probe_server(config=config) as beside:
            done = command("metrics", "--sockets", server.parent, status=2)
            assert done.stdout == ""
            assert all(str(directory) in done.stderr for directory in server.directories())
            text = command("metrics", "--pid", str(beside.pid)).stdout
            pids = {value for name, value in parsed(text).items() if name.startswith("gym_gunicorn_worker_pid")}
            assert pids == set(beside.workers())


def test_where_no_server_runs_there_are_no_metrics(tmp_path: Path) -> None:
    done = command("metrics", "--sockets", tmp_path, status=1)
    assert done.stdout == ""
    assert str(tmp_path) in done.stderr


def test_owner_ids_are_in_no_metric() -> None:
    with probe_server() as server:
        text = command("metrics", "--sockets", server.parent).stdout
        assert not any(owner_of(server, pid) in text for pid in server.workers())
