"""Requests that two readers may cut differently: the same verdict forwarded as direct, and nobody else gets the rest.

Each case is sent once to the owner and once to the other worker. Behind the doubtful request come
one that a smuggler hides, two honest ones of which one has no session, and one that closes. Whatever
a reader makes of lengths and chunks, it comes to an end within these bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.difference.exchange import COOKIE, Pair, eventually, handlers_call, request
from tests.hostile.test_sibling_fields import HEAD
from tests.hostile.verdicts import echo, echoing_pair, forwards, private_requests, verdict, victims_are_answered

CHUNKED = b"Transfer-Encoding: chunked"
HIDDEN = request(b"GET", b"/hidden")
END = (
    request(b"GET", b"/after/1")
    + b"GET /after/2 HTTP/1.1\r\nHost: x\r\n\r\n"
    + request(b"GET", b"/after/3", b"Connection: close") * 3
)


def doubtful(*fields: bytes, body: bytes = b"", version: bytes = b"HTTP/1.1", method: bytes = b"POST") -> bytes:
    return request(method, b"/first", *fields, body=body, version=version) + HIDDEN + END


def raw(text: bytes, *, then: bytes = HIDDEN + END) -> bytes:
    """Return bytes written out as they are; LF is not made CR LF."""
    return text + then


LENGTH_5, LENGTH_50 = b"Content-Length: 5", b"Content-Length: 50"
ONE_CHUNK = b"5\r\nhello\r\n0\r\n\r\n"
COOKIE_LINE = b"Cookie: " + COOKIE + b"\r\n"

LENGTHS: dict[str, bytes] = {
    "length, then chunks": doubtful(LENGTH_5, CHUNKED, body=b"0\r\n\r\n"),
    "chunks, then length": doubtful(CHUNKED, LENGTH_5, body=b"0\r\n\r\n"),
    "length over the hidden one, and chunks": doubtful(LENGTH_50, CHUNKED, body=b"0\r\n\r\n"),
    "length 0 and chunks": doubtful(b"Content-Length: 0", CHUNKED, body=ONE_CHUNK),
    "length and chunks in HTTP/1.0": doubtful(LENGTH_5, CHUNKED, body=b"0\r\n\r\n", version=b"HTTP/1.0"),
    "chunks in HTTP/1.0": doubtful(CHUNKED, body=ONE_CHUNK, version=b"HTTP/1.0"),
    "two lengths": doubtful(LENGTH_5, LENGTH_50, body=b"hello"),
    "two lengths, the longer first": doubtful(LENGTH_50, LENGTH_5, body=b"hello"),
    "two equal lengths": doubtful(LENGTH_5, LENGTH_5, body=b"hello"),
    "list of equal lengths": doubtful(b"Content-Length: 5, 5", body=b"hello"),
    "list of lengths": doubtful(b"Content-Length: 5, 50", body=b"hello"),
    "length in hexadecimal": doubtful(b"Content-Length: 0x5", body=b"hello"),
    "length with an underscore": doubtful(b"Content-Length: 1_0", body=b"helloworld"),
    "length with a plus": doubtful(b"Content-Length: +5", body=b"hello"),
    "length with a minus": doubtful(b"Content-Length: -5", body=b"hello"),
    "length with a space in it": doubtful(b"Content-Length: 5 0", body=b"hello"),
    "length in fullwidth digits": doubtful("Content-Length: \N{FULLWIDTH DIGIT FIVE}".encode(), body=b"hello"),
    "length of 100 digits": doubtful(b"Content-Length: " + b"9" * 100, body=b"hello"),
    "length with zeros before it": doubtful(b"Content-Length: 0000000005", body=b"hello"),
    "empty length": doubtful(b"Content-Length:", body=b"hello"),
    "length with a vertical tab": doubtful(b"Content-Length: \x0b5", body=b"hello"),
    "length after a space before the colon": doubtful(b"Content-Length : 5", body=b"hello"),
    "length of a GET": doubtful(LENGTH_5, body=b"hello", method=b"GET"),
    "length that covers the hidden one": doubtful(b"Content-Length: %d" % len(HIDDEN), method=b"GET"),
    "length named by Connection": doubtful(LENGTH_5, b"Connection: content-length", body=b"hello"),
    "length with an underscore in its name": doubtful(b"Content_Length: 5"),
}

CODINGS: dict[str, bytes] = {
    f"coding {name}": doubtful(*fields, LENGTH_5, body=b"0\r\n\r\n")
    for name, fields in {
        "in capitals": (b"TRANSFER-ENCODING: CHUNKED",),
        "after a tab": (b"Transfer-Encoding:\tchunked",),
        "after a vertical tab": (b"Transfer-Encoding: \x0bchunked",),
        "after a space before the colon": (b"Transfer-Encoding : chunked",),
        "in quotes": (b'Transfer-Encoding: "chunked"',),
        "with a parameter": (b"Transfer-Encoding: chunked;q=1",),
        "misspelt": (b"Transfer-Encoding: xchunked",),
        "chunked twice": (b"Transfer-Encoding: chunked, chunked",),
        "chunked, then identity": (b"Transfer-Encoding: chunked, identity",),
        "identity, then chunked": (b"Transfer-Encoding: identity, chunked",),
        "identity": (b"Transfer-Encoding: identity",),
        "chunked in two fields": (CHUNKED, CHUNKED),
        "chunked and nonsense in two fields": (CHUNKED, b"Transfer-Encoding: cow"),
        "nonsense and chunked in two fields": (b"Transfer-Encoding: cow", CHUNKED),
        "empty": (b"Transfer-Encoding:",),
        "with a comma before it": (b"Transfer-Encoding: ,chunked",),
        "with a comma after it": (b"Transfer-Encoding: chunked,",),
        "folded": (b"Transfer-Encoding:", b" chunked"),
        "folded into another field": (b"X-A: a", b" Transfer-Encoding: chunked"),
        "after a bare CR": (b"X-A: a\rTransfer-Encoding: chunked",),
        "after a bare LF": (b"X-A: a\nTransfer-Encoding: chunked",),
        "with NUL": (b"Transfer-Encoding: chunked\0",),
        "with a byte of Latin-1": (b"Transfer-Encoding: chunked\xa0",),
        "with an underscore in its name": (b"Transfer_Encoding: chunked",),
        "in the field TE": (b"TE: chunked",),
        "named by Connection": (CHUNKED, b"Connection: transfer-encoding"),
    }.items()
}

CHUNKS: dict[str, bytes] = {
    f"chunk {name}": doubtful(CHUNKED, body=body)
    for name, body in {
        "of a size with 0x": b"0x5\r\nhello\r\n0\r\n\r\n",
        "of a size with a plus": b"+5\r\nhello\r\n0\r\n\r\n",
        "of a size with a minus": b"-5\r\nhello\r\n0\r\n\r\n",
        "of a size with an underscore": b"0_5\r\nhello\r\n0\r\n\r\n",
        "of a size with a space before it": b" 5\r\nhello\r\n0\r\n\r\n",
        "of a size with a space after it": b"5 \r\nhello\r\n0\r\n\r\n",
        "of a size with a tab after it": b"5\t\r\nhello\r\n0\r\n\r\n",
        "of a size with zeros before it": b"0000000005\r\nhello\r\n0\r\n\r\n",
        "of a size of 100 digits": b"f" * 100 + b"\r\nhello\r\n0\r\n\r\n",
        "of no size": b"\r\nhello\r\n0\r\n\r\n",
        "of a size in letters": b"five\r\nhello\r\n0\r\n\r\n",
        "shorter than its data": b"3\r\nhello\r\n0\r\n\r\n",
        "longer than its data": b"7\r\nhello\r\n0\r\n\r\n",
        "with nothing after its data": b"5\r\nhello0\r\n\r\n",
        "with LF alone after its size": b"5\nhello\r\n0\r\n\r\n",
        "with LF alone after its data": b"5\r\nhello\n0\r\n\r\n",
        "with CR alone after its size": b"5\rhello\r\n0\r\n\r\n",
        "with CR alone after its data": b"5\r\nhello\r0\r\n\r\n",
        "with LF alone everywhere": b"5\nhello\n0\n\n",
        "that is the last, with LF alone": b"5\r\nhello\r\n0\n\n",
        "with an extension": b"5;a=b\r\nhello\r\n0;c\r\n\r\n",
        "with an extension that has a bare LF": b"5;a\nb\r\nhello\r\n0\r\n\r\n",
        "with an extension that has a bare CR": b"5;a\rb\r\nhello\r\n0\r\n\r\n",
        "with an extension that looks like a size": b"5;\r\nhello\r\n0;5\r\n\r\n",
        "with an extension of 4 KiB": b"5;" + b"a" * 4096 + b"\r\nhello\r\n0\r\n\r\n",
        "with a trailer": b"5\r\nhello\r\n0\r\nX-T: 1\r\n\r\n",
        "with trailers that decide": b"0\r\nContent-Length: 50\r\nTransfer-Encoding: chunked\r\nHost: y\r\n\r\n",
        "with a trailer that is a cookie": b"0\r\nCookie: session=x\r\n\r\n",
        "with a trailer of a sibling": b"0\r\ngym-gunicorn-head: " + HEAD + b"\r\n\r\n",
        "with a trailer that is folded": b"0\r\nX-T: 1\r\n 2\r\n\r\n",
        "with a trailer that is no field": b"0\r\nnothing\r\n\r\n",
        "with a request in the place of a trailer": b"0\r\nGET /hidden HTTP/1.1\r\nHost: x\r\n\r\n",
        "that is missing": b"",
    }.items()
}

LINES: dict[str, bytes] = {
    "LF alone after every line": raw(b"GET /first HTTP/1.1\nHost: x\n" + COOKIE_LINE.replace(b"\r\n", b"\n") + b"\n"),
    "LF alone after the request line": raw(b"GET /first HTTP/1.1\nHost: x\r\n" + COOKIE_LINE + b"\r\n"),
    "LF alone at the end of the head": raw(b"GET /first HTTP/1.1\r\nHost: x\r\n" + COOKIE_LINE + b"\n"),
    "CR alone after the request line": raw(b"GET /first HTTP/1.1\rHost: x\r\n" + COOKIE_LINE + b"\r\n"),
    "CR alone at the end of the head": raw(b"GET /first HTTP/1.1\r\nHost: x\r\n" + COOKIE_LINE + b"\r"),
    "CR CR LF": raw(b"GET /first HTTP/1.1\r\r\nHost: x\r\n" + COOKIE_LINE + b"\r\n"),
    "a head that ends twice": raw(b"GET /first HTTP/1.1\r\nHost: x\r\n" + COOKIE_LINE + b"\r\n\r\n\r\n"),
    "a request hidden behind a bare LF": doubtful(b"X-A: a\n\nGET /hidden HTTP/1.1"),
    "a request hidden behind a bare CR": doubtful(b"X-A: a\r\rGET /hidden HTTP/1.1"),
    "a request line in a folded line": doubtful(b"X-A: a", b" GET /hidden HTTP/1.1"),
    "a cookie that is folded": raw(b"GET /first HTTP/1.1\r\nHost: x\r\nCookie:\r\n " + COOKIE + b"\r\n\r\n"),
    "a cookie behind a bare LF": raw(b"GET /first HTTP/1.1\r\nHost: x\r\nX-A: a\n" + COOKIE_LINE + b"\r\n"),
    "a cookie behind a bare CR": raw(b"GET /first HTTP/1.1\r\nHost: x\r\nX-A: a\r" + COOKIE_LINE + b"\r\n"),
    "a folded line before every field": raw(b"GET /first HTTP/1.1\r\n Host: x\r\n" + COOKIE_LINE + b"\r\n"),
    "a fold that is empty": doubtful(b"X-A: a", b" ", b"X-B: b"),
    "a fold with a tab": doubtful(b"X-A: a", b"\tb"),
    "a field with no name": doubtful(b": a"),
    "a field with a space in its name": doubtful(b"X A: a"),
    "spaces in the request line": raw(b"GET  /first  HTTP/1.1\r\nHost: x\r\n" + COOKIE_LINE + b"\r\n"),
    "a tab in the request line": raw(b"GET\t/first\tHTTP/1.1\r\nHost: x\r\n" + COOKIE_LINE + b"\r\n"),
    "a space before the request line": raw(b" GET /first HTTP/1.1\r\nHost: x\r\n" + COOKIE_LINE + b"\r\n"),
    "two requests' lines": raw(b"GET /first HTTP/1.1\r\nGET /hidden HTTP/1.1\r\nHost: x\r\n" + COOKIE_LINE + b"\r\n"),
    "a line of HTTP/0.9": raw(b"GET /first\r\n"),
    "a line of HTTP/2": raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "a reply in the place of a request": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
    "two hosts": doubtful(b"Host: y", LENGTH_5, body=b"hello"),
}

UPGRADES: dict[str, bytes] = {
    "100 Continue that nobody waits for": doubtful(b"Expect: 100-continue", LENGTH_5, body=b"hello"),
    "100 Continue and chunks": doubtful(b"Expect: 100-continue", CHUNKED, body=ONE_CHUNK),
    "an expectation that nobody knows": doubtful(b"Expect: 200-ok", LENGTH_5, body=b"hello"),
    "an upgrade to a WebSocket that is none": doubtful(b"Upgrade: websocket", b"Connection: Upgrade", method=b"GET"),
}

CASES = {**LENGTHS, **CODINGS, **CHUNKS, **LINES, **UPGRADES}

# Lengths that wrap to 5 in a counter of 64 bits. h11 counts on, and waits for the rest.
ENDLESS: dict[str, bytes] = {
    "length of 2**64 + 5": doubtful(b"Content-Length: %d" % (2**64 + 5), body=b"hello"),
    "chunk of 2**64 + 5": doubtful(CHUNKED, body=b"%x" % (2**64 + 5) + b"\r\nhello\r\n0\r\n\r\n"),
}

# What a reader stops at, before the bytes behind it.
REFUSED = 400


@pytest.fixture(scope="module", params=["httptools", "h11"])
def workers(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A pair of workers for each protocol."""
    with echoing_pair(request.param) as pair:
        yield pair


