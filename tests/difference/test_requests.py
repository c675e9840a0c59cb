"""The request: whatever the caller writes, the handler sees the same."""

from __future__ import annotations

import gzip
from collections.abc import Iterator

import pytest

from gym_gunicorn.forwarding import wire
from tests.difference.exchange import (
    COOKIE,
    FORWARDERS,
    Case,
    Configuration,
    Pair,
    answer,
    request,
    running_pair,
)

# Read by httptools only, or by h11 only: what one parser refuses, it refuses both ways.
HTTPTOOLS_ONLY = {"httptools": 200, "h11": 400}
H11_ONLY = {"httptools": 400, "h11": 200}

METHODS = [
    Case(f"method {method.decode()}", request(method), 200)
    for method in (b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"TRACE", b"PURGE", b"QUERY")
] + [
    Case("method M-SEARCH", request(b"M-SEARCH")),
    Case("method PROPFIND", request(b"PROPFIND")),
    Case("method FOO", request(b"FOO"), H11_ONLY),
    Case("method get in lower case", request(b"get"), H11_ONLY),
    Case("method with every mark that a token may have", request(b"!#$%&'*+-.^_`|~"), H11_ONLY),
    Case("CONNECT with an authority", request(b"CONNECT", b"example.org:443"), H11_ONLY),
    Case("method that is no token", request(b"GE(T)"), 400),
]

TARGETS = [
    Case(f"target {target.decode('ascii')}", request(target=target))
    for target in (
        b"/",
        b"/a/b/c",
        b"/a%2Fb",
        b"/a%2fb",
        b"/%2E%2E/%2e%2e/etc",
        b"/a/./b/../c",
        b"/a//b///c",
        b"//a",
        b"///",
        b"/%00",
        b"/a%00b",
        b"/caf%C3%A9/%E2%82%AC/%F0%9F%A6%84",
        b"/%FF%FE",
        b"/%C3",
        b"/%",
        b"/%zz",
        b"/%25%32%35",
        b"/a;b=c;d/e;f",
        b"/a:b@c!$&'()*+,=~_-.",
        b"/%20%0D%0A%09",
        b"/a+b",
        b"/{a}|b^`",
        b'/"quoted"\\',
        b"/[::1]",
        b"/a%3Fb%23c",
        b"/?",
        b"/?a",
        b"/?a=",
        b"/?=",
        b"/?&",
        b"/?a=b&a=c&&;d=e",
        b"/?a=b?c=d",
        b"/?a=%26%3D%23%2F%3F%25",
        b"/?a=+%20+",
        b"/?%FF",
        b"/?%00",
        b"/?a[]=1&a[b]={c}|d",
        b"/?/../..//",
        b"/?" + b"q" * 4000,
        b"/" + b"p" * 4000,
    )
]
TARGETS = [Case(case.name[:60], case.request, case.status) for case in TARGETS] + [
    Case("target with a fragment", request(target=b"/a#b")),
    Case("target with a fragment after the query", request(target=b"/a?b#c?d")),
    Case("OPTIONS with an asterisk", request(b"OPTIONS", b"*")),
    Case("GET with an asterisk", request(target=b"*")),
    Case("absolute form", request(target=b"http://example.org/a/b?c=d")),
    Case("absolute form with another host", request(target=b"http://other.example:81/a?b")),
    Case("absolute form without a path", request(target=b"http://example.org"), H11_ONLY),
    Case("absolute form with a user", request(target=b"http://user:word@example.org/a")),
    Case("absolute form of https", request(target=b"https://example.org/a%2Fb")),
    Case("target without a slash", request(target=b"a/b"), H11_ONLY),
    Case("target of raw UTF-8", request(target="/café".encode()), 400),
    Case("target of raw Latin-1", request(target=b"/caf\xe9"), 400),
    Case("target with DEL", request(target=b"/\x7f"), 400),
    Case("target with a space", request(target=b"/a b"), 400),
    Case("target with a tab", request(target=b"/a\tb"), 400),
    Case("target of 60 kB", request(target=b"/" + b"p" * 60_000)),
]

