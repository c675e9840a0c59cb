"""SIGUSR2 under load: upgrades, roll-backs, and both while workers are still starting."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

from tests.faults.players import come_true
from tests.faults.scenario import Scenario, scenario
from tests.gunicorn_server import CONFIG, children, is_alive

# gunicorn names the new arbiter beside the old one's file, until that one has gone.
SETTINGS = CONFIG + 'pidfile = "{parent}/pid"\n'


def arbiter_in(path: Path) -> int:
    """Return the pid in a file of gunicorn's, or 0."""
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):
        return 0


async def new_arbiter(game: Scenario, old: int) -> int:
    """Have the arbiter ``old`` start another one, and return the pid of that."""
    path = game.server.parent / "pid.2"
    before = arbiter_in(path)
    os.kill(old, signal.SIGUSR2)
    await come_true(lambda: arbiter_in(path) not in (0, before), "the new arbiter has written its pid")
    new = arbiter_in(path)
    game.server.seen.add(new)
    return new


async def both_serve(game: Scenario, new: int) -> None:
    await come_true(
        lambda: len(children(new)) == 3 and len(game.server.owners()) == 6, "there are workers of both generations"
    )
    game.server.seen.update(children(new))
    await come_true(lambda: game.tally.owners & set(children(new)), "the new ones have sessions")


async def end(pid: int) -> None:
    """Stop an arbiter, and wait until it and its workers have gone."""
    ended = [pid, *children(pid)]
    os.kill(pid, signal.SIGTERM)
    await come_true(lambda: not any(map(is_alive, ended)), "they are gone")


async def reaped(pid: int) -> None:
    """Wait until the old arbiter knows that the new one has ended: until then it starts no other."""
    await come_true(lambda: not os.path.exists(f"/proc/{pid}"), "it is reaped")


def loads_its_app(pid: int) -> bool:
    """Tell whether a worker has signals of its own: one just forked loses a SIGTERM in its arbiter's handler."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return not int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1
    return False


def test_upgrades_break_no_connection() -> None:
    with scenario("SIGUSR2: upgrades", workers=3, config=SETTINGS) as game:
        arbiters = [game.server.pid]

        async def disturb() -> None:
            for _ in range(2):
                arbiters.append(await new_arbiter(game, arbiters[-1]))
                await both_serve(game, arbiters[-1])
                old = arbiters[-2]
                os.kill(old, signal.SIGTERM)
                if old == game.server.pid:
                    await asyncio.to_thread(game.server.wait)
                await come_true(lambda: not is_alive(old), "the old arbiter is gone")  # noqa: B023
                await come_true(
                    lambda: arbiter_in(game.server.parent / "pid") == arbiters[-1], "the new one is in its place"
                )

        tally = game.play(disturb, players=60)
        assert tally.gone
        assert not tally.broken, tally.causes
        game.end(arbiters[-1])


def test_upgrades_that_are_rolled_back_break_no_connection() -> None:
    with scenario("SIGUSR2: roll-backs", workers=3, config=SETTINGS) as game:
        workers = game.server.workers()

        async def disturb() -> None:
            for _ in range(2):
                new = await new_arbiter(game, game.server.pid)
                await both_serve(game, new)
                await end(new)
                await reaped(new)

        tally = game.play(disturb, players=60)
        assert tally.gone
        assert not tally.broken, tally.causes
        assert game.server.workers() == workers
        game.end()


def test_upgrades_while_workers_are_starting_break_no_connection() -> None:
    with scenario("SIGUSR2 while workers are starting", workers=3, config=SETTINGS, env={"SLOW_IMPORT": "0.7"}) as game:
        arbiters: list[int] = []

        async def disturb() -> None:
            # One is told to go while both start workers, the other to take over while the old one still does.
            for _ in range(2):
                game.server.send(signal.SIGHUP)
                new = await new_arbiter(game, game.server.pid)
                game.server.send(signal.SIGHUP)
                if not arbiters:
                    await come_true(
                        lambda: len(children(new)) == 3 and all(map(loads_its_app, children(new))),  # noqa: B023
                        "its workers load their app",
                    )
                    arbiters.append(new)
                    await end(new)
                    await reaped(new)
            await both_serve(game, new)
            arbiters.append(new)
            game.server.send(signal.SIGTERM)
            await asyncio.to_thread(game.server.wait)

        tally = game.play(disturb, players=60)
        assert tally.gone
        assert not tally.broken, tally.causes
        game.end(arbiters[-1])
