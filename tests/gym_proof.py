"""The end-to-end proof: what RL environments ask of their servers, with real server processes.

Each scenario is a function that plays it once, with the servers' workers routed or not,
and says how many of its sessions got what they should. ``scripts/proof`` prints the table.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp
import httpx2
from itsdangerous import URLSafeSerializer
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from gym_gunicorn.gym.examples.scripted_backend import answer_to
from tests.gunicorn_server import CONFIG, GunicornServer, gunicorn_server, is_alive, until
from tests.sessions import owner_in

# Under which an example is told where another one is served.
URLS = {"counter": "RESOURCES_URL", "scripted_backend": "BACKEND_URL", "model": "MODEL_URL"}

SESSIONS = 200
CONVERSATIONS = 100
TURNS = 5
SANDBOXES = 100
WORKERS = 4

# How many MCP clients are open at a time, and connections in their common pool: what two
# cores can do. The sessions are all alive at once, since they are all seeded before.
CLIENTS = 50
POOL = 20

NOT_ROUTED = CONFIG.replace("SessionRouting(", 'SessionRouting(routing="off", ')


@dataclass
class Outcome:
    """How a scenario ended. ``answers`` counts the sessions by what became of them; "right" is what each wants.

    ``owners`` are those that the sessions named, as far as the scenario looked; ``log``
    is what the servers said.
    """

    answers: Counter[str]
    owners: set[str] = field(default_factory=set)
    log: str = ""

    def figure(self) -> str:
        """Return the counts for the table, the right ones first."""
        others = (f"{count} {answer}" for answer, count in self.answers.most_common() if answer != "right")
        return ", ".join([f"{self.answers['right']} right", *others])


@dataclass(frozen=True)
class Scenario:
    """A line of the table. ``wanted`` is how many of its sessions must be right."""

    name: str
    wanted: int
    play: Callable[[bool], Outcome]


# Servers


@contextmanager
def served(routed: bool, **workers: int) -> Iterator[dict[str, GunicornServer]]:
    """Serve examples, each with its number of workers. All start side by side; each is told of those before it."""
    with ExitStack() as stack:
        servers: dict[str, GunicornServer] = {}
        for name, count in workers.items():
            servers[name] = stack.enter_context(
                # An agent that is slow between two turns finds its connection open.
                gunicorn_server(
                    "--keep-alive",
                    "75",
                    app=f"gym_gunicorn.gym.examples.{name}:app",
                    config=CONFIG if routed else NOT_ROUTED,
                    workers=count,
                    env={variable: servers[other].url for other, variable in URLS.items() if other in servers},
                    ready=False,
                )
            )
        for name, count in workers.items():
            servers[name].wait_until_ready(count)
        yield servers


def logs(servers: Mapping[str, GunicornServer]) -> str:
    """Return what all servers said."""
    return "".join(server.log() for server in servers.values())


# Callers


@asynccontextmanager
async def http_client(*, cookies: bool) -> AsyncIterator[aiohttp.ClientSession]:
    """A caller whose every request has a connection of its own, as if from many machines."""
    async with aiohttp.ClientSession(
        # aiohttp keeps no cookies of an IP address otherwise.
        cookie_jar=aiohttp.CookieJar(unsafe=True) if cookies else aiohttp.DummyCookieJar(),
        connector=aiohttp.TCPConnector(force_close=True, limit=0),
        timeout=aiohttp.ClientTimeout(total=300),
    ) as http:
        yield http


async def post(http: aiohttp.ClientSession, url: str, body: object) -> tuple[int, Any]:
    """Post JSON, and return status and JSON."""
    async with http.post(url, json=body) as response:
        return response.status, json.loads(await response.read())


async def seed(http: aiohttp.ClientSession, url: str, count: int) -> dict[str, str]:
    """Begin a session of the counter, and return the headers by which its tools are reached over MCP."""
    status, answer = await post(http, f"{url}/seed_session", {"initial_count": count})
    assert status == 200, answer
    headers: dict[str, str] = answer["mcp"]["headers"]
    return headers


def owner_in_token(headers: Mapping[str, str]) -> str | None:
    """Return the owner that a session token names, without checking its signature."""
    (token,) = headers.values()
    _, payload = URLSafeSerializer("").loads_unsafe(token)
    owner: str | None = payload.get("gym_worker")
    return owner


def owner_named(http: aiohttp.ClientSession) -> str | None:
    """Return the owner that a caller's cookie of the counter names."""
    return owner_in({cookie.key: cookie.value for cookie in http.cookie_jar}.get("counter_session"))


