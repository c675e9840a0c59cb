"""The doctor loads what gunicorn would load, in processes of its own."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest

from gym_gunicorn.cli.diagnosis.facts import Configuration
from gym_gunicorn.cli.diagnosis.loading import load
from gym_gunicorn.cli.doctor import add_arguments, run
from tests.gunicorn_server import is_alive, until

CONF = "from gym_gunicorn.conf import *\n"
APP = """
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware

app = Starlette(middleware=[Middleware(SessionMiddleware, secret_key="9f86d081884c7d659a2feaa0c55ad015")])
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a good configuration and a good app."""
    monkeypatch.chdir(tmp_path)
    for name in ("GUNICORN_CMD_ARGS", "WEB_CONCURRENCY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "conf.py").write_text(CONF)
    (tmp_path / "served.py").write_text(APP)
    return tmp_path


def configuration(*arguments: str) -> Configuration:
    found = load([*arguments], 60)
    assert found.configuration is not None, found.failure
    return found.configuration


def codes(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run the subcommand, and return its exit status and what it found, by code."""
    parser = ArgumentParser()
    add_arguments(parser)
    status = run(parser.parse_args(["--json", *arguments]))
    shown = json.loads(capsys.readouterr().out)
    assert shown["exit_status"] == status
    return status, {finding["code"]: finding for finding in shown["findings"]}


def test_a_good_configuration_has_nothing_worse_than_notes(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = codes(capsys, "--strict", "-c", "conf.py", "served:app")
    assert status == 0
    assert {finding["level"] for finding in found.values()} <= {"ok", "note"}
    assert {"routed", "carrier-cookie", "sockets"} <= set(found)


def test_command_line_environment_and_file_mean_what_they_mean_to_gunicorn(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "gunicorn.conf.py").write_text(CONF + "workers = 3\ntimeout = 7\ngraceful_timeout = 9\n")
    assert configuration("served:app").workers == 3
    monkeypatch.setenv("GUNICORN_CMD_ARGS", "--workers 5 --timeout 8")
    assert configuration("served:app").workers == 5
    found = configuration("served:app", "-w", "6")
    assert (found.workers, found.timeout, found.graceful_timeout) == (6, 8, 9)


def test_a_module_is_a_configuration() -> None:
    found = configuration("-c", "python:gym_gunicorn.conf", "served:app")
    assert set(found.hooks.values()) == {"ours"}
    assert found.is_routing_worker
    assert found.routing is not None and found.routing.directory == "/tmp"


def test_the_working_directory_may_be_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert load(["-c", "../conf.py", "--chdir", "..", "served:app"], 60).app is not None
    assert load(["-c", "../conf.py", "served:app"], 60).app is None


def test_the_environment_that_the_configuration_sets_is_there(folder: Path) -> None:
    (folder / "needy.py").write_text("import os\nos.environ['NEEDED']\n" + APP)
    assert load(["-c", "conf.py", "needy:app"], 60).failure is not None
    assert load(["-c", "conf.py", "-e", "NEEDED=1", "needy:app"], 60).failure is None


def test_all_settings_that_matter_are_read(folder: Path) -> None:
    (folder / "all.py").write_text(
        CONF + "max_requests = 10\npreload_app = True\nreload = True\nreuse_port = True\numask = 0o77\n"
        "forwarded_allow_ips = '*'\nbind = ['0.0.0.0:80', 'unix:/x']\nstatsd_host = 'unix:///no/such.sock'\n"
    )
    found = configuration("-c", "all.py", "served:app")
    assert (found.max_requests, found.preload_app, found.reload, found.reuse_port) == (10, True, True, True)
    assert (found.umask, found.forwarded_allow_ips, found.bind) == (0o77, ["*"], ["0.0.0.0:80", "unix:/x"])
    assert found.statsd_error == "No such file or directory"


@pytest.mark.parametrize(
    ("code", "conf"),
    [
        ("hooks-lost", CONF + "def post_worker_init(worker): pass\n"),
        ("settings-unused", CONF + "from gym_gunicorn import SessionRouting\nmine = SessionRouting(max_forwards=5)\n"),
        ("worker-class", CONF + "worker_class = 'sync'\n"),
        ("worker-class-broken", CONF + "worker_class = 'no_such_module.Worker'\n"),
        ("hooks-missing", "worker_class = 'gym_gunicorn.RoutingWorker'\nworkers = 2\n"),
        ("not-configured", "workers = 2\n"),
        ("folder", CONF + "routing.__init__(directory='/no/such/folder')\n"),
    ],
)
def test_a_bad_configuration_is_an_error(
    folder: Path, capsys: pytest.CaptureFixture[str], code: str, conf: str
) -> None:
    (folder / "conf.py").write_text(conf.replace("routing.", "from gym_gunicorn.conf import routing\nrouting."))
    status, found = codes(capsys, "-c", "conf.py", "served:app")
    assert found[code]["level"] == "error"
    assert status == 1


def test_hooks_that_call_ours_are_all_right(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "conf.py").write_text(
        "from gym_gunicorn import SessionRouting\nfrom gym_gunicorn.conf import *\n"
        "routing = SessionRouting(max_forwards=5)\n"
        "globals().update({name: getattr(routing, name) for name in SessionRouting.HOOKS})\n"
        "def post_worker_init(worker):\n    routing.post_worker_init(worker)\n"
    )
    status, found = codes(capsys, "-c", "conf.py", "served:app")
    assert status == 0
    assert not {"hooks-lost", "hooks-unknown", "settings-unused", "several-routings"} & set(found)


def test_a_secret_that_each_process_makes_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "served.py").write_text("import secrets\n" + APP.replace('"9f86', 'secrets.token_hex() + "9f86'))
    status, found = codes(capsys, "-c", "conf.py", "served:app")
    assert status == 1
    assert found["secret-random"]["level"] == "error"


