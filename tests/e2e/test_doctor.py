"""``gym-gunicorn doctor``, the command itself; and that what it foretells is what gunicorn does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.gunicorn_server import CONFIG, GUNICORN, ROOT, free_port, gunicorn_server, until

SECRET = "9f86d081884c7d659a2feaa0c55ad015"

BAD_CONFIG = """
from gym_gunicorn import SessionRouting
from gym_gunicorn.conf import *

routing = SessionRouting(max_forwards=200)
max_requests = 1000
timeout = 5


def post_worker_init(worker):
    worker.log.info("ready")
"""
BAD_APP = """
import secrets

from fastapi import FastAPI
from starlette.middleware.sessions import SessionMiddleware

app = FastAPI()
app.add_middleware(SessionMiddleware, secret_key=secrets.token_hex(), https_only=True)
"""


def doctor(*arguments: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    kept = {name: value for name, value in os.environ.items() if name not in ("WEB_CONCURRENCY", "GUNICORN_CMD_ARGS")}
    return subprocess.run(
        [sys.executable, "-m", "gym_gunicorn.cli", "doctor", *arguments],
        cwd=cwd,
        env={**kept, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )


def found(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the findings of ``doctor --json`` by their codes."""
    return {finding["code"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_the_repositorys_own_configuration_is_good() -> None:
    done = doctor("-c", "gunicorn.conf.py", "--strict", "app:app", env={"SESSION_SECRET": SECRET})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Routing is on, since there are 4 workers." in done.stdout
    assert "note     New sessions belong to the worker that accepts their connection" in done.stdout
    assert "nothing worse than notes" in done.stdout
    assert done.stderr == ""


def test_the_default_secret_of_the_quick_start_is_warned_of() -> None:
    done = doctor("-c", "gunicorn.conf.py", "--json", "app:app", env={"SESSION_SECRET": "change-me"})
    assert done.returncode == 0
    assert found(done)["secret-default"]["level"] == "warning"
    assert "change-me" not in done.stdout + done.stderr


def test_a_bad_configuration_is_told_with_its_remedies(tmp_path: Path) -> None:
    (tmp_path / "conf.py").write_text(BAD_CONFIG)
    (tmp_path / "bad.py").write_text(BAD_APP)
    done = doctor("-c", "conf.py", "bad:app", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    levels = [line.split()[0] for line in lines if line.startswith(("error", "warning", "note", "ok"))]
    assert levels == sorted(levels, key=["error", "warning", "note", "ok"].index)
    assert lines[-1] == "4 errors and 2 warnings"
    for number, line in enumerate(lines):
        if line.startswith(("error", "warning")):
            assert lines[number + 1].startswith("         -> ")


def test_an_app_that_fails_is_told_with_the_end_of_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("key = 'hunter2'\nraise ValueError(f'the key {key} is no good')\n")
    done = doctor("-c", "python:gym_gunicorn.conf", "bad:app", cwd=tmp_path)
    assert done.returncode == 2
    assert "ValueError: the key [hidden] is no good" in done.stdout
    assert f"{tmp_path}/bad.py, line 2" in done.stdout
    assert "hunter2" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("code", "config", "arguments"),
    [
        ("folder", CONFIG.replace("{parent}", "/no/such/folder"), ()),
        ("path-too-long", CONFIG.replace("{parent}", "/tmp/" + "x" * 90), ()),
        ("worker-class", CONFIG, ("-k", "sync")),
        ("hooks-missing", 'worker_class = "gym_gunicorn.RoutingWorker"\n', ()),
    ],
)
def test_what_is_said_not_to_start_does_not_start(
    tmp_path: Path, code: str, config: str, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "conf.py").write_text(config.replace("{parent}", "/tmp"))
    done = doctor("--json", "-c", str(tmp_path / "conf.py"), "-w", "2", *arguments, "app:app")
    assert found(done)[code]["level"] == "error"
    assert done.returncode == 1
    with gunicorn_server(*arguments, config=config, workers=2, ready=False) as server:
        assert server.wait() != 0


def test_what_gunicorn_itself_finds_wrong_is_pointed_to(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import nowhere\n")
    arguments = ("-c", "python:gym_gunicorn.conf", "bad:app")
    assert "gunicorn --check-config" in doctor(*arguments, cwd=tmp_path).stdout
    checked = subprocess.run(
        [GUNICORN, "--check-config", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert checked.returncode != 0
    assert "No module named 'nowhere'" in checked.stderr


def test_another_server_with_the_same_cookie_and_secret_is_seen() -> None:
    with gunicorn_server(workers=2, env={"SESSION_SECRET": SECRET}) as server:
        (sockets,) = server.directories()
        until(lambda: list(sockets.glob("*.arbiter")), "the arbiter has said where it listens")
        arguments = ("--json", "-c", str(server.parent / "conf.py"), "-w", "2", "app:app")
        elsewhere = doctor(*arguments, "-b", f"127.0.0.1:{free_port()}", env={"SESSION_SECRET": SECRET})
        assert found(elsewhere)["same-secret"]["level"] == "warning"
        assert str(server.pid) in found(elsewhere)["same-secret"]["text"]
        here = found(doctor(*arguments, "-b", f"127.0.0.1:{server.port}", env={"SESSION_SECRET": SECRET}))
        assert here["running"]["level"] == "ok"
        assert "same-secret" not in here
        other = found(doctor(*arguments, env={"SESSION_SECRET": SECRET[::-1]}))
        assert not {"same-secret", "running"} & set(other)


def test_nothing_is_started_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "conf.py").write_text(CONFIG.replace("{parent}", str(tmp_path)))
    done = doctor("-c", str(tmp_path / "conf.py"), "-w", "2", "app:app", env={"SESSION_SECRET": SECRET})
    assert "Routing is on" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["conf.py"]