class Pooled(httpx2.AsyncBaseTransport):
    """One of several clients' ways to a pool of connections, which it leaves open when it closes."""

    def __init__(self, pool: httpx2.AsyncBaseTransport) -> None:
        self._pool = pool

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        return await self._pool.handle_async_request(request)


def connections(kept: int = 0, most: int | None = None) -> httpx2.AsyncBaseTransport:
    """A pool of ``most`` connections of which ``kept`` are kept alive; without them each request has its own."""
    # Idle ones are kept for a shorter time than gunicorn keeps them, 2 seconds.
    limits = httpx2.Limits(max_connections=most, max_keepalive_connections=kept, keepalive_expiry=1)
    # All is plain HTTP. A transport that verifies reads the system's certificates first,
    # which takes longer than all of a session's calls.
    return httpx2.AsyncHTTPTransport(verify=False, limits=limits)


@asynccontextmanager
async def mcp_client(
    url: str, headers: Mapping[str, str], transport: httpx2.AsyncBaseTransport | None = None, path: str = "/mcp"
) -> AsyncIterator[Client]:
    """The official client, without cookies."""
    async with (
        httpx2.AsyncClient(headers=dict(headers), transport=transport or connections(), timeout=300) as http,
        Client(streamable_http_client(url + path, http_client=http)) as client,
    ):
        yield client