def test_warnings_count_where_strict(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("-c", "conf.py", "--timeout", "5", "served:app")
    assert codes(capsys, *arguments)[0] == 0
    assert codes(capsys, "--strict", *arguments)[0] == 1


@pytest.mark.parametrize(
    ("conf", "app", "code", "said"),
    [
        ("1 / 0\n", APP, "configuration-broken", "ZeroDivisionError: division by zero"),
        ("x = (\n", APP, "configuration-broken", "SyntaxError: '(' was never closed"),
        ("workers = 'many'\n", APP, "configuration-broken", "ValueError"),
        (CONF, "import nowhere\n", "application-broken", "No module named 'nowhere'"),
        (CONF, "raise RuntimeError('no database')\n", "application-broken", "RuntimeError: no database"),
        (CONF, "import os\nos._exit(5)\n", "application-broken", "ended by itself, with status 5"),
        (CONF, "import os\nos.abort()\n", "application-broken", "ended by SIGABRT"),
        (CONF, APP.replace("secret_key", "secret_kye"), "inspection-broken", "unexpected keyword argument"),
        (CONF, "", "application-broken", "Failed to find attribute 'app' in"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_words(
    folder: Path, capsys: pytest.CaptureFixture[str], conf: str, app: str, code: str, said: str
) -> None:
    (folder / "conf.py").write_text(conf)
    (folder / "served.py").write_text(app)
    status, found = codes(capsys, "-c", "conf.py", "served:app")
    assert status == 2
    assert said in found[code]["text"]


def test_a_bad_argument_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = codes(capsys, "-c", "conf.py", "--workers=many", "served:app")
    assert status == 2
    assert "argument -w/--workers: invalid int value: 'many'" in found["configuration-broken"]["text"]


def test_no_app_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = codes(capsys, "-c", "conf.py")
    assert status == 2
    assert "No application module specified." in found["configuration-broken"]["text"]


def test_an_app_that_is_not_loaded_in_time_is_ended_with_all_that_it_started(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "served.py").write_text(
        "import os, pathlib, subprocess, time\nchild = subprocess.Popen(['sleep', '600'])\n"
        "pathlib.Path('pids').write_text(f'{os.getpid()} {child.pid}')\ntime.sleep(600)\n"
    )
    status, found = codes(capsys, "-c", "conf.py", "--load-timeout", "15", "served:app")
    assert status == 2
    assert "not loaded within 15 seconds" in found["application-broken"]["text"]
    for pid in map(int, (folder / "pids").read_text().split()):
        until(lambda pid=pid: not is_alive(pid), "it is ended")  # type: ignore[misc]  # bound now


def test_what_the_app_prints_is_not_shown(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "served.py").write_text("import os\nprint('hunter2')\nos.write(2, b'hunter2')\n" + APP)
    parser = ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args(["-c", "conf.py", "served:app"])) == 0
    assert "hunter2" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("failing", [True, False])
def test_no_secret_is_shown_whatever_happens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], failing: bool
) -> None:
    monkeypatch.setenv("SESSION_SECRET", "hunter2")
    app = "import os\n" + APP.replace('"9f86d081884c7d659a2feaa0c55ad015"', 'os.environ["SESSION_SECRET"]')
    (folder / "served.py").write_text(app + "raise ValueError('hunter2 is bad')\n" * failing)
    for arguments in ([], ["--json"]):
        parser = ArgumentParser()
        add_arguments(parser)
        assert run(parser.parse_args([*arguments, "-c", "conf.py", "served:app"])) == (2 if failing else 0)
        assert "hunter2" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("name", ["make", "no_such_function"])
def test_what_an_app_is_made_with_is_not_shown(folder: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    (folder / "served.py").write_text(APP + "def make(secret): return app\n")
    for arguments in ([], ["--json"]):
        parser = ArgumentParser()
        add_arguments(parser)
        run(parser.parse_args([*arguments, "-c", "conf.py", f"served:{name}('hunter2')"]))
        shown = "".join(capfd.readouterr())
        assert f"served:{name}(...)" in shown
        assert "hunter2" not in shown


def test_a_secret_in_a_bad_argument_is_not_shown(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GUNICORN_CMD_ARGS", "--envv SESSION_SECRET=hunter2 --workers many")
    parser = ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args(["-c", "conf.py", "served:app"])) == 2
    shown = "".join(capfd.readouterr())
    assert "The configuration can't be loaded" in shown
    assert "hunter2" not in shown


def test_nothing_is_left_behind(folder: Path) -> None:
    before = set(os.listdir(folder))
    load(["-c", "conf.py", "served:app"], 60)
    assert set(os.listdir(folder)) - before <= {"__pycache__"}
