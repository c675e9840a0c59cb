"""An error's message is shown, and no secret in it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from gym_gunicorn.cli.diagnosis.facts import Failure
from gym_gunicorn.cli.diagnosis.scrub import MASK, failure_of

SECRET = "hunter2"


def failing(tmp_path: Path, source: str) -> Failure:
    """Run ``source`` as a module, and return why it failed."""
    path = tmp_path / "failing.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("failing", path)
    assert spec is not None and spec.loader is not None
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except BaseException as error:
        return failure_of("application", error)
    raise AssertionError("it did not fail")


@pytest.mark.parametrize(
    "source",
    [
        "secret_key = 'hunter2'\nraise ValueError(f'secret {secret_key} is too short')",
        "def check(key):\n    raise ValueError('bad key ' + key)\ncheck('hunter2')",
        "import os\nraise ValueError('not good: ' + os.environ['APP_SECRET'])",
        "import os\nraise ValueError('not good: ' + os.environ.get('NO_SUCH_SECRET', 'hunter2'))",
        "def middleware(secret_key): pass\nmiddleware(secret_key='hunter2')\nraise ValueError('not hunter2 again')",
        "settings = {'password': 'hunter2'}\nraise KeyError('hunter2')",
        "secret: bytes = b'hunter2'\nraise ValueError(f'what is {secret!r}')",
        "raise ValueError('input_value=\\'hunter2\\'')",
        "url = 'postgres://me:hunter2@host/db'\nraise OSError('no connection to ' + url)",
        "raise OSError('no connection to postgres://me:hunter2@host/db')",
        "raise ValueError('many lines: \\'hunter2\\nand\\'')",
        "raise ValueError('bad SESSION_SECRET=hunter2')",
        "raise ValueError('bad secret: hunter2')",
        "class Settings: pass\nsettings = Settings()\nsettings.secret_key = 'hunter' + '2'\n"
        "raise ValueError('not good: ' + settings.secret_key)",
        "assert 'hunter2' == 'other', 'hunter2' + ' is not \"hunter2\"' if False else '\"hunter2\"'",
        "import sys\nsys.exit('hunter2')",
        "secret_key = 'hunter2' +",
    ],
)
def test_no_secret_is_in_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setenv("APP_SECRET", SECRET)
    failure = failing(tmp_path, source)
    assert SECRET not in failure.text + failure.place
    assert "failing.py, line " in failure.place


def test_what_looks_random_is_hidden(tmp_path: Path) -> None:
    failure = failing(tmp_path, "raise ValueError('bad: 4e07408562bedb8b60ce05c1decfe3ad16b72230')")
    assert failure.text == f"ValueError: bad: {MASK}"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("import os\nos.environ['SESSION_SECRET_1']", "KeyError: 'SESSION_SECRET_1'"),
        ("nowhere", "NameError: name 'nowhere' is not defined"),
        ("def f(a): pass\nf()", "TypeError: f() missing 1 required positional argument: 'a'"),
        ("open('/no/such/file')", "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file'"),
        ("raise ValueError", "ValueError"),
        ("raise ValueError('it isn\\'t there\\nand more')", "ValueError: it isn't there"),
        ("x = (", "SyntaxError: '(' was never closed"),
        ("import sys\nsys.exit(3)", "it ends the process by itself: SystemExit(3)"),
    ],
)
def test_what_tells_no_secret_is_shown(tmp_path: Path, source: str, text: str) -> None:
    assert failing(tmp_path, source).text == text
