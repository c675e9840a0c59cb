"""The ways to start a server, and the starts that fail."""

from __future__ import annotations

import asyncio
import getpass
import grp
import os
import pwd
import re
import signal
import socket
import ssl
import subprocess
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path

import pytest

from tests.e2e.calls import (
    PROBE,
    Journal,
    Session,
    UnixConnection,
    ask,
    assert_nothing_left,
    connection_to,
    count,
    probe_server,
    session_at,
    status,
)
from tests.faults.crowd import memory
from tests.gunicorn_server import CONFIG, ROOT, GunicornServer, children, errors, gunicorn_server, is_alive, until
from tests.sessions import play


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path)


def named_directory(server: GunicornServer) -> Path:
    """Return the socket directory that the log names."""
    (path,) = set(re.findall(r"/[\w/-]*gym-gunicorn-\w+", server.log()))
    return Path(path)


# gunicorn's flags override the file


def test_flag_overrides_the_number_of_workers_in_the_file() -> None:
    with gunicorn_server("-w", "3", config=CONFIG + "workers = 1\n", workers=3) as server:
        assert len(server.workers()) == 3
        assert len(server.owners()) == 3
        assert asyncio.run(play(server.url, 20)) == {"right": 20}


def test_flag_overrides_the_listener_in_the_file() -> None:
    config = CONFIG + 'bind = "127.0.0.1:1"\n'
    with gunicorn_server(config=config, workers=2) as server:
        assert asyncio.run(play(server.url, 20)) == {"right": 20}


def test_sessions_are_right_over_a_unix_listener(tmp_path: Path) -> None:
    listener = tmp_path / "listener"
    with probe_server("-b", f"unix:{listener}") as server:
        workers = server.workers()
        sessions = [session_at(server, pid) for pid in workers]
        for calls, pid in enumerate(workers, start=2):
            with connection_to(server, pid, make=lambda: UnixConnection(listener)) as connection:
                assert [count(connection, session) for session in sessions] == [calls, calls]


def test_timeout_of_the_flag_ends_a_worker_that_hangs(journal: Journal) -> None:
    config = CONFIG + "timeout = 600\n"
    with ThreadPoolExecutor() as pool, probe_server("--timeout", "10", config=config, journal=journal) as server:
        hung, other = server.workers()
        lost, kept = session_at(server, hung), session_at(server, other)
        with connection_to(server, hung) as connection:
            answer = pool.submit(ask, connection, "/block")
            journal.wait_for(f"block {hung}")
            with pytest.raises((HTTPException, ConnectionError)):
                answer.result()
        assert f"WORKER TIMEOUT (pid:{hung})" in server.log()
        until(lambda: server.ready_workers() == 3, "the worker is replaced")
        assert status(server, lost) == 410
        assert count(server, kept) == 2


def test_workers_still_share_a_preloaded_app_after_a_full_garbage_collection() -> None:
    with gunicorn_server("--preload", app="tests.e2e.apps.large:app", workers=2) as server:
        before = {pid: memory(pid) for pid in server.workers()}
        collecting = ask(server, "/collect").json()
        # A third of what the app has loaded, or all of it.
        assert memory(collecting) - before[collecting] < 10 * 2**20


def test_preloaded_app_is_imported_once_and_sessions_are_right(journal: Journal) -> None:
    with probe_server("--preload", journal=journal) as server:
        assert [line for line in journal.lines() if line.startswith("import")] == [f"import {server.pid}"]
        first, second = server.workers()
        sessions = [session_at(server, first), session_at(server, second)]
        assert sessions[0].owner != sessions[1].owner
        assert [count(server, session) for session in sessions for _ in range(5)] == [2, 3, 4, 5, 6] * 2


