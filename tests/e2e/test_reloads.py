"""Reloads: under load, to other settings, and to configurations and apps that are broken."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

import aiohttp
import pytest

from gym_gunicorn.lifecycle.public_server import LINGER
from tests.e2e.calls import (
    PROBE,
    Journal,
    Session,
    ask,
    assert_nothing_left,
    connection_to,
    count,
    owner_of,
    probe_server,
    session_at,
    status,
)
from tests.e2e.launching import hang_up, program, reconfigure
from tests.gunicorn_server import CONFIG, GunicornServer, errors, gunicorn_server, is_alive, until
from tests.sessions import Answered, Caller, caller

# How long each kind of callers is reloaded under.
SECONDS = float(os.environ.get("GYM_GUNICORN_RELOAD_SECONDS", "60"))


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path)


# Under load


class _Load:
    """Callers that play one session after another, and how each of their requests ended.

    Each sends its next request as soon as it has the last reply. ``answers`` counts "new"
    for the first request of a session and "old" for the others, with what came of it: right,
    wrong, a status, or a reset: of a connection that had been idle for longer than the linger,
    as a machine with too much to do brings about, or of one that was busy.
    """

    def __init__(self, url: str, keep_alive: bool) -> None:
        self.url = url
        self.keep_alive = keep_alive
        self.answers: Counter[str] = Counter()
        self.ended = asyncio.Event()
        self._sent: dict[Caller, float] = {}

    async def call_on(self, number: int) -> None:
        async with caller(self.url, keep_alive=self.keep_alive) as session:
            while not self.ended.is_set():
                session.http.cookie_jar.clear()
                await self._play(session, number)

    async def _play(self, session: Caller, number: int) -> None:
        if await self._count("new", session, session.seed(number)):
            for step in range(8):
                if not await self._count("old", session, session.increment(step)):
                    break
                if not await self._count("old", session, session.verify()):
                    break

    async def _count(self, kind: str, session: Caller, request: Awaitable[bool | None]) -> bool:
        """Count what comes of a request, and return whether it was right."""
        # No server can have seen the connection idle for longer than since the request before was sent.
        sent = time.monotonic()
        idle = sent - self._sent.get(session, sent)
        self._sent[session] = sent
        try:
            answer = "wrong" if await request is False else "right"
        except Answered as answered:
            answer = str(answered.status)
        except aiohttp.ClientError as error:
            answer = "idle connection closed" if self.keep_alive and idle > LINGER else repr(error)
        self.answers[f"{kind}: {answer}"] += 1
        return answer == "right"


async def reload_under_load(
    server: GunicornServer, *, callers: int, seconds: float, interval: float, keep_alive: bool
) -> Counter[str]:
    """Let ``callers`` play one session after another, reload every ``interval`` seconds, and count the answers."""
    load = _Load(server.url, keep_alive)
    async with asyncio.TaskGroup() as group:
        for number in range(callers):
            group.create_task(load.call_on(number))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await asyncio.sleep(interval)
            ready = server.ready_workers()
            server.send(signal.SIGHUP)
            load.answers["reloads"] += 1
            # On a slow machine the next one would end them before they have served.
            await asyncio.to_thread(until, lambda: server.ready_workers() >= ready + 4, "new workers serve")  # noqa: B023
        load.ended.set()
    return load.answers


@pytest.mark.xdist_group("load")
@pytest.mark.parametrize("keep_alive", [False, True], ids=["one connection a request", "kept-alive connections"])
def test_reloads_under_load_fail_no_new_session_and_reset_no_busy_connection(keep_alive: bool) -> None:
    with gunicorn_server() as server:
        answers = asyncio.run(
            reload_under_load(server, callers=100, seconds=SECONDS, interval=2.0, keep_alive=keep_alive)
        )
        print(dict(answers))
        good = {"reloads", "new: right", "old: right", "old: 410"}
        assert good <= set(answers) <= good | {"new: idle connection closed", "old: idle connection closed"}, answers
        assert errors(server.log()) == []
        assert server.stop() == 0
        assert_nothing_left(server)


# To another number of workers


def test_reloads_from_four_workers_to_one_and_back_never_start_an_old_session_afresh() -> None:
    with probe_server(config=CONFIG + "workers = 4\n", workers=4) as server:
        (directory,) = server.directories()
        lost = [session_at(server, pid) for pid in server.workers()]
        reconfigure(server, "workers = 4", "workers = 1")
        hang_up(server, 1)
        assert [status(server, session) for session in lost] == [410] * 4
        (only,) = server.workers()
        lost.append(session_at(server, only))
        reconfigure(server, "workers = 1", "workers = 4")
        hang_up(server, 4)
        assert [status(server, session) for session in lost for _ in range(3)] == [410] * 15
        for pid in server.workers():
            new = session_at(server, pid)
            assert [count(server, new) for _ in range(3)] == [2, 3, 4]
        assert server.directories() == [directory]
        assert len(server.owners()) == 4
        assert server.stop() == 0
        assert_nothing_left(server)
        assert errors(server.log()) == []


def test_reload_from_one_worker_to_four_routes_from_then_on() -> None:
    with probe_server(config=CONFIG + "workers = 1\n", workers=1) as server:
        (only,) = server.workers()
        unnamed = session_at(server, only)
        assert unnamed.owner is None
        assert server.directories() == []
        reconfigure(server, "workers = 1", "workers = 4")
        hang_up(server, 4)
        # It names no owner, so whoever meets it first adopts it; from then on it is right.
        assert [count(server, unnamed) for _ in range(5)] == [1, 2, 3, 4, 5]
        for pid in server.workers():
            new = session_at(server, pid)
            assert [count(server, new) for _ in range(3)] == [2, 3, 4]
        assert len(server.owners()) == 4
        assert server.stop() == 0
        assert_nothing_left(server)
        assert errors(server.log()) == []


def test_reload_back_from_workers_that_sigttin_added_keeps_sessions_right() -> None:
    with probe_server(config=CONFIG + "workers = 2\n", workers=2) as server:
        server.send(signal.SIGTTIN)
        until(lambda: server.ready_workers() == 3, "the third worker serves")
        lost = [session_at(server, pid) for pid in server.workers()]
        hang_up(server, 2)
        assert [status(server, session) for session in lost] == [410] * 3
        new = Session()
        assert [count(server, new) for _ in range(5)] == [1, 2, 3, 4, 5]
        assert len(server.owners()) == 2


# To other settings


def test_reload_that_changes_the_listener_serves_on_the_new_one_alone(tmp_path: Path) -> None:
    # The command line would win over the file.
    command = program(
        tmp_path / "gunicorn",
        'at = sys.argv.index("-b"); os.environ["BIND"] = sys.argv[at + 1]\ndel sys.argv[at : at + 2]',
    )
    config = CONFIG + 'import os\nbind = [os.environ["BIND"]]\n'
    with gunicorn_server(app=PROBE, config=config, workers=2, gunicorn=command) as server:
        lost = [session_at(server, pid) for pid in server.workers()]
        with socket.create_server(("127.0.0.1", 0)) as reserved:
            port = reserved.getsockname()[1]
        reconfigure(server, 'bind = [os.environ["BIND"]]', f'bind = ["127.0.0.1:{port}"]')
        hang_up(server, 2)
        socket.create_server(("127.0.0.1", server.port)).close()
        server.port = port
        assert [status(server, session) for session in lost] == [410, 410]
        new = Session()
        assert [count(server, new) for _ in range(5)] == [1, 2, 3, 4, 5]
        assert server.stop() == 0
        assert_nothing_left(server)
        assert errors(server.log()) == []


def test_reload_serves_the_app_as_its_module_is_now(tmp_path: Path) -> None:
    module = tmp_path / "deployed.py"
    text = """
