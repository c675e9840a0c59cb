"""A server, players, something that breaks, and then the invariant."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import pytest

from tests.e2e.calls import assert_nothing_left
from tests.faults.players import play
from tests.faults.tally import Ledger, Tally, ledger
from tests.gunicorn_server import GunicornServer, gunicorn_server

APP = "tests.faults.ledger:app"

# For how long something is broken again and again in each scenario, in seconds.
SECONDS = float(os.environ.get("GYM_GUNICORN_FAULT_SECONDS", "5"))


@dataclass
class Scenario:
    """One server whose requests leave traces. ``name`` is what the table calls it."""

    name: str
    server: GunicornServer
    ledger: Ledger
    chance: random.Random
    tally: Tally = field(default_factory=Tally)

    def play(self, disturb: Callable[[], Awaitable[object]], **options: Any) -> Tally:
        """Play while ``disturb`` breaks things (``tests.faults.players.play``), and check the invariant."""
        owners_live = options.pop("owners_live", False)
        options = {"tally": self.tally, "folder": None if owners_live else self.server.parent, **options}
        try:
            self.tally = asyncio.run(play(self.server.url, disturb, **options))
            self.tally.check(self.ledger, owners_live=owners_live)
        except BaseException:
            self.tally.report(f"{self.name} (failed)")
            raise
        finally:
            print(f"{self.name}: {self.tally.line()} {dict(self.tally.causes)}")
        return self.tally

    def strike(self, signum: signal.Signals) -> int | None:
        """Send a signal to a worker that chance picks; return its pid, or ``None`` where there was none."""
        workers = self.server.workers()
        if workers:
            pid = self.chance.choice(workers)
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
                return pid
        return None

    def end(self, arbiter: int | None = None) -> None:
        """Stop the server, fail where anything is left of it, and keep the figures.

        Args:
            arbiter: the pid of the arbiter, where it is not the one that was started first.
        """
        if arbiter is not None:
            os.kill(arbiter, signal.SIGTERM)
        else:
            self.server.workers()
            self.server.send(signal.SIGTERM)
            # Reloads that are asked for and not done yet come first.
            self.server.wait(180)
        self.ended()

    def ended(self) -> None:
        """Fail where anything is left of a server that has ended, and keep the figures."""
        assert_nothing_left(self.server)
        # Nobody listens any more.
        socket.create_server(("127.0.0.1", self.server.port)).close()
        self.tally.report(self.name)


@contextmanager
def scenario(
    name: str, *arguments: str, app: str = APP, env: dict[str, str] | None = None, **options: Any
) -> Iterator[Scenario]:
    """Serve the ledger app with gunicorn; arguments and options are those of ``gunicorn_server``."""
    with ledger() as book, gunicorn_server(*arguments, app=app, env={**book.env, **(env or {})}, **options) as server:
        yield Scenario(name, server, book, dice(name))


def dice(seed: object) -> random.Random:
    """Return chance that can be repeated."""
    return random.Random(str(seed))


def in_words(what: Callable[..., object]) -> str:
    """Return the name of what a test does, for the table."""
    return what.__name__.replace("_", " ")


def lacking(what: str) -> NoReturn:
    """Report a test by name as one that could not be run, where the machine lacks what it needs."""
    # Named here, since pytest's summary counts skips of one reason together and names none.
    name = os.environ["PYTEST_CURRENT_TEST"].rpartition("::")[2].rpartition(" ")[0]
    pytest.skip(f"could not run: {name} needs {what}")
