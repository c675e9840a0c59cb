"""Reloads under load: again and again, to an app that can't be imported, to a configuration without our hooks."""

from __future__ import annotations

import asyncio
import signal

from tests.e2e.launching import reconfigure, rewrite
from tests.faults.players import come_true, rounds
from tests.faults.scenario import SECONDS, scenario
from tests.gunicorn_server import CONFIG, STOCK, errors

SETTINGS = CONFIG + 'raw_env = ["NO_IMPORT="]\n'


def test_reloads_break_no_connection_and_end_the_sessions_of_those_they_replace() -> None:
    with scenario("SIGHUP every two seconds") as game:

        async def disturb() -> None:
            for _ in rounds(SECONDS, lambda: game.tally.gone):
                game.server.send(signal.SIGHUP)
                await asyncio.sleep(2)

        tally = game.play(disturb, players=100)
        assert tally.gone
        assert not tally.broken, tally.causes
        assert errors(game.server.log()) == []
        game.end()


def test_reloads_while_workers_are_starting_break_no_connection() -> None:
    with scenario("SIGHUP while workers are starting", workers=3, env={"SLOW_IMPORT": "0.7"}) as game:

        async def disturb() -> None:
            for _ in rounds(SECONDS / 2):
                game.server.send(signal.SIGHUP)
                await asyncio.sleep(game.chance.uniform(0.1, 0.6))
            # Maybe none was ready in all the time.
            await come_true(lambda: game.tally.gone, "old sessions are gone")

        tally = game.play(disturb, players=60)
        assert tally.gone
        assert not tally.broken, tally.causes
        game.end()


def test_reload_to_an_app_that_can_not_be_imported_ends_the_server_and_no_caller_waits() -> None:
    with scenario("a reload to an app that can't be imported", config=SETTINGS) as game:
        reconfigure(game.server, "NO_IMPORT=", "NO_IMPORT=yes")

        async def disturb() -> None:
            await asyncio.sleep(2)
            game.server.send(signal.SIGHUP)
            assert await asyncio.to_thread(game.server.wait) != 0
            # Orphaned workers may still drain.
            await come_true(lambda: not game.server.survivors(), "every process has ended")
            await come_true(lambda: game.tally.causes["ClientConnectorError"], "somebody asks when the server is gone")

        tally = game.play(disturb, players=60, recover=0)
        assert tally.right
        assert "this app can't be imported" in game.server.log()
        game.ended()


def test_reload_to_a_configuration_without_our_hooks_keeps_routing_and_breaks_no_connection() -> None:
    with scenario("a reload to a configuration without our hooks") as game:
        rewrite(game.server, STOCK)

        async def disturb() -> None:
            for _ in rounds(SECONDS, lambda: game.tally.gone):
                game.server.send(signal.SIGHUP)
                await asyncio.sleep(2)

        tally = game.play(disturb, players=60)
        assert tally.gone
        assert not tally.broken, tally.causes
        assert "lacks what session routing needs" in game.server.log()
        game.end()
