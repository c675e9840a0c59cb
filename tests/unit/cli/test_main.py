"""The command's own words: its help, its version, and what it says where something is missing."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gym_gunicorn.cli.main import main
from gym_gunicorn.cli.words import duration, several


def test_help_names_the_subcommands_and_points_to_gunicorns_own_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name in ("status", "metrics", "sessions", "doctor", "gunicornc"):
        assert name in text


@pytest.mark.parametrize("name", ["status", "metrics", "sessions"])
def test_each_subcommand_has_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert "--sockets" in capsys.readouterr().out


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"gym-gunicorn {importlib.metadata.version('gym-gunicorn')}\n"


@pytest.mark.parametrize("arguments", [[], ["dance"], ["status", "--interval", "0"], ["status", "--interval", "soon"]])
def test_what_it_does_not_know_it_refuses(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: gym-gunicorn" in capsys.readouterr().err


@pytest.mark.parametrize("way", [["gym-gunicorn"], [sys.executable, "-m", "gym_gunicorn.cli"]])
def test_it_can_be_run_by_its_script_and_as_a_module(way: list[str], tmp_path: Path) -> None:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [*way, "status", "--sockets", tmp_path], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("No running server")


@pytest.mark.parametrize(
    ("missing", "arguments"),
    [
        ("prometheus_client", ["metrics"]),
        ("rich", ["status", "--watch"]),
    ],
)
def test_without_the_extra_one_line_says_what_to_install(
    missing: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("gym_gunicorn.metrics.prometheus", "gym_gunicorn.cli.metrics", "gym_gunicorn.cli.table"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    assert main([*arguments, "--sockets", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"gym-gunicorn {arguments[0]} needs {missing}: pip install 'gym-gunicorn[cli]'\n"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (99.9, "99 s"),
        (100, "1 min"),
        (3599, "59 min"),
        (3600, "1 h 0 min"),
        (90000, "1 d 1 h"),
        (10**9, "11574 d 1 h"),
    ],
)
def test_times_are_said_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_one_is_not_several() -> None:
    assert [several(number, "worker") for number in (0, 1, 2, None)] == [
        "0 workers",
        "1 worker",
        "2 workers",
        "? workers",
    ]
