"""The sandbox server, on eight workers: right rewards, and no process and no folder left, however it ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.gunicorn_server import GunicornServer, errors, gunicorn_server, is_alive, until
from tests.sessions import Answered, Caller, caller, owner_in

SECRET = "a secret of the tests"
DAEMON = "(setsid sleep 1000 >/dev/null 2>&1 &); nohup sleep 1000 >/dev/null 2>&1 & "


class Client(Caller):
    """One caller of the sandbox server."""

    async def run(self, command: str, **arguments: Any) -> Any:
        return await self.post("/run_command", command=command, **arguments)

    def owner(self) -> str | None:
        return owner_in({cookie.key: cookie.value for cookie in self.http.cookie_jar}.get("sandbox_session"))


@asynccontextmanager
async def client(server: GunicornServer) -> AsyncIterator[Client]:
    async with caller(server.url) as made:
        yield Client(made.url, made.http)


@contextmanager
def sandbox_server(root: Path, workers: int = 8) -> Iterator[GunicornServer]:
    env = {"SANDBOX_ROOT": str(root), "SESSION_SECRET": SECRET}
    with gunicorn_server(app="gym_gunicorn.gym.examples.sandbox:app", workers=workers, env=env) as server:
        try:
            yield server
        finally:
            server.kill()
            until(lambda: not left(root), "nothing is left of the sandboxes")


def left(root: Path) -> list[str]:
    """Return the folders below the root, and the processes of the sandboxes in it."""
    found = [str(path) for path in root.iterdir()]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"HOME={root}/" in (process / "environ").read_text() and is_alive(int(process.name)):
                found.append(f"{process.name} {(process / 'cmdline').read_text()}")
        except OSError:
            continue  # it has ended
    return found


async def play(session: Client, number: int) -> bool:
    """Play a session, of which every third is to fail, and return whether its reward was right."""
    files = {"task/number.txt": f"{number}\n", "task/read me.txt": "Add one."}
    await session.post("/seed_session", files=files, check=f'test "$(cat answer)" = {number + 1}')
    assert (await session.run("cd task; n=$(cat number.txt); add() { echo $((n + $1)); }"))["exit_code"] == 0
    assert (await session.run(f"{DAEMON} pwd"))["output"].endswith("/task\n")
    assert (await session.run("add 0"))["output"] == f"{number}\n"
    fails = number % 3 == 0
    assert (await session.run(f"add {2 if fails else 1} >../answer"))["exit_code"] == 0
    reward = (await session.post("/verify"))["reward"]
    return bool(reward == (0.0 if fails else 1.0))


def test_every_reward_of_100_concurrent_sessions_is_right_and_nothing_is_left(tmp_path: Path) -> None:
    async def one(server: GunicornServer, number: int) -> tuple[bool, str | None]:
        async with client(server) as session:
            return await play(session, number), session.owner()

    async def main(server: GunicornServer) -> list[tuple[bool, str | None]]:
        return await asyncio.gather(*(one(server, number) for number in range(100)))

    with sandbox_server(tmp_path) as server:
        played = asyncio.run(main(server))
        assert Counter(right for right, _ in played) == {True: 100}
        assert len({owner for _, owner in played}) > 1
        assert left(tmp_path) == []
        assert server.stop() == 0
        assert errors(server.log()) == []


@asynccontextmanager
async def seeded(server: GunicornServer, root: Path, sessions: int = 16) -> AsyncIterator[list[Client]]:
    """Sessions with daemons in them."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client(server)) for _ in range(sessions)]

        async def begin(session: Client) -> None:
            await session.post("/seed_session", files={"a/b": "c"}, check="test -e done")
            assert (await session.run(f"{DAEMON} touch done"))["exit_code"] == 0

        await asyncio.gather(*(begin(session) for session in clients))
        # A folder, a keeper, a shell and two daemons of each.
        await asyncio.to_thread(until, lambda: len(left(root)) == 5 * sessions, "all are there")
        yield clients


async def gone(root: Path, what: str) -> None:
    await asyncio.to_thread(until, lambda: not left(root), f"no process and folder is left after {what}")


def test_a_reload_ends_the_sandboxes_of_the_workers_that_it_replaces(tmp_path: Path) -> None:
    async def main(server: GunicornServer) -> None:
        async with seeded(server, tmp_path) as clients:
            server.send(signal.SIGHUP)
            await gone(tmp_path, "SIGHUP")
            with pytest.raises(Answered, match="410"):
                await clients[0].post("/verify")
            await asyncio.to_thread(server.wait_until_ready, 16)
            async with client(server) as another:
                assert await play(another, 1)

    with sandbox_server(tmp_path) as server:
        asyncio.run(main(server))
        assert server.stop() == 0
        assert errors(server.log()) == []


def test_a_stop_ends_all_sandboxes(tmp_path: Path) -> None:
    async def main(server: GunicornServer) -> None:
        async with seeded(server, tmp_path):
            assert await asyncio.to_thread(server.stop) == 0
            await gone(tmp_path, "SIGTERM")

    with sandbox_server(tmp_path) as server:
        asyncio.run(main(server))
        assert errors(server.log()) == []


