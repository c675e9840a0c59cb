from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import Server

from gym_gunicorn import CancelOnDisconnect

HTTP: Scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
WHOLE: Message = {"type": "http.request", "body": b"", "more_body": False}
GONE: Message = {"type": "http.disconnect"}
START: Message = {"type": "http.response.start", "status": 200, "headers": []}
END: Message = {"type": "http.response.body", "body": b"done", "more_body": False}


class Caller:
    """Sends events when the test says so, and keeps what it is sent."""

    def __init__(self, *events: Message) -> None:
        self.events: asyncio.Queue[Message] = asyncio.Queue()
        self.asked = 0
        self.read = 0
        self.sent: list[Message] = []
        self.sends(*events)

    def sends(self, *events: Message) -> None:
        for event in events:
            self.events.put_nowait(event)

    async def receive(self) -> Message:
        self.asked += 1
        event = await self.events.get()
        self.read += 1
        return event

    async def send(self, message: Message) -> None:
        self.sent.append(message)


class Handler:
    """A handler that begins as ``app`` does, then waits until it is released or cancelled."""

    def __init__(self, app: ASGIApp | None = None) -> None:
        self.app = app
        self.waits = asyncio.Event()
        self.released = asyncio.Event()
        self.ended_by: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        end = "error"
        try:
            if self.app is not None:
                await self.app(scope, receive, send)
            self.waits.set()
            await self.released.wait()
            end = "return"
        except asyncio.CancelledError:
            end = "cancellation"
            raise
        finally:
            self.ended_by.append(end)


def chunks(number: int) -> list[Message]:
    return [{"type": "http.request", "body": b"%d," % each, "more_body": each < number - 1} for each in range(number)]


def call(app: ASGIApp, caller: Caller, scope: Scope = HTTP) -> asyncio.Task[None]:
    async def called() -> None:
        await CancelOnDisconnect(app)(dict(scope), caller.receive, caller.send)

    return asyncio.create_task(called())


