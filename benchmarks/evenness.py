"""``scripts/bench --placement``: how evenly new sessions fall on the workers, left where they land, and placed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.progress import Progress
from benchmarks.servers import Server, served
from benchmarks.setups import Setup, setups
from benchmarks.tables import aligned, piped

SESSIONS = 200
WORKERS = 4
SETUPS = ("ours-framed", "ours-balanced")

# Seconds for which the throughput of computations is measured.
COMPUTING = 4.0


@dataclass
class Way:
    """A way of connecting: makes ``SESSIONS`` sessions, and returns the owner ID of each."""

    title: str
    make: Callable[[str], Awaitable[list[str]]]


def owner_of(cookie: str) -> str:
    """Return the owner ID that a session's ``Set-Cookie`` names."""
    content = cookie.partition("=")[2].partition(".")[0]
    owner: str = json.loads(base64.b64decode(content + "=" * (-len(content) % 4)))["gym_worker"]
    return owner


async def seed(http: aiohttp.ClientSession, url: str) -> str:
    """Make a session and return its owner."""
    async with http.post(f"{url}/session") as response:
        await response.read()
        if response.status != 200:
            raise RuntimeError(f"{response.status} for a new session")
        return owner_of(response.headers["set-cookie"])


@contextlib.asynccontextmanager
async def pool(limit: int, keep: bool) -> AsyncIterator[aiohttp.ClientSession]:
    """A client with at most ``limit`` connections, kept alive or not, and no memory."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=limit, force_close=not keep), cookie_jar=aiohttp.DummyCookieJar()
    ) as http:
        yield http


def through(limit: int, keep: bool, at_once: bool) -> Callable[[str], Awaitable[list[str]]]:
    """Return what makes the sessions through one client."""

    async def make(url: str) -> list[str]:
        async with pool(limit, keep) as http:
            if at_once:
                return list(await asyncio.gather(*(seed(http, url) for _ in range(SESSIONS))))
            return [await seed(http, url) for _ in range(SESSIONS)]

    return make


async def in_turn(url: str) -> list[str]:
    """Make the sessions through 8 kept connections, each used after the other."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(pool(1, True)) for _ in range(8)]
        return [await seed(clients[number % 8], url) for number in range(SESSIONS)]


WAYS = (
    Way("fresh connections, one after another", through(1, False, False)),
    Way("fresh connections, 8 at once", through(8, False, True)),
    Way("fresh connections, 200 at once", through(SESSIONS, False, True)),
    Way("8 kept-alive connections, used in turn", in_turn),
    Way("8 kept-alive connections, opened together", through(8, True, True)),
    Way("one connection for all", through(1, True, False)),
)


def uneven(owners: Sequence[str], workers: int = WORKERS) -> float:
    """Return how many times the mean the busiest worker got."""
    return max(Counter(owners).values()) / (len(owners) / workers)


async def beside_one_that_computes(url: str) -> tuple[float, float]:
    """Return the share of a worker whose loop is held up half of the time, and how uneven the others are."""
    async with pool(1, True) as busy:
        async with busy.post(f"{url}/session") as response:
            cookie = response.headers["set-cookie"].partition(";")[0]
        held = owner_of(cookie)
        over = False

        async def compute() -> None:
            while not over:
                async with busy.post(f"{url}/compute", headers={"Cookie": cookie}) as answer:
                    await answer.read()
                await asyncio.sleep(0.02)

        computing = asyncio.create_task(compute())
        try:
            await asyncio.sleep(1)
            owners = await through(8, True, True)(url)
        finally:
            over = True
            await computing
    counts = Counter(owners)
    others = [count for owner, count in counts.items() if owner != held]
    return counts[held] / (SESSIONS / WORKERS), max(others) / (sum(others) / (WORKERS - 1))


async def after_a_kill(server: Server) -> tuple[float, float]:
    """Return how uneven 200 sessions are after a worker was killed and replaced, and the new one's share."""
    url = server.url
    before = set(await through(8, True, True)(url))
    victim = server.workers[0]
    os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while True:
        # Until the new one has been seen at work.
        new = set(await through(8, False, True)(url)) - before
        if new or time.monotonic() > deadline:
            break
    owners = await through(8, True, True)(url)
    return uneven(owners), sum(Counter(owners)[owner] for owner in new) / (SESSIONS / WORKERS)


