"""Requests that belong to nobody, sent to a worker with more room: handled there or here, and run once."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest
from itsdangerous import TimestampSigner
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket
from uvicorn import Config, Server

from gym_gunicorn.forwarding.cancelled import AnswerCancelled
from gym_gunicorn.forwarding.links import forwarder as links
from gym_gunicorn.forwarding.private.app import PrivateApp
from gym_gunicorn.forwarding.sockets import bind_private_socket, socket_path
from gym_gunicorn.metrics.values import ACTIVE, BROKEN, BUSY, CONNECTIONS, FORWARDED, GONE, LOCAL, RECEIVED
from gym_gunicorn.owner import new_owner_id
from gym_gunicorn.placement import Room
from gym_gunicorn.problems import SERVER_STOPPING
from gym_gunicorn.settings import Settings, Way
from tests.difference.process import WorkerProcess, worker_process
from tests.sessions import owner_in
from tests.workers import Worker, running, socket_directory, until

# The same as of the app that a worker in a process of its own serves.
SECRET = "difference"


class App:
    """An app that makes sessions and says what it has run; ``gate`` is what held requests wait for."""

    def __init__(self) -> None:
        self.run: list[str] = []
        self.left: list[str] = []
        self.gate = asyncio.Event()
        self.counts: dict[str, int] = {}
        self.asgi = Starlette(
            routes=[
                Route("/seed", self.seed, methods=["GET", "POST"]),
                Route("/seed/held", self.held, methods=["GET", "POST"]),
                Route("/upload", self.upload, methods=["POST"]),
                Mount("/echo", self.echo),
                WebSocketRoute("/ws", self.websocket),
            ],
            middleware=[Middleware(SessionMiddleware, secret_key=SECRET)],
        )

    async def seed(self, request: Request) -> Response:
        """Make a session, and count its requests."""
        self.run.append("seed")
        session = request.session.setdefault("session_id", os.urandom(8).hex())
        self.counts[session] = self.counts.get(session, 0) + 1
        return JSONResponse({"count": self.counts[session], "body": (await request.body()).decode()})

    async def held(self, request: Request) -> Response:
        self.run.append("held")
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.left.append("held")
            raise
        return JSONResponse({})

    async def upload(self, request: Request) -> Response:
        self.run.append("upload")
        request.session["made"] = True
        digest = hashlib.sha256()
        try:
            async for piece in request.stream():
                digest.update(piece)
        except ClientDisconnect:
            self.left.append("upload")
            raise
        return Response(digest.hexdigest())

    async def echo(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send each piece of the body back as soon as it has come."""
        self.run.append("echo")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        more_body = True
        while more_body:
            message = await receive()
            more_body = message.get("more_body", False)
            await send({"type": "http.response.body", "body": message.get("body", b""), "more_body": more_body})

    async def websocket(self, websocket: WebSocket) -> None:
        self.run.append("websocket")
        await websocket.accept()
        await websocket.close()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every worker that lives, however slow the machine is."""
    monkeypatch.setattr(links, "REACH", 60.0)


class Chooser:
    """A policy that chooses the worker of the test's choice."""

    def __init__(self) -> None:
        self.chosen: str | None = None
        self.asked = 0

    def __call__(self, mine: Room, others: Sequence[Room]) -> str | None:
        self.asked += 1
        return self.chosen


@dataclass
class Placing:
    """A worker that places what it gets, and another one, which takes it."""

    directory: str
    chooser: Chooser
    here: Worker
    there: Worker
    app_here: App
    app_there: App

    @property
    def figures(self) -> Any:
        """The values of the figures of the worker that places."""
        assert self.here.routed is not None
        return self.here.routed.figures.values

    def run(self) -> tuple[list[str], list[str]]:
        """Return what was run here, and what there."""
        return self.app_here.run, self.app_there.run


@pytest.fixture(params=["framed", "aiohttp"])
def way(request: pytest.FixtureRequest) -> Way:
    chosen: Way = request.param
    return chosen


