"""Thousands of callers in one process: connections to workers of a test's choice, and what was answered over them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.calls import stopped
from tests.faults.scenario import lacking
from tests.faults.tally import Ledger, Tally
from tests.gunicorn_server import GunicornServer

# Seconds after which a caller calls it a hang.
PATIENCE = 180.0


@contextmanager
def descriptors_for(count: int) -> Iterator[None]:
    """Let this process and what it starts have ``count`` open files; a test is left out where that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        lacking(f"{count} file descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def descriptors(pid: int) -> set[int]:
    """Return the descriptors that a process has open."""
    return {int(name) for name in os.listdir(f"/proc/{pid}/fd")}


def memory(pid: int) -> int:
    """Return how many bytes of memory are a process's: its own, and its part of what it shares."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel tells nothing of the memory of {pid}")


async def eventually(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    """Poll until ``condition`` returns something true; fail where it does not in time."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not condition():
        assert loop.time() < end, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.02)


@dataclass
class Answer:
    """A whole reply."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        assert self.status == 200, (self.status, self.body)
        return json.loads(self.body)


class Line:
    """One kept-alive connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send_head(self, path: str, *fields: str, method: str = "POST") -> None:
        self.writer.write("\r\n".join((f"{method} {path} HTTP/1.1", "Host: localhost", *fields, "", "")).encode())

    async def head(self) -> tuple[int, dict[str, str]]:
        """Read the head of a reply: status and fields."""
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = (line.partition(":") for line in lines if line)
        return int(first.split(" ")[1]), {name.lower(): value.strip() for name, _, value in fields}

    async def body(self, headers: dict[str, str]) -> bytes:
        """Read the body of a reply with these fields; an incomplete one raises."""
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        pieces = []
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            pieces.append((await self.reader.readexactly(size + 2))[:-2])
        await self.reader.readexactly(2)
        return b"".join(pieces)

    async def answer(self) -> Answer:
        status, headers = await self.head()
        return Answer(status, headers, await self.body(headers))

    async def ask(self, path: str, *fields: str, body: bytes = b"") -> Answer:
        """Send one request and return its reply."""
        self.send_head(path, *fields, f"Content-Length: {len(body)}")
        self.writer.write(body)
        return await self.answer()

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def lines(port: int, count: int = 1, *, at_once: int = 50) -> AsyncIterator[list[Line]]:
    """``count`` connections, which are closed at the end, made ``at_once`` at a time."""
    made: list[Line] = []
    try:
        while len(made) < count:
            group = min(at_once, count - len(made))
            made += [
                Line(*pair)
                for pair in await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in range(group)))
            ]
        yield made
    finally:
        for line in made:
            line.close()
        for line in made:
            with contextlib.suppress(OSError):
                await line.writer.wait_closed()


@asynccontextmanager
async def lines_to(server: GunicornServer, pid: int, count: int = 1, *, at_once: int = 50) -> AsyncIterator[list[Line]]:
    """``count`` connections that the worker ``pid`` has accepted, since all others stand still meanwhile."""

    async def knock(line: Line) -> None:
        line.send_head("/who", method="GET")
        assert (await line.answer()).json()["pid"] == pid

    async with contextlib.AsyncExitStack() as stack:
        made: list[Line] = []
        with stopped(*(other for other in server.workers() if other != pid)):
            while len(made) < count:
                group = await stack.enter_async_context(lines(server.port, min(at_once, count - len(made))))
                await asyncio.gather(*map(knock, group))
                made += group
        yield made


@dataclass
class Session:
    """What a caller knows of its session. ``counts`` are the right answers it got, ``nonces`` what it asked."""

    cookie: str
    id: str
    pid: int
    counts: list[int] = field(default_factory=list)
    nonces: list[str] = field(default_factory=list)


