"""More workers and fewer, as fast as signals can say it."""

from __future__ import annotations

import asyncio
import signal

from tests.faults.players import rounds
from tests.faults.scenario import SECONDS, scenario


def test_storms_of_ttin_and_ttou_break_no_connection() -> None:
    with scenario("storms of SIGTTIN and SIGTTOU") as game:

        async def disturb() -> None:
            number = 4
            for _ in rounds(SECONDS, lambda: game.tally.gone):
                for _ in range(game.chance.randint(1, 6)):
                    more = number < 7 and (number == 1 or game.chance.random() < 0.5)
                    number += 1 if more else -1
                    game.server.send(signal.SIGTTIN if more else signal.SIGTTOU)
                await asyncio.sleep(game.chance.uniform(0.0, 0.5))

        tally = game.play(disturb, players=60)
        assert tally.gone
        assert not tally.broken, tally.causes
        game.end()