@contextlib.asynccontextmanager
async def placing(way: Way, **settings: Any) -> AsyncIterator[Placing]:
    """Run two workers, the first of which places on the second."""
    chooser, app_here, app_there = Chooser(), App(), App()
    mine = Settings(forwarder=way, placement=chooser, **settings)
    with socket_directory() as directory:
        async with (
            running(app_here.asgi, directory, settings=mine) as here,
            running(app_there.asgi, directory, settings=replace(mine, placement="local")) as there,
        ):
            chooser.chosen = there.owner_id
            try:
                yield Placing(directory, chooser, here, there, app_here, app_there)
            finally:
                app_here.gate.set()
                app_there.gate.set()


def played(scenario: Coroutine[Any, Any, None]) -> None:
    """Run a scenario, which no more than a minute is given to."""

    async def limited() -> None:
        async with asyncio.timeout(60):
            await scenario

    asyncio.run(limited())


@dataclass
class Reply:
    """A whole reply."""

    status: int
    body: bytes
    cookie: str | None

    @property
    def owner(self) -> str | None:
        """The owner that the session cookie names."""
        return owner_in(self.cookie)


async def ask(worker: Worker, path: str, cookie: str | None = None, data: Any = None) -> Reply:
    headers = {} if cookie is None else {"Cookie": f"session={cookie}"}
    async with (
        aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as client,
        client.request("GET" if data is None else "POST", worker.url + path, headers=headers, data=data) as response,
    ):
        made = response.cookies.get("session")
        return Reply(response.status, await response.read(), None if made is None else made.value)


def signed(content: bytes, secret: str = SECRET) -> str:
    return TimestampSigner(secret).sign(content).decode()


def test_new_session_is_made_by_the_chosen_worker_and_belongs_there(way: Way) -> None:
    async def scenario() -> None:
        async with placing(way) as pair:
            reply = await ask(pair.here, "/seed")
            assert (reply.status, reply.owner) == (200, pair.there.owner_id)
            assert pair.run() == ([], ["seed"])
            for worker in (pair.here, pair.there):
                again = await ask(worker, "/seed", reply.cookie)
                assert again.status == 200
            assert again.body.startswith(b'{"count":3')
            assert pair.run() == ([], ["seed"] * 3)
            assert (pair.figures[LOCAL], pair.figures[FORWARDED]) == (0, 2)

    played(scenario())


def test_new_session_stays_where_the_policy_says_so(way: Way) -> None:
    async def scenario() -> None:
        async with placing(way) as pair:
            for chosen in (None, pair.here.owner_id):
                pair.chooser.chosen = chosen
                assert (await ask(pair.here, "/seed")).owner == pair.here.owner_id
            assert pair.run() == (["seed"] * 2, [])
            assert (pair.figures[FORWARDED], pair.figures[CONNECTIONS]) == (0, 0)

    played(scenario())


def test_what_was_placed_is_placed_no_further(way: Way) -> None:
    async def scenario() -> None:
        back = Chooser()
        app_here, app_there = App(), App()
        chooser = Chooser()
        with socket_directory() as directory:
            async with (
                running(app_here.asgi, directory, settings=Settings(forwarder=way, placement=chooser)) as here,
                running(app_there.asgi, directory, settings=Settings(forwarder=way, placement=back)) as there,
            ):
                chooser.chosen, back.chosen = there.owner_id, here.owner_id
                assert (await ask(here, "/seed")).owner == there.owner_id
                assert (chooser.asked, back.asked) == (1, 0)

    played(scenario())


def test_many_at_once_are_all_run_once(way: Way) -> None:
    async def scenario() -> None:
        async with placing(way) as pair:
            replies = await asyncio.gather(*(ask(pair.here, "/seed", data=f"body {n}") for n in range(100)))
            assert {reply.status for reply in replies} == {200}
            assert len({reply.cookie for reply in replies}) == 100
            for number, reply in enumerate(replies):
                assert reply.body == b'{"count":1,"body":"body %d"}' % number
            assert len(pair.app_here.run) + len(pair.app_there.run) == 100
            assert pair.app_there.run

    played(scenario())


# What is never placed.


