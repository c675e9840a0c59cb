"""Starts what a set-up consists of, each process group by itself, and ends it again, whatever happens."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from benchmarks import accounts
from benchmarks.setups import STOCK, Setup, nginx_user, program

ROOT = Path(__file__).resolve().parent.parent
_START_SECONDS = 120

T = TypeVar("T")

# For all the same: connections stay open between rounds, and a stop does not wait for them.
_GUNICORN = ["--keep-alive", "3600", "--graceful-timeout", "5", "--timeout", "300", "--no-control-socket"]


class NotStarted(RuntimeError):
    """A server did not start. The message holds its log."""


@dataclass
class Server:
    """A set-up that serves.

    Attributes:
        port: where callers reach it, on the loopback address.
        roles: what each of its processes is ("worker", "arbiter", "proxy"), by process ID.
    """

    setup: Setup
    title: str
    port: int
    roles: dict[int, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.setup.name

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def workers(self) -> list[int]:
        return [pid for pid, role in self.roles.items() if role == "worker"]

    def cpu_ns(self) -> int:
        """Return the CPU time that all of its processes have taken."""
        return accounts.cpu_ns(self.roles)

    def worker_pss(self) -> int:
        """Return the memory of its median worker, in bytes."""
        return int(statistics.median(accounts.pss_bytes(pid) for pid in self.workers))

    def pss(self, kind: str = "Pss") -> dict[int, int]:
        """Return the memory of each of its processes."""
        return {pid: accounts.pss_bytes(pid, kind) for pid in self.roles}


@contextlib.contextmanager
def served(setup: Setup, workers: int, folder: Path) -> Iterator[Server]:
    """Serve the app as the set-up says, with ``workers`` workers; ``folder`` is made, and holds what it writes.

    Raises:
        NotStarted: one of its processes has ended, or does not serve in time.
    """
    folder.mkdir()
    title = setup.title.format(workers=workers)
    with contextlib.ExitStack() as stack:
        if setup.kind == "gunicorn":
            count = 1 if setup.one else workers
            text = setup.text.replace("@folder@", str(folder))
            port, arbiter = stack.enter_context(_gunicorn(text, count, folder))
            yield Server(setup, title, port, _roles([arbiter], count))
            return
        behind = []
        for number in range(workers):
            place = folder / f"s{number}"
            place.mkdir()
            behind.append(stack.enter_context(_gunicorn(STOCK, 1, place)))
        port = _free_port()
        text = _filled(setup.text, port, [port for port, _ in behind], folder)
        proxy = stack.enter_context(_proxy(setup, text, port, folder))
        roles = _roles([arbiter for _, arbiter in behind], 1)
        yield Server(setup, title, port, roles | dict.fromkeys(accounts.family(proxy), "proxy"))


def _roles(arbiters: Sequence[int], workers: int) -> dict[int, str]:
    roles: dict[int, str] = {}
    for arbiter in arbiters:
        _, *children = accounts.family(arbiter)
        if len(children) != workers:
            raise NotStarted(f"gunicorn has {len(children)} workers, and {workers} were asked for")
        roles |= {arbiter: "arbiter"} | dict.fromkeys(children, "worker")
    return roles


def _filled(text: str, port: int, behind: Sequence[int], folder: Path) -> str:
    """Return a proxy's configuration with its own port, and a line for each server behind it."""

    def lines(found: re.Match[str]) -> str:
        each = found[1]
        return "\n".join(each.replace("@number@", str(n)).replace("@port@", str(p)) for n, p in enumerate(behind))

    text = re.sub(r"^@servers:(.*)@$", lines, text, flags=re.MULTILINE)
    values = {"port": str(port), "folder": str(folder), "cores": str(os.cpu_count()), "user": nginx_user()}
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


@contextlib.contextmanager
def _gunicorn(text: str, workers: int, folder: Path) -> Iterator[tuple[int, int]]:
    """Serve the app with gunicorn alone; gives its port and the arbiter's process ID."""
    config = folder / "conf.py"
    config.write_text(text)
    command = [sys.executable, "-m", "gunicorn", "-c", str(config), "-w", str(workers), "-b", "127.0.0.1:0"]
    command += [*_GUNICORN, "--pythonpath", str(ROOT), "benchmarks.app:app"]
    with _process(command, folder) as (process, log):

        def port() -> int | None:
            output = log.read_text(errors="replace")
            found = re.search(r"Listening at: http://\S+:(\d+)", output)
            return int(found[1]) if found and output.count("Application startup complete.") >= workers else None

        yield _until(port, process, log), process.pid


@contextlib.contextmanager
def _proxy(setup: Setup, text: str, port: int, folder: Path) -> Iterator[int]:
    """Run the set-up's proxy; gives its process ID."""
    config = folder / "proxy.conf"
    config.write_text(text)
    path = program(setup.kind) or setup.kind
    nginx = [path, "-p", str(folder), "-c", str(config), "-e", "stderr"]
    with _process(nginx if setup.kind == "nginx" else [path, "-db", "-f", str(config)], folder) as (process, log):

        def answers() -> bool | None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return True
            return None

        _until(answers, process, log)
        yield process.pid


@contextlib.contextmanager
def _process(command: Sequence[str], folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Run a command in a process group of its own, so that Ctrl-C reaches this program alone, which ends it.

    Not in a session of its own: Linux shares the cores out by sessions (sched_autogroup), and a set-up of
    five servers would get more of a busy machine than one of one.
    """
    log = folder / "log"
    environment = {name: value for name, value in os.environ.items() if name != "GUNICORN_CMD_ARGS"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output, process_group=0)
    try:
        yield process, log
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        # What outlives its leader is in the leader's group, and nothing else is.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _until(condition: Callable[[], T | None], process: subprocess.Popen[bytes], log: Path) -> T:
    """Poll until the condition gives something, and return that."""
    end = time.monotonic() + _START_SECONDS
    while True:
        stopped = process.poll() is not None
        if not stopped and (value := condition()) is not None:
            return value
        if stopped or time.monotonic() > end:
            raise NotStarted(f"{process.args!r} does not serve. Its log:\n{log.read_text(errors='replace')}")
        time.sleep(0.02)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
