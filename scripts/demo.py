"""Shows what gym-gunicorn is for, on the quick-start app and in less than a minute.

The same 200 concurrent sessions on four stock workers and on four of ours; then a worker
of ours is killed in the middle of 200 more. One table, and what it means, at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import aiohttp

ROOT = Path(__file__).resolve().parent.parent
SESSIONS = 200
CONNECTIONS = 50
WORKERS = 4

STOCK = ("-k", "uvicorn_worker.UvicornWorker")
OURS = ("-c", str(ROOT / "gunicorn.conf.py"))

Outcome = Literal["right", "wrong", "gone", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("right", "wrong", "gone", "failed")


class NotStarted(RuntimeError):
    """A server did not start. The message holds its log."""


@contextlib.contextmanager
def served(*flags: str) -> Iterator[tuple[str, int]]:
    """Serve the quick-start app with gunicorn; gives the server's URL and its arbiter's process ID.

    Raises:
        NotStarted: the server has stopped, or has not all of its workers after a minute.
    """
    command = [sys.executable, "-m", "gunicorn", *flags, "-w", str(WORKERS), "-b", "127.0.0.1:0"]
    command += ["--no-control-socket", "--pythonpath", str(ROOT), "app:app"]
    environment = {name: value for name, value in os.environ.items() if name != "GUNICORN_CMD_ARGS"}
    # A folder of its own: gunicorn reads a gunicorn.conf.py that stands in the current one.
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        log = Path(folder, "log")
        with log.open("wb") as output:
            # A session of its own: Ctrl-C then reaches this program alone, which stops the server.
            server = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        try:
            yield _url(server, log), server.pid
        finally:
            server.terminate()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def _url(server: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until every worker serves, and return the server's URL."""
    deadline = time.monotonic() + 60
    while True:
        stopped = server.poll() is not None
        text = log.read_text(errors="replace")
        listening = re.search(r"Listening at: (http://\S+)", text)
        if listening and text.count("Application startup complete.") >= WORKERS:
            return listening[1]
        if stopped or time.monotonic() > deadline:
            raise NotStarted(f"A server did not start. Its log:\n{text}")
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    """Return the process IDs of the children of the process ``pid``, the eldest first."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # "pid (name) state parent ...", where the name may hold anything: proc(5).
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return sorted(found)


class Session:
    """A caller with a cookie jar and one session of the counter; remembers what its answers were."""

    def __init__(self, url: str, connector: aiohttp.BaseConnector) -> None:
        # unsafe: otherwise aiohttp keeps no cookies of a server that is named by its IP address.
        jar = aiohttp.CookieJar(unsafe=True)
        self.client = aiohttp.ClientSession(url, connector=connector, connector_owner=False, cookie_jar=jar)
        self.answers: list[Outcome] = []

    async def begin(self) -> None:
        await self._post("/seed_session", {"initial_count": 0}, {"success": True})

    async def go_on(self) -> None:
        await self._post("/increment_counter", {"count": 1}, {"success": True})
        await self._post("/increment_counter", {"count": 2}, {"success": True})
        await self._post("/verify", {"expected_count": 3}, {"reward": 1.0})

    async def whole(self) -> None:
        await self.begin()
        await self.go_on()

    def outcome(self) -> Outcome:
        """Return the worst of the answers. A session that was answered again after a 410 is wrong too."""
        worst = max(self.answers, key=("right", "gone", "wrong", "failed").index)
        revived = worst == "gone" and self.answers[-1] != "gone"
        return "wrong" if revived else worst

    async def _post(self, path: str, body: dict[str, int], expected: dict[str, Any]) -> None:
        self.answers.append(await self._answer(path, body, expected))

    async def _answer(self, path: str, body: dict[str, int], expected: dict[str, Any]) -> Outcome:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
            async with self.client.post(path, json=body) as response:
                answer = await response.json(content_type=None)
                if response.status == 200:
                    return "right" if answer == expected else "wrong"
                if response.status == 410 and answer["type"] == "urn:gym-gunicorn:session-gone":
                    return "gone"
        return "failed"


@contextlib.asynccontextmanager
async def sessions(url: str) -> AsyncIterator[list[Session]]:
    """Make the callers. Each request has a connection of its own, as if from many machines."""
    async with aiohttp.TCPConnector(force_close=True, limit=CONNECTIONS) as connector:
        callers = [Session(url, connector) for _ in range(SESSIONS)]
        try:
            yield callers
        finally:
            await asyncio.gather(*(caller.client.close() for caller in callers))


def show(text: str) -> None:
    """Say what is being done: on a terminal in one line that is rewritten."""
    print(f"\r\x1b[K{text}" if sys.stdout.isatty() else text, end="" if sys.stdout.isatty() else "\n", flush=True)


async def at_once(what: str, steps: Iterable[Awaitable[None]]) -> None:
    """Do the sessions' ``steps`` concurrently, and show how far they are."""
    show(f"{what} ...")
    done = 0

    async def counted(step: Awaitable[None]) -> None:
        nonlocal done
        await step
        done += 1
        if sys.stdout.isatty():
            show(f"{what}: {done} of {SESSIONS}")

    await asyncio.gather(*(counted(step) for step in steps))


async def undisturbed(name: str, url: str) -> Counter[Outcome]:
    async with sessions(url) as callers:
        await at_once(f"{name}: {SESSIONS} sessions", (caller.whole() for caller in callers))
        return Counter(caller.outcome() for caller in callers)


async def with_a_kill(name: str, url: str, arbiter: int) -> Counter[Outcome]:
    async with sessions(url) as callers:
        await at_once(f"{name}: {SESSIONS} sessions begin", (caller.begin() for caller in callers))
        victim = children(arbiter)[0]
        os.kill(victim, signal.SIGKILL)
        await at_once(f"{name}: worker {victim} is killed, the sessions go on", (caller.go_on() for caller in callers))
        return Counter(caller.outcome() for caller in callers)


def demo() -> bool:
    """Print the table and what it means; return whether our workers did what they are for."""
    names = (f"{WORKERS} stock workers", f"{WORKERS} of gym-gunicorn's", "the same, one killed half-way")
    show(f"{names[0]}: starting")
    with served(*STOCK) as (url, _):
        stock = asyncio.run(undisturbed(names[0], url))
    show(f"{names[1]}: starting")
    with served(*OURS) as (url, arbiter):
        ours = asyncio.run(undisturbed(names[1], url))
        killed = asyncio.run(with_a_kill(names[2], url, arbiter))
    show("")

    title = f"{SESSIONS} concurrent sessions: seed, +1, +2, verify"
    print(f"{title:50}" + "".join(f"{outcome:>8}" for outcome in OUTCOMES))
    for name, counts in zip(names, (stock, ours, killed), strict=True):
        print(f"{name:50}" + "".join(f"{counts[outcome]:8}" for outcome in OUTCOMES))

    good = ours["right"] == SESSIONS and killed["gone"] > 0 and killed["gone"] + killed["right"] == SESSIONS
    if good:
        wrong, gone = stock["wrong"], killed["gone"]
        meaning = (
            f"Stock workers gave {wrong} of {SESSIONS} sessions a wrong result and no error; gym-gunicorn gave none,\n"
            f"and when a worker was killed, the {gone} sessions it held were told so (410) and the others went on."
        )
    else:
        meaning = "Not as it should be: no session of gym-gunicorn may be wrong or failed, or gone before the kill."
    print(f"\n{meaning}")
    return good


def main() -> int:
    # Ended like Ctrl-C does, so that no server stays behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        return 0 if demo() else 1
    except NotStarted as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
