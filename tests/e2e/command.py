"""The command ``gym-gunicorn``, run as an operator runs it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.gunicorn_server import ROOT, GunicornServer

COMMAND = Path(sys.executable).with_name("gym-gunicorn")
OWNER = re.compile(r"\b[0-9a-f]{12}\b")


def command(*arguments: str | Path, text: str = "", status: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Run the command with ``text`` as its standard input, where it is to end with ``status``."""
    env = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "COLUMNS")}
    done = subprocess.run(
        [COMMAND, *arguments], input=text, capture_output=True, text=True, timeout=60, cwd=ROOT, env=env, check=False
    )
    assert status is None or done.returncode == status, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def status_of(server: GunicornServer) -> Any:
    """Return what ``status --json`` tells of a server."""
    shown = json.loads(command("status", "--json", "--sockets", server.parent).stdout)
    (only,) = shown["servers"]
    return only


def worker_of(server: GunicornServer, pid: int) -> Any:
    """Return what ``status --json`` tells of the worker ``pid``, or ``None``."""
    return next((worker for worker in status_of(server)["workers"] if worker["pid"] == pid), None)


def parsed(text: str) -> dict[str, float]:
    """Return metrics as the official client's parser reads them, each by its name and labels."""
    return {
        sample.name + (str(dict(sorted(sample.labels.items()))) if sample.labels else ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def metrics_of(server: GunicornServer) -> dict[str, float]:
    """Return what ``metrics`` tells of a server."""
    return parsed(command("metrics", "--sockets", server.parent).stdout)


class Terminal:
    """A terminal with a command in it."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self.seen = b""
        self._master = master

    def read(self) -> bytes:
        """Return all that was written to it, with what has come since."""
        with suppress(BlockingIOError, OSError):
            while data := os.read(self._master, 65536):
                self.seen += data
        return self.seen

    def text(self) -> str:
        """Return what was written to it, without its colours."""
        return re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", self.read()).decode(errors="replace")

    def press_control_c(self) -> None:
        os.write(self._master, b"\x03")

    def echoes(self) -> bool:
        """Tell whether it shows what is typed, as a shell wants it."""
        return bool(termios.tcgetattr(self._master)[3] & termios.ECHO)


@contextmanager
def terminal(*arguments: str | Path, columns: int) -> Iterator[Terminal]:
    """Run the command in a terminal of its own."""
    master, slave = pty.openpty()
    try:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        os.set_blocking(master, False)
        env = {**os.environ, "TERM": "xterm-256color"}
        process = subprocess.Popen(
            [COMMAND, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=env,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
    except BaseException:
        os.close(master)
        raise
    finally:
        os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        process.wait()
        os.close(master)


def _take_terminal() -> None:
    # So that Ctrl-C is a signal for the command.
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
