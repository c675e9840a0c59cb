"""Real gunicorn processes for tests: started, looked at, signalled, and gone at the end."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parent.parent

# Not `python -m gunicorn`: on SIGUSR2 gunicorn (27.0) would start its successor as a script in
# its own package, where `import http` finds gunicorn.http.
GUNICORN = Path(sys.executable).with_name("gunicorn")

T = TypeVar("T")


def until(condition: Callable[[], T], what: str, seconds: float = 60.0) -> T:
    """Poll until ``condition`` returns something true, and return that; fail where it does not in time."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return value


def is_alive(pid: int) -> bool:
    """Tell whether the process lives; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    """Return the living child processes of a process."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [child for child in map(int, text.split()) if is_alive(child)]


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nobody is given meanwhile; gunicorn, which sets SO_REUSEADDR, can listen on it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def free_port() -> int:
    """Return a TCP port of the loopback address that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class GunicornServer:
    """One gunicorn server, started by ``gunicorn_server``.

    ``parent`` is the folder in which it makes its socket directory: a folder of its own,
    so that tests that run side by side do not see each other's.
    """

    def __init__(self, process: subprocess.Popen[bytes], log_path: Path, port: int, parent: Path) -> None:
        self.process = process
        self.log_path = log_path
        self.port = port
        self.parent = parent
        self.url = f"http://127.0.0.1:{port}"
        self.seen: set[int] = {process.pid}

    @property
    def pid(self) -> int:
        """The arbiter's."""
        return self.process.pid

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def workers(self) -> list[int]:
        """Return the pids of the living workers, oldest first."""
        found = children(self.pid)
        self.seen.update(found)
        return found

    def directories(self) -> list[Path]:
        """Return the socket directories that are there."""
        return sorted(self.parent.glob("gym-gunicorn-*"))

    def owners(self) -> set[str]:
        """Return the owner IDs of the private sockets that are there."""
        return {path.stem for directory in self.directories() for path in directory.glob("*.sock")}

    def pid_of(self, owner: str) -> int:
        """Return the pid of the worker that listens on an owner's private socket."""
        (path,) = self.parent.glob(f"gym-gunicorn-*/{owner}.sock")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int.from_bytes(credentials[:4], sys.byteorder)

    def ready_workers(self) -> int:
        """Return how many workers have started to serve, those that have stopped since included."""
        return self.log().count("Application startup complete.")

    def wait_until_ready(self, workers: int) -> None:
        """Wait until ``workers`` workers in all have started to serve."""
        try:
            until(lambda: self.ready_workers() >= workers or self.process.poll() is not None, "all workers serve")
            assert self.process.poll() is None, "gunicorn has ended"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None
        self.workers()

    def send(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def wait(self, seconds: float = 60.0) -> int:
        """Wait for the arbiter's end and return its exit status."""
        return self.process.wait(seconds)

    def stop(self, signum: signal.Signals = signal.SIGTERM) -> int:
        """Send ``signum``, wait for the end, and return the exit status."""
        self.workers()
        self.send(signum)
        return self.wait()

    def survivors(self) -> list[int]:
        """Return the pids of all processes seen in this server that still live."""
        return [pid for pid in self.seen if is_alive(pid)]

    def kill(self) -> None:
        """End everything that is left of the server, whatever state it is in."""
        self.workers()
        for pid in (self.pid, *self.seen):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        until(lambda: not self.survivors(), "everything is killed")


@contextlib.contextmanager
def gunicorn_server(
    *arguments: str,
    app: str = "app:app",
    config: str | None = None,
    workers: int = 4,
    ready: bool = True,
    cwd: Path = ROOT,
    gunicorn: Path = GUNICORN,
    env: Mapping[str, str] | None = None,
) -> Iterator[GunicornServer]:
    """Run ``gunicorn [arguments] app``, and end it and all that it left behind at the end.

    Args:
        config: the text of a configuration file. The default is the package's own
            configuration with a socket directory of this test's own. ``{parent}`` in
            it stands for the folder to make socket directories in.
        workers: given as ``-w``, unless ``config`` sets ``workers`` itself, and waited
            for where ``ready`` is true.
        gunicorn: the command, of another environment than this process's.
    """
    with reserved_port() as port:
        parent = Path(tempfile.mkdtemp(prefix="gg-", dir="/tmp"))
        # Workers may run as another user.
        parent.chmod(0o711)
        (parent / "conf.py").write_text((config or CONFIG).replace("{parent}", str(parent)))
        command = [str(gunicorn), "-c", str(parent / "conf.py"), "-b", f"127.0.0.1:{port}"]
        if not re.search("^workers = ", config or "", re.MULTILINE):
            command += ["-w", str(workers)]
        command += ["--no-control-socket", *arguments, app]
        log_path = parent / "log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            )
        server = GunicornServer(process, log_path, port, parent)
        try:
            if ready:
                server.wait_until_ready(workers)
            yield server
        finally:
            server.kill()
            shutil.rmtree(parent, ignore_errors=True)


CONFIG = """
from gym_gunicorn import SessionRouting

worker_class = "gym_gunicorn.RoutingWorker"
routing = SessionRouting(directory="{parent}")
globals().update({name: getattr(routing, name) for name in SessionRouting.HOOKS})
"""

# What `gunicorn -k uvicorn_worker.UvicornWorker` is: several workers, and nothing of ours.
STOCK = 'worker_class = "uvicorn_worker.UvicornWorker"\n'


def errors(log: str) -> list[str]:
    """Return the lines of a log that say that something is wrong."""
    return [line for line in log.splitlines() if re.search(r"\[(ERROR|CRITICAL)\]|Traceback|Exception", line)]