@pytest.mark.parametrize("name", CASES)
def test_doubtful_request_gets_the_same_verdict_forwarded_as_direct(workers: Pair, name: str) -> None:
    direct = verdict(workers, workers.owner, CASES[name])
    forwarded = verdict(workers, workers.other, CASES[name])
    assert forwarded == direct
    # Whether it was refused, or cut into requests: the connection ended where it should.
    *before, last = direct.statuses
    assert set(before) <= {200}
    assert direct.is_whole
    assert last == REFUSED or direct.targets[-1] == ("/first" if "in HTTP/1.0" in name else "/after/3")


@pytest.mark.parametrize("name", CASES)
def test_rest_of_a_doubtful_request_never_gets_to_anybody_else(workers: Pair, name: str) -> None:
    private, passed_on = private_requests(workers), forwards(workers)
    for _ in range(2):
        verdict(workers, workers.other, CASES[name])
        victims_are_answered(workers, "of-" + name.replace(" ", "-").replace(",", "").replace("*", "-"))
    workers.nothing_is_left()
    # Nothing came over the connections between the workers that was not passed on as a request.
    eventually(lambda: private_requests(workers) - private <= forwards(workers) - passed_on, "the last count")


@pytest.mark.parametrize("name", ENDLESS)
def test_body_of_a_length_that_no_counter_holds_is_refused_or_waited_for_and_held_by_nobody(
    workers: Pair, name: str
) -> None:
    for worker in workers.ways:
        seen = workers.begin(echo)
        with workers.connect(worker) as connection:
            connection.send(ENDLESS[name])
            if workers.configuration.http == "httptools":
                assert connection.reply().status == REFUSED
            else:
                handlers_call(seen)
                victims_are_answered(workers, "meanwhile")
        victims_are_answered(workers, "afterwards")
        workers.nothing_is_left()
        assert not any(one.complete for one in seen if one.scope["raw_path"] == b"/first")


def test_cases_are_refused_by_some_readers_and_cut_into_requests_by_others(workers: Pair) -> None:
    verdicts = {name: verdict(workers, workers.other, data) for name, data in CASES.items()}
    refused = {name for name, one in verdicts.items() if REFUSED in one.statuses}
    hidden = {name for name, one in verdicts.items() if "/hidden" in one.targets}
    assert len(refused) > 30
    assert len(hidden) > 10
