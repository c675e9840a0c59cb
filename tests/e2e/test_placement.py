"""New sessions placed by four real workers: evenly, and around those that are killed, replaced or stand still."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import pytest

from gym_gunicorn.metrics.values import read_all
from tests.e2e.calls import Session, ask, connection_to, count, owner_of, probe_server, stopped
from tests.faults.players import rounds
from tests.faults.scenario import SECONDS, scenario
from tests.gunicorn_server import CONFIG, GunicornServer, until

BALANCED = CONFIG.replace("SessionRouting(", 'SessionRouting(placement="balanced", ')

# What the policy does is to be seen, and not how busy the machine is: how late a loop is and how long ago
# a session was made are left out.
TIMELESS = f"""{BALANCED}
from gym_gunicorn import placement
from gym_gunicorn.routing import balancer

placement.LAGGING = balancer.LATELY = 1e9
"""


def serving(server: GunicornServer) -> set[str]:
    """Return the owner IDs of the workers that say that they serve."""
    (directory,) = server.directories()
    return {reading.owner_id or "" for reading in read_all(str(directory))[0] if reading.state == "serving"}


@pytest.fixture
def balanced() -> Iterator[GunicornServer]:
    with probe_server(config=TIMELESS, workers=4) as server:
        until(lambda: len(serving(server)) == 4, "all four say that they serve")
        yield server


def test_sessions_of_one_connection_are_spread_over_all_workers_and_stay_right(balanced: GunicornServer) -> None:
    sessions = [Session() for _ in range(100)]
    with connection_to(balanced, balanced.workers()[0]) as connection:
        for session in sessions:
            assert count(connection, session) == 1
        made = Counter(session.owner for session in sessions)
        assert set(made) == serving(balanced)
        assert max(made.values()) <= 1.5 * 25, made
        # Over the same connection, which is none of most owners'.
        assert [count(connection, session) for session in sessions] == [2] * 100
    # And over connections of their own, to whichever worker takes them.
    assert [count(balanced, session) for session in sessions] == [3] * 100
    assert len({session.cookie for session in sessions}) == 100


def test_requests_that_make_no_session_are_not_placed_where_paths_are_named() -> None:
    config = TIMELESS.replace("SessionRouting(", 'SessionRouting(placement_paths=["/count"], ')
    with probe_server(config=config, workers=4) as server:
        until(lambda: len(serving(server)) == 4, "all four say that they serve")
        pid = server.workers()[0]
        with connection_to(server, pid) as connection:
            assert {ask(connection, "/pid").json()["pid"] for _ in range(100)} == {pid}
            sessions = [Session() for _ in range(100)]
            for session in sessions:
                count(connection, session)
        assert {session.owner for session in sessions} == serving(server)


def test_worker_that_stands_still_gets_no_new_sessions_after_a_second(balanced: GunicornServer) -> None:
    first, *_, last = balanced.workers()
    still = owner_of(balanced, last)
    with connection_to(balanced, first) as connection:
        for _ in range(20):
            count(connection, Session())
        with stopped(last):
            (directory,) = balanced.directories()

            def silence() -> float:
                (reading,) = (one for one in read_all(str(directory))[0] if one.owner_id == still)
                return reading.silence()

            until(lambda: silence() > 1.2, "it has been silent for more than a second")
            sessions = [Session() for _ in range(60)]
            assert [count(connection, session) for session in sessions] == [1] * 60
            made = {session.owner for session in sessions}
            assert made == serving(balanced) - {still}
            assert [count(connection, session) for session in sessions] == [2] * 60

        def goes_to_it_again() -> bool:
            session = Session()
            assert count(connection, session) == 1
            return session.owner == still

        until(goes_to_it_again, "it gets new sessions again")


def test_worker_that_stands_still_holds_up_no_session_that_has_to_be_connected_for(balanced: GunicornServer) -> None:
    first, *_, last = balanced.workers()
    with connection_to(balanced, first) as connection, stopped(last):
        # Nothing leads to any worker yet, and this one counts as living for a second.
        sessions = [Session() for _ in range(40)]
        assert [count(connection, session) for session in sessions] == [1] * 40
        assert owner_of(balanced, last) not in {session.owner for session in sessions}


def test_worker_that_replaces_a_killed_one_gets_sessions_and_is_not_flooded(balanced: GunicornServer) -> None:
    first, *_, last = balanced.workers()
    with connection_to(balanced, first) as connection:
        before = [Session() for _ in range(80)]
        for session in before:
            count(connection, session)
        old = serving(balanced)
        dead = owner_of(balanced, last)
        os.kill(last, signal.SIGKILL)
        (new,) = until(lambda: serving(balanced) - old if len(serving(balanced)) == 4 else set(), "another one serves")
        after = [Session() for _ in range(100)]
        assert [count(connection, session) for session in after] == [1] * 100
        made = Counter(session.owner for session in after)
        assert set(made) == serving(balanced)
        assert made[new] <= 2 * 25, made
        assert [count(connection, session) for session in after] == [2] * 100
        for session in before:
            assert ask(connection, "/count", session, method="POST").status == (410 if session.owner == dead else 200)


def test_workers_that_are_killed_while_sessions_are_made_lose_only_their_own() -> None:
    with scenario("a worker is killed every second, sessions placed", config=BALANCED) as game:

        async def disturb() -> None:
            for _ in rounds(SECONDS, lambda: game.tally.gone):
                await asyncio.sleep(1)
                game.strike(signal.SIGKILL)

        tally = game.play(disturb, players=60, fresh=0.5)
        assert tally.gone
        game.end()


def test_workers_told_to_stop_while_sessions_are_made_finish_what_they_have_begun() -> None:
    with scenario("a worker gets SIGTERM every second, sessions placed", config=BALANCED) as game:

        async def disturb() -> None:
            for _ in rounds(SECONDS):
                await asyncio.sleep(1)
                game.strike(signal.SIGTERM)

        tally = game.play(disturb, players=60, fresh=0.5)
        assert not tally.broken, tally.causes
        game.end()


@pytest.mark.parametrize("way", ["framed", "aiohttp"])
def test_reloads_while_sessions_are_made_lose_nothing(way: str) -> None:
    config = BALANCED.replace("SessionRouting(", f'SessionRouting(forwarder="{way}", ')
    with scenario(f"SIGHUP every two seconds, sessions placed, {way}", config=config) as game:

        async def disturb() -> None:
            for _ in rounds(SECONDS, lambda: game.tally.gone):
                game.server.send(signal.SIGHUP)
                await asyncio.sleep(2)

        tally = game.play(disturb, players=60, fresh=0.5)
        assert tally.gone
        # Over HTTP a request of nobody's can meet a kept connection that its worker closes as it stops.
        told = {"session-gone", "idle connection closed", *(["exchange-broken"] if way == "aiohttp" else [])}
        assert set(tally.causes) <= told
        game.end()


def test_workers_that_stand_still_while_sessions_are_made_lose_nothing() -> None:
    with scenario("a worker gets SIGSTOP, sessions placed", "--keep-alive", "75", config=BALANCED) as game:

        async def disturb() -> None:
            for _ in rounds(SECONDS):
                pid = game.strike(signal.SIGSTOP)
                try:
                    await asyncio.sleep(game.chance.uniform(0.2, 1.5))
                finally:
                    if pid is not None:
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGCONT)

        tally = game.play(disturb, players=60, fresh=0.5)
        assert not tally.gone
        assert not tally.broken, tally.causes
        game.end()
