"""Hooks of the user's that raise, under load: what gunicorn does then, and never a wrong answer or something left."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import pytest

from gym_gunicorn import SessionRouting
from tests.faults.players import come_true
from tests.faults.scenario import Scenario, scenario
from tests.gunicorn_server import CONFIG

RAISES = (
    CONFIG
    + """
import os
ours = @hook@

def @hook@(@parameters@):
    if os.path.exists("{parent}/early"):
        raise RuntimeError("the user's hook breaks")
    ours(@parameters@)
    if os.path.exists("{parent}/late"):
        raise RuntimeError("the user's hook breaks")
"""
)

Target = Callable[[Scenario, signal.Signals], None]

# What gunicorn (27.0) does: the server ends, or lives on.
ENDS, LIVES = True, False


def a_worker(game: Scenario, signum: signal.Signals) -> None:
    game.strike(signum)


def the_arbiter(game: Scenario, signum: signal.Signals) -> None:
    game.server.send(signum)


@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize(
    ("hook", "parameters", "target", "signum", "ends"),
    [
        ("on_starting", "server", the_arbiter, signal.SIGUSR2, LIVES),
        ("on_reload", "server", the_arbiter, signal.SIGHUP, ENDS),
        ("nworkers_changed", "server, new, old", the_arbiter, signal.SIGTTIN, ENDS),
        ("pre_fork", "server, worker", a_worker, signal.SIGKILL, ENDS),
        ("post_worker_init", "worker", a_worker, signal.SIGKILL, ENDS),
        ("worker_exit", "server, worker", a_worker, signal.SIGTERM, LIVES),
        ("child_exit", "server, worker", a_worker, signal.SIGKILL, ENDS),
        ("pre_exec", "server", the_arbiter, signal.SIGUSR2, LIVES),
        ("on_exit", "server", the_arbiter, signal.SIGTERM, ENDS),
    ],
    ids=lambda value: value if value in SessionRouting.HOOKS else "",
)
def test_hook_of_the_users_that_raises_costs_no_right_answer(
    hook: str, parameters: str, target: Target, signum: signal.Signals, ends: bool, when: str
) -> None:
    config = RAISES.replace("@hook@", hook).replace("@parameters@", parameters)
    name = f"the user's {hook} raises {'before' if when == 'early' else 'after'} ours"
    with scenario(name, "--graceful-timeout", "3", config=config, workers=2) as game:

        async def disturb() -> None:
            await come_true(lambda: game.tally.right >= 40, "the callers are served")
            (game.server.parent / when).touch()
            target(game, signum)
            if ends:
                assert await asyncio.to_thread(game.server.wait) != 0
                # Orphaned workers may still drain.
                await come_true(lambda: not game.server.survivors(), "every process has ended")
                return
            await come_true(lambda: "the user's hook breaks" in game.server.log(), "it has raised")
            right = game.tally.right
            await come_true(lambda: game.tally.right >= right + 200, "the callers are served")
            # The child of a pre_exec that raises waits as long for workers that are not its own.
            await come_true(lambda: len(game.server.workers()) == 2, "two workers and no other child are left")

        tally = game.play(disturb, players=40, recover=0 if ends else 3)
        assert tally.right
        assert "the user's hook breaks" in game.server.log()
        (game.server.parent / when).unlink()
        if ends:
            game.ended()
        else:
            game.end()
