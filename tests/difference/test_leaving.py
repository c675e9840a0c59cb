"""A caller that goes away, at each stage: the owner's handler sees it, and nothing is left in either worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gym_gunicorn import CancelOnDisconnect
from tests.difference.exchange import Case, Connection, Gate, Pair, Seen, answer, eventually, request
from tests.workers import Worker

LENGTH_10 = b"Content-Length: 10"
CHUNKED = b"Transfer-Encoding: chunked"

WAYS_TO_LEAVE = [Connection.leave, Connection.reset, Connection.end_sending]
leaving = pytest.mark.parametrize("leave", WAYS_TO_LEAVE, ids=lambda way: way.__name__)
Leave = Callable[[Connection], None]

# What has come of a body of 10 bytes, or of chunks, when the caller leaves.
PARTS = [
    pytest.param(LENGTH_10, b"", id="length-nothing"),
    pytest.param(LENGTH_10, b"some", id="length-some"),
    pytest.param(LENGTH_10, b"all but a", id="length-all-but-one"),
    pytest.param(CHUNKED, b"", id="chunked-nothing"),
    pytest.param(CHUNKED, b"a", id="chunked-in-the-size"),
    pytest.param(CHUNKED, b"a\r\nsome", id="chunked-in-a-chunk"),
    pytest.param(CHUNKED, b"4\r\nsome\r\n", id="chunked-after-a-chunk"),
    pytest.param(CHUNKED, b"4\r\nsome\r\n0", id="chunked-in-the-last-size"),
    pytest.param(CHUNKED, b"4\r\nsome\r\n0\r\n", id="chunked-before-the-last-line"),
]


async def reads(scope: Scope, receive: Receive, send: Send) -> None:
    """Read the whole body, or as much as comes, and answer."""
    while (message := await receive()).get("more_body", False):
        pass
    if message["type"] == "http.request":
        await answer(read=False)(scope, receive, send)


async def waits_for_the_disconnect(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _call(pair: Pair, handler: ASGIApp, connection: Connection, data: bytes) -> Seen:
    """Send ``data`` and return the handler's call, which has begun."""
    seen = pair.begin(handler)
    connection.send(data)
    eventually(lambda: seen, "the handler's call")
    return seen[0]


def _worker(pair: Pair, way: str) -> Worker:
    return pair.owner if way == "direct" else pair.other


both_ways = pytest.mark.parametrize("way", ["direct", "forwarded"])


@leaving
@both_ways
def test_caller_that_leaves_before_its_headers_end_calls_no_handler(plain_pair: Pair, way: str, leave: Leave) -> None:
    seen = plain_pair.begin(answer())
    with plain_pair.connect(_worker(plain_pair, way)) as connection:
        connection.send(request(b"POST", b"/", LENGTH_10, b"X-Cut: short").removesuffix(b"\r\n"))
        leave(connection)
        plain_pair.nothing_is_left()
    assert seen == []


@leaving
@pytest.mark.parametrize(("framing", "part"), PARTS)
@both_ways
def test_truncated_upload_is_never_taken_for_a_whole_one(
    plain_pair: Pair, way: str, framing: bytes, part: bytes, leave: Leave
) -> None:
    with plain_pair.connect(_worker(plain_pair, way)) as connection:
        seen = _call(plain_pair, reads, connection, request(b"POST", b"/", framing) + part)
        leave(connection)
        eventually(lambda: seen.ended, "the handler's end")
        plain_pair.nothing_is_left()
    assert (seen.complete, seen.disconnected) == (False, True)


@pytest.mark.parametrize(("framing", "part"), PARTS)
@both_ways
def test_truncated_upload_is_not_taken_for_a_whole_one_by_a_handler_that_reads_late(
    plain_pair: Pair, way: str, framing: bytes, part: bytes
) -> None:
    gate = Gate(plain_pair)

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        await gate.wait()
        await reads(scope, receive, send)

    with plain_pair.connect(_worker(plain_pair, way)) as connection:
        seen = _call(plain_pair, handler, connection, request(b"POST", b"/", framing) + part)
        connection.leave()
    eventually(lambda: not plain_pair.other.server.server_state.tasks, "the end of the forward")
    gate.open()
    eventually(lambda: seen.ended, "the handler's end")
    plain_pair.nothing_is_left()
    assert (seen.complete, seen.disconnected) == (False, True)


@both_ways
def test_starlette_handler_is_told_that_its_upload_was_cut_off(plain_pair: Pair, way: str) -> None:
    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()

    with plain_pair.connect(_worker(plain_pair, way)) as connection:
        seen = _call(plain_pair, handler, connection, request(b"POST", b"/", LENGTH_10) + b"some")
        connection.leave()
    eventually(lambda: seen.ended, "the handler's end")
    assert seen.ended == ClientDisconnect.__name__
    plain_pair.nothing_is_left()


