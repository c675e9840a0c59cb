"""A thousand WebSockets that travel over forwards, and the end of the worker that holds them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.difference.websocket import CLOSE, TEXT, UPGRADE, close_frame, frame
from tests.faults.crowd import PATIENCE, Crowd, Line, Session, descriptors, descriptors_for, eventually, lines_to
from tests.faults.scenario import Scenario, scenario
from tests.gunicorn_server import CONFIG, errors, is_alive

WEBSOCKETS = 1000
KEPT = ("--keep-alive", "75", "--timeout", "120")


async def _shake_hands(line: Line, session: Session) -> int:
    line.send_head("/echo", *(field.decode() for field in UPGRADE), session.cookie, method="GET")
    status, headers = await line.head()
    if status != 101:
        await line.body(headers)
    return status


# These callers answer no pings, and may be slow.
WITHOUT_PINGS = (
    CONFIG
    + """
from gym_gunicorn import RoutingWorker
RoutingWorker.CONFIG_KWARGS = {**RoutingWorker.CONFIG_KWARGS, "ws_ping_interval": None}
"""
)


async def _frame(line: Line) -> tuple[int, bytes]:
    """Read one frame: its opcode and its payload."""
    first, length = await line.reader.readexactly(2)
    if length == 126:
        length = int.from_bytes(await line.reader.readexactly(2))
    return first & 15, await line.reader.readexactly(length)


async def _close_code(line: Line) -> int:
    """Return the code with which a WebSocket is closed, 1006 where the connection ends without one."""
    try:
        async with asyncio.timeout(PATIENCE):
            opcode, payload = await _frame(line)
    except (EOFError, OSError):
        return 1006
    assert opcode == CLOSE
    line.writer.write(close_frame(1012))
    return int.from_bytes(payload[:2])


@dataclass
class _Thousand:
    """WebSockets of one worker's session, accepted by another worker."""

    crowd: Crowd
    owner: int
    other: int
    session: Session
    elsewhere: Session
    callers: list[Line]
    local: Line


@asynccontextmanager
async def _thousand(scene: Scenario) -> AsyncIterator[_Thousand]:
    server, crowd = scene.server, Crowd(scene.ledger)
    owner, other = server.workers()
    async with (
        lines_to(server, owner) as (direct,),
        lines_to(server, other) as (local,),
        lines_to(server, other, WEBSOCKETS + 1) as callers,
    ):
        session, elsewhere = await crowd.begin(direct), await crowd.begin(local)
        direct.close()
        statuses = await asyncio.gather(*(_shake_hands(line, session) for line in callers[:-1]))
        assert Counter(statuses) == {101: WEBSOCKETS}
        # max_forwards holds for them too.
        assert await _shake_hands(callers[-1], session) == 503

        async def talk(line: Line, number: int) -> None:
            for text in (f"{number}", "ä" * 20, f"again {number}"):
                line.writer.write(frame(TEXT, text.encode()))
                opcode, payload = await _frame(line)
                assert opcode == TEXT
                assert json.loads(payload) == {"session": session.id, "count": 1, "text": text}
                crowd.tally.requests += 1
                crowd.tally.right += 1

        await asyncio.gather(*(talk(line, number) for number, line in enumerate(callers[:-1])))
        for _ in range(20):
            assert await crowd.count(local, elsewhere) == "right"
        yield _Thousand(crowd, owner, other, session, elsewhere, callers[:-1], local)


async def _nothing_is_left(it: _Thousand) -> None:
    """The other worker serves on, tells callers of what was lost, and has no connection left to the owner."""
    for line in it.callers:
        line.close()
    assert await it.crowd.count(it.local, it.session) == "gone"
    assert await it.crowd.count(it.local, it.elsewhere) == "right"
    # Two lines of callers are left; 1,001 and as many to the owner are not.
    await eventually(lambda: len(descriptors(it.other)) < 100, "all descriptors are given back")


def test_thousand_forwarded_websockets_end_with_their_killed_owner() -> None:
    with (
        descriptors_for(6000),
        scenario("1,000 WebSockets, owner killed", *KEPT, config=WITHOUT_PINGS, workers=2) as scene,
    ):
        asyncio.run(_killed(scene))
        scene.end()


async def _killed(scene: Scenario) -> None:
    async with _thousand(scene) as it:
        os.kill(it.owner, signal.SIGKILL)
        # As a caller of a killed worker sees it who is connected to it.
        codes = Counter(await asyncio.gather(*map(_close_code, it.callers)))
        assert codes == {1006: WEBSOCKETS}
        it.crowd.tally.broken += WEBSOCKETS
        await _nothing_is_left(it)
    scene.tally = it.crowd.check()


def test_thousand_forwarded_websockets_are_told_1012_by_their_stopping_owner() -> None:
    with (
        descriptors_for(6000),
        scenario("1,000 WebSockets, owner told to stop", *KEPT, config=WITHOUT_PINGS, workers=2) as scene,
    ):
        asyncio.run(_told_to_stop(scene))
        # uvicorn's word (0.54) for a handshake that is refused, whoever refuses it.
        refused = "ASGI callable returned without completing handshake."
        assert [line for line in errors(scene.server.log()) if refused not in line] == []
        scene.end()


async def _told_to_stop(scene: Scenario) -> None:
    async with _thousand(scene) as it:
        os.kill(it.owner, signal.SIGTERM)
        codes = Counter(await asyncio.gather(*map(_close_code, it.callers)))
        assert codes == {1012: WEBSOCKETS}
        it.crowd.tally.gone += WEBSOCKETS
        await eventually(lambda: not is_alive(it.owner), "the owner has ended")
        await _nothing_is_left(it)
        assert "SIGKILL" not in scene.server.log()
    scene.tally = it.crowd.check()
