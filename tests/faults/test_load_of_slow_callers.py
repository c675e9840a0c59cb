"""Callers that read or write at a trickle: both workers keep their memory, and everybody else is served."""

from __future__ import annotations

import asyncio
import zlib

from tests.faults.crowd import PATIENCE, Crowd, Line, Session, descriptors, eventually, lines_to, memory
from tests.faults.scenario import Scenario, scenario
from tests.faults.slow import PIECE

SLOW = "tests.faults.slow:app"
KEPT = ("--keep-alive", "75", "--timeout", "120")
MIB = 2**20
PIECES = 64 * MIB // len(PIECE)

# Of each 64 MiB at most this much may be under way, what the kernel holds included.
UNDER_WAY = 24 * MIB
# For all bodies of a test together; a worker was seen to take 16 MiB more.
MORE_MEMORY = 48 * MIB


class _Body:
    """A reply's chunked body, of which a caller takes as little as it likes."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.received = self.checksum = self._left = 0
        self.complete = False

    async def take(self, most: int) -> None:
        reader = self.line.reader
        if not self._left:
            self._left = int(await reader.readuntil(b"\r\n"), 16)
            if not self._left:
                await reader.readexactly(2)
                self.complete = True
                return
        piece = await reader.read(min(most, self._left))
        assert piece, "the reply was cut off"
        self._left -= len(piece)
        self.received += len(piece)
        self.checksum = zlib.crc32(piece, self.checksum)
        if not self._left:
            await reader.readexactly(2)

    async def take_all(self) -> None:
        while not self.complete:
            await self.take(2**20)


class _Watch:
    """Plays other sessions, and looks at both workers' memory meanwhile."""

    def __init__(self, crowd: Crowd, direct: Line, local: Line, mine: Session, elsewhere: Session) -> None:
        self.crowd, self.direct, self.local = crowd, direct, local
        self.mine, self.elsewhere = mine, elsewhere
        self.before = self.most = self._memory()

    def _memory(self) -> dict[int, int]:
        return {pid: memory(pid) for pid in (self.mine.pid, self.elsewhere.pid)}

    async def round(self) -> None:
        assert await self.crowd.count(self.direct, self.mine) == "right"
        assert await self.crowd.count(self.local, self.elsewhere) == "right"
        assert await self.crowd.count(self.local, self.mine) == "right"
        now = self._memory()
        self.most = {pid: max(most, now[pid]) for pid, most in self.most.items()}

    def check(self) -> None:
        more = {pid: self.most[pid] - self.before[pid] for pid in self.before}
        print({pid: number / MIB for pid, number in more.items()})
        assert all(number < MORE_MEMORY for number in more.values()), more


async def _no_handler_runs(direct: Line) -> None:
    async with asyncio.timeout(PATIENCE):
        running = 1
        while running:
            running = (await direct.ask("/state")).json()["running"]


def test_replies_read_at_a_trickle_wait_where_they_are_made() -> None:
    with scenario("8 readers of 64 MiB at a trickle", *KEPT, app=SLOW, workers=2) as scene:
        asyncio.run(_slow_readers(scene))
        scene.end()


async def _slow_readers(scene: Scenario) -> None:
    server, crowd = scene.server, Crowd(scene.ledger)
    owner, other = server.workers()
    async with lines_to(server, owner) as (direct,), lines_to(server, other) as (local,):
        sessions = [await crowd.begin(direct) for _ in range(8)]
        elsewhere = await crowd.begin(local)
        assert await crowd.count(local, sessions[0]) == "right"
        before = {pid: len(descriptors(pid)) for pid in (owner, other)}
        async with lines_to(server, other, 8) as readers:
            watch = _Watch(crowd, direct, local, sessions[0], elsewhere)
            bodies = []
            for line, session in zip(readers, sessions, strict=True):
                line.send_head(f"/pour?pieces={PIECES}", *crowd.asks(session), "Content-Length: 0")
                status, headers = await line.head()
                assert (status, headers.get("transfer-encoding")) == (200, "chunked")
                bodies.append(_Body(line))
            poured, still = 0, 0
            # Until the handlers have stood still for a while.
            while still < 50:
                for body in bodies:
                    await body.take(512)
                await watch.round()
                now = (await direct.ask("/state")).json()["poured"]
                still = still + 1 if now == poured else 0
                poured = now
            assert 0 < poured < 8 * UNDER_WAY, poured / MIB
            for body in bodies[:3]:
                await body.take_all()
                assert (body.received, body.checksum) == (PIECES * len(PIECE), zlib.crc32(PIECE * PIECES))
                crowd.tally.right += 1
                await watch.round()
            for line in readers[3:]:
                line.reset()
                crowd.tally.broken += 1
        await watch.round()
        # One kept connection more for each reply that was read whole.
        await eventually(
            lambda: all(len(descriptors(pid)) <= before[pid] + 3 for pid in before), "nothing is left open"
        )
        await _no_handler_runs(direct)
    watch.check()
    scene.tally = crowd.check()


def test_uploads_at_a_trickle_and_uploads_that_nobody_reads_hold_up_nobody_else() -> None:
    with scenario("200 writers at a trickle, 4 uploads that nobody reads", *KEPT, app=SLOW, workers=2) as scene:
        asyncio.run(_slow_writers(scene))
        scene.end()


async def _slow_writers(scene: Scenario) -> None:
    server, crowd = scene.server, Crowd(scene.ledger)
    owner, other = server.workers()
    async with (
        lines_to(server, owner) as (direct,),
        lines_to(server, other) as (local,),
        lines_to(server, other, 200) as writers,
        lines_to(server, other, 4) as pushers,
    ):
        sessions = [await crowd.begin(direct) for _ in range(20)]
        mine, elsewhere = await crowd.begin(direct), await crowd.begin(local)
        watch = _Watch(crowd, direct, local, mine, elsewhere)
        pushed = [0] * len(pushers)

        async def push(number: int) -> str:
            session, line = sessions[number], pushers[number]
            length = f"Content-Length: {PIECES * len(PIECE)}"
            line.send_head("/swallow?held=1", *crowd.asks(session), length)
            nonce = session.nonces[-1]
            for _ in range(PIECES):
                line.writer.write(PIECE)
                await line.writer.drain()
                pushed[number] += len(PIECE)
            return await crowd.judge(session, nonce, line.answer(), pushed[number])

        pushing = [asyncio.create_task(push(number)) for number in range(len(pushers))]
        asked = []
        for number, line in enumerate(writers):
            session = sessions[number % len(sessions)]
            line.send_head("/count", *crowd.asks(session), "Content-Length: 8192")
            asked.append((line, session, session.nonces[-1]))
        for _ in range(64):
            for line in writers:
                line.writer.write(b"b" * 127)
            await watch.round()
        assert crowd.ledger.runs()[asked[0][2]] == 0
        still, before = 0, list(pushed)
        while still < 20:
            await watch.round()
            still = still + 1 if pushed == before else 0
            before = list(pushed)
        assert all(0 < number < UNDER_WAY for number in pushed), pushed
        for line in writers:
            line.writer.write(b"b" * 64)
        outcomes = await asyncio.gather(
            *(crowd.judge(session, nonce, line.answer(), 8192) for line, session, nonce in asked)
        )
        assert set(outcomes) == {"right"}
        await direct.ask("/let_go")
        assert await asyncio.gather(*pushing) == ["right"] * len(pushers)
        await watch.round()
        await _no_handler_runs(direct)
    watch.check()
    scene.tally = crowd.check()
