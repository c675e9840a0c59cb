"""Programs in the place of gunicorn's command: they run it as another user, in a namespace, on an inherited socket."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

import pytest

from tests.gunicorn_server import CONFIG, GUNICORN, ROOT, GunicornServer, children, gunicorn_server, until

# Nobody's, as far as this machine goes: the kernel asks for no entry in /etc/passwd.
ANOTHER_UID = 12345


def needs(*what: str) -> None:
    """Report a test by name as one that could not be run, where the machine or the user lacks what it needs.

    Args:
        what: "root", or the options of an ``unshare`` that has to work, such as "--mount".
    """
    for one in what:
        if one == "root":
            there = os.geteuid() == 0
        else:
            there = subprocess.run(["unshare", *one.split(), "true"], capture_output=True, check=False).returncode == 0
        if not there:
            lacking = one if one == "root" else f"`unshare {one}`"
            # Named here, since pytest's summary counts skips of one reason together and names none.
            name = os.environ["PYTEST_CURRENT_TEST"].rpartition("::")[2].rpartition(" ")[0]
            pytest.skip(f"could not run: {name} needs {lacking}")


def program(path: Path, text: str) -> Path:
    """Write a Python program for the place of the command; it ends in ``run()``, which becomes gunicorn."""
    path.write_text(
        f"#!{sys.executable}\nimport os, sys\n\n"
        f"def run():\n    os.execv({str(GUNICORN)!r}, [{str(GUNICORN)!r}, *sys.argv[1:]])\n\n{text}\nrun()\n"
    )
    path.chmod(0o755)
    return path


def open_to_all(path: Path, uid: int | None = None) -> Path:
    """Write a program that starts gunicorn where every user can read the interpreter, and as ``uid`` if given.

    It may lie below a home directory that only root may enter. In a mount namespace of
    the server's own another directory stands in that place, with the interpreter alone.
    """
    needed = sorted({os.path.realpath(item) for item in (sys.base_prefix, sys.prefix, ROOT)})
    hidden: dict[Path, list[str]] = {}
    for item in needed:
        if (folder := _closed(item)) is not None:
            hidden.setdefault(folder, []).append(item)
    lines = ["#!/bin/sh", "set -e"]
    if hidden:
        lines.append('if [ -z "$OPENED" ]; then OPENED=yes exec unshare --mount "$0" "$@"; fi')
        lines.append("spare=$(mktemp -d)")
        lines.append('mount -t tmpfs tmpfs "$spare"')
    for number, (folder, items) in enumerate(hidden.items()):
        for index, item in enumerate(items):
            lines.append(f'mkdir "$spare/{number}-{index}"; mount --bind {quote(item)} "$spare/{number}-{index}"')
        lines.append(f"mount -t tmpfs -o mode=755 tmpfs {quote(str(folder))}")
        for index, item in enumerate(items):
            lines.append(f'mkdir -p {quote(item)}; mount --move "$spare/{number}-{index}" {quote(item)}')
    if hidden:
        lines.append('umount "$spare"; rmdir "$spare"')
    user = ""
    if uid is not None:
        # The folder of the configuration is the one to make socket directories in.
        lines.append(f'chown {uid} "$(dirname "$2")"')
        user = f"setpriv --reuid {uid} --regid {uid} --clear-groups "
    lines.append(f'exec {user}{quote(str(GUNICORN))} "$@"')
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return path


def _closed(path: str) -> Path | None:
    """Return the topmost folder on the way to ``path`` that not everybody may enter."""
    for folder in reversed(Path(path).parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            return folder
    return None


@contextmanager
def daemon(
    pid_file: Path, *arguments: str, app: str = "tests.e2e.apps.probe:app", env: Mapping[str, str] | None = None
) -> Iterator[tuple[GunicornServer, int]]:
    """A server with two workers that has gone into the background, and the pid of its arbiter."""
    config = CONFIG + 'errorlog = "{parent}/log"\n'
    options = ("--daemon", "--pid", str(pid_file), "--keep-alive", "75")
    with gunicorn_server(*options, *arguments, app=app, config=config, workers=2, ready=False, env=env) as server:
        assert server.wait() == 0
        until(lambda: server.ready_workers() == 2, "both workers serve")
        arbiter = int(pid_file.read_text())
        server.seen.update((arbiter, *children(arbiter)))
        try:
            yield server, arbiter
        finally:
            # Whatever it started since.
            server.seen.update(children(arbiter))


def reconfigure(server: GunicornServer, old: str, new: str) -> None:
    """Replace ``old`` in the configuration file by ``new``."""
    path = server.parent / "conf.py"
    text = path.read_text()
    assert old in text
    rewrite(server, text.replace(old, new))


def rewrite(server: GunicornServer, text: str) -> None:
    """Make ``text`` the configuration file."""
    path = server.parent / "conf.py"
    changed = path.stat().st_mtime
    path.write_text(text)
    # gunicorn imports the file: one of the same length and second would be taken for the compiled one.
    os.utime(path, (changed + 10, changed + 10))


def hang_up(server: GunicornServer, workers: int) -> None:
    """Have the arbiter reload, and wait until ``workers`` new workers serve and the old ones are gone."""
    old, ready = server.workers(), server.ready_workers()
    server.send(signal.SIGHUP)
    until(lambda: server.ready_workers() >= ready + workers, "the new workers serve")
    until(lambda: not set(server.workers()) & set(old), "the old workers are gone")
    until(lambda: len(server.workers()) == workers, "the new workers are left")