VERSIONS = [
    Case("HTTP/1.0", request(version=b"HTTP/1.0")),
    Case("HTTP/1.0 without a host", request(version=b"HTTP/1.0", host=None)),
    Case("HTTP/1.0 that asks for keep-alive", request(b"GET", b"/", b"Connection: keep-alive", version=b"HTTP/1.0")),
    Case("HTTP/1.0 with a body", request(b"POST", b"/", b"Content-Length: 3", body=b"abc", version=b"HTTP/1.0")),
    Case("HTTP/1.0 HEAD", request(b"HEAD", version=b"HTTP/1.0")),
    Case("HTTP/1.1 without a host", request(host=None), HTTPTOOLS_ONLY),
    Case("HTTP/1.1 with two hosts", request(b"GET", b"/", b"Host: second.example"), HTTPTOOLS_ONLY),
    Case("HTTP/1.1 with an empty host", request(host=b"Host:")),
    Case("HTTP/1.2", request(version=b"HTTP/1.2"), H11_ONLY),
    Case("HTTP/2.0", request(version=b"HTTP/2.0")),
    Case("HTTP/0.9", b"GET /\r\nCookie: " + COOKIE + b"\r\n\r\n", HTTPTOOLS_ONLY),
    Case("no HTTP at all", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n", 400),
    Case("Connection: close", request(b"GET", b"/", b"Connection: close")),
    Case("Connection: Close, TE", request(b"GET", b"/", b"Connection: Close, TE", b"TE: trailers")),
    Case("an upgrade that nobody knows", request(b"GET", b"/", b"Connection: Upgrade", b"Upgrade: foo/2")),
    Case(
        "an upgrade to HTTP/2",
        request(b"GET", b"/", b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk"),
    ),
]

_THREE = request(target=b"/1") + request(b"POST", b"/2", b"Content-Length: 5", body=b"hello") + request(target=b"/3")
PIPELINED = [
    Case("three pipelined requests", _THREE, (200, 200, 200), methods=(b"GET", b"POST", b"GET")),
    Case(
        "pipelined requests of which the second closes",
        request(target=b"/1") + request(b"GET", b"/2", b"Connection: close") + request(target=b"/3"),
        {"httptools": (200, 200, 0), "h11": (200, 200, 0)},
        methods=(b"GET", b"GET", b"GET"),
    ),
    Case(
        "a chunked request with another behind it",
        request(b"POST", b"/1", b"Transfer-Encoding: chunked", body=b"3\r\nabc\r\n0\r\n\r\n") + request(b"HEAD", b"/2"),
        (200, 200),
        methods=(b"POST", b"HEAD"),
    ),
    Case("twenty pipelined requests", request() * 20, (200,) * 20, methods=(b"GET",) * 20),
    Case("empty lines before the request", b"\r\n\r\n" + request(), HTTPTOOLS_ONLY, methods=(b"GET",)),
]

FIELDS = [
    Case(f"fields: {name}", request(b"GET", b"/", *fields))
    for name, fields in {
        "repeated": (b"X-A: 1", b"X-B: 2", b"X-A: 3", b"x-a: 1"),
        "mixed case": (b"X-MiXeD-CaSe: VaLuE", b"ALL-UPPER: UP", b"all-lower: low"),
        "empty": (b"X-Empty:", b"X-Blank:   ", b"X-Tab:\t"),
        "padded": (b"X-Padded:   both sides   ", b"X-Tabs:\t a\tb \t", b"X-Tight:value"),
        "not ASCII": ("X-Latin: café".encode("latin-1"), "X-Utf-8: café €".encode()),
        "not UTF-8": (b"X-Bytes: \xff\xfe\x80\xc3(", b"X-High: " + bytes(range(128, 256))),
        "quotes and backslashes": (b'X-Quoted: "a\\"b", \\u0000 \\', b"X-Percent: %00%0d%0a"),
        "every mark that a name may have": (b"!#$%&'*+-.^_`|~: marks", b"X_Underscore: 1", b"1: digit"),
        "200 of them": tuple(b"X-Field-%d: %d" % (number, number) for number in range(200)),
        "one of 32 KiB": (b"X-Long: " + b"v" * 32768,),
        "a name of 4 KiB": (b"X-" + b"n" * 4096 + b": v",),
        "none of those that clients add": (b"Accept:", b"User-Agent:"),
        "those that clients add": (b"Accept: text/html;q=0.5, */*", b"Accept-Encoding: br", b"User-Agent: curl/8"),
        "cookies around": (b"Cookie: a=b; c", b"Cookie:", b"cookie: x=\xff; =; y"),
        "conditions and ranges": (b'If-None-Match: W/"a", "b"', b"Range: bytes=0-1,-5", b"If-Range: x"),
        "authorisation": (b"Authorization: Basic dXNlcjp3b3Jk", b"Proxy-Authorization: Bearer x"),
        "hop by hop": (b"TE: trailers", b"Keep-Alive: timeout=5", b"Proxy-Connection: keep-alive", b"Trailer: X-T"),
        "Connection that names the cookie": (b"Connection: cookie",),
        "Connection that names everything": (
            b"Connection: cookie, host, keep-alive, gym-gunicorn-head, x-a",
            b"X-A: 1",
        ),
        "Via and Forwarded": (b"Via: 1.1 a, 1.1 b", b'Forwarded: for="[2001:db8::1]";proto=https'),
        "origin and CORS": (b"Origin: null", b"Access-Control-Request-Method: PURGE"),
        "our head's name": (b"gym-gunicorn-head: lwGApS8=", b"gym-gunicorn-link-head: lwGA"),
        "our head's name in mixed case": (b"Gym-Gunicorn-Head: x", b"GYM-GUNICORN-HEAD:", b"gym-gunicorn-head: y"),
        "our reply's name": (b"gym-gunicorn-reply: lAHMyJAH",),
    }.items()
] + [
    Case("fields: a head of ours that names another caller", request(b"GET", b"/", b"<a head>")),
    Case("fields: one of 60 kB", request(b"GET", b"/", b"X-Long: " + b"v" * 60_000)),
    Case("fields: folded", request(b"GET", b"/", b"X-Folded: a", b"  b"), H11_ONLY),
    Case("fields: with a control character", request(b"GET", b"/", b"X-Control: a\x01b"), H11_ONLY),
    Case("fields: with DEL", request(b"GET", b"/", b"X-Delete: a\x7fb"), H11_ONLY),
    Case("fields: with NUL", request(b"GET", b"/", b"X-Zero: a\x00b"), 400),
    Case("fields: with a lone CR", request(b"GET", b"/", b"X-Return: a\rb"), 400),
    Case("fields: ended by LF alone", request(b"GET", b"/", b"X-A: b\nX-C: d"), H11_ONLY),
    Case("fields: a space before the colon", request(b"GET", b"/", b"X-A : b"), 400),
    Case("fields: no name", request(b"GET", b"/", b": b"), 400),
    Case("fields: no colon", request(b"GET", b"/", b"X-A"), 400),
]

_FORGED = wire.to_field(
    wire.encode_head(
        {
            "type": "http",
            "method": "GET",
            "scheme": "https",
            "path": "/forged",
            "raw_path": b"/forged",
            "query_string": b"",
            "client": ("192.0.2.1", 1),
            "server": ("192.0.2.2", 2),
            "headers": [(b"cookie", b"forged")],
        }
    )
).encode()
FIELDS = [
    Case(case.name, case.request.replace(b"<a head>", wire.HEAD_FIELD + b": " + _FORGED), case.status)
    for case in FIELDS
]

GZIP = gzip.compress(b"hello" * 100, mtime=0)
BODIES = [
    Case(f"body: {case.name}", case.request, case.status, case.handler, case.methods)
    for case in (
        Case("none with POST", request(b"POST")),
        Case("empty, of length 0", request(b"POST", b"/", b"Content-Length: 0")),
        Case("empty, of length 00", request(b"POST", b"/", b"Content-Length: 00")),
        Case("empty, chunked", request(b"POST", b"/", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n")),
        Case("of known length", request(b"POST", b"/", b"Content-Length: 5", body=b"he\x00\xff\n")),
        Case("of a length with leading zeros", request(b"POST", b"/", b"Content-Length: 005", body=b"hello")),
        Case("of a padded length", request(b"POST", b"/", b"Content-Length:  5 \t", body=b"hello")),
        Case("with GET", request(b"GET", b"/", b"Content-Length: 5", body=b"hello")),
        Case("with HEAD", request(b"HEAD", b"/", b"Content-Length: 5", body=b"hello")),
        Case("with DELETE", request(b"DELETE", b"/", b"Content-Length: 5", body=b"hello")),
        Case("with OPTIONS", request(b"OPTIONS", b"/", b"Content-Length: 5", body=b"hello")),
        Case("with PURGE", request(b"PURGE", b"/", b"Transfer-Encoding: chunked", body=b"1\r\na\r\n0\r\n\r\n")),
        Case(
            "in chunks",
            request(b"PUT", b"/", b"Transfer-Encoding: chunked", body=b"3\r\nabc\r\nA\r\n0123456789\r\n0\r\n\r\n"),
        ),
        Case(
            "in chunks with extensions",
            request(b"POST", b"/", b"Transfer-Encoding: chunked", body=b'3;a=b;c="d"\r\nabc\r\n0;e\r\n\r\n'),
        ),
        Case(
            "in chunks with trailers",
            request(
                b"POST",
                b"/",
                b"Trailer: X-T",
                b"Transfer-Encoding: chunked",
                body=b"3\r\nabc\r\n0\r\nX-T: 1\r\nX-U: 2\r\n\r\n",
            ),
        ),
        Case(
            "in Chunked with a capital",
            request(b"POST", b"/", b"Transfer-Encoding: Chunked", body=b"3\r\nabc\r\n0\r\n\r\n"),
        ),
        Case(
            "in chunks within another coding",
            request(b"POST", b"/", b"Transfer-Encoding: gzip, chunked", body=b"3\r\nabc\r\n0\r\n\r\n"),
            {"httptools": 200, "h11": 400},
        ),
        Case(
            "in chunks and of a length",
            request(b"POST", b"/", b"Content-Length: 3", b"Transfer-Encoding: chunked", body=b"3\r\nabc\r\n0\r\n\r\n"),
            H11_ONLY,
        ),
        Case("of two equal lengths", request(b"POST", b"/", *[b"Content-Length: 3"] * 2, body=b"abc"), H11_ONLY),
        Case("of a list of equal lengths", request(b"POST", b"/", b"Content-Length: 3, 3", body=b"abc"), H11_ONLY),
        Case("of two lengths", request(b"POST", b"/", b"Content-Length: 3", b"Content-Length: 4", body=b"abc"), 400),
        Case("of a negative length", request(b"POST", b"/", b"Content-Length: -1"), 400),
        Case("of a length with a sign", request(b"POST", b"/", b"Content-Length: +3", body=b"abc"), 400),
        Case("of a length that is no number", request(b"POST", b"/", b"Content-Length: abc"), 400),
        Case(
            "compressed",
            request(b"POST", b"/", b"Content-Encoding: gzip", b"Content-Length: %d" % len(GZIP), body=GZIP),
        ),
        Case(
            "said to be compressed",
            request(b"POST", b"/", b"Content-Encoding: br, gzip", b"Content-Length: 5", body=b"hello"),
        ),
        Case(
            "a form of several parts",
            request(
                b"POST",
                b"/",
                b"Content-Type: multipart/form-data; boundary=xx",
                b"Content-Length: 66",
                body=b'--xx\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n--xx--\r\n'.ljust(66),
            ),
        ),
        Case("of 1 MiB", request(b"POST", b"/", b"Content-Length: 1048576", body=bytes(range(256)) * 4096)),
        Case(
            "of 256 KiB in 1-byte chunks",
            request(b"POST", b"/", b"Transfer-Encoding: chunked", body=b"1\r\nx\r\n" * 2**15 + b"0\r\n\r\n"),
        ),
        Case("that nobody reads", request(b"POST", b"/", b"Content-Length: 5", body=b"hello"), 200, answer(read=False)),
    )
]

PROXIES = [
    Case(f"proxy: {name}", request(b"GET", b"/", *fields))
    for name, fields in {
        "one address": (b"X-Forwarded-For: 203.0.113.7",),
        "an address with a port": (b"X-Forwarded-For: 203.0.113.7:1234",),
        "an address of IPv6": (b"X-Forwarded-For: [2001:db8::1]:99",),
        "several addresses": (b"X-Forwarded-For: 203.0.113.7, 198.51.100.9, 127.0.0.1",),
        "several fields": (b"X-Forwarded-For: 203.0.113.7", b"X-Forwarded-For: 198.51.100.9"),
        "an empty address": (b"X-Forwarded-For:",),
        "no address": (b"X-Forwarded-For: unknown, \xff",),
        "https": (b"X-Forwarded-Proto: https",),
        "a scheme that nobody knows": (b"X-Forwarded-Proto: gopher",),
        "everything": (
            b"X-Forwarded-For: 203.0.113.7",
            b"X-Forwarded-Proto: https",
            b"X-Forwarded-Host: shop.example",
            b"X-Forwarded-Port: 443",
            b"X-Real-IP: 203.0.113.7",
        ),
    }.items()
]

# Refused after the handler was, or was about to be, called.
REFUSED_LATE = [
    Case(
        "a pipelined request that is refused",
        request(target=b"/1") + request(b"GE(T)", b"/2"),
        {"httptools": (400, 0), "h11": (200, 400)},
        methods=(b"GET", b"GET"),
    ),
    Case("a broken chunk", request(b"POST", b"/", b"Transfer-Encoding: chunked", body=b"xyz\r\nabc\r\n"), 400),
    Case(
        "a broken chunk after a good one",
        request(b"POST", b"/", b"Transfer-Encoding: chunked", body=b"3\r\nabc\r\nxyz\r\n"),
        400,
    ),
]

CASES = METHODS + TARGETS + VERSIONS + PIPELINED + FIELDS + BODIES + PROXIES


def same(pair: Pair, case: Case) -> None:
    direct, forwarded = pair.both_outcomes(case)
    assert direct.statuses == case.statuses(pair.configuration), "the case is not what its name says"
    assert {facts["app"] for facts in direct.seen} <= {"app 1"}
    assert len(direct.seen) >= sum(status == 200 for status in direct.statuses)
    assert forwarded == direct


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forwarded_request_is_the_same_request(pair: Pair, case: Case) -> None:
    same(pair, case)


@pytest.mark.parametrize("case", REFUSED_LATE, ids=str)
def test_request_that_proves_broken_is_refused_alike_and_never_taken_for_a_whole_one(pair: Pair, case: Case) -> None:
    outcomes = []
    for worker in pair.ways:
        outcomes.append(pair.outcome(case, worker))
        pair.nothing_is_left()
        posted = [seen for seen in pair.board.seen if seen.scope["method"] == "POST"]
        assert not any(seen.complete for seen in posted)
    direct, forwarded = outcomes
    assert direct.statuses == case.statuses(pair.configuration), "the case is not what its name says"
    assert (forwarded.replies, forwarded.kept) == (direct.replies, direct.kept)


def test_handler_sees_the_callers_own_address_and_the_listener_that_it_reached(pair: Pair) -> None:
    for outcome in pair.both_outcomes(Case("any", request())):
        (facts,) = outcome.seen
        assert facts["server"] == "the listener's"
        assert facts["client"] == "the caller's"
        assert facts["scheme"] == ("https" if pair.configuration.tls else "http")
        assert facts["state"] == {"made by": "app 1"}


def test_pipelined_requests_each_reach_whom_they_belong_to(pair: Pair) -> None:
    nobodys = request(target=b"/2").replace(b"Cookie: " + COOKIE + b"\r\n", b"")
    case = Case("any", request(target=b"/1") + nobodys + request(target=b"/3"), methods=(b"GET",) * 3)
    for worker, name in zip(pair.ways, ("app 1", "app 2"), strict=True):
        outcome = pair.outcome(case, worker)
        assert outcome.statuses == (200, 200, 200)
        assert [facts["app"] for facts in outcome.seen] == ["app 1", name, "app 1"]


ODD: list[Configuration] = [
    Configuration(http, unix=unix, forwarder=forwarder, server=server)
    for forwarder in FORWARDERS
    for http in ("httptools", "h11")
    for unix, server in (
        (False, {"root_path": "/mounted/at"}),
        (False, {"forwarded_allow_ips": "192.0.2.1"}),
        (False, {"forwarded_allow_ips": "127.0.0.0/8,203.0.113.0/24"}),
        (False, {"forwarded_allow_ips": "*"}),
        (True, {"forwarded_allow_ips": "*"}),
        (False, {"proxy_headers": False}),
        (False, {"date_header": False}),
        (False, {"server_header": False}),
        (False, {"headers": [("X-Server", "One"), ("Server", "mine"), ("X-Server", "Two")]}),
    )
]


@pytest.fixture(scope="module", params=ODD, ids=str)
def odd_pair(request: pytest.FixtureRequest, certificate: tuple[str, str]) -> Iterator[Pair]:
    """A pair whose servers are set otherwise than by default."""
    with running_pair(request.param, certificate) as pair:
        yield pair


@pytest.mark.parametrize("case", [*METHODS[:3], *TARGETS, *PROXIES], ids=str)
def test_forwarded_request_is_the_same_under_odd_settings(odd_pair: Pair, case: Case) -> None:
    same(odd_pair, case)
