"""The reply: whatever the owner's app sends, the caller gets the same."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import queue
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.difference.exchange import PATIENCE, Case, Gate, Pair, Reply, Seen, answer, eventually, handlers_end, request
from tests.workers import Worker

LENGTH_4 = (b"content-length", b"4")
GZIP = gzip.compress(b"hello" * 1000, mtime=0)


def sends(*messages: Message) -> ASGIApp:
    """Return a handler that sends those messages as they are."""

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    return handler


def start(status: int = 200, *headers: tuple[bytes, bytes]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(content: bytes = b"", more_body: bool = False) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more_body}


async def raises(scope: Scope, receive: Receive, send: Send) -> None:
    raise ValueError("the app raises")


async def raises_after_the_start(scope: Scope, receive: Receive, send: Send) -> None:
    await send(start(200, (b"x-a", b"1")))
    raise ValueError("the app raises")


async def raises_in_the_body(scope: Scope, receive: Receive, send: Send) -> None:
    await send(start(200))
    await send(body(b"some", more_body=True))
    raise ValueError("the app raises")


async def raises_in_a_body_of_known_length(scope: Scope, receive: Receive, send: Send) -> None:
    await send(start(200, (b"content-length", b"10")))
    await send(body(b"some", more_body=True))
    raise ValueError("the app raises")


async def raises_after_the_end(scope: Scope, receive: Receive, send: Send) -> None:
    await answer()(scope, receive, send)
    raise ValueError("the app raises")


async def returns_nothing(scope: Scope, receive: Receive, send: Send) -> None:
    return


def page(request: Request) -> Response:
    response = PlainTextResponse("a page", headers={"X-Page": "1"})
    response.set_cookie("a", "b", max_age=9, httponly=True, samesite="strict")
    response.set_cookie("c", "d e;f", path="/x")
    response.delete_cookie("g")
    return response


def broken_page(request: Request) -> Response:
    raise RuntimeError("the page raises")


async def pieces(request: Request) -> Response:
    async def made() -> AsyncIterator[str]:
        for number in range(20):
            yield f"{number}\n"

    return StreamingResponse(made(), 201)


STATUSES = [
    Case(f"status {status}", request(), status, answer(status, [LENGTH_4]))
    for status in (
        200,
        201,
        202,
        203,
        226,
        300,
        400,
        401,
        404,
        405,
        409,
        410,
        418,
        421,
        422,
        429,
        499,
        500,
        502,
        503,
        504,
    )
] + [
    Case("status 501", request(), 501, answer(501, [LENGTH_4])),
    Case("status 599", request(), 599, answer(599, [LENGTH_4])),
    Case("status 204", request(), 204, answer(204, (), ())),
    Case("status 205", request(), 205, answer(205, [(b"content-length", b"0")], ())),
    Case("status 206", request(), 206, answer(206, [(b"content-range", b"bytes 0-3/9"), LENGTH_4])),
    Case("status 304", request(), 304, answer(304, [(b"etag", b'"a"'), (b"cache-control", b"no-cache")], ())),
    Case("status 204 to DELETE", request(b"DELETE"), 204, answer(204, (), ())),
    *(
        Case(f"redirect {status}", request(method), status, answer(status, [(b"location", location), LENGTH_4]))
        for status, method, location in (
            (301, b"GET", b"/elsewhere"),
            (302, b"POST", b"http://192.0.2.1/elsewhere?a=b"),
            (303, b"PUT", b"../up"),
            (307, b"POST", b"//other.example/"),
            (308, b"GET", b"/caf%C3%A9#d"),
        )
    ),
    Case(
        "status 401 with challenges", request(), 401, answer(401, [(b"www-authenticate", b"Basic, Digest"), LENGTH_4])
    ),
]

FIELDS = [
    Case(f"fields: {name}", request(), 200, answer(200, [*fields, LENGTH_4]))
    for name, fields in {
        "none": [],
        "repeated": [(b"x-a", b"1"), (b"x-b", b"2"), (b"x-a", b"3"), (b"x-a", b"1")],
        "mixed case": [(b"X-MiXeD", b"VaLuE"), (b"Content-Type", b"Text/Plain"), (b"ALL-UPPER", b"UP")],
        "empty": [(b"x-empty", b"")],
        "padded inside": [(b"x-padded", b"a  \t b")],
        "not ASCII": [(b"x-latin", "café".encode("latin-1")), (b"x-utf-8", "café €".encode())],
        "not UTF-8": [(b"x-bytes", b"\xff\xfe\x80\xc3("), (b"x-high", bytes(range(128, 256)))],
        "quotes and backslashes": [(b"x-quoted", b'"a\\"b", \\u0000 \\'), (b"x-percent", b"%0d%0a")],
        "every mark that a name may have": [(b"!#$%&'*+-.^_`|~", b"marks"), (b"x_under", b"1")],
        "200 of them": [(b"x-field-%d" % number, b"%d" % number) for number in range(200)],
        "one of 32 KiB": [(b"x-long", b"v" * 32768)],
        "five cookies in their order": [
            (b"set-cookie", cookie)
            for cookie in (b"e=1; Path=/", b"a=2; HttpOnly", b"c=3", b'b="4"; Secure', b"a=5; Expires=Thu, 01 Jan 1970")
        ],
        "a date of its own": [(b"date", b"Thu, 01 Jan 1970 00:00:00 GMT")],
        "a server of its own": [(b"server", b"mine/1.0")],
        "a date and a server in mixed case": [(b"Date", b"Thu, 01 Jan 1970 00:00:00 GMT"), (b"SERVER", b"mine")],
        "Connection: close": [(b"connection", b"close")],
        "Connection: Close, X-A": [(b"connection", b"Close, X-A"), (b"x-a", b"1")],
        "Connection: keep-alive": [(b"connection", b"keep-alive"), (b"keep-alive", b"timeout=5")],
        "an upgrade": [(b"upgrade", b"h2c, websocket"), (b"alt-svc", b'h2=":443"')],
        "of proxies": [(b"via", b"1.1 a"), (b"age", b"9"), (b"proxy-authenticate", b"Basic")],
        "Vary and caching": [
            (b"vary", b"Cookie"),
            (b"vary", b"*"),
            (b"cache-control", b"no-store"),
            (b"expires", b"0"),
        ],
        "two content types": [(b"content-type", b"text/plain"), (b"content-type", b"text/html; charset=x")],
        "our reply's name": [(b"gym-gunicorn-reply", b"lAHNAfSQBw==")],
        "our head's name": [(b"gym-gunicorn-head", b"x"), (b"gym-gunicorn-link-head", b"x")],
        "a coding that it does not have": [(b"content-encoding", b"gzip")],
        "an unknown coding": [(b"content-encoding", b"br, zz")],
        "CORS": [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", b"x")],
    }.items()
]

BODIES = [
    Case("a body of no length in one piece", request(), 200, answer(200, (), [b"seen"])),
    Case("a body of no length in pieces", request(), 200, answer(200, (), [b"a", b"bc", b"", b"d" * 5000])),
    Case("an empty body of no length", request(), 200, answer(200, (), ())),
    Case("an empty body of length 0", request(), 200, answer(200, [(b"content-length", b"0")], ())),
    Case("a body of no length for HTTP/1.0", request(version=b"HTTP/1.0"), 200, answer(200, (), [b"a", b"b"])),
    Case("a body of known length for HTTP/1.0", request(version=b"HTTP/1.0"), 200, answer()),
    Case("a body in chunks by the app's own word", request(), 200, answer(200, [(b"transfer-encoding", b"chunked")])),
    Case("a body of a length with zeros", request(), 200, answer(200, [(b"content-length", b"004")])),
    Case("a length in mixed case", request(), 200, answer(200, [(b"Content-Length", b"4")])),
    Case("a body of 1 MiB", request(), 200, answer(200, [(b"content-length", b"1048576")], [bytes(256) * 4096])),
    Case("a body of 1 MiB in no length", request(), 200, answer(200, (), [bytes(range(256)) * 64] * 64)),
    Case(
        "a compressed body",
        request(b"GET", b"/", b"Accept-Encoding: gzip"),
        200,
        answer(200, [(b"content-encoding", b"gzip"), (b"content-length", b"%d" % len(GZIP))], [GZIP]),
    ),
    Case("a compressed body of no length", request(), 200, answer(200, [(b"content-encoding", b"gzip")], [GZIP])),
    Case("HEAD with a length", request(b"HEAD"), 200, answer(200, [(b"content-length", b"12345")], ())),
    Case("HEAD without a length", request(b"HEAD"), 200, answer(200, (), ())),
    Case("HEAD with a body", request(b"HEAD"), 200, answer(200, [(b"content-length", b"4")], [b"seen"])),
    Case("HEAD with a body of no length", request(b"HEAD"), 200, answer(200, (), [b"seen", b"more"])),
    Case("HEAD with a redirect", request(b"HEAD"), 302, answer(302, [(b"location", b"/x")], ())),
    Case(
        "a start without a header list", request(), 200, sends({"type": "http.response.start", "status": 200}, body())
    ),
    Case("a body event without a body", request(), 200, sends(start(), {"type": "http.response.body"})),
    Case("headers as tuples", request(), 200, sends({**start(), "headers": ((b"x-a", b"1"), LENGTH_4)}, body(b"seen"))),
    Case(
        "headers as lists",
        request(),
        200,
        sends({**start(), "headers": [[b"x-a", b"1"], [b"content-length", b"4"]]}, body(b"seen")),
    ),
    Case("a body that is a memoryview", request(), 200, sends(start(200, LENGTH_4), body(memoryview(b"seen")))),  # type: ignore[arg-type]
    Case(
        "POST answered before its body is read",
        request(b"POST", b"/", b"Content-Length: 5", body=b"hello"),
        413,
        answer(413, [LENGTH_4, (b"connection", b"close")], read=False),
    ),
]

STARLETTE_APP = Starlette(routes=[Route("/page", page), Route("/broken", broken_page), Route("/pieces", pieces)])
STARLETTE = [
    Case(f"Starlette: {name}", request(target=target), status, STARLETTE_APP)
    for name, target, status in (
        ("a page", b"/page", 200),
        ("a streamed page", b"/pieces", 201),
        ("a page that is not there", b"/nowhere", 404),
        ("a redirect of its own", b"/page/", 307),
    )
]

FAILURES = [
    Case("the app raises", request(), 500, raises),
    Case("the app raises on POST with a body", request(b"POST", b"/", b"Content-Length: 3", body=b"abc"), 500, raises),
    Case("the app raises on HEAD", request(b"HEAD"), 500, raises),
    Case("the app raises on HTTP/1.0", request(version=b"HTTP/1.0"), 500, raises),
    Case("the app returns without a reply", request(), 500, returns_nothing),
    Case("the app raises after the start", request(), 200, raises_after_the_start),
    Case("the app raises in the body", request(), 200, raises_in_the_body),
    Case("the app raises in a body of known length", request(), 200, raises_in_a_body_of_known_length),
    Case("the app returns before the end of the body", request(), 200, sends(start(), body(b"some", more_body=True))),
    Case("the app returns after the start", request(), 200, sends(start(200, LENGTH_4))),
]

INVALID = [
    Case(name, request(method), 0, sends(*messages))
    for name, method, *messages in (
        ("a longer body than announced", b"GET", start(200, LENGTH_4), body(b"seen too much")),
        ("a longer body than announced in pieces", b"GET", start(200, LENGTH_4), body(b"seen", True), body(b"s")),
        ("a shorter body than announced", b"GET", start(200, LENGTH_4), body(b"se")),
        ("no body where one is announced", b"GET", start(200, LENGTH_4), body()),
        ("204 with a body", b"GET", start(204), body(b"seen")),
        ("204 with a length and a body", b"GET", start(204, LENGTH_4), body(b"seen")),
        ("304 with a body", b"GET", start(304), body(b"seen")),
        ("304 with a length", b"GET", start(304, LENGTH_4), body()),
        ("304 with a length and a body", b"GET", start(304, LENGTH_4), body(b"seen")),
        ("a length that is no number", b"GET", start(200, (b"content-length", b"abc")), body(b"seen")),
        ("two equal lengths", b"GET", start(200, LENGTH_4, LENGTH_4), body(b"seen")),
        ("two lengths", b"GET", start(200, LENGTH_4, (b"content-length", b"5")), body(b"seen")),
        ("a length and chunks", b"GET", start(200, LENGTH_4, (b"transfer-encoding", b"chunked")), body(b"seen")),
        ("chunks and a length", b"GET", start(200, (b"transfer-encoding", b"chunked"), LENGTH_4), body(b"seen")),
        ("a name with a space", b"GET", start(200, (b"x a", b"1"), LENGTH_4), body(b"seen")),
        ("an empty name", b"GET", start(200, (b"", b"1"), LENGTH_4), body(b"seen")),
        ("a name of no ASCII", b"GET", start(200, (b"x-\xe9", b"1"), LENGTH_4), body(b"seen")),
        ("a value with CR LF", b"GET", start(200, (b"x-a", b"1\r\nx-b: 2"), LENGTH_4), body(b"seen")),
        ("a value with NUL", b"GET", start(200, (b"x-a", b"\x00"), LENGTH_4), body(b"seen")),
        ("a value with DEL", b"GET", start(200, (b"x-a", b"\x7f"), LENGTH_4), body(b"seen")),
        ("a value padded outside", b"GET", start(200, (b"x-a", b"  1 "), LENGTH_4), body(b"seen")),
        ("a value of text", b"GET", start(200, (b"x-a", "1"), LENGTH_4), body(b"seen")),  # type: ignore[arg-type]
        ("a body of text", b"GET", start(200, LENGTH_4), body("seen")),  # type: ignore[arg-type]
        ("status 600", b"GET", start(600, LENGTH_4), body(b"seen")),
        ("status 103", b"GET", start(103, (b"link", b"</a>")), start(200, LENGTH_4), body(b"seen")),
        ("a status of text", b"GET", start("200", LENGTH_4), body(b"seen")),  # type: ignore[arg-type]
        ("a body before the start", b"GET", body(b"seen")),
        ("two starts", b"GET", start(200, LENGTH_4), start(200, LENGTH_4), body(b"seen")),
        ("an unknown event", b"GET", start(200, LENGTH_4), {"type": "http.response.foo"}),
        ("trailers", b"GET", {**start(), "trailers": True}, body(b"seen"), {"type": "http.response.trailers"}),
        ("more after the end", b"GET", start(200, LENGTH_4), body(b"seen"), body(b"more")),
        ("HEAD and more after the end", b"HEAD", start(200, LENGTH_4), body(b"seen"), body(b"more")),
    )
] + [
    # A body that is not framed ends with the connection.
    Case(
        "another transfer coding",
        request(b"GET", b"/", b"Connection: close"),
        0,
        sends(start(200, (b"transfer-encoding", b"gzip")), body(b"seen")),
    ),
]

# Where a forwarded reply is another one, and why it is right so.
AFTER_THE_END = (
    "The caller has its whole reply before the app fails. A stock server then closes the caller's connection without "
    "having said so; a forwarding worker has no reply left to break off, and keeps it."
)
NOT_BYTES = (
    "ASGI's headers are bytes, and what is none can't travel: the owner's server answers 500. A stock one breaks the "
    "connection off without a word (httptools) or lets it pass (h11)."
)
JOINED = (
    "The body is longer than the app announced. Pieces that follow one another at once travel as one, and uvicorn "
    "sends nothing of a piece that is too long: the caller sees a body that is cut short, where it would have seen "
    "the announced part. The connection is closed either way."
)
EXPECTED_DIFFERENCES = {
    "a longer body than announced in pieces": JOINED,
    "the app raises after the end": AFTER_THE_END,
    "Starlette: a page that raises": AFTER_THE_END,
    "more after the end": AFTER_THE_END,
    "HEAD and more after the end": AFTER_THE_END,
    "trailers": AFTER_THE_END,
    "a value of text": NOT_BYTES,
}
KEPT = [
    Case("the app raises after the end", request(), 200, raises_after_the_end),
    Case("Starlette: a page that raises", request(target=b"/broken"), 500, STARLETTE_APP),
    *(case for case in INVALID if EXPECTED_DIFFERENCES.get(case.name) == AFTER_THE_END),
]

CASES = STATUSES + FIELDS + BODIES + STARLETTE + FAILURES


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forwarded_reply_is_the_same_reply(pair: Pair, case: Case) -> None:
    direct, forwarded = pair.both_outcomes(case)
    assert direct.statuses == case.statuses(pair.configuration), "the case is not what its name says"
    assert [facts["app"] for facts in direct.seen] == ["app 1"]
    assert forwarded == direct


@pytest.mark.parametrize("case", [case for case in INVALID if case.name not in EXPECTED_DIFFERENCES], ids=str)
def test_forwarded_reply_that_breaks_the_rules_fares_the_same(pair: Pair, case: Case) -> None:
    direct, forwarded = pair.both_outcomes(case)
    assert [facts["app"] for facts in direct.seen] == ["app 1"]
    assert forwarded == direct


@pytest.mark.parametrize("case", KEPT, ids=str)
def test_connection_outlives_a_failure_after_the_end_of_a_forwarded_reply(pair: Pair, case: Case) -> None:
    assert EXPECTED_DIFFERENCES[case.name] == AFTER_THE_END
    direct, forwarded = pair.both_outcomes(case)
    assert not direct.kept
    assert forwarded == dataclasses.replace(direct, kept=True)


@pytest.mark.parametrize(
    "case", [case for case in INVALID if EXPECTED_DIFFERENCES.get(case.name) == NOT_BYTES], ids=str
)
def test_forwarded_reply_that_is_no_bytes_is_answered_with_500(pair: Pair, case: Case) -> None:
    direct, forwarded = pair.both_outcomes(case)
    assert direct.statuses == {"httptools": (0,), "h11": (200,)}[pair.configuration.http]
    assert (forwarded.statuses, forwarded.kept) == ((500,), False)
    assert forwarded.seen == direct.seen


@pytest.mark.parametrize("case", [case for case in INVALID if EXPECTED_DIFFERENCES.get(case.name) == JOINED], ids=str)
def test_forwarded_reply_that_is_too_long_is_cut_and_never_looks_whole(pair: Pair, case: Case) -> None:
    direct, forwarded = pair.both_outcomes(case)
    assert (direct.statuses, direct.kept) == (forwarded.statuses, forwarded.kept) == ((200,), False)
    assert forwarded.seen == direct.seen
    (reply,) = forwarded.replies
    assert reply.body in (b"", b"seen")
    assert reply.complete == (reply.body == b"seen")


# Replies and time


def test_background_task_runs_to_its_end_when_the_caller_has_its_reply_and_has_gone(plain_pair: Pair) -> None:
    for worker in plain_pair.ways:
        gate, ended = Gate(plain_pair), queue.SimpleQueue[str]()

        async def task(gate: Gate = gate, ended: queue.SimpleQueue[str] = ended) -> None:
            await gate.wait()
            ended.put("ended")

        (seen,) = _one_call(plain_pair, PlainTextResponse("seen", background=BackgroundTask(task)), worker)
        assert seen.ended is None, "the task ended before the caller had left"
        gate.open()
        assert ended.get(timeout=PATIENCE) == "ended"
        handlers_end([seen])
        assert seen.ended == "returned"
        plain_pair.nothing_is_left()


def _one_call(pair: Pair, handler: ASGIApp, worker: Worker) -> list[Seen]:
    seen = pair.begin(handler)
    with pair.connect(worker) as connection:
        connection.send(request())
        assert connection.reply().body == b"seen"
    return seen


def test_background_task_that_raises_harms_no_other_callers_request(plain_pair: Pair) -> None:
    pair = plain_pair
    gates = {b"/raises": Gate(pair), b"/waits": Gate(pair)}

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["raw_path"] == b"/raises":
            await answer()(scope, receive, send)
            await gates[b"/raises"].wait()
            raise ValueError("the background task raises")
        await gates[b"/waits"].wait()
        await answer()(scope, receive, send)

    seen = pair.begin(handler)
    with pair.connect(pair.other) as first, pair.connect(pair.other) as second:
        first.send(request(target=b"/raises"))
        assert first.reply().status == 200
        second.send(request(target=b"/waits"))
        eventually(lambda: len(seen) == 2, "the second request at the owner")
        gates[b"/raises"].open()
        eventually(lambda: seen[0].ended == "ValueError", "the end of the background task")
        gates[b"/waits"].open()
        assert second.reply().status == 200


def test_app_that_raises_after_its_reply_harms_no_later_request(plain_pair: Pair) -> None:
    plain_pair.begin(STARLETTE_APP)
    with plain_pair.connect(plain_pair.other) as connection:
        connection.send((request(target=b"/broken") + request(target=b"/page")) * 20)
        assert [connection.reply().status for _ in range(40)] == [500, 200] * 20


def test_event_is_with_the_caller_before_the_next_one_is_made(pair: Pair) -> None:
    event = b"data: 12-byte text\n\n"
    assert len(event) == 20
    for worker in pair.ways:
        asked: asyncio.Queue[None] = asyncio.Queue()

        async def handler(scope: Scope, receive: Receive, send: Send, asked: asyncio.Queue[None] = asked) -> None:
            await send(start(200, (b"content-type", b"text/event-stream")))
            for _ in range(10):
                await asked.get()
                await send(body(event, more_body=True))
            await send(body())

        pair.begin(handler)
        with pair.connect(worker) as connection:
            connection.send(request(b"GET", b"/", b"Accept: text/event-stream"))
            assert connection.head().status == 200
            for _ in range(10):
                pair.loop.call_soon_threadsafe(asked.put_nowait, None)
                assert connection.read(26) == b"14\r\n" + event + b"\r\n"
            assert connection.read(5) == b"0\r\n\r\n"


LENGTH_5 = (b"Content-Length: 5", b"hello")
CHUNKED = (b"Transfer-Encoding: chunked", b"5\r\nhello\r\n0\r\n\r\n")


@pytest.mark.parametrize(("framing", "rest"), [LENGTH_5, CHUNKED], ids=["length", "chunked"])
def test_caller_that_has_sent_only_the_head_gets_its_reply(pair: Pair, framing: bytes, rest: bytes) -> None:
    outcomes = []
    for worker in pair.ways:
        seen = pair.begin(answer(413, read=False))
        with pair.connect(worker) as connection:
            connection.send(request(b"POST", b"/", framing))
            reply = connection.reply()
            connection.send(rest)
            outcomes.append((reply, connection.is_kept(), pair.facts(seen, connection)))
    assert outcomes[0][0].status == 413
    assert outcomes[1] == outcomes[0]


def test_many_early_replies_leave_nothing_that_harms_the_next_request(plain_pair: Pair) -> None:
    pair = plain_pair
    for number in range(20):
        pair.begin(answer(413, read=False))
        with pair.connect(pair.other) as connection:
            connection.send(request(b"POST", b"/", CHUNKED[0]) + b"5\r\nhello\r\n")
            assert connection.reply().status == 413
        assert pair.outcome(Case("the next", request(target=b"/%d" % number)), pair.other).statuses == (200,)
    pair.nothing_is_left()


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 8388608", b"Transfer-Encoding: chunked"], ids=["length", "chunked"]
)
def test_large_upload_that_is_never_read_gets_its_reply(plain_pair: Pair, framing: bytes) -> None:
    outcomes: list[tuple[Reply, bool]] = []
    content = bytes(2**23)
    if b"chunked" in framing:
        content = b"800000\r\n" + content + b"\r\n0\r\n\r\n"
    for worker in plain_pair.ways:
        plain_pair.begin(answer(413, read=False))
        with plain_pair.connect(worker) as connection:
            connection.send(request(b"POST", b"/", framing))
            connection.send_as_taken(content)
            outcomes.append((connection.reply(), connection.is_kept()))
    assert outcomes[0][0].status == 413
    assert outcomes[1] == outcomes[0]
    plain_pair.nothing_is_left()