def test_request_of_a_session_goes_to_its_owner_and_is_not_placed(way: Way) -> None:
    async def scenario() -> None:
        async with placing(way) as pair:
            pair.chooser.chosen = None
            cookie = (await ask(pair.here, "/seed")).cookie
            pair.chooser.chosen = pair.there.owner_id
            asked = pair.chooser.asked
            assert (await ask(pair.here, "/seed", cookie)).body.startswith(b'{"count":2')
            gone = signed(b"eyJneW1fd29ya2VyIjogImFhYWFhYWFhYWFhYSJ9")
            assert (await ask(pair.here, "/seed", gone)).status == 410
            assert pair.chooser.asked == asked
            assert pair.run() == (["seed"] * 2, [])

    played(scenario())


def test_websocket_is_not_placed(way: Way) -> None:
    async def scenario() -> None:
        async with placing(way) as pair:
            async with aiohttp.ClientSession() as client, client.ws_connect(pair.here.url + "/ws") as websocket:
                await websocket.receive()
            assert pair.run() == (["websocket"], [])
            assert pair.chooser.asked == 0

    played(scenario())


@pytest.mark.parametrize(
    "settings",
    [
        {"local_paths": ["/seed"]},
        {"local_paths": ["/"]},
        {"local_paths": ["/seed"], "placement_paths": ["/seed"]},
        {"placement_paths": ["/upload"]},
        {"placement_paths": ["/see"]},
        {"placement_paths": ["/seed/held"]},
    ],
    ids=str,
)
def test_request_on_a_path_that_is_not_placed_stays(way: Way, settings: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with placing(way, **settings) as pair:
            assert (await ask(pair.here, "/seed")).owner == pair.here.owner_id
            assert pair.run() == (["seed"], [])
            assert pair.chooser.asked == 0

    played(scenario())


@pytest.mark.parametrize("paths", [["/seed"], ["/"], ["/x", "/seed"], ["/seed/"]], ids=str)
def test_request_below_a_path_that_is_placed_is_placed(way: Way, paths: list[str]) -> None:
    async def scenario() -> None:
        async with placing(way, placement_paths=paths) as pair:
            pair.app_there.gate.set()
            assert (await ask(pair.here, "/seed/held")).status == 200
            assert pair.run() == ([], ["held"])

    played(scenario())


@pytest.mark.parametrize(
    "cookie",
    [
        "",
        "null",
        "no signature",
        signed(b"eyJneW1fd29ya2VyIjogImFhYWFhYWFhYWFhYSJ9")[:-1] + "~",
        signed(b"eyJneW1fd29ya2VyIjogImFhYWFhYWFhYWFhYSJ9", "another server's secret"),
        signed(b"eyJneW1fd29ya2VyIjogIi4uLy4uL3gifQ=="),
    ],
    ids=["empty", "null", "unsigned", "spoilt", "another server's", "no owner ID"],
)
def test_cookie_that_names_no_owner_is_placed_like_none(way: Way, cookie: str) -> None:
    async def scenario() -> None:
        async with placing(way) as pair:
            reply = await ask(pair.here, "/seed", cookie)
            assert (reply.status, reply.owner) == (200, pair.there.owner_id)
            assert pair.run() == ([], ["seed"])

    played(scenario())


def test_session_without_an_owner_is_adopted_by_the_chosen_worker(way: Way) -> None:
    async def scenario() -> None:
        async with placing(way) as pair:
            reply = await ask(pair.here, "/seed", signed(b"eyJzZXNzaW9uX2lkIjogIngifQ=="))
            assert reply.owner == pair.there.owner_id
            assert list(pair.app_there.counts) == ["x"]

    played(scenario())


# Chosen workers that can't be had: the request is handled here, body and all, and once.

Break = Callable[[Placing], contextlib.AbstractContextManager[str]]


@contextlib.contextmanager
def never_there(pair: Placing) -> Iterator[str]:
    yield new_owner_id()


@contextlib.contextmanager
def socket_left_behind(pair: Placing) -> Iterator[str]:
    owner_id = new_owner_id()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(socket_path(pair.directory, owner_id))
    yield owner_id


@contextlib.contextmanager
def process_killed(pair: Placing) -> Iterator[str]:
    with another_process(pair) as (process, owner_id):
        process.process.kill()
        process.process.wait()
        yield owner_id


@contextlib.contextmanager
def queue_full(pair: Placing) -> Iterator[str]:
    owner_id = new_owner_id()
    path = socket_path(pair.directory, owner_id)
    with bind_private_socket(path, 0), filled(path):
        yield owner_id


@contextlib.contextmanager
def another_process(pair: Placing) -> Iterator[tuple[WorkerProcess, str]]:
    """A worker in a process of its own, and its owner ID."""
    before = set(os.listdir(pair.directory))
    with worker_process(pair.directory, "h11") as process:
        (name,) = {name for name in os.listdir(pair.directory) if name.endswith(".sock")} - before
        try:
            yield process, name.removesuffix(".sock")
        finally:
            # One that stands still is not to be waited for.
            process.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def filled(path: str) -> Iterator[None]:
    """Fill the accept queue of whoever listens at ``path``."""
    with contextlib.ExitStack() as stack:
        while True:
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            try:
                waiting.connect(path)
            except BlockingIOError:
                break
        yield


async def handled_here(pair: Placing, gone: str) -> None:
    """Check that a request that is placed on a worker which can't be had is handled here, body and all, and once."""
    pair.chooser.chosen = gone
    before = len(pair.app_here.run)
    local = pair.figures[LOCAL]
    body = os.urandom(500_000)
    reply = await ask(pair.here, "/upload", data=body)
    assert (reply.status, reply.body) == (200, hashlib.sha256(body).hexdigest().encode())
    assert reply.owner == pair.here.owner_id
    assert pair.app_here.run[before:] == ["upload"]
    assert pair.figures[LOCAL] == local + 1
    assert (pair.figures[GONE], pair.figures[BUSY], pair.figures[BROKEN]) == (0, 0, 0)


@pytest.mark.parametrize("gone", [never_there, socket_left_behind, process_killed, queue_full])
def test_worker_that_can_not_be_had_is_done_without(way: Way, gone: Break) -> None:
    async def scenario() -> None:
        async with placing(way) as pair:
            with gone(pair) as owner_id:
                await handled_here(pair, owner_id)
                await handled_here(pair, owner_id)
            assert pair.app_there.run == []

    played(scenario())


async def use(pair: Placing, owner_id: str) -> asyncio.Task[None]:
    """Have the one connection to a worker in a process of its own used by an upload that goes on."""
    pair.chooser.chosen = owner_id

    async def body() -> AsyncIterator[bytes]:
        yield b"a piece"
        await asyncio.Event().wait()

    async def upload() -> None:
        with contextlib.suppress(aiohttp.ClientError):
            await ask(pair.here, "/upload", data=body())

    task = asyncio.create_task(upload())
    await until(lambda: pair.figures[FORWARDED] == 1 and pair.figures[CONNECTIONS] == 1)
    return task


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_known_worker_that_takes_no_more_connections_is_done_without(way: Way) -> None:
    async def scenario() -> None:
        async with placing(way) as pair:
            with another_process(pair) as (_, owner_id):
                task = await use(pair, owner_id)
                os.unlink(socket_path(pair.directory, owner_id))
                await handled_here(pair, owner_id)
                await cancelled(task)

    played(scenario())


def test_known_worker_whose_accept_queue_is_full_is_done_without(way: Way) -> None:
    async def scenario() -> None:
        async with placing(way) as pair:
            with another_process(pair) as (process, owner_id):
                task = await use(pair, owner_id)
                process.process.send_signal(signal.SIGSTOP)
                with filled(socket_path(pair.directory, owner_id)):
                    await handled_here(pair, owner_id)
                process.process.send_signal(signal.SIGCONT)
                await cancelled(task)

    played(scenario())


def test_known_worker_that_is_dead_is_done_without(way: Way) -> None:
    async def scenario() -> None:
        async with placing(way) as pair:
            with another_process(pair) as (process, owner_id):
                pair.chooser.chosen = owner_id
                assert (await ask(pair.here, "/session")).owner == owner_id
                process.process.kill()
                process.process.wait()
                await until(lambda: pair.figures[CONNECTIONS] == 0)
                await handled_here(pair, owner_id)

    played(scenario())


def test_worker_that_is_silent_when_it_is_connected_to_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with placing("framed") as pair:
            with another_process(pair) as (process, owner_id):
                process.process.send_signal(signal.SIGSTOP)
                with monkeypatch.context() as hasty:
                    hasty.setattr(links, "REACH", 0.25)
                    await handled_here(pair, owner_id)
                process.process.send_signal(signal.SIGCONT)
                # Nothing is left of it: the next one is taken.
                assert (await ask(pair.here, "/session")).owner == owner_id
                assert pair.app_here.run == ["upload"]

    played(scenario())


def test_worker_that_has_enough_to_do_is_done_without(way: Way) -> None:
    async def scenario() -> None:
        async with placing(way, max_forwards=2) as pair:
            held = [asyncio.create_task(ask(pair.here, "/seed/held")) for _ in range(2)]
            await until(lambda: pair.app_there.run == ["held", "held"])
            assert (await ask(pair.here, "/seed", data="the body")).body == b'{"count":1,"body":"the body"}'
            assert pair.run() == (["seed"], ["held", "held"])
            pair.app_there.gate.set()
            assert [(await reply).status for reply in held] == [200, 200]
            assert (await ask(pair.here, "/seed")).owner == pair.there.owner_id
            assert pair.figures[BUSY] == 0

    played(scenario())


def test_more_at_once_than_a_worker_may_be_sent_are_all_handled_somewhere(way: Way) -> None:
    async def scenario() -> None:
        async with placing(way, max_forwards=3) as pair:
            replies = await asyncio.gather(*(ask(pair.here, "/seed", data="x") for _ in range(50)))
            assert {reply.status for reply in replies} == {200}
            assert len(pair.app_here.run) + len(pair.app_there.run) == 50
            assert pair.figures[BUSY] == 0

    played(scenario())


@contextlib.asynccontextmanager
async def without_links(pair: Placing, app: App) -> AsyncIterator[str]:
    """A worker of another release, which speaks HTTP alone; its owner ID."""
    owner_id = new_owner_id()
    listener = bind_private_socket(socket_path(pair.directory, owner_id), 128)
    private = PrivateApp(AnswerCancelled(app.asgi, SERVER_STOPPING), owner_id=owner_id)
    server = Server(Config(private, log_config=None, lifespan="off", ws="none"))
    # pytest's own handlers stay.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started)
        yield owner_id
    finally:
        server.should_exit = server.force_exit = True
        await task


def test_worker_without_links_takes_what_is_placed_over_http_and_is_done_without_when_gone() -> None:
    async def scenario() -> None:
        async with placing("framed") as pair:
            app = App()
            async with without_links(pair, app) as owner_id:
                pair.chooser.chosen = owner_id
                body = os.urandom(500_000)
                for _ in range(2):
                    reply = await ask(pair.here, "/upload", data=body)
                    assert (reply.status, reply.body) == (200, hashlib.sha256(body).hexdigest().encode())
                assert app.run == ["upload", "upload"]
                assert pair.run() == ([], [])
            await until(lambda: pair.figures[CONNECTIONS] == 0)
            await handled_here(pair, owner_id)

    played(scenario())


# What was sent is never sent again.


def test_request_whose_worker_dies_is_answered_502_and_not_run_again(way: Way) -> None:
    async def scenario() -> None:
        async with placing(way) as pair:
            with another_process(pair) as (process, owner_id):
                pair.chooser.chosen = owner_id
                sent = asyncio.Event()

                async def body() -> AsyncIterator[bytes]:
                    yield b"a piece"
                    sent.set()
                    await asyncio.Event().wait()

                asking = asyncio.create_task(ask(pair.here, "/upload", data=body()))
                await sent.wait()
                await until(lambda: pair.figures[CONNECTIONS] == 1)
                process.process.kill()
                reply = await asking
                assert reply.status == 502
                assert b"exchange-broken" in reply.body
                assert pair.run() == ([], [])

    played(scenario())


def test_request_whose_worker_dies_is_counted_as_what_it_was_answered(way: Way) -> None:
    async def scenario() -> None:
        async with placing(way) as pair:
            with another_process(pair) as (process, owner_id):
                task = await use(pair, owner_id)
                process.process.kill()
                await asyncio.gather(task)
                assert (pair.figures[GONE], pair.figures[BROKEN]) == (0, 1)

    played(scenario())


@pytest.mark.parametrize("path", ["/seed/held", "/upload"])
def test_caller_that_leaves_ends_what_was_placed(way: Way, path: str) -> None:
    async def scenario() -> None:
        async with placing(way) as pair:
            _, writer = await asyncio.open_connection(*pair.here.address)
            writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nhalf.".encode())
            await until(lambda: pair.app_there.run)
            writer.close()
            if path == "/upload":
                await until(lambda: pair.app_there.left == ["upload"])
            assert pair.there.routed is not None
            pair.app_there.gate.set()
            await until(lambda: pair.there.routed.figures.values[ACTIVE] == 0)  # type: ignore[union-attr]
            await until(lambda: pair.here.routed.forwarder.finished == 1)  # type: ignore[union-attr]
            assert pair.app_here.run == []
            assert (await ask(pair.here, "/seed")).owner == pair.there.owner_id

    played(scenario())


def test_caller_that_leaves_before_its_worker_is_had_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "REACH", 0.25)

    async def scenario() -> None:
        async with placing("framed") as pair:
            with another_process(pair) as (process, owner_id):
                process.process.send_signal(signal.SIGSTOP)
                pair.chooser.chosen = owner_id
                _, writer = await asyncio.open_connection(*pair.here.address)
                writer.write(b"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nhalf.")
                await until(lambda: pair.chooser.asked)
                writer.close()
                await until(lambda: pair.app_here.left == ["upload"])
                await until(lambda: pair.figures[ACTIVE] == 0)
                assert pair.figures[FORWARDED] == 0

    played(scenario())