@contextlib.contextmanager
def started(setup: Setup, workers: int = WORKERS) -> Iterator[Server]:
    """A server whose workers have made no session yet."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as folder,
        served(setup, workers, Path(folder) / setup.name) as server,
    ):
        yield server


async def computing(url: str) -> float:
    """Return how many requests of 20 ms of computation are answered a second, through 8 kept connections.

    Each makes a session of its own first, all at the same time, and stays with it.
    """
    answered = 0
    loop = asyncio.get_running_loop()

    async def one(http: aiohttp.ClientSession) -> None:
        nonlocal answered
        async with http.post(f"{url}/session") as made:
            cookie = made.headers["set-cookie"].partition(";")[0]
        begins = loop.time() + 0.5
        while (now := loop.time()) < begins + COMPUTING:
            async with http.post(f"{url}/compute", headers={"Cookie": cookie}) as answer:
                if answer.status != 200:
                    raise RuntimeError(f"{answer.status} for a computation")
                await answer.read()
            answered += begins <= now

    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(pool(1, True)) for _ in range(8)]
        await asyncio.gather(*map(one, clients))
    return answered / COMPUTING


def spread(values: Sequence[float]) -> str:
    """Return the median, and the least and the most, in words."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def measure(repeats: int, out: Path) -> None:
    """Print the table, and keep it in ``out``."""
    found: dict[str, dict[str, list[float]]] = {}
    chosen: list[Setup] = [setups()[name] for name in SETUPS]
    progress = Progress(len(chosen) * repeats * (len(WAYS) + 3) + repeats)
    for setup in chosen:
        for repeat in range(repeats):

            def note(title: str, value: float, name: str = setup.name) -> None:
                found.setdefault(title, {}).setdefault(name, []).append(value)

            for way in WAYS:
                progress.step(f"{setup.name}, {repeat + 1} of {repeats}: {way.title}")
                with started(setup) as server:
                    before = server.cpu_ns()
                    note(way.title, uneven(asyncio.run(_made(way, server.url))))
                    if way is WAYS[4]:
                        note("CPU of a session of one request, in µs", (server.cpu_ns() - before) / SESSIONS / 1000)
            progress.step(f"{setup.name}, {repeat + 1} of {repeats}: one worker computes")
            with started(setup) as server:
                share, others = asyncio.run(beside_one_that_computes(server.url))
            note("one worker computes: its share of the mean", share)
            note("one worker computes: the others among each other", others)
            progress.step(f"{setup.name}, {repeat + 1} of {repeats}: a worker is killed")
            with started(setup) as server:
                even, new = asyncio.run(after_a_kill(server))
            note("after a kill: 200 more", even)
            note("after a kill: share of the new worker", new)
    for repeat in range(repeats):
        alone = 0.0
        for setup in (setups()["one"], *chosen):
            progress.step(f"{setup.name}, {repeat + 1} of {repeats}: 20 ms of computation a request")
            with started(setup, 2) as server:
                speed = asyncio.run(computing(server.url))
            alone = alone or speed
            if setup in chosen:
                found.setdefault("20 ms of computation: throughput of 2 workers / 1", {}).setdefault(
                    setup.name, []
                ).append(speed / alone)
    head = ("most loaded / mean, median (least-most)", *(setup.title.format(workers=WORKERS) for setup in chosen))
    table = [head, *((title, *(spread(by[setup.name]) for setup in chosen)) for title, by in found.items())]
    print("\n" + aligned(table))
    out.mkdir(parents=True, exist_ok=True)
    (out / "placement.md").write_text(f"# Where new sessions go\n\n{repeats} repeats.\n\n{piped(table)}\n")
    (out / "placement.json").write_text(json.dumps(found, indent=1) + "\n")


async def _made(way: Way, url: str) -> list[str]:
    return await way.make(url)