async def call(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    """Call a tool and return its reply.

    Raises:
        ToolFailed: the tool could not be called, or failed.
    """
    result = await client.call_tool(tool, arguments)
    if result.is_error:
        raise ToolFailed(result.content)
    reply: dict[str, Any] = result.structured_content
    return reply


class ToolFailed(Exception):
    """A tool's reply is an error."""


async def over_mcp(url: str, headers: Mapping[str, str], transport: httpx2.AsyncBaseTransport | None = None) -> int:
    """Increment a session's counter by 1 and by 2, and return what it then is."""
    async with mcp_client(url, headers, transport) as client:
        await call(client, "increment_counter", count=1)
        await call(client, "increment_counter", count=2)
        count: int = (await call(client, "get_counter_value"))["count"]
        return count


def failure(error: BaseException) -> str:
    """Return in a word how a caller over MCP learnt that something is wrong."""
    while isinstance(error, BaseExceptionGroup):
        # The client runs its transport in a task group, which wraps what went wrong in it.
        error = error.exceptions[0]
    if isinstance(error, MCPError):
        return "gone" if "Session gone" in error.error.message else "refused"
    if isinstance(error, ToolFailed):
        return "failed"
    raise error


async def gather(*steps: Awaitable[str]) -> Counter[str]:
    return Counter(await asyncio.gather(*steps))


# Scenarios


async def episodes(url: str, body: Callable[[int], dict[str, Any]]) -> Counter[str]:
    """Have an agent play all episodes at the same time."""

    async def one(number: int) -> str:
        async with http_client(cookies=True) as http:
            status, answer = await post(http, f"{url}/run", body(number))
        if status != 200:
            return f"failed ({status})"
        return "right" if answer["reward"] == 1.0 else "wrong"

    return await gather(*map(one, range(SESSIONS)))


def relay_agent_episodes(routed: bool) -> Outcome:
    """The relay agent increments by 1 and by 2, and verifies."""

    def body(number: int) -> dict[str, Any]:
        calls = [{"tool": "increment_counter", "arguments": {"count": count}} for count in (1, 2)]
        return {"seed": {"initial_count": number}, "calls": calls, "verify": {"expected_count": number + 3}}

    with served(routed, counter=WORKERS, relay_agent=1) as servers:
        return Outcome(asyncio.run(episodes(servers["relay_agent"].url, body)), log=logs(servers))


def simple_agent_episodes(routed: bool) -> Outcome:
    """The simple agent asks a model, which has it increment by 1 and by 2."""

    def body(number: int) -> dict[str, Any]:
        script = [{"tool": "increment_counter", "arguments": {"count": count}} for count in (1, 2)]
        tool = {"type": "function", "name": "increment_counter", "parameters": {"type": "object"}, "strict": False}
        return {
            "seed": {"initial_count": number},
            "input": json.dumps({"script": script}),
            "tools": [tool],
            "verify": {"expected_count": number + 3},
        }

    with served(routed, counter=WORKERS, scripted_backend=1, model=1, simple_agent=1) as servers:
        return Outcome(asyncio.run(episodes(servers["simple_agent"].url, body)), log=logs(servers))


def state_in_memory(routed: bool) -> Outcome:
    """Seed and verify: what the one put into memory, the other must find there."""

    async def play(url: str) -> tuple[Counter[str], set[str]]:
        async with AsyncExitStack() as stack:
            callers = [await stack.enter_async_context(http_client(cookies=True)) for _ in range(SESSIONS)]
            await asyncio.gather(*(seed(http, url, number) for number, http in enumerate(callers)))
            owners = {owner for owner in map(owner_named, callers) if owner is not None}
            return await gather(*(verified(http, url, number) for number, http in enumerate(callers))), owners

    with served(routed, counter=WORKERS) as servers:
        answers, owners = asyncio.run(play(servers["counter"].url))
        return Outcome(answers, owners, logs(servers))


async def verified(http: aiohttp.ClientSession, url: str, count: int) -> str:
    """Verify a session of the counter, and return how it ended."""
    status, answer = await post(http, f"{url}/verify", {"expected_count": count})
    if status == 410:
        return "gone"
    if status != 200:
        return f"failed ({status})"
    return "right" if answer["reward"] == 1.0 else "wrong"


def mcp_without_cookies(routed: bool, pool: Callable[[], httpx2.AsyncBaseTransport] | None = None) -> Outcome:
    """Seed over HTTP, keep the token alone, and call the tools with the official client."""

    async def play(url: str) -> tuple[Counter[str], set[str]]:
        async with http_client(cookies=False) as http:
            tokens = await asyncio.gather(*(seed(http, url, number) for number in range(SESSIONS)))
        owners = {owner for owner in map(owner_in_token, tokens) if owner is not None}
        turn = asyncio.Semaphore(CLIENTS)
        async with AsyncExitStack() as stack:
            shared = await stack.enter_async_context(pool()) if pool is not None else None

            async def one(number: int) -> str:
                async with turn:
                    try:
                        count = await over_mcp(url, tokens[number], Pooled(shared) if shared is not None else None)
                    except Exception as error:
                        return failure(error)
                return "right" if count == number + 3 else "wrong"

            return await gather(*map(one, range(SESSIONS))), owners

    with served(routed, counter=WORKERS) as servers:
        answers, owners = asyncio.run(play(servers["counter"].url))
        return Outcome(answers, owners, logs(servers))


def mcp_over_one_pool(routed: bool) -> Outcome:
    """The same, but the clients share a pool of kept-alive connections: on each come the calls of many sessions."""
    return mcp_without_cookies(routed, partial(connections, POOL, POOL))


def killed_worker(routed: bool) -> Outcome:
    """A worker is killed after seeding: its sessions must be told, over MCP and by cookie, and all others go on.

    Right is a session that is told so both ways where its worker was killed, and elsewhere
    one whose count is right over MCP and whose reward is 1.0.
    """

    async def play(server: GunicornServer) -> tuple[Counter[str], set[str]]:
        async with AsyncExitStack() as stack:
            callers = [await stack.enter_async_context(http_client(cookies=True)) for _ in range(SESSIONS)]
            tokens = await asyncio.gather(*(seed(http, server.url, number) for number, http in enumerate(callers)))
            owners = [owner_named(http) for http in callers]
            named = Counter(owner for owner in owners if owner is not None)
            # Without routing the sessions name no worker, and any is as good.
            killed = min(named, key=named.__getitem__) if named else None
            pid = server.pid_of(killed) if killed is not None else server.workers()[0]
            os.kill(pid, signal.SIGKILL)
            until(lambda: not is_alive(pid), "the worker is dead")
            turn = asyncio.Semaphore(CLIENTS)

            async def one(number: int) -> str:
                async with turn:
                    try:
                        count = await over_mcp(server.url, tokens[number])
                    except Exception as error:
                        answer = failure(error)
                    else:
                        answer = "right" if count == number + 3 else "wrong"
                by_cookie = await verified(callers[number], server.url, number + 3)
                wanted = "gone" if killed is not None and owners[number] == killed else "right"
                if answer == by_cookie == wanted:
                    return "right"
                return answer if answer != wanted else by_cookie

            return await gather(*map(one, range(SESSIONS))), set(named)

    with served(routed, counter=WORKERS) as servers:
        answers, owners = asyncio.run(play(servers["counter"]))
        return Outcome(answers, owners, logs(servers))


def conversations(routed: bool) -> Outcome:
    """The conversation agent: its answer to each turn proves which messages it had in memory."""

    async def play(url: str) -> tuple[Counter[str], set[str]]:
        owners: set[str] = set()

        async def one(number: int) -> str:
            said: list[dict[str, str]] = []
            async with http_client(cookies=True) as http:
                for turn in range(1, TURNS + 1):
                    said.append({"role": "user", "content": f"conversation {number}, turn {turn}"})
                    status, answer = await post(http, f"{url}/chat", {"message": said[-1]["content"]})
                    if status != 200:
                        return f"failed ({status})"
                    said.append({"role": "assistant", "content": answer_to(said)})
                    if answer != {"message": said[-1]["content"], "turns": turn}:
                        return "wrong"
                cookies = {cookie.key: cookie.value for cookie in http.cookie_jar}
                owner = owner_in(cookies.get("conversation_agent_session"))
                owners.update(() if owner is None else (owner,))
            return "right"

        return await gather(*map(one, range(CONVERSATIONS))), owners

    with served(routed, scripted_backend=1, model=1, conversation_agent=WORKERS) as servers:
        answers, owners = asyncio.run(play(servers["conversation_agent"].url))
        return Outcome(answers, owners, logs(servers))


def sandbox_sessions(routed: bool) -> Outcome:
    """Each session has files, a shell that keeps its state, and a check; every third is meant to fail it."""

    async def one(url: str, number: int) -> tuple[str, str | None]:
        async with http_client(cookies=True) as http:
            task = {"files": {"number": f"{number}"}, "check": f'test "$(cat answer)" = {number + 1}'}
            await post(http, f"{url}/seed_session", task)
            status = 0
            for command in ("n=$(cat number)", f"echo $((n + {2 if number % 3 == 0 else 1})) >answer"):
                status, _ = await post(http, f"{url}/run_command", {"command": command})
                if status != 200:
                    return f"failed ({status})", None
            status, answer = await post(http, f"{url}/verify", {})
            if status != 200:
                return f"failed ({status})", None
            right = answer["reward"] == (0.0 if number % 3 == 0 else 1.0)
            cookies = {cookie.key: cookie.value for cookie in http.cookie_jar}
            return "right" if right else "wrong", owner_in(cookies.get("sandbox_session"))

    async def play(url: str) -> list[tuple[str, str | None]]:
        return await asyncio.gather(*(one(url, number) for number in range(SANDBOXES)))

    with tempfile.TemporaryDirectory(prefix="gg-sandboxes-") as root:
        config = CONFIG if routed else NOT_ROUTED
        app = "gym_gunicorn.gym.examples.sandbox:app"
        with gunicorn_server(app=app, config=config, workers=8, env={"SANDBOX_ROOT": root}) as server:
            played = asyncio.run(play(server.url))
            if routed:
                assert os.listdir(root) == [], "a folder was left"
            server.stop()
            until(lambda: not os.listdir(root), "no folder is left")
            owners = {owner for _, owner in played if owner is not None}
            return Outcome(Counter(answer for answer, _ in played), owners, server.log())


# The order of the table.
SCENARIOS = (
    Scenario("200 episodes at once: relay agent, counter with 4 workers", SESSIONS, relay_agent_episodes),
    Scenario("200 episodes at once: simple agent, model, counter with 4", SESSIONS, simple_agent_episodes),
    Scenario("200 sessions: seed, verify, state in memory, 4 workers", SESSIONS, state_in_memory),
    Scenario("100 sandboxes with a shell each, 8 workers", SANDBOXES, sandbox_sessions),
    Scenario("200 sessions over MCP without cookies, 4 workers", SESSIONS, mcp_without_cookies),
    Scenario("the same, 50 MCP clients on one pool of 20 connections", SESSIONS, mcp_over_one_pool),
    Scenario("200 sessions, a worker killed after seeding, 4 workers", SESSIONS, killed_worker),
    Scenario("100 conversations of 5 turns, agent with 4 workers", CONVERSATIONS, conversations),
)


def show(text: str) -> None:
    """Say what is being done: on a terminal in one line that is rewritten."""
    if sys.stdout.isatty():
        print(f"\r\x1b[K{text}", end="", flush=True)


def proof() -> bool:
    """Print the table; return whether every session was right where workers are routed."""
    good = True
    print(f"{'scenario':58}{'wanted':>8}  {'routed':12}{'not routed':42}{'seconds':>8}")
    for scenario in SCENARIOS:
        figures = []
        began = time.monotonic()
        for routed in (True, False):
            show(f"{scenario.name}, {'routed' if routed else 'not routed'} ...")
            outcome = scenario.play(routed)
            figures.append(outcome.figure())
            if routed:
                seconds = time.monotonic() - began
                good = good and outcome.answers == {"right": scenario.wanted}
        show("")
        print(f"{scenario.name:58}{scenario.wanted:8}  {figures[0]:12}{figures[1]:42}{seconds:8.1f}", flush=True)
    print("\nSeconds are those of the routed run, the start of its servers included.")
    return good


def main() -> int:
    # Ended like Ctrl-C does, so that no server stays behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        return 0 if proof() else 1
    return 130


if __name__ == "__main__":
    sys.exit(main())