from starlette.responses import JSONResponse
from tests.e2e.apps.probe import app

async def version(request):
    return JSONResponse(1)

app.add_route("/version", version)
"""
    module.write_text(text)
    with gunicorn_server("--pythonpath", str(tmp_path), app="deployed:app", workers=2) as server:
        lost = [session_at(server, pid) for pid in server.workers()]
        assert ask(server, "/version").json() == 1
        module.write_text(text.replace("JSONResponse(1)", "JSONResponse({'version': 2})"))
        hang_up(server, 2)
        assert [status(server, session) for session in lost] == [410, 410]
        for pid in server.workers():
            with connection_to(server, pid) as connection:
                assert ask(connection, "/version").json() == {"version": 2}
        new = Session()
        assert [count(server, new) for _ in range(5)] == [1, 2, 3, 4, 5]


def test_reload_that_changes_the_log_logs_there_and_as_much_as_it_says() -> None:
    config = CONFIG + 'errorlog = "{parent}/log"\nloglevel = "info"\n'
    with probe_server(config=config) as server:
        reconfigure(server, '/log"', '/other"')
        reconfigure(server, 'loglevel = "info"', f'loglevel = "debug"\naccesslog = "{server.parent}/access"')
        old_log, server.log_path = server.log_path, server.parent / "other"
        old = server.workers()
        lost = session_at(server, old[0])
        server.send(signal.SIGHUP)
        until(lambda: server.log_path.exists() and server.ready_workers() == 2, "the new workers tell the new log so")
        until(lambda: not any(map(is_alive, old)), "the old workers are gone")
        assert status(server, lost) == 410
        new = session_at(server, server.workers()[0])
        assert count(server, new) == 2
        until(lambda: "POST /count" in (server.parent / "access").read_text(), "requests are logged")
        log = server.log()
        assert log.count("This worker is owner") == 2
        assert "[DEBUG]" in log
        assert log.count(f"{lost.owner}") >= 1, "the loss is logged there too"
        assert old_log.read_text().count("This worker is owner") == 2
        assert server.stop() == 0


def test_reload_that_switches_routing_off_says_so_and_back_on_routes_again() -> None:
    config = CONFIG.replace("directory=", "routing='auto', directory=")
    with probe_server(config=config) as server:
        (directory,) = server.directories()
        lost = [session_at(server, pid) for pid in server.workers()]
        reconfigure(server, "'auto'", "'off'")
        hang_up(server, 2)
        (warning,) = [line for line in server.log().splitlines() if "[WARNING]" in line]
        assert "Session routing is off now: sessions made before this reload start over" in warning
        assert server.owners() == set()
        for pid in server.workers():
            with connection_to(server, pid) as connection:
                assert ask(connection, "/count", Session(), method="POST").json() == {"count": 1, "pid": pid}
        reconfigure(server, "'off'", "'auto'")
        hang_up(server, 2)
        assert [status(server, session) for session in lost] == [410, 410]
        new = Session()
        assert [count(server, new) for _ in range(5)] == [1, 2, 3, 4, 5]
        assert server.directories() == [directory]
        assert server.stop() == 0
        assert_nothing_left(server)
        assert errors(server.log()) == []


# To what is broken


@pytest.mark.parametrize("broken", ["this is no Python", "import missing_module", "no_such_setting = print(", "1 / 0"])
def test_reload_to_a_configuration_that_fails_ends_the_server_when_what_is_in_flight_is_finished(
    broken: str, journal: Journal
) -> None:
    with ThreadPoolExecutor() as pool, probe_server(config=CONFIG + "# the end\n", journal=journal) as server:
        reconfigure(server, "# the end", broken)
        receiver, owner = server.workers()
        session = session_at(server, owner)
        with connection_to(server, receiver) as local, connection_to(server, receiver) as forwarded:
            answers = [
                pool.submit(ask, local, "/hold?name=local"),
                pool.submit(ask, forwarded, "/hold?name=forwarded", session),
            ]
            journal.wait_for(f"hold local {receiver}")
            journal.wait_for(f"hold forwarded {owner}")
            server.send(signal.SIGHUP)
            # gunicorn itself ends, and leaves its workers to themselves.
            assert server.wait() != 0
            until(
                lambda: server.log().count(f"Stopping: the arbiter (pid {server.pid}) is gone") == 2,
                "both have seen it",
            )
            journal.release("local")
            journal.release("forwarded")
            assert [answer.result().status for answer in answers] == [200, 200]
        assert_nothing_left(server)
        socket.create_server(("127.0.0.1", server.port)).close()
        assert "Failed to read config file" in server.log()


def test_reload_of_an_app_that_can_not_be_loaded_any_more_ends_the_server_and_leaves_nothing(journal: Journal) -> None:
    config = CONFIG + 'raw_env = ["BREAK="]\n'
    with (
        ThreadPoolExecutor() as pool,
        probe_server(config=config, app="tests.e2e.apps.breakable:app", journal=journal) as server,
    ):
        reconfigure(server, "BREAK=", "BREAK=yes")
        receiver, owner = server.workers()
        session = session_at(server, owner)
        with connection_to(server, receiver) as local, connection_to(server, receiver) as forwarded:
            answers = [
                pool.submit(ask, local, "/hold?name=local"),
                pool.submit(ask, forwarded, "/hold?name=forwarded", session),
            ]
            journal.wait_for(f"hold local {receiver}")
            journal.wait_for(f"hold forwarded {owner}")
            server.send(signal.SIGHUP)
            until(lambda: server.log().count("Shutting down") >= 2, "the old workers are stopping")
            journal.release("local")
            journal.release("forwarded")
            for answer in answers:
                # gunicorn halts at the first worker that fails, and may end at the second without having waited.
                with suppress(HTTPException, ConnectionError):
                    assert answer.result().status == 200
        assert server.wait() != 0
        assert "the app can't be loaded" in server.log()
        assert_nothing_left(server)
        socket.create_server(("127.0.0.1", server.port)).close()


@pytest.mark.parametrize(
    ("kept", "named"),
    [
        pytest.param('worker_class = "gym_gunicorn.RoutingWorker"\n', "on_starting, on_reload", id="no hooks"),
        pytest.param(CONFIG + 'worker_class = "uvicorn_worker.UvicornWorker"\n', "worker_class", id="worker class"),
        pytest.param('worker_class = "uvicorn_worker.UvicornWorker"\n', "on_exit, worker_class", id="neither"),
    ],
)
def test_reload_that_would_take_routing_away_keeps_it_and_says_so(kept: str, named: str) -> None:
    with probe_server(config=CONFIG) as server:
        (directory,) = server.directories()
        lost = [session_at(server, pid) for pid in server.workers()]
        (server.parent / "conf.py").write_text(kept.replace("{parent}", str(server.parent)))
        hang_up(server, 2)
        (error,) = errors(server.log())
        assert "The configuration that was read again lacks what session routing needs" in error
        assert named in error
        assert [status(server, session) for session in lost] == [410, 410]
        new = [session_at(server, pid) for pid in server.workers()]
        for calls, pid in enumerate(server.workers(), start=2):
            with connection_to(server, pid) as connection:
                assert [count(connection, session) for session in new] == [calls, calls]
        # Hooks run on: a dead worker's socket is removed, and so is everything at the end.
        dead = server.workers()[0]
        owner = owner_of(server, dead)
        os.kill(dead, signal.SIGKILL)
        until(lambda: owner not in server.owners(), "its socket is removed")
        assert server.directories() == [directory]
        assert server.stop() == 0
        assert_nothing_left(server)
