"""An arbiter that is killed under load, and started again at once on the same port, as a supervisor does."""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack

from tests.e2e.calls import assert_nothing_left
from tests.faults.scenario import APP, scenario
from tests.gunicorn_server import CONFIG, GunicornServer, gunicorn_server, until


def test_killed_arbiter_that_is_started_again_at_once_loses_the_old_sessions_and_says_so() -> None:
    with ExitStack() as stack, scenario("the arbiter is killed and started again") as game:
        (first,) = game.server.directories()
        config = CONFIG.replace("{parent}", str(game.server.parent))
        address = f"127.0.0.1:{game.server.port}"

        def start() -> GunicornServer:
            """Start it until it starts: the old workers may still hold the port."""
            while True:
                attempt = ExitStack()
                server = attempt.enter_context(
                    gunicorn_server("-b", address, app=APP, config=config, ready=False, env=game.ledger.env)
                )
                until(lambda: server.ready_workers() >= 4 or server.process.poll() is not None, "it serves or ends")  # noqa: B023
                if server.process.poll() is None:
                    stack.push(attempt)
                    server.workers()
                    return server
                attempt.close()

        servers = [game.server]

        async def disturb() -> None:
            for _ in range(2):
                await asyncio.sleep(2)
                servers[-1].send(signal.SIGKILL)
                servers[-1].wait()
                servers.append(await asyncio.to_thread(start))

        tally = game.play(disturb, players=60)
        assert tally.gone
        until(lambda: not first.exists(), "the first directory is gone")
        assert servers[-1].stop() == 0
        for server in servers[1:]:
            assert_nothing_left(server)
        game.ended()