def test_bodies_of_what_was_placed_are_streamed_both_ways(way: Way) -> None:
    async def scenario() -> None:
        async with placing(way) as pair:
            reader, writer = await asyncio.open_connection(*pair.here.address)
            writer.write(b"POST /echo/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            for piece in (b"one", b"another"):
                # The next piece is sent when the one before has come back.
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await reader.readuntil(piece)
            writer.write(b"0\r\n\r\n")
            await reader.readuntil(b"0\r\n\r\n")
            writer.close()
            assert pair.run() == ([], ["echo"])
            assert pair.there.routed is not None
            assert pair.there.routed.figures.values[RECEIVED] == 1

    played(scenario())


def test_large_body_arrives_whole(way: Way) -> None:
    async def scenario() -> None:
        async with placing(way) as pair:
            body = os.urandom(10_000_000)
            reply = await ask(pair.here, "/upload", data=io.BytesIO(body))
            assert reply.body == hashlib.sha256(body).hexdigest().encode()
            assert pair.run() == ([], ["upload"])

    played(scenario())


@pytest.mark.parametrize("lost", [False, True], ids=["handled there", "handled here"])
def test_caller_that_expects_100_continue_is_told_to_go_on_by_who_handles_it(way: Way, lost: bool) -> None:
    async def scenario() -> None:
        async with placing(way) as pair:
            if lost:
                pair.chooser.chosen = new_owner_id()
            reader, writer = await asyncio.open_connection(*pair.here.address)
            writer.write(
                b"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n"
                b"Connection: close\r\n\r\n"
            )
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
            assert pair.run() == ((["upload"], []) if lost else ([], ["upload"]))
            writer.write(b"hello")
            reply = await reader.read()
            assert reply.startswith(b"HTTP/1.1 200 ")
            assert reply.endswith(hashlib.sha256(b"hello").hexdigest().encode())
            writer.close()

    played(scenario())
