"""A worker that has no file descriptor left: callers are told, or not accepted, and all is well when it has some."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.e2e.calls import stopped
from tests.faults.crowd import Crowd, Line, Session, descriptors, eventually, lines, lines_to
from tests.faults.players import QUERIES
from tests.faults.scenario import Scenario, scenario
from tests.gunicorn_server import errors

KEPT = ("--keep-alive", "75", "--timeout", "120")

# What a log may say of hundreds of requests: losses are told once in ten seconds for an
# owner and a reason, and a worker that can't accept says nothing.
FEW_LINES = 30


@contextmanager
def room_for(pid: int, room: int) -> Iterator[None]:
    """Let a process open ``room`` descriptors more, and no others, until the end."""
    used = descriptors(pid)
    free = [number for number in range(max(used) + room + 2) if number not in used]
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[room], before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def _watches_a_process(pid: int) -> bool:
    for item in Path(f"/proc/{pid}/fd").iterdir():
        # What has been closed meanwhile watches nothing.
        with suppress(FileNotFoundError):
            if "pidfd" in os.readlink(item):
                return True
    return False


@pytest.mark.parametrize("room", [0, 1, 2, 3])
@pytest.mark.parametrize("known", [False, True], ids=["first-contact", "owner-known"])
def test_worker_that_can_open_no_connection_to_an_owner_says_503(known: bool, room: int) -> None:
    name = f"EMFILE at connect, room for {room}, {'a known owner' if known else 'first contact'}"
    with scenario(name, *KEPT, workers=2) as scene:
        asyncio.run(_connect(scene, known, room))
        scene.end()


async def _connect(scene: Scenario, known: bool, room: int) -> None:
    server, crowd = scene.server, Crowd(scene.ledger)
    owner, other = server.workers()
    async with (
        lines_to(server, owner) as (direct,),
        lines_to(server, other) as (local,),
        lines_to(server, other, 20) as callers,
    ):
        sessions = [await crowd.begin(direct) for _ in range(5)]
        elsewhere = await crowd.begin(local)
        if known:
            assert await crowd.count(local, sessions[0]) == "right"
        quiet = len(server.log().splitlines())
        told = 0
        with room_for(other, room):
            for _ in range(10):
                outcomes = Counter(await asyncio.gather(*(_forward(crowd, callers, sessions, n) for n in range(20))))
                # A descriptor that is free, and a kept connection, may do for some.
                assert outcomes["busy"] + outcomes["right"] == 20
                told += outcomes["busy"]
                assert await crowd.count(local, elsewhere) == "right"
                assert await crowd.count(direct, sessions[0]) == "right"
            assert len(server.log().splitlines()) <= quiet + FEW_LINES
        assert told > 0
        if not known and not room:
            assert told == 200
        for number in range(20):
            assert await _forward(crowd, callers, sessions, number) == "right"
        assert errors(server.log()) == []
        # The owner is watched now, whatever could not be opened before.
        assert _watches_a_process(other)
        os.kill(owner, signal.SIGKILL)
        await eventually(lambda: not _watches_a_process(other), "the owner's death is noticed")
        assert await crowd.count(local, sessions[0]) == "gone"
    scene.tally = crowd.check()


async def _forward(crowd: Crowd, callers: list[Line], sessions: list[Session], number: int) -> str:
    return await crowd.count(callers[number], sessions[number % len(sessions)])


@pytest.mark.parametrize("room", [0, 1, 2])
def test_owner_that_can_accept_no_siblings_connection_answers_all_when_it_can(room: int) -> None:
    """What came meanwhile waits, or gets 503: what libuv can't accept it closes before any request was sent over it."""
    with scenario(f"EMFILE at an owner's accept, room for {room}", *KEPT, workers=2) as scene:
        asyncio.run(_private_accept(scene, room))
        assert errors(scene.server.log()) == []
        scene.end()


async def _private_accept(scene: Scenario, room: int) -> None:
    server, crowd = scene.server, Crowd(scene.ledger)
    owner, other = server.workers()
    async with (
        lines_to(server, owner) as (direct,),
        lines_to(server, other) as (local,),
        lines_to(server, other, 20) as callers,
    ):
        sessions = [await crowd.begin(direct) for _ in range(5)]
        elsewhere = await crowd.begin(local)
        quiet = len(server.log().splitlines())
        with room_for(owner, room):
            asked = [asyncio.create_task(_forward(crowd, callers, sessions, number)) for number in range(20)]
            for _ in range(100):
                assert await crowd.count(local, elsewhere) == "right"
                assert await crowd.count(direct, sessions[0]) == "right"
            assert len(server.log().splitlines()) <= quiet + FEW_LINES
        assert set(await asyncio.gather(*asked)) <= {"right", "busy"}
        for number in range(20):
            assert await _forward(crowd, callers, sessions, number) == "right"
    scene.tally = crowd.check()


def test_callers_of_a_worker_that_can_accept_none_get_no_answer_rather_than_a_wrong_one() -> None:
    """libuv takes such a connection with a spare descriptor and closes it: the caller sees a broken connection."""
    with scenario("EMFILE at the public accept", *KEPT, workers=2) as scene:
        asyncio.run(_public_accept(scene))
        assert errors(scene.server.log()) == []
        scene.end()


async def _public_accept(scene: Scenario) -> None:
    server, crowd = scene.server, Crowd(scene.ledger)
    first, second = server.workers()
    async with lines_to(server, first) as (mine,), lines_to(server, second) as (its,):
        sessions = [await crowd.begin(mine), await crowd.begin(its)]

        async def call(session: Session) -> str:
            async with lines(server.port) as (line,):
                return await crowd.count(line, session)

        quiet = len(server.log().splitlines())
        with room_for(first, 0):
            with stopped(second):
                # Nobody else accepts: they are closed, or wait until somebody can.
                calls = [asyncio.create_task(call(session)) for session in sessions * 50]
                for _ in range(100):
                    assert await crowd.count(mine, sessions[0]) == "right"
                assert not any(task.done() and task.result() != "broken" for task in calls)
            outcomes = set(await asyncio.gather(*calls))
            assert outcomes <= {"broken", "busy", "right"}
            assert len(server.log().splitlines()) <= quiet + FEW_LINES
        for session in sessions * 20:
            assert await call(session) == "right"
    scene.tally = crowd.check()


def test_server_under_a_small_limit_answers_what_it_can_and_never_wrongly() -> None:
    with ExitStack() as stack:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
        try:
            scene = stack.enter_context(
                scenario("ulimit -n 64, 200 callers", "--keep-alive", "5", "--timeout", "120", workers=4)
            )
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        server = scene.server
        # What the app's libraries import when they are first used, they could not import later.
        asyncio.run(_warm(scene))

        async def disturb() -> None:
            # Enough that many met a worker that had none left.
            await eventually(lambda: scene.ledger.runs().total() >= 3000, "the callers are served")
            for pid in server.workers():
                assert resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)[0] == 64

        tally = scene.play(disturb, players=200, pause=0.05)
        assert tally.busy + tally.broken > 0
        assert tally.gone == 0
        assert errors(server.log()) == [], server.log()[-5000:]
        assert len(server.log().splitlines()) < 500
        scene.end()


async def _warm(scene: Scenario) -> None:
    for pid in scene.server.workers():
        async with lines_to(scene.server, pid) as (line,):
            for query in QUERIES:
                assert (await line.ask(f"/count{query}")).status == 200
