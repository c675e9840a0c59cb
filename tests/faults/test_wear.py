"""Workers that wear out: by requests, by a handler that blocks, by memory, by children of the app."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import aiohttp

from tests.e2e.calls import processes_of
from tests.faults.players import Player, come_true, rounds
from tests.faults.scenario import SECONDS, Scenario, lacking, scenario
from tests.gunicorn_server import is_alive, until

MEMORY = Path("/sys/fs/cgroup/memory")


def one_more(game: Scenario, patience: float = 60.0) -> Player:
    """A player that a test moves itself."""
    return Player(game.server.url, game.tally, patience, keep_alive=False, dice=game.chance, folder=game.server.parent)


def test_small_max_requests_break_no_connection() -> None:
    with scenario("max_requests 200", "--max-requests", "200", "--max-requests-jitter", "100") as game:

        async def disturb() -> None:
            await asyncio.sleep(SECONDS)
            await come_true(lambda: game.tally.gone, "a worker has had enough")

        tally = game.play(disturb, players=60)
        assert tally.gone
        assert not tally.broken, tally.causes
        game.end()


def test_handler_that_blocks_past_timeout_costs_the_sessions_of_its_own_worker() -> None:
    with scenario("a handler blocks past timeout", "--timeout", "2") as game:

        async def disturb() -> None:
            for _ in rounds(SECONDS, lambda: game.tally.gone):
                player = one_more(game)
                assert await player.step() in ("right", "broken")
                # Its own worker is ended under it; so may be the one that was to forward it.
                assert await player.step("?block=60") in ("gone", "broken")
                await player.close()

        tally = game.play(disturb, players=60)
        assert tally.gone
        assert "WORKER TIMEOUT" in game.server.log()
        game.end()


@contextmanager
def memory_limit(limit: int) -> Iterator[Path]:
    """A cgroup whose processes the kernel kills when they take ``limit`` bytes more than they have."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="gym-gunicorn-test-", dir=MEMORY))
    except OSError:
        lacking(f"a memory cgroup (version 1) in {MEMORY}, and the right to make another in it")
    try:
        # Killed, not swapped out.
        (folder / "memory.swappiness").write_text("0")
        (folder / "memory.limit_in_bytes").write_text(str(limit))
        yield folder
    finally:
        for pid in (folder / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        until(lambda: not (folder / "cgroup.procs").read_text(), "nobody is in the cgroup")
        folder.rmdir()


def test_worker_that_leaks_until_the_kernel_kills_it_costs_its_own_sessions() -> None:
    # What the limit could reach is bounded beside it: 64 times 4 MiB.
    with memory_limit(2**26) as cgroup, scenario("a worker leaks until the kernel kills it") as game:

        async def disturb() -> None:
            for _ in range(2):
                player = one_more(game)
                while await player.step() != "right":
                    pass
                leaking = player.owner
                (cgroup / "cgroup.procs").write_text(str(leaking))
                for _ in range(64):
                    try:
                        async with player.http.post(f"{game.server.url}/leak?size={2**22}") as response:
                            if response.status != 200:
                                assert response.status in (410, 502)
                                break
                            assert (await response.json())["pid"] == leaking
                    except aiohttp.ClientError:
                        break
                await come_true(lambda: not is_alive(leaking), "the kernel has killed it")  # noqa: B023
                await player.close()
                await asyncio.sleep(1)
            await come_true(lambda: game.tally.gone, "its sessions are gone")

        tally = game.play(disturb, players=60)
        assert tally.gone
        killed = dict(line.split() for line in (cgroup / "memory.oom_control").read_text().splitlines())
        assert killed["oom_kill"] == "2"
        game.end()


def test_sessions_of_a_killed_worker_get_410_at_once_though_its_children_live_on() -> None:
    with scenario("a killed worker's children live on") as game:
        forked: list[int] = []

        async def disturb() -> None:
            for _ in range(3):
                player = one_more(game)
                while await player.step() != "right":
                    pass
                async with player.http.post(f"{game.server.url}/fork?seconds=3600") as response:
                    answer = await response.json()
                assert answer["pid"] == player.owner
                forked.append(answer["child"])
                game.server.seen.add(answer["child"])
                os.kill(player.owner, signal.SIGKILL)
                await come_true(lambda: not is_alive(player.owner), "it is dead")  # noqa: B023
                assert await player.step() in ("gone", "broken")
                await player.close()
            await come_true(lambda: game.tally.gone, "their sessions are gone")

        tally = game.play(disturb, players=60)
        assert tally.gone
        # Nobody is told to wait at the port of a server that has stopped.
        game.server.stop()
        until(lambda: set(processes_of(game.server)) == set(forked), "all but the children have ended")
        socket.create_server(("127.0.0.1", game.server.port)).close()
        assert game.server.directories() == []
        for pid in forked:
            os.kill(pid, signal.SIGKILL)
        game.ended()
