"""A wheel built from the tree, in an environment that holds nothing else."""

from __future__ import annotations

import asyncio
import email
import os
import shutil
import subprocess
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.gunicorn_server import ROOT, errors, gunicorn_server
from tests.sessions import play


@dataclass
class Installed:
    """The wheel, and the interpreter of the environment that it is installed in."""

    wheel: Path
    python: Path


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    # What a build leaves behind is not to be left in the tree.
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist"))
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    _run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, tree)
    (wheel,) = folder.glob("*.whl")
    _run(python, "-m", "pip", "install", "--quiet", wheel)
    yield Installed(wheel, python)
    shutil.rmtree(folder)


def _run(python: Path, *arguments: str | Path) -> str:
    """Run the interpreter outside the tree and without this process's own settings, and return its output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([python, *arguments], cwd=python.parent, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wheel_holds_the_package_its_types_and_no_tests(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as wheel:
        names = wheel.namelist()
    assert "gym_gunicorn/py.typed" in names
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "gym_gunicorn").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == expected
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"gym_gunicorn"}


def test_wheel_has_the_metadata_of_a_published_package(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as wheel:
        (path,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(wheel.read(path))
        assert path.replace("METADATA", "licenses/LICENSE") in wheel.namelist()
    assert metadata["Name"] == "gym-gunicorn"
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Summary"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    required = {
        line.split(">")[0].split("<")[0] for line in metadata.get_all("Requires-Dist", []) if "extra" not in line
    }
    assert {"gunicorn", "uvicorn", "uvicorn-worker", "starlette", "itsdangerous", "aiohttp"} <= required


def test_wheel_serves_an_app_from_a_foreign_folder_in_an_empty_environment(
    installed: Installed, tmp_path: Path
) -> None:
    shutil.copy(ROOT / "app.py", tmp_path)
    found = _run(installed.python, "-c", "import gym_gunicorn; print(gym_gunicorn.__file__)")
    assert Path(found).is_relative_to(installed.python.parent.parent)
    gunicorn = installed.python.with_name("gunicorn")
    with gunicorn_server(
        "-c", "python:gym_gunicorn.conf", cwd=tmp_path, gunicorn=gunicorn, env={"PYTHONPATH": ""}
    ) as server:
        assert asyncio.run(play(server.url, 20)) == {"right": 20}
        assert errors(server.log()) == []
        assert server.log().count("WebSockets can't be served") == 1
        assert server.stop() == 0