async def settle() -> None:
    """Let everything run that can run without another event."""
    for _ in range(50):
        await asyncio.sleep(0)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run ``test``, and see that it leaves no task behind."""

    async def limited() -> None:
        async with asyncio.timeout(30):
            await test()
            await settle()
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(limited())


def test_a_waiting_handler_is_cancelled_and_cleans_up_when_its_caller_leaves() -> None:
    async def test() -> None:
        caller, handler = Caller(WHOLE), Handler()
        task = call(handler, caller)
        await handler.waits.wait()
        await settle()
        assert not task.done()
        caller.sends(GONE)
        await task
        assert handler.ended_by == ["cancellation"]
        assert caller.sent == []

    run(test)


def test_a_handler_that_has_answered_is_told_of_the_disconnect_as_often_as_it_asks() -> None:
    told: list[Message] = []

    async def asks_on(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(START)
        await send(END)
        for _ in range(3):
            told.append(await receive())

    async def test() -> None:
        caller = Caller(WHOLE)
        task = call(asks_on, caller)
        await settle()
        caller.sends(GONE)
        await task
        assert told == [GONE] * 3

    run(test)


def test_a_handler_in_the_middle_of_its_reply_is_cancelled() -> None:
    async def begins_reply(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send({**END, "more_body": True})

    async def test() -> None:
        caller, handler = Caller(WHOLE), Handler(begins_reply)
        task = call(handler, caller)
        await handler.waits.wait()
        caller.sends(GONE)
        await task
        assert handler.ended_by == ["cancellation"]

    run(test)


async def reads_one(scope: Scope, receive: Receive, send: Send) -> None:
    assert await receive() == chunks(5)[0]


def test_a_handler_that_waits_after_a_part_of_the_body_that_was_there_is_cancelled() -> None:
    async def test() -> None:
        caller, handler = Caller(), Handler(reads_one)
        starts = asyncio.Event()

        async def starts_late(scope: Scope, receive: Receive, send: Send) -> None:
            await starts.wait()
            await handler(scope, receive, send)

        task = call(starts_late, caller)
        caller.sends(chunks(5)[0])
        await settle()
        starts.set()
        await handler.waits.wait()
        caller.sends(GONE)
        await task
        assert handler.ended_by == ["cancellation"]

    run(test)


def test_a_handler_that_waits_after_a_part_of_the_body_that_it_waited_for_is_cancelled() -> None:
    async def test() -> None:
        caller, handler = Caller(), Handler(reads_one)
        task = call(handler, caller)
        await settle()
        caller.sends(chunks(5)[0])
        await handler.waits.wait()
        caller.sends(GONE)
        await settle()
        ended_by = list(handler.ended_by)
        handler.released.set()
        await task
        assert ended_by == ["cancellation"]

    run(test)


def test_a_handler_that_reads_sees_the_disconnect() -> None:
    seen: list[Message] = []

    async def reads(scope: Scope, receive: Receive, send: Send) -> None:
        while True:
            seen.append(await receive())

    async def test() -> None:
        await call(reads, Caller(*chunks(3)[:2], GONE))
        assert seen == [*chunks(3)[:2], GONE]

    run(test)


def test_a_caller_that_has_left_before_the_handler_began_has_it_cancelled() -> None:
    async def test() -> None:
        handler = Handler()
        await call(handler, Caller(GONE))
        assert handler.ended_by == ["cancellation"]

    run(test)


def test_a_handler_that_answers_is_not_disturbed() -> None:
    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(START)
        await send(END)

    async def test() -> None:
        caller = Caller(WHOLE)
        await call(answers, caller)
        assert caller.sent == [START, END]

    run(test)


def test_a_handler_that_has_answered_is_left_to_finish() -> None:
    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send(END)

    async def test() -> None:
        caller, handler = Caller(WHOLE), Handler(answers)
        task = call(handler, caller)
        await handler.waits.wait()
        caller.sends(GONE)
        await settle()
        assert caller.read == 2
        assert handler.ended_by == []
        handler.released.set()
        await task
        assert handler.ended_by == ["return"]

    run(test)


def test_a_handler_is_not_cancelled_while_it_sends_the_end_of_its_reply() -> None:
    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send(END)

    async def test() -> None:
        caller, handler = Caller(WHOLE), Handler(answers)

        async def slow_send(message: Message) -> None:
            if message == END:
                caller.sends(GONE)
                await settle()
            caller.sent.append(message)

        caller.send = slow_send  # type: ignore[method-assign]  # a caller that reads slowly
        handler.released.set()
        await call(handler, caller)
        assert caller.sent == [START, END]
        assert handler.ended_by == ["return"]

    run(test)


# Reading ahead


def test_a_body_arrives_whole_and_in_order() -> None:
    async def reads(scope: Scope, receive: Receive, send: Send) -> None:
        for expected in chunks(200):
            assert await receive() == expected
            if expected["body"].startswith(b"1"):
                await settle()

    run(lambda: call_and_wait(reads, Caller(*chunks(200))))


async def call_and_wait(app: ASGIApp, caller: Caller, scope: Scope = HTTP) -> None:
    await call(app, caller, scope)


def test_a_body_is_read_one_event_ahead_and_no_more() -> None:
    caller_read: list[tuple[int, int]] = []

    async def test() -> None:
        caller = Caller(*chunks(20))

        async def reads(scope: Scope, receive: Receive, send: Send) -> None:
            for taken in range(20):
                await settle()
                caller_read.append((taken, caller.read))
                await receive()

        await call(reads, caller)

    run(test)
    assert caller_read == [(taken, taken + 1) for taken in range(20)]


def test_a_handler_may_ask_before_the_body_comes() -> None:
    async def test() -> None:
        caller = Caller()
        taken: list[Message] = []

        async def reads(scope: Scope, receive: Receive, send: Send) -> None:
            for _ in range(3):
                taken.append(await receive())

        task = call(reads, caller)
        for number, chunk in enumerate(chunks(3), 1):
            await settle()
            caller.sends(chunk)
            await settle()
            assert len(taken) == number
        await task

    run(test)


EXPECTS = {**HTTP, "headers": [(b"content-length", b"5"), (b"expect", b"100-Continue")]}


def test_a_body_behind_100_continue_is_not_read_before_the_handler_asks() -> None:
    async def test() -> None:
        caller = Caller(WHOLE)
        asks = asyncio.Event()

        async def reads(scope: Scope, receive: Receive, send: Send) -> None:
            await asks.wait()
            assert await receive() == WHOLE

        task = call(reads, caller, EXPECTS)
        await settle()
        assert caller.asked == 0
        asks.set()
        await task
        assert caller.read == 1

    run(test)


def test_a_body_behind_100_continue_is_never_read_where_the_handler_refuses_it() -> None:
    async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
        await settle()
        await send(START)
        await send(END)

    async def test() -> None:
        caller = Caller(WHOLE)
        await call(refuses, caller, EXPECTS)
        assert caller.asked == 0
        assert caller.sent == [START, END]

    run(test)


# Whose error it is


@pytest.mark.parametrize("error", [TimeoutError("mine"), ValueError("mine"), OSError("mine")], ids=repr)
@pytest.mark.parametrize("events", [[], [WHOLE]], ids=["no body", "body"])
def test_a_handlers_own_error_propagates(error: Exception, events: list[Message]) -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        await settle()
        raise error

    async def test() -> None:
        with pytest.raises(type(error)) as caught:
            await call(fails, Caller(*events))
        assert caught.value is error

    run(test)


def test_a_handlers_own_time_limit_works() -> None:
    async def limits(scope: Scope, receive: Receive, send: Send) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        await send(START)
        await send(END)

    async def test() -> None:
        caller = Caller(WHOLE)
        await call(limits, caller)
        assert caller.sent == [START, END]

    run(test)


def test_a_cancellation_from_outside_is_still_one() -> None:
    async def test() -> None:
        handler = Handler()
        task = call(handler, Caller(WHOLE))
        await handler.waits.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert handler.ended_by == ["cancellation"]

    run(test)


def test_a_cancellation_from_outside_is_one_even_as_the_caller_leaves() -> None:
    async def test() -> None:
        caller, handler = Caller(WHOLE), Handler()
        task = call(handler, caller)
        await handler.waits.wait()
        caller.sends(GONE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert handler.ended_by == ["cancellation"]

    run(test)


def test_a_time_limit_from_outside_is_still_one() -> None:
    async def test() -> None:
        handler = Handler()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as limit:
                caller = Caller(WHOLE)
                asyncio.get_running_loop().call_soon(limit.reschedule, 0)
                await CancelOnDisconnect(handler)(dict(HTTP), caller.receive, caller.send)
        assert limit.expired()
        assert handler.ended_by == ["cancellation"]

    run(test)


def test_what_receive_raises_reaches_the_handler_that_reads() -> None:
    async def test() -> None:
        async def receive() -> Message:
            raise ConnectionError("broken")

        async def send(message: Message) -> None:
            raise AssertionError("not answered")

        async def reads(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()

        with pytest.raises(ConnectionError, match="broken"):
            async with asyncio.timeout(60):
                await CancelOnDisconnect(reads)(dict(HTTP), receive, send)

    run(test)


def test_a_body_limit_around_the_middleware_still_answers_413() -> None:
    async def test() -> None:
        async def reads(scope: Scope, receive: Receive, send: Send) -> None:
            while (await receive()).get("more_body"):
                pass
            await send(START)
            await send(END)

        caller = Caller(*chunks(100))
        limited = RequestBodyLimitMiddleware(CancelOnDisconnect(reads), max_body_size=20)
        async with asyncio.timeout(60):
            await limited(dict(HTTP), caller.receive, caller.send)
        assert [message.get("status") for message in caller.sent] == [413, None]

    run(test)


# What passes


@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
def test_other_scopes_pass_unchanged(kind: str) -> None:
    async def test() -> None:
        caller = Caller()
        seen: list[object] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            seen.extend([scope, receive, send])

        scope, receive, send = {"type": kind}, caller.receive, caller.send
        await CancelOnDisconnect(app)(scope, receive, send)
        assert len(seen) == 3
        assert seen[0] is scope and seen[1] is receive and seen[2] is send
        assert caller.asked == 0

    run(test)


def test_a_handler_behind_uvicorn_is_cancelled_when_its_caller_hangs_up() -> None:
    directory = tempfile.mkdtemp(dir="/tmp", prefix="disconnect-")

    async def test() -> None:
        handler = Handler()
        path = f"{directory}/socket"
        config = Config(CancelOnDisconnect(handler), uds=path, lifespan="off", ws="none", log_config=None)
        server = Server(config)
        serving = asyncio.create_task(server.serve())
        try:
            async with asyncio.timeout(20):
                while not server.started:  # noqa: ASYNC110  # uvicorn has no event for it
                    await asyncio.sleep(0)
                _, writer = await asyncio.open_unix_connection(path)
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                await handler.waits.wait()
                assert handler.ended_by == []
                writer.close()
                await writer.wait_closed()
                while not handler.ended_by:  # noqa: ASYNC110  # seen from outside
                    await asyncio.sleep(0)
        finally:
            handler.released.set()
            server.should_exit = True
            await serving
        assert handler.ended_by == ["cancellation"]

    try:
        run(test)
    finally:
        shutil.rmtree(directory)
