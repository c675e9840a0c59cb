"""Callers of the counter app: each session has a known right answer."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp


class Answered(Exception):
    """A request got another status than 200. ``status`` is that status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Caller:
    """One caller with one session: cookies of its own, and a connection a request unless kept alive."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url
        self.http = http
        self.expected = 0

    async def post(self, path: str, **body: Any) -> Any:
        """Post JSON and return the JSON of a 200; raise ``Answered`` for any other status."""
        async with self.http.post(self.url + path, json=body) as response:
            if response.status != 200:
                raise Answered(response.status)
            return await response.json()

    async def seed(self, count: int) -> None:
        await self.post("/seed_session", initial_count=count)
        self.expected = count

    async def increment(self, count: int) -> None:
        await self.post("/increment_counter", count=count)
        self.expected += count

    async def verify(self) -> bool:
        """Return whether the server knows the right count."""
        answer = await self.post("/verify", expected_count=self.expected)
        return bool(answer["reward"] == 1.0)

    def owner(self) -> str | None:
        """Return the owner ID that this caller's cookie names, without checking its signature."""
        return owner_in({cookie.key: cookie.value for cookie in self.http.cookie_jar}.get("session"))


def owner_in(cookie: str | None) -> str | None:
    """Return the owner ID that a session cookie names, without checking its signature."""
    if not cookie:
        return None
    payload = cookie.strip('"').split(".")[0]
    owner = json.loads(base64.b64decode(payload + "=" * (-len(payload) % 4))).get("gym_worker")
    return owner if isinstance(owner, str) else None


@asynccontextmanager
async def caller(url: str, *, keep_alive: bool = False) -> AsyncIterator[Caller]:
    """A caller as a user's program is one: it keeps its cookies, also for an IP address."""
    async with aiohttp.ClientSession(
        cookie_jar=aiohttp.CookieJar(unsafe=True),
        connector=aiohttp.TCPConnector(force_close=not keep_alive, limit=0),
        timeout=aiohttp.ClientTimeout(total=300),
    ) as http:
        yield Caller(url, http)


async def play(url: str, sessions: int) -> Counter[str]:
    """Play ``sessions`` sessions at the same time and count how they ended: right, wrong, or a status."""

    async def one(number: int) -> str:
        async with caller(url) as session:
            try:
                await session.seed(number)
                await session.increment(1)
                await session.increment(2)
                return "right" if await session.verify() else "wrong"
            except Answered as answered:
                return str(answered.status)

    return Counter(await asyncio.gather(*(one(number) for number in range(sessions))))
