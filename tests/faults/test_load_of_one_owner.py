"""Thousands of requests at once for the sessions of one owner that is slow, or stands still."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.calls import stopped
from tests.faults.crowd import Crowd, Line, Session, descriptors_for, eventually, lines, lines_to, memory
from tests.faults.scenario import Scenario, scenario
from tests.gunicorn_server import CONFIG

SLOW = "tests.faults.slow:app"
MIB = 2**20

# For 1,000 exchanges in flight; a worker was seen to take 27 MiB more.
MORE_MEMORY = 160 * MIB
# For each 1,000 requests more that are told 503.
HARDLY_MORE_MEMORY = 8 * MIB

KEPT = ("--keep-alive", "75", "--timeout", "120")


def test_of_two_thousand_requests_at_once_a_slow_owner_gets_as_many_as_max_forwards_says() -> None:
    with (
        descriptors_for(6000),
        scenario("2,000 requests at once, one slow owner", *KEPT, app=SLOW, workers=2) as scene,
    ):
        asyncio.run(_two_thousand(scene))
        scene.end()


async def _two_thousand(scene: Scenario) -> None:
    server, crowd = scene.server, Crowd(scene.ledger)
    owner, other = server.workers()
    async with (
        lines_to(server, owner) as (direct,),
        lines_to(server, other, 2000) as callers,
        lines_to(server, other) as (local,),
    ):
        sessions = [await crowd.begin(direct) for _ in range(100)]
        others = [await crowd.begin(local) for _ in range(20)]
        before = {pid: memory(pid) for pid in (owner, other)}

        async def hold(line: Line, session: Session) -> tuple[Line, Session, str]:
            return line, session, await crowd.count(line, session, "/hold")

        asked = [
            asyncio.create_task(hold(line, sessions[number % len(sessions)])) for number, line in enumerate(callers)
        ]
        await eventually(lambda: crowd.tally.busy == 1000, "all above max_forwards are told so while none is answered")
        refused = [(line, session) for line, session, _ in (task.result() for task in asked if task.done())]
        assert len(refused) == 1000
        held = 0
        while held < 1000:
            held = (await direct.ask("/state")).json()["held"]
        first = {pid: memory(pid) for pid in (owner, other)}
        for _ in range(3):
            for outcome in await asyncio.gather(*(crowd.count(*pair, path="/hold") for pair in refused)):
                assert outcome == "busy"
            for session in others:
                assert await crowd.count(local, session) == "right"
            assert await crowd.count(direct, sessions[0]) == "right"
        last = {pid: memory(pid) for pid in (owner, other)}
        assert (await direct.ask("/state")).json()["held"] == 1000
        assert crowd.tally.busy == 4000
        await direct.ask("/let_go")
        for _, _, outcome in await asyncio.gather(*(task for task in asked)):
            assert outcome in ("right", "busy")
        await asyncio.gather(*(crowd.insist(*pair) for pair in refused))
    print({pid: ((first[pid] - before[pid]) / MIB, (last[pid] - first[pid]) / MIB) for pid in before})
    assert all(first[pid] - before[pid] < MORE_MEMORY for pid in before)
    assert all(last[pid] - first[pid] < 3 * HARDLY_MORE_MEMORY for pid in before)
    assert crowd.tally.right == 120 + 3 * 21 + 2000
    scene.tally = crowd.check()


LIMITED = CONFIG.replace("SessionRouting(", "SessionRouting(max_forwards=100, ")


@pytest.mark.parametrize("workers", [2, 4])
def test_two_thousand_callers_of_a_slow_owner_get_through_over_whichever_workers_they_reach(workers: int) -> None:
    name = f"2,000 callers at once of one slow owner over {workers} workers"
    with (
        descriptors_for(6000),
        scenario(name, *KEPT, app=SLOW, config=LIMITED, workers=workers) as scene,
    ):
        asyncio.run(_everywhere(scene))
        scene.end()


async def _everywhere(scene: Scenario) -> None:
    server, crowd = scene.server, Crowd(scene.ledger)
    owner, *_, other = server.workers()
    async with lines_to(server, owner) as (direct,), lines_to(server, other) as (local,):
        sessions = [await crowd.begin(direct) for _ in range(100)]
        elsewhere = await crowd.begin(local)

        async def one(session: Session) -> None:
            outcome = "busy"
            while outcome == "busy":
                async with lines(server.port) as (line,):
                    outcome = await crowd.count(line, session, "/hold")
                if outcome == "busy":
                    await asyncio.sleep(1)
            assert outcome == "right"

        async with asyncio.TaskGroup() as group:
            for number in range(2000):
                group.create_task(one(sessions[number % len(sessions)]))
            held = 0
            while held < 100:
                held = (await direct.ask("/state")).json()["held"]
                assert await crowd.count(local, elsewhere) == "right"
            await direct.ask("/let_go")
    assert sum(len(session.counts) for session in sessions) == 100 + 2000
    scene.tally = crowd.check()


def test_full_accept_queue_of_an_owner_that_stands_still_is_told_at_once_and_nothing_is_run() -> None:
    with scenario("owner's accept queue full", *KEPT, "--backlog", "16", workers=2) as scene:
        asyncio.run(_full_queue(scene))
        scene.end()


async def _full_queue(scene: Scenario) -> None:
    server, crowd = scene.server, Crowd(scene.ledger)
    owner, other = server.workers()
    async with (
        lines_to(server, owner) as (direct,),
        lines_to(server, other, 100, at_once=8) as callers,
        lines_to(server, other) as (local,),
    ):
        sessions = [await crowd.begin(direct) for _ in range(20)]
        elsewhere = await crowd.begin(local)
        with stopped(owner):
            asked = [
                asyncio.create_task(crowd.count(line, sessions[number % len(sessions)]))
                for number, line in enumerate(callers)
            ]
            # 17 connections fit into a queue of 16, and the first one asked who listens.
            await eventually(lambda: crowd.tally.busy >= 83, "all but those in the queue are told")
            for _ in range(20):
                assert await crowd.count(local, elsewhere) == "right"
            assert sum(task.done() for task in asked) == crowd.tally.busy < 100
        outcomes = await asyncio.gather(*asked)
        assert set(outcomes) == {"right", "busy"}
        await asyncio.gather(
            *(
                crowd.insist(line, sessions[number % len(sessions)])
                for number, (line, outcome) in enumerate(zip(callers, outcomes, strict=True))
                if outcome == "busy"
            )
        )
        assert sum(len(session.counts) for session in sessions) == 20 + 100
    scene.tally = crowd.check()