class Crowd:
    """Callers who may use one session side by side: its answers are then 1, 2, 3 ..., each once, in any order."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.tally = Tally()
        self.sessions: list[Session] = []

    async def begin(self, line: Line) -> Session:
        """Make a session at the worker that has accepted the line."""
        nonce = uuid.uuid4().hex
        self.tally.requests += 1
        answer = await line.ask("/count", f"X-Nonce: {nonce}")
        what = answer.json()
        assert what["count"] == 1
        self.tally.right += 1
        self.tally.sessions += 1
        self.tally.answered.add(nonce)
        cookie = "Cookie: " + answer.headers["set-cookie"].partition(";")[0]
        session = Session(cookie, what["session"], what["pid"], [1], [nonce])
        self.sessions.append(session)
        return session

    def asks(self, session: Session) -> tuple[str, str]:
        """Note one more request of the session, and return the fields that it has to have."""
        nonce = uuid.uuid4().hex
        session.nonces.append(nonce)
        self.tally.requests += 1
        return session.cookie, f"X-Nonce: {nonce}"

    async def count(self, line: Line, session: Session, path: str = "/count", body: bytes = b"") -> str:
        """Make one request of the session; return "right", "busy", "gone", "broken", "hung" or "wrong"."""
        fields = self.asks(session)
        return await self.judge(session, session.nonces[-1], line.ask(path, *fields, body=body), len(body))

    async def judge(self, session: Session, nonce: str, reply: Any, sent: int = 0) -> str:
        """Await the reply to a request of the session, and say what became of it."""
        tally = self.tally
        try:
            async with asyncio.timeout(PATIENCE):
                answer: Answer = await reply
        except TimeoutError:
            tally.hung += 1
            return self._caused("hung", "no answer in time")
        except (OSError, EOFError) as error:
            tally.broken += 1
            return self._caused("broken", type(error).__name__)
        if answer.status == 200:
            what = answer.json()
            tally.answered.add(nonce)
            if (what["session"], what["pid"], what["received"]) != (session.id, session.pid, sent):
                return self._wrong(f"{what} for {session}, {sent} bytes sent")
            session.counts.append(what["count"])
            tally.right += 1
            return "right"
        kind = json.loads(answer.body).get("type", "").rpartition(":")[2]
        if (answer.status, kind) == (503, "owner-busy") and answer.headers.get("retry-after") == "1":
            tally.busy += 1
            tally.refused.add(nonce)
            return self._caused("busy", kind)
        if (answer.status, kind) == (410, "session-gone"):
            tally.gone += 1
            tally.gone_from.add(session.pid)
            return self._caused("gone", kind)
        if (answer.status, kind) in ((502, "exchange-broken"), (503, "server-stopping")):
            tally.broken += 1
            return self._caused("broken", kind)
        return self._wrong(f"a {answer.status} {answer.headers} {answer.body[:200]!r}")

    async def insist(self, line: Line, session: Session, path: str = "/count") -> None:
        """Make requests of the session until one is answered; each may be told 503 until then."""
        loop = asyncio.get_running_loop()
        end = loop.time() + PATIENCE
        while (outcome := await self.count(line, session, path)) != "right":
            assert outcome == "busy", outcome
            assert loop.time() < end, "503 for ever"
            await asyncio.sleep(0.1)

    def check(self) -> Tally:
        """Fail where the invariant is broken, or a session has counted a request that was not run, or one twice."""
        runs: Counter[str] = self.ledger.runs()
        for session in self.sessions:
            run = sum(runs[nonce] for nonce in session.nonces)
            counts = sorted(session.counts)
            if len(set(counts)) != len(counts) or counts[-1] > run:
                self._wrong(f"{session} was run {run} times")
        print(self.tally.line(), dict(self.tally.causes))
        self.tally.check(self.ledger)
        return self.tally

    def _caused(self, outcome: str, cause: str) -> str:
        self.tally.causes[cause] += 1
        return outcome

    def _wrong(self, what: str) -> str:
        self.tally.faults.append(what)
        return "wrong"