def test_a_killed_worker_leaves_nothing_of_its_sandboxes_and_the_others_theirs(tmp_path: Path) -> None:
    async def main(server: GunicornServer) -> None:
        async with seeded(server, tmp_path) as clients:
            owner = clients[0].owner()
            assert owner is not None
            lost = [session for session in clients if session.owner() == owner]
            kept = [session for session in clients if session.owner() != owner]
            os.kill(server.pid_of(owner), signal.SIGKILL)
            await asyncio.to_thread(until, lambda: len(left(tmp_path)) == 5 * len(kept), "its sandboxes are gone")
            for session in lost:
                with pytest.raises(Answered, match="410"):
                    await session.run("true")
            replies = await asyncio.gather(*(session.post("/verify") for session in kept))
            assert [reply["reward"] for reply in replies] == [1.0] * len(kept)
            assert left(tmp_path) == []

    with sandbox_server(tmp_path) as server:
        asyncio.run(main(server))


def test_a_server_of_which_everything_is_killed_leaves_nothing(tmp_path: Path) -> None:
    async def main(server: GunicornServer) -> None:
        async with seeded(server, tmp_path), client(server) as busy, client(server) as new:
            # In the midst of a command, and of the making of a sandbox, too.
            await busy.post("/seed_session", check="true")
            files = {f"{number}": "x" * 1000 for number in range(1000)}
            calls = [
                asyncio.ensure_future(busy.run("touch begun; sleep 1000")),
                asyncio.ensure_future(new.post("/seed_session", files=files, check="true")),
            ]
            await asyncio.to_thread(until, lambda: list(tmp_path.glob("*/begun")), "the command has begun")
            for pid in (server.pid, *server.workers()):
                os.kill(pid, signal.SIGKILL)
            await gone(tmp_path, "SIGKILL of everything")
            await asyncio.gather(*calls, return_exceptions=True)

    with sandbox_server(tmp_path) as server:
        asyncio.run(main(server))


# One session


def test_an_episode_ends_with_its_verification(tmp_path: Path) -> None:
    async def main(server: GunicornServer) -> None:
        async with client(server) as session:
            for path in ("/run_command", "/verify"):
                assert "was not seeded" in await refused(session, 404, path, command="true")
            await session.post("/seed_session", files={"a": "1"}, check="echo $(cat a); test -e b")
            assert await session.run("cat a; false") == {
                "output": "1",
                "exit_code": 1,
                "timed_out": False,
                "truncated": False,
            }
            assert await session.post("/verify") == {"reward": 0.0, "output": "1\n"}
            assert left(tmp_path) == []
            for path in ("/run_command", "/verify"):
                assert "verified already" in await refused(session, 404, path, command="true")

    with sandbox_server(tmp_path, workers=2) as server:
        asyncio.run(main(server))
        assert server.stop() == 0
        assert errors(server.log()) == []


async def refused(session: Client, status: int, path: str, **body: Any) -> str:
    """Post what is to be answered with ``status``, and return the text of the answer."""
    async with session.http.post(session.url + path, json=body) as response:
        assert response.status == status
        return await response.text()


def test_a_session_that_is_seeded_again_begins_anew(tmp_path: Path) -> None:
    async def main(server: GunicornServer) -> None:
        async with client(server) as session:
            await session.post("/seed_session", files={"a": "1"}, check="false")
            await session.run(f"{DAEMON} x=5")
            await asyncio.gather(*(session.post("/seed_session", files={"b": "2"}, check="true") for _ in range(4)))
            assert (await session.run("echo $x; ls"))["output"] == "\nb\n"
            assert len(left(tmp_path)) == 3
            assert (await session.post("/verify"))["reward"] == 1.0

    with sandbox_server(tmp_path, workers=2) as server:
        asyncio.run(main(server))


def test_a_command_has_the_time_limit_of_its_call(tmp_path: Path) -> None:
    async def main(server: GunicornServer) -> None:
        async with client(server) as session:
            await session.post("/seed_session", check="false")
            result = await session.run("cd /; x=5; echo begun; sleep 1000", time_limit=5)
            assert result["output"].startswith("begun\n")
            assert (result["exit_code"], result["timed_out"]) == (None, True)
            assert (await session.run("pwd; echo $x"))["output"] == "/\n5\n"

    with sandbox_server(tmp_path, workers=2) as server:
        asyncio.run(main(server))


def test_commands_do_not_see_the_secret_of_the_server(tmp_path: Path) -> None:
    async def main(server: GunicornServer) -> None:
        async with client(server) as session:
            await session.post("/seed_session", check="env; cat /proc/$PPID/environ")
            assert SECRET not in (await session.run("env; cat /proc/$PPID/environ"))["output"]
            assert SECRET not in (await session.post("/verify"))["output"]

    with sandbox_server(tmp_path, workers=2) as server:
        asyncio.run(main(server))


def test_a_bad_body_is_refused_with_the_name_of_its_field(tmp_path: Path) -> None:
    async def main(server: GunicornServer) -> None:
        async with client(server) as session:
            for path in ("/etc/a", "../a", "a\0b", ""):
                answer = await refused(session, 422, "/seed_session", files={path: ""}, check="true")
                assert '"files"' in answer and "no path of a file" in answer
            for files in ({"a": "", "a/b": ""}, {"a": 1}):
                assert "files" in await refused(session, 422, "/seed_session", files=files, check="true")
            for check in ("a\0b", None):
                assert '"check"' in await refused(session, 422, "/seed_session", check=check)
            await session.post("/seed_session", check="true")
            for limit in (0, -1, 601, "soon"):
                answer = await refused(session, 422, "/run_command", command="true", time_limit=limit)
                assert '"time_limit"' in answer
            assert '"command"' in await refused(session, 422, "/run_command", command="a\0b")

    with sandbox_server(tmp_path, workers=2) as server:
        asyncio.run(main(server))
        assert server.stop() == 0
        assert errors(server.log()) == []