def test_sessions_are_right_over_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    trusting = ssl.create_default_context(cafile=str(certificate))
    trusting.check_hostname = False
    with probe_server("--certfile", str(certificate), "--keyfile", str(key)) as server:

        def make() -> HTTPConnection:
            return HTTPSConnection("127.0.0.1", server.port, timeout=60, context=trusting)

        owner, receiver = server.workers()
        session = Session()
        with connection_to(server, owner, make=make) as local, connection_to(server, receiver, make=make) as forwarded:
            assert count(local, session) == 1
            assert count(forwarded, session) == 2
            seen = ask(forwarded, "/seen", session).json()
        assert seen["pid"] == owner
        assert seen["scheme"] == "https"
        assert errors(server.log()) == []


# The interpreter may lie where only root can read: what a worker would import later is imported here.
IMPORTS_EVERYTHING = """
import uvicorn

def nothing(scope, receive, send): ...

everything = uvicorn.Config(nothing, log_config=None)
everything.load()
everything.get_loop_factory()
"""


def test_sockets_belong_to_the_user_that_the_workers_run_as() -> None:
    user, group = _unprivileged_user()
    config = CONFIG + IMPORTS_EVERYTHING
    with gunicorn_server("--user", user, "--group", group, "--preload", config=config, workers=2) as server:
        expected = (pwd.getpwnam(user).pw_uid, grp.getgrnam(group).gr_gid)
        (directory,) = server.directories()
        for path in (directory, *directory.glob("*.sock")):
            assert (path.stat().st_uid, path.stat().st_gid) == expected
            assert path.stat().st_mode & 0o077 == 0, "others could enter or connect"
        for pid in server.workers():
            assert os.stat(f"/proc/{pid}").st_uid == expected[0]
        assert asyncio.run(play(server.url, 20)) == {"right": 20}
        old_workers = server.workers()
        server.send(signal.SIGHUP)
        until(lambda: server.ready_workers() == 4, "the new workers serve")
        until(lambda: not any(map(is_alive, old_workers)), "the old workers are gone")
        assert asyncio.run(play(server.url, 20)) == {"right": 20}
        assert errors(server.log()) == []
        assert server.stop() == 0
        assert_nothing_left(server)


def _unprivileged_user() -> tuple[str, str]:
    """Return a user and group to run workers as: others than this process's, where root may choose them."""
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        return nobody.pw_name, grp.getgrgid(nobody.pw_gid).gr_name
    return getpass.getuser(), grp.getgrgid(os.getegid()).gr_name


