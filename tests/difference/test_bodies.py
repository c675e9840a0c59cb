"""Bodies: when they are asked for, how much of them is under way at once, and how long they may take."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from starlette.types import Receive, Scope, Send

from gym_gunicorn.forwarding.http import peer as http_peer
from gym_gunicorn.forwarding.links import peer as link_peer
from gym_gunicorn.forwarding.links.server import LinkServer
from gym_gunicorn.forwarding.private import server as private_server
from tests.difference.exchange import (
    BOTH_PROTOCOLS,
    Case,
    Configuration,
    Connection,
    Gate,
    Pair,
    answer,
    eventually,
    handlers_call,
    request,
    running_pair,
)
from tests.difference.process import MIB, WorkerProcess, piece, session_at, worker_process
from tests.workers import Worker, socket_directory

EXPECT = b"Expect: 100-continue"
LENGTH_5 = b"Content-Length: 5"
CHUNKED = b"Transfer-Encoding: chunked"
FRAMED = [
    pytest.param(LENGTH_5, b"hello", id="length"),
    pytest.param(CHUNKED, b"5\r\nhello\r\n0\r\n\r\n", id="chunked"),
]

# Of 64 MiB under way at most this much may wait in buffers, the kernel's included.
BUFFERS = 24 * MIB


@pytest.mark.parametrize(("framing", "body"), FRAMED)
def test_caller_that_waits_for_100_continue_gets_it_when_the_handler_reads(
    pair: Pair, framing: bytes, body: bytes
) -> None:
    outcomes = []
    for worker in pair.ways:
        gate = Gate(pair)

        async def handler(scope: Scope, receive: Receive, send: Send, gate: Gate = gate) -> None:
            await gate.wait()
            await answer()(scope, receive, send)

        seen = pair.begin(handler)
        with pair.connect(worker) as connection:
            connection.send(request(b"POST", b"/", EXPECT, framing))
            handlers_call(seen)
            gate.open()
            asked = connection.read(25)
            connection.send(body)
            outcomes.append((asked, connection.reply(), connection.is_kept(), pair.facts(seen, connection)))
    assert outcomes[0][0].startswith(b"HTTP/1.1 100 ")
    assert outcomes[0][3][0]["body"] == b"hello"
    assert outcomes[1] == outcomes[0]


@pytest.mark.parametrize(("framing", "body"), FRAMED)
def test_caller_that_is_refused_before_its_body_gets_no_late_100(pair: Pair, framing: bytes, body: bytes) -> None:
    outcomes = []
    for worker in pair.ways:
        gate = Gate(pair)

        async def handler(scope: Scope, receive: Receive, send: Send, gate: Gate = gate) -> None:
            await gate.wait()
            await answer(417, read=False)(scope, receive, send)

        seen = pair.begin(handler)
        with pair.connect(worker) as connection:
            connection.send(request(b"POST", b"/", EXPECT, framing))
            handlers_call(seen)
            gate.open()
            reply = connection.reply()
            connection.send_as_taken(body)
            outcomes.append((reply, connection.is_kept(), pair.facts(seen, connection)))
    assert outcomes[0][0].status == 417
    assert outcomes[0][0].interim == ()
    assert outcomes[1] == outcomes[0]
    pair.nothing_is_left()


EXPECTATIONS = [
    Case("body sent without waiting", request(b"POST", b"/", EXPECT, LENGTH_5, body=b"hello")),
    Case(
        "chunks sent without waiting",
        request(b"POST", b"/", EXPECT, CHUNKED, body=b"5\r\nhello\r\n0\r\n\r\n"),
    ),
    Case(
        "body sent without waiting and not read",
        request(b"POST", b"/", EXPECT, LENGTH_5, body=b"hello"),
        413,
        answer(413, read=False),
    ),
    Case("no body", request(b"POST", b"/", EXPECT)),
    Case("no body to GET", request(b"GET", b"/", EXPECT)),
    Case("empty body", request(b"POST", b"/", EXPECT, b"Content-Length: 0")),
    Case("mixed case", request(b"POST", b"/", b"eXpEcT: 100-Continue", LENGTH_5, body=b"hello")),
    Case("something else", request(b"POST", b"/", b"Expect: 200-ok", LENGTH_5, body=b"hello")),
    Case("a list", request(b"POST", b"/", b"Expect: 100-continue, x", LENGTH_5, body=b"hello")),
    Case("twice", request(b"POST", b"/", EXPECT, EXPECT, LENGTH_5, body=b"hello")),
    Case("HTTP/1.0", request(b"POST", b"/", EXPECT, LENGTH_5, body=b"hello", version=b"HTTP/1.0")),
]


@pytest.mark.parametrize("case", EXPECTATIONS, ids=str)
def test_expectation_is_met_or_ignored_alike(pair: Pair, case: Case) -> None:
    direct, forwarded = pair.both_outcomes(case)
    assert direct.statuses == case.statuses(pair.configuration), "the case is not what its name says"
    assert forwarded == direct


# Back-pressure


def test_slow_reader_holds_up_the_handler_that_sends(plain_pair: Pair) -> None:
    for worker in plain_pair.ways:
        sent: list[int] = []

        async def handler(scope: Scope, receive: Receive, send: Send, sent: list[int] = sent) -> None:
            await send({"type": "http.response.start", "status": 200})
            for number in range(1024):
                await send({"type": "http.response.body", "body": piece(number), "more_body": True})
                sent.append(number)
            await send({"type": "http.response.body"})

        plain_pair.begin(handler)
        with plain_pair.connect(worker, receive_buffer=2**16) as connection:
            connection.send(request())
            _until_held_up(plain_pair, worker, "write_paused")
            assert len(sent) * 2**16 < BUFFERS
            reply = connection.reply()
            assert (reply.body, reply.complete) == (b"".join(map(piece, range(1024))), True)
        plain_pair.nothing_is_left()


@pytest.mark.parametrize("framing", [b"Content-Length: 67108864", CHUNKED], ids=["length", "chunked"])
def test_handler_that_does_not_read_holds_up_the_uploader(plain_pair: Pair, framing: bytes) -> None:
    chunked = framing == CHUNKED
    for worker in plain_pair.ways:
        gate = Gate(plain_pair)

        async def handler(scope: Scope, receive: Receive, send: Send, gate: Gate = gate) -> None:
            await receive()
            await gate.wait()
            await answer()(scope, receive, send)

        seen = plain_pair.begin(handler)
        with plain_pair.connect(worker) as connection:
            taken: list[int] = []
            uploader = threading.Thread(target=_upload, args=(connection, framing, chunked, taken))
            uploader.start()
            try:
                _until_held_up(plain_pair, worker, "read_paused")
                assert len(taken) * 2**16 < BUFFERS
                assert len(seen[0].body) < BUFFERS
            finally:
                gate.open()
                uploader.join()
            assert connection.reply().status == 200
        assert seen[0].complete
        assert seen[0].body == b"".join(map(piece, range(1024)))
        plain_pair.nothing_is_left()


def _upload(connection: Connection, framing: bytes, chunked: bool, taken: list[int]) -> None:
    connection.send(request(b"POST", b"/", framing))
    for number in range(1024):
        content = piece(number)
        connection.send(b"10000\r\n" + content + b"\r\n" if chunked else content)
        taken.append(number)
    if chunked:
        connection.send(b"0\r\n\r\n")


def _until_held_up(pair: Pair, worker: Worker, what: str) -> None:
    eventually(lambda: _held_up(pair, worker, what), "an end that is held up")


def _link_is_held_up(link: LinkServer, what: str) -> bool:
    return link._writable is not None if what == "write_paused" else not link._reading


def _held_up(pair: Pair, worker: Worker, what: str) -> bool:
    """Tell whether both the connection that the caller has and, where there is one, its forward are paused."""

    async def look() -> bool:
        assert pair.owner.routed is not None
        states = [worker.server.server_state]
        if worker is pair.other:
            states.append(pair.owner.routed.private.state)
        connections: list[Any] = [connection for state in states for connection in state.connections]
        held_up = [
            _link_is_held_up(one, what) if isinstance(one, LinkServer) else getattr(one.flow, what)
            for one in connections
            if (one.is_busy() if isinstance(one, LinkServer) else one.cycle and not one.cycle.response_complete)
        ]
        return len(held_up) == len(states) and all(held_up)

    return pair.call(look())


# Memory


@contextlib.contextmanager
def _processes(http: str) -> Iterator[tuple[WorkerProcess, WorkerProcess, str]]:
    with (
        socket_directory() as directory,
        worker_process(directory, http) as owner,
        worker_process(directory, http) as other,
    ):
        yield owner, other, session_at(owner)


def _url(worker: WorkerProcess, path: str) -> str:
    host, port = worker.address
    return f"http://{host}:{port}{path}"


async def _upload_through(worker: WorkerProcess, cookie: str, mebibytes: int) -> tuple[str, str]:
    """Upload through ``worker`` and return the digests of what was sent and of what the owner got."""
    digest = hashlib.sha256()

    async def content() -> Any:
        for number in range(mebibytes * 16):
            digest.update(piece(number))
            yield piece(number)

    async with (
        aiohttp.ClientSession(headers={"Cookie": f"session={cookie}"}) as http,
        http.post(_url(worker, "/upload"), data=content()) as response,
    ):
        received = await response.text()
        return digest.hexdigest(), received


async def _download_through(worker: WorkerProcess, cookie: str, mebibytes: int) -> tuple[str, str]:
    """Download through ``worker`` and return the digests of what the owner sends and of what came."""
    sent, came = hashlib.sha256(), hashlib.sha256()
    for number in range(mebibytes * 16):
        sent.update(piece(number))
    async with (
        aiohttp.ClientSession(headers={"Cookie": f"session={cookie}"}) as http,
        http.get(_url(worker, f"/download?mebibytes={mebibytes}")) as response,
    ):
        async for chunk in response.content.iter_any():
            came.update(chunk)
    return sent.hexdigest(), came.hexdigest()


@pytest.mark.parametrize("http", ["httptools", "h11"])
@pytest.mark.parametrize("transfer", [_upload_through, _download_through], ids=["request", "reply"])
def test_body_of_256_mebibytes_takes_no_memory_in_either_worker(transfer: Any, http: str) -> None:
    with _processes(http) as (owner, other, cookie):
        sent, came = asyncio.run(transfer(other, cookie, 4))
        assert sent == came
        for worker in (owner, other):
            worker.forget_peak()
        before = [worker.peak() for worker in (owner, other)]
        sent, came = asyncio.run(transfer(other, cookie, 256))
        assert sent == came
        grown = [worker.peak() - peak for worker, peak in zip((owner, other), before, strict=True)]
        print("grown by", grown)
        assert max(grown) < 16 * MIB


# Many and slow


def test_400_slow_requests_to_one_owner_are_all_answered(plain_pair: Pair) -> None:
    gate = Gate(plain_pair)

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        await gate.wait()
        await answer()(scope, receive, send)

    seen = plain_pair.begin(handler)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(plain_pair.connect(plain_pair.other)) for _ in range(400)]
        for number, connection in enumerate(connections):
            connection.send(request(target=b"/%d" % number))
        eventually(lambda: len(seen) == 400, "400 requests at the owner at once")
        assert not any(one.ended for one in seen)
        gate.open()
        assert [connection.reply().status for connection in connections] == [200] * 400
    assert {one.app for one in seen} == {"app 1"}
    plain_pair.nothing_is_left()


@pytest.mark.parametrize("configuration", BOTH_PROTOCOLS, ids=str)
def test_handler_may_take_longer_than_any_time_limit(
    configuration: Configuration, certificate: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The limits that the libraries have by default, made so short that all of them are over.
    short = aiohttp.ClientTimeout(total=0.05, connect=0.05, sock_connect=0.05, sock_read=0.05)
    monkeypatch.setattr(aiohttp.client, "DEFAULT_TIMEOUT", short)
    for module in (http_peer, link_peer, private_server):
        monkeypatch.setattr(module, "KEEP_ALIVE", 0.05)

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await asyncio.sleep(0.3)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await asyncio.sleep(0.3)
        await send({"type": "http.response.body", "body": b"seen"})

    slow = Configuration(configuration.http, forwarder=configuration.forwarder, server={"timeout_keep_alive": 0})
    with running_pair(slow, certificate) as pair:
        for worker in pair.ways:
            pair.begin(handler)
            with pair.connect(worker) as connection:
                connection.send(request(b"POST", b"/", LENGTH_5, body=b"hello"))
                assert connection.reply().body == b"seen"
