"""Starts that fail: the cause in the log, once and in words, and nothing left."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gym_gunicorn import SessionRouting
from tests.e2e.calls import assert_nothing_left
from tests.gunicorn_server import CONFIG, GunicornServer, gunicorn_server

PROBE = "tests.e2e.apps.probe:app"


def assert_failed(server: GunicornServer, cause: str) -> None:
    assert server.wait() != 0
    assert len(re.findall(cause, server.log())) == 1, server.log()
    assert_nothing_left(server)


@pytest.mark.parametrize("hook", SessionRouting.HOOKS)
def test_start_without_one_of_our_hooks_says_which(hook: str) -> None:
    with gunicorn_server(app=PROBE, config=CONFIG + f"del {hook}\n", workers=2, ready=False) as server:
        assert_failed(server, rf"the server hooks? {hook}\b|and {hook} is not in place")


@pytest.mark.parametrize("arguments", [[], ["--preload"]], ids=["", "preload"])
@pytest.mark.parametrize(
    ("config", "cause"),
    [
        pytest.param(
            CONFIG + 'worker_class = "uvicorn_worker.UvicornWorker"\n', "needs the worker class", id="worker class"
        ),
        pytest.param(CONFIG.replace("{parent}", "/missing"), "can't be made in '/missing'", id="no folder"),
        pytest.param(CONFIG.replace("{parent}", "{parent}/conf.py"), "Not a directory", id="a file"),
        pytest.param(
            CONFIG.replace("{parent}", "{parent}/" + "x" * 80), r"would have \d+ bytes, and Unix", id="long path"
        ),
        pytest.param(CONFIG.replace("directory=", "routing='on', directory="), r"routing='on'\)", id="setting"),
        pytest.param(CONFIG + 'keyfile = "/missing.key"\n', '"/missing.key" does not exist', id="key"),
        pytest.param(CONFIG + 'certfile = "/missing.pem"\n', '"/missing.pem" does not exist', id="certificate"),
        pytest.param(CONFIG + 'user = "no-such-user"\n', "No such user: 'no-such-user'", id="user"),
    ],
)
def test_start_of_a_configuration_that_can_not_be_served_says_why_once(
    config: str, cause: str, arguments: list[str]
) -> None:
    with gunicorn_server(*arguments, app=PROBE, config=config, workers=2, ready=False) as server:
        assert_failed(server, cause)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize(
    ("app", "cause"),
    [
        ("tests.e2e.apps.missing:app", "No module named 'tests.e2e.apps.missing'"),
        ("tests.e2e.apps.probe:missing", "Failed to find attribute 'missing'"),
        ("tests.e2e.apps.no_startup:app", "the database is not there"),
    ],
    ids=["no module", "no app in it", "startup raises"],
)
def test_start_of_an_app_that_fails_says_why_and_leaves_nothing(workers: int, app: str, cause: str) -> None:
    with gunicorn_server(app=app, workers=workers, ready=False) as server:
        assert server.wait() != 0
        assert cause in server.log()
        assert_nothing_left(server)


def test_start_on_a_unix_listener_that_can_not_be_made_leaves_nothing(tmp_path: Path) -> None:
    with gunicorn_server("-b", f"unix:{tmp_path}/missing/listener", workers=2, ready=False) as server:
        assert server.wait() != 0
        assert "/missing/listener" in server.log()
        assert_nothing_left(server)