def test_daemon_with_a_pid_file_serves_and_leaves_nothing(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    config = CONFIG + 'errorlog = "{parent}/log"\n'
    with gunicorn_server("--daemon", "--pid", str(pid_file), config=config, workers=2, ready=False) as server:
        assert server.wait() == 0
        until(lambda: server.ready_workers() == 2, "both workers serve")
        arbiter = int(pid_file.read_text())
        workers = children(arbiter)
        server.seen.update((arbiter, *workers))
        assert len(workers) == 2
        assert asyncio.run(play(server.url, 20)) == {"right": 20}
        os.kill(arbiter, signal.SIGTERM)
        assert_nothing_left(server)
        assert not pid_file.exists()


# Configurations


def test_app_of_another_folder_is_served(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.py").write_bytes((ROOT / "app.py").read_bytes())
    with gunicorn_server(app="elsewhere:app", cwd=tmp_path, workers=2) as server:
        assert asyncio.run(play(server.url, 20)) == {"right": 20}


@pytest.mark.parametrize("config", ["python:gym_gunicorn.conf", str(ROOT / "gunicorn.conf.py")], ids=["module", "file"])
def test_configuration_that_comes_with_the_package_serves_and_leaves_nothing(config: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_bytes((ROOT / "app.py").read_bytes())
    with gunicorn_server("-c", config, cwd=tmp_path, workers=2) as server:
        directory = named_directory(server)
        assert len(list(directory.glob("*.sock"))) == 2
        assert asyncio.run(play(server.url, 20)) == {"right": 20}
        assert server.stop() == 0
        assert not directory.exists()


def test_configuration_that_imports_the_defaults_serves_as_many_workers_as_web_concurrency_says() -> None:
    config = "from gym_gunicorn.conf import *\nworkers = workers\n"
    with gunicorn_server(config=config, env={"WEB_CONCURRENCY": "3"}, workers=3) as server:
        directory = named_directory(server)
        assert len(server.workers()) == 3
        assert asyncio.run(play(server.url, 20)) == {"right": 20}
        assert server.stop() == 0
        assert not directory.exists()


def test_hooks_of_the_user_that_call_ours_run_beside_them(journal: Journal) -> None:
    config = """
from gym_gunicorn import SessionRouting
from tests.e2e.apps.journal import note

worker_class = "gym_gunicorn.RoutingWorker"
routing = SessionRouting(directory="{parent}")

def with_a_note(name):
    ours = getattr(routing, name)
    def hook(*arguments):
        note(name)
        ours(*arguments)
    # gunicorn counts a hook's parameters.
    return {
        1: lambda server: hook(server),
        2: lambda server, worker: hook(server, worker),
        3: lambda server, new, old: hook(server, new, old),
    }[3 if name == "nworkers_changed" else 2 if name in ("pre_fork", "worker_exit", "child_exit") else 1]

globals().update({name: with_a_note(name) for name in SessionRouting.HOOKS})
"""
    with probe_server(config=config, journal=journal) as server:
        workers = server.workers()
        sessions = [session_at(server, pid) for pid in workers]
        for pid in workers:
            with connection_to(server, pid) as connection:
                assert [ask(connection, "/seen", session).json()["pid"] for session in sessions] == workers
        assert server.stop() == 0
        assert_nothing_left(server)
        assert {f"post_worker_init {pid}" for pid in workers} < set(journal.lines())
        assert {f"worker_exit {pid}" for pid in workers} < set(journal.lines())
        for name in ("on_starting", "pre_fork", "child_exit", "on_exit"):
            assert f"{name} {server.pid}" in journal.lines()


def test_one_line_at_start_says_what_ends_sessions() -> None:
    with gunicorn_server() as server:
        # A library for WebSockets is installed here; where there is none, the test of the wheel finds a line.
        assert "WebSocket" not in server.log()
        (line,) = [line for line in server.log().splitlines() if "max_requests" in line]
        assert "[INFO]" in line
        assert "A session ends with its worker" in line
        assert "reload" in line


# One worker, and no routing

TELLS_WHAT_IT_SERVES = """
def post_worker_init(worker):
    routing.post_worker_init(worker)
    worker.log.info("serves a %s with %s", type(worker.wsgi).__name__, worker.wsgi.user_middleware)
"""
UNTOUCHED = r"serves a Starlette with \[Middleware\(SessionMiddleware, secret_key='of the tests'\)\]"


def test_server_with_one_worker_has_no_middleware_no_socket_and_no_extra_key() -> None:
    with probe_server(workers=1, config=CONFIG + TELLS_WHAT_IT_SERVES) as server:
        session = Session()
        assert [count(server, session) for _ in range(5)] == [1, 2, 3, 4, 5]
        assert set(session.data) == {"id"}
        assert re.search(UNTOUCHED, server.log())
        assert server.directories() == []
        assert "outing is on" not in server.log()


def test_session_of_a_server_with_one_worker_is_adopted_by_one_with_four() -> None:
    session = Session()
    with probe_server(workers=1) as server:
        assert count(server, session) == 1
    before = session.data
    with probe_server(workers=4) as server:
        # Its state went with its server; from here on it is right.
        assert [count(server, session) for _ in range(10)] == list(range(1, 11))
        assert session.data == before | {"gym_worker": session.owner}
        assert session.owner in server.owners()


def test_routing_switched_off_serves_as_stock_workers_do() -> None:
    config = CONFIG.replace("directory=", "routing='off', directory=") + TELLS_WHAT_IT_SERVES
    with probe_server(config=config) as server:
        session = Session()
        for pid in server.workers():
            with connection_to(server, pid) as connection:
                assert ask(connection, "/count", session, method="POST").json() == {"count": 1, "pid": pid}
        assert set(session.data) == {"id"}
        assert len(re.findall(UNTOUCHED, server.log())) == 2
        assert server.directories() == []
        assert errors(server.log()) == []


def test_app_without_sessions_is_served_by_whichever_worker_it_reaches_with_one_warning() -> None:
    with gunicorn_server(app="tests.e2e.apps.no_sessions:app", workers=4) as server:
        workers = server.workers()
        for pid in workers:
            with connection_to(server, pid) as connection:
                assert ask(connection, "/pid", Session()).json() == {"pid": pid}
        (warning,) = [line for line in server.log().splitlines() if "[WARNING]" in line]
        assert "found nothing to route by: the app has no SessionMiddleware that can be seen" in warning
        assert server.owners() == set()
        # A replacement does not warn again.
        os.kill(workers[0], signal.SIGKILL)
        until(lambda: server.ready_workers() == 5, "the worker is replaced")
        assert server.log().count("[WARNING] Session routing") == 1


# Starts that fail

WITHOUT_CHILD_EXIT = CONFIG + "del child_exit\n"
WITHOUT_HOOKS = 'worker_class = "gym_gunicorn.RoutingWorker"\n'
WITHOUT_FOLDER = CONFIG.replace("{parent}", "{parent}/missing")
LONG_PATH = 'import os\nos.mkdir("{parent}/' + "x" * 80 + '")\n' + CONFIG.replace("{parent}", "{parent}/" + "x" * 80)


@pytest.mark.parametrize(
    ("config", "arguments", "app", "cause"),
    [
        pytest.param(WITHOUT_CHILD_EXIT, [], PROBE, "needs the server hooks child_exit, which are not set", id="hook"),
        pytest.param(
            CONFIG,
            ["-k", "uvicorn_worker.UvicornWorker"],
            PROBE,
            "needs the worker class gym_gunicorn.RoutingWorker .* worker_class is 'uvicorn_worker.UvicornWorker'",
            id="other worker class",
        ),
        pytest.param(WITHOUT_HOOKS, [], PROBE, "session routing needs the server hooks", id="no hooks"),
        pytest.param(CONFIG, [], "tests.e2e.apps.missing:app", "No module named 'tests.e2e.apps.missing'", id="no app"),
        pytest.param(CONFIG, ["--preload"], "tests.e2e.apps.missing:app", "No module named", id="no app, preloaded"),
        pytest.param(CONFIG, [], "tests.e2e.apps.no_startup:app", "the database is not there", id="startup raises"),
        pytest.param(CONFIG, ["--certfile", "/missing.pem"], PROBE, 'certfile "/missing.pem" does not exist', id="tls"),
        pytest.param(WITHOUT_FOLDER, [], PROBE, "can't be made in '.*/missing': No such file", id="no folder"),
        pytest.param(LONG_PATH, [], PROBE, r"would have \d+ bytes, and Unix sockets allow 107", id="long path"),
    ],
)
def test_start_that_fails_says_why_and_leaves_nothing(config: str, arguments: list[str], app: str, cause: str) -> None:
    with gunicorn_server(*arguments, app=app, config=config, workers=2, ready=False) as server:
        assert server.wait() != 0
        assert re.search(cause, server.log()), server.log()
        assert_nothing_left(server)
        assert list(server.parent.rglob("gym-gunicorn-*")) == []


def test_start_on_a_port_in_use_says_so_and_leaves_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with gunicorn_server("-b", f"127.0.0.1:{port}", workers=2, ready=False) as server:
            assert server.wait() != 0
            assert f"Connection in use: ('127.0.0.1', {port})" in server.log()
            assert_nothing_left(server)
