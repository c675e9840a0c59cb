"""Workers that do not sign sessions alike are said to, and a secret is never in the log."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.calls import Journal, connection_to, probe_server
from tests.e2e.launching import hang_up, reconfigure
from tests.gunicorn_server import CONFIG, errors, until

APP = "tests.e2e.apps.own_secret:app"

# A reload reads the configuration again, and with it this part of the environment.
SET = CONFIG + 'raw_env = ["SECRET=the first one of all"]\n'

RANDOM = "signs session cookies with another secret"
CHANGED = "has changed with this reload"


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path)


def warnings(log: str) -> list[str]:
    return [line for line in log.splitlines() if "[WARNING]" in line]


def assert_no_secret_in(log: str, journal: Journal) -> None:
    found = {line.removeprefix("secret ").rpartition(" ")[0] for line in journal.lines() if line.startswith("secret ")}
    assert found
    for secret in found:
        assert secret not in log


def test_secret_made_in_each_worker_is_an_error_that_says_so(journal: Journal) -> None:
    with probe_server(app=APP, journal=journal) as server:
        # Both say so where each has made its secret before it looks at the other's.
        lines = errors(server.log())
        assert len(lines) in (1, 2)
        for line in lines:
            assert RANDOM in line
            assert "secrets.token_hex()" in line
            # It names the sibling, so that one can look.
            assert any(f"(pid:{pid})" in line for pid in server.workers())
        assert_no_secret_in(server.log(), journal)


def test_secret_made_before_the_fork_is_one_and_nothing_is_said(journal: Journal) -> None:
    with probe_server("--preload", app=APP, journal=journal) as server:
        assert errors(server.log()) == []
        assert warnings(server.log()) == []


def test_secret_of_the_environment_is_one_and_nothing_is_said(journal: Journal) -> None:
    with probe_server(app=APP, journal=journal, config=SET) as server:
        assert errors(server.log()) == []
        assert warnings(server.log()) == []


def test_worker_that_takes_the_place_of_a_dead_one_with_another_secret_is_an_error(journal: Journal) -> None:
    with probe_server(app=APP, journal=journal) as server:
        before = len(errors(server.log()))
        os.kill(server.workers()[0], signal.SIGKILL)
        until(lambda: server.ready_workers() == 3, "another worker serves")
        until(lambda: sum(RANDOM in line for line in errors(server.log())) == before + 1, "the new worker says so")


def test_reload_with_the_same_secret_says_nothing(journal: Journal) -> None:
    with probe_server(app=APP, journal=journal, config=SET) as server:
        hang_up(server, 2)
        assert errors(server.log()) == []
        assert [line for line in warnings(server.log()) if CHANGED in line] == []


@pytest.mark.parametrize(
    "setting",
    [["SECRET=the second one of all"], ["SECRET=the first one of all", "COOKIE=another"]],
    ids=["secret", "cookie"],
)
def test_reload_that_changes_secret_or_cookie_is_said_once(setting: list[str], journal: Journal) -> None:
    with probe_server(app=APP, journal=journal, config=SET) as server:
        pid = server.workers()[0]
        # Old and new workers are there at the same time.
        with connection_to(server, pid) as connection:
            connection.request("GET", "/hold?name=x")
            journal.wait_for(f"hold x {pid}")
            reconfigure(server, 'raw_env = ["SECRET=the first one of all"]', f"raw_env = {setting}")
            server.send(signal.SIGHUP)
            until(lambda: server.ready_workers() == 4, "the new workers serve")
            journal.release("x")
            assert connection.getresponse().status == 200
        until(lambda: len(server.workers()) == 2, "the old workers are gone")
        assert errors(server.log()) == []
        assert len([line for line in warnings(server.log()) if CHANGED in line]) == 1
        assert_no_secret_in(server.log(), journal)


def test_change_of_the_secret_is_said_though_the_old_workers_were_gone_first(journal: Journal) -> None:
    with probe_server(app=APP, journal=journal, config=SET) as server:
        # New workers take longer to load their app than idle ones to stop.
        slow = "import time\n\n\ndef post_fork(server, worker):\n    time.sleep(5)\n\n\n"
        reconfigure(server, "raw_env", slow + "raw_env")
        reconfigure(server, "the first one of all", "the second one of all")
        hang_up(server, 2)
        assert len([line for line in warnings(server.log()) if CHANGED in line]) == 1


def test_reload_that_makes_the_secret_random_is_an_error(journal: Journal) -> None:
    with probe_server(app=APP, journal=journal, config=SET) as server:
        reconfigure(server, "SECRET=the first one of all", "OTHER=1")
        hang_up(server, 2)
        assert sum(RANDOM in line for line in errors(server.log())) in (1, 2)
        assert_no_secret_in(server.log(), journal)
