"""Workers that are killed, aborted, told to stop, stopped for a while and stopped for ever, under load."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

import pytest

from tests.e2e.calls import is_stopped
from tests.faults.players import rounds
from tests.faults.scenario import SECONDS, Scenario, scenario
from tests.gunicorn_server import is_alive, until


def go_on(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


async def stop_and_continue(game: Scenario, seconds: float) -> None:
    """Have a worker that chance picks stand still for ``seconds``."""
    pid = game.strike(signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        if pid is not None:
            go_on(pid)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGABRT], ids=lambda signum: signum.name)
def test_workers_that_die_take_their_own_sessions_along_and_no_others(signum: signal.Signals) -> None:
    with scenario(f"a worker gets {signum.name} every second") as game:

        async def disturb() -> None:
            for _ in rounds(SECONDS, lambda: game.tally.gone):
                await asyncio.sleep(1)
                game.strike(signum)

        tally = game.play(disturb, players=60)
        assert tally.gone
        game.end()


def test_workers_told_to_stop_finish_what_they_have_begun() -> None:
    with scenario("a worker gets SIGTERM every second") as game:

        async def disturb() -> None:
            for _ in rounds(SECONDS, lambda: game.tally.gone):
                await asyncio.sleep(1)
                game.strike(signal.SIGTERM)

        tally = game.play(disturb, players=60)
        assert tally.gone
        assert not tally.broken, tally.causes
        game.end()


def test_workers_that_stand_still_for_a_while_lose_nothing() -> None:
    # A connection that is not kept alive for longer than its worker stands still is closed by uvicorn as idle.
    with scenario("a worker gets SIGSTOP, and SIGCONT after a second", "--keep-alive", "75") as game:
        workers = game.server.workers()

        async def disturb() -> None:
            for _ in rounds(SECONDS):
                await stop_and_continue(game, game.chance.uniform(0.2, 1.5))

        tally = game.play(disturb, players=60)
        assert not tally.gone
        assert not tally.broken, tally.causes
        assert game.server.workers() == workers
        game.end()


def test_workers_that_stand_still_for_ever_are_ended_by_timeout_and_callers_told() -> None:
    with scenario("a worker gets SIGSTOP for ever", "--timeout", "3") as game:
        stopped = []

        async def disturb() -> None:
            for _ in rounds(SECONDS, lambda: game.tally.gone):
                pid = game.strike(signal.SIGSTOP)
                if pid is not None:
                    stopped.append(pid)
                await asyncio.sleep(2.5)

        tally = game.play(disturb, players=60)
        assert tally.gone
        # One at which nobody has a session is still to be ended.
        until(lambda: not any(is_alive(pid) for pid in stopped), "all are ended")
        assert "WORKER TIMEOUT" in game.server.log()
        game.end()


def test_workers_struck_at_random_lose_their_own_sessions_and_no_others() -> None:
    with scenario("workers get signals at random", "--timeout", "3") as game:

        async def disturb() -> None:
            for _ in rounds(SECONDS, lambda: game.tally.gone):
                await asyncio.sleep(game.chance.uniform(0.2, 1.0))
                signum = game.chance.choice((signal.SIGKILL, signal.SIGABRT, signal.SIGTERM, signal.SIGSTOP))
                if signum == signal.SIGSTOP and game.chance.random() < 0.7:
                    await stop_and_continue(game, game.chance.uniform(0.1, 1.0))
                else:
                    game.strike(signum)

        tally = game.play(disturb, players=200)
        assert tally.gone
        until(lambda: not any(is_alive(pid) and is_stopped(pid) for pid in game.server.workers()), "none stands still")
        game.end()
