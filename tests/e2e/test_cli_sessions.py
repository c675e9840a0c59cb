"""``gym-gunicorn sessions``: whose a session of a real server is, whether its owner lives, and why not."""

from __future__ import annotations

import os
import signal
from http.client import HTTPConnection
from pathlib import Path

import pytest
from itsdangerous import URLSafeSerializer

from gym_gunicorn.owner import new_session_id
from tests.e2e.calls import Journal, Session, ask, owner_of, probe_server, session_at, stopped
from tests.e2e.command import command
from tests.gunicorn_server import CONFIG, GunicornServer, until


def asked(server: GunicornServer, *arguments: str, text: str = "", status: int = 0) -> str:
    done = command("sessions", *arguments, "--sockets", server.parent, text=text, status=status)
    assert done.stderr == ""
    return done.stdout


def cookie_of(session: Session) -> str:
    assert session.cookie is not None
    return session.cookie.partition("=")[2]


@pytest.mark.parametrize("form", ["{}", "session={}; path=/; httponly", "Cookie: a=b; session={}", '"{}"'])
@pytest.mark.parametrize("way", ["argument", "standard input"])
def test_cookie_of_a_living_owner(form: str, way: str) -> None:
    with probe_server() as server:
        first, _ = server.workers()
        session = session_at(server, first)
        text = form.format(cookie_of(session))
        said = asked(server, text) if way == "argument" else asked(server, text=text + "\n")
        assert f"owner {owner_of(server, first)} lives: worker (pid {first})" in said
        assert "signature not checked" in said
        assert str(server.directories()[0]) in said


def test_token_of_a_living_owner() -> None:
    with probe_server() as server:
        first, _ = server.workers()
        owner = owner_of(server, first)
        for data in ({"gym_worker": owner}, {"sid": new_session_id(owner)}):
            token = URLSafeSerializer("any secret", "salt").dumps(data)
            assert f"owner {owner} lives: worker (pid {first})" in asked(server, "-", text=f"X-Token: {token}")


def test_owner_id_of_a_living_owner() -> None:
    with probe_server() as server:
        first, _ = server.workers()
        said = f"lives: worker (pid {first}) is serving"
        until(lambda: said in asked(server, owner_of(server, first)), "it is found")


def test_owner_that_is_stopped_by_a_signal_lives() -> None:
    with probe_server() as server:
        first, _ = server.workers()
        owner = owner_of(server, first)
        with stopped(first):
            assert "is stopped by a signal" in asked(server, owner)


def test_owner_whose_process_is_dead() -> None:
    with probe_server() as server:
        first, _ = server.workers()
        owner = owner_of(server, first)
        with stopped(server.pid):
            os.kill(first, signal.SIGKILL)
            until(lambda: "is dead" in _said(server, owner), "it is dead")
            assert f"its process (pid {first}) has ended" in asked(server, owner, status=1)
        until(lambda: "is gone, or was never here" in _said(server, owner), "the arbiter has noticed")
        asked(server, owner, status=1)


def _said(server: GunicornServer, owner: str) -> str:
    return command("sessions", owner, "--sockets", server.parent, status=None).stdout


def test_owner_that_is_stopping(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with probe_server(journal=journal) as server:
        first, _ = server.workers()
        owner = owner_of(server, first)
        connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
        try:
            with stopped(*(pid for pid in server.workers() if pid != first)):
                connection.request("GET", "/hold?name=it")
                journal.wait_for(f"hold it {first}")
                os.kill(first, signal.SIGTERM)
                until(lambda: "is stopping" in _said(server, owner), "it is stopping")
                assert "new requests of the session get 410" in asked(server, owner, status=1)
            journal.release("it")
            assert connection.getresponse().status == 200
        finally:
            connection.close()


def test_owner_that_nobody_has_heard_of() -> None:
    with probe_server() as server:
        said = asked(server, "0123456789ab", status=1)
        assert "is gone, or was never here" in said


def test_session_of_another_server_is_not_of_this_one() -> None:
    with probe_server() as server, probe_server() as other:
        session = session_at(other, other.workers()[0])
        assert "is gone, or was never here" in asked(server, cookie_of(session), status=1)
        assert "lives" in asked(other, cookie_of(session))


def test_session_of_an_app_with_another_owner_key() -> None:
    config = CONFIG.replace("directory=", 'owner_key="home", directory=')
    with probe_server(config=config) as server:
        session = Session()
        ask(server, "/count", session, method="POST")
        assert "--owner-key" in asked(server, cookie_of(session), status=1)
        assert " lives: " in asked(server, cookie_of(session), "--owner-key", "home")


def test_session_that_names_no_owner() -> None:
    with probe_server(workers=1) as unrouted, probe_server() as server:
        session = Session()
        ask(unrouted, "/count", session, method="POST")
        assert "names no owner" in asked(server, cookie_of(session), status=1)


def test_cookie_that_was_cut_short() -> None:
    with probe_server() as server:
        session = session_at(server, server.workers()[0])
        said = asked(server, cookie_of(session)[: len(cookie_of(session)) // 3], status=1)
        assert "It may be cut short" in said


def test_where_no_server_runs_it_says_where_it_looked(tmp_path: Path) -> None:
    done = command("sessions", "0123456789ab", "--sockets", tmp_path, status=1)
    assert f"No running server of this user with session routing in {tmp_path}" in done.stdout


def test_nothing_of_the_cookie_is_printed_but_its_owner() -> None:
    with probe_server() as server:
        session = session_at(server, server.workers()[0])
        said = asked(server, text=f"Cookie: {session.cookie}")
        assert session.owner is not None and session.owner in said
        for secret in (*cookie_of(session).split("."), session.data["id"], "of the tests"):
            assert secret not in said


def test_owner_whose_figures_can_not_be_read_lives_where_it_listens() -> None:
    with probe_server() as server:
        first, _ = server.workers()
        owner = owner_of(server, first)
        (path,) = server.parent.glob(f"gym-gunicorn-*/{owner}.figures")
        with stopped(first):
            path.with_suffix(".new").write_bytes(b"")
            path.with_suffix(".new").rename(path)
            assert "whose figures can't be read" in asked(server, owner)
        with stopped(server.pid):
            os.kill(first, signal.SIGKILL)
            until(lambda: "nobody listens" in _said(server, owner), "nobody listens")
            asked(server, owner, status=1)
