"""What the README shows is run: its commands on a fresh copy, its apps and configurations as they stand."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gunicorn_server import ROOT, errors, free_port, gunicorn_server, is_alive, until
from tests.sessions import Answered, caller

README = (ROOT / "README.md").read_text()


def code(language: str, beginning: str) -> str:
    """Return the README's block of code of that language which holds ``beginning``."""
    (block,) = [text for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if beginning in text]
    return str(block)


@pytest.fixture(scope="module")
def fresh_copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A copy of the tree without any virtual environment, and an environment with a home of its own."""
    copy = tmp_path_factory.mktemp("fresh copy") / "gym-gunicorn"
    kept_out = (".venv", ".git", "__pycache__", ".*_cache", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*kept_out))
    home = tmp_path_factory.mktemp("home")
    env = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    yield copy, {**env, "HOME": str(home)}
    shutil.rmtree(copy)


def test_one_command_serves_the_quick_start_on_a_fresh_machine(fresh_copy: tuple[Path, dict[str, str]]) -> None:
    copy, env = fresh_copy
    port = free_port()
    with (copy / "log").open("wb") as log:
        server = subprocess.Popen(
            [copy / "scripts" / "serve", "-b", f"127.0.0.1:{port}", "--no-control-socket"],
            cwd="/",
            env=env,
            stdout=log,
            stderr=log,
        )
    try:
        printed = (copy / "log").read_text
        until(lambda: printed().count("startup complete") == 4 or server.poll() is not None, "four workers", 300)
        assert server.poll() is None, printed()
        for command, output in re.findall(r"\$ (curl -c jar .*)\n(.*)\n", README):
            answer = subprocess.run(
                command.replace("localhost:8000", f"127.0.0.1:{port}").replace("curl", "curl -sS"),
                shell=True,
                cwd=copy,
                capture_output=True,
                text=True,
                check=True,
            )
            assert answer.stdout == output
        server.terminate()
        assert server.wait(60) == 0
        assert errors(printed()) == []
    finally:
        if is_alive(server.pid):
            server.kill()
        server.wait()


def test_demo_shows_stock_workers_wrong_and_ours_right(fresh_copy: tuple[Path, dict[str, str]]) -> None:
    copy, env = fresh_copy
    demo = subprocess.run([copy / "scripts" / "demo"], cwd="/", env=env, capture_output=True, text=True, timeout=600)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert re.search(r"^4 of gym-gunicorn's +200 +0 +0 +0$", demo.stdout, re.MULTILINE), demo.stdout


def test_app_of_the_readme_is_served_without_a_file(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(code("python", "sandboxes"))

    async def two_requests(url: str) -> str | None:
        async with caller(url) as session:
            await session.post("/seed_session")
            await session.post("/seed_session")
            return session.owner()

    with gunicorn_server("-c", "python:gym_gunicorn.conf", app="module:app", cwd=tmp_path) as server:
        assert asyncio.run(two_requests(server.url)) is not None


def test_configuration_of_the_readme_calls_our_hook_from_a_hook_of_its_own() -> None:
    config = code("python", "max_forwards").replace("SessionRouting(", 'SessionRouting(directory="{parent}", ')

    async def login_is_local(url: str) -> int:
        async with caller(url) as session:
            await session.seed(1)
            assert await session.verify()
            try:
                await session.post("/login/nowhere")
            except Answered as answered:
                return answered.status
        return 200

    with gunicorn_server(config=config) as server:
        assert asyncio.run(login_is_local(server.url)) == 404
        assert server.log().count("ready") == 4


def test_environment_of_the_readme_is_served_on_four_workers_and_played_over_mcp(tmp_path: Path) -> None:
    (tmp_path / "guess.py").write_text(code("python", "# guess.py"))
    play = code("python", "# play.py")
    with gunicorn_server("-c", "python:gym_gunicorn.conf", app="guess:app", cwd=tmp_path) as server:
        (tmp_path / "play.py").write_text(play.replace("http://127.0.0.1:8000", server.url))
        played = subprocess.run(
            [sys.executable, "play.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert played.returncode == 0, played.stderr
        (expected,) = re.findall(r"\$ python play.py\n(.*?)```", README, re.DOTALL)
        assert played.stdout == expected
