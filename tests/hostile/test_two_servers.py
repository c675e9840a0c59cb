"""Two gunicorn servers of one user, side by side: neither serves, nor as much as connects to, the other's sessions."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.calls import Reply, Session, ask, stopped
from tests.gunicorn_server import GunicornServer, errors, gunicorn_server
from tests.hostile.forging import session_cookie

SECRET, OTHER_SECRET = "a secret of the tests", "another secret of the tests"


@contextmanager
def counters(secret: str) -> Iterator[GunicornServer]:
    """The quick-start app on two workers."""
    with gunicorn_server(workers=2, env={"SESSION_SECRET": secret}) as server:
        yield server


@pytest.fixture(scope="module")
def mine() -> Iterator[GunicornServer]:
    with counters(SECRET) as server:
        yield server


@pytest.fixture(scope="module")
def same_secret() -> Iterator[GunicornServer]:
    with counters(SECRET) as server:
        yield server


@pytest.fixture(scope="module")
def other_secret() -> Iterator[GunicornServer]:
    with counters(OTHER_SECRET) as server:
        yield server


def post(server: GunicornServer, path: str, body: bytes = b"{}", session: Session | None = None) -> Reply:
    return ask(server, path, session, method="POST", body=body)


def seeded(server: GunicornServer) -> Session:
    session = Session()
    assert post(server, "/seed_session", b'{"initial_count": 7}', session).status == 200
    return session


def with_cookie(value: str) -> Session:
    session = Session()
    session.cookie = f"session={value}"
    return session


def value_of(session: Session) -> object:
    assert session.cookie is not None
    return session.cookie.partition("=")[2]


def sockets_of(server: GunicornServer) -> Counter[str]:
    """Count the kernel's sockets at the private paths of a server: listeners, and connections to them."""
    paths = {str(path) for directory in server.directories() for path in directory.glob("*.sock")}
    lines = Path("/proc/net/unix").read_text().splitlines()
    return Counter(line.split()[-1] for line in lines if line.split()[-1] in paths)


@contextmanager
def untouched(server: GunicornServer) -> Iterator[None]:
    """Fail where anybody connects to a private socket of ``server``, whose workers stand still and accept nothing."""
    with stopped(*server.workers()):
        before = sockets_of(server)
        assert before
        yield
        assert sockets_of(server) == before


def test_session_of_a_server_with_the_same_secret_gets_410_and_is_served_by_neither(
    mine: GunicornServer, same_secret: GunicornServer
) -> None:
    session = seeded(mine)
    with untouched(mine):
        # Its own workers can't answer now: whoever asked them would wait.
        for _ in range(20):
            reply = post(same_secret, "/increment_counter", b'{"count": 1}', session)
            assert reply.status == 410
            assert reply.headers.get("set-cookie") is None
    assert post(mine, "/get_counter_value", session=session).json() == {"count": 7}


def test_session_of_a_server_with_another_secret_is_none_and_starts_over(
    mine: GunicornServer, other_secret: GunicornServer
) -> None:
    session = seeded(mine)
    cookie = session.cookie
    with untouched(mine):
        for _ in range(10):
            assert post(other_secret, "/get_counter_value", session=with_cookie(str(value_of(session)))).json() == {
                "count": 0
            }
        new = with_cookie(str(value_of(session)))
        assert post(other_secret, "/seed_session", b'{"initial_count": 1}', new).status == 200
        assert new.owner in other_secret.owners()
    session.cookie = cookie
    assert post(mine, "/get_counter_value", session=session).json() == {"count": 7}


def test_owner_of_another_server_in_a_cookie_of_its_own_secret_gets_410(
    mine: GunicornServer, other_secret: GunicornServer
) -> None:
    with untouched(mine):
        for owner in mine.owners():
            forged = session_cookie({"session_id": "x", "gym_worker": owner}, secret=OTHER_SECRET)
            for _ in range(10):
                assert post(other_secret, "/get_counter_value", session=with_cookie(forged)).status == 410


def test_path_to_another_servers_socket_in_a_signed_cookie_is_no_owner(
    mine: GunicornServer, same_secret: GunicornServer
) -> None:
    (directory,) = mine.directories()
    with untouched(mine):
        for owner in mine.owners():
            for path in (
                f"{directory}/{owner}",
                f"{directory}/{owner}.sock",
                f"../../{directory.parent.name}/{directory.name}/{owner}",
                f"..{directory}/{owner}",
                f"{owner}\0",
                f"/{owner}",
            ):
                forged = with_cookie(session_cookie({"session_id": "x", "gym_worker": path}, secret=SECRET))
                reply = post(same_secret, "/get_counter_value", session=forged)
                assert reply.json() == {"count": 0}
                # Adopted by a worker of the server that it reached.
                assert forged.owner in same_secret.owners()


def test_servers_log_the_losses_and_no_error(
    mine: GunicornServer, same_secret: GunicornServer, other_secret: GunicornServer
) -> None:
    session = seeded(mine)
    assert post(same_secret, "/get_counter_value", session=session).status == 410
    assert f"{session.owner}" in same_secret.log()
    for server in (mine, same_secret, other_secret):
        assert errors(server.log()) == []
        assert len(server.owners()) == 2


def test_connection_to_a_private_socket_would_be_seen(mine: GunicornServer) -> None:
    with pytest.raises(AssertionError), untouched(mine), socket.socket(socket.AF_UNIX) as probe:
        (directory,) = mine.directories()
        probe.connect(str(next(directory.glob("*.sock"))))
