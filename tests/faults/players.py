"""Callers who know the right answer, and the invariant that holds whatever breaks.

Each request got the right answer, or 410 from an owner that is dead or stopping, or 503 that
a retry gets over, or, where a process died or a connection broke in the middle of it,
502 or a broken connection. Never a wrong count, a cut answer, a hang, or a request
that was run twice.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp

from gym_gunicorn.lifecycle.public_server import LINGER
from tests.faults.files import is_served
from tests.faults.tally import Tally
from tests.gunicorn_server import until
from tests.sessions import owner_in


class Player:
    """One caller: it counts with its session, notices every wrong answer, and starts anew when it is told to.

    Args:
        folder: where the server's socket directories are. Given it, 410 is a fault where
            the owner serves its private socket.
        forgetful: whether a session may begin anew as if its cookie had not been sent.
    """

    def __init__(
        self,
        url: str,
        tally: Tally,
        patience: float,
        *,
        keep_alive: bool,
        dice: random.Random,
        folder: Path | None = None,
        forgetful: bool = False,
    ) -> None:
        self.folder = folder
        self.forgetful = forgetful
        # When this caller has sent its last request, and since when nothing had come over its
        # connection before that: a caller that has much to do is late itself.
        self.sent = 0.0
        self.silent_since = 0.0
        # When it has begun its last request.
        self.began = 0.0
        self.url = url
        self.tally = tally
        self.patience = patience
        self.dice = dice
        self.http = aiohttp.ClientSession(
            cookie_jar=aiohttp.CookieJar(unsafe=True),
            connector=aiohttp.TCPConnector(force_close=not keep_alive, limit=0),
            timeout=aiohttp.ClientTimeout(total=patience),
            trace_configs=[self._tracing()],
        )
        # Nothing is sent again behind this caller's back.
        self.http._retry_connection = False
        self.forget()

    def forget(self) -> None:
        """Begin a new session."""
        self.http.cookie_jar.clear()
        self.session: str | None = None
        self.counted = 0
        # Requests since the last answer that may or may not have been run.
        self.doubtful = 0
        self.owner = 0

    def cookie(self) -> str | None:
        """Return the session cookie that the next request will carry."""
        return next((cookie.value for cookie in self.http.cookie_jar if cookie.key == "session"), None)

    async def close(self) -> None:
        await self.http.close()

    async def step(self, query: str = "", body: bytes = b"") -> str:
        """Make one request; return "right", "gone", "busy", "broken", "hung" or "wrong"."""
        nonce = uuid.uuid4().hex
        self.tally.requests += 1
        cookie = self.cookie()
        self.silent_since = self.sent
        self.began = asyncio.get_running_loop().time()
        try:
            async with self.http.post(f"{self.url}/count{query}", data=body, headers={"X-Nonce": nonce}) as response:
                content = await response.read()
        except TimeoutError:
            self.doubtful += 1
            self.tally.hung += 1
            return self._count("hung", "no answer in time")
        except (aiohttp.ClientError, OSError) as error:
            self.doubtful += 1
            if self.sent - self.silent_since > LINGER and not isinstance(error, aiohttp.ClientConnectorError):
                self.tally.idle += 1
                return self._count("broken", "idle connection closed")
            self.tally.broken += 1
            return self._count("broken", type(error).__name__)
        return self._judge(nonce, response, content, len(body), cookie)

    def _tracing(self) -> aiohttp.TraceConfig:
        async def connected(*_: object) -> None:
            self.silent_since = asyncio.get_running_loop().time()

        async def sends(*_: object) -> None:
            self.sent = asyncio.get_running_loop().time()

        tracing = aiohttp.TraceConfig()
        tracing.on_connection_create_end.append(connected)
        tracing.on_request_headers_sent.append(sends)
        # Headers go out together with the body, where there is one (aiohttp 3.14).
        tracing.on_request_chunk_sent.append(sends)
        return tracing

    def _count(self, outcome: str, cause: str) -> str:
        self.tally.causes[cause] += 1
        return outcome

    def _wrong(self, what: str) -> str:
        self.tally.faults.append(f"{what} (session {self.session}, {self.counted} counted, {self.doubtful} doubtful)")
        self.forget()
        return "wrong"

    def _judge(
        self, nonce: str, response: aiohttp.ClientResponse, content: bytes, sent: int, cookie: str | None
    ) -> str:
        if response.status == 200:
            return self._judge_answer(nonce, content, sent)
        try:
            kind = json.loads(content)["type"].rpartition(":")[2]
        except (ValueError, KeyError, TypeError):
            return self._wrong(f"a {response.status} with {content[:200]!r}")
        if (response.status, kind) == (410, "session-gone"):
            owner = owner_in(cookie)
            if owner is None:
                return self._wrong("410 for a request that named no owner")
            excused = self.tally.unhealed or self.began < self.tally.healed
            if self.folder is not None and not excused and is_served(self.folder, owner):
                return self._wrong(f"410, and its owner {self.owner} serves its socket")
            self.tally.gone += 1
            if self.owner and not excused:
                self.tally.gone_from.add(self.owner)
            self.forget()
            return self._count("gone", kind)
        if (response.status, kind) == (503, "owner-busy"):
            if "retry-after" not in response.headers:
                return self._wrong("503 without Retry-After")
            self.tally.busy += 1
            self.tally.refused.add(nonce)
            return self._count("busy", kind)
        if (response.status, kind) in ((502, "exchange-broken"), (503, "server-stopping")):
            self.doubtful += 1
            self.tally.broken += 1
            return self._count("broken", kind)
        return self._wrong(f"a {response.status} {kind}")

    def _judge_answer(self, nonce: str, content: bytes, sent: int) -> str:
        try:
            answer = json.loads(content)
        except ValueError:
            return self._wrong(f"an answer cut short that looks whole, {len(content)} bytes")
        self.tally.answered.add(nonce)
        if self.forgetful and self.session is not None and answer["session"] not in self.tally.ids:
            self.tally.anew += 1
            self.session, self.counted, self.owner = None, 0, 0
        if self.session is None:
            # The first answer: a session that was made by an earlier, broken request is nobody's.
            self.session = answer["session"]
            if self.session in self.tally.ids:
                return self._wrong("a new session that is another caller's")
            self.tally.ids.add(self.session)
            self.tally.sessions += 1
        if answer["session"] != self.session:
            return self._wrong(f"another session's answer: {answer['session']}")
        if answer["received"] != sent:
            return self._wrong(f"{answer['received']} of {sent} bytes received")
        if not self.counted < answer["count"] <= self.counted + 1 + self.doubtful:
            return self._wrong(f"count {answer['count']}")
        if self.owner and answer["pid"] != self.owner:
            return self._wrong(f"answered by {answer['pid']}, and before by {self.owner}")
        self.counted, self.doubtful, self.owner = answer["count"], 0, answer["pid"]
        self.tally.right += 1
        self.tally.owners.add(self.owner)
        return "right"


async def come_true(condition: Callable[[], object], what: str) -> None:
    """Poll until ``condition`` returns something true, while others play; fail where it does not in time."""
    await asyncio.to_thread(until, condition, what)


Disturb = Callable[[], Awaitable[object]]
QUERIES = ("", "", "", "?stream=1&size=100000", "?size=20000", "?hold=0.05")


async def play(
    url: str,
    disturb: Disturb,
    *,
    players: int = 200,
    patience: float = 60.0,
    pause: float = 0.2,
    seed: int = 0,
    tally: Tally | None = None,
    recover: int = 3,
    queries: tuple[str, ...] = QUERIES,
    folder: Path | None = None,
    forgetful: bool = False,
    fresh: float = 0.05,
) -> Tally:
    """Play until ``disturb`` has returned, and then until each player has had ``recover`` right answers in a row.

    ``disturb`` is begun when each player has a session, so that there is something to lose.
    Every second player keeps its connections alive. ``pause`` are seconds between two
    requests of one player, at most. Where nothing recovers within ``patience`` seconds
    it is a fault. With ``recover=0`` the server may be gone by then. ``fresh`` is how likely
    a player begins a new session at any time.
    """
    tally = tally or Tally()
    over = asyncio.Event()
    seated: set[int] = set()

    async def one(number: int) -> None:
        dice = random.Random(f"{seed}/{number}")
        player = Player(
            url, tally, patience, keep_alive=bool(number % 2), dice=dice, folder=folder, forgetful=forgetful
        )
        try:
            await asyncio.sleep(dice.random() * pause)
            while not over.is_set():
                body = b"b" * 65536 if dice.random() < 0.1 else b""
                if dice.random() < fresh:
                    player.forget()
                outcome = await player.step(dice.choice(queries), body)
                if outcome == "right":
                    seated.add(number)
                await asyncio.sleep(dice.random() * pause if outcome == "right" else 0.1)
            in_a_row = 0
            loop = asyncio.get_running_loop()
            deadline = loop.time() + patience
            while in_a_row < recover:
                outcome = await player.step()
                in_a_row = in_a_row + 1 if outcome == "right" else 0
                if loop.time() > deadline:
                    tally.faults.append(f"player {number} has not recovered, the last outcome was {outcome}")
                    return
                if outcome != "right":
                    await asyncio.sleep(0.1)
        finally:
            await player.close()

    async with asyncio.TaskGroup() as group:
        for number in range(players):
            group.create_task(one(number))
        try:
            await come_true(lambda: len(seated) == players, "every player has had a right answer")
            await disturb()
        finally:
            over.set()
    return tally


def rounds(seconds: float, enough: Callable[[], object] = lambda: True) -> Iterator[int]:
    """Count up until ``seconds`` have passed and what the rounds are for has happened; fail where it does not."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    for number in itertools.count():
        passed = loop.time() - begun
        if passed >= seconds and enough():
            return
        assert passed < seconds + 60, "what the rounds are for has not happened"
        yield number
