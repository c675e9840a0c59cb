"""Many sessions at the same time, against real gunicorn."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter, defaultdict
from contextlib import AsyncExitStack

from tests.gunicorn_server import STOCK, GunicornServer, errors, gunicorn_server, is_alive, until
from tests.sessions import Answered, Caller, caller, play


def test_two_hundred_sessions_on_four_workers_are_all_right() -> None:
    with gunicorn_server() as server:
        assert asyncio.run(play(server.url, 200)) == {"right": 200}
        assert errors(server.log()) == []


def test_the_same_sessions_on_stock_workers_are_not() -> None:
    with gunicorn_server(config=STOCK) as server:
        result = asyncio.run(play(server.url, 200))
        assert result["wrong"] > 0
        assert result["right"] + result["wrong"] == 200


def test_sessions_of_a_killed_worker_get_410_and_all_others_are_right() -> None:
    async def sessions(server: GunicornServer) -> tuple[str, dict[str, Counter[str]]]:
        answers: dict[str, Counter[str]] = defaultdict(Counter)
        async with AsyncExitStack() as stack:
            callers = [await stack.enter_async_context(caller(server.url)) for _ in range(200)]
            await asyncio.gather(*(each.seed(number) for number, each in enumerate(callers)))
            owners = [each.owner() or "none" for each in callers]
            killed = Counter(owners).most_common()[-1][0]
            pid = server.pid_of(killed)
            os.kill(pid, signal.SIGKILL)
            # One that dies in the middle of a request is told by 502.
            await asyncio.to_thread(until, lambda: not is_alive(pid), "it is dead")

            async def go_on(owner: str, each: Caller) -> None:
                try:
                    await each.increment(1)
                    answers[owner]["right" if await each.verify() else "wrong"] += 1
                except Answered as answered:
                    answers[owner][str(answered.status)] += 1

            await asyncio.gather(*map(go_on, owners, callers))
        return killed, answers

    with gunicorn_server() as server:
        killed, answers = asyncio.run(sessions(server))
        assert len(answers) > 1, "all sessions were made by one worker"
        assert set(answers.pop(killed)) == {"410"}
        assert {answer for owner in answers for answer in answers[owner]} == {"right"}
        until(lambda: server.ready_workers() == 5, "the killed worker is replaced")
        assert killed not in server.owners()
