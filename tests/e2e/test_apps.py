"""Apps of many kinds behind real gunicorn, and what their handlers and callers see."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.calls import (
    Journal,
    Session,
    UnixConnection,
    ask,
    connection_to,
    count,
    owner_of,
    probe_server,
    session_at,
    stopped,
)
from tests.gunicorn_server import CONFIG, GunicornServer, errors, gunicorn_server, is_alive, until
from tests.sessions import play


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path)


# Apps of many kinds

FASTAPI = "tests.e2e.apps.fastapi_app:app"


@pytest.mark.parametrize("app", [FASTAPI, "tests.e2e.apps.wrapped:app", "tests.e2e.apps.sessions_around:app"])
def test_unmodified_app_is_served_and_its_sessions_are_right(app: str) -> None:
    with gunicorn_server(app=app) as server:
        assert asyncio.run(play(server.url, 60)) == {"right": 60}
        assert errors(server.log()) == []
        assert "[WARNING]" not in server.log()


def test_app_that_cannot_be_looked_into_brings_its_stamp_and_its_sessions_are_right() -> None:
    settings = "secret_key='nobody sees this', session_cookie='foreign', directory="
    config = CONFIG.replace("directory=", settings)
    with gunicorn_server(app="tests.e2e.apps.foreign:app", config=config) as server:
        assert asyncio.run(play(server.url, 60)) == {"right": 60}
        assert errors(server.log()) == []
        assert "[WARNING]" not in server.log()


def post(server: GunicornServer, path: str, session: Session, headers: dict[str, str], **values: int) -> Any:
    body = json.dumps(values).encode()
    fields = {"Content-Type": "application/json", **headers}
    return ask(server, path, session, method="POST", body=body, headers=fields)


def test_middlewares_of_the_app_run_once_wherever_a_request_lands() -> None:
    with gunicorn_server(app=FASTAPI) as server:
        session = Session()
        origin = {"Origin": "https://page.example"}
        replies = [post(server, "/seed_session", session, origin, initial_count=1)]
        replies += [post(server, "/increment_counter", session, origin, count=1) for _ in range(20)]
        for reply in replies:
            assert reply.status == 200
            assert reply.headers.get_all("x-served") == ["once"]
            assert reply.headers.get_all("access-control-allow-origin") == ["https://page.example"]
            assert reply.headers.get_all("access-control-allow-credentials") == ["true"]


def test_script_of_another_origin_can_read_that_its_session_is_gone() -> None:
    with gunicorn_server(app=FASTAPI, workers=2) as server:
        session = Session()
        origin = {"Origin": "https://page.example"}
        assert post(server, "/seed_session", session, origin, initial_count=1).status == 200
        assert session.owner is not None
        killed = server.pid_of(session.owner)
        os.kill(killed, signal.SIGKILL)
        until(lambda: not is_alive(killed), "the owner is dead")
        reply = post(server, "/verify", session, origin, expected_count=1)
        assert reply.status == 410
        assert reply.headers["content-type"] == "application/problem+json"
        assert reply.headers["cache-control"] == "no-store"
        assert reply.headers.get_all("access-control-allow-origin") == ["https://page.example"]
        assert reply.headers.get_all("access-control-allow-credentials") == ["true"]
        assert json.loads(reply.body)["title"] == "Session gone"
        assert session.owner.encode() not in reply.body
        (line,) = [line for line in server.log().splitlines() if "was not answered by its owner" in line]
        assert session.owner in line


# The quick-start app


@pytest.fixture(scope="module")
def quick_start() -> Iterator[GunicornServer]:
    with gunicorn_server(workers=2) as server:
        yield server


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param(b"", "the body is not JSON", id="empty"),
        pytest.param(b"{", "the body is not JSON", id="cut off"),
        pytest.param(b"\xff\xfe\xfd", "the body is not JSON", id="not text"),
        pytest.param(b"[" * 200_000, "the body is not JSON", id="deeply nested"),
        pytest.param(b'{"count": ' + b"9" * 5_000 + b"}", "the body is not JSON", id="more digits than Python reads"),
        pytest.param(b"[]", "the body is not a JSON object", id="a list"),
        pytest.param(b"null", "the body is not a JSON object", id="null"),
        pytest.param(b"7", "the body is not a JSON object", id="a number"),
        pytest.param(b"{}", "'count' must be an integer of at most 64 bits", id="missing"),
        pytest.param(b'{"count": null}', "'count' must be an integer of at most 64 bits", id="nothing"),
        pytest.param(b'{"count": "7"}', "'count' must be an integer of at most 64 bits", id="text"),
        pytest.param(b'{"count": 7.0}', "'count' must be an integer of at most 64 bits", id="a fraction"),
        pytest.param(b'{"count": 1e999}', "'count' must be an integer of at most 64 bits", id="infinite"),
        pytest.param(b'{"count": NaN}', "'count' must be an integer of at most 64 bits", id="not a number"),
        pytest.param(b'{"count": true}', "'count' must be an integer of at most 64 bits", id="true"),
        pytest.param(b'{"count": [7]}', "'count' must be an integer of at most 64 bits", id="a list in it"),
    ],
)
def test_quick_start_app_refuses_bad_input_with_the_reason(
    quick_start: GunicornServer, body: bytes, reason: str
) -> None:
    reply = ask(quick_start, "/increment_counter", method="POST", body=body)
    assert (reply.status, json.loads(reply.body)) == (422, {"detail": reason})


def test_quick_start_app_refuses_a_form(quick_start: GunicornServer) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    reply = ask(quick_start, "/seed_session", method="POST", body=b"initial_count=1", headers=headers)
    assert (reply.status, json.loads(reply.body)) == (422, {"detail": "the body is not JSON"})


@pytest.mark.parametrize("path", ["/seed_session", "/increment_counter", "/get_counter_value", "/verify"])
def test_quick_start_app_answers_posts_only(quick_start: GunicornServer, path: str) -> None:
    reply = ask(quick_start, path)
    assert reply.status == 405
    assert reply.headers["allow"] == "POST"


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_quick_start_app_does_not_know_other_paths(quick_start: GunicornServer, method: str) -> None:
    assert ask(quick_start, "/nowhere", method=method).status == 404


def test_counter_that_grows_beyond_what_can_be_printed_is_no_server_error(quick_start: GunicornServer) -> None:
    session = Session()
    huge = b"9" * 4_300
    statuses = [
        ask(quick_start, "/seed_session", session, method="POST", body=b'{"initial_count": %s}' % huge).status,
        ask(quick_start, "/increment_counter", session, method="POST", body=b'{"count": %s}' % huge).status,
        ask(quick_start, "/get_counter_value", session, method="POST").status,
    ]
    assert set(statuses) <= {200, 422}, statuses


# What a handler and an operator see


def test_handler_sees_the_callers_own_request_and_address_though_it_is_forwarded() -> None:
    with probe_server() as server:
        owner, receiver = server.workers()
        session = session_at(server, owner)
        with connection_to(server, owner) as local, connection_to(server, receiver) as forwarded:
            seen = []
            for connection in (local, forwarded):
                headers = {"X-Case": "a", "User-Agent": "a test", "Accept-Encoding": "br"}
                seen.append(ask(connection, "/seen?a=%2F&b=c+d&&e", session, headers=headers).json())
                assert seen[-1].pop("client") == list(connection.sock.getsockname())
        assert seen[0] == seen[1]
        assert seen[0]["pid"] == owner
        assert seen[0]["query_string"] == "a=%2F&b=c+d&&e"


def test_handler_sees_the_address_that_a_trusted_proxy_names_though_it_is_forwarded() -> None:
    with probe_server() as server:
        owner, receiver = server.workers()
        session = session_at(server, owner)
        headers = {"X-Forwarded-For": "203.0.113.9", "X-Forwarded-Proto": "https"}
        for pid in (owner, receiver):
            with connection_to(server, pid) as connection:
                seen = ask(connection, "/seen", session, headers=headers).json()
            assert (seen["pid"], seen["client"], seen["scheme"]) == (owner, ["203.0.113.9", 0], "https")


def test_access_log_has_one_line_a_request_with_the_callers_address() -> None:
    with probe_server("--access-logfile", "-") as server:
        owner, receiver = server.workers()
        session = session_at(server, owner)
        with connection_to(server, owner) as local, connection_to(server, receiver) as forwarded:
            host, port = local.sock.getsockname()
            assert ask(local, "/seen?which=local", session).json()["pid"] == owner
            expected = [f'{host}:{port} - "GET /seen?which=local HTTP/1.1" 200']
            host, port = forwarded.sock.getsockname()
            assert ask(forwarded, "/seen?which=forwarded", session).json()["pid"] == owner
            expected += [f'{host}:{port} - "GET /seen?which=forwarded HTTP/1.1" 200']
        assert server.stop() == 0
        assert [line for line in server.log().splitlines() if "which=" in line] == expected


def test_app_can_log_the_owner_of_a_session(journal: Journal) -> None:
    with probe_server(journal=journal) as server:
        owner, receiver = server.workers()
        session = session_at(server, owner)
        with connection_to(server, receiver) as connection:
            assert count(connection, session) == 2
        lines = [line for line in journal.lines() if line.startswith("owner")]
        assert lines == [f"owner {session.owner} {owner}"] * 2


def test_app_of_one_worker_has_no_owner_to_log(journal: Journal) -> None:
    with probe_server(journal=journal, workers=1) as server:
        (pid,) = server.workers()
        assert count(server, Session()) == 1
        assert f"owner None {pid}" in journal.lines()


def test_request_without_our_head_is_handled_where_it_arrives_whosever_session_it_is() -> None:
    with probe_server() as server:
        owner, other = server.workers()
        session = session_at(server, owner)
        (path,) = server.parent.glob(f"gym-gunicorn-*/{owner_of(server, other)}.sock")
        connection = UnixConnection(path)
        assert ask(connection, "/count", session, method="POST").json() == {"count": 1, "pid": other}
        connection.close()
        assert count(server, session) == 2


# Bodies and callers that come and go


def test_body_is_streamed_both_ways_through_a_forward() -> None:
    with probe_server() as server:
        owner, receiver = server.workers()
        session = session_at(server, owner)
        assert session.cookie is not None
        with connection_to(server, receiver) as connection:
            connection.putrequest("POST", "/echo/")
            connection.putheader("Cookie", session.cookie)
            connection.putheader("Transfer-Encoding", "chunked")
            connection.endheaders()
            response = connection.response_class(connection.sock, method="POST")
            for number in range(3):
                # The next piece is sent when the one before has come back.
                piece = f"piece {number}".encode()
                connection.send(b"%x\r\n%s\r\n" % (len(piece), piece))
                if number == 0:
                    response.begin()
                    assert response.headers["x-pid"] == str(owner)
                assert response.read1() == piece
            connection.send(b"0\r\n\r\n")
            assert response.read() == b""
            response.close()


def test_large_body_comes_back_whole_through_a_forward() -> None:
    body = os.urandom(5_000_000)

    def send(connection: HTTPConnection) -> None:
        connection.send(body)

    with ThreadPoolExecutor() as pool, probe_server() as server:
        owner, receiver = server.workers()
        session = session_at(server, owner)
        assert session.cookie is not None
        with connection_to(server, receiver) as connection:
            connection.putrequest("POST", "/echo/")
            connection.putheader("Cookie", session.cookie)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders()
            # While it is being sent, it comes back.
            sent = pool.submit(send, connection)
            response = connection.response_class(connection.sock, method="POST")
            response.begin()
            assert response.headers["x-pid"] == str(owner)
            assert response.read() == body
            sent.result()
            response.close()


def test_caller_that_leaves_is_seen_by_the_owners_handler(journal: Journal) -> None:
    with probe_server(journal=journal) as server:
        owner, receiver = server.workers()
        session = session_at(server, owner)
        with connection_to(server, receiver) as connection:
            _send(connection, "/listen", session)
            journal.wait_for(f"listen {owner}")
        journal.wait_for(f"disconnected {owner}")
        assert count(server, session) == 2


def test_caller_that_leaves_cancels_the_forward(journal: Journal) -> None:
    config = CONFIG.replace("directory=", "max_forwards=1, directory=")
    with probe_server(journal=journal, config=config) as server:
        owner, receiver = server.workers()
        session = session_at(server, owner)
        with connection_to(server, receiver) as leaving, connection_to(server, receiver) as other:
            _send(leaving, "/hold?name=never", session)
            journal.wait_for(f"hold never {owner}")
            assert ask(other, "/count", session, method="POST").status == 503
            leaving.close()
            until(lambda: ask(other, "/count", session, method="POST").status == 200, "the forward has ended")


def test_caller_that_leaves_cancels_a_handler_that_does_not_listen(journal: Journal) -> None:
    with probe_server(journal=journal, app="tests.e2e.apps.cancelling:app") as server:
        owner, receiver = server.workers()
        session = session_at(server, owner)
        with connection_to(server, owner) as local:
            _send(local, "/compute", session)
            journal.wait_for(f"compute {owner}")
        until(lambda: journal.lines().count(f"cleaned up {owner}") == 1, "the local handler is cancelled")
        with connection_to(server, receiver) as forwarded:
            _send(forwarded, "/compute", session)
            until(lambda: journal.lines().count(f"compute {owner}") == 2, "the request has been forwarded")
        until(lambda: journal.lines().count(f"cleaned up {owner}") == 2, "the handler at the owner is cancelled")
        assert errors(server.log()) == []


def _send(connection: HTTPConnection, path: str, session: Session) -> None:
    """Send a request and do not wait for the reply."""
    connection.request("GET", path, headers={"Cookie": session.cookie or ""})


# Owners that are busy or stand still


def test_more_forwards_than_allowed_get_503_until_there_is_room(journal: Journal) -> None:
    config = CONFIG.replace("directory=", "max_forwards=2, directory=")
    with ThreadPoolExecutor() as pool, probe_server(journal=journal, config=config) as server:
        owner, receiver = server.workers()
        session = session_at(server, owner)
        with (
            connection_to(server, receiver) as first,
            connection_to(server, receiver) as second,
            connection_to(server, receiver) as third,
            connection_to(server, owner) as local,
        ):
            answers = [
                pool.submit(ask, first, "/hold?name=first", session),
                pool.submit(ask, second, "/hold?name=second", session),
            ]
            journal.wait_for(f"hold first {owner}")
            journal.wait_for(f"hold second {owner}")
            refused = ask(third, "/count", session, method="POST")
            assert refused.status == 503
            assert int(refused.headers["retry-after"]) > 0
            assert refused.headers["content-type"] == "application/problem+json"
            # The owner itself is not busy.
            assert count(local, session) == 2
            journal.release("first")
            journal.release("second")
            assert [answer.result().status for answer in answers] == [200, 200]
            assert count(third, session) == 3


def test_caller_waits_for_an_owner_that_stands_still_and_is_answered_when_it_goes_on() -> None:
    with ThreadPoolExecutor() as pool, probe_server() as server:
        owner, receiver = server.workers()
        session = session_at(server, owner)
        with connection_to(server, receiver) as waiting, connection_to(server, receiver) as other:
            with stopped(owner):
                answer = pool.submit(count, waiting, session)
                # The receiver goes on meanwhile.
                for _ in range(50):
                    assert ask(other, "/pid").json() == {"pid": receiver}
                assert not answer.done()
            assert answer.result() == 2
