"""Hooks that fail: ours are contained, the user's do what they do in gunicorn, and nothing is lost or left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.e2e.calls import (
    Session,
    assert_nothing_left,
    connection_to,
    count,
    probe_server,
    session_at,
    status,
)
from tests.e2e.launching import hang_up, reconfigure
from tests.faults.files import remove_tree
from tests.gunicorn_server import CONFIG, GunicornServer, children, gunicorn_server, is_alive, until

# What a hook of ours is called with breaks whenever it is touched, where the test says so.
BREAKS = (
    CONFIG
    + """
import os

class Broken:
    \"\"\"Something of gunicorn's of which nothing works but the log.\"\"\"

    def __init__(self, log):
        self.log = log

    def __getattr__(self, name):
        raise RuntimeError(f"{name} is broken")

ours = {name}

def broken(thing):
    return Broken(thing.log) if os.path.exists("{parent}/broken") else thing

def {name}({parameters}):
    ours({arguments})
"""
)
PARAMETERS = {
    "on_reload": ("server", "broken(server)"),
    "nworkers_changed": ("server, new, old", "broken(server), new, old"),
    "pre_fork": ("server, worker", "broken(server), worker"),
    "worker_exit": ("server, worker", "broken(server), broken(worker)"),
    "child_exit": ("server, worker", "broken(server), broken(worker)"),
    "pre_exec": ("server", "broken(server)"),
    "on_exit": ("server", "broken(server)"),
}


def breaking(name: str) -> str:
    parameters, arguments = PARAMETERS[name]
    filled = BREAKS.replace("{name}", name).replace("{parameters}", parameters)
    # CONFIG holds a comprehension over `name`, which stays as it is.
    return filled.replace("{arguments}", arguments).replace(f"{{{name}: getattr", "{name: getattr")


def reload(server: GunicornServer) -> None:
    hang_up(server, 2)


def kill_a_worker(server: GunicornServer) -> None:
    ready = server.ready_workers()
    os.kill(server.workers()[0], signal.SIGKILL)
    until(lambda: server.ready_workers() == ready + 1, "it is replaced")


def stop_a_worker(server: GunicornServer) -> None:
    ready = server.ready_workers()
    os.kill(server.workers()[0], signal.SIGTERM)
    until(lambda: server.ready_workers() == ready + 1, "it is replaced")


def upgrade_and_roll_back(server: GunicornServer) -> None:
    old, ready = server.workers(), server.ready_workers()
    server.send(signal.SIGUSR2)
    until(lambda: server.ready_workers() == ready + 2, "the new workers serve")
    (arbiter,) = set(server.workers()) - set(old)
    new = [arbiter, *children(arbiter)]
    server.seen.update(new)
    os.kill(arbiter, signal.SIGTERM)
    until(lambda: not any(map(is_alive, new)), "the new server is gone")


def add_a_worker(server: GunicornServer) -> None:
    ready = server.ready_workers()
    server.send(signal.SIGTTIN)
    until(lambda: server.ready_workers() == ready + 1, "it serves")


def nothing(server: GunicornServer) -> None:
    """The hook is called at the end."""


@pytest.mark.parametrize(
    ("name", "provoke"),
    [
        ("on_reload", reload),
        ("nworkers_changed", add_a_worker),
        ("worker_exit", stop_a_worker),
        ("child_exit", kill_a_worker),
        ("pre_exec", upgrade_and_roll_back),
        ("on_exit", nothing),
    ],
)
def test_hook_of_ours_that_fails_is_logged_and_the_server_lives(
    name: str, provoke: Callable[[GunicornServer], None]
) -> None:
    with probe_server(config=breaking(name)) as server:
        (server.parent / "broken").touch()
        provoke(server)
        sessions = [session_at(server, pid) for pid in server.workers()]
        for calls, pid in enumerate(server.workers(), start=2):
            with connection_to(server, pid) as connection:
                assert [count(connection, session) for session in sessions] == [calls] * len(sessions)
        assert server.stop() == 0
        assert f"gym-gunicorn: the hook {name} failed" in server.log()
        assert "is broken" in server.log()
        assert_nothing_left(server)


def test_worker_for_which_our_pre_fork_fails_serves_no_session_wrongly() -> None:
    with probe_server(config=breaking("pre_fork")) as server:
        killed, other = server.workers()
        kept = session_at(server, other)
        broken = server.parent / "broken"
        broken.touch()
        os.kill(killed, signal.SIGKILL)
        until(lambda: "gym-gunicorn: the hook pre_fork failed" in server.log(), "its replacement is forked")
        broken.unlink()
        until(lambda: len(server.owners()) == 2, "there are two owners again")
        for calls, pid in enumerate(server.workers(), start=2):
            with connection_to(server, pid) as connection:
                assert count(connection, kept) == calls
        assert server.stop() == 0
        assert_nothing_left(server)


UNBINDABLE = """
import os

from gym_gunicorn import SessionRouting

class Unbindable(SessionRouting):
    def post_worker_init(self, worker):
        # What stands at the path of the socket is not ours to remove.
        if os.path.exists("{parent}/taken"):
            os.mkdir(worker.directory.socket_path(worker.owner_id))
        super().post_worker_init(worker)

