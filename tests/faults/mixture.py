"""Everything that can break, at random, under load: what ``scripts/soak`` runs, and a test for two minutes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from tests.e2e.calls import assert_nothing_left
from tests.faults.files import listener_of, remove_tree
from tests.faults.players import come_true, play
from tests.faults.tally import Ledger, Tally, ledger
from tests.gunicorn_server import CONFIG, ROOT, GunicornServer, children, gunicorn_server, is_alive, until

SETTINGS = CONFIG + 'pidfile = "{parent}/pid"\n'

# Seconds after which gunicorn takes a silent worker for dead, and which stopping ones have.
TIMEOUT = 6

QUERIES = ("", "", "", "?stream=1&size=200000", "?size=20000", "?hold=0.1", "?hold=0.5", "?block=0.2")


@dataclass
class Mixture:
    """A server under load in which something breaks again and again.

    Args:
        seed: chance's; what breaks when is the same again for the same seed, as far as
            the machine is.
    """

    server: GunicornServer
    ledger: Ledger
    seed: int
    tally: Tally = field(default_factory=Tally)
    broken: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.arbiter = self.server.pid
        self.started: list[subprocess.Popen[bytes]] = []
        self.stopped: set[int] = set()
        self.healing: list[asyncio.Task[None]] = []

    async def run(self, seconds: float, say: Callable[[str], None] = lambda line: None, players: int = 200) -> None:
        """Play for ``seconds``, break something about once a second, and let everything recover."""

        async def disturb() -> None:
            loop = asyncio.get_running_loop()
            end = loop.time() + seconds
            while loop.time() < end:
                await asyncio.sleep(self.chance.uniform(0.3, 1.5))
                fault = self.chance.choices(FAULTS, WEIGHTS)[0]
                self.broken[fault.__name__] += 1
                await fault(self)
                self.see()
                say(f"{max(0, end - loop.time()):4.0f} s left: {self.tally.line()}")
            self.let_go_on()
            await asyncio.gather(*self.healing)

        await play(
            self.server.url,
            disturb,
            players=players,
            seed=self.seed,
            tally=self.tally,
            folder=self.server.parent,
            queries=QUERIES,
            patience=60,
        )

    def see(self) -> list[int]:
        """Return the pids of the living workers, and remember all processes, to be ended at the end."""
        found = children(self.arbiter)
        self.server.seen.update((self.arbiter, *found))
        return found

    def any_worker(self) -> int | None:
        """Return the pid of a worker that chance picks, of those that are not to be let stand still."""
        workers = [pid for pid in self.see() if pid not in self.stopped]
        return self.chance.choice(workers) if workers else None

    def strike(self, signum: signal.Signals) -> int | None:
        """Send a signal to a worker that chance picks."""
        pid = self.any_worker()
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
        return pid

    def let_go_on(self) -> None:
        """Let those go on that stand still for ever."""
        for pid in self.stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def removed(self, remove: Callable[[], dict[Path, int]]) -> None:
        """Remove private sockets, and excuse wrong 410 until those whose workers live are there again.

        Args:
            remove: does it, and returns who listened at each of them.
        """

        async def heal() -> None:
            def is_healed() -> bool:
                return all(listener_of(path) == pid for path, pid in listeners.items() if is_alive(pid))

            await come_true(is_healed, f"{listeners} are there again")
            self.tally.unhealed -= 1
            self.tally.healed = asyncio.get_running_loop().time()

        self.tally.unhealed += 1
        listeners = await asyncio.to_thread(remove)
        self.healing.append(asyncio.create_task(heal()))

    def tell(self, signum: signal.Signals) -> None:
        """Send a signal to the arbiter."""
        os.kill(self.arbiter, signum)

    def end(self) -> None:
        """Check the invariant, stop the server, and fail where anything is left of it."""
        self.tally.check(self.ledger)
        self.tell(signal.SIGTERM)
        for process in (self.server.process, *self.started):
            if process.pid == self.arbiter:
                process.wait(60)
        until(lambda: not is_alive(self.arbiter), "the arbiter has ended")
        assert_nothing_left(self.server)


@contextmanager
def mixture(seed: int) -> Iterator[Mixture]:
    """Serve the ledger app to a ``Mixture``, and end all that it has started."""
    options = ("--timeout", str(TIMEOUT), "--graceful-timeout", str(TIMEOUT), "--backlog", "512")
    with (
        ledger() as book,
        gunicorn_server(*options, app="tests.faults.ledger:app", config=SETTINGS, env=book.env) as server,
    ):
        mixed = Mixture(server, book, seed)
        try:
            yield mixed
        finally:
            mixed.see()
            for process in mixed.started:
                with suppress(ProcessLookupError):
                    process.kill()
                process.wait()


# What breaks


async def worker_killed(it: Mixture) -> None:
    it.strike(signal.SIGKILL)


async def worker_told_to_stop(it: Mixture) -> None:
    it.strike(signal.SIGTERM)


async def worker_aborted(it: Mixture) -> None:
    it.strike(signal.SIGABRT)


async def worker_stands_still(it: Mixture) -> None:
    pid = it.strike(signal.SIGSTOP)
    await asyncio.sleep(it.chance.uniform(0.1, 2))
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def worker_stands_still_for_ever(it: Mixture) -> None:
    pid = it.strike(signal.SIGSTOP)
    if pid is not None:
        it.stopped.add(pid)


async def reload(it: Mixture) -> None:
    it.tell(signal.SIGHUP)


async def more_workers(it: Mixture) -> None:
    if len(it.see()) < 7:
        it.tell(signal.SIGTTIN)


async def fewer_workers(it: Mixture) -> None:
    if len(it.see()) > 3:
        it.tell(signal.SIGTTOU)


async def socket_removed(it: Mixture) -> None:
    sockets = sorted(it.server.parent.glob("gym-gunicorn-*/*.sock"))
    if not sockets:
        return
    path = it.chance.choice(sockets)

    def remove() -> dict[Path, int]:
        pid = listener_of(path)
        path.unlink(missing_ok=True)
        return {path: pid}

    await it.removed(remove)


async def directory_removed(it: Mixture) -> None:
    def remove() -> dict[Path, int]:
        listeners = {}
        for directory in it.server.directories():
            aside = directory.with_name("aside")
            with suppress(FileNotFoundError):
                directory.rename(aside)
                # All that were in it, and none that was bound too late to be removed.
                listeners.update({directory / path.name: listener_of(path) for path in aside.glob("*.sock")})
                remove_tree(aside)
        return listeners

    await it.removed(remove)


async def upgraded_or_rolled_back(it: Mixture) -> None:
    beside = it.server.parent / "pid.2"
    it.tell(signal.SIGUSR2)
    await come_true(lambda: beside.exists() and beside.read_text().strip(), "the new arbiter has written its pid")
    new, old = int(beside.read_text()), it.arbiter
    it.server.seen.add(new)
    await come_true(lambda: len(children(new)) >= 2, "the new arbiter has workers")
    it.server.seen.update(children(new))
    await asyncio.sleep(it.chance.uniform(0, 2))
    goes, it.arbiter = (old, new) if it.chance.random() < 0.5 else (new, old)
    ended = [goes, *(pid for pid in children(goes) if pid != new)]
    os.kill(goes, signal.SIGTERM)
    for process in (it.server.process, *it.started):
        if process.pid == goes:
            await asyncio.to_thread(process.wait)
    await come_true(lambda: not any(map(is_alive, ended)), f"{goes}, the arbiter that goes, and its {ended} have gone")
    await come_true(lambda: not beside.exists(), "one arbiter is left on the books")


async def arbiter_killed_and_started_again(it: Mixture) -> None:
    it.tell(signal.SIGKILL)
    for process in (it.server.process, *it.started):
        if process.pid == it.arbiter:
            await asyncio.to_thread(process.wait)
    await come_true(lambda: not is_alive(it.arbiter), "the arbiter is dead")
    # Who has no arbiter any more is never ended for standing still, and holds the port.
    it.let_go_on()
    command = cast("list[str]", it.server.process.args)
    ready = it.server.ready_workers()
    while True:
        with it.server.log_path.open("ab") as log:
            process = subprocess.Popen(  # noqa: ASYNC220  # it takes no time
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **it.ledger.env},
            )
        it.started.append(process)
        it.server.seen.add(process.pid)
        await come_true(
            lambda: it.server.ready_workers() > ready or process.poll() is not None,  # noqa: B023
            "it serves, or the old workers still hold the port",
        )
        if process.poll() is None:
            it.arbiter = process.pid
            return


Fault = Callable[[Mixture], Awaitable[None]]
_CHANCES: dict[Fault, float] = {
    worker_killed: 4,
    worker_told_to_stop: 3,
    worker_aborted: 2,
    worker_stands_still: 4,
    worker_stands_still_for_ever: 1,
    reload: 3,
    more_workers: 2,
    fewer_workers: 2,
    socket_removed: 3,
    directory_removed: 2,
    upgraded_or_rolled_back: 1,
    arbiter_killed_and_started_again: 1,
}
FAULTS, WEIGHTS = list(_CHANCES), list(_CHANCES.values())
