"""The README says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from gym_gunicorn.settings import documented

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def test_settings_table_is_that_of_the_code() -> None:
    table = [f"| `{name}` | `{default}` | {meaning} |" for name, default, meaning in documented()]
    assert re.findall(r"^\| `\w+` \| `.*` \| .* \|$", README, re.MULTILINE) == table


def test_files_and_names_that_it_speaks_of_are_there() -> None:
    import gym_gunicorn

    root = Path(__file__).resolve().parents[2]
    for script in set(re.findall(r"scripts/\w+", README)):
        assert (root / script).is_file(), script
    for module in re.findall(r"`([\w/]+(?:\.py|/))`", README):
        assert (root / "gym_gunicorn" / module).exists() or (root / module).exists(), module
    for name in re.findall(r"gym_gunicorn\.([A-Z]\w+)", README):
        assert hasattr(gym_gunicorn, name), name