@leaving
@pytest.mark.parametrize("method", [b"GET", b"POST"], ids=["no-body", "body"])
@both_ways
def test_handler_that_has_not_replied_sees_its_caller_leave(
    plain_pair: Pair, way: str, method: bytes, leave: Leave
) -> None:
    data = request() if method == b"GET" else request(b"POST", b"/", LENGTH_10, body=b"0123456789")
    with plain_pair.connect(_worker(plain_pair, way)) as connection:
        seen = _call(plain_pair, waits_for_the_disconnect, connection, data)
        leave(connection)
        eventually(lambda: seen.ended == "returned", "the handler's end")
        plain_pair.nothing_is_left()
    assert (seen.complete, seen.disconnected) == (True, True)


@both_ways
def test_caller_that_leaves_while_it_waits_for_100_continue_is_seen_to_leave(plain_pair: Pair, way: str) -> None:
    with plain_pair.connect(_worker(plain_pair, way)) as connection:
        data = request(b"POST", b"/", LENGTH_10, b"Expect: 100-continue")
        seen = _call(plain_pair, reads, connection, data)
        assert connection.read(12) == b"HTTP/1.1 100"
        connection.leave()
    eventually(lambda: seen.ended, "the handler's end")
    assert (seen.complete, seen.disconnected) == (False, True)
    plain_pair.nothing_is_left()


@both_ways
def test_handler_that_does_not_read_is_cancelled_where_the_app_wants_it(plain_pair: Pair, way: str) -> None:
    never = Gate(plain_pair)

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        await never.wait()

    cancelled: list[bool] = []

    async def noted(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await handler(scope, receive, send)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with plain_pair.connect(_worker(plain_pair, way)) as connection:
        _call(plain_pair, CancelOnDisconnect(noted), connection, request())
        connection.leave()
    eventually(lambda: cancelled, "the cancellation")
    plain_pair.nothing_is_left()


def test_forward_ends_at_once_though_the_owners_handler_goes_on(plain_pair: Pair) -> None:
    gate = Gate(plain_pair)

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        await gate.wait()

    with plain_pair.connect(plain_pair.other) as connection:
        seen = _call(plain_pair, handler, connection, request())
        connection.leave()
    kind = {"aiohttp": "RequestResponseCycle.run_asgi", "framed": "_Exchange.run"}[plain_pair.configuration.forwarder]
    owners = {"owner: forwarded requests": 1, f"task {kind}": 1}
    eventually(lambda: plain_pair.left_behind() == owners, "the end of the forward")
    assert seen.ended is None
    gate.open()
    plain_pair.nothing_is_left()


@pytest.mark.parametrize("idle", [False, True], ids=["in-the-reply", "in-an-idle-event-stream"])
@leaving
@both_ways
def test_stream_ends_when_its_caller_leaves(plain_pair: Pair, way: str, leave: Leave, idle: bool) -> None:
    ended: list[str] = []
    never = Gate(plain_pair)

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"data: 0123456789\n\n"
                await (never.wait() if idle else asyncio.sleep(0))
        finally:
            ended.append("ended")

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        stream = events()
        async with contextlib.aclosing(stream):
            await StreamingResponse(stream, media_type="text/event-stream")(scope, receive, send)

    with plain_pair.connect(_worker(plain_pair, way)) as connection:
        seen = _call(plain_pair, handler, connection, request())
        assert connection.head().status == 200
        assert b"data: 012" in connection.read(22)
        leave(connection)
        eventually(lambda: ended, "the end of the stream")
        eventually(lambda: seen.ended, "the handler's end")
        plain_pair.nothing_is_left()


@both_ways
def test_handler_that_sends_to_nobody_may_finish(plain_pair: Pair, way: str) -> None:
    gate = Gate(plain_pair)

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"some", "more_body": True})
        await gate.wait()
        for _ in range(100):
            await send({"type": "http.response.body", "body": b"more", "more_body": True})
        await send({"type": "http.response.body"})

    with plain_pair.connect(_worker(plain_pair, way)) as connection:
        seen = _call(plain_pair, handler, connection, request())
        assert connection.head().status == 200
        connection.leave()
    eventually(lambda: not plain_pair.left_behind().get("other: requests"), "the end of the forward")
    gate.open()
    eventually(lambda: seen.ended == "returned", "the handler's end")
    plain_pair.nothing_is_left()


def test_100_callers_that_leave_at_once_leave_nothing(plain_pair: Pair) -> None:
    seen = plain_pair.begin(waits_for_the_disconnect)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(plain_pair.connect(plain_pair.other)) for _ in range(100)]
        for connection in connections:
            connection.send(request(b"POST", b"/", CHUNKED, body=b"4\r\nsome\r\n"))
        eventually(lambda: len(seen) == 100, "100 calls")
        for connection in connections:
            connection.leave()
    eventually(lambda: all(one.ended == "returned" for one in seen), "the handlers' ends")
    plain_pair.nothing_is_left()
    assert not any(one.complete for one in seen)
    assert plain_pair.outcome(Case("the next", request()), plain_pair.other).statuses == (200,)
