"""The clock of the machine steps, under load. Only that of the server's processes, by libfaketime."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.faults.players import rounds
from tests.faults.scenario import SECONDS, Scenario, lacking, scenario
from tests.gunicorn_server import CONFIG

LIBRARIES = [Path("/usr/lib/faketime"), *Path("/usr/lib").glob("*/faketime")]

HOUR = 3600

# libfaketime (0.9.10) fails Python's sleep, on the monotonic clock, where that is not to be faked.
SETTINGS = (
    CONFIG
    + """
import select, time
time.sleep = lambda seconds: select.select([], [], [], seconds)
"""
)


@contextmanager
def stepping_clock(name: str, **env: str) -> Iterator[tuple[Scenario, Callable[[int], None]]]:
    """A server, and what sets its clock to so many seconds beside the right time."""
    library = next((path for folder in LIBRARIES for path in folder.glob("libfaketimeMT.so.1")), None)
    if library is None:
        lacking("libfaketime")
    with TemporaryDirectory(prefix="gg-clock-", dir="/tmp") as folder_name:
        folder = Path(folder_name)
        offset = folder / "offset"

        def step(seconds: int) -> None:
            (folder / "next").write_text(f"{seconds:+d}")
            os.replace(folder / "next", offset)

        step(0)
        env |= {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(offset),
            "FAKETIME_NO_CACHE": "1",
            # A step moves neither the monotonic clock nor the times of files.
            "DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }
        with scenario(name, config=SETTINGS, env=env) as game:
            yield game, step


def test_clock_that_steps_forward_loses_no_session() -> None:
    with stepping_clock("the clock steps forward by an hour") as (game, step):
        workers = game.server.workers()

        async def disturb() -> None:
            for number in rounds(SECONDS):
                step(number * HOUR)
                await asyncio.sleep(0.5)

        tally = game.play(disturb, players=60)
        assert not tally.gone
        assert not tally.broken, tally.causes
        assert game.server.workers() == workers
        game.end()


def test_clock_that_steps_back_starts_anew_the_sessions_of_the_future_as_stock_does_and_loses_no_other() -> None:
    with stepping_clock("the clock steps back and forth by an hour") as (game, step):
        workers = game.server.workers()

        async def disturb() -> None:
            for _ in rounds(SECONDS, lambda: game.tally.anew):
                step(game.chance.choice((-HOUR, 0, HOUR)))
                await asyncio.sleep(game.chance.uniform(0.1, 0.5))
            step(0)

        # A cookie signed in the future is no session to SessionMiddleware.
        tally = game.play(disturb, players=60, forgetful=True)
        assert tally.anew
        assert not tally.gone
        assert not tally.broken, tally.causes
        assert game.server.workers() == workers
        game.end()


def test_clock_that_steps_on_the_way_to_the_session_middleware_has_no_other_worker_answer() -> None:
    with stepping_clock("the clock steps within requests", PAUSE="0.02") as (game, step):

        async def disturb() -> None:
            for number in rounds(SECONDS, lambda: game.tally.anew):
                step(-HOUR * (number % 2))
                await asyncio.sleep(0.02)
            step(0)

        tally = game.play(disturb, players=60, forgetful=True, fresh=0.3)
        assert tally.anew
        assert not tally.gone
        assert not tally.broken, tally.causes
        game.end()