worker_class = "gym_gunicorn.RoutingWorker"
routing = Unbindable(directory="{parent}")
globals().update({name: getattr(routing, name) for name in SessionRouting.HOOKS})
"""


def test_worker_that_can_not_bind_its_socket_is_started_again_until_it_can() -> None:
    with probe_server(config=UNBINDABLE) as server:
        (directory,) = server.directories()
        killed, other = server.workers()
        lost, kept = session_at(server, killed), session_at(server, other)
        taken = server.parent / "taken"
        taken.touch()
        os.kill(killed, signal.SIGKILL)
        until(lambda: server.log().count("The private socket of worker") >= 2, "it is tried again")
        # What reaches the other worker is right.
        with connection_to(server, other, among=[other]) as connection:
            assert count(connection, kept) == 2
        taken.unlink()
        until(lambda: server.ready_workers() == 3, "it serves")
        for path in directory.iterdir():
            if path.is_dir():
                path.rmdir()
        assert status(server, lost) == 410
        for calls, pid in enumerate(server.workers(), start=3):
            with connection_to(server, pid) as connection:
                assert count(connection, kept) == calls
        assert server.stop() == 0
        assert_nothing_left(server)


def test_server_whose_directory_was_removed_serves_again_after_a_reload() -> None:
    with probe_server() as server:
        (directory,) = server.directories()
        lost = [session_at(server, pid) for pid in server.workers()]
        remove_tree(directory)
        hang_up(server, 2)
        assert [status(server, session) for session in lost] == [410, 410]
        for pid in server.workers():
            new = session_at(server, pid)
            assert [count(server, new) for _ in range(3)] == [2, 3, 4]
        assert server.stop() == 0
        assert_nothing_left(server)


# The user's own

RAISES = (
    CONFIG
    + """
ours = {name}

def {name}({parameters}):
    ours({parameters})
    raise RuntimeError("the user's hook breaks")
"""
)


def raising(name: str, parameters: str) -> str:
    filled = RAISES.replace("{name}", name).replace("{parameters}", parameters)
    return filled.replace(f"{{{name}: getattr", "{name: getattr")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("on_starting", "server"), ("nworkers_changed", "server, new, old"), ("post_worker_init", "worker")],
)
def test_users_hook_that_raises_at_the_start_ends_it_and_leaves_nothing(name: str, parameters: str) -> None:
    with gunicorn_server(config=raising(name, parameters), workers=2, ready=False) as server:
        assert server.wait() != 0
        assert "the user's hook breaks" in server.log()
        assert_nothing_left(server)


def test_users_pre_fork_that_raises_ends_the_start_and_leaves_nothing() -> None:
    with gunicorn_server(config=raising("pre_fork", "server, worker"), workers=2, ready=False) as server:
        assert server.wait() != 0
        assert "the user's hook breaks" in server.log()
        assert_nothing_left(server)


def test_users_worker_exit_that_raises_is_logged_and_the_server_lives() -> None:
    with probe_server(config=raising("worker_exit", "server, worker")) as server:
        told, other = server.workers()
        lost, kept = session_at(server, told), session_at(server, other)
        os.kill(told, signal.SIGTERM)
        until(lambda: server.ready_workers() == 3, "it is replaced")
        assert status(server, lost) == 410
        assert [count(server, kept) for _ in range(3)] == [2, 3, 4]
        assert "the user's hook breaks" in server.log()
        assert server.stop() == 0
        assert_nothing_left(server)


@pytest.mark.parametrize(
    ("name", "parameters", "signum", "to_a_worker"),
    [
        ("child_exit", "server, worker", signal.SIGKILL, True),
        ("on_reload", "server", signal.SIGHUP, False),
        ("on_exit", "server", signal.SIGTERM, False),
    ],
)
def test_users_hook_that_raises_ends_the_server_as_stock_gunicorn_and_leaves_nothing(
    name: str, parameters: str, signum: signal.Signals, to_a_worker: bool
) -> None:
    with probe_server(config=raising(name, parameters)) as server:
        os.kill(server.workers()[0] if to_a_worker else server.pid, signum)
        assert server.wait() != 0
        assert "the user's hook breaks" in server.log()
        assert_nothing_left(server)


def test_users_pre_exec_that_raises_costs_the_sessions_and_not_the_server() -> None:
    # The child waits as long for workers that are not its own.
    with probe_server("--graceful-timeout", "3", config=raising("pre_exec", "server")) as server:
        old = server.workers()
        lost = [session_at(server, pid) for pid in old]
        server.send(signal.SIGUSR2)
        # gunicorn (27.0): the child that was to become the new arbiter stops the workers of the living one.
        until(lambda: not any(map(is_alive, old)), "the workers are gone")
        until(lambda: server.ready_workers() == 4, "they are replaced")
        assert [status(server, session) for session in lost] == [410, 410]
        new = Session()
        assert [count(server, new) for _ in range(5)] == [1, 2, 3, 4, 5]
        assert server.stop() == 0
        assert_nothing_left(server)


def test_server_reduced_to_one_worker_stays_routed_though_its_directory_is_removed() -> None:
    config = CONFIG + "workers = 2\n"
    with probe_server(config=config) as server:
        lost = [session_at(server, pid) for pid in server.workers()]
        reconfigure(server, "workers = 2", "workers = 1")
        hang_up(server, 1)
        (directory,) = server.directories()
        remove_tree(directory)
        (worker,) = server.workers()
        os.kill(worker, signal.SIGKILL)
        until(lambda: server.ready_workers() == 4, "it is replaced")
        assert "had been removed" in server.log()
        assert [status(server, session) for session in lost] == [410, 410]
        assert server.stop() == 0
        assert "Traceback" not in server.log()
        assert_nothing_left(server)
