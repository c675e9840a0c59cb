from __future__ import annotations

import asyncio
import json
import re

import pytest
from starlette.types import ASGIApp, Message, Scope

from gym_gunicorn.problems import EXCHANGE_BROKEN, OWNER_BUSY, SESSION_GONE, Problem

PROBLEMS = pytest.mark.parametrize(
    "problem", [SESSION_GONE, OWNER_BUSY, EXCHANGE_BROKEN], ids=["session_gone", "owner_busy", "exchange_broken"]
)
HTTP: Scope = {"type": "http", "method": "GET", "path": "/", "headers": []}


def events_of(app: ASGIApp, scope: Scope) -> list[Message]:
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("an error is answered without reading the request")

    async def send(message: Message) -> None:
        sent.append(message)

    async def called() -> None:
        await app(dict(scope), receive, send)

    asyncio.run(called())
    return sent


def headers_of(message: Message) -> dict[bytes, bytes]:
    headers = dict(message["headers"])
    assert len(headers) == len(message["headers"])
    return headers


@pytest.mark.parametrize(("problem", "status"), [(SESSION_GONE, 410), (OWNER_BUSY, 503), (EXCHANGE_BROKEN, 502)])
def test_a_problem_has_its_status_in_head_and_body(problem: Problem, status: int) -> None:
    start, body = events_of(problem, HTTP)
    assert (start["type"], start["status"]) == ("http.response.start", status)
    assert json.loads(body["body"])["status"] == status


@PROBLEMS
def test_a_problem_is_a_problem_detail_of_rfc_9457(problem: Problem) -> None:
    start, body = events_of(problem, HTTP)
    detail = json.loads(body["body"])
    assert headers_of(start)[b"content-type"] == b"application/problem+json"
    assert detail.keys() == {"type", "title", "status", "detail"}
    assert detail["type"].startswith("urn:gym-gunicorn:")
    assert detail["title"] and detail["detail"]


@PROBLEMS
def test_a_problem_is_complete_and_as_long_as_announced(problem: Problem) -> None:
    start, body = events_of(problem, HTTP)
    assert headers_of(start)[b"content-length"] == str(len(body["body"])).encode()
    assert body["type"] == "http.response.body"
    assert not body.get("more_body", False)


@PROBLEMS
def test_a_problem_is_not_to_be_stored(problem: Problem) -> None:
    assert headers_of(events_of(problem, HTTP)[0])[b"cache-control"] == b"no-store"


def test_only_a_busy_owner_is_worth_asking_again() -> None:
    assert int(headers_of(events_of(OWNER_BUSY, HTTP)[0])[b"retry-after"]) > 0
    assert b"retry-after" not in headers_of(events_of(SESSION_GONE, HTTP)[0])
    assert b"retry-after" not in headers_of(events_of(EXCHANGE_BROKEN, HTTP)[0])


@PROBLEMS
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_a_problem_names_no_owner_and_sets_no_cookie(problem: Problem, kind: str) -> None:
    cookie = (b"cookie", b"session=c0ffeec0ffee")
    scope = {**HTTP, "type": kind, "headers": [cookie], "extensions": {"websocket.http.response": {}}}
    start, body = events_of(problem, scope)
    said = repr(start) + body["body"].decode()
    assert re.search(r"[0-9a-f]{12}", said) is None
    assert "set-cookie" not in said


@PROBLEMS
def test_a_handshake_is_refused_with_the_whole_problem_where_the_server_can(problem: Problem) -> None:
    scope = {**HTTP, "type": "websocket", "extensions": {"websocket.http.response": {}}}
    start, body = events_of(problem, scope)
    http_start, http_body = events_of(problem, HTTP)
    assert start == {**http_start, "type": "websocket.http.response.start"}
    assert body == {**http_body, "type": "websocket.http.response.body"}


@PROBLEMS
@pytest.mark.parametrize("extra", [{}, {"extensions": {}}, {"extensions": {"tls": {}}}], ids=repr)
def test_a_handshake_is_refused_plainly_where_the_server_can_not(problem: Problem, extra: Scope) -> None:
    assert events_of(problem, {**HTTP, "type": "websocket", **extra}) == [{"type": "websocket.close"}]


def test_what_a_middleware_adds_to_one_problem_is_not_in_the_next() -> None:
    first = events_of(SESSION_GONE, HTTP)[0]
    first["headers"].append((b"access-control-allow-origin", b"*"))
    assert b"access-control-allow-origin" not in headers_of(events_of(SESSION_GONE, HTTP)[0])


@PROBLEMS
def test_a_problem_with_a_header_more_is_otherwise_the_same(problem: Problem) -> None:
    start, body = events_of(problem, HTTP)
    one = problem.with_header(b"set-cookie", b"a=null")
    two = one.with_header(b"set-cookie", b"b=null")
    fields = [(b"set-cookie", b"a=null"), (b"set-cookie", b"b=null")]
    assert events_of(one, HTTP) == [{**start, "headers": start["headers"] + fields[:1]}, body]
    assert events_of(two, HTTP) == [{**start, "headers": start["headers"] + fields}, body]
    assert events_of(problem, HTTP) == [start, body]
